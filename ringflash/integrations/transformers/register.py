"""register(): the one step that touches transformers, through its public registries."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from ringflash.integrations.transformers.attend import attend
from ringflash.integrations.transformers.shown import show

OLDEST = (4, 53)  # the first with AttentionMaskInterface


def register(name: str = "ring") -> None:
    """Make attn_implementation=`name` known to transformers: our attention, and our mask function under the same name.

    Only models that ask for `name` are served by it; all others stay as they are. Calling it again changes nothing.

    name: must not contain "flash": transformers 5 takes every such name for a FlashAttention package, and looks for it on
        its hub.

    Errors: ImportError where transformers is missing or older than 4.53; ValueError for a name with "flash" in it, or one
    that is taken.
    """
    try:
        import transformers
    except ImportError as error:
        raise ImportError("register: transformers is not installed; pip install 'transformers>=4.53'") from error
    found = re.match(r"(\d+)\.(\d+)", transformers.__version__)
    if found is None or (int(found[1]), int(found[2])) < OLDEST:
        raise ImportError(
            f"register: transformers {transformers.__version__} is installed, which has no registry for masks; must be "
            "4.53 or newer, pip install 'transformers>=4.53'"
        )
    if "flash" in name:
        raise ValueError(
            f"register: name = {name!r}; must not contain 'flash', by which transformers 5 knows FlashAttention packages"
        )
    attends, shows = _outside_of_graphs()
    for registry, ours in (
        (transformers.AttentionInterface, attends),
        (transformers.AttentionMaskInterface, shows),
    ):
        if registry().get(name, ours) is not ours:
            raise ValueError(f"register: name = {name!r} is taken by another attention; choose another name")
        registry.register(name, ours)


@lru_cache(maxsize=1)
def _outside_of_graphs() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """torch.compile breaks its graph at them: what a mask shows, and whose tokens these are, is looked up in Python."""
    return torch.compiler.disable(attend), torch.compiler.disable(show)
