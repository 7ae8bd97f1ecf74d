"""Memory that was never written shows under poisoned(), and only there."""

import pytest
import torch

from ringflash.testing.poison import poisoned

MAKERS = {
    "torch.empty": lambda dtype: torch.empty(3, dtype=dtype),
    "torch.empty_like": lambda dtype: torch.empty_like(torch.zeros(3, dtype=dtype)),
    "Tensor.new_empty": lambda dtype: torch.zeros(3).new_empty(3, dtype=dtype),
}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_unwritten_floats_are_nan(maker, dtype):
    with poisoned():
        assert MAKERS[maker](dtype).isnan().all()


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_unwritten_integers_are_the_largest(maker, dtype):
    with poisoned():
        assert (MAKERS[maker](dtype) == torch.iinfo(dtype).max).all()


def test_leaves_are_filled_as_well():
    """torch's checkpoint makes such ones."""
    with poisoned():
        leaf = torch.empty(3, requires_grad=True)
    assert leaf.isnan().all()
    assert leaf.requires_grad
    assert leaf.is_leaf


def test_every_test_runs_under_poison():
    """The autouse fixture of conftest.py."""
    assert torch.empty(3).isnan().all()


def fail_under_poison():
    with poisoned():
        raise ValueError("inside")


def test_afterwards_torch_is_itself_again_even_after_an_error():
    before = torch.empty, torch.empty_like, torch.Tensor.new_empty
    with poisoned():
        assert torch.empty is not before[0]
    with pytest.raises(ValueError, match="inside"):
        fail_under_poison()
    assert (torch.empty, torch.empty_like, torch.Tensor.new_empty) == before
