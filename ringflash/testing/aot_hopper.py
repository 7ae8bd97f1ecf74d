"""Compile the Hopper kernels as the backend launches them, without a GPU, and read what they take from the machine code.

    python -m ringflash.testing.aot_hopper forward        prints a JSON line per variant, and so does: backward

The launch is the backend's own, up to the driver: tile sizes, arguments and options are those of a GPU. Which Triton
compiles is decided by what is first on PYTHONPATH.
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import Any, Literal, cast
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.errors import TritonError

from ringflash.kernels.backend import Arrivals, Departures, Lands, Rows
from ringflash.kernels.hopper import launch
from ringflash.kernels.hopper.tuning import MULTIPROCESSORS
from ringflash.kernels.partial import Partial, row_statistic
from ringflash.kernels.score import Score
from ringflash.schedule.tiles import Bounds, Shape
from ringflash.testing.machine_code import Loop, Usage, disassembly, product_loops, resources

TOKENS, QUERY_HEADS, KEY_HEADS = 256, 2, 1  # what is short; other sizes compile alike, but for forward_warpgroups
LONG = 16384
SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Variant:
    """One kernel of a call. Forward: into what was there before, and rounded for good; backward: stored whole or added.

    Of a call of backward that launches two: "keys" is the one that forms dk and dv alone, "queries" the one that forms dq.
    """

    direction: Literal["forward", "backward", "keys", "queries"]
    head_dim: int
    value_dim: int
    shape: str  # of bounds, or "blocks" where they have diagonals
    is_into: bool = False
    is_whole: bool = False  # forward: the last keys; backward: all keys
    is_waiting: bool = False  # forward: for keys that arrive meanwhile; backward: for queries, or keys if not all
    dtype: torch.dtype = torch.bfloat16
    tokens: int = TOKENS

    @property
    def name(self) -> str:
        dims = f"d{self.head_dim}" if self.head_dim == self.value_dim else f"d{self.head_dim}/{self.value_dim}"
        if self.direction == "forward":
            words = [("long", self.tokens == LONG), ("into", self.is_into), ("rounded", self.is_whole)]
            words += [("waiting", self.is_waiting)]
        else:
            words = [("stored", self.is_whole), ("waiting", self.is_waiting)]
        modes = [word for word, is_so in words if is_so]
        return " ".join([self.direction, dims, SHORT[self.dtype], self.shape, *modes])


@dataclass(frozen=True)
class HopperUsage(Usage):
    triton: str
    threads: int
    is_serialized: bool  # ptxas saw an accumulator used early, and waits after each product
    loops: list[Loop]  # those that hold products, each warpgroup its own


# (head dim, value dim), shape, is_into, is_whole. Every head dim that has tiles of its own, with the shapes and ways to
# store that spill most; 64 and 128 with every shape. All products would take ten minutes.
FORWARD: tuple[tuple[tuple[int, int], Shape, bool, bool], ...] = (
    ((64, 64), "full", False, True),
    ((64, 64), "causal", False, False),
    ((64, 64), "rows", True, True),
    ((128, 128), "full", True, False),
    ((128, 128), "causal", False, True),
    ((128, 128), "rows", False, False),
    ((192, 128), "rows", True, False),
    ((256, 256), "full", True, True),
    ((256, 256), "rows", True, False),
)
BACKWARD: tuple[tuple[tuple[int, int], Shape, bool], ...] = (
    ((64, 64), "full", False),
    ((64, 64), "causal", True),
    ((64, 64), "rows", False),
    ((128, 128), "full", True),
    ((128, 128), "causal", False),
    ((128, 128), "rows", True),
)
KEYS: tuple[tuple[tuple[int, int], Shape, bool], ...] = (
    ((64, 64), "rows", True),
    ((128, 128), "causal", True),
    ((128, 128), "rows", False),
    ((192, 128), "causal", False),
    ((256, 256), "full", True),
    ((256, 256), "rows", False),
)
QUERIES: tuple[tuple[tuple[int, int], Shape, bool], ...] = (
    ((64, 64), "causal", False),
    ((64, 64), "rows", True),
    ((128, 128), "causal", True),
    ((128, 128), "rows", False),
    ((192, 128), "causal", True),
    ((192, 128), "rows", False),
    ((256, 256), "full", True),
    ((256, 256), "rows", False),
)


def variants(direction: str) -> Iterator[Variant]:
    if direction == "forward":
        for dims, shape, is_into, is_whole in FORWARD:
            yield Variant("forward", *dims, shape, is_into, is_whole)
        yield Variant("forward", 64, 64, "causal", is_into=True, tokens=LONG)
        yield Variant("forward", 128, 128, "rows", is_whole=True, dtype=torch.float16)  # compiles like bf16
        yield Variant("forward", 128, 128, "rows", is_whole=True, is_waiting=True)
        yield Variant("forward", 128, 128, "blocks", is_whole=True, is_waiting=True)
    else:
        for dims, shape, is_whole in BACKWARD:
            yield Variant("backward", *dims, shape, is_whole=is_whole)
        yield Variant("backward", 128, 128, "rows", is_waiting=True)
        yield Variant("backward", 64, 64, "rows", is_whole=True, is_waiting=True)
        yield Variant("backward", 128, 128, "blocks", is_whole=True, is_waiting=True)
        for dims, shape, is_whole in KEYS:
            yield Variant("keys", *dims, shape, is_whole=is_whole)
        for dims, shape, is_whole in QUERIES:
            yield Variant("queries", *dims, shape, is_whole=is_whole)


class Sm90:
    """What Triton asks of a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiled:
    """Stands where the launcher looks for a kernel: compiles for the arguments of the launch, and launches nothing.

    Without a kernel it does not even compile: it stands for the launch beside the one that is looked at.
    """

    def __init__(self, kernel: Any = None) -> None:
        self.kernel = kernel
        self.result: Any = None

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def compile(*arguments: Any, **options: Any) -> None:
            if self.kernel is not None:
                self.result = self.kernel.warmup(*arguments, grid=grid, **options)

        return compile


KERNELS = ("forward_kernel", "backward_kernel", "wide_backward_kernel", "queries_backward_kernel")


def kernel_of(variant: Variant) -> str:
    """The name that the launcher has for the kernel of a variant."""
    if variant.direction == "queries":
        return "queries_backward_kernel"
    is_wide = variant.direction == "keys" and max(variant.head_dim, variant.value_dim) > 128
    return "wide_backward_kernel" if is_wide else f"{variant.direction.replace('keys', 'backward')}_kernel"


def compile_variant(variant: Variant) -> HopperUsage:
    """Usage of one variant. What ptxas says is printed by Triton, hence caught; from its cache it would say nothing."""
    name = kernel_of(variant)
    compiled = Compiled(getattr(launch, name).kernel)
    kernels: dict[str, Any] = {other: Compiled() for other in KERNELS} | {name: compiled}
    log = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as cache,
        patch.object(triton.knobs.cache, "dir", cache),
        patch.object(triton.knobs.nvidia, "dump_ptxas_log", True),
        patch.multiple(launch, **kernels),
        patch.object(launch, "_multiprocessors", lambda device: MULTIPROCESSORS),
        patch.object(launch, "_counter", lambda device: torch.zeros(1, dtype=torch.int32)),
        patch.object(torch.cuda, "device", lambda device: nullcontext()),
        redirect_stdout(log),
    ):
        (_forward if variant.direction == "forward" else _backward)(variant)
    if "Compiling entry function" not in log.getvalue():
        raise RuntimeError(f"{variant.name}: ptxas did not run, or Triton no longer prints its log: {log.getvalue()}")
    metadata, cubin = compiled.result.metadata, compiled.result.asm["cubin"]
    registers, stack = resources(cubin)
    return HopperUsage(
        variant.name,
        registers,
        stack,
        metadata.shared,
        0,
        triton=triton.__version__,
        threads=metadata.num_warps * 32,
        is_serialized="wgmma.mma_async instructions are serialized" in log.getvalue(),
        loops=product_loops(disassembly(cubin)),
    )


def _forward(variant: Variant) -> None:
    q, k, v = _inputs(variant)
    into = Partial.unset(q, variant.value_dim) if variant.is_into else None
    score = Score().resolve(variant.head_dim)
    arrivals = _arrivals(k, v) if variant.is_waiting else None
    launch.Hopper().forward(q, k, v, _bounds(variant), score, into, variant.is_whole, arrivals)


def _backward(variant: Variant) -> None:
    q, k, v = _inputs(variant)
    dout = q.new_empty(1, variant.tokens, QUERY_HEADS, variant.value_dim)
    statistic = row_statistic(q, torch.float32)
    dq, dk, dv = (torch.empty_like(x, dtype=None if variant.is_whole else torch.float32) for x in (q, k, v))
    rows, score = Rows(dout, dout, statistic, statistic, False), Score().resolve(variant.head_dim)
    lands = None
    if variant.is_waiting:
        done, counts, blocks = torch.zeros(3, 2, dtype=torch.int32)
        shard, heads = ((q, dout, statistic, statistic), QUERY_HEADS) if variant.is_whole else ((k, v), KEY_HEADS)
        departures = Departures(done, counts, heads, blocks, 1)
        lands = Lands("queries" if variant.is_whole else "keys", _arrivals(*shard), departures)
        dq = dq.float()
    launch.Hopper().backward(
        q, k, v, rows, _bounds(variant), score, dq, dk, dv, deterministic=variant.direction != "backward",
        is_all=variant.is_whole, lands=lands,
    )  # fmt: skip


def _arrivals(*shard: Tensor) -> Arrivals:
    flags = torch.zeros(2, dtype=torch.int32)
    return Arrivals(flags, 128, (0, 0), flags, shard)


def _inputs(variant: Variant) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.empty(1, variant.tokens, QUERY_HEADS, variant.head_dim, dtype=variant.dtype)
    k = q.new_empty(1, variant.tokens, KEY_HEADS, variant.head_dim)
    return q, k, q.new_empty(1, variant.tokens, KEY_HEADS, variant.value_dim)


def _bounds(variant: Variant) -> Bounds:
    tokens = variant.tokens
    ends = torch.zeros(1, tokens, dtype=torch.int32)
    positions = torch.arange(tokens)
    shape = cast(Shape, "rows" if variant.shape == "blocks" else variant.shape)
    return Bounds(
        tokens,
        tokens,
        lambda device: (ends, ends),
        lambda: (positions, positions),
        shape=shape,
        is_causal=variant.shape == "blocks",
    )


def line_of(variant: Variant) -> dict[str, Any]:
    """What is printed of a variant."""
    triton.runtime.driver.set_active(Sm90())
    try:
        return asdict(compile_variant(variant))
    except (TritonError, RuntimeError) as error:  # of the compiler's stages; the other variants still count
        cause: BaseException = error
        while cause.__cause__ is not None:  # the outermost only names the call in the kernel's last line
            cause = cause.__cause__
        return {"name": variant.name, "triton": triton.__version__, "error": str(cause)}


def main(directions: list[str]) -> None:
    # Two at a time halve the three to four minutes that all variants of two releases take on a core.
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        for line in pool.map(line_of, [variant for direction in directions for variant in variants(direction)]):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
