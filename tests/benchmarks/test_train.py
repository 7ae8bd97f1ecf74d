"""benchmarks/train.py on CPUs: its arms have one loss and train alike, and figures follow from the times."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import ringflash as rf
from ringflash.training import keep_attention
from tests.benchmarks.test_ring import load

LENGTH = 64


def loaded(stopped_clock=True):
    train = load("train")
    train.DEVICE, train.DTYPE, train.TOKENS_PER_GPU, train.RECOMPUTED_FROM = "cpu", torch.float32, 128, 1024
    train.context_parallel = lambda ranks: []  # of GPUs only
    train.by_cudnn = list
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


class Counting(TorchDispatchMode):
    """Calls of torch's attention that are really made."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += func.name() == "aten::_scaled_dot_product_flash_attention_for_cpu"
        return func(*args, **(kwargs or {}))


def test_torch_does_not_form_its_scores_again_where_layers_are_recomputed():
    """Nor do we, see R44."""
    train = loaded(stopped_clock=False)
    batch = train.Batch.drawn(2, LENGTH, 64, "cpu")
    run = train.Run.made(small(train), 1)
    with Counting() as counting:
        run.loss(train.arms(1)[1], batch, True, goes_back=True)
    assert counting.calls == small(train).layers


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
        batch = train.Batch.drawn(2, LENGTH, 64, "cpu")
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
    batch = train.Batch.drawn(2, LENGTH, 64, "cpu")
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


def measured():
    """In a worker of two: a row of a ring under FSDP2, and the loss after its steps."""
    train = loaded()
    run = train.Run.made(small(train), 2)
    row = train.measure(run, LENGTH, 2, 2)
    arm, batch = train.arms(2)[0], train.Batch.drawn(4, LENGTH, 64, "cpu")
    with torch.no_grad():
        return row, run.loss(arm, batch, False, goes_back=False)


def test_a_ring_under_fsdp2_is_measured_as_one_device_is(own_workers):
    train = loaded()
    run = train.Run.made(small(train), 1)
    train.TOKENS_PER_GPU = 256  # as many as both have
    alone = train.measure(run, LENGTH, 2, 1)
    batch = train.Batch.drawn(4, LENGTH, 64, "cpu")
    for row, loss in own_workers(2).run(measured):
        assert (row.tokens, row.batch, row.gpus) == (LENGTH, 4, 2)
        assert row.tflops["ringflash"] == pytest.approx(alone.tflops["ringflash"] / 2, abs=0.1)
        assert row.extra["loss"]["ringflash"] == pytest.approx(alone.extra["loss"]["torch"], rel=1e-4)
        # Three steps there; as many here, by torch.
        again = train.Run.made(small(train), 1)
        for _ in range(3):
            again.loss(train.arms(1)[1], batch, False, goes_back=True)
        with torch.no_grad():
            assert loss == pytest.approx(again.loss(train.arms(1)[1], batch, False, goes_back=False), rel=1e-4)


def test_arms_are_chosen_by_name():
    train = loaded()
    run = train.Run.made(small(train), 1)
    assert set(train.measure(run, LENGTH, 1, 1, ["torch"]).tflops) == {"ringflash", "torch"}
    assert set(train.measure(run, LENGTH, 1, 1, []).tflops) == {"ringflash"}
    with pytest.raises(ValueError, match="no arm is called cudnn; there are ringflash, torch"):
        train.measure(run, LENGTH, 1, 1, ["cudnn"])


@pytest.mark.parametrize("most", [30_000, 250_000, 262_144, 280_000, 400_000])
def test_the_longest_length_is_found_to_a_sixteenth_of_the_guess(most):
    tried = []
    found = loaded().search(lambda length: tried.append(length) or length <= most, 262_144)
    assert found <= most < found + 262_144 / 16
    assert len(tried) == len(set(tried))


def test_where_no_length_fits_it_is_said():
    with pytest.raises(SystemExit, match="do not fit"):
        loaded().search(lambda length: False, 262_144)


def split(arguments):
    """By option, with what follows each."""
    for word in arguments:
        if word.startswith("--"):
            part = [word]
            yield part
        else:
            part.append(word)


def tries(monkeypatch, train, peak):
    """Where longest() finds what processes of its own would say: peak(length, window) GiB of 100."""

    def launched(gpus, *arguments):
        said = {name: values for name, *values in list(split(arguments))}
        found = [peak(int(length), said.get("--window")) for length in said["--trying"]]
        words = train.NO_ROOM if max(found) > 100 else train.json.dumps([*found, 100])
        Path(*said["--verdict"]).write_text(words)
        return int(max(found) > 100)

    monkeypatch.setattr(train, "launched", launched)


@pytest.mark.parametrize("gpus", [1, 2])
def test_the_longest_length_is_searched_where_two_peaks_say(monkeypatch, capsys, gpus):
    train = loaded()
    tries(monkeypatch, train, lambda length, window: 10 + length / 4096)
    train.longest(gpus)
    *before, last = capsys.readouterr().out.splitlines()
    assert 345_000 < int(last.split(":")[1].split()[0]) <= 90 * 4096
    assert len(before) <= 6
    assert ("in a window" in before[-1]) == (gpus == 1)


def test_a_window_saves_time_only_where_it_takes_as_much_memory(monkeypatch):
    train = loaded()
    tries(monkeypatch, train, lambda length, window: (5 if window else 10) + length / 4096)
    with pytest.raises(SystemExit, match="another amount of memory"):
        train.longest(1)


def test_a_failure_is_not_taken_for_want_of_memory(monkeypatch, capsys):
    train = loaded()
    monkeypatch.setattr(train, "launched", lambda gpus, *arguments: 1)
    with pytest.raises(SystemExit, match="ended with status 1, and not for want of memory"):
        train.longest(2)
    assert "fit" not in capsys.readouterr().out


def test_a_picture_is_drawn_of_what_was_measured(tmp_path):
    pytest.importorskip("matplotlib")
    train = loaded()
    run = train.Run.made(small(train), 1)
    rows = [vars(train.measure(run, length, 1, 1)) for length in (32, LENGTH)]
    meta = {"gpu": "NVIDIA H200", "gpus": 1, "torch": "2.11", "date": "2026-12-01", "commit": "abc"}
    path = tmp_path / "train_x1.json"
    path.write_text(train.json.dumps({"meta": meta, "rows": rows}))
    (picture,) = load("plot").train([path], tmp_path)
    assert picture == tmp_path / "train_x1.png"
    assert picture.stat().st_size > 10_000


@pytest.fixture(autouse=True)
def _fresh():
    yield
    for name in ("train", "gpt"):
        sys.modules.pop(name, None)
