"""Training steps of a GPT of 1.3 billion weights, with our attention and with PyTorch's own.

    python3 benchmarks/run.py train [--lengths 2048 8192 32768 131072] [--gpus 2] [--longest]

24 layers, hidden 2048, 16 heads of 128, MLP of 8192 with GELU, vocabulary 50304, rotary positions; weights, gradients and
AdamW's moments in bf16, loss by linear_cross_entropy for all. Arms on one GPU: ringflash.attention, and
scaled_dot_product_attention. On several: a ring, and PyTorch's context parallel over cuDNN, both under FSDP2 over the
same GPUs. A step is forward, backward and optimizer, of as many tokens per GPU at every length that fits; layers are
checkpointed where `recomputed` says so, with keep_attention for ours. The arms' losses are compared, then their steps
timed in turn; a time is the longest of any GPU, and the median of the rounds counts. Model TFLOP/s per GPU: (6 N + 6 L H
S) per token, N weights without the embedding, L layers, H hidden, S tokens of a sequence, of which a query sees half;
recomputation does not count. Peak is torch's, in GiB, of any GPU, without what `symmetric` holds outside of torch's
allocator (docs/design.md has the formula). --longest finds how long one sequence fits, to an eighth, every layer
checkpointed; each try in processes of its own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
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
from measure import Row, write
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import ringflash as rf
from ringflash.cli.timing import in_turn, matmul_tflops
from ringflash.training import keep_attention, linear_cross_entropy

DEVICE, DTYPE = "cuda", torch.bfloat16
TOKENS_PER_GPU = 32768
RECOMPUTED_FROM = 65536  # tokens per GPU
TOLERANCE = 5e-3  # of a loss, relative
NO_ROOM = "out of memory"


@dataclass(frozen=True)
class Size:
    layers: int = 24
    hidden: int = 2048
    heads: int = 16
    vocabulary: int = 50304


# (q, k, v) [B, S_local, H, D] -> out alike
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norms = nn.ModuleList(nn.RMSNorm(size.hidden) for _ in range(2))
        self.qkv = nn.Linear(size.hidden, 3 * size.hidden, bias=False)
        self.out = nn.Linear(size.hidden, size.hidden, bias=False)
        self.up = nn.Linear(size.hidden, 4 * size.hidden, bias=False)
        self.down = nn.Linear(4 * size.hidden, size.hidden, bias=False)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.out(attend(rotated(q, angles), rotated(k, angles), v).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.embedding = nn.Embedding(size.vocabulary, size.hidden)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.hidden)
        self.head = nn.Linear(size.hidden, size.vocabulary, bias=False)

    def forward(self, batch: Batch, attend: Attend, recomputed: Any) -> Tensor:
        """The sum of the losses of the tokens here. recomputed: options of checkpoint, or None."""
        dim = self.size.hidden // self.size.heads
        frequencies = 1e-4 ** (torch.arange(0, dim, 2, device=batch.positions.device) / dim)
        angles = batch.positions[0, :, None, None] * frequencies
        turned = angles.cos().to(self.head.weight.dtype), angles.sin().to(self.head.weight.dtype)
        x = self.embedding(batch.ids)
        for block in self.blocks:
            if recomputed is None:
                x = block(x, turned, attend)
            else:
                x = checkpoint(block, x, turned, attend, use_reentrant=False, **recomputed)
        return linear_cross_entropy(self.norm(x), self.head.weight, batch.labels).sum()


def rotated(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    (a, b), (cos, sin) = x.chunk(2, dim=-1), angles
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


@dataclass
class Batch:
    """[B, S] each: of whole sequences, or of this rank's part of them."""

    ids: Tensor
    labels: Tensor
    positions: Tensor

    @classmethod
    def drawn(cls, rows: int, length: int, vocabulary: int) -> Batch:
        generator = torch.Generator(DEVICE).manual_seed(0)
        ids = torch.randint(vocabulary, (rows, length + 1), device=DEVICE, generator=generator)
        positions = torch.arange(length, device=DEVICE).expand(rows, -1)
        return cls(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), positions.contiguous())


@dataclass
class Arm:
    """One way to attend: enter(batch) gives this rank's part of it and the function, while a step is made."""

    name: str
    enter: Any
    recomputing: dict[str, Any]


def arms(ranks: int) -> list[Arm]:
    if ranks == 1:
        return [
            Arm(
                "ringflash", partial(as_it_is, partial(rf.attention, mask=rf.Causal())), {"context_fn": keep_attention}
            ),
            Arm("torch", partial(as_it_is, by_torch), {}),
        ]
    ring = rf.Ring(transport="symmetric")
    return [Arm("ringflash", partial(on_ring, ring), {"context_fn": keep_attention}), *context_parallel(ranks)]


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


def measure(run: Run, length: int, rounds: int, ranks: int) -> Row:
    size = run.model.size
    rows = max(1, TOKENS_PER_GPU * ranks // length)
    tokens = rows * length
    recomputed = tokens // ranks >= RECOMPUTED_FROM
    batch, found = Batch.drawn(rows, length, size.vocabulary), arms(ranks)
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


def fits(run: Run, length: int, ranks: int) -> float:
    """Peak GiB of two steps of one sequence of our arm, every layer checkpointed."""
    batch, arm = Batch.drawn(1, length, run.model.size.vocabulary), arms(ranks)[0]
    return max(step_s(run, arm, batch, True)[1] for _ in range(2))


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
        peak = fits(run, arguments.trying, ranks)
        if rank == 0:
            arguments.verdict.write_text(f"{peak:.1f} GiB")
        return
    rows = []
    for length in arguments.lengths:
        row = measure(run, length, arguments.rounds, ranks)
        rows.append(row)
        say(length, row.tflops, row.extra)
    matmul = matmul_tflops()
    if rank == 0:
        notes = " ".join(str(__doc__).split("\n\n")[2].split())
        print(write(f"train_x{ranks}", rows, gpus=ranks, matmul=matmul, out=arguments.out, notes=notes))
    if dist.is_initialized():
        dist.destroy_process_group()


def launched(gpus: int, *arguments: str) -> int:
    here = Path(__file__).resolve().parent
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
    return subprocess.run([*command, str(here / "run.py"), "train", *arguments], check=False).returncode


def longest(gpus: int) -> None:
    """How long a sequence fits, to an eighth of it; each try in processes of its own, for one rank may run out alone."""

    def fitting(length: int) -> bool:
        with tempfile.TemporaryDirectory() as folder:
            verdict = Path(folder) / "verdict"
            status = launched(gpus, "--trying", str(length), "--verdict", str(verdict))
            found = verdict.read_text() if verdict.exists() else ""
        if found == NO_ROOM or status == 0:
            print(f"{gpus} GPUs, {length} tokens: {found}", flush=True)
            return status == 0
        sys.exit(f"{length} tokens: ended with status {status}, and not for want of memory")

    print(f"{gpus} GPUs: {search(fitting, 131072)} tokens fit")


def search(fitting: Callable[[int], bool], start: int) -> int:
    """The longest length that was seen to fit, to an eighth: by doubling or halving, then in between."""
    length = start
    if fitting(length):
        while fitting(2 * length):
            length *= 2
    else:
        while length > 1024 and not fitting(length // 2):
            length //= 2
        length //= 2
    step = length // 2
    for _ in range(3):
        length += step if fitting(length + step) else 0
        step //= 2
    return length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 32768, 131072])
    parser.add_argument("--gpus", type=int, help="default all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--longest", action="store_true", help="how long a sequence fits, instead of times")
    parser.add_argument("--trying", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--verdict", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="folder for the results; default benchmarks/results")
    arguments = parser.parse_args()
    if "LOCAL_RANK" in os.environ:
        try:
            work(arguments)
        except torch.OutOfMemoryError:
            if arguments.verdict is None:
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
