"""What is timed is checked first, and who cannot run says so; on the CPU, with torch's own kernels and a stopped clock."""

import sys

import pytest
import torch
import torch.nn.functional as F

from ringflash.cli import kernels, timing
from ringflash.cli.kernels import Contestant, Findings, Shape, contestants, line, measure, numbers, sentences

SHAPE = Shape(head_dim=16, query_heads=4, key_heads=2, mask="causal", tokens=48, batch=2)


@pytest.fixture(autouse=True)
def _stopped_clock(monkeypatch):
    monkeypatch.setattr(timing, "time_ms", lambda run, head_start_ms: (run(), 2.0)[1])


def entered(monkeypatch, **more):
    """`measure` of the library and torch's flash kernel, with more contestants by name."""
    real = contestants
    monkeypatch.setattr(kernels, "contestants", lambda shape, names: {**real(shape, names), **more})
    findings = Findings()
    rows = measure(SHAPE, findings, ("ringflash", "flash"), rounds=2, device="cpu")
    assert rows == findings.rows
    return findings


def dense(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def test_all_that_agree_are_timed_forward_and_backward(monkeypatch):
    findings = entered(monkeypatch)
    assert [(row.direction, list(row.times)) for row in findings.rows] == [
        ("forward", ["ringflash", "flash"]),
        ("backward", ["ringflash", "flash"]),
    ]
    assert (findings.notes, findings.faults) == ({}, {})


def test_work_is_counted_by_visible_pairs():
    pairs = 2 * 48 * 49 / 2
    assert SHAPE.flops("forward") == 4 * 16 * 4 * pairs
    assert SHAPE.flops("backward") == 2.5 * SHAPE.flops("forward")


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_every_contestant_gets_the_same_numbers_in_its_own_layout(mask):
    shape = Shape(16, 4, 2, mask, 48, 2)
    q, k, v, _ = numbers(shape, "cpu")
    outs = {}
    for name in ("ringflash", "flash"):
        contestant = contestants(shape)[name]
        outs[name] = contestant.tokens_first(contestant.attend(*(contestant.laid_out(x) for x in (q, k, v))))
    assert kernels.difference(outs["ringflash"], outs["flash"]) < kernels.TOLERANCE
    heads_first = contestants(shape)["cudnn"].laid_out(q)
    assert heads_first.shape == (2, 4, 48, 16) and heads_first.is_contiguous()
    assert contestants(shape)["fa4"].laid_out(q) is q


def test_FlashAttention_4_is_called_as_its_package_says(monkeypatch):
    asked = {}

    def flash_attn_func(q, k, v, causal):
        asked["causal"] = causal
        return dense(q, k, v), None

    module = type(torch)("flash_attn.cute")
    module.flash_attn_func = flash_attn_func
    monkeypatch.setitem(sys.modules, "flash_attn", type(torch)("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    findings = Findings()
    measure(SHAPE, findings, ("ringflash", "fa4"), rounds=2, device="cpu")
    assert asked["causal"] is True
    assert list(findings.rows[0].times) == ["ringflash", "fa4"] and not findings.faults


def test_the_gradient_of_out_lies_as_out_does(monkeypatch):
    seen = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, out):
            return out.view_as(out)

        @staticmethod
        def backward(ctx, dout):
            seen.append(dout.stride())
            return dout

    def attend(q, k, v):  # [B, H, S, D], contiguous
        return Watched.apply(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).contiguous())

    swapped = lambda x: x.transpose(1, 2)  # noqa: E731
    findings = entered(monkeypatch, heads_first=Contestant(attend, lambda x: swapped(x).contiguous(), swapped))
    assert "heads_first" in findings.rows[1].times
    assert set(seen) == {(4 * 48 * 16, 48 * 16, 16, 1)}


def test_a_wrong_output_is_a_fault_and_is_not_timed(monkeypatch):
    findings = entered(monkeypatch, wrong=Contestant(lambda q, k, v: 1.1 * dense(q, k, v)))
    assert all(list(row.times) == ["ringflash", "flash"] for row in findings.rows)
    assert any("wrong differs from flash and was not timed: out 0.1" in fault for fault in findings.faults)


def test_a_wrong_gradient_is_a_fault_too(monkeypatch):
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q):
            return q.view_as(q)

        @staticmethod
        def backward(ctx, dq):
            return 0.5 * dq

    findings = entered(monkeypatch, wrong=Contestant(lambda q, k, v: dense(Wrong.apply(q), k, v)))
    assert "wrong" not in findings.rows[0].times
    (fault,) = findings.faults
    assert "out 0" in fault and "dq 0.5" in fault


def test_nan_is_a_fault(monkeypatch):
    findings = entered(monkeypatch, wrong=Contestant(lambda q, k, v: dense(q, k, v) * torch.nan))
    assert "wrong" not in findings.rows[0].times and findings.faults


def test_a_kernel_without_a_backward_is_timed_forward(monkeypatch):
    def forward_only(q, k, v):
        if torch.is_grad_enabled():
            raise NotImplementedError("no backward at head_dim 256")
        return dense(q, k, v)

    findings = entered(monkeypatch, hopper=Contestant(forward_only))
    assert [list(row.times) for row in findings.rows] == [["ringflash", "flash", "hopper"], ["ringflash", "flash"]]
    assert list(findings.notes) == ["hopper cannot run backward: NotImplementedError: no backward at head_dim 256"]
    assert not findings.faults


def test_what_a_peer_raises_is_noted_and_what_ours_raises_but_for_a_refusal_is_a_fault(monkeypatch):
    def broken(q, k, v):
        raise RuntimeError("no kernel\nand much more")

    findings = entered(monkeypatch, cudnn=Contestant(broken), triton=Contestant(broken))
    assert list(findings.notes) == ["cudnn cannot run forward: RuntimeError: no kernel"]
    assert list(findings.faults) == ["triton cannot run forward: RuntimeError: no kernel"]
    assert [list(row.times) for row in findings.rows] == [["ringflash", "flash"]] * 2


def test_who_runs_alone_is_timed_and_said_to_be_unchecked():
    findings = Findings()
    (forward, backward) = measure(SHAPE, findings, ("ringflash",), rounds=2, device="cpu")
    assert list(forward.times) == list(backward.times) == ["ringflash"]
    assert list(findings.notes) == ["ringflash ran alone, and was not checked"]


def test_a_sentence_that_is_true_of_many_shapes_is_said_once():
    findings = Findings()
    for _ in range(3):
        findings.note("fa4 is not here", SHAPE)
    assert sentences(findings.notes) == ["fa4 is not here (d16 4:2 causal 48 x 2 and 2 more)"]


def test_long_sequences_take_fewer_rounds():
    assert SHAPE.rounds(15) == (15, 3)
    assert Shape(128, 16, 16, "full", 65536, 1).rounds(15) == (5, 1)


def test_a_row_is_printed_with_speeds_and_spreads(monkeypatch):
    monkeypatch.setattr(timing, "time_ms", lambda run, head_start_ms: SHAPE.flops("forward") / 500e9)
    row = measure(SHAPE, Findings(), ("ringflash",), rounds=2, device="cpu")[0]
    assert line(row) == "forward  d16 4:2 causal 48 x 2:  ringflash 500 (±0.0%)"
