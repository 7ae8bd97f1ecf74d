"""What every rank of a ring computes, one rank after another on one GPU, without anything moved.

    python3 benchmarks/run.py ring_kernels [--ranks 2 8] [--totals 8192 131072] [--heads 16:16 64:8] [--masks causal]

Forward, and forward with backward, bf16, head dim 128. Alone: the whole sequence with the kernels that ringflash takes by
itself. Efficiency: its time over that of the slowest rank and their number, which is what a ring of as many GPUs would reach
if all that moves were hidden. Ways: "by source" launches a kernel for each shard that a rank sees, as `peer` does and
`symmetric` where what comes has no room to land; "landed" one for all of it. What others would have sent is the rank's own.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measure import Row, write
from ring import DEVICE, HEAD_DIM, Case, through
from torch import Tensor

import ringflash as rf
from ringflash.cli.timing import in_turn, matmul_tflops, time_ms
from ringflash.kernels.partial import accumulate_dtype
from ringflash.parallel.inprocess import Alone
from ringflash.parallel.lanes import Lane, Reach, Signals
from ringflash.parallel.passage import InFlight, Message, NeighbourTransport
from ringflash.parallel.steps import Steps
from ringflash.parallel.symmetric import SymmetricTransport
from ringflash.parallel.transport import NO_RETURN, Passage, Returning, early_and_late, is_any, rounded
from ringflash.schedule import landing
from ringflash.schedule.needs import Needs

WAYS = {"by source": 0, "landed": 1 << 40}  # bytes that may land


class Standing(NeighbourTransport):
    """A rank whose neighbours send nothing: it finds its own rows in place of theirs."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__(rank, ranks)

    def exchange(self, sends: list[Message], receives: list[Message]) -> InFlight:
        raise AssertionError("nothing moves")

    def reach(self) -> Reach:
        return OwnMemory(self.rank, self.ranks)

    def stream(self, shard: tuple[Tensor, ...], needs: Needs, returning: Returning = NO_RETURN) -> Passage:
        return StandingPassage(self, shard, needs, returning)

    all_gather = Alone.all_gather

    def all_gather_object(self, value: object) -> list[object]:
        return [value] * self.ranks


class StandingPassage(Passage):
    """In the order of `symmetric`: some own rows, those of each other rank, the rest of the own ones."""

    def __init__(self, wire: Standing, shard: tuple[Tensor, ...], needs: Needs, returning: Returning) -> None:
        self._wire, self._shard, self._needs = wire, shard, needs
        self._early, self._late = early_and_late(needs.seen(wire.rank, wire.rank), returning.early)
        sums = shard[: returning.tensors]
        self._own = tuple(x.new_zeros(x.shape, dtype=accumulate_dtype(x.dtype)) for x in sums)
        self._source, self._rows = wire.rank, self._early

    def __iter__(self) -> Iterator[tuple[int, slice, tuple[Tensor, ...]]]:
        rank, ranks = self._wire.rank, self._wire.ranks
        others = [((rank - hop) % ranks) for hop in range(1, self._needs.hops + 1)]
        seen = [(source, self._needs.seen(rank, source)) for source in others]
        for source, rows in [(rank, self._early), *seen, (rank, self._late)]:
            if is_any(rows):
                self._source, self._rows = source, rows
                yield source, rows, tuple(x[:, rows] for x in self._shard)

    def gradients(self) -> tuple[Tensor, ...]:
        if self._source == self._wire.rank:
            return tuple(x[:, self._rows] for x in self._own)
        return tuple(torch.zeros_like(x[:, self._rows]) for x in self._own)

    def collect(self, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
        return rounded(self._own, dtype)


class Idle(Lane):
    """Queues nothing."""

    def after(self, other: Lane) -> None: ...

    def copy(self, to: int, origin: int, size: int) -> None: ...

    def copy_rows(self, to: int, origin: int, size: int, count: int, to_step: int, origin_step: int) -> None: ...

    def signal(self, flag: int) -> None: ...

    def take(self, flag: int, sender: int) -> None: ...

    def wait(self, flag: int) -> None: ...

    def pass_on(self, signals: Signals) -> None: ...


class OwnMemory(Reach):
    """Random numbers stand where others' rows would land."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.ranks = ranks

    def refuses(self, device: torch.device) -> str | None:
        return None

    def memory(self, size: int, device: torch.device) -> list[Tensor]:
        block = torch.randn(-(-size // 2), device=device, dtype=torch.bfloat16).view(torch.uint8)[:size]
        return [block] * self.ranks

    def everyone(self, value: object) -> list[Any]:
        return [value] * self.ranks

    def host_lane(self) -> Lane:
        return Idle()

    def here(self, device: torch.device) -> Lane:
        return Idle()

    def new_lane(self, device: torch.device) -> Lane:
        return Idle()


class Landed(SymmetricTransport):
    """All that a rank sees is there from the beginning."""

    def _find_steps(self, *arguments: Any) -> Steps:
        steps = super()._find_steps(*arguments)
        steps.flags_before[: steps.arrivals(()).flags.numel()] = 1
        return steps


def ring_of(case: Case, way: str, rank: int, ranks: int) -> rf.Ring:
    wire = Standing(rank, ranks)
    transport = wire if way == "by source" else Landed(wire, wire.reach())
    return rf.Ring(layout=case.layout(), transport=transport, check=False)


def measure(case: Case, ranks: int, rounds: int) -> Iterator[Row]:
    """Rows of a case, forward and both."""
    Hq, Hk = map(int, case.heads.split(":"))
    shapes = [(1, case.total, H, HEAD_DIM) for H in (Hq, Hk, Hk, Hq)]
    whole = tuple(torch.randn(shape, device=DEVICE).bfloat16() for shape in shapes)
    calls: dict[tuple[str, int], Any] = {
        ("alone", 0): through(whole, lambda q, k, v: rf.attention(q, k, v, mask=case.rule))
    }
    for way in WAYS:
        for rank in range(ranks):
            ring = ring_of(case, way, rank, ranks)
            shard = tuple(x[:, ring.positions(case.total).to(DEVICE)] for x in whole)

            def attend(q: Tensor, k: Tensor, v: Tensor, ring: rf.Ring = ring, way: str = way) -> Tensor:
                landing.MOST_BYTES = WAYS[way]
                return rf.attention(q, k, v, ring=ring, mask=case.rule, length=case.total)

            calls[way, rank] = through(shard, attend)
    times: dict[tuple[str, int, bool], list[float]] = {}
    for i in range(rounds + 1):
        for (way, rank), candidate in in_turn(list(calls.items()), i):
            for goes_back in (False, True):
                with candidate() as call:
                    ms = time_ms(lambda call=call, goes_back=goes_back: call(goes_back), 3.0)
                if i:  # in the first one kernels are compiled
                    times.setdefault((way, rank, goes_back), []).append(ms)
    for goes_back, factor in ((False, 1.0), (True, 3.5)):
        alone = median(times["alone", 0, goes_back])
        by_rank = {way: [median(times[way, rank, goes_back]) for rank in range(ranks)] for way in WAYS}
        tflops = {way: case.flops() * factor / max(ms) / ranks / 1e9 for way, ms in by_rank.items()}
        yield Row(
            "both" if goes_back else "forward", HEAD_DIM, case.heads, case.mask, case.total, 1, ranks,
            {name: round(x, 1) for name, x in {"alone": case.flops() * factor / alone / 1e9, **tflops}.items()},
            extra={
                "efficiency": {way: round(alone / max(ms) / ranks, 3) for way, ms in by_rank.items()},
                "alone_ms": round(alone, 3),
                "ms_by_rank": {way: " ".join(f"{x:.3f}" for x in ms) for way, ms in by_rank.items()},
            },
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--totals", type=int, nargs="+", default=[8192, 16384, 32768, 65536, 131072])
    parser.add_argument("--heads", nargs="+", default=["16:16", "64:8"])
    parser.add_argument("--masks", nargs="+", default=["causal"], choices=["full", "causal", "documents", "window"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="folder for the results; default benchmarks/results")
    arguments = parser.parse_args()
    matmul, rows = matmul_tflops(), []
    notes = str(__doc__).split("\n\n")[2]
    for total in arguments.totals:
        for heads in arguments.heads:
            for mask in arguments.masks:
                for ranks in arguments.ranks:
                    for row in measure(Case(total, heads, mask), ranks, arguments.rounds):
                        rows.append(row)
                        print(row.direction, row.heads, row.mask, row.tokens, ranks, row.tflops, row.extra, flush=True)
                    torch.cuda.empty_cache()
                    path = write("ring_kernels", rows, gpus=1, matmul=matmul, out=arguments.out, notes=notes)
    print(path)


if __name__ == "__main__":
    main()
