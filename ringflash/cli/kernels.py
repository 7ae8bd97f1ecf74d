"""Attention kernels on one GPU: every one that runs here beside the others, checked before it is timed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import ringflash as rf
from ringflash.cli.timing import Timing, interleaved
from ringflash.schedule.plan import plan

# The library's own backends by name, and what it takes where nobody is named.
OURS: dict[str, str | None] = {"hopper": "hopper", "triton": "triton", "ringflash": None}
PEERS = ("cudnn", "flash", "fa4")
KERNELS = (*OURS, *PEERS)
MASKS: dict[str, rf.Mask] = {"full": rf.Full(), "causal": rf.Causal()}
# Backward forms five products where forward forms two.
FACTORS = {"forward": 1.0, "backward": 2.5}
# What two ways to round to bf16 may differ by, relative to the norm.
TOLERANCE = 1.5e-2
# Long enough for the host to queue a call of any of these, FlashAttention-4's Python included.
HEAD_START_MS = 4.0


@dataclass(frozen=True)
class Shape:
    """`batch` sequences of `tokens`, Hq query and Hk key heads of head_dim, under one of MASKS."""

    head_dim: int
    query_heads: int
    key_heads: int
    mask: str
    tokens: int
    batch: int

    @property
    def heads(self) -> str:
        return f"{self.query_heads}:{self.key_heads}"

    def flops(self, direction: str) -> float:
        """4 D per visible pair and query head forward, 2.5 times that backward."""
        pairs = self.batch * plan(MASKS[self.mask], rf.Contiguous(), self.tokens).pairs
        return FACTORS[direction] * 4.0 * self.head_dim * self.query_heads * pairs

    def rounds(self, most: int) -> tuple[int, int]:
        """(timed, to warm up) of the interleaved run. A call of 64k tokens takes up to a second and varies little."""
        return (most, 3) if self.tokens < 65536 else (max(3, most // 3), 1)

    def __str__(self) -> str:
        return f"d{self.head_dim} {self.heads} {self.mask} {self.tokens} x {self.batch}"


@dataclass(frozen=True)
class Contestant:
    """One attention: what it is called with, and how its results are read.

    attend: (q, k, v) -> out.
    laid_out: of a contiguous [B, S, H, D], the tensor that `attend` likes best; made before anything is timed.
    tokens_first: of a result, the view [B, S, H, D].
    """

    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    laid_out: Callable[[Tensor], Tensor] = lambda x: x
    tokens_first: Callable[[Tensor], Tensor] = lambda x: x


def contestants(shape: Shape, names: Iterable[str] = KERNELS) -> dict[str, Contestant]:
    """The kernels named, whether or not they can run `shape` here."""
    swapped = lambda x: x.transpose(1, 2)  # noqa: E731
    is_causal, is_grouped = shape.mask == "causal", shape.query_heads != shape.key_heads

    def through_torch(backend: SDPBackend) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=is_grouped)

        return attend

    def flash_attention_4(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from flash_attn.cute import flash_attn_func

        out = flash_attn_func(q, k, v, causal=is_causal)
        return out[0] if isinstance(out, tuple) else out

    def ours(backend: str | None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = rf.attention(q, k, v, mask=MASKS[shape.mask], backend=backend)
            assert isinstance(out, Tensor), "lse was not asked for"
            return out

        return attend

    everyone = {
        **{name: Contestant(ours(backend)) for name, backend in OURS.items()},
        "cudnn": Contestant(
            through_torch(SDPBackend.CUDNN_ATTENTION), lambda x: x.transpose(1, 2).contiguous(), swapped
        ),
        # FlashAttention-2 reads tokens before heads; torch's call takes them swapped, and swaps them back.
        "flash": Contestant(through_torch(SDPBackend.FLASH_ATTENTION), swapped, swapped),
        "fa4": Contestant(flash_attention_4),
    }
    return {name: everyone[name] for name in names}


@dataclass(frozen=True)
class Measured:
    """Times of one direction of one shape, by kernel."""

    shape: Shape
    direction: str
    times: Mapping[str, Timing]

    @property
    def tflops(self) -> dict[str, float]:
        flops = self.shape.flops(self.direction)
        return {name: round(timing.tflops(flops), 1) for name, timing in self.times.items()}

    @property
    def spread(self) -> dict[str, float]:
        return {name: round(timing.spread, 3) for name, timing in self.times.items()}


@dataclass
class Findings:
    """What came of measuring: rows, who could not run and why, and what went wrong that should not have.

    notes, faults: a sentence -> the shapes it was true of, because most are true of many.
    """

    rows: list[Measured] = field(default_factory=list)
    notes: dict[str, list[Shape]] = field(default_factory=dict)
    faults: dict[str, list[Shape]] = field(default_factory=dict)

    def note(self, sentence: str, shape: Shape) -> None:
        self.notes.setdefault(sentence, []).append(shape)

    def fault(self, sentence: str, shape: Shape) -> None:
        self.faults.setdefault(sentence, []).append(shape)


def sentences(found: Mapping[str, list[Shape]]) -> list[str]:
    """Each with the first shape that it is true of, and how many more there are."""
    return [
        f"{sentence} ({shapes[0]}{f' and {len(shapes) - 1} more' if len(shapes) > 1 else ''})"
        for sentence, shapes in found.items()
    ]


@dataclass
class Entrant:
    """A contestant with its tensors of one shape. dout is None where it has no backward for it."""

    contestant: Contestant
    inputs: list[Tensor]
    out: Tensor
    dout: Tensor | None = None

    def forward(self) -> Tensor:
        return self.contestant.attend(*self.inputs)

    def backward(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.out, self.inputs, self.dout, retain_graph=True)

    def results(self) -> list[Tensor]:
        """out, and dq, dk, dv where it has them, as [B, S, H, D]."""
        gradients = () if self.dout is None else self.backward()
        return [self.contestant.tokens_first(x.detach()) for x in (self.out, *gradients)]


def measure(
    shape: Shape, findings: Findings, names: Iterable[str] = KERNELS, rounds: int = 15, device: str = "cuda"
) -> list[Measured]:
    """Forward and backward of one shape, all kernels in one interleaved run; added to `findings`, and returned."""
    q, k, v, dout = numbers(shape, device)
    entrants: dict[str, Entrant] = {}
    for name, contestant in contestants(shape, names).items():
        entrant = _enter(name, contestant, (q, k, v), dout, shape, findings)
        if entrant is not None:
            entrants[name] = entrant
    entrants = _agreeing(entrants, shape, findings)
    forwards = {name: entrant.forward for name, entrant in entrants.items()}
    backwards = {name: entrant.backward for name, entrant in entrants.items() if entrant.dout is not None}
    rows = []
    for direction, runs in (("forward", forwards), ("backward", backwards)):
        with torch.set_grad_enabled(direction == "backward"):
            times = interleaved(runs, *shape.rounds(rounds), head_start_ms=HEAD_START_MS)
        if times:
            rows.append(Measured(shape, direction, times))
    findings.rows += rows
    return rows


def numbers(shape: Shape, device: str) -> list[Tensor]:
    """q, k, v and the gradient of out, contiguous [B, S, H, D] in bf16."""
    heads = (shape.query_heads, shape.key_heads, shape.key_heads, shape.query_heads)
    size = (shape.batch, shape.tokens)
    return [torch.randn(*size, H, shape.head_dim, device=device, dtype=torch.bfloat16) for H in heads]


def _enter(
    name: str, contestant: Contestant, qkv: tuple[Tensor, ...], dout: Tensor, shape: Shape, findings: Findings
) -> Entrant | None:
    """Run a contestant once in both directions, or forward alone where it has no backward for the shape."""
    inputs = [contestant.laid_out(x).detach().requires_grad_() for x in qkv]

    def keep(what: str, error: Exception) -> None:
        # Whatever other people's kernels and compilers raise is their answer; of ours, only a refusal is one.
        say = findings.note if name in PEERS or isinstance(error, NotImplementedError) else findings.fault
        first_line = next(iter(str(error).strip().splitlines()), "")
        say(f"{name} cannot run {what}: {type(error).__name__}: {first_line[:200]}", shape)

    try:
        return _run(contestant, inputs, dout)
    except Exception as error:
        with_backward = error
    try:
        entrant = _run(contestant, inputs, None)
    except Exception as error:
        keep("forward", error)
        return None
    keep("backward", with_backward)
    return entrant


def _run(contestant: Contestant, inputs: list[Tensor], dout: Tensor | None) -> Entrant:
    """Forward, and backward given the gradient of out."""
    with torch.set_grad_enabled(dout is not None):
        entrant = Entrant(contestant, inputs, contestant.attend(*inputs))
    if dout is not None:
        # Laid out like out, as the layer behind would: some kernels copy a gradient of other strides.
        entrant.dout = torch.empty_like(entrant.out.detach())
        contestant.tokens_first(entrant.dout).copy_(dout)
        entrant.backward()
    if inputs[0].is_cuda:
        torch.cuda.synchronize()  # here a kernel's error is that of the contestant that launched it
    return entrant


def _agreeing(entrants: dict[str, Entrant], shape: Shape, findings: Findings) -> dict[str, Entrant]:
    """Those whose outputs and gradients are a peer's, to twice the rounding of bf16. The others are faults."""
    reference = next((name for name in (*PEERS, "triton") if name in entrants), None)
    if reference is None or len(entrants) == 1:
        findings.note(f"{', '.join(entrants) or 'nobody'} ran alone, and was not checked", shape)
        return entrants
    expected = entrants[reference].results()
    agreed = {}
    for name, entrant in entrants.items():
        results = entrant.results()
        if len(results) > len(expected):
            findings.note(f"{reference} has no gradients to check those of {name} by", shape)
        errors = {
            what: difference(x, y)
            for what, x, y in zip(("out", "dq", "dk", "dv"), results, expected, strict=False)
            if name != reference
        }
        if all(error < TOLERANCE for error in errors.values()):
            agreed[name] = entrant
        else:
            by = ", ".join(f"{what} {error:.2g}" for what, error in errors.items())
            findings.fault(f"{name} differs from {reference} and was not timed: {by}", shape)
    return agreed


def difference(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of the expected, formed where they are: hosts take seconds for 64k tokens."""
    size = torch.linalg.vector_norm(expected, dtype=torch.float32).clamp_min(1e-30)
    return float(torch.linalg.vector_norm(actual.float() - expected.float()) / size)


def line(row: Measured) -> str:
    """A row as it is printed while the run goes on."""
    figures = "  ".join(f"{name} {tflops:.0f} (±{row.spread[name]:.1%})" for name, tflops in row.tflops.items())
    return f"{row.direction:8} {row.shape}:  {figures}"
