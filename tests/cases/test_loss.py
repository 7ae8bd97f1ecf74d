"""Cases about losses: one denominator for the whole batch, one report, no logits, sums over sequences."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import ringflash as rf
from ringflash.testing.compare import assert_all_close, assert_close
from ringflash.training import count_tokens, linear_cross_entropy, sequence_sums, shift_labels, token_loss
from tests.memory import peak_bytes
from tests.rings import LAYOUTS, in_process, name_of, on_workers
from tests.toy import Transformer, loss_sum, tokens_of, torch_attention

layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)


def logits_of_losses(layout):
    """Whole logits [1, 16, 2] and labels: 7 tokens of loss 1 on rank 0 of 2, one of loss 9 on rank 1."""
    logits, labels = torch.zeros(1, 16, 2), torch.full((1, 16), -100)
    for rank, (valid, loss) in enumerate([(7, 1.0), (1, 9.0)]):
        positions = layout.positions(16, rank, 2)[:valid]
        labels[0, positions] = 0
        logits[0, positions, 1] = math.log(math.expm1(loss))  # log(1 + exp(x)) = loss
    return logits, labels


def unequal_labels(ring, averaged_over):
    logits, labels = logits_of_losses(ring.layout)
    local = ring.shard(logits).requires_grad_()
    tokens = count_tokens(ring.shard(labels), ring, averaged_over=averaged_over)
    loss = token_loss(local, ring.shard(labels), tokens)
    loss.backward()
    return int(tokens.count), float(tokens.true_loss(loss)), ring.gather(local.grad) / averaged_over


@layouts
@pytest.mark.parametrize("averaged_over", [1, 2])
def test_R38_the_loss_is_the_mean_over_the_tokens_of_all_ranks(workers, layout, averaged_over):
    logits, labels = logits_of_losses(layout)
    logits.requires_grad_()
    expected = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    expected.backward()
    assert float(expected.detach()) == pytest.approx(2.0)
    for count, loss, gradient in on_workers(workers, 2, layout, unequal_labels, averaged_over):
        assert count == 8
        assert loss == pytest.approx(2.0, rel=1e-6)
        assert_close(gradient * 8, logits.grad * 8, torch.float32)


class WithLoss(nn.Module):
    """The toy model, which returns the loss of each token instead of logits: as it has to be under FSDP2."""

    def __init__(self, layers):
        super().__init__()
        self.model = Transformer(layers).double()
        self.head, self.model.head = self.model.head, nn.Identity()

    def forward(self, tokens, labels, positions, attend):
        hidden = self.model(tokens, positions, attend)
        return linear_cross_entropy(hidden, self.head.weight, labels, bias=self.head.bias, chunk_tokens=7)


def micro_batches(copy):
    """Tokens and labels of both micro batches of one data-parallel copy; 100 and 10 labels count over both copies."""
    valid = [(60, 7), (40, 3)][copy]
    batches = []
    for place, count in enumerate(valid):
        tokens = (tokens_of(1, 64) * (2 + copy) + place) % 11
        labels = shift_labels(tokens)
        labels[:, count:] = -100
        batches.append((tokens, labels))
    return batches


def plain(model, everyone):
    return model, 1


def ddp(model, everyone):
    return DistributedDataParallel(model, process_group=everyone.get_group()), everyone.size()


def fsdp(model, everyone):
    return fully_shard(model, mesh=everyone), everyone.size()


def gradients_by(recipe, model, everyone):
    """name -> whole gradient of each parameter, reduced as the recipe says."""
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.full_tensor() if recipe is fsdp else parameter.grad
        if recipe is plain:
            dist.all_reduce(gradient, group=everyone.get_group())
        gradients[name.removeprefix("module.").removeprefix("model.")] = gradient
    return gradients


def accumulate(recipe, layout):
    """In a worker: gradients and reported loss after two micro batches, on 2 copies of a ring of 2 of the last four."""
    mesh = DeviceMesh("cpu", last_four().reshape(2, 2), mesh_dim_names=("dp", "cp"))
    everyone = mesh._flatten("dp_cp")
    if mesh.get_coordinate() is None:
        return None
    ring = rf.Ring(mesh["cp"], layout=layout)
    batches = micro_batches(mesh.get_local_rank("dp"))
    model, averaged_over = recipe(WithLoss(1), everyone)
    tokens = count_tokens([ring.shard(labels) for _, labels in batches], mesh, averaged_over=averaged_over)

    def attend(q, k, v):
        return rf.attention(q, k, v, ring=ring, mask=rf.Causal())

    losses = []
    for whole, labels in batches:
        loss = tokens.local_loss(model(ring.shard(whole), ring.shard(labels), ring.positions(64), attend))
        loss.backward()
        losses.append(loss.detach())
    return int(tokens.count), float(tokens.true_loss(torch.stack(losses))), gradients_by(recipe, model, everyone)


def sharded_weight(ring):
    model = fully_shard(nn.Linear(4, 6, bias=False), mesh=DeviceMesh.from_group(ring.transport.group, "cpu"))
    try:
        linear_cross_entropy(torch.ones(2, 4), model.weight, torch.tensor([0, 1]))
    except TypeError as error:
        return str(error)


def test_a_shard_of_the_weight_is_not_taken_for_the_weight(workers):
    for error in on_workers(workers, 2, rf.Zigzag(), sharded_weight):
        assert "weight is a DTensor, a shard of the whole; under FSDP2 make this call inside the forward" in error


def last_four():
    return torch.arange(dist.get_world_size())[-4:]


@pytest.mark.parametrize("recipe", [plain, ddp, fsdp])
def test_R41_accumulated_gradients_are_those_of_one_big_batch(workers, recipe):
    model = Transformer(1).double()
    batches = [batch for copy in (0, 1) for batch in micro_batches(copy)]
    tokens, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    seen = torch.ones(64, 64).tril().bool()
    loss = loss_sum(model(tokens, torch.arange(64), torch_attention(seen)), labels) / 110
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    for count, reported, gradients in workers.run(accumulate, recipe, rf.Zigzag())[-4:]:
        assert count == 110
        assert reported == pytest.approx(float(loss.detach()), rel=1e-10)
        assert set(gradients) == set(expected)
        assert_all_close(gradients, expected, torch.float64)


def reported_losses(ring, tokens, labels):
    """What training and evaluation report on the same data."""
    model = Transformer(2)
    S = tokens.shape[1]
    local = ring.shard(labels)

    def attend(q, k, v):
        return rf.attention(q, k, v, ring=ring, mask=rf.Causal(), length=S)

    counted = count_tokens(local, ring, averaged_over=ring.ranks)
    trained = token_loss(model(ring.shard(tokens), ring.positions(S), attend), local, counted)
    trained.backward()
    model.eval()
    with torch.no_grad():
        evaluated = token_loss(model(ring.shard(tokens), ring.positions(S), attend), local, counted)
    return [float(counted.true_loss(loss)) for loss in (trained, evaluated)]


def test_R42_every_ring_reports_the_same_loss_in_training_and_evaluation(workers):
    tokens = tokens_of(2, 21)
    labels = shift_labels(tokens)
    labels[1, 4:] = -100
    logits = Transformer(2)(tokens, torch.arange(21), torch_attention(torch.ones(21, 21).tril().bool()))
    expected = float(loss_sum(logits, labels).detach() / (labels != -100).sum())
    reports = [reported_losses(rf.Ring(), tokens, labels)]
    for ranks in (2, 4):
        reports += on_workers(workers, ranks, rf.Zigzag(), reported_losses, tokens, labels)
    assert reports == [pytest.approx([expected] * 2, rel=1e-5)] * 7
    assert reports[1] == reports[2], "ranks of one ring report different bits"
    assert reports[3:] == [reports[3]] * 4


LENGTH, VOCABULARY, WIDTH, CHUNK = 8192, 50_000, 8, 64


def output_layer():
    """Whole hidden states [1, S, H], the weight [V, H] and labels."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, LENGTH, WIDTH, generator=generator)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator)
    return hidden, weight, torch.randint(VOCABULARY, (1, LENGTH), generator=generator)


def loss_without_logits(ring):
    hidden, weight, labels = output_layer()
    hidden, weight, labels = ring.shard(hidden).requires_grad_(), weight.requires_grad_(), ring.shard(labels)
    tokens = count_tokens(labels, ring, averaged_over=1)

    def work():
        loss = tokens.local_loss(linear_cross_entropy(hidden, weight, labels, chunk_tokens=CHUNK))
        loss.backward()
        return loss

    loss, peak = peak_bytes(work)
    dist.all_reduce(weight.grad, group=ring.transport.group)
    return float(tokens.true_loss(loss)), peak, ring.gather(hidden.grad), weight.grad


@pytest.mark.slow
def test_R60_the_loss_never_holds_more_than_a_chunk_of_logits(workers):
    hidden, weight, labels = output_layer()
    hidden.requires_grad_()
    weight.requires_grad_()
    loss = 0.0
    for rows in torch.arange(LENGTH).split(64):  # the sum of the plain version's parts, for it holds 5 GB whole
        part = functional.cross_entropy(hidden[0, rows] @ weight.T, labels[0, rows], reduction="sum") / LENGTH
        part.backward()
        loss += float(part.detach())
    chunk, gradients = CHUNK * VOCABULARY * 4, 4 * WIDTH * (VOCABULARY + LENGTH // 2)
    for reported, peak, dhidden, dweight in on_workers(workers, 2, rf.Zigzag(), loss_without_logits):
        assert chunk < peak < 1.05 * (chunk + gradients)
        assert reported == pytest.approx(loss, rel=1e-5)
        for gradient, expected in ((dhidden, hidden.grad), (dweight, weight.grad)):
            scale = 1 / expected.abs().max()
            assert_close(gradient * scale, expected * scale, torch.float32)


DOCUMENTS = rf.Documents([4, 9, 3], causal=True)
RESPONSES = [2, 3, 7, 8, 9, 14]  # zigzag on 2 ranks: those of the middle document are all on rank 1, none on rank 0


def responses():
    """Whole hidden states [1, 16, 3], the weight [5, 3], and labels of response tokens only."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.full((1, 16), -100)
    labels[0, RESPONSES] = torch.tensor([0, 1, 2, 3, 4, 0])
    hidden, weight = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in [(1, 16, 3), (5, 3)])
    return hidden, weight, labels


def preference_loss(sums):
    """The middle document is preferred to both others."""
    return -functional.logsigmoid(0.5 * (sums[:, 1:2] - sums[:, ::2])).mean()


def preferences(ring):
    hidden, weight, labels = responses()
    hidden, weight = ring.shard(hidden).requires_grad_(), weight.requires_grad_()
    sums = sequence_sums(-linear_cross_entropy(hidden, weight, ring.shard(labels), chunk_tokens=3), DOCUMENTS, ring)
    loss = preference_loss(sums)
    loss.backward()
    everyone = ring.transport.all_gather(weight.grad, [weight.shape] * ring.ranks)
    return {
        "sums": sums.detach(),
        "loss": loss.detach(),
        "dhidden": ring.gather(hidden.grad),
        "dweight": sum(everyone),
    }


def expected_preferences():
    hidden, weight, labels = responses()
    hidden.requires_grad_()
    weight.requires_grad_()
    log_probs = (hidden @ weight.T).log_softmax(-1)
    rows = [[2, 3], [7, 8, 9], [14]]
    sums = torch.stack([sum(log_probs[0, row, labels[0, row]] for row in own) for own in rows])[None]
    loss = preference_loss(sums)
    loss.backward()
    return {"sums": sums.detach(), "loss": loss.detach(), "dhidden": hidden.grad, "dweight": weight.grad}


@layouts
@pytest.mark.parametrize("ranks", [2, 4])
def test_R69_sums_over_sequences_have_the_values_and_gradients_of_one_process(workers, ranks, layout):
    for results in on_workers(workers, ranks, layout, preferences):
        assert_all_close(results, expected_preferences(), torch.float64)


def test_R69_a_rank_without_response_tokens_of_a_sample_adds_nothing():
    def local_part(ring):
        values = torch.zeros(1, 16)
        values[0, RESPONSES] = 1.0
        mine = ring.shard(values)
        whole = sequence_sums(mine, DOCUMENTS, ring)
        alone = [float(mine[0, (ring.positions(16) >= 4) & (ring.positions(16) < 13)].sum())]
        return whole[0].tolist(), alone

    assert in_process(2, rf.Zigzag(), local_part) == [([2.0, 3.0, 1.0], [0.0]), ([2.0, 3.0, 1.0], [3.0])]
