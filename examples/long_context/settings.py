"""What a run is made of: flags, what was saved with a checkpoint, and defaults that fit the machine, in this order."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

import ringflash as rf

LAYOUTS: dict[str, Callable[[], rf.Layout]] = {"zigzag": rf.Zigzag, "contiguous": rf.Contiguous, "striped": rf.Striped}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the losses. Saved with every checkpoint, and taken from it on --resume.

    How the work is spread (number of processes, layout, backend) is not here: it changes a loss by rounding only.
    """

    steps: int
    seq_len: int
    batch: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    lr: float
    warmup: int
    seed: int
    dtype: str

    def __post_init__(self) -> None:
        for name in ("steps", "seq_len", "batch", "dim", "layers", "heads", "kv_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1")

    def check_ranks(self, ranks: int) -> None:
        if self.seq_len % ranks:
            nearest = self.seq_len // ranks * ranks or ranks
            raise ValueError(
                f"--seq-len {self.seq_len} cannot be cut into {ranks} equal parts; use a multiple of {ranks}, as {nearest}"
            )


# Two idle CPU cores: less than three minutes, almost half of them for --compare. Warm-up and learning rate are chosen for
# calm as much as for speed: with lr 6e-3 and warm-up 10 (and no norm of q and k) a rounding in the first weights became
# a difference of 7e-2 in loss by step 40, ring or no ring; like this it stays below 2e-5 in 160 steps, for four seeds.
ON_CPU = Recipe(
    steps=160, seq_len=2048, batch=1, dim=128, layers=2, heads=2, kv_heads=1, lr=3e-3, warmup=30, seed=0, dtype="float32"
)  # fmt: skip
# A GPU: some minutes, 100 million weights. fp32 master weights and optimizer, bf16 arithmetic.
ON_GPU = Recipe(
    steps=300, seq_len=65_536, batch=1, dim=1024, layers=8, heads=16, kv_heads=4, lr=1e-3, warmup=30, seed=0,
    dtype="bfloat16",
)  # fmt: skip


def parse_flags(arguments: list[str] | None = None) -> argparse.Namespace:
    """Flags of the Recipe are None unless given: what they are then depends on the machine or on --resume."""
    parser = argparse.ArgumentParser(
        prog="train_long_context.py",
        description="Train a byte-level language model on Python's own sources, each sequence cut across processes.",
    )
    recipe = parser.add_argument_group("what is trained (defaults: CPU / GPU)")
    for field in fields(Recipe):
        flag, cpu, gpu = f"--{field.name.replace('_', '-')}", getattr(ON_CPU, field.name), getattr(ON_GPU, field.name)
        if field.name == "dtype":
            recipe.add_argument(flag, choices=DTYPES, help=f"of weights in use and activations ({cpu} / {gpu})")
        else:
            meaning = "sequences per step, one after another" if field.name == "batch" else ""
            recipe.add_argument(flag, type=field.type, help=f"{meaning} ({cpu} / {gpu})".strip())

    how = parser.add_argument_group("how it is computed")
    how.add_argument("--device", choices=("cpu", "cuda"), help="default: GPUs if there are any")
    how.add_argument("--layout", choices=LAYOUTS, default="zigzag", help="which positions a rank holds (zigzag)")
    how.add_argument("--backend", help="attention kernels by name; default: ringflash chooses")
    how.add_argument("--activation-checkpointing", action="store_true", help="recompute each block in backward")

    around = parser.add_argument_group("what happens around it")
    around.add_argument("--out", type=Path, help="folder of the run; default: the next free runs/long_context/NNN")
    around.add_argument("--resume", type=Path, help="continue from a run's folder (last checkpoint) or one checkpoint")
    around.add_argument("--checkpoint-every", type=int, default=0, metavar="STEPS", help="beside the one at the end")
    around.add_argument("--validate-every", type=int, metavar="STEPS", help="default: eight times per run")
    around.add_argument("--log-every", type=int, metavar="STEPS", help="lines when output is no terminal (20 per run)")
    around.add_argument(
        "--compare",
        action=argparse.BooleanOptionalAction,
        help="train again in one process and compare losses; default: with more than one process",
    )
    around.add_argument("--compare-steps", type=int, metavar="STEPS", help="at most; default: all on a CPU, 20 on GPUs")
    around.add_argument("--sample-bytes", type=int, default=400, help="of text written by the model at the end (400)")
    around.add_argument("--prompt", default="def ", help="what the sample begins with ('def ')")
    around.add_argument("--temperature", type=float, default=0.7, help="of the sample, 0 takes the likeliest (0.7)")
    return parser.parse_args(arguments)


def resolve_recipe(flags: argparse.Namespace, before: Recipe | None, device: torch.device) -> Recipe:
    """Flags win over what a resumed checkpoint was trained with (before), which wins over the machine's defaults."""
    given = {f.name: getattr(flags, f.name) for f in fields(Recipe) if getattr(flags, f.name) is not None}
    if before is None:
        return replace(ON_GPU if device.type == "cuda" else ON_CPU, **given)
    for name in ("dim", "layers", "heads", "kv_heads"):
        if name in given and given[name] != getattr(before, name):
            raise ValueError(
                f"--{name.replace('_', '-')} {given[name]}: the checkpoint's model has {getattr(before, name)}; "
                "leave the flag out, or start without --resume"
            )
    return replace(before, **given)
