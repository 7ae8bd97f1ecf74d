"""What the forms that training uses cost on one GPU: a hop of a ring, packed documents, a sliding window.

    python3 benchmarks/run.py forms [--head-dims 128] [--seconds 300]

Ring: a hop that merges `into` a partial result and adds into fp32 sums, beside the plain call of the same kernel, which
stores its result rounded. Documents and windows: 64k tokens by time per visible pair, beside one causal sequence. Every
form is checked before it is timed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measure import Row, write
from torch import Tensor

import ringflash as rf
from ringflash.cli.kernels import FACTORS, HEAD_START_MS, TOLERANCE, difference
from ringflash.cli.timing import interleaved, matmul_tflops
from ringflash.kernels.backend import Backend, Call, Rows, choose
from ringflash.kernels.partial import Partial
from ringflash.kernels.score import Score
from ringflash.schedule.plan import plan

HEADS = {128: 16, 64: 32, 256: 8}
LOCAL, WHOLE = 8192, 65536  # tokens of a shard, and of a packed sequence
BACKENDS = ("hopper", "triton")
MASKS = {
    "causal": rf.Causal(),
    "documents": rf.Documents([4096] * (WHOLE // 4096), causal=True),
    "window": rf.Window(4095, 0),
}
# A hop takes at most this much longer than the plain call; a visible pair under a mask is at least so fast.
RING_GOAL, MASK_GOAL = 0.02, 0.9
# Rows that are recomputed in fp32 to check a form: those of the last block, which see the most keys.
CHECKED = 256


def inputs(tokens: int, head_dim: int, device: str = "cuda") -> list[Tensor]:
    """q, k, v and the gradient of out."""
    size = (1, tokens, HEADS[head_dim], head_dim)
    return [torch.randn(size, device=device, dtype=torch.bfloat16) for _ in range(4)]


def served(name: str, q: Tensor, direction: str) -> Backend:
    """The backend, or NotImplementedError."""
    H, D = q.shape[2:]
    call = Call(q.device, q.dtype, H, H, D, D, D**-0.5, frozenset(), False, direction=direction)  # type: ignore[arg-type]
    return choose(call, name).backend


def ring(name: str, head_dim: int, mask: str, rounds: int, tokens: int = LOCAL, device: str = "cuda") -> Iterator[Row]:
    """A hop beside the plain call, called on the backend: forward, then backward where there is one."""
    q, k, v, dout = inputs(tokens, head_dim, device)
    backend, score = served(name, q, "forward"), Score().resolve(head_dim)
    bounds = plan({"full": rf.Full(), "causal": rf.Causal()}[mask], rf.Contiguous(), tokens)[0]
    plain = lambda: backend.forward(q, k, v, bounds, score, is_last=True)  # noqa: E731
    # Seeing the same keys twice changes no weight but lse, by log 2.
    once, twice = plain(), backend.forward(q, k, v, bounds, score)
    twice = backend.forward(q, k, v, bounds, score, into=twice)
    check(f"{name} into", {"out": (twice.out, once.out), "lse": (twice.lse, once.lse + 0.6931471805599453)})
    kept = Partial(torch.randn_like(twice.out), once.lse.clone())
    hop = lambda: backend.forward(q, k, v, bounds, score, into=kept)  # noqa: E731
    yield compared(name, "forward", head_dim, mask, tokens, bounds.pairs, {"plain": plain, "hop": hop}, rounds)

    backend = served(name, q, "backward")
    rows = Rows(once.out, dout, once.lse, backend.delta(once.out, dout, None), has_dlse=False)
    written = [torch.empty_like(x) for x in (q, k, v)]
    sums = [torch.zeros(x.shape, dtype=torch.float32, device=device) for x in (q, k, v)]
    whole = lambda: backend.backward(q, k, v, rows, bounds, score, *written, False, is_all=True)  # noqa: E731
    added = lambda: backend.backward(q, k, v, rows, bounds, score, *sums, False)  # noqa: E731
    whole()
    added()
    check(f"{name} sums", dict(zip(("dq", "dk", "dv"), zip(sums, written, strict=True), strict=True)))
    yield compared(name, "backward", head_dim, mask, tokens, bounds.pairs, {"plain": whole, "hop": added}, rounds)


def compared(
    name: str, direction: str, head_dim: int, mask: str, tokens: int, pairs: int, runs: dict[str, Any], rounds: int
) -> Row:
    times = interleaved(runs, rounds, head_start_ms=HEAD_START_MS)
    H = HEADS[head_dim]
    flops = FACTORS[direction] * 4.0 * head_dim * H * pairs
    return Row(
        direction, head_dim, f"{H}:{H}", mask, tokens, 1, 1,
        {f"{name} {form}": round(timing.tflops(flops), 1) for form, timing in times.items()},
        extra={
            "form": "ring hop", "hop_over_plain": round(times["hop"].median_ms / times["plain"].median_ms - 1, 4),
            "goal": RING_GOAL, "spread": {form: round(timing.spread, 3) for form, timing in times.items()},
        },
    )  # fmt: skip


def masked(
    name: str, head_dim: int, rounds: int, masks: dict[str, rf.Mask] = MASKS, tokens: int = WHOLE, device: str = "cuda"
) -> Iterator[Row]:
    """Masks of a long sequence beside the causal one: forward, then backward where there is one."""
    *qkv, dout = inputs(tokens, head_dim, device)
    served(name, qkv[0], "forward")
    calls = {mask: lambda m=the_mask: rf.attention(*qkv, mask=m, backend=name) for mask, the_mask in masks.items()}
    with torch.no_grad():
        outs = {mask: call() for mask, call in calls.items()}
        for mask, out in outs.items():
            check(f"{name} {mask}", last_rows(qkv, dout, masks[mask], out))
        yield from per_pair(name, "forward", head_dim, masks, tokens, calls, rounds)
    served(name, qkv[0], "backward")
    leaves = [x.requires_grad_() for x in qkv]
    outs = {mask: call() for mask, call in calls.items()}
    backwards = {
        mask: lambda out=out: torch.autograd.grad(out, leaves, dout, retain_graph=True) for mask, out in outs.items()
    }
    for mask, run in backwards.items():
        check(f"{name} {mask}", last_rows(qkv, dout, masks[mask], outs[mask], run()))
    yield from per_pair(name, "backward", head_dim, masks, tokens, backwards, rounds)


def per_pair(
    name: str, direction: str, head_dim: int, masks: dict[str, rf.Mask], tokens: int,
    runs: dict[str, Callable[[], Any]], rounds: int,
) -> Iterator[Row]:  # fmt: skip
    times = interleaved(runs, rounds, head_start_ms=HEAD_START_MS)
    H = HEADS[head_dim]
    speeds = {
        mask: timing.tflops(FACTORS[direction] * 4.0 * head_dim * H * plan(masks[mask], rf.Contiguous(), tokens).pairs)
        for mask, timing in times.items()
    }
    for mask, speed in speeds.items():
        yield Row(
            direction, head_dim, f"{H}:{H}", mask, tokens, 1, 1, {name: round(speed, 1)},
            extra={
                "form": "64k", "ms": round(times[mask].median_ms, 3), "speed_per_pair": round(speed / speeds["causal"], 3),
                "goal": MASK_GOAL, "spread": round(times[mask].spread, 3),
            },
        )  # fmt: skip


def last_rows(
    qkv: list[Tensor], dout: Tensor, mask: rf.Mask, out: Tensor, gradients: tuple[Tensor, ...] = ()
) -> dict[str, tuple[Tensor, Tensor]]:
    """(ours, expected) of the last rows: out and dq, and the dk and dv of the last keys, which no other row sees.

    Expected is formed in fp32 from the mask's own bounds, a boolean mask over the keys that these rows see.
    """
    N, device = out.shape[1], out.device
    positions = torch.arange(N - CHECKED, N)
    lo, hi = mask.bounds(positions)
    first = int(lo.min())
    keys = torch.arange(first, N)
    seen = ((lo[0, :, None] <= keys) & (keys < hi[0, :, None])).to(device)
    assert int(lo[0, -1]) <= N - CHECKED, "the last keys are seen by the last rows alone"
    rows, last = slice(N - CHECKED, N), slice(-CHECKED, None)
    with torch.enable_grad():
        q, k, v = (
            x[:, part].detach().float().transpose(1, 2).requires_grad_()
            for x, part in zip(qkv, (rows, slice(first, N), slice(first, N)), strict=True)
        )
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        grads = torch.autograd.grad(expected, (q, k, v), dout[:, rows].float().transpose(1, 2))
    ours = (out.detach(), *gradients)
    theirs = (expected.detach(), *grads)[: len(ours)]
    names = ("out", "dq", "dk", "dv")
    return {what: (x[:, last], y.transpose(1, 2)[:, last]) for what, x, y in zip(names, ours, theirs, strict=False)}


def check(what: str, pairs: dict[str, tuple[Tensor, Tensor]]) -> None:
    for name, (actual, expected) in pairs.items():
        error = difference(actual, expected)
        if not error < TOLERANCE:
            raise AssertionError(f"{what}: {name} is off by {error:.3g}")


def forms(arguments: argparse.Namespace) -> Iterator[tuple[str, Iterator[Row]]]:
    """(title, rows) of each form; nothing is computed before the rows are asked for."""
    for head_dim in arguments.head_dims:
        for name in arguments.backends:
            for mask in ("full", "causal"):
                yield f"{name} d{head_dim} ring {mask}", ring(name, head_dim, mask, arguments.rounds)
            yield f"{name} d{head_dim} 64k", masked(name, head_dim, max(3, arguments.rounds // 3))


def line(row: Row) -> str:
    figures = "  ".join(f"{name} {tflops:.0f}" for name, tflops in row.tflops.items())
    found, aim = row.extra.get("hop_over_plain"), row.extra["goal"]
    if found is not None:
        said = f"hop over plain {found:+.1%}, goal {aim:+.0%}: {'reached' if found <= aim else 'MISSED'}"
    else:
        found = row.extra["speed_per_pair"]
        said = f"speed per pair {found:.3f}, goal {aim}: {'reached' if found >= aim else 'MISSED'}"
    return f"{row.direction:8} d{row.head_dim} {row.heads} {row.mask:9} {row.tokens}:  {figures}  {said}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="run.py forms", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for the results; default benchmarks/results")
    parser.add_argument("--head-dims", type=int, nargs="+", choices=list(HEADS), default=list(HEADS))
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after these no new form is begun")
    arguments, start = parser.parse_args(), time.monotonic()
    ceiling = matmul_tflops()
    rows: list[Row] = []
    notes: list[str] = []
    faults = 0

    def keep() -> Path:
        what = "forms" + "".join(f"_d{dim}" for dim in arguments.head_dims if len(arguments.head_dims) < len(HEADS))
        said = "\n".join([__doc__.split("\n\n", 2)[2].strip(), "", *(f"- {note}" for note in notes)]).strip()
        return write(what, rows, gpus=1, matmul=ceiling, out=arguments.out, notes=said)

    for title, found in forms(arguments):
        if time.monotonic() - start > arguments.seconds:
            notes.append(f"left out after {arguments.seconds:.0f} s, from this one on: {title}")
            break
        try:
            for row in found:
                rows.append(row)
                print(line(row), flush=True)
        except NotImplementedError as refusal:
            notes.append(f"{title}: {refusal}")
        except AssertionError as fault:
            notes.append(f"FAULT: {title}: {fault}")
            faults += 1
        keep()
    print("", *notes, keep(), sep="\n")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
