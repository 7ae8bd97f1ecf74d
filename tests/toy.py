"""A small transformer whose attention is handed in: the same weights run with a ring and, in one process, without ours."""

import torch
from torch import nn
from torch.nn import functional

WIDTH, HEADS, KEY_HEADS, DIM, VOCABULARY = 16, 4, 2, 4, 11


def rotate(x, positions):
    """Rotary embedding of x [B, S, H, DIM] at `positions` [S]."""
    angles = positions[:, None].to(x.dtype) * 100.0 ** -(torch.arange(DIM // 2, dtype=x.dtype) / (DIM // 2))
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KEY_HEADS) * DIM, bias=False)
        self.out = nn.Linear(HEADS * DIM, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, positions, attend):
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (-1, DIM)).split([HEADS, KEY_HEADS, KEY_HEADS], dim=2)
        x = x + self.out(attend(rotate(q, positions), rotate(k, positions), v).flatten(2))
        return x + self.down(functional.silu(self.up(self.second(x))))


class Transformer(nn.Module):
    """Logits [B, S, VOCABULARY] of tokens [B, S] that stand at `positions` [S], with attend(q, k, v) for attention."""

    def __init__(self, layers):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, positions, attend):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, positions, attend)
        return self.head(x)


def tokens_of(batch, length):
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


def torch_attention(seen):
    """attend() on one device by torch itself; seen: bool [S, S]."""

    def attend(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(1, 2)

    return attend


def loss_sum(logits, labels):
    """Cross entropy added up over the tokens that have a label."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
