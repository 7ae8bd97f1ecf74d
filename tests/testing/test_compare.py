"""What "equal" means: nothing that is wrong passes for close."""

import pytest
import torch

from ringflash.testing.compare import assert_all_close, assert_close, relative_error

INF = float("inf")


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        ([1.0, 2.0], [1.0], "shape"),
        ([1.0, float("nan")], [1.0, 2.0], "1 of 2 entries are NaN"),
        ([1.0, INF], [1.0, 2.0], "infinities are not where"),
        ([1.0, 2.0], [1.0, -INF], "infinities are not where"),
        ([1.0, INF], [1.0, -INF], "infinities of the wrong sign"),
        ([1.0, 2.0 + 3e-10], [1.0, 2.0], "error 1.5e-10 relative to 2, allowed 1e-10"),
        ([1e9, 1e-3 + 1.0], [1e9, 1e-3], "error 1e-09"),
        ([2e-10], [0.0], "error 2e-10 relative to 1"),
    ],
)
def test_what_is_wrong_is_refused(actual, expected, message):
    with pytest.raises(AssertionError, match=message):
        assert_close(
            torch.tensor(actual, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64), torch.float64
        )


def test_what_is_within_rounding_passes():
    assert_close(torch.tensor([100.001, -INF]), torch.tensor([100.0, -INF]), torch.float32)
    assert_close(torch.zeros(0, 3), torch.zeros(0, 3), torch.float64)


def test_every_expected_name_is_compared():
    ones, zeros = torch.ones(2), torch.zeros(2)
    with pytest.raises(AssertionError, match=r"\Adk: error"):
        assert_all_close({"dq": ones, "dk": ones}, {"dq": ones, "dk": zeros}, torch.float64)
    with pytest.raises(KeyError, match="dv"):
        assert_all_close({}, {"dv": torch.ones(2)}, torch.float64)


def test_relative_error_is_of_norms():
    assert relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)
