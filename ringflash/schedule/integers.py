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
    number = _whole(value)
    if number is None:
        kind = f"{value.dtype} tensor" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name} is {kind}; must be an integer >= {least}")
    if not least <= number < NO_END:
        raise ValueError(f"{name} = {number}; must be >= {least} and < 2**62")
    return number


def integers(name: str, values: Iterable[int] | Tensor) -> list[int]:
    """A list of Python ints from a list, tuple, numpy array or tensor of one axis and any integer type."""
    shaped: Any = values
    if hasattr(values, "dtype") and hasattr(values, "shape"):  # tensors and numpy arrays
        is_tensor = isinstance(values, Tensor)
        if is_tensor:
            check_holds_values(name, shaped)
        floats = shaped.is_floating_point() or shaped.is_complex() if is_tensor else shaped.dtype.kind not in "iu"
        if len(shaped.shape) != 1 or floats or shaped.dtype == torch.bool:
            raise TypeError(
                f"{name}: an array of shape {tuple(shaped.shape)} and {shaped.dtype}; must be 1-D and integer"
            )
        return cast(list[int], shaped.tolist())
    if isinstance(values, (Set, Mapping, str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(f"{name}: is {type(values).__name__}; must be a list, tuple, array or tensor of integers")
    numbers = []
    for value in values:
        number = _whole(value)
        if number is None:
            raise TypeError(f"{name}: holds {value!r} of type {type(value).__name__}; must be integers")
        numbers.append(number)
    return numbers


def check_holds_values(name: str, x: Tensor) -> None:
    """TypeError for a tensor whose numbers cannot be read as they lie."""
    if x.layout != torch.strided or x.is_nested or x.is_meta:
        raise TypeError(f"{name}: {x.layout} on {x.device}; must be a plain tensor that holds values")


def is_by_row(numbers: object) -> bool:
    """Whether numbers come as one list per batch row: a list of lists or arrays, or an array or tensor of two axes."""
    if len(getattr(numbers, "shape", ())) == 2:
        return True
    if not isinstance(numbers, (list, tuple)) or not numbers:
        return False
    return isinstance(numbers[0], (list, tuple)) or len(getattr(numbers[0], "shape", ())) > 0


def _whole(value: object) -> int | None:
    """`value` as an int, or None for what is no integer: floats, bools of any library, tensors of several entries."""
    if type(value) is int:  # also those that compiled code does not know yet
        return value
    if isinstance(value, bool) or not hasattr(value, "__index__") or str(getattr(value, "dtype", "")).endswith("bool"):
        return None
    try:
        return int(cast(Any, value).__index__())
    except (TypeError, ValueError, RuntimeError):  # tensors have the method, and refuse if they hold no integer
        return None
