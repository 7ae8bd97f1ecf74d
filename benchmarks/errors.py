"""Errors of rings of 1, 2, 4, ... GPUs against dense attention in float64: python benchmarks/run.py errors [--out DIR]

bf16, head dim 128, 8:2 heads, one causal sequence and one of packed documents, 4,096 tokens. Relative errors (norm of the
difference over the norm) of out and of the gradients, the largest of any rank; beside them those of torch's attention
on one GPU with the whole sequence.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measure import RUN, Row, torchrun, write
from torch import Tensor

import ringflash as rf
from ringflash.testing.compare import relative_error
from ringflash.testing.oracle import dense_gradients, visible
from ringflash.testing.sharded import draw

DEVICE, DTYPE = "cuda", torch.bfloat16
TOKENS, HEADS, HEAD_DIM = 4096, (8, 2), 128
RESULTS = ("out", "dq", "dk", "dv")
TRANSPORTS, ROUTES = ("peer", "symmetric", "gathered"), ("keys", "queries")


def masks() -> dict[str, Any]:
    some = TOKENS // 8
    return {"causal": rf.Causal(), "documents": rf.Documents([3 * some, some + 1, TOKENS - 4 * some - 1], causal=True)}


def errors_of(attend: Any, inputs: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    leaves = [inputs[name].clone().requires_grad_() for name in ("q", "k", "v")]
    out = attend(*leaves)
    found = (out.detach(), *torch.autograd.grad(out, leaves, inputs["dout"]))
    return {name: relative_error(x, expected[name]) for name, x in zip(RESULTS, found, strict=True)}


def of_torch(mask: Any, inputs: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Its causal attention, or with the mask written out."""
    seen = None if mask == rf.Causal() else visible(mask, TOKENS, TOKENS)[0].to(DEVICE)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(*heads_first, attn_mask=seen, is_causal=seen is None, enable_gqa=True)
        return out.transpose(1, 2)

    return errors_of(attend, inputs, expected)


def of_ring(
    ring: rf.Ring, mask: Any, route: Any, inputs: dict[str, Tensor], expected: dict[str, Tensor]
) -> dict[str, float]:
    """The largest of any rank of the ring; every rank of it calls."""
    layout = rf.Zigzag() if mask == rf.Causal() else rf.Balanced(mask)
    ring = ring.with_layout(layout)
    mine, theirs = ({name: ring.shard(x) for name, x in tensors.items()} for tensors in (inputs, expected))
    found = errors_of(
        lambda q, k, v: rf.attention(q, k, v, ring=ring, mask=mask, length=TOKENS, route=route), mine, theirs
    )
    everyone: list[Any] = ring.transport.all_gather_object(found)
    return {name: max(one[name] for one in everyone) for name in RESULTS}


def measure(groups: dict[int, Any]) -> list[Row]:
    """groups: by number of ranks, the group of so many, or None where this rank is not in it. Rows where it is."""
    rows = []
    for name, mask in masks().items():
        inputs = draw(queries=TOKENS, heads=HEADS, dim=HEAD_DIM, dtype=DTYPE, device=DEVICE)
        del inputs["dlse"]
        expected = dense_gradients(**inputs, mask=mask)
        found = {"torch": of_torch(mask, inputs, expected)}
        found["alone"] = errors_of(lambda q, k, v, mask=mask: rf.attention(q, k, v, mask=mask), inputs, expected)
        for ranks, group in groups.items():
            if group is None:
                continue
            for transport in TRANSPORTS:
                ring = rf.Ring(group, transport=transport)
                for route in ROUTES:
                    found[f"{transport}, {route} travel, {ranks} ranks"] = of_ring(ring, mask, route, inputs, expected)
        for what, errors in found.items():
            extra = {"what": what} | {result: f"{error:.2e}" for result, error in errors.items()}
            heads = ":".join(map(str, HEADS))
            rows.append(Row("both", HEAD_DIM, heads, name, TOKENS, 1, max(groups), {}, extra=extra))
    return rows


def groups_of(ranks: int) -> dict[int, Any]:
    """2, 4, 8, ... ranks, and all; every rank calls."""
    sizes = sorted({2**i for i in range(1, 11) if 2**i < ranks} | {ranks})
    rank = dist.get_rank()
    made = {size: dist.new_group(list(range(size))) for size in sizes}
    return {size: group if rank < size else None for size, group in made.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the results; default benchmarks/results")
    arguments = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        sys.exit(torchrun(torch.cuda.device_count(), RUN, "errors", *sys.argv[1:]))
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    ranks = dist.get_world_size()
    rows = measure(groups_of(ranks))
    if rank == 0:
        for row in rows:
            print(row.mask, row.extra, flush=True)
        notes = str(__doc__).split("\n\n")[1]
        print(write(f"errors_x{ranks}", rows, gpus=ranks, matmul=0.0, out=arguments.out, notes=notes))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
