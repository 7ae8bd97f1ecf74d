"""R79 on a GPU: what the library takes by itself is not slow beside torch's own kernels."""

import pytest

from ringflash.cli.kernels import Findings, Shape, measure


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_R79_forward_and_backward_keep_up_with_torch(head_dim):
    """16k tokens, 32 heads, causal: forward at 0.8 and backward at 0.7 of the fastest that torch has, at least."""
    findings = Findings()
    rows = measure(Shape(head_dim, 32, 32, "causal", 4096, 4), findings, ("ringflash", "cudnn", "flash"), rounds=9)
    assert not findings.faults, findings.faults
    assert [row.direction for row in rows] == ["forward", "backward"]
    for row, least in zip(rows, (0.8, 0.7), strict=True):
        ours = row.tflops["ringflash"]
        best = max(row.tflops[name] for name in ("cudnn", "flash") if name in row.tflops)
        assert ours >= least * best, f"{row.direction}: {ours:.0f} TFLOP/s beside {best:.0f}"
