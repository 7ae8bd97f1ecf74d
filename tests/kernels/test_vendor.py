"""Kernels that others keep, where one call of theirs is all: nothing is copied, merged or formed twice."""

import sys
from importlib import metadata

import pytest
import torch

import ringflash as rf
from ringflash.kernels import vendor
from ringflash.kernels.backend import Call, Rows
from ringflash.kernels.partial import Partial
from ringflash.kernels.score import Score
from ringflash.kernels.vendor import Flash, FlashAttention4
from ringflash.schedule.plan import plan
from ringflash.schedule.tiles import Bounds
from ringflash.testing.compare import assert_all_close, assert_close
from ringflash.testing.oracle import dense_attention, dense_gradients
from ringflash.testing.sharded import draw

PROBLEM = {"batch": 2, "queries": 40, "heads": (4, 2), "dim": 16, "dtype": torch.float64}
MASKS = [rf.Full(), rf.Causal()]


def gradients(inputs, backend, mask, **options):
    """out, dq, dk, dv through attention()."""
    leaves = [inputs[name].clone().requires_grad_() for name in "qkv"]
    out = rf.attention(*leaves, mask=mask, backend=backend, **options)
    return dict(zip(("out", "dq", "dk", "dv"), (out, *torch.autograd.grad(out, leaves, inputs["dout"])), strict=True))


def expected(inputs, mask):
    found = dense_gradients(**(inputs | {"dlse": None}), mask=mask)
    return {name: found[name] for name in ("out", "dq", "dk", "dv")}


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_one_call_forward_and_one_backward_are_the_result(monkeypatch, mask):
    """No merge, no sums, no delta: passes over memory that cost as much as some kernels gain."""

    def unused(*_, **__):
        raise AssertionError("a pass that one call does not need")

    for owner, name in ((Partial, "add"), (Flash, "backward"), (Flash, "delta")):
        monkeypatch.setattr(owner, name, unused)
    inputs = draw(**PROBLEM)
    assert_all_close(gradients(inputs, "flash", mask), expected(inputs, mask), torch.float64)


def test_what_is_not_one_call_is_merged_and_added_up():
    inputs = draw(**PROBLEM)
    mask = rf.Documents([13, 27], causal=True)
    assert_all_close(gradients(inputs, "flash", mask), expected(inputs, mask), torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lse_lies_as_other_backends_read_it(dtype):
    """Backward may be another backend's."""
    x = draw(**(PROBLEM | {"dtype": dtype}))
    bounds = plan(rf.Causal(), rf.Contiguous(), 40)[0]
    partial = Flash().forward(x["q"], x["k"], x["v"], bounds, Score().resolve(16), is_last=True)
    assert partial.lse.shape == (2, 40, 4) and partial.lse.transpose(1, 2).is_contiguous()
    assert (partial.out.dtype, partial.lse.dtype) == (dtype, dtype)
    _, lse = dense_attention(x["q"], x["k"], x["v"], rf.Causal())
    assert_close(partial.lse, lse, dtype)


def test_rows_that_are_not_all_rows_are_not_one_call():
    """The first 10 queries of 40 over 30 keys see nothing."""
    inputs = draw(**(PROBLEM | {"keys": 30}))
    assert_all_close(gradients(inputs, "flash", rf.Causal()), expected(inputs, rf.Causal()), torch.float64)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("length", [1, 2, 5])
def test_tiles_that_are_known_are_those_that_the_rows_give(mask, length):
    known = plan(mask, rf.Contiguous(), length)[0]
    assert known.shape != "rows"
    assert known.tiles() == Bounds.of(known.lo, known.hi, known.columns).tiles()
    assert plan(mask, rf.Contiguous(), 0)[0].tiles() == []


def test_memory_that_copy_engines_cannot_read_is_copied():
    plain = torch.randn(2, 40, 4, 16, dtype=torch.bfloat16)
    begins_odd = torch.randn(plain.numel() + 1, dtype=torch.bfloat16)[1:].view(plain.shape)
    lies_odd = torch.randn(2, 40, 4, 17, dtype=torch.bfloat16)[..., :16]
    for odd in (begins_odd, lies_odd, plain[:, :1].expand(2, 40, 4, 16)):
        seen = vendor._heads_first(odd)
        assert torch.equal(seen, odd.transpose(1, 2)) and seen.data_ptr() != odd.data_ptr()
    assert vendor._heads_first(plain).data_ptr() == plain.data_ptr()


def test_what_cuDNN_plans_by_the_strides_of_q_is_laid_out_like_q():
    q = torch.randn(2, 4, 40, 16)
    x = torch.randn(2, 40, 4, 16).transpose(1, 2)
    assert vendor._laid_out_like(q, x).stride() == q.stride() and torch.equal(vendor._laid_out_like(q, x), x)
    assert vendor._laid_out_like(x, x) is x


class OnCPU(FlashAttention4):
    """FlashAttention-4 as if this were its device."""

    device_type = "cpu"
    dtypes = (torch.float64,)

    def refuses_device(self, device):
        return None


CALL = Call(torch.device("cpu"), torch.float64, 4, 2, 16, 16, 0.25, frozenset(), False)


@pytest.fixture
def installed(monkeypatch):
    """A package flash-attn-4 of the known version, on torch's CPU kernel."""
    interface = type(sys)("flash_attn.cute.interface")

    def flash_attn_func(q, k, v, softmax_scale, causal, return_lse):
        assert return_lse
        out, lse = Flash().attend(*(x.transpose(1, 2) for x in (q, k, v)), causal, softmax_scale)
        return out.transpose(1, 2), lse

    def _flash_attn_bwd(q, k, v, out, dout, lse, softmax_scale, causal):
        heads_first = (x.transpose(1, 2) for x in (q, k, v, dout, out))
        found = Flash().attend_backward(*heads_first, lse, causal, softmax_scale)
        return tuple(x.transpose(1, 2) for x in found)

    interface.flash_attn_func, interface._flash_attn_bwd = flash_attn_func, _flash_attn_bwd
    cute = type(sys)("flash_attn.cute")
    cute.interface = interface
    for name, module in {"flash_attn": type(sys)("flash_attn"), "flash_attn.cute": cute}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)
    monkeypatch.setattr(metadata, "version", lambda name: "4.0.0b36")
    vendor._lacks_flash_attention_4.cache_clear()
    yield interface
    vendor._lacks_flash_attention_4.cache_clear()


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_FlashAttention_4_serves_where_it_is_installed(installed, mask):
    backend, score = OnCPU(), Score().resolve(16)
    assert backend.refuses(CALL) is None
    x = draw(**PROBLEM)
    bounds = plan(mask, rf.Contiguous(), 40)[0]
    partial = backend.forward(x["q"], x["k"], x["v"], bounds, score, is_last=True)
    rows = Rows(partial.out, x["dout"], partial.lse, torch.empty(0), has_dlse=False)
    found = backend.gradients(x["q"], x["k"], x["v"], rows, bounds, score, False)
    results = dict(zip(("out", "dq", "dk", "dv"), (partial.out, *found), strict=True))
    assert_all_close(results, expected(x, mask), torch.float64)


def test_FlashAttention_4_says_why_it_cannot_be_called(installed, monkeypatch):
    def reason():
        vendor._lacks_flash_attention_4.cache_clear()
        return OnCPU().refuses(CALL)

    monkeypatch.setattr(metadata, "version", lambda name: "5.0.0")
    assert "flash-attn-4 5.0.0 is not one of 4.0.0b36" in reason()
    monkeypatch.setattr(metadata, "version", lambda name: "4.0.0b36")
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    assert "flash-attn-4 cannot be imported" in reason()

    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    assert reason() == "flash-attn-4 is not installed"
    cuda = Call(torch.device("cuda"), torch.bfloat16, 4, 2, 64, 64, 0.25, frozenset(), False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "not a GPU that is here" in FlashAttention4().refuses_device(cuda.device)
