"""benchmarks/train.py on CPUs: its arms have one loss and train alike, and figures follow from the times."""

import sys

import pytest
import torch
import torch.distributed as dist

import ringflash as rf
from ringflash.training import keep_attention
from tests.benchmarks.test_ring import load

LENGTH = 64


def loaded(stopped_clock=True):
    train = load("train")
    train.DEVICE, train.DTYPE, train.TOKENS_PER_GPU, train.RECOMPUTED_FROM = "cpu", torch.float32, 128, 1024
    train.context_parallel = lambda ranks: []  # of GPUs only
    if stopped_clock:
        real = train.Run.loss
        train.step_s = lambda run, arm, batch, recomputed: (
            real(run, arm, batch, recomputed, goes_back=True),
            (0.5, 1.0),
        )[1]
    return train


def small(train):
    return train.Size(layers=2, hidden=32, heads=4, vocabulary=64)


def test_on_one_device_both_arms_are_measured():
    train = loaded()
    run = train.Run.made(small(train), 1)
    row = train.measure(run, LENGTH, 2, 1)
    weights = 2 * (2 * 32 + 4 * 32 * 32 + 8 * 32 * 32) + 32 + 64 * 32
    flops = 6 * (weights + 2 * 32 * LENGTH) * 128
    assert row.tflops == {name: round(flops / 0.5 / 1e12, 1) for name in ("ringflash", "torch")}
    assert row.extra["tokens_per_s"] == {"ringflash": 256, "torch": 256}
    assert (row.batch, row.gpus, row.extra["recomputed"]) == (2, 1, "no")
    assert abs(row.extra["loss"]["ringflash"] - row.extra["loss"]["torch"]) < 1e-4


def trained():
    """In a worker of two: losses before and after some steps of a ring, with and without recomputation."""
    train = loaded()
    group = dist.group.WORLD
    found = []
    for recomputed in (False, True):
        torch.manual_seed(0)
        model = train.GPT(small(train))
        run = train.Run(model, torch.optim.SGD(model.parameters(), lr=0.5), 2)
        arm = train.Arm("ringflash", lambda batch: train.on_ring(rf.Ring(group), batch), {"context_fn": keep_attention})
        batch = train.Batch.drawn(2, LENGTH, 64)
        losses = []
        for _ in range(3):
            with arm.enter(batch) as (mine, attend):
                total = model(mine, attend, arm.recomputing if recomputed else None) / batch.labels.numel()
            total.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=group)
            run.optimizer.step()
            run.optimizer.zero_grad()
            total = total.detach()
            dist.all_reduce(total, group=group)
            losses.append(float(total))
        found.append(losses)
    return found


def test_a_ring_of_two_trains_as_one_device_does(own_workers):
    train = loaded()
    torch.manual_seed(0)
    model = train.GPT(small(train))
    optimizer, expected = torch.optim.SGD(model.parameters(), lr=0.5), []
    batch = train.Batch.drawn(2, LENGTH, 64)
    for _ in range(3):
        loss = model(batch, train.by_torch, None) / batch.labels.numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(loss.detach()))
    assert expected[2] < expected[0]
    for plain, recomputed in own_workers(2).run(trained):
        assert plain == pytest.approx(expected, rel=1e-5)
        assert recomputed == plain


def test_arms_whose_losses_differ_are_not_timed():
    train = loaded()
    run = train.Run.made(small(train), 1)
    real = train.by_torch
    train.by_torch = lambda q, k, v: 2 * real(q, k, v)
    with torch.no_grad():
        run.model.head.weight *= 50
    with pytest.raises(ValueError, match="losses differ"):
        train.measure(run, LENGTH, 2, 1)


@pytest.mark.parametrize("most", [3_000, 70_000, 131_072, 200_000, 1_000_000])
def test_the_longest_length_is_found_to_an_eighth(most):
    tried = []
    found = loaded().search(lambda length: tried.append(length) or length <= most, 131_072)
    assert found <= most < found * (1 + 1 / 8) + 1
    assert len(tried) <= 12


def test_a_failure_is_not_taken_for_want_of_memory(monkeypatch, capsys):
    train = loaded()
    monkeypatch.setattr(train, "launched", lambda gpus, *arguments: 1)
    with pytest.raises(SystemExit, match="ended with status 1, and not for want of memory"):
        train.longest(2)
    assert "fit" not in capsys.readouterr().out


@pytest.fixture(autouse=True)
def _fresh():
    yield
    sys.modules.pop("train", None)
