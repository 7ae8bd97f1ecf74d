"""KernelTable: which kernels are fastest where, measured on one kind of GPU.

The library's own tables are in measured/, written by benchmarks/table.py from a result of benchmarks/kernels.py, and taken
on the GPU that they were measured on. Another one is an argument: attention(..., backend=KernelTable.read(path)).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from ringflash.schedule.traced import Traced, carried

Direction = Literal["forward", "backward"]
MaskKind = Literal["full", "causal", "other"]

HEAD_DIMS = (64, 128, 256)  # others run in the tiles of the next one
LENGTHS = (1024, 2048, 4096, 8192)


def head_dim_class(head_dim: int) -> int:
    """The measured head dim that this one is padded to; 0 for those beyond."""
    return next((dim for dim in HEAD_DIMS if head_dim <= dim), 0)


def length_class(tokens: int) -> int:
    """The length of LENGTHS that stands for this one: tokens up to it, and 8192 for all that are longer.

    0 up to 512 tokens, where launches decide and nothing is measured.
    """
    if 2 * tokens <= LENGTHS[0]:
        return 0
    return next((length for length in LENGTHS if tokens <= length), LENGTHS[-1])


# What calls are looked up by.
CELLS: dict[str, tuple[object, ...]] = {
    "direction": ("forward", "backward"),
    "head_dim": HEAD_DIMS,
    "mask": ("full", "causal"),
    "length": LENGTHS,
}


class Cell(NamedTuple):
    """Calls that one ranking holds for; head_dim and length are classes."""

    direction: str
    head_dim: int
    mask: str
    length: int


@carried()
@dataclass(frozen=True, eq=False)
class KernelTable(metaclass=Traced):
    """TFLOP/s of backends by direction, head dim, mask and length, measured on one kind of GPU.

    gpu: the device's name, as torch gives it.
    cells: Cell -> backend -> TFLOP/s, positive and finite; kept with the fastest first.
    about: where the figures come from.
    ValueError for a cell that no call can match, no cell at all, or a speed that is none.
    Compared by identity: read a table once and keep it. attention(..., backend=table) then takes the fastest backend that
    can serve a call by this table instead of the library's own.
    """

    gpu: str
    cells: Mapping[Cell, Mapping[str, float]]
    about: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not isinstance(self.gpu, str) or not self.gpu:
            raise ValueError(f"KernelTable: gpu = {self.gpu!r}; must be a device's name, as torch gives it")
        if not isinstance(self.cells, Mapping) or not self.cells:
            raise ValueError(f"KernelTable: cells = {self.cells!r}; must rank backends in one cell at least")
        for cell, speeds in self.cells.items():
            for name, accepted in CELLS.items():
                if getattr(cell, name) not in accepted:
                    raise ValueError(
                        f"KernelTable: {cell} has {name} {getattr(cell, name)!r}; must be one of {accepted}"
                    )
            if not speeds:
                raise ValueError(f"KernelTable: {cell} ranks nobody; must name one backend at least")
            for name, speed in speeds.items():
                if isinstance(speed, bool) or not isinstance(speed, (int, float)) or not 0 < speed < math.inf:
                    raise ValueError(f"KernelTable: {cell} gives {name} {speed!r} TFLOP/s; must be positive and finite")
        # By speed, whoever wrote the file in what order.
        ranked = {cell: dict(sorted(found.items(), key=lambda item: -item[1])) for cell, found in self.cells.items()}
        object.__setattr__(self, "cells", ranked)

    @classmethod
    def of(
        cls, gpu: str, rows: Iterable[tuple[str, int, str, int, Mapping[str, float]]], about: Mapping[str, Any]
    ) -> KernelTable:
        """From (direction, head dim, mask, tokens, TFLOP/s by backend); rows of one cell are averaged.

        Rows of lengths and head dims that have no class rank nobody.
        """
        found: dict[Cell, dict[str, list[float]]] = {}
        for direction, head_dim, mask, tokens, tflops in rows:
            cell = Cell(direction, head_dim_class(head_dim), mask, length_class(tokens))
            if cell.head_dim and cell.length:
                speeds = found.setdefault(cell, {})
                for name, speed in tflops.items():
                    speeds.setdefault(name, []).append(speed)
        means = {
            cell: {name: round(sum(speeds) / len(speeds), 1) for name, speeds in found[cell].items()}
            for cell in sorted(found)
        }
        return cls(gpu, {cell: mean for cell, mean in means.items() if mean}, about)

    @classmethod
    def read(cls, path: str | Path) -> KernelTable:
        """A table that `write` wrote, as `python -m ringflash bench kernels --out` does. ValueError for any other file."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            cells: dict[Cell, dict[str, float]] = {}
            for row in content["cells"]:
                cell = Cell(row["direction"], row["head_dim"], row["mask"], row["length"])
                if cell in cells:
                    raise ValueError(f"{cell} is there twice")
                cells[cell] = dict(row["tflops"])
            return cls(content["gpu"], cells, dict(content["about"]))
        except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
            raise ValueError(
                f"KernelTable: {path} is no table of `python -m ringflash bench kernels --out`: {error!r}"
            ) from error

    def write(self, path: str | Path) -> None:
        """As JSON, a line per cell."""
        rows = [json.dumps({**cell._asdict(), "tflops": dict(speeds)}) for cell, speeds in self.cells.items()]
        head = json.dumps({"gpu": self.gpu, "about": dict(self.about)}, indent=1)
        text = head.removesuffix("\n}") + ',\n "cells": [\n  ' + ",\n  ".join(rows) + "\n ]\n}\n"
        Path(path).write_text(text, encoding="utf-8")

    def order(self, direction: Direction, head_dim: int, mask: MaskKind, length: int) -> tuple[str, ...]:
        """Backends by speed, the fastest first, for a head dim and a length class; nobody where nothing was measured."""
        return tuple(self.cells.get(Cell(direction, head_dim_class(head_dim), mask, length), ()))


def gpu_name(device: torch.device) -> str:
    """What tables call a device; "cpu" where there is no GPU to ask."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" and torch.cuda.is_available() else "cpu"


def gpu_class(gpu: str) -> str:
    """The name of a GPU's files: NVIDIA H200 -> h200."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.removeprefix("NVIDIA ").lower()).strip("-")


@lru_cache(maxsize=16)
def committed(gpu: str) -> KernelTable | None:
    """The library's own table of this GPU, if it has one."""
    path = Path(__file__).parent / "measured" / f"{gpu_class(gpu)}.json"
    return KernelTable.read(path) if path.exists() else None
