"""Save and resume with torch.distributed.checkpoint: every rank writes its own part, any number of ranks reads them.

What is saved: weights, optimizer, step, recipe. What need not be: the learning rate and the data order, both functions of
the step; and the state of a random generator, since training draws nothing.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from long_context.settings import Recipe
from long_context.training import Trainer

ABOUT = "about.json"


def save(trainer: Trainer, run: Path) -> Path:
    """Write `run`/checkpoints/step_NNNNNN; called by all ranks together."""
    path = run / "checkpoints" / f"step_{trainer.step:06d}"
    model, optimizer = get_state_dict(trainer.model, trainer.optimizer)
    state = {"model": model, "optimizer": optimizer, "step": trainer.step}
    processes = trainer.processes
    dcp.save(state, checkpoint_id=path, process_group=processes.host_group, no_dist=processes.host_group is None)
    if processes.is_first:
        about = {"step": trainer.step, "recipe": asdict(trainer.recipe)}
        (path / ABOUT).write_text(json.dumps(about, indent=2) + "\n")
    return path


def load(trainer: Trainer, path: Path) -> None:
    """Put weights, optimizer and step into a new trainer, whose weights may be cut differently than when saved."""
    model, optimizer = get_state_dict(trainer.model, trainer.optimizer)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
    processes = trainer.processes
    dcp.load(state, checkpoint_id=path, process_group=processes.host_group, no_dist=processes.host_group is None)
    set_state_dict(
        trainer.model, trainer.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    trainer.step = state["step"]


def find(path: Path) -> Path:
    """The checkpoint that --resume means: `path` itself, or the last one of the run in folder `path`."""
    if (path / ABOUT).is_file():
        return path
    # This file is written last, so a folder without it is a save that was interrupted.
    complete = sorted(about.parent for about in path.glob(f"checkpoints/step_*/{ABOUT}"))
    if not complete:
        raise FileNotFoundError(
            f"--resume {path}: neither a checkpoint (with {ABOUT} in it) nor the folder of a run with one"
        )
    return complete[-1]


def about(path: Path) -> tuple[Recipe, int]:
    """What the checkpoint was trained with, and how many steps, without loading it."""
    contents = json.loads((path / ABOUT).read_text())
    return Recipe(**contents["recipe"]), contents["step"]
