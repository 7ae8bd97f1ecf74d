"""Launches that look at their arguments once for each kind.

Triton's own binds, specialises and hashes every argument each time, which for thirty of them takes longer than all else that
the host does for a call of attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction


def launcher(kernel: Any) -> Any:
    """Of a kernel, which is launched alike; under the interpreter the kernel itself, and on AMD, where sizes count too."""
    return kernel if isinstance(kernel, InterpretedFunction) or torch.version.hip else Launcher(kernel)


class Launcher:
    """Launches a kernel, found by its constants and by what `kind` says of the other arguments; constants must be named."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._constants = tuple(parameter.name for parameter in kernel.params if parameter.is_constexpr)
        self._compiled: dict[Any, tuple[Any, tuple[Any, ...]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            key = kind(arguments, options)
            found = self._compiled.get(key)
            if found is None:
                compiled = self.kernel[grid](*arguments, **options)
                self._compiled[key] = compiled, tuple(options[name] for name in self._constants)
            else:
                compiled, constants = found
                three_axes = (*grid, 1, 1)
                compiled[three_axes](*arguments, *constants)

        return launch


def kind(arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """All that decides what Triton compiles, and where it is loaded; told apart at least as finely as there."""
    kinds = [
        (x.dtype, x.data_ptr() % 16 == 0)
        if (of_x := type(x)) is Tensor
        else (x.bit_length() > 31, x == 1, x % 16 == 0)
        if of_x is int
        else _kind(x)
        for x in arguments
    ]
    return (torch.cuda.current_device(), *kinds, *options.items())


def _kind(x: Any) -> Any:
    """Of a subclass of tensors, of what says its kind itself, and of floats and None, of which the type is all."""
    return (x.dtype, x.data_ptr() % 16 == 0) if isinstance(x, Tensor) else getattr(x, "kind", type(x))
