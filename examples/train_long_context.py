"""Train a language model on sequences that no single process holds.

    torchrun --standalone --nproc-per-node 2 examples/train_long_context.py

A byte-level transformer learns the Python standard library. Every sequence is cut across the processes (the ring), every
weight too (FSDP2, over the same processes), and attention is exact: at the end one process trains the same steps again
on whole sequences, and the losses must agree. One GPU per process with NCCL, or CPU cores with gloo; without torchrun
it is an ordinary one-process program. `--help` lists what can be changed.

The idea in four lines, from long_context/training.py and model.py:

    labels = shift_labels(tokens, lengths=lengths)              # on the whole sequence, before it is cut
    tokens, labels = ring.shard(tokens), ring.shard(labels)     # this rank's part
    out = rf.attention(q, k, v, ring=ring, mask=mask)           # as if nothing had been cut
    (summed_loss / valid * ranks).backward()                    # FSDP averages over ranks; a sum is meant

Exit status: 0; 1 if the compared losses differ by more than rounding; 2 if the flags make no sense.
"""

import argparse
import json
import os
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

# Before torch starts its threads: they should sleep, not spin, while they wait for one another. On a machine that does
# something else too, the one-process run was up to ten times slower without this.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import ringflash as rf
from long_context import checkpoint, plot, processes, sample
from long_context.compare import compare
from long_context.model import ModelConfig, Transformer
from long_context.processes import Processes
from long_context.progress import MetricsFile, Progress
from long_context.settings import DTYPES, LAYOUTS, Recipe, parse_flags, resolve_recipe
from long_context.text import Corpus, Packing, standard_library
from long_context.training import Trainer

# Enough held-out text to see the trend; at least one sequence, however long.
VALIDATION_TOKENS = 8192


@dataclass(frozen=True)
class Run:
    """Everything decided before the first step. resumed: the checkpoint it continues from. out: the folder it fills."""

    flags: argparse.Namespace
    team: Processes
    recipe: Recipe
    config: ModelConfig
    corpus: Corpus
    packing: Packing
    resumed: Path | None
    out: Path


def main(arguments: list[str] | None = None) -> int:
    flags = parse_flags(arguments)
    try:
        run = prepare(flags, processes.start(flags.device))
    except (ValueError, NotImplementedError, FileNotFoundError) as error:
        # All ranks see the same flags and stop at the same place; it is said once.
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        processes.stop()
        return 2
    verdict = carry_out(run)
    processes.stop()
    return verdict


def prepare(flags: argparse.Namespace, team: Processes) -> Run:
    """Check everything that can be wrong before anything is computed."""
    resumed = checkpoint.find(flags.resume) if flags.resume else None
    before, taken = checkpoint.about(resumed) if resumed else (None, 0)
    recipe = resolve_recipe(flags, before, team.device)
    recipe.check_ranks(team.ranks)
    if taken >= recipe.steps:
        raise ValueError(f"--steps {recipe.steps}: {resumed} has taken {taken} already; ask for more")
    config = ModelConfig(
        dim=recipe.dim,
        layers=recipe.layers,
        heads=recipe.heads,
        kv_heads=recipe.kv_heads,
        compute_dtype=DTYPES[recipe.dtype],
        backend=flags.backend,
        activation_checkpointing=flags.activation_checkpointing,
    )
    if flags.backend:
        # One token, here: a name that does not exist or cannot serve this model is told now, by one line.
        q, k = (
            torch.zeros(1, 1, H, config.head_dim, dtype=config.compute_dtype, device=team.device)
            for H in (recipe.heads, recipe.kv_heads)
        )
        rf.attention(q, k, k, mask=rf.Causal(), backend=flags.backend)
    corpus = standard_library()
    if len({fingerprint for (fingerprint,) in team.gather_floats(corpus.fingerprint)}) > 1:
        raise ValueError("the ranks read different texts; start the same version of Python everywhere")
    return Run(
        flags=flags,
        team=team,
        recipe=recipe,
        config=config,
        corpus=corpus,
        packing=Packing(corpus.train, length=recipe.seq_len, seed=recipe.seed),
        resumed=resumed,
        out=choose_folder(flags, resumed, team),
    )


def choose_folder(flags: argparse.Namespace, resumed: Path | None, team: Processes) -> Path:
    """--out, or the folder of the run that is resumed, or the first free runs/long_context/NNN. Created by rank 0."""
    out = flags.out or (resumed and resumed.parent.parent)
    if out is None:
        taken = [int(path.name) for path in Path("runs/long_context").glob("*") if path.name.isdecimal()]
        # Rank 0 decides: another rank may look a moment later, when the folder is there already.
        out = team.from_first(Path("runs/long_context") / f"{max(taken, default=0) + 1:03d}")
    elif not resumed and (out / "checkpoints").exists():
        raise ValueError(
            f"--out {out}: holds checkpoints of an earlier run; continue it with --resume {out}, or choose another folder"
        )
    if team.is_first:
        out.mkdir(parents=True, exist_ok=True)
    return out


def carry_out(run: Run) -> int:
    """Train, save, sample, compare, and say how it went."""
    flags, team = run.flags, run.team
    trainer = Trainer(run.recipe, run.config, team, rf.Ring(team.mesh, layout=LAYOUTS[flags.layout]()), run.packing)
    if run.resumed:
        checkpoint.load(trainer, run.resumed)
    first = trainer.step
    if team.is_first:
        introduce(run, trainer)
    rows = train(run, trainer)
    saved = checkpoint.save(trainer, run.out)

    # All ranks bring their parts of the weights; rank 0 gets the whole.
    weights = get_model_state_dict(trainer.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    del trainer  # the one-process run needs its memory
    text = team.first_alone(lambda alone: write_sample(run, alone, weights)) if flags.sample_bytes else None
    comparison = None
    if flags.compare or (flags.compare is None and team.ranks > 1):
        comparison = team.first_alone(lambda alone: train_alone(run, alone, rows, first=first))
    if team.is_first:
        conclude(run, rows, text, comparison, first=first, saved=saved)
    return 0 if comparison is None or comparison["agrees"] else 1


def introduce(run: Run, trainer: Trainer) -> None:
    recipe, team = run.recipe, run.team
    weights = sum(weight.numel() for weight in trainer.model.parameters())
    text_bytes = sum(map(len, run.corpus.train))
    device = torch.cuda.get_device_name(team.device) if team.device.type == "cuda" else "CPU"
    print(f"{weights:,} weights, {text_bytes:,} bytes of text in {len(run.corpus.train)} files")
    print(
        f"{recipe.batch} x {recipe.seq_len:,} tokens per step, cut into {team.ranks} parts ({run.flags.layout}); "
        f"{recipe.dtype} on {team.ranks} x {device}",
        flush=True,
    )


def train(run: Run, trainer: Trainer) -> list[dict]:
    """The loop. Returns what metrics.jsonl holds (on rank 0, of earlier parts of a resumed run too)."""
    flags, recipe, is_first = run.flags, run.recipe, run.team.is_first
    held_out = Packing(run.corpus.validation, length=recipe.seq_len, seed=0)
    validation_sequences = min(held_out.per_epoch, max(1, VALIDATION_TOKENS // recipe.seq_len))
    validate_every = flags.validate_every or max(1, recipe.steps // 8)

    metrics = MetricsFile(run.out / "metrics.jsonl", first_step=trainer.step) if is_first else None
    progress = Progress("step", steps=recipe.steps, first=trainer.step, log_every=flags.log_every)
    while trainer.step < recipe.steps:
        row = trainer.take_step()
        if trainer.step % validate_every == 0 or trainer.step == recipe.steps:
            row["validation_loss"] = trainer.validate(held_out, sequences=validation_sequences)
        if metrics:
            metrics.append(row)
            progress.show(row)
        if flags.checkpoint_every and trainer.step % flags.checkpoint_every == 0 and trainer.step < recipe.steps:
            checkpoint.save(trainer, run.out)
    if not metrics:
        return []
    metrics.close()
    return metrics.rows


def write_sample(run: Run, alone: Processes, weights: dict) -> str:
    model = Transformer(run.config, ring=None, seed=run.recipe.seed)
    model.load_state_dict(weights)
    model.to(alone.device)
    flags = run.flags
    text = sample.write(
        model, flags.prompt, length=flags.sample_bytes, temperature=flags.temperature, seed=run.recipe.seed
    )
    (run.out / "sample.txt").write_text(text)
    return text


def train_alone(run: Run, alone: Processes, rows: list[dict], *, first: int) -> dict:
    """The same steps from the same weights, on whole sequences: no ring, no FSDP, no process group."""
    if alone.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(alone.device)
    trainer = Trainer(run.recipe, run.config, alone, None, run.packing)
    if run.resumed:
        checkpoint.load(trainer, run.resumed)
    # Rounding differences grow with every step that is fed with the last one's: on GPUs, where the run is long and
    # rounds to bf16, the first steps say more about attention than the last.
    at_most = run.flags.compare_steps or (20 if alone.device.type == "cuda" else run.recipe.steps)
    last = min(run.recipe.steps, first + at_most)
    progress = Progress("alone", steps=last, first=first, log_every=run.flags.log_every)
    alone_rows = []
    while trainer.step < last:
        alone_rows.append(trainer.take_step())
        progress.show(alone_rows[-1])
    comparison = compare(rows, alone_rows, run.config.compute_dtype)
    (run.out / "compare.json").write_text(json.dumps(comparison, indent=1) + "\n")
    return comparison


def conclude(run: Run, rows: list[dict], text: str | None, comparison: dict | None, *, first: int, saved: Path) -> None:
    """The summary a person reads; each figure is in the run's files too."""
    if text is not None:
        print(f"\n--- a sample, at temperature {run.flags.temperature} ---\n{text}\n---")
    recipe, out = run.recipe, run.out
    new = [row for row in rows if row["step"] >= first]
    # The first step starts threads and compiles kernels.
    speed = statistics.median(row["tokens_per_s"] for row in new[1:] or new)
    # A step sees one or two files, some far easier than others; the mean over a tenth of the run shows where it got to.
    lately = [row["loss"] for row in rows[-max(2, len(rows) // 10) :]]
    peaks = ", ".join(f"{peak / 2**20:,.0f}" for peak in rows[-1]["peak_memory_bytes"])
    print(
        f"loss         {rows[0]['loss']:.4f} -> {rows[-1]['loss']:.4f} (mean of the last {len(lately)} steps "
        f"{statistics.fmean(lately):.4f}), validation {rows[-1]['validation_loss']:.4f}"
    )
    print(f"speed        {speed:,.0f} tokens/s (median of {len(new)} steps)")
    print(f"peak memory  {peaks} MiB by rank")
    if comparison:
        difference = comparison[f"largest_{comparison['measure']}_difference"]
        verdict = "agrees with" if comparison["agrees"] else "DISAGREES with"
        print(
            f"compared     {verdict} one process over {len(comparison['steps'])} steps: largest {comparison['measure']} "
            f"difference of loss {difference:.1e}, tolerance {comparison['tolerance']:.0e}"
        )
    title = f"{recipe.seq_len:,}-token sequences cut across {run.team.ranks} processes"
    drawn = plot.draw(rows, comparison, out / "loss.png", title=title)
    print(f"picture      {out / 'loss.png' if drawn else 'none, matplotlib is not installed'}")
    print(f"checkpoint   {saved}")
    print(f"files        {', '.join(sorted(path.name for path in out.iterdir() if path.is_file()))} in {out}")


if __name__ == "__main__":
    sys.exit(main())
