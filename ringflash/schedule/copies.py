"""Tensors of the schedule on devices: made once, shared by every layer, stream and step that asks."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

T = TypeVar("T")
P = ParamSpec("P")


def on_cpu(function: Callable[P, T]) -> Callable[P, T]:
    """Makes tensors on the CPU whatever the caller's default device: what is cached must not depend on it."""

    @wraps(function)
    def on_cpu_(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.device("cpu"):
            return function(*args, **kwargs)

    return on_cpu_


def moved(device: torch.device, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors of one dtype on the CPU, copied to a device without making the host wait for it."""
    if device.type != "cuda":
        return tuple(x.to(device) for x in tensors)
    # One pinned, non-blocking copy: a pageable one would make the host wait for the device, and each costs a launch.
    together = torch.cat([x.flatten() for x in tensors]).pin_memory().to(device, non_blocking=True)
    parts = together.split([x.numel() for x in tensors])
    return tuple(part.view(x.shape) for part, x in zip(parts, tensors, strict=True))


@dataclass(frozen=True, eq=False)
class Copies:
    """What was made for each (name, device), and from when on it is there."""

    _made: dict[tuple[Hashable, torch.device], tuple[Any, Any, Any]] = field(default_factory=dict)

    def get(self, name: Hashable, device: torch.device, make: Callable[[], T]) -> T:
        """`make()` of the first call; the current stream is told to wait until it is there."""
        key = (name, device)
        if device.type != "cuda":
            if key not in self._made:
                self._made[key] = (make(), None, None)
            return cast(T, self._made[key][0])
        current = stream_handle(device)
        if key not in self._made:
            self._made[key] = (make(), current, torch.cuda.current_stream(device).record_event())
        value, stream, is_made = self._made[key]
        # A graph is captured after a warm-up, when everything is long there; waiting inside the capture is not allowed.
        if current != stream and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(device).wait_event(is_made)
        return cast(T, value)


def stream_handle(device: torch.device) -> int:
    """CUDA's handle of the current stream, without the object that torch makes of it, which takes the host 3 us."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(torch._C._cuda_getCurrentRawStream(index))
