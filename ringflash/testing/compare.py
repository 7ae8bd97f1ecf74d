"""What "equal" means, per dtype. No share of elements is excused."""

from __future__ import annotations

import torch
from torch import Tensor

# Largest difference over the largest entry of the expected tensor.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of the expected, both in float64."""
    actual, expected = actual.double().cpu(), expected.double().cpu()
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-300))


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype, name: str = "result") -> None:
    """Within TOLERANCE of `dtype` relative to the largest expected entry (at least 1); infinities must coincide."""
    assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    assert not actual.isnan().any(), f"{name}: {int(actual.isnan().sum())} of {actual.numel()} entries are NaN"
    infinite = expected.isinf()
    assert torch.equal(actual.isinf(), infinite), f"{name}: infinities are not where they should be"
    assert torch.equal(actual[infinite], expected[infinite]), f"{name}: infinities of the wrong sign"
    actual, expected = actual.masked_fill(infinite, 0.0), expected.masked_fill(infinite, 0.0)
    if expected.numel() == 0:
        return
    size = max(float(expected.abs().max()), 1.0)
    error = float((actual - expected).abs().max()) / size
    assert error <= TOLERANCE[dtype], (
        f"{name}: error {error:.3g} relative to {size:.3g}, allowed {TOLERANCE[dtype]:.3g}"
    )


def assert_all_close(actual: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype) -> None:
    """`assert_close` for every expected name."""
    for name, value in expected.items():
        assert_close(actual[name], value, dtype, name)
