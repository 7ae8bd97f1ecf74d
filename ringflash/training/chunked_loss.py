"""The last linear layer and its cross entropy in one, a chunk of tokens at a time: logits [S, V] never exist.

Note: recompute or keep?

Gradients could be formed in the forward pass, chunk by chunk, which saves computing the logits twice (3 products instead
of 4). They are recomputed in backward instead, because (1) a loss PER TOKEN can be returned then, which sums per sequence,
weights per token and masks need: the gradient of the weight cannot be scaled by token afterwards; (2) evaluation costs
nothing extra; (3) between forward and backward there is one number per token (its lse), and no [V, H] gradient in fp32.
Ordinary autograd over chunks would not do: it keeps every chunk's logits until backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringflash.kernels.partial import accumulate_dtype
from ringflash.parallel.function import DifferentiatedOnce
from ringflash.schedule.integers import integer
from ringflash.training.loss import check_ignore_index, check_labels


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    chunk_tokens: int = 1024,
    ignore_index: int = -100,
) -> Tensor:
    """Cross entropy of every token from the last hidden states, without ever holding the logits of more than one chunk.

        loss[t] = logsumexp(weight @ hidden[t] + bias) - (weight @ hidden[t] + bias)[labels[t]]

    hidden: [..., H], floating point.
    weight, bias: [V, H] and [V], of hidden's type (under autocast all are cast, as by a linear layer).
    labels: integers [...] in [0, V), or ignore_index.
    chunk_tokens: tokens whose logits exist at a time. Beside inputs, outputs and their gradients a call takes at its peak
        chunk_tokens * V * 6 bytes in 16-bit types (4 in fp32), a copy of the chunk's hidden states, and in backward of
        16-bit types another 6 * V * H: the weight's gradient in fp32 and one chunk's share of it.

    Returns losses [...] in fp32 (fp64 for fp64), 0 where the label is ignore_index; -losses are log-probabilities. Pass
    them to `BatchTokens.local_loss` or `sequence_sums`. Logits are formed in hidden's type, as a linear layer forms
    them; everything after is fp32, sums over chunks too.

    Under FSDP2 call it inside the forward of the module that owns the weight: elsewhere the weight is a shard.

    Errors: TypeError for types that differ or are no numbers, ValueError for shapes that do not fit and, on CPUs, labels
    outside the vocabulary (a GPU would have to wait; its gather asserts). Second derivatives are refused.
    """
    hidden, weight, bias = _as_autocast(hidden, weight, bias)
    _check(hidden, weight, bias, labels)
    chunk_tokens = integer("linear_cross_entropy: chunk_tokens", chunk_tokens, least=1)
    check_ignore_index("linear_cross_entropy", ignore_index)
    flat = labels.long().flatten()
    is_valid = flat != ignore_index
    if flat.device.type == "cpu":
        _check_range(flat[is_valid], weight.shape[0])
    targets = Targets(flat.masked_fill(~is_valid, 0), is_valid, labels.shape, chunk_tokens)
    losses: Tensor = _LinearCrossEntropy.apply(hidden.reshape(-1, hidden.shape[-1]), weight, bias, targets)
    return losses


@dataclass(frozen=True, eq=False)
class Targets:
    """What each token should have been: labels int64 [T], 0 where is_valid, bool [T], is False; and how they came."""

    labels: Tensor
    is_valid: Tensor
    shape: tuple[int, ...]
    chunk_tokens: int

    def chunks(self) -> Iterator[slice]:
        for start in range(0, self.labels.numel(), self.chunk_tokens):
            yield slice(start, start + self.chunk_tokens)

    def of(self, hidden: Tensor, rows: slice) -> Tensor:
        """hidden[rows] with zeros for ignored tokens: a NaN there would reach the weight's gradient, as 0 * NaN."""
        return hidden[rows].masked_fill(~self.is_valid[rows, None], 0.0)


class _LinearCrossEntropy(torch.autograd.Function):
    """(hidden [T, H], weight [V, H], bias [V] or None) -> losses of targets.shape. Saves the inputs and lse [T]."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets) -> Tensor:
        T, H = hidden.shape
        lse = hidden.new_empty(T, dtype=accumulate_dtype(hidden.dtype))
        # Not a view of flat ones: FSDP2 warns where a module returns a view.
        losses = lse.new_empty(targets.shape)
        flat_losses = losses.view(T)
        for rows in targets.chunks():
            logits = _logits(targets.of(hidden, rows), weight, bias)  # [C, V]
            of_label = logits.gather(1, targets.labels[rows, None])[:, 0]  # [C]
            lse[rows] = _logsumexp_(logits)
            del logits  # before the next chunk's are made
            flat_losses[rows] = lse[rows].sub(of_label).masked_fill(~targets.is_valid[rows], 0.0)
        ctx.save_for_backward(hidden, weight, bias, lse)
        ctx.targets = targets
        return losses

    @staticmethod
    def backward(ctx: Any, dlosses: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, lse = ctx.saved_tensors
        needs = (*ctx.needs_input_grad[:2], bias is not None and ctx.needs_input_grad[2])
        with torch.no_grad():
            gradients = _gradients(hidden, weight, bias, lse, dlosses.flatten(), ctx.targets, needs)
        if torch.is_grad_enabled():  # create_graph=True
            gradients = tuple(
                None
                if x is None
                else DifferentiatedOnce.apply(x, "linear_cross_entropy", hidden, weight, bias, dlosses)
                for x in gradients
            )
        return (*gradients, None)


def _gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lse: Tensor,
    dlosses: Tensor,
    targets: Targets,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, ...]:
    """Gradients of hidden, weight and bias, those that are needed, from logits computed once more.

    dlogits = dloss * (exp(logits - lse) - onehot(label)).
    """
    dhidden = torch.empty_like(hidden) if needs[0] else None
    dweight = torch.zeros_like(weight, dtype=lse.dtype) if needs[1] else None
    dbias = weight.new_zeros(weight.shape[0], dtype=lse.dtype) if needs[2] else None
    for rows in targets.chunks():
        p = _logits(targets.of(hidden, rows), weight, bias).sub_(lse[rows, None]).exp_()  # [C, V]
        p.scatter_add_(1, targets.labels[rows, None], p.new_full((1, 1), -1.0).expand(p.shape[0], 1))
        p.mul_(dlosses[rows].masked_fill(~targets.is_valid[rows], 0.0)[:, None])
        if dbias is not None:
            dbias += p.sum(0)
        dlogits = p.to(hidden.dtype)
        del p  # 16-bit products need only the rounded ones
        if dhidden is not None:
            torch.mm(dlogits, weight, out=dhidden[rows])
        if dweight is not None:
            _add_product(dweight, dlogits.T, targets.of(hidden, rows))
        del dlogits
    return (
        dhidden,
        None if dweight is None else dweight.to(weight.dtype),
        None if dbias is None or bias is None else dbias.to(bias.dtype),
    )


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[C, V] in the accumulate type, the caller's to overwrite."""
    logits = hidden @ weight.T if bias is None else torch.addmm(bias, hidden, weight.T)
    return logits.to(accumulate_dtype(hidden.dtype))


def _logsumexp_(x: Tensor) -> Tensor:
    """logsumexp of the rows of x [C, V]; overwrites x, where torch.logsumexp would allocate as much again."""
    row_max = x.amax(1)
    return x.sub_(row_max[:, None]).exp_().sum(1).log_().add_(row_max)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, where total may be wider than a and b."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        # Each chunk's product is rounded to 16 bits once, like the one product of a plain linear layer; the sum is not.
        total += a @ b


def _as_autocast(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cast as autocast casts the inputs of a linear layer: all but fp64."""
    if not isinstance(hidden, Tensor) or not torch.is_autocast_enabled(hidden.device.type):
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(hidden.device.type)

    def cast(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.dtype != torch.float64 else x

    return cast(hidden), cast(weight), cast(bias)


def _check(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> None:
    name = "linear_cross_entropy"
    check_labels(name, labels)
    for argument, x in (("hidden", hidden), ("weight", weight), *([] if bias is None else [("bias", bias)])):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"{name}: {argument} is {kind}; must be a floating point tensor")
        if hasattr(x, "placements"):
            raise TypeError(
                f"{name}: {argument} is a DTensor, a shard of the whole; under FSDP2 make this call inside the forward of "
                "the module that owns it, where it is whole"
            )
        if x.dtype != hidden.dtype or x.device != hidden.device:
            raise TypeError(
                f"{name}: {argument} is {x.dtype} on {x.device}; must be as hidden, {hidden.dtype} on {hidden.device}"
            )
    if labels.device != hidden.device:
        raise ValueError(f"{name}: labels is on {labels.device}; must be where hidden is, on {hidden.device}")
    if hidden.dim() == 0 or hidden.shape[:-1] != labels.shape:
        raise ValueError(
            f"{name}: hidden {tuple(hidden.shape)} does not fit labels {tuple(labels.shape)}; must be labels' shape and "
            "one axis for the hidden size"
        )
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1] or weight.shape[0] == 0:
        raise ValueError(
            f"{name}: weight has shape {tuple(weight.shape)}; must be [V, {hidden.shape[-1]}], vocabulary by hidden size"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{name}: bias has shape {tuple(bias.shape)}; must be [{weight.shape[0]}], the vocabulary")


def _check_range(labels: Tensor, V: int) -> None:
    if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < V:
        raise ValueError(
            f"linear_cross_entropy: labels range from {int(labels.min())} to {int(labels.max())}; must be in [0, {V}), "
            "the vocabulary, or ignore_index"
        )
