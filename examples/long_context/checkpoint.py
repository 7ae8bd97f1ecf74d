"""Save and resume with torch.distributed.checkpoint: every rank writes its own part, any number of ranks reads them.

What is saved: weights, optimizer, step, recipe. What need not be: the learning rate and the data order, both functions of
the step; and the state of a random generator, since training draws nothing.
"""

from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from long_context.training import Trainer

RECIPE = "recipe.json"


def save(trainer: Trainer, run: Path) -> Path:
    """Write `run`/checkpoints/step_NNNNNN; called by all ranks together."""
    path = run / "checkpoints" / f"step_{trainer.step:06d}"
    model, optimizer = get_state_dict(trainer.model, trainer.optimizer)
    state = {"model": model, "optimizer": optimizer, "step": trainer.step}
    processes = trainer.processes
    dcp.save(state, checkpoint_id=path, process_group=processes.host_group, no_dist=processes.host_group is None)
    if processes.is_first:
        trainer.recipe.save(path / RECIPE)
    return path


def load(trainer: Trainer, path: Path) -> None:
    """Put weights, optimizer and step into a new trainer, whose weights may be cut differently than when saved."""
    model, optimizer = get_state_dict(trainer.model, trainer.optimizer)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    processes = trainer.processes
    dcp.load(state, checkpoint_id=path, process_group=processes.host_group, no_dist=processes.host_group is None)
    set_state_dict(
        trainer.model, trainer.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    trainer.step = state["step"]


def find(path: Path) -> Path:
    """The checkpoint that --resume means: `path` itself, or the last one of the run in folder `path`."""
    if (path / RECIPE).is_file():
        return path
    # The recipe is written last, so a folder without one is a save that was interrupted.
    complete = sorted(recipe.parent for recipe in path.glob(f"checkpoints/step_*/{RECIPE}"))
    if not complete:
        raise FileNotFoundError(f"--resume {path}: neither a checkpoint (with a {RECIPE}) nor a run that holds one")
    return complete[-1]
