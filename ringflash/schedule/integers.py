"""Whole numbers as users give them: lengths, borders, positions. One rule for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any, cast

import torch
from torch import Tensor

# Past every position: "no upper end". Far below the int64 limit, so that sums with positions cannot wrap.
NO_END = 2**62


def integer(name: str, value: object, *, least: int = 0) -> int:
    """`value` as a Python int: any integer type, numpy's too, but no bool and no float.

    name: what to call it in the error, such as "Window: left".
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} is {type(value).__name__}; must be an integer >= {least}")
    try:
        number = int(cast(Any, value).__index__())
    except TypeError:  # tensors of several entries or of floats have the method, and refuse
        raise TypeError(f"{name} is {value!r}; must be an integer >= {least}") from None
    if not least <= number < NO_END:
        raise ValueError(f"{name} = {number}; must be >= {least} and < 2**62")
    return number


def integers(name: str, values: Iterable[int] | Tensor) -> list[int]:
    """A list of Python ints from a list, tuple, numpy array or tensor of one axis and any integer type."""
    if isinstance(values, Tensor):
        if values.dim() != 1 or values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
            raise TypeError(
                f"{name}: a tensor of shape {tuple(values.shape)} and {values.dtype}; must be 1-D and integer"
            )
        return cast(list[int], values.tolist())
    if isinstance(values, (Set, Mapping, str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(f"{name}: is {type(values).__name__}; must be a list, tuple, array or tensor of integers")
    numbers = []
    for value in values:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{name}: holds {value!r} of type {type(value).__name__}; must be integers")
        numbers.append(int(value.__index__()))
    return numbers
