"""The model that benchmarks/train.py trains: a GPT with rotary positions, which is told how to attend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ringflash.training import linear_cross_entropy


@dataclass(frozen=True)
class Size:
    layers: int = 24
    hidden: int = 2048
    heads: int = 16
    vocabulary: int = 50304


# (q, k, v) [B, S_local, H, D] -> out alike
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norms = nn.ModuleList(nn.RMSNorm(size.hidden) for _ in range(2))
        self.qkv = nn.Linear(size.hidden, 3 * size.hidden, bias=False)
        self.out = nn.Linear(size.hidden, size.hidden, bias=False)
        self.up = nn.Linear(size.hidden, 4 * size.hidden, bias=False)
        self.down = nn.Linear(4 * size.hidden, size.hidden, bias=False)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.out(attend(rotated(q, angles), rotated(k, angles), v).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.embedding = nn.Embedding(size.vocabulary, size.hidden)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.hidden)
        self.head = nn.Linear(size.hidden, size.vocabulary, bias=False)

    def forward(self, batch: Batch, attend: Attend, recomputed: Any) -> Tensor:
        """The sum of the losses of the tokens here. recomputed: options of checkpoint, or None."""
        dim = self.size.hidden // self.size.heads
        frequencies = 1e-4 ** (torch.arange(0, dim, 2, device=batch.positions.device) / dim)
        angles = batch.positions[0, :, None, None] * frequencies
        turned = angles.cos().to(self.head.weight.dtype), angles.sin().to(self.head.weight.dtype)
        x = self.embedding(batch.ids)
        for block in self.blocks:
            if recomputed is None:
                x = block(x, turned, attend)
            else:
                x = checkpoint(block, x, turned, attend, use_reentrant=False, **recomputed)
        return linear_cross_entropy(self.norm(x), self.head.weight, batch.labels).sum()


def rotated(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    (a, b), (cos, sin) = x.chunk(2, dim=-1), angles
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


@dataclass
class Batch:
    """[B, S] each: of whole sequences, or of this rank's part of them."""

    ids: Tensor
    labels: Tensor
    positions: Tensor

    @classmethod
    def drawn(cls, rows: int, length: int, vocabulary: int, device: str) -> Batch:
        generator = torch.Generator(device).manual_seed(0)
        ids = torch.randint(vocabulary, (rows, length + 1), device=device, generator=generator)
        positions = torch.arange(length, device=device).expand(rows, -1)
        return cls(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), positions.contiguous())
