"""Rings on the GPUs of this machine beside one GPU alone, PyTorch's context parallel, and a plain NCCL ring.

    python3 benchmarks/run.py ring [--totals 8192 16384] [--heads 16:16 64:8] [--masks causal] [--only symmetric peer]

Forward, and forward with backward, bf16, head dim 128. Alone: the whole sequence on each GPU with the kernels that
ringflash takes by itself. Efficiency: TFLOP/s per GPU over that. All candidates of a case are checked against it, then timed
in turn from a start that the GPUs make together; a time is the longest of any GPU, and the median of the rounds counts.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measure import RUN, Row, torchrun, write
from torch import Tensor

import ringflash as rf
from ringflash.cli.timing import in_turn, matmul_tflops
from ringflash.schedule.plan import plan

HEAD_DIM = 128
DEVICE = "cuda"
# Efficiency of forward with backward that is wanted on two GPUs under a causal mask, by heads and total tokens.
GOALS = {
    "64:8": {8192: 0.95, 16384: 0.96, 32768: 0.97, 65536: 0.98, 262144: 0.98},
    "16:16": {8192: 0.86, 16384: 0.95, 32768: 0.97, 65536: 0.98, 262144: 0.98},
}
OTHER_GOALS = {"documents": 0.9, "window": 0.9}
HEAD_START_MS = 3.0  # what the GPU does meanwhile, so that the host is ahead, as in a training step
TOLERANCE = 1.5e-2
# 128k tokens in documents of 1k to 48k; other totals get as many of each kind as fit.
DOCUMENTS = (48, 24, 16, 12, 8, 8, 4, 4, 2, 1, 1)


@dataclass(frozen=True)
class Case:
    total: int
    heads: str
    mask: str

    @property
    def rule(self) -> Any:
        if self.mask == "documents":
            lengths = [n * self.total // 128 for n in DOCUMENTS]
            return rf.Documents(lengths, causal=True)
        return {"full": rf.Full(), "causal": rf.Causal(), "window": rf.Window(4095, 0)}[self.mask]

    def layout(self) -> rf.Layout:
        if self.mask == "documents":
            return rf.Balanced(self.rule)
        return rf.Contiguous() if self.mask == "window" else rf.Zigzag()

    def flops(self) -> float:
        """Of the whole sequence, forward."""
        return 4 * HEAD_DIM * int(self.heads.split(":")[0]) * plan(self.rule, rf.Contiguous(), self.total).pairs


@dataclass
class Inputs:
    """Of one rank: the whole sequence, alike on all, and its shard."""

    whole: tuple[Tensor, ...]  # q, k, v, gradient of out
    mine: tuple[Tensor, ...]

    @classmethod
    def of(cls, case: Case, ring: rf.Ring) -> Inputs:
        generator = torch.Generator(DEVICE).manual_seed(0)
        Hq, Hk = map(int, case.heads.split(":"))
        whole = tuple(
            torch.randn(1, case.total, H, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16, generator=generator)
            for H in (Hq, Hk, Hk, Hq)
        )
        return cls(whole, tuple(ring.shard(x) for x in whole))


# A candidate: a context in which it can be called, with whether to go backward; it returns out and its gradients.
Call = Callable[[bool], tuple[Tensor, ...]]
Candidate = Callable[[], AbstractContextManager[Call]]


def through(tensors: tuple[Tensor, ...], attend: Callable[..., Tensor]) -> Candidate:
    """Autograd around a function of q, k, v."""
    *inputs, dout = tensors

    def call(goes_back: bool) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = attend(*leaves)
        return (out, *torch.autograd.grad(out, leaves, dout)) if goes_back else (out,)

    return lambda: nullcontext(call)


def ours(case: Case, inputs: Inputs, ring: rf.Ring, **options: Any) -> Candidate:
    return through(inputs.mine, lambda q, k, v: rf.attention(q, k, v, ring=ring, mask=case.rule, **options))


def context_parallel(case: Case, inputs: Inputs) -> Candidate:
    """PyTorch's own, over cuDNN; it cuts a sequence as Zigzag does, and knows causal and full masks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel as enter
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("cp",))

    @contextmanager
    def ready() -> Iterator[Call]:
        q, k, v, dout = (x.transpose(1, 2).clone(memory_format=torch.contiguous_format) for x in inputs.whole)
        buffers = [q, k, v, dout]
        with (
            sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
            enter(mesh, buffers=buffers, buffer_seq_dims=[2] * 4, no_restore_buffers=set(buffers)),
        ):

            def call(goes_back: bool) -> tuple[Tensor, ...]:
                leaves = [x.detach().requires_grad_() for x in (q, k, v)]
                is_grouped = leaves[0].shape[1] != leaves[1].shape[1]
                out = F.scaled_dot_product_attention(*leaves, is_causal=case.mask == "causal", enable_gqa=is_grouped)
                results = (out, *torch.autograd.grad(out, leaves, dout)) if goes_back else (out,)
                return tuple(x.transpose(1, 2) for x in results)

            yield call

    return ready


def candidates(case: Case, inputs: Inputs, rings: dict[str, rf.Ring]) -> dict[str, Candidate]:
    Hq, Hk = map(int, case.heads.split(":"))
    found = {"alone": through(inputs.whole, lambda q, k, v: rf.attention(q, k, v, mask=case.rule))}
    found |= {name: ours(case, inputs, ring.with_layout(case.layout())) for name, ring in rings.items()}
    # By default the route that moves fewer bytes; the other one beside it.
    other = "keys" if Hq == Hk else "queries"
    fastest = rings["symmetric"].with_layout(case.layout())
    found[f"symmetric, {other} travel"] = ours(case, inputs, fastest, route=other)
    if case.mask in ("full", "causal"):
        from plain_ring import PlainRing

        found["plain NCCL ring"] = through(inputs.mine, PlainRing(case.mask == "causal"))
        if case.mask == "causal":  # it balances no other mask
            found["torch context parallel"] = context_parallel(case, inputs)
    return found


def difference(results: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """The largest relative error, of any rank."""
    errors = [
        (x.float() - y.float()).norm() / y.float().norm().clamp_min(1e-30)
        for x, y in zip(results, expected, strict=True)
    ]
    worst = torch.stack(errors).max()
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.item()


def time_ms(call: Call, goes_back: bool) -> float:
    """Of one call from a common start, the longest of all ranks."""
    together = torch.zeros(1, device="cuda")
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda._sleep(int(HEAD_START_MS * 2e6))  # cycles, at most 2 GHz
    dist.all_reduce(together)
    start.record()
    results = call(goes_back)
    end.record()
    torch.cuda.synchronize()
    del results
    longest = torch.tensor(start.elapsed_time(end), device="cuda")
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return longest.item()


def host_ms(case: Case, call: Call) -> float:
    """What a forward call takes of the host's time, median, of calls in a row, as layers of a step are."""
    times, in_a_row = [], 2 if case.total > 65536 else 8
    for _ in range(5):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda._sleep(int(HEAD_START_MS * 2e6))
        call(False)
        since = time.perf_counter()
        for _ in range(in_a_row):
            call(False)
        times.append((time.perf_counter() - since) * 1e3 / in_a_row)
    torch.cuda.synchronize()
    return median(times)


def measure(case: Case, rings: dict[str, rf.Ring], rounds: int, only: list[str] | None = None) -> Iterator[Row]:
    """Rows of a case, forward and both; what fails or differs is said and left out. only: candidates beside alone."""
    ring = next(iter(rings.values())).with_layout(case.layout())
    inputs = Inputs.of(case, ring)
    found = candidates(case, inputs, rings)
    if only is not None:
        found = {name: candidate for name, candidate in found.items() if name in ("alone", *only)}
    since = time.monotonic()
    with found["alone"]() as call:
        expected = tuple(ring.shard(x).clone() for x in call(True))
    host: dict[str, float] = {}
    for name in list(found):
        if name == "alone":
            continue
        try:
            with found[name]() as call:
                worst = difference(call(True), expected)
                if worst > TOLERANCE:
                    raise ValueError(f"differs by {worst:.1e}")
                host[name] = round(host_ms(case, call), 3)
            # Kernels are compiled here: minutes on a new machine.
            say(f"  {case.total} {case.heads} {case.mask}: {name} is right, {time.monotonic() - since:.0f} s")
        except Exception as error:  # a candidate that cannot run is a result too
            say(f"{case}: {name} left out: {type(error).__name__}: {str(error)[:200]}")
            del found[name]
    del expected
    times: dict[tuple[str, bool], list[float]] = {}
    order = list(found.items())
    for i in range(rounds + 1):
        for name, candidate in in_turn(order, i):
            with candidate() as call:
                if "context" in name:
                    call(True)  # its buffers are new
                for goes_back in (False, True):
                    ms = time_ms(call, goes_back)
                    if i:
                        times.setdefault((name, goes_back), []).append(ms)
    ranks = dist.get_world_size()
    for goes_back, factor in ((False, 1.0), (True, 3.5)):
        medians = {name: median(times[name, goes_back]) for name in found}
        alone = medians["alone"]
        tflops = {
            name: case.flops() * factor / ms / 1e9 / (1 if name == "alone" else ranks) for name, ms in medians.items()
        }
        efficiency = {name: round(alone / ms / ranks, 3) for name, ms in medians.items() if name != "alone"}
        extra = {"efficiency": efficiency, "host_ms": {} if goes_back else host}
        if goes_back and (goal := goal_of(case, ranks)) is not None:
            extra["goal"] = goal
        yield Row(
            "both" if goes_back else "forward", HEAD_DIM, case.heads, case.mask, case.total, 1, ranks,
            {name: round(x, 1) for name, x in tflops.items()}, efficiency.get("symmetric"), extra,
        )  # fmt: skip


def goal_of(case: Case, ranks: int) -> float | None:
    if ranks != 2:
        return None
    return GOALS.get(case.heads, {}).get(case.total) if case.mask == "causal" else OTHER_GOALS.get(case.mask)


def say(*words: object) -> None:
    if dist.get_rank() == 0:
        print(*words, flush=True)


def line(row: Row) -> str:
    names = "  ".join(f"{name} {row.tflops[name]:.0f} ({x:.2f})" for name, x in row.extra["efficiency"].items())
    goal = f"  goal {row.extra['goal']}" if "goal" in row.extra else ""
    head = f"{row.direction:8s}{row.heads:>6s} {row.mask:9s}{row.tokens:>7d}: alone {row.tflops['alone']:.0f}"
    return f"{head}  {names}{goal}"


def work(arguments: argparse.Namespace) -> None:
    """On every rank, started by torchrun."""
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    began, rows = time.monotonic(), []
    rings = {name: rf.Ring(transport=name) for name in ("symmetric", "peer", "gathered")}
    matmul = matmul_tflops()
    for total in arguments.totals:
        for heads in arguments.heads:
            for mask in arguments.masks:
                spent = torch.tensor(time.monotonic() - began, device="cuda")
                dist.all_reduce(spent, dist.ReduceOp.MAX)
                if spent.item() > arguments.seconds:
                    say(f"{total} {heads} {mask}: left out, {arguments.seconds} s are over")
                    continue
                for row in measure(Case(total, heads, mask), rings, arguments.rounds, arguments.only):
                    rows.append(row)
                    say(line(row))
                torch.cuda.empty_cache()
    if rank == 0:
        notes = str(__doc__).split("\n\n")[2]
        what = f"ring_x{dist.get_world_size()}"
        print(write(what, rows, gpus=dist.get_world_size(), matmul=matmul, out=arguments.out, notes=notes))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--totals", type=int, nargs="+", default=[8192, 16384, 32768, 65536, 262144])
    parser.add_argument("--heads", nargs="+", default=["16:16", "64:8"])
    parser.add_argument("--only", nargs="+", help="candidates by name, beside one GPU alone")
    parser.add_argument("--masks", nargs="+", default=["causal"], choices=["full", "causal", "documents", "window"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=300, help="no case is begun later")
    parser.add_argument("--out", type=Path, help="folder for the results; default benchmarks/results")
    arguments = parser.parse_args()
    if "LOCAL_RANK" in os.environ:
        work(arguments)
        return
    sys.exit(torchrun(torch.cuda.device_count(), RUN, "ring", *sys.argv[1:]))


if __name__ == "__main__":
    main()
