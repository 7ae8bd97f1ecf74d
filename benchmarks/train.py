"""Training steps of a GPT of 1.3 billion weights, with our attention and with PyTorch's own.

    python3 benchmarks/run.py train [--lengths 2048 8192 32768 131072] [--gpus 2] [--longest]

24 layers, hidden 2048, 16 heads of 128, MLP of 8192 with GELU, vocabulary 50304, rotary positions; weights, gradients
and AdamW's moments in bf16, loss by linear_cross_entropy for all. Arms on one GPU: ringflash.attention, and
scaled_dot_product_attention as torch chooses and over cuDNN. On several: a ring, and PyTorch's context parallel over
cuDNN, both under FSDP2 over the same GPUs. A step is forward, backward and optimizer, of as many tokens per GPU at
every length that fits; layers are checkpointed where `recomputed` says so, but for what attention gave, which all
keep but PyTorch's context parallel. The arms' losses are compared, then their steps timed in turn; a time is the
longest of any GPU, and the median of the rounds counts. Model TFLOP/s per GPU: (6 N + 6 L H S) per token, N weights
without the embedding, L layers, H hidden, S tokens of a sequence, of which a query sees half; recomputation does not
count. Peak is torch's, in GiB, of any GPU, without what `symmetric` holds outside of torch's allocator
(docs/design.md has the formula). --longest finds how long one sequence fits, to a sixteenth, every layer
checkpointed; each try in processes of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import GPT, Attend, Batch, Size
from measure import RUN, Row, torchrun, write
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import ringflash as rf
from ringflash.cli.timing import in_turn, matmul_tflops
from ringflash.training import keep_attention

DEVICE, DTYPE = "cuda", torch.bfloat16
LENGTHS = (2048, 8192, 32768, 131072)
TOKENS_PER_GPU = 32768
RECOMPUTED_FROM = 65536  # tokens per GPU
TOLERANCE = 5e-3  # of a loss, relative
NO_ROOM = "out of memory"
# Of these two lengths' peaks a line is made, which says about how long a sequence fits.
SHORT_TRIES = (16384, 32768)


@dataclass
class Arm:
    """One way to attend: enter(batch) gives this rank's part of it and the function, while a step is made."""

    name: str
    enter: Any
    recomputing: dict[str, Any]


def arms(ranks: int) -> list[Arm]:
    if ranks == 1:
        plain = Arm("torch", partial(as_it_is, by_torch), {"context_fn": torch_keeps})
        return [ours(rf.Causal()), plain, *by_cudnn()]
    ring = rf.Ring(transport="symmetric")
    return [Arm("ringflash", partial(on_ring, ring), {"context_fn": keep_attention}), *context_parallel(ranks)]


def torch_keeps() -> tuple[Any, Any]:
    """A context_fn, as keep_attention is one for ours."""
    aten = torch.ops.aten
    kept = (
        aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_cudnn_attention,
        aten._scaled_dot_product_flash_attention_for_cpu,
    )
    return create_selective_checkpoint_contexts([op.default for op in kept])


def ours(mask: rf.Mask) -> Arm:
    return Arm("ringflash", partial(as_it_is, partial(rf.attention, mask=mask)), {"context_fn": keep_attention})


def by_cudnn() -> list[Arm]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    @contextmanager
    def entered(batch: Batch) -> Iterator[tuple[Batch, Attend]]:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            yield batch, by_torch

    return [Arm("torch cudnn", entered, {"context_fn": torch_keeps})]


def by_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)


@contextmanager
def as_it_is(attend: Attend, batch: Batch) -> Iterator[tuple[Batch, Attend]]:
    yield batch, attend


@contextmanager
def on_ring(ring: rf.Ring, batch: Batch) -> Iterator[tuple[Batch, Attend]]:
    mine = Batch(*(ring.shard(x) for x in (batch.ids, batch.labels, batch.positions)))
    yield mine, partial(rf.attention, ring=ring, mask=rf.Causal())


def context_parallel(ranks: int) -> list[Arm]:
    from torch.distributed.tensor.experimental import context_parallel as enter
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = init_device_mesh(DEVICE, (ranks,), mesh_dim_names=("cp",))

    @contextmanager
    def entered(batch: Batch) -> Iterator[tuple[Batch, Attend]]:
        buffers = [x.clone() for x in (batch.ids, batch.labels, batch.positions)]
        with (
            sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
            enter(mesh, buffers=buffers, buffer_seq_dims=[1] * 3, no_restore_buffers=set(buffers)),
        ):
            yield Batch(*buffers), by_torch

    return [Arm("torch context parallel", entered, {})]


@dataclass
class Run:
    """A model and its optimizer, which all arms train in turn."""

    model: GPT
    optimizer: torch.optim.Optimizer
    ranks: int

    @classmethod
    def made(cls, size: Size, ranks: int) -> Run:
        torch.manual_seed(0)
        with torch.device(DEVICE):
            model = GPT(size).to(DTYPE)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=0.02)
        if ranks > 1:
            for block in model.blocks:
                fully_shard(block)
            fully_shard(model)
        return cls(model, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=DEVICE == "cuda"), ranks)

    def loss(self, arm: Arm, batch: Batch, recomputed: bool, *, goes_back: bool) -> float | None:
        """A step, or the loss of the whole batch."""
        with arm.enter(batch) as (mine, attend):
            total = self.model(mine, attend, arm.recomputing if recomputed else None)
            if goes_back:
                # FSDP averages over the ranks, which hold parts of one sum.
                (total * self.ranks / batch.labels.numel()).backward()
        if goes_back:
            self.optimizer.step()
            self.optimizer.zero_grad()
            return None
        total = total.detach().clone()
        if self.ranks > 1:
            dist.all_reduce(total)
        return total.item() / batch.labels.numel()


def largest(value: float) -> float:
    """Of any rank."""
    if not dist.is_initialized():
        return value
    tensor = torch.tensor(value, device=DEVICE, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()


def step_s(run: Run, arm: Arm, batch: Batch, recomputed: bool) -> tuple[float, float]:
    """(seconds, peak GiB) of a step, the largest of any rank."""
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()
    since = time.perf_counter()
    run.loss(arm, batch, recomputed, goes_back=True)
    torch.cuda.synchronize()
    return largest(time.perf_counter() - since), largest(torch.cuda.max_memory_allocated() / 2**30)


def measure(run: Run, length: int, rounds: int, ranks: int, only: list[str] | None = None) -> Row:
    size = run.model.size
    rows = max(1, TOKENS_PER_GPU * ranks // length)
    tokens = rows * length
    recomputed = tokens // ranks >= RECOMPUTED_FROM
    batch, found = Batch.drawn(rows, length, size.vocabulary, DEVICE), arms(ranks)
    if unknown := sorted(set(only or ()) - {arm.name for arm in found}):
        raise ValueError(f"no arm is called {', '.join(unknown)}; there are {', '.join(arm.name for arm in found)}")
    found = [arm for arm in found if only is None or arm.name in ("ringflash", *only)]
    with torch.no_grad():
        losses = {arm.name: run.loss(arm, batch, False, goes_back=False) for arm in found}
    expected = next(iter(losses.values()))
    for name, loss in losses.items():
        if abs(loss - expected) > TOLERANCE * abs(expected):
            raise ValueError(f"losses differ: {losses} ({name})")
    times: dict[str, list[tuple[float, float]]] = {arm.name: [] for arm in found}
    for i in range(rounds + 1):
        for arm in in_turn(found, i):
            result = step_s(run, arm, batch, recomputed)
            if i:  # in the first one kernels are compiled
                times[arm.name].append(result)
    weights = sum(p.numel() for name, p in run.model.named_parameters() if not name.startswith("embedding"))
    flops = 6 * (weights + size.layers * size.hidden * length) * tokens
    seconds = {name: median(s for s, _ in results) for name, results in times.items()}
    return Row(
        "train", size.hidden // size.heads, f"{size.heads}:{size.heads}", "causal", length, rows, ranks,
        {name: round(flops / s / 1e12 / ranks, 1) for name, s in seconds.items()},
        extra={
            "tokens_per_s": {name: round(tokens / s) for name, s in seconds.items()},
            "peak_gib": {name: round(max(peak for _, peak in results), 1) for name, results in times.items()},
            "recomputed": "yes" if recomputed else "no",
            "loss": {name: round(loss, 4) for name, loss in losses.items()},
        },
    )  # fmt: skip


def peaks(run: Run, lengths: list[int], ranks: int, window: int | None) -> list[float]:
    """Peak GiB of a step of one sequence of our arm, every layer checkpointed, after a short one, which makes the moments.

    window: of one GPU, whose memory is the same whatever a query sees, and the time is not.
    """
    arm = arms(ranks)[0] if window is None else ours(rf.Window(window, 0))
    batches = (Batch.drawn(1, tokens, run.model.size.vocabulary, DEVICE) for tokens in (1024, *lengths))
    return [round(step_s(run, arm, batch, True)[1], 2) for batch in batches][1:]


def say(*words: object) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(*words, flush=True)


def work(arguments: argparse.Namespace) -> None:
    """On every rank, started by torchrun."""
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    ranks = int(os.environ["WORLD_SIZE"])
    if ranks > 1:
        dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    run = Run.made(Size(), ranks)
    if arguments.trying:
        found = peaks(run, arguments.trying, ranks, arguments.window)
        if rank == 0:
            gib = torch.cuda.mem_get_info()[1] / 2**30
            arguments.verdict.write_text(json.dumps([*found, round(gib, 2)]))
        return
    matmul = matmul_tflops()
    rows = []
    for length in arguments.lengths:
        row = measure(run, length, arguments.rounds, ranks, arguments.arms)
        rows.append(row)
        say(length, row.tflops, row.extra)
        if rank == 0:  # a longer one may run out of memory, or of time
            notes = " ".join(str(__doc__).split("\n\n")[2].split())
            which = "" if tuple(arguments.lengths) == LENGTHS else "_s" + "-".join(map(str, arguments.lengths))
            say(write(f"train_x{ranks}{which}", rows, gpus=ranks, matmul=matmul, out=arguments.out, notes=notes))
    if dist.is_initialized():
        dist.destroy_process_group()


def launched(gpus: int, *arguments: str) -> int:
    return torchrun(gpus, RUN, "train", *arguments)


def longest(gpus: int) -> None:
    """How long a sequence fits, to a sixteenth; each try in processes of its own, for one rank may run out alone."""

    def tried(window: int | None, *lengths: int) -> list[float] | None:
        """Peak GiB of each, and that of the GPU, or None where it runs out."""
        with tempfile.TemporaryDirectory() as folder:
            verdict = Path(folder) / "verdict"
            said = [] if window is None else ["--window", str(window)]
            status = launched(gpus, "--trying", *map(str, lengths), "--verdict", str(verdict), *said)
            found = verdict.read_text() if verdict.exists() else ""
        if found != NO_ROOM and status:
            sys.exit(f"{lengths} tokens: ended with status {status}, and not for want of memory")
        print(f"{gpus} GPUs, {lengths} tokens{' in a window' if said else ''}: {found} GiB", flush=True)
        return None if found == NO_ROOM else json.loads(found)

    window = None
    found = tried(None, *SHORT_TRIES)
    if found is None:
        sys.exit(f"{SHORT_TRIES[1]} tokens do not fit")
    short, long, whole = found
    if gpus == 1:
        window = 1023
        again = tried(window, SHORT_TRIES[1])
        if again is None or abs(again[0] - long) > 0.01 * long:
            sys.exit("a window takes another amount of memory: times cannot be saved by it")
    per_token = (long - short) / (SHORT_TRIES[1] - SHORT_TRIES[0])
    guess = SHORT_TRIES[1] + int((whole - long) / per_token)
    print(f"{gpus} GPUs: {search(lambda length: tried(window, length) is not None, guess)} tokens fit")


def search(fitting: Callable[[int], bool], guess: int) -> int:
    """The longest length that was seen to fit, to a sixteenth of the guess, in steps from there."""
    step = max(1024, guess // 16 // 1024 * 1024)
    length = guess // step * step
    if fitting(length):
        while fitting(length + step):
            length += step
        return length
    while length > step:
        length -= step
        if fitting(length):
            return length
    sys.exit(f"{length} tokens do not fit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--gpus", type=int, help="default all")
    parser.add_argument("--arms", nargs="+", help="by name, beside ringflash; default all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--longest", action="store_true", help="how long a sequence fits, instead of times")
    parser.add_argument("--trying", type=int, nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--verdict", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--window", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="folder for the results; default benchmarks/results")
    arguments = parser.parse_args()
    if "LOCAL_RANK" in os.environ:
        try:
            work(arguments)
        except RuntimeError as error:
            # Memory that ranks share is not torch's allocator's, whose error is a kind of its own.
            if arguments.verdict is None or "out of memory" not in str(error).lower():
                raise
            arguments.verdict.write_text(NO_ROOM)
            os._exit(1)  # others may be waiting for this rank: torchrun ends them
        return
    gpus = arguments.gpus or torch.cuda.device_count()
    if arguments.longest:
        longest(gpus)
    else:
        sys.exit(launched(gpus, *sys.argv[1:]))


if __name__ == "__main__":
    main()
