"""Losses whose denominator is the tokens of the WHOLE batch, whichever ranks hold them, and however gradients are reduced.

    local loss = averaged_over * sum of this rank's token losses / valid tokens of the whole batch

A mean over each rank's own tokens would weigh ranks, not tokens: 7 tokens of loss 1 beside 1 token of loss 9 would make
5.0 instead of 2.0. docs/training.md has the recipes for DDP, FSDP2 and a plain all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ringflash.kernels.partial import accumulate_dtype
from ringflash.parallel.transport import Transport
from ringflash.ring import Ring
from ringflash.schedule.integers import integer


@dataclass(frozen=True, eq=False)
class BatchTokens:
    """How many tokens of the whole batch count, and how the gradients of its parts meet; made by `count_tokens`.

    count: int64 [], the same on every rank.
    averaged_over: ranks over which gradients are averaged; 1 where they are summed.
    wires: one per axis of ranks that share the batch.
    ignore_index: the label of tokens that do not count.
    """

    count: Tensor
    averaged_over: int
    wires: tuple[Transport, ...]
    ignore_index: int

    def local_loss(self, losses: Tensor) -> Tensor:
        """This rank's share of the loss, to call backward on: [] fp32 (fp64 for fp64).

        losses: this rank's token losses, or sums of them, of any shape; entries of tokens that do not count are 0.

        Its value alone says nothing (see `true_loss`). A batch without any valid token gives 0, with gradients 0.
        """
        _check_losses("local_loss: losses", losses)
        total = losses.to(accumulate_dtype(losses.dtype)).sum()
        return total * self.averaged_over / self.count.clamp_min(1).to(total.dtype)

    def true_loss(self, local_losses: Tensor) -> Tensor:
        """The mean over the valid tokens of the whole batch, [] and detached, for reporting; the same bits on every rank.

        local_losses: what `local_loss` gave this rank, any shape: stack or add up those of the micro batches.

        Every rank must call it: one exchange of a few bytes for each axis of ranks.
        """
        _check_losses("true_loss: local_losses", local_losses)
        local = local_losses.detach().to(accumulate_dtype(local_losses.dtype)).sum()
        return sum_over_ranks(local, self.wires) / self.averaged_over


def _check_losses(name: str, losses: object) -> None:
    if not isinstance(losses, Tensor) or not losses.is_floating_point():
        raise TypeError(f"{name} is {_kind(losses)}; must be a floating point tensor")


def count_tokens(
    labels: Tensor | Sequence[Tensor], group: Any, *, averaged_over: int, ignore_index: int = -100
) -> BatchTokens:
    """Count the valid tokens of the whole batch, once per optimizer step: one exchange of 8 bytes for each axis of ranks.

    labels: this rank's labels, integers of any shape, on the device its process group communicates from; with gradient
        accumulation a list, one tensor for each micro batch of the step. Lists may differ in length among ranks.
    group: the ranks that hold DIFFERENT tokens of the batch, so the ring's times those of data parallelism: a Ring, a
        ProcessGroup, a DeviceMesh of any number of dimensions, such as mesh["dp", "cp"], or None: all processes, or this
        one where torch.distributed is not initialised. Ranks of tensor or pipeline parallelism stay out.
    averaged_over: over how many of these ranks gradients are averaged. All of them under DDP and FSDP2, 1 where they are
        summed. It must be named: each default would be silently wrong for somebody.

    Errors: TypeError for labels that are no integers; ValueError for an empty list, for an averaged_over that does not
    divide the ranks of `group`, and for a group that Ring refuses.
    """
    parts = [labels] if isinstance(labels, Tensor) else list(labels)
    if not parts:
        raise ValueError("count_tokens: labels is an empty list; pass one tensor for each micro batch")
    for part in parts:
        check_labels("count_tokens", part)
    check_ignore_index("count_tokens", ignore_index)
    averaged_over = integer("count_tokens: averaged_over", averaged_over, least=1)
    wires = _wires("count_tokens", group)
    ranks = prod(wire.ranks for wire in wires)
    if ranks % averaged_over:
        raise ValueError(
            f"count_tokens: averaged_over = {averaged_over}, tokens are counted over {ranks} ranks; it must divide them. "
            "Pass as group all ranks that hold a part of the batch, and as averaged_over those of DDP or FSDP, or 1"
        )
    local = torch.stack([(part != ignore_index).sum() for part in parts]).sum()
    return BatchTokens(sum_over_ranks(local, wires), averaged_over, wires, ignore_index)


def token_loss(logits: Tensor, labels: Tensor, tokens: BatchTokens) -> Tensor:
    """Cross entropy of this rank's tokens as its share of the mean over the whole batch: [] fp32 (fp64 for fp64).

    logits: this rank's, [..., V], any floating type; computed in fp32. Where they are too large to hold, use
        `linear_cross_entropy` and `tokens.local_loss`.
    labels: integers [...], shifted BEFORE they were cut (`shift_labels`).
    tokens: of the whole step, from `count_tokens`, whose ignore_index holds here too.

    Call backward on it; `tokens.true_loss` makes of it the number to report.
    """
    check_labels("token_loss", labels)
    if not isinstance(tokens, BatchTokens):
        raise TypeError(f"token_loss: tokens is {type(tokens).__name__}; must come from count_tokens")
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        raise TypeError(f"token_loss: logits is {_kind(logits)}; must be a floating point tensor")
    if logits.shape[:-1] != labels.shape or logits.dim() == 0:
        raise ValueError(
            f"token_loss: logits {tuple(logits.shape)} do not fit labels {tuple(labels.shape)}; must be labels' shape "
            "and one axis for the vocabulary"
        )
    V = logits.shape[-1]
    losses = F.cross_entropy(
        logits.to(accumulate_dtype(logits.dtype)).reshape(-1, V),
        labels.long().flatten(),
        ignore_index=tokens.ignore_index,
        reduction="none",
    )
    return tokens.local_loss(losses)


def sum_over_ranks(x: Tensor, wires: Sequence[Transport]) -> Tensor:
    """The sum of every rank's x, of one shape. Added in the order of ranks, so all get the same bits. Not differentiable."""
    for wire in wires:
        if wire.ranks > 1:
            x = torch.stack(wire.all_gather(x, [tuple(x.shape)] * wire.ranks)).sum(0)
    return x


def check_labels(caller: str, labels: object) -> None:
    """Refuse labels that are not integers."""
    if (
        not isinstance(labels, Tensor)
        or labels.is_floating_point()
        or labels.is_complex()
        or labels.dtype == torch.bool
    ):
        raise TypeError(f"{caller}: labels is {_kind(labels)}; must be an integer tensor")


def check_ignore_index(caller: str, ignore_index: object) -> None:
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"{caller}: ignore_index is {type(ignore_index).__name__}; must be an integer")


def _kind(value: object) -> str:
    return f"a tensor of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__


def _wires(caller: str, group: Any) -> tuple[Transport, ...]:
    """One wire for each axis of `group`; adding up along one axis after the other adds up over the whole grid."""
    if isinstance(group, Ring):
        return (group.transport,)
    # A mesh is known by its attributes: torch.distributed is imported where processes meet, not here.
    if getattr(group, "ndim", 1) > 1:
        names = group.mesh_dim_names
        if names is None:
            raise ValueError(
                f"{caller}: group is a mesh of {group.ndim} dimensions without names; must have mesh_dim_names, or one "
                "dimension"
            )
        return tuple(Ring(group[name]).transport for name in names)
    return (Ring(group).transport,)
