"""docs/parallelism.md: its code, beside one process that holds everything. R43, R53 and R70 in their CPU forms."""

import random
import re
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ringflash.testing.compare import assert_all_close

PAGE = Path(__file__).resolve().parents[2] / "docs" / "parallelism.md"
LENGTH, BATCH, STEPS = 22, 2, 3


def page(layers=4):
    """The names that the page's code defines."""
    names = {"__name__": "docs.parallelism"}
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S))
    exec(compile(code.replace("LAYERS = 64, 32, 4, 4", f"LAYERS = 64, 32, 4, {layers}"), str(PAGE), "exec"), names)
    return names


def batches(copies, steps=STEPS):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(64, (copies * BATCH, LENGTH + 1), generator=generator) for _ in range(steps)]


@pytest.fixture(scope="module")
def workers(own_workers):
    return own_workers(4)


def steep(model):
    """Gradients of a norm above 1, or clipping would do nothing."""
    with torch.no_grad():
        model.head.weight *= 8
    return model


def whole(x):
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def parameters_of(model):
    return {name.removeprefix("module."): whole(x) for name, x in model.named_parameters()}


def alone(copies, layers=4, steps=STEPS):
    """(losses, norms, parameters) of one process."""
    names = page(layers)
    torch.manual_seed(0)
    model = steep(names["GPT"](LENGTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses, norms = [], []
    for ids in batches(copies, steps):
        logits = model(ids[:, :-1], torch.arange(LENGTH), None)
        loss = names["token_losses"](logits, ids[:, 1:]).mean()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, norms, parameters_of(model)


def hsdp(names, mesh):
    flat, model = mesh["dp", "cp"]._flatten("dp_cp"), names["GPT"](LENGTH)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp", "cp"])
    fully_shard(model, mesh=mesh["dp", "cp"])
    return model, flat


def ddp(names, mesh):
    flat = mesh["dp", "cp"]._flatten("dp_cp")
    model = DistributedDataParallel(names["GPT"](LENGTH), process_group=flat.get_group())
    return model, flat


def fsdp_with_kept_attention(names, mesh):
    names["Block"] = names["CheckpointedBlock"]
    return names["fsdp"](mesh, LENGTH)


def fsdp_compiled(names, mesh):
    """Each block as one graph, before FSDP wraps it."""
    model, flat = names["GPT"](LENGTH), mesh["dp", "cp"]._flatten("dp_cp")
    for block in model.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
        fully_shard(block, mesh=flat)
    fully_shard(model, mesh=flat)
    return model, flat


RECIPES = {
    "fsdp": ((2, 2, 1), lambda names, mesh: names["fsdp"](mesh, LENGTH)),
    "fsdp with kept attention": ((2, 2, 1), fsdp_with_kept_attention),
    "fsdp compiled": ((2, 2, 1), fsdp_compiled),
    "hsdp": ((2, 2, 1), hsdp),
    "ddp": ((2, 2, 1), ddp),
    "tensor parallel": ((1, 2, 2), lambda names, mesh: names["tensor_parallel"](mesh, LENGTH)),
}


def trained(recipe, layers, steps, longest_delay_s):
    """(losses, norms, parameters) of a rank; delays come before each layer."""
    shape, make = RECIPES[recipe]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp", "tp"))
    names = page(layers)
    if longest_delay_s:
        randomly, forward = random.Random(dist.get_rank()), names["Block"].forward

        def late(self, x, ring):
            time.sleep(randomly.uniform(0, longest_delay_s))
            return forward(self, x, ring)

        names["Block"].forward = late
    torch.manual_seed(0)
    real = names["GPT"]
    names["GPT"] = lambda length: steep(real(length))
    model, flat = make(names, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses, norms = [], []
    for ids in batches(shape[0], steps):
        copy = mesh.get_local_rank("dp")
        mine = ids[copy * BATCH : (copy + 1) * BATCH]
        loss, norm = names["step"](model, optimizer, mine, mesh, flat)
        losses.append(float(loss))
        norms.append(float(norm))
    return losses, norms, parameters_of(model)


def check(results, expected, ranks=4):
    assert len(results) == ranks
    for losses, norms, parameters in results:
        assert losses == pytest.approx(expected[0], rel=1e-5)
        assert norms == pytest.approx(expected[1], rel=1e-4)
        assert_all_close(parameters, expected[2], torch.float32)
    assert min(expected[1]) > 1.0  # or clipping did nothing


@pytest.mark.parametrize("recipe", RECIPES)
def test_R70_each_recipe_trains_as_one_process_does(workers, recipe):
    (copies, _, _), _ = RECIPES[recipe]
    check(workers.run(trained, recipe, 4, STEPS, 0.0), alone(copies))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fsdp", "tensor parallel"])
def test_R53_layers_that_are_late_by_chance_change_nothing(workers, recipe):
    """8 layers, delays up to 20 ms before each on each rank by itself."""
    (copies, _, _), _ = RECIPES[recipe]
    check(workers.run(trained, recipe, 8, 5, 0.02, timeout_s=120), alone(copies, layers=8, steps=5))


def piped():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "cp"))
    names = page()
    torch.manual_seed(0)
    (ids,) = batches(1, 1)
    stage, loss = names["pipeline_step"](mesh, names["GPT"](LENGTH), ids, torch.device("cpu"))
    return mesh.get_local_rank("pp"), float(loss), {name: p.grad.clone() for name, p in stage.named_parameters()}


def test_a_pipeline_of_two_stages_has_the_gradients_of_one_process(workers):
    names = page()
    torch.manual_seed(0)
    model, (ids,) = names["GPT"](LENGTH), batches(1, 1)
    loss = names["token_losses"](model(ids[:, :-1], torch.arange(LENGTH), None), ids[:, 1:]).mean()
    loss.backward()
    stages = [names["Stage"](model, first, first + 2, None) for first in (0, 2)]
    results = workers.run(piped)
    assert sorted(at for at, _, _ in results) == [0, 0, 1, 1]
    for at, found, gradients in results:
        if at == 1:
            assert found == pytest.approx(float(loss.detach()), rel=1e-5)
        expected = {name: p.grad for name, p in stages[at].named_parameters()}
        assert_all_close(gradients, expected, torch.float32)
