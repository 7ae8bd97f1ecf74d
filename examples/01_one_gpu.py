"""Attention on one device: the shapes, masks as values, grouped heads, and what comes back. A GPU if there is one.

    python examples/01_one_gpu.py

It prints, on any machine:

    a window of 256 of 1000 tokens        out (2, 1000, 8, 64), like torch's: True
    gradients of q, k and v               like torch's: True
    keys that query 999 sees              256
    first tokens and a window, joined     keys that query 999 sees: 260
    one query at the end of 1000 keys     out (2, 1, 8, 64), as the last row of all: True
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

import ringflash as rf

BATCH, TOKENS, HEADS, KEY_HEADS, DIM = 2, 1000, 8, 2, 64


def show(what, *values):
    print(f"{what:37s}", *values)


def is_close(x, y):
    return bool((x - y).abs().max() < 1e-4)


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    # [batch, tokens, heads, dim]. Two key heads serve eight query heads, four each; nothing is repeated.
    q, k, v = (
        torch.randn(BATCH, TOKENS, heads, DIM, device=device, requires_grad=True)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    )

    # A mask is a value: which keys a query sees. Window(255, 0) is itself and the 255 tokens before it.
    window = rf.Window(255, 0)
    out, lse = rf.attention(q, k, v, mask=window, return_lse=True)

    position = torch.arange(TOKENS, device=device)
    distance = position[:, None] - position
    expected = scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=(distance >= 0) & (distance <= 255), enable_gqa=True
    ).transpose(1, 2)
    show("a window of 256 of 1000 tokens", f"out {tuple(out.shape)}, like torch's: {is_close(out, expected)}")

    ours = torch.autograd.grad(out.square().sum(), (q, k, v))
    theirs = torch.autograd.grad(expected.square().sum(), (q, k, v))
    same = all(is_close(a, b) for a, b in zip(ours, theirs, strict=True))
    show("gradients of q, k and v", f"like torch's: {same}")

    # lse is the natural log of the sum of exp(scores), [batch, tokens, heads]: with scores of 0 it counts the keys seen.
    zeros = torch.zeros_like(q[:1, :, :1])
    _, lse = rf.attention(zeros, zeros, zeros, mask=window, return_lse=True)
    show("keys that query 999 sees", round(lse[0, 999, 0].exp().item()))

    # `&` shows what both masks show, `|` what either does.
    joined = rf.FirstKeys(4) & rf.Causal() | window
    _, lse = rf.attention(zeros, zeros, zeros, mask=joined, return_lse=True)
    show("first tokens and a window, joined", "keys that query 999 sees:", round(lse[0, 999, 0].exp().item()))

    # Where there are fewer queries than keys, the last query stands at the last key, as in decoding.
    last = rf.attention(q[:, -1:], k, v, mask=rf.Causal())
    whole = rf.attention(q, k, v, mask=rf.Causal())
    show(
        "one query at the end of 1000 keys",
        f"out {tuple(last.shape)}, as the last row of all: {is_close(last, whole[:, -1:])}",
    )


if __name__ == "__main__":
    main()
