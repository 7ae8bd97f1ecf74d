"""Laws of the merge, for drawn partials."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringflash.kernels.partial import DELTA_ROWS, Partial, delta, merge, row_statistic
from ringflash.testing.compare import assert_close

values = st.floats(-10, 10, allow_nan=False)
stats = st.floats(-300, 300, allow_nan=False) | st.just(-torch.inf) | st.sampled_from([1e4, -1e4])


@st.composite
def partials(draw):
    lse = torch.tensor([draw(stats) for _ in range(3)], dtype=torch.float64)
    out = torch.tensor([[draw(values)] for _ in range(3)], dtype=torch.float64)
    return Partial(torch.where(lse[:, None] == -torch.inf, 0.0, out)[None, :, None], lse[None, :, None])


def same(a, b):
    assert_close(a.out, b.out, torch.float64, "out")
    assert_close(a.lse, b.lse, torch.float64, "lse")


@settings(deadline=None)
@given(partials(), partials(), partials())
def test_merge_is_commutative_and_associative(a, b, c):
    same(merge(a, b), merge(b, a))
    same(merge(merge(a, b), c), merge(a, merge(b, c)))


@settings(deadline=None)
@given(partials())
def test_the_empty_partial_is_the_identity(a):
    nothing = Partial(torch.zeros_like(a.out), torch.full_like(a.lse, -torch.inf))
    same(merge(a, nothing), a)
    same(merge(nothing, a), a)


@settings(deadline=None)
@given(partials(), partials())
def test_gradients_of_the_merge_are_finite(a, b):
    leaves = [x.clone().requires_grad_() for x in (a.out, a.lse, b.out, b.lse)]
    merged = merge(Partial(*leaves[:2]), Partial(*leaves[2:]))
    seen = merged.lse > -torch.inf
    (merged.out.sum() + merged.lse[seen].sum()).backward()
    for leaf in leaves:
        assert leaf.grad.isfinite().all()


def test_empty_partials_have_the_memory_layout_of_kernels():
    q = torch.zeros(2, 5, 3, 4, dtype=torch.bfloat16)
    nothing = Partial.empty(q, 6)
    assert nothing.out.shape == (2, 5, 3, 6)
    assert nothing.lse.shape == (2, 5, 3)
    assert nothing.out.dtype == nothing.lse.dtype == torch.float32
    assert nothing.lse.transpose(1, 2).is_contiguous()
    assert bool((nothing.lse == -torch.inf).all())
    assert Partial.empty(q.double(), 6).out.dtype == torch.float64


def test_delta_is_the_row_sum_less_the_gradient_of_lse_in_pieces():
    S = DELTA_ROWS + 3
    out, dout, dlse = torch.randn(1, S, 2, 4), torch.randn(1, S, 2, 4), torch.randn(1, S, 2)
    assert_close(delta(out, dout, dlse), (out * dout).sum(-1) - dlse, torch.float32)
    assert delta(out, dout, None).transpose(1, 2).is_contiguous()
    assert row_statistic(out, torch.float32).shape == (1, S, 2)
