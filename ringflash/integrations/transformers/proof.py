"""check_model(): whether every layer of a model gets the ring, found out by running it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ringflash.parallel.inprocess import Member, run
from ringflash.ring import Ring
from ringflash.schedule.mask import Causal

TOKENS, RANKS = 16, 2


def check_model(model: nn.Module) -> None:
    """ValueError unless a sequence cut in two gives the logits of the whole. Nothing is sent, nothing is changed.

    A layer that never gets the ring attends to its own part alone, and nothing in it could tell: a model that was loaded
    with another attn_implementation, one that does not hand keyword arguments on, one with recurrent layers. Here two
    threads run 16 tokens, 8 each, and the result is compared with one run of all of them.

    model: of one process, so before DDP or FSDP wraps it. It runs in eval mode, three times 16 tokens.
    """
    was_training = model.training
    model.eval()
    try:
        embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
        device = embedding.weight.device
        ids = (torch.arange(TOKENS, device=device)[None] * 7 + 3) % embedding.num_embeddings
        at = torch.arange(TOKENS, device=device)[None]
        with torch.no_grad():
            whole = _logits(model, ids, at)
            cut, apart = (_in_parts(model, ids, at, with_ring) for with_ring in (True, False))
    finally:
        model.train(was_training)
    wrong, worst = (float((x - whole).abs().max()) for x in (cut, apart))
    # Rounding is far below what it means for half of the sequence not to see the other.
    if not wrong < 0.25 * worst:
        raise ValueError(
            f"check_model: {type(model).__name__} gives other logits over a ring (largest difference {wrong:.1e}; without "
            f'a ring {worst:.1e}), so some layer does not get it. Load it with attn_implementation="ring" after '
            "register(); a model that drops keyword arguments, or mixes tokens outside of attention, cannot be served"
        )


def _logits(model: nn.Module, ids: Tensor, at: Tensor, **said: Any) -> Tensor:
    logits: Tensor = model(input_ids=ids, position_ids=at, use_cache=False, **said).logits
    return logits.float()


def _in_parts(model: nn.Module, ids: Tensor, at: Tensor, with_ring: bool) -> Tensor:
    def part(member: Member) -> Tensor:
        ring = Ring(transport=member)
        said = {"ring": ring, "mask": Causal()} if with_ring else {}
        with torch.no_grad():  # which is each thread's own matter
            return ring.gather(_logits(model, ring.shard(ids), ring.shard(at), **said))

    return run(RANKS, part)[0]
