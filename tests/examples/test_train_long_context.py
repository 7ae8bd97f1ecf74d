"""The long-context example: its text, its rotary positions, and a short run that is compared, saved and resumed."""

import io
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))  # as Python does for a script in that folder

import ringflash as rf  # noqa: E402
import train_long_context as example  # noqa: E402
from long_context import processes, sample  # noqa: E402
from long_context.compare import compare  # noqa: E402
from long_context.model import ModelConfig, Transformer, rotary_angles, rotate  # noqa: E402
from long_context.progress import MetricsFile, Progress, read_metrics  # noqa: E402
from long_context.settings import ON_CPU  # noqa: E402
from long_context.text import START, Packing, standard_library  # noqa: E402
from long_context.training import IGNORED, cut, learning_rate  # noqa: E402
from ringflash.parallel.inprocess import run as run_ranks  # noqa: E402

# Bytes of all kinds: among equal ones no position and no neighbour would make a difference.
DOCUMENTS = [
    START + random.Random(length).randbytes(length).replace(START, b"x") for length in (5, 63, 1, 100, 17, 257)
]


# The text


def test_the_library_is_read_the_same_twice_and_held_out_files_are_not_trained_on():
    corpus = standard_library()
    assert corpus.fingerprint == standard_library().fingerprint
    assert not set(corpus.train) & {text for text in corpus.validation if len(text) > 100}
    assert all(text.startswith(START) and text.count(START) == 1 for text in (*corpus.train, *corpus.validation))


@pytest.mark.parametrize("length", [1, 7, 64, 100, 449])
def test_an_epoch_shows_every_byte_once_but_for_a_rest(length):
    packing = Packing(DOCUMENTS, length=length, seed=3)
    epoch = [packing[index] for index in range(packing.per_epoch)]
    assert all(sum(packed.lengths) == length == packed.tokens.shape[1] for packed in epoch)
    shown = sorted(b"".join(bytes(packed.tokens[0].tolist()) for packed in epoch))
    everything = sorted(b"".join(DOCUMENTS))
    assert len(everything) - len(shown) == len(everything) % length
    assert all(shown.count(byte) <= everything.count(byte) for byte in set(shown))


def test_documents_of_a_sequence_are_pieces_of_real_documents():
    packing = Packing(DOCUMENTS, length=100, seed=0)
    for index in range(2 * packing.per_epoch):
        packed = packing[index]
        pieces = [bytes(piece.tolist()) for piece in packed.tokens[0].split(list(packed.lengths))]
        assert all(any(piece in document for document in DOCUMENTS) for piece in pieces)
        # Only the first piece may begin inside a document, and only the last may stop before its end.
        assert all(piece.startswith(START) for piece in pieces[1:])
        assert all(any(document.endswith(piece) for document in DOCUMENTS) for piece in pieces[:-1])


def test_batches_depend_on_seed_and_number_only():
    one, other = Packing(DOCUMENTS, length=64, seed=0), Packing(DOCUMENTS, length=64, seed=0)
    late_first = [other[index] for index in (20, 3)]
    assert torch.equal(one[3].tokens, late_first[1].tokens)
    assert torch.equal(one[20].tokens, late_first[0].tokens)
    different = Packing(DOCUMENTS, length=64, seed=1)
    assert any(not torch.equal(one[index].tokens, different[index].tokens) for index in range(7))


def test_a_sequence_longer_than_the_text_repeats_it():
    packed = Packing(DOCUMENTS, length=1000, seed=0)[0]
    assert packed.tokens.shape == (1, 1000)
    assert max(packed.lengths) <= 258


# The model


def test_rotated_scores_depend_on_the_distance_only():
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 1, 32), torch.randn(1, 1, 1, 32)

    def score(i, j):
        return float(
            (rotate(q, rotary_angles(torch.tensor([i]), 32)) * rotate(k, rotary_angles(torch.tensor([j]), 32))).sum()
        )

    assert score(9, 4) == pytest.approx(score(1005, 1000), abs=1e-4)
    assert abs(score(9, 4) - score(9, 5)) > 1e-2


@pytest.mark.parametrize("layout", [rf.Zigzag(), rf.Contiguous(), rf.Striped()], ids=str)
def test_a_ring_computes_the_logits_and_labels_of_one_process(layout):
    packed = Packing(DOCUMENTS, length=96, seed=0)[2]
    assert len(packed.lengths) > 1
    config = ModelConfig(dim=32, layers=2, heads=4, kv_heads=2)

    def logits_of(ring):
        model = Transformer(config, ring=ring, seed=0)
        torch.nn.init.eye_(model.to_logits.weight)  # zeros would agree with anything
        shard = cut(packed, ring, torch.device("cpu"))
        return model(shard.tokens, shard.positions, shard.mask), shard.labels

    def as_rank(transport):
        ring = rf.Ring(layout=layout, transport=transport)
        logits, labels = logits_of(ring)
        return ring.gather(logits), ring.gather(labels)

    with torch.no_grad():
        logits, labels = logits_of(None)
        for ring_logits, ring_labels in run_ranks(3, as_rank):
            torch.testing.assert_close(ring_logits, logits, atol=1e-4, rtol=1e-4)
            assert torch.equal(ring_labels, labels)


def test_every_token_is_asked_for_the_next_one_of_its_document():
    packed = Packing(DOCUMENTS, length=96, seed=0)[0]
    shard = cut(packed, None, torch.device("cpu"))
    expected = []
    for piece in packed.tokens[0].split(list(packed.lengths)):
        expected += [*piece[1:].tolist(), IGNORED]
    assert shard.labels[0].tolist() == expected
    assert shard.valid == 96 - len(packed.lengths)
    assert shard.positions.tolist() == [place for length in packed.lengths for place in range(length)]


def test_activation_checkpointing_changes_no_gradient():
    packed = Packing(DOCUMENTS, length=64, seed=0)[0]
    gradients = []
    for is_checkpointed in (False, True):
        config = ModelConfig(dim=16, layers=2, heads=2, kv_heads=1, activation_checkpointing=is_checkpointed)
        model = Transformer(config, ring=None, seed=0)
        torch.nn.init.eye_(model.to_logits.weight)
        shard = cut(packed, None, torch.device("cpu"))
        model(shard.tokens, shard.positions, shard.mask).square().mean().backward()
        gradients.append([weight.grad for weight in model.parameters()])
    torch.testing.assert_close(*gradients)


def test_greedy_writing_takes_the_likeliest_byte_each_time():
    model = Transformer(ModelConfig(dim=32, layers=2, heads=2, kv_heads=1), ring=None, seed=0)
    torch.nn.init.normal_(model.to_logits.weight, std=0.1, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        # The plain way: a longer input each time, nothing behind it.
        tokens = list(START + b"def ")
        for _ in range(6):
            logits = model(torch.tensor([tokens]), torch.arange(len(tokens)), rf.Causal())[0, -1]
            tokens.append(int(logits[1:].argmax()) + 1)
    written = sample.write(model, "def ", length=6, temperature=0, seed=0)
    assert written == bytes(tokens[1:]).decode("utf-8", errors="replace")


# What surrounds it


def test_the_learning_rate_rises_then_falls_to_a_tenth():
    rates = [learning_rate(ON_CPU, step) for step in range(ON_CPU.steps + 1)]
    assert rates[0] == pytest.approx(ON_CPU.lr / ON_CPU.warmup)
    assert max(rates) == pytest.approx(ON_CPU.lr) == rates[ON_CPU.warmup]
    assert rates[-1] == pytest.approx(ON_CPU.lr / 10)
    assert rates[ON_CPU.warmup :] == sorted(rates[ON_CPU.warmup :], reverse=True)


def row(step, loss):
    return {"step": step, "loss": loss, "grad_norm": 1.0, "tokens_per_s": 10.0, "peak_memory_bytes": [2**20, 3 * 2**20]}


@pytest.mark.parametrize(
    ("dtype", "loss", "agrees"),
    [
        pytest.param(torch.float32, 4.00005, True, id="fp32 rounding"),
        pytest.param(torch.float32, 4.0002, False, id="fp32 more than rounding"),
        pytest.param(torch.bfloat16, 4.003, True, id="bf16 rounding"),
        pytest.param(torch.bfloat16, 4.005, False, id="bf16 more than rounding"),
        pytest.param(torch.float32, math.nan, False, id="NaN"),
    ],
)
def test_the_comparison_fails_on_more_than_rounding(dtype, loss, agrees):
    # A difference in the middle, a run that is longer than what it is compared with.
    verdict = compare(
        [row(0, 5.0), row(1, loss), row(2, 3.0), row(3, 2.0)], [row(0, 5.0), row(1, 4.0), row(2, 3.0)], dtype
    )
    assert verdict["agrees"] is agrees
    assert verdict["steps"] == [0, 1, 2]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_one_line_and_a_file_a_line_every_few_steps():
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        progress = Progress("step", steps=10, first=0, log_every=5, stream=stream)
        for step in range(10):
            progress.show(row(step, 3.0))
    assert terminal.getvalue().count("\n") == 1 and terminal.getvalue().count("\r") == 10
    assert [line.split()[1] for line in file.getvalue().splitlines()] == ["1/10", "6/10", "10/10"]
    for shown in ("loss 3.0000", "10 tokens/s", "0 s left", "3 MiB per rank"):
        assert shown in terminal.getvalue() and shown in file.getvalue()


def test_resumed_metrics_replace_the_steps_taken_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for first_step, losses in ((0, (5.0, 4.0, 3.0)), (2, (2.0, 1.0))):
        metrics = MetricsFile(path, first_step=first_step)
        for step, loss in enumerate(losses, first_step):
            metrics.append(row(step, loss))
        metrics.close()
    assert [kept["loss"] for kept in read_metrics(path)] == [5.0, 4.0, 2.0, 1.0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--heads 4 --kv-heads 3", "heads 4 must be a multiple of kv_heads 3"),
        ("--dim 100 --heads 3", "dim 100 must be a multiple of heads 3"),
        ("--dim 6 --heads 2", "must be even"),
        ("--steps 0", "--steps 0: must be at least 1"),
        ("--backend nonsense", "'nonsense'"),
        ("--resume nowhere", "--resume nowhere: neither a checkpoint"),
    ],
)
def test_flags_that_make_no_sense_are_told_in_one_line(flags, message, capsys, monkeypatch):
    monkeypatch.setattr(processes, "share_cores", lambda count: None)  # this process runs other tests too
    assert example.main(["--device", "cpu", *flags.split()]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_length_that_the_ranks_do_not_divide_names_one_that_they_do():
    with pytest.raises(
        ValueError, match="--seq-len 2048 cannot be cut into 3 equal parts; use a multiple of 3, as 2046"
    ):
        ON_CPU.check_ranks(3)


# Whole runs

TINY = "--device cpu --seq-len 384 --batch 2 --dim 32 --layers 2 --heads 2 --kv-heads 1 --steps 8 --lr 2e-2 --warmup 2"


def launch(ranks, *flags):
    """Run the example in processes of its own; ranks=None is without torchrun. Returns its output."""
    launcher = [] if ranks is None else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *launcher, "examples/train_long_context.py", *map(str, flags)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder and the output of a run of 8 steps in 2 processes, with a checkpoint half-way."""
    out = tmp_path_factory.mktemp("trained")
    output = launch(2, *TINY.split(), "--out", out, "--checkpoint-every", 4, "--sample-bytes", 8, "--log-every", 1)
    return out, output


@pytest.mark.slow
def test_a_run_in_two_processes_learns_and_agrees_with_one(trained):
    out, output = trained
    rows = read_metrics(out / "metrics.jsonl")
    assert [kept["step"] for kept in rows] == list(range(8))
    assert rows[0]["loss"] == pytest.approx(math.log(256), abs=1e-5)
    assert rows[-1]["loss"] < rows[0]["loss"] - 1
    assert all(len(kept["peak_memory_bytes"]) == 2 and kept["tokens_per_s"] > 0 for kept in rows)

    comparison = json.loads((out / "compare.json").read_text())
    assert comparison["agrees"] and comparison["largest_absolute_difference"] < 1e-4
    assert comparison["ring"]["loss"] == [kept["loss"] for kept in rows]
    # Adam hardly sees a gradient that is too large by a factor, so neither does the loss; the norm does.
    assert comparison["ring"]["grad_norm"] == pytest.approx(comparison["alone"]["grad_norm"], rel=1e-3)
    assert "agrees with one process over 8 steps" in output
    for step in ("step 1/8", "alone 1/8"):
        assert step in output


@pytest.mark.slow
def test_a_run_leaves_its_files(trained):
    out, output = trained
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "sample.txt").read_text().startswith("def ")
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step_000004", "step_000008"]
    assert str(out / "loss.png") in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "tolerance"),
    [
        pytest.param(2, 0.0, id="same number of processes"),
        pytest.param(None, 1e-4, id="one process, without torchrun"),
    ],
)
def test_a_resumed_run_continues_as_if_never_stopped(trained, tmp_path, ranks, tolerance):
    whole, _ = trained
    checkpoint = whole / "checkpoints" / "step_000004"
    launch(ranks, "--device", "cpu", "--resume", checkpoint, "--out", tmp_path, "--no-compare", "--sample-bytes", 0)
    resumed = read_metrics(tmp_path / "metrics.jsonl")
    expected = read_metrics(whole / "metrics.jsonl")[4:]
    assert [kept["step"] for kept in resumed] == [4, 5, 6, 7]
    for name in ("loss", "lr", "grad_norm"):
        assert [kept[name] for kept in resumed] == pytest.approx(
            [kept[name] for kept in expected], abs=tolerance, rel=tolerance
        )


def test_a_finished_run_is_not_resumed_nor_overwritten(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(processes, "share_cores", lambda count: None)
    saved = tmp_path / "checkpoints" / "step_000008"
    saved.mkdir(parents=True)
    recipe = {name: getattr(ON_CPU, name) for name in ON_CPU.__dataclass_fields__} | {"steps": 8}
    (saved / "about.json").write_text(json.dumps({"step": 8, "recipe": recipe}))
    assert example.main(["--device", "cpu", "--resume", str(tmp_path)]) == 2
    assert "has taken 8 already; ask for more" in capsys.readouterr().err
    assert example.main(["--device", "cpu", "--out", str(tmp_path)]) == 2
    assert "holds checkpoints of an earlier run" in capsys.readouterr().err
    assert example.main(["--device", "cpu", "--resume", str(tmp_path), "--steps", "9", "--dim", "64"]) == 2
    assert "--dim 64: the checkpoint's model has 128" in capsys.readouterr().err
