"""Section D of the cases: gradients of parameters under the ways people reduce them, over real processes."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ringflash as rf
from ringflash.testing.compare import assert_all_close, assert_close
from ringflash.testing.sharded import draw
from ringflash.training import count_tokens, position_ids, shard_batch, shift_labels, token_loss
from tests.rings import LAYOUTS, in_process, name_of, on_workers, probe
from tests.toy import Transformer, loss_sum, tokens_of, torch_attention

layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)


class ScaledValues(nn.Module):
    """Attention with one weight w = 1 on the values."""

    def __init__(self, ring):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))
        self.ring = ring

    def forward(self, q, k, v):
        return rf.attention(q, k, v * self.w, ring=self.ring, mask=rf.Causal())


def local_sum(model, ring):
    inputs = probe(8, dtype=torch.float32)
    return model(*(ring.shard(inputs[name]) for name in ("q", "k", "v"))).sum()


def plain(ring, copies, group, mesh):
    """Losses over the global count, gradients added up by hand."""
    model = ScaledValues(ring)
    (local_sum(model, ring) / (8 * copies)).backward()
    unreduced = float(model.w.grad)
    dist.all_reduce(model.w.grad, group=group)
    return unreduced, float(model.w.grad)


def ddp(ring, copies, group, mesh):
    """DDP averages, so the loss is multiplied by the ranks it averages over."""
    model = DistributedDataParallel(ScaledValues(ring), process_group=group)
    (local_sum(model, ring) * dist.get_world_size(group) / (8 * copies)).backward()
    return None, float(model.module.w.grad)


def fsdp(ring, copies, group, mesh):
    """So does FSDP2."""
    model = fully_shard(ScaledValues(ring), mesh=mesh)
    (local_sum(model, ring) * mesh.size() / (8 * copies)).backward()
    return None, float(model.w.grad.full_tensor())


RECIPES = {"plain": plain, "ddp": ddp, "fsdp": fsdp}


def gradient_on_grid(recipe, copies, layout):
    """In a worker: w.grad on a grid of `copies` data-parallel copies of a ring of 2, of the last workers."""
    first = dist.get_world_size() - 2 * copies
    grid = torch.arange(first, first + 2 * copies).reshape(copies, 2)
    mesh = DeviceMesh("cpu", grid, mesh_dim_names=("dp", "cp"))
    flat = mesh._flatten("dp_cp") if copies > 1 else mesh["cp"]
    if mesh.get_coordinate() is None:
        return None
    return RECIPES[recipe](rf.Ring(mesh["cp"], layout=layout), copies, flat.get_group(), flat)


@layouts
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("recipe", RECIPES)
def test_R40_the_gradient_has_one_scale_however_it_is_reduced(workers, recipe, copies, layout):
    """The recipe: local loss = local sum * (ranks that an average runs over) / global count."""
    results = workers.run(gradient_on_grid, recipe, copies, layout)[-2 * copies :]
    assert [reduced for _, reduced in results] == [pytest.approx(1.75)] * (2 * copies)
    if recipe == "plain":
        assert sum(unreduced for unreduced, _ in results) == pytest.approx(1.75)
    if recipe == "plain" and copies == 1 and layout == rf.Contiguous():
        assert [unreduced for unreduced, _ in results] == pytest.approx([0.85089, 0.89911], abs=1e-5)


def gradients_of(model):
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def gradients_alone(layers, tokens, positions, seen, labels):
    """Of one process without anything of ours."""
    model = Transformer(layers)
    loss = loss_sum(model(tokens, positions, torch_attention(seen)), labels) / (labels != -100).sum()
    loss.backward()
    return float(loss.detach()), gradients_of(model)


def gradients_under_ddp(ring, layers, tokens, mask):
    model = Transformer(layers)
    wrapped = DistributedDataParallel(model, process_group=ring.transport.group, find_unused_parameters=False)
    labels = shift_labels(tokens)
    logits = wrapped(ring.shard(tokens), ring.positions(tokens.shape[1]), ring_attention(ring, mask, tokens.shape[1]))
    loss = loss_sum(logits, ring.shard(labels)) / (labels != -100).sum()
    (loss * ring.ranks).backward()
    total = loss.detach().clone()
    dist.all_reduce(total, group=ring.transport.group)
    return float(total), gradients_of(model)


def ring_attention(ring, mask, length):
    return lambda q, k, v: rf.attention(q, k, v, ring=ring, mask=mask, length=length)


@layouts
def test_R48_every_parameter_gets_the_gradient_of_one_process(workers, layout):
    tokens = tokens_of(2, 13)
    expected_loss, expected = gradients_alone(
        3, tokens, torch.arange(13), torch.ones(13, 13).tril().bool(), shift_labels(tokens)
    )
    for loss, gradients in on_workers(workers, 2, layout, gradients_under_ddp, 3, tokens, rf.Causal()):
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert [name for name, gradient in gradients.items() if gradient is None] == []
        for name, gradient in gradients.items():
            # By parameter: some gradients are small, and all must be right.
            scale = 1 / expected[name].abs().max()
            assert_close(gradient * scale, expected[name] * scale, torch.float32, name)


def rotary_logits(ring, tokens, mask, positions):
    model = Transformer(2)
    S = tokens.shape[1]
    local = ring.positions(S) if positions is None else ring.shard(positions, 0)
    logits = model(ring.shard(tokens), local, ring_attention(ring, mask, S))
    return ring.gather(logits, length=S).detach(), ring.positions(S).tolist()


@pytest.mark.parametrize("layout", [rf.Contiguous(), rf.Zigzag()], ids=name_of)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("lengths", [[16], [5, 11]], ids=["one_document", "packed"])
def test_R62_rotary_embeddings_stand_at_global_positions(workers, lengths, ranks, layout):
    tokens = tokens_of(1, 16)
    whole = position_ids(lengths)
    document = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])
    seen = torch.ones(16, 16).tril().bool() & (document[:, None] == document[None, :])
    expected = Transformer(2)(tokens, whole, torch_attention(seen)).detach()
    mask = rf.Documents(lengths, causal=True)
    given = None if lengths == [16] else whole
    for logits, positions in on_workers(workers, ranks, layout, rotary_logits, tokens, mask, given):
        assert (logits - expected).abs().max() < 1e-4
        if ranks == 2 and layout == rf.Zigzag():
            assert positions in ([0, 1, 2, 3, 12, 13, 14, 15], list(range(4, 12)))


def test_R62_positions_counted_from_the_start_of_a_shard_would_show(workers):
    """The test above can fail: rotary embeddings at local positions are far off."""
    tokens = tokens_of(1, 16)
    expected = Transformer(2)(tokens, torch.arange(16), torch_attention(torch.ones(16, 16).tril().bool()))
    local = torch.arange(16) % 8  # contiguous shards of 8 that all count from 0
    for logits, _ in on_workers(workers, 2, rf.Contiguous(), rotary_logits, tokens, rf.Causal(), local):
        assert (logits - expected).abs().max() > 1e-2


def steps_of_training(ring, steps):
    """Parameters after some steps of SGD with plain reduction, and those of one process beside it."""
    ours = Transformer(1)
    alone = copy.deepcopy(ours)
    seen = torch.ones(16, 16).tril().bool()
    for step in range(steps):
        tokens = (tokens_of(2, 16) + step) % 11
        labels = shift_labels(tokens)
        for model, positions, attend, cut in (
            (ours, ring.positions(16), ring_attention(ring, rf.Causal(), 16), ring.shard),
            (alone, torch.arange(16), torch_attention(seen), lambda x: x),
        ):
            loss = loss_sum(model(cut(tokens), positions, attend), cut(labels)) / (labels != -100).sum()
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                if model is ours:
                    dist.all_reduce(gradient, group=ring.transport.group)
                parameter.data -= 0.1 * gradient
    return dict(ours.state_dict()), dict(alone.state_dict())


def test_R70_three_steps_of_a_plain_loop_end_at_the_same_parameters(workers):
    for ours, alone in on_workers(workers, 2, rf.Zigzag(), steps_of_training, 3):
        assert_all_close(ours, alone, torch.float32)


LARGEST_NORM, RATE = 1.0, 0.5


def clipped_step(model, loss):
    """The norm of the gradients before clipping, and the parameters after one step of SGD."""
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)
    torch.optim.SGD(model.parameters(), lr=RATE).step()
    whole = {name.removeprefix("module."): whole_tensor(x) for name, x in model.state_dict().items()}
    return float(whole_tensor(norm)), whole


def whole_tensor(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def ddp_replicated(model, mesh, flat):
    return DistributedDataParallel(model, process_group=flat.get_group())


def hsdp_replicated(model, mesh, flat):
    return fully_shard(model, mesh=mesh)


def fsdp_sharded(model, mesh, flat):
    return fully_shard(model, mesh=flat)


def clipped_step_on_grid(wrap):
    """In a worker: the step on a grid of 2 data-parallel copies of a ring of 2, of the last workers."""
    first = dist.get_world_size() - 4
    mesh = DeviceMesh("cpu", torch.arange(first, first + 4).reshape(2, 2), mesh_dim_names=("dp", "cp"))
    flat = mesh._flatten("dp_cp")
    if mesh.get_coordinate() is None:
        return None
    ring = rf.Ring(mesh["cp"])
    row = mesh.get_local_rank("dp")
    tokens = tokens_of(2, 14)[row : row + 1]
    labels = ring.shard(shift_labels(tokens))
    counted = count_tokens(labels, mesh, averaged_over=4)
    model = wrap(steep_transformer(), mesh, flat)
    logits = model(ring.shard(tokens), ring.positions(14), ring_attention(ring, rf.Causal(), 14))
    return clipped_step(model, token_loss(logits, labels, counted))


def steep_transformer():
    """Gradients of a norm above LARGEST_NORM, or clipping would do nothing; fp64, to tell a wrong norm from rounding."""
    model = Transformer(2).double()
    with torch.no_grad():
        model.head.weight *= 20
    return model


@pytest.mark.parametrize("wrap", [ddp_replicated, hsdp_replicated, fsdp_sharded])
def test_R43_torchs_own_clipping_finds_the_norm_of_one_process(workers, wrap):
    tokens = tokens_of(2, 14)
    labels = shift_labels(tokens)
    model = steep_transformer()
    logits = model(tokens, torch.arange(14), torch_attention(torch.ones(14, 14).tril().bool()))
    expected_norm, expected = clipped_step(model, loss_sum(logits, labels) / (labels != -100).sum())
    assert expected_norm > 2 * LARGEST_NORM
    for norm, parameters in workers.run(clipped_step_on_grid, wrap)[-4:]:
        assert norm == pytest.approx(expected_norm, rel=1e-10)
        assert_all_close(parameters, expected, torch.float64)


DIMS = {"input_ids": 1, "labels": 1, "position_ids": 2, "attention_mask": -1, "pixel_values": None}


def batch_of(B, S):
    """What a processor for text and images gives: every entry names its own place."""

    def numbered(*shape):
        return torch.arange(torch.Size(shape).numel()).reshape(shape)

    return {
        "input_ids": numbered(B, S),
        "labels": -numbered(B, S),
        "position_ids": numbered(3, B, S),
        "attention_mask": numbered(B, 1, 1, S) % 2 == 0,
        "pixel_values": numbered(B, 3, S, S),
    }


def cut_batch(ring, B, S):
    return shard_batch(batch_of(B, S), ring, DIMS), ring.positions(S)


@layouts
@pytest.mark.parametrize(("B", "S"), [(2, 12), (3, 12), (3, 3), (2, 3), (1, 7)])
def test_R63_every_tensor_is_cut_along_its_declared_axis(workers, B, S, layout):
    whole = batch_of(B, S)
    for local, mine in on_workers(workers, 2, layout, cut_batch, B, S):
        assert list(local) == list(whole)
        assert torch.equal(local["input_ids"], whole["input_ids"][:, mine])
        assert torch.equal(local["labels"], whole["labels"][:, mine])
        assert torch.equal(local["position_ids"], whole["position_ids"][:, :, mine])
        assert torch.equal(local["attention_mask"], whole["attention_mask"][:, :, :, mine])
        assert torch.equal(local["pixel_values"], whole["pixel_values"])


def dropped(ring, seed, recomputed):
    """out and dq, dk, dv of attention with dropout, gathered; forward run again in backward if `recomputed`."""
    inputs = draw(queries=13, heads=(4, 2), dim=8)
    q, k, v = (ring.shard(inputs[name]).clone().requires_grad_() for name in ("q", "k", "v"))
    score = rf.Score(dropout=0.1, seed=seed)

    def attend(q, k, v):
        return rf.attention(q, k, v, ring=ring, mask=rf.Causal(), score=score, length=13)

    state = torch.get_rng_state()
    out = checkpoint(attend, q, k, v, use_reentrant=False) if recomputed else attend(q, k, v)
    grads = torch.autograd.grad(out, (q, k, v), ring.shard(inputs["dout"]))
    assert torch.equal(state, torch.get_rng_state())
    return {name: ring.gather(x.detach(), length=13) for name, x in zip("oqkv", (out, *grads), strict=True)}


@layouts
@pytest.mark.parametrize("recomputed", [False, True])
def test_R47_dropout_is_the_same_for_every_number_of_ranks_and_in_recomputation(recomputed, layout):
    """And it moves no generator; another seed drops others."""
    expected = in_process(1, layout, dropped, 5, False)[0]
    assert (expected["o"] - in_process(1, layout, dropped, 6, False)[0]["o"]).abs().max() > 0.01
    for ranks in (1, 2, 4):
        for results in in_process(ranks, layout, dropped, 5, recomputed):
            for name, x in expected.items():
                assert_close(results[name], x, torch.float64, name)
