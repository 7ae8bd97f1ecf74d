"""What torch.compile makes of the library's values: it passes them on to an operator and never looks inside.

torch calls such values opaque objects. The names are private to torch and have moved before; all that is known of them is
here. A torch without them compiles everything but attention, which says so.
"""

from __future__ import annotations

import inspect
from abc import ABCMeta
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import torch

try:
    from torch._library.opaque_object import MemberType, register_opaque_type
    from torch._opaque_base import OpaqueBaseMeta
except ImportError:  # a torch that keeps them elsewhere
    CAN_TRACE, _Base = False, type
else:
    CAN_TRACE, _Base = True, OpaqueBaseMeta

T = TypeVar("T", bound=type)


class Traced(_Base, ABCMeta):  # type: ignore[valid-type, misc]
    """The metaclass of classes whose values compiled code may hold."""


def carried(*reads: str) -> Callable[[T], T]:
    """Values of this class are inputs of compiled code: another one compiles nothing anew. They are made outside of it.

    For what changes with the batch, and for what has a state.
    Said of each class: torch 2.11 knows no subclass of one that it was told of.
    reads: attributes that compiled code may read, as constants: a value with others compiles anew.
    """

    def register(cls: T) -> T:
        if CAN_TRACE:
            guarded: dict[str, Any] = (
                {"guard_fn": lambda value: [getattr(value, name) for name in reads]} if reads else {}
            )
            register_opaque_type(cls, typ="reference", members=dict.fromkeys(reads, MemberType.USE_REAL), **guarded)
        named: Any = cls
        named.is_constant = False
        return cls

    return register


def constant(*methods: str) -> Callable[[T], T]:
    """Values of this class are constants of compiled code, which may make them and call `methods`; others compile anew.

    For frozen dataclasses that are told apart by `==` and made again by their repr.
    """

    def register(cls: T) -> T:
        named: Any = cls
        if CAN_TRACE:
            # Without dataclass's guard against a value that holds itself, which compiled code warns of.
            named.__repr__ = inspect.unwrap(named.__repr__)
            named.__fx_repr__ = _as_text
            register_opaque_type(cls, typ="value", members=dict.fromkeys(methods, MemberType.USE_REAL))
        named.is_constant = True
        return cls

    return register


def _as_text(value: Any) -> tuple[str, dict[str, type]]:
    """What torch writes into the code it makes, and the names in it."""
    return repr(value), {part.__name__: part for part in _classes(value)}


def _classes(value: Any) -> Iterator[type]:
    """Those of a dataclass and of all that it holds."""
    if is_dataclass(value):
        yield type(value)
        value = tuple(getattr(value, field.name) for field in fields(value))
    if isinstance(value, tuple):
        for part in value:
            yield from _classes(part)


def sees_operators_only() -> bool:
    """Whether attention must be one operator: in compiled code, and for modes that watch operators, such as FakeTensorMode,
    FlopCounterMode and selective checkpointing.
    """
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def is_traced() -> bool:
    """Whether a graph of what runs now is being made: by dynamo, or by what comes after it, of which `is_compiling` of torch
    2.11 knows nothing.
    """
    proxy = torch._C._TorchDispatchModeKey.PROXY
    return torch.compiler.is_compiling() or torch._C._get_dispatch_mode(proxy) is not None
