"""Descriptors of tensors are what Triton makes."""

import pytest
import torch

from ringflash.kernels.hopper.arguments import described, described_rows
from ringflash.kernels.hopper.gluon import TensorDescriptor, gl
from ringflash.kernels.partial import row_statistic


def facts(descriptor):
    return {**vars(descriptor), "base": descriptor.base.data_ptr(), "kind": None}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_descriptors_are_what_triton_makes(dtype):
    x = torch.randn(3, 50, 4, 64).to(dtype)
    for view in (x, x[:, 8:40], x[:, :, 1:3], x.transpose(1, 2).contiguous().transpose(1, 2), x[1:2, ::2]):
        B, S, H, D = view.shape
        b, s, h, _ = view.stride()
        layout = gl.NVMMASharedLayout(128, dtype.itemsize * 8, rank=4)
        expected = TensorDescriptor(view, [B, H, S, D], [b if B > 1 else D, h, s, 1], [1, 1, 32, 64], layout)
        assert facts(described(view, 32, 64)) == facts(expected)


def test_row_statistics_are_described_as_triton_does():
    x = row_statistic(torch.empty(2, 64, 3, 8), torch.float32)
    layout = gl.NVMMASharedLayout(0, 32, rank=2)
    assert facts(described_rows(x, 16)) == facts(TensorDescriptor(x.transpose(1, 2), [6, 64], [64, 1], [1, 16], layout))


@pytest.mark.parametrize("is_shifted", [True, False], ids=["address", "strides"])
def test_what_the_copy_engine_does_not_take_is_copied(is_shifted):
    whole = torch.randn(2, 9, 4, 24).bfloat16()
    x = whole.flatten()[4 : 4 + 2 * 8 * 4 * 24].view(2, 8, 4, 24) if is_shifted else whole.transpose(1, 3)[..., :8]
    found = described(x, 64, 64)
    assert torch.equal(found.base, x)
    assert found.base.is_contiguous()
    with pytest.raises(AssertionError, match="memory that is contiguous"):
        described(x, 64, 64, is_written=True)
