"""A small transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

It is written once for one process and for many. Only three things know about other tokens: attention (which is given the
ring), the positions (which are given from outside, already sharded), and nothing else: norms, projections, the MLP and
the loss treat every token alone, so they do not care which tokens a rank happens to hold.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ringflash as rf

VOCABULARY = 256  # bytes


@dataclass(frozen=True)
class ModelConfig:
    dim: int
    layers: int
    heads: int
    kv_heads: int
    compute_dtype: torch.dtype = torch.float32
    backend: str | None = None
    activation_checkpointing: bool = False

    def __post_init__(self) -> None:
        if self.dim % self.heads:
            raise ValueError(f"ModelConfig: dim {self.dim} must be a multiple of heads {self.heads}")
        if self.head_dim % 2:
            raise ValueError(f"ModelConfig: head dim {self.head_dim} (dim / heads) must be even, rotary turns pairs")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"ModelConfig: heads {self.heads} must be a multiple of kv_heads {self.kv_heads}, "
                "each key head serves the same number of query heads"
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def hidden(self) -> int:
        """SwiGLU has three matrices where an MLP has two: 8/3 keeps the usual size. 64 keeps matmuls aligned."""
        return 64 * max(1, round(self.dim * 8 / 3 / 64))


class Linear(nn.Linear):
    """Weights are kept in fp32 and used in the dtype of the activations.

    FSDP's mixed precision hands over weights that are bf16 already, then the cast does nothing; in one process it is
    what FSDP would have done. So both runs compute the same thing, which --compare relies on.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        # A mean of squares in bf16 would keep 8 bits; the sum is taken in fp32.
        x_fp32 = x.float()
        scale = torch.rsqrt(x_fp32.square().mean(dim=-1, keepdim=True) + 1e-6)
        return (x_fp32 * scale).to(x.dtype) * self.weight.to(x.dtype)


def rotary_angles(positions: Tensor, head_dim: int, *, base: float = 10_000.0) -> Tensor:
    """Angles by which each pair of channels is turned.

        angle[s, i] = positions[s] * base ** (-2 i / head_dim)

    positions: [S] int64, the *real* positions of the tokens held here: a shard's own 0, 1, 2, ... would be wrong as soon
    as the sequence is cut. Returns [S, head_dim / 2] fp32.

    Source: Su et al., arXiv:2104.09864.
    """
    channels = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    return positions.float()[:, None] * base ** (-channels / head_dim)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn channel pairs (i, i + D/2) of x [B, S, H, D] by angles [S, D/2]; scores then depend on distance only."""
    cos, sin = angles.cos()[None, :, None], angles.sin()[None, :, None]  # [1, S, 1, D/2]
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention. The one place of the model that looks at other tokens, so the one that needs the ring."""

    def __init__(self, config: ModelConfig, ring: rf.Ring | None) -> None:
        super().__init__()
        self.head_dim, self.backend, self.ring = config.head_dim, config.backend, ring
        self.to_q = Linear(config.dim, config.heads * config.head_dim)
        self.to_k = Linear(config.dim, config.kv_heads * config.head_dim)
        self.to_v = Linear(config.dim, config.kv_heads * config.head_dim)
        self.to_out = Linear(config.heads * config.head_dim, config.dim)
        # Normalised queries and keys keep scores, and so training, calm. Two one-process runs at learning rate 6e-3 whose
        # first weights differed by one rounding were 7e-2 apart in loss after 40 steps without these norms, 2e-4 with.
        self.q_norm, self.k_norm = RMSNorm(config.head_dim), RMSNorm(config.head_dim)

    def forward(self, x: Tensor, angles: Tensor, mask: rf.Mask) -> Tensor:
        """x: [B, S, dim], this rank's part of the sequence; so are angles [S, D/2]. mask: of the whole sequence."""
        q, k, v = (
            rearrange(project(x), "B S (H D) -> B S H D", D=self.head_dim)
            for project in (self.to_q, self.to_k, self.to_v)
        )
        q, k = rotate(self.q_norm(q), angles), rotate(self.k_norm(k), angles)
        out = rf.attention(q, k, v, ring=self.ring, mask=mask, backend=self.backend)
        return self.to_out(rearrange(out, "B S H D -> B S (H D)"))


class SwiGLU(nn.Module):
    """Source: Shazeer, arXiv:2002.05202."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.to_gate = Linear(config.dim, config.hidden)
        self.to_value = Linear(config.dim, config.hidden)
        self.to_out = Linear(config.hidden, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.to_out(F.silu(self.to_gate(x)) * self.to_value(x))


class Block(nn.Module):
    def __init__(self, config: ModelConfig, ring: rf.Ring | None) -> None:
        super().__init__()
        self.activation_checkpointing = config.activation_checkpointing
        self.attention_norm, self.attention = RMSNorm(config.dim), Attention(config, ring)
        self.mlp_norm, self.mlp = RMSNorm(config.dim), SwiGLU(config)

    def forward(self, x: Tensor, angles: Tensor, mask: rf.Mask) -> Tensor:
        if self.activation_checkpointing and torch.is_grad_enabled():
            # Inside forward, so FSDP has gathered the weights by the time backward computes this a second time. The
            # recomputation runs the ring again; every rank does so at the same point, so they still meet.
            return checkpoint(self._forward, x, angles, mask, use_reentrant=False)
        return self._forward(x, angles, mask)

    def _forward(self, x: Tensor, angles: Tensor, mask: rf.Mask) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles, mask)
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """Bytes in, logits of the next byte out. ring=None: the whole sequence is here."""

    def __init__(self, config: ModelConfig, *, ring: rf.Ring | None, seed: int) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.dim)
        self.blocks = nn.ModuleList(Block(config, ring) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim)
        self.to_logits = Linear(config.dim, VOCABULARY)
        self.reset_parameters(seed)

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """The same weights on every rank and in a one-process run: drawn on the CPU, from a generator of our own."""
        generator = torch.Generator().manual_seed(seed)
        # Louder than what the blocks add: at first the last byte says most about the next. Measured on the CPU run's
        # recipe: std 2 is at a validation loss of 2.7 after 80 steps, std 1 after 120.
        nn.init.normal_(self.embedding.weight, std=2.0, generator=generator)
        for block in self.blocks:
            for name, module in block.named_modules():
                if isinstance(module, Linear):
                    # Each block adds twice to the residual stream; scaled so that depth does not make it grow.
                    depth = 2 * self.config.layers if name.endswith("to_out") else 1
                    std = (module.in_features * depth) ** -0.5
                    nn.init.normal_(module.weight, std=std, generator=generator)
        # All bytes equally likely: the first loss is ln 256 = 5.545 to the last digit, a free check of the loss code.
        nn.init.zeros_(self.to_logits.weight)

    def forward(self, tokens: Tensor, positions: Tensor, mask: rf.Mask) -> Tensor:
        """tokens: [B, S] int64, positions: [S] int64, both this rank's part; mask: of the whole sequence.

        Returns logits [B, S, 256] in the compute dtype.
        """
        # The weight is cast before the look-up, as in Linear and for the same reason.
        x = F.embedding(tokens, self.embedding.weight.to(self.config.compute_dtype))
        # Once for all blocks. The angles stay fp32: position 60,000 has no exact bf16 value.
        angles = rotary_angles(positions, self.config.head_dim)
        for block in self.blocks:
            x = block(x, angles, mask)
        return self.to_logits(self.norm(x))
