"""A sequence cut across processes: each has its tokens, K and V go round, and nobody holds the whole.

    python examples/02_ring.py
    torchrun --standalone --nproc-per-node 2 examples/02_ring.py

It prints, alone and on any number of processes:

    attention of 1001 tokens, causal  norm 61.34
    difference from one device         below 1e-5: True, of gradients too: True
    visible pairs, by rank             within 1 % of each other: True
"""

import torch
import torch.distributed as dist

import ringflash as rf

TOKENS, HEADS, KEY_HEADS, DIM = 1001, 8, 2, 32  # no length must divide


def main():
    if dist.is_torchelastic_launched():
        dist.init_process_group()  # NCCL where there are GPUs, gloo elsewhere
        if torch.cuda.is_available():
            torch.cuda.set_device(dist.get_node_local_rank())
    device = "cuda" if torch.cuda.is_available() else "cpu"

    # The ranks that share a sequence, and how it is cut: Zigzag gives each the same work under a causal mask.
    ring = rf.Ring(layout=rf.Zigzag())

    # Every rank draws the same whole sequence, here only to compare with; real data is cut by ring.shard as it is read.
    torch.manual_seed(0)
    whole = [torch.randn(1, TOKENS, heads, DIM).to(device).requires_grad_() for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    alone = rf.attention(*whole, mask=rf.Causal())
    alone_gradients = torch.autograd.grad(alone.square().sum(), whole)

    q, k, v = (ring.shard(x.detach()).requires_grad_() for x in whole)
    out = rf.attention(q, k, v, ring=ring, mask=rf.Causal(), length=TOKENS)
    gradients = torch.autograd.grad(out.square().sum(), (q, k, v))

    together = ring.gather(out.detach(), length=TOKENS)
    differences = [
        (ring.gather(mine, length=TOKENS) - theirs).abs().max().item()
        for mine, theirs in zip(gradients, alone_gradients, strict=True)
    ]
    # What a rank will do is known before anything runs: pairs, hops and bytes.
    pairs = rf.plan(rf.Causal(), ring.layout, TOKENS, ring.rank, ring.ranks).pairs_per_rank

    if ring.rank == 0:
        close = (together - alone).abs().max().item() < 1e-5
        close_too, is_fair = max(differences) < 1e-5, max(pairs) <= 1.01 * min(pairs)
        print(f"attention of {TOKENS} tokens, causal  norm {together.norm():.2f}")
        print(f"difference from one device         below 1e-5: {close}, of gradients too: {close_too}")
        print(f"visible pairs, by rank             within 1 % of each other: {is_fair}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
