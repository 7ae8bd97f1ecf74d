"""transformers' Trainer over a ring, in real processes: losses and weights of transformers' own on one process."""

import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import dev
import ringflash as rf
from tests.integrations.train_over_ring import RingTrainer, Trainer, arguments, examples, model, train

ROOT = Path(__file__).resolve().parents[2]
OLDEST = dev.OTHER_TRANSFORMERS / dev.OLDEST_TRANSFORMERS


def over_ring(folder, processes, *runs, first=()):
    """The results of tests/integrations/train_over_ring.py by run."""
    path = folder / "results.pt"
    done = subprocess.run(
        [sys.executable, "-m", "tests.integrations.train_over_ring", str(path), str(processes), *runs],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*map(str, first), str(ROOT)]),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "HF_HUB_OFFLINE": "1",
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return torch.load(path)


@lru_cache
def expected():
    """transformers' own Trainer with its eager attention, on this process alone."""
    return train(Trainer, 2, "eager")


def check(found, tolerance=1e-5):
    """R42: the six numbers agree; and so do the weights after three clipped steps (R41, R43, R70)."""
    want = expected()
    assert found["train"] == pytest.approx(want["train"], rel=max(tolerance, 1e-5))
    assert found["eval"] == pytest.approx(want["eval"][: len(found["eval"])], rel=1e-5)
    for name, weight in want["weights"].items():
        assert float((found["weights"][name] - weight).abs().max()) <= 1e-5 * float(weight.abs().max()), name


def test_a_ring_of_one_trains_like_transformers_alone():
    check(train(RingTrainer, 2, ring=rf.Ring()))


def test_a_ring_of_two_trains_and_evaluates_like_one_process(tmp_path):
    """R42, R61, R70, with accumulation; the last batch of evaluation is not full. Wherever tokens are counted."""
    results = over_ring(
        tmp_path, 2, "2:2:across", "2:2:each", "2:2:evaluated", "2:2:compiled", "2:2:evaluated-compiled"
    )
    check(results["2:2:across"])
    check(results["2:2:each"])
    check(results["2:2:compiled"])
    check(results["2:2:evaluated-compiled"])
    check(results["2:2:evaluated"])  # before it was trained, which accelerate alone would then not do


@pytest.mark.slow
def test_a_ring_of_four_and_two_rings_of_two_train_and_evaluate_like_one_process(tmp_path):
    """R42, R70: beside data parallelism each ring reads batches of its own."""
    results = over_ring(tmp_path, 4, "4:2:across", "2:1:across")
    check(results["4:2:across"])
    check(results["2:1:across"])


@pytest.mark.slow
@pytest.mark.skipif(not OLDEST.exists(), reason="`dev.py test` brings the oldest transformers")
def test_the_oldest_transformers_trains_and_evaluates_the_same(tmp_path):
    """R65. It rounds what it logs to four digits."""
    check(over_ring(tmp_path, 2, "2:2:across", first=[OLDEST])["2:2:across"], tolerance=1e-4)


def trainer(tmp_path, *, settings=None, attention="ring", **more):
    args = arguments(str(tmp_path), 2, **(settings or {}))
    return RingTrainer(ring=rf.Ring(), model=model(attention), args=args, train_dataset=examples(), **more)


@pytest.mark.parametrize(
    ("settings", "more", "name"),
    [
        ({"label_smoothing_factor": 0.1}, {}, "label_smoothing_factor = 0.1"),
        ({}, {"compute_loss_func": print}, "compute_loss_func = "),
        ({}, {"compute_metrics": print}, "compute_metrics = "),
        ({"neftune_noise_alpha": 5.0}, {}, "neftune_noise_alpha = 5.0"),
    ],
    ids=["label smoothing", "a loss of one's own", "metrics", "noise"],
)
def test_what_would_look_at_a_part_as_if_it_were_the_whole_is_refused(tmp_path, settings, more, name):
    with pytest.raises(NotImplementedError, match=f"^RingTraining: {name}"):
        trainer(tmp_path, settings=settings, **more)


def test_a_model_with_another_attention_is_refused(tmp_path):
    """Its layers would take no notice of the ring."""
    with pytest.raises(ValueError, match="check_model: LlamaForCausalLM gives other logits over a ring"):
        trainer(tmp_path, attention="eager")


def test_predictions_and_losses_that_are_no_sums_over_tokens_are_refused(tmp_path):
    """Each rank would have a part of them."""
    made = trainer(tmp_path)
    made.ring = SimpleNamespace(ranks=2)
    with pytest.raises(NotImplementedError, match="predictions are asked for"):
        made.prediction_step(made.model, {}, prediction_loss_only=False)
    made.ring = rf.Ring()
    ones = torch.ones(1, 4).long()
    outputs = type("Outputs", (dict,), {"aux_loss": torch.ones(())})(loss=torch.ones(()))
    with pytest.raises(NotImplementedError, match="a loss that balances experts"):
        made.compute_loss(lambda **inputs: outputs, {"input_ids": ones, "labels": ones})


def test_a_batch_without_labels_is_refused(tmp_path):
    made = trainer(tmp_path)
    with pytest.raises(ValueError, match="the batch has input_ids; must have labels"):
        made.compute_loss(made.model, {"input_ids": torch.ones(1, 4).long()})


def test_processes_that_the_ring_does_not_divide_are_refused(tmp_path):
    made = trainer(tmp_path)
    made.ring = SimpleNamespace(ranks=2, rank=0)
    with pytest.raises(ValueError, match="process 0 of 1 is rank 0 of 2 in its ring"):
        made._check_settings()


def test_a_loader_that_does_not_say_how_it_deals_is_refused(tmp_path):
    """One process reading for all would give each rank of a ring another part of the batch."""
    made = trainer(tmp_path)
    made.ring, made.accelerator = SimpleNamespace(ranks=2), SimpleNamespace(num_processes=2, process_index=0)
    with pytest.raises(NotImplementedError, match="dispatch_batches"):
        made._by_ring(SimpleNamespace(dataset=[]))
