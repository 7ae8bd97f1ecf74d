"""check_model(): whether every layer of a model gets the ring, found out by running it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ringflash.integrations.transformers.inputs import local_inputs
from ringflash.parallel.inprocess import Member, run
from ringflash.ring import Ring

TOKENS, RANKS = 16, 2
# Of logits, by what it means for half of the sequence not to see the other; of losses, by the loss. Rounding to 16 bits is
# below both.
LOGITS, LOSSES = 0.25, 0.05


def check_model(model: nn.Module) -> None:
    """ValueError unless a causal language model gives the logits and the loss of a whole sequence when it is cut in two.

    A layer that never gets the ring attends to its own part alone, and nothing in it could tell: a model that was loaded
    with another attn_implementation, one that does not hand keyword arguments on, one with recurrent layers. Here two
    threads run 16 tokens, 8 each, and the result is compared with one run of all of them.

    model: with its weights, before DDP or FSDP wraps it. It runs in eval mode, four times 16 tokens; nothing is sent, and
        nothing of it changes.
    """
    was_training = model.training
    model.eval()
    try:
        embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
        device = embedding.weight.device
        ids = (torch.arange(TOKENS, device=device)[None] * 7 + 3) % embedding.num_embeddings
        at = torch.arange(TOKENS, device=device)[None]
        labels = ids % 2  # which a model of two classes has too
        with torch.no_grad():
            whole, loss = _whole(model, {"input_ids": ids, "position_ids": at, "labels": labels})
            by_itself, _ = _whole(model, {"input_ids": ids, "labels": labels})
        cut, cut_loss = _in_parts(model, ids, labels, at, with_ring=True)
        apart, _ = _in_parts(model, ids, labels, at, with_ring=False)
    finally:
        model.train(was_training)
    name = type(model).__name__
    wrong, worst, moved = (float((x - whole).abs().max()) for x in (cut, apart, by_itself))
    if not moved < LOGITS * worst:
        raise ValueError(
            f"check_model: {name} gives other logits when it makes up positions itself (largest difference {moved:.1e}); "
            "must count tokens 0, 1, 2, ..., as local_inputs does for it. Models that begin at another position, such as "
            "Roberta, cannot be served"
        )
    if not wrong < LOGITS * worst:
        raise ValueError(
            f"check_model: {name} gives other logits over a ring (largest difference {wrong:.1e}; without a ring "
            f'{worst:.1e}), so some layer does not get it. Load it with attn_implementation="ring" after register(); a '
            "model that drops keyword arguments, or mixes tokens outside of attention, cannot be served"
        )
    if not abs(cut_loss - loss) < LOSSES * loss:
        raise ValueError(
            f"check_model: {name} has a loss of {cut_loss:.3f} over a ring, and of {loss:.3f} on the whole; must take "
            "shift_labels and num_items_in_batch, as transformers' own loss does. Compute the loss from its logits"
        )


def _whole(model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, float]:
    try:
        return _run(model, inputs)
    except (NotImplementedError, torch.OutOfMemoryError):  # a layer that says why, or a device that is full
        raise
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"check_model: {type(model).__name__} does not give logits [B, S, vocabulary] and a loss for input_ids and "
            f"labels [B, S], as causal language models do: {error}"
        ) from error


def _run(model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, float]:
    out = model(**inputs, use_cache=False)
    return out.logits.float(), float(out.loss)


def _in_parts(model: nn.Module, ids: Tensor, labels: Tensor, at: Tensor, with_ring: bool) -> tuple[Tensor, float]:
    """The logits of the whole, and the sum of the parts of the loss."""

    def part(member: Member) -> tuple[Tensor, float]:
        ring = Ring(transport=member)
        inputs = local_inputs({"input_ids": ids, "position_ids": at, "labels": labels}, ring, averaged_over=1)
        if not with_ring:
            inputs = {name: x for name, x in inputs.items() if name not in ("ring", "mask", "length")}
        with torch.no_grad():  # which is each thread's own matter
            logits, loss = _run(model, inputs)
            return ring.gather(logits), loss

    results = run(RANKS, part)
    return results[0][0], sum(loss for _, loss in results)
