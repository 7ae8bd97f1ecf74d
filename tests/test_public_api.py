"""What users hold in their hands. A change here is a change for them: CHANGELOG.md says so."""

from __future__ import annotations

import inspect
from operator import attrgetter

import pytest

import ringflash

PUBLIC_NAMES = [
    "Balanced",
    "Causal",
    "Chunked",
    "Contiguous",
    "DocumentZigzag",
    "Documents",
    "FirstKeys",
    "Full",
    "KernelTable",
    "Layout",
    "Mask",
    "Padding",
    "Plan",
    "Prefix",
    "Ring",
    "RingAttention",
    "Score",
    "Striped",
    "Union",
    "Window",
    "Zigzag",
    "attention",
    "plan",
    "scaled_dot_product_attention",
]

SIGNATURES = {
    "attention": (
        "(q: Tensor, k: Tensor, v: Tensor, *, ring: Ring | None = None, mask: Mask | Union | None = None, "
        "scale: float | None = None, score: Score | None = None, length: int | None = None, "
        "query_length: int | None = None, backend: str | KernelTable | None = None, deterministic: bool | None = None, "
        "route: Route | None = None, return_lse: bool = False) -> Tensor | tuple[Tensor, Tensor]"
    ),
    "plan": (
        "(mask: Mask, layout: Layout, length: int, rank: int = 0, ranks: int = 1, query_length: int | None = None) -> Plan"
    ),
    "scaled_dot_product_attention": (
        "(query: Tensor, key: Tensor, value: Tensor, attn_mask: None = None, dropout_p: float = 0.0, "
        "is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, *, ring: Ring | None = None, "
        "mask: Mask | Union | None = None, seed: int | None = None, length: int | None = None, "
        "query_length: int | None = None, backend: str | KernelTable | None = None) -> Tensor"
    ),
    "Documents": "(lengths: Iterable[Any] | Tensor, *, causal: bool, padding: int | Sequence[int] | Tensor = 0) -> None",
    "Ring": (
        "(group: dist.ProcessGroup | DeviceMesh | None = None, *, layout: Layout | None = None, "
        'transport: str | Transport | None = None, check: "bool | Literal[always]" = True, '
        "gradient_dtype: torch.dtype | None = None) -> None"
    ),
    "Ring.gather": "(self, x: Tensor, dim: int = 1, *, length: int | None = None) -> Tensor",
    "Ring.positions": "(self, length: int) -> Tensor",
    "Ring.shard": "(self, x: Tensor, dim: int = 1) -> Tensor",
    "RingAttention": (
        "(*, ring: Ring | None = None, mask: Mask | Union | None = None, scale: float | None = None, "
        "score: Score | None = None, backend: str | KernelTable | None = None, deterministic: bool | None = None, "
        "route: Route | None = None) -> None"
    ),
    "Padding": (
        "(start: int | Sequence[int] | Tensor, stop: int | Sequence[int] | Tensor, *, length: int, "
        "keys_only: bool = False) -> None"
    ),
    "Score": (
        "(scale: float | None = None, softcap: float | None = None, alibi: tuple[float, ...] | None = None, "
        "sinks: Tensor | None = None, dropout: float = 0.0, seed: int | None = None) -> None"
    ),
    "Window": "(left: int | None, right: int | None) -> None",
}


def signature(name: str) -> str:
    """A signature as its author wrote it: annotations stay text under `from __future__ import annotations`."""
    return str(inspect.signature(attrgetter(name)(ringflash))).replace("'", "")


def test_the_public_names_are_these():
    assert ringflash.__all__ == PUBLIC_NAMES


def test_every_public_name_is_there_to_be_imported():
    assert [name for name in ringflash.__all__ if not hasattr(ringflash, name)] == []


def test_nothing_else_is_offered():
    """Sub-packages show up as attributes once imported; they are not offers."""
    offered = {
        name for name, value in vars(ringflash).items() if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert offered == set(PUBLIC_NAMES)


def test_the_version_is_a_release_number():
    major, minor, patch = ringflash.__version__.split(".")
    assert major.isdecimal() and minor.isdecimal() and patch[:1].isdecimal()


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_every_public_name_says_what_it_is(name):
    value = getattr(ringflash, name)
    written = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    # A dataclass without a docstring gets its signature for one.
    assert written and not written.startswith(f"{name}("), f"{name} has no docstring of its own"


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_every_public_method_says_what_it_does(name):
    """Methods that fulfil a contract are documented where the contract is."""
    value = getattr(ringflash, name)
    members = vars(value).items() if inspect.isclass(value) else ()
    own = {n: m for n, m in members if not n.startswith("_") and (inspect.isroutine(m) or isinstance(m, property))}
    assert [n for n in own if not inspect.getdoc(getattr(value, n))] == []


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_stay_as_they_are(name):
    assert signature(name) == SIGNATURES[name]
