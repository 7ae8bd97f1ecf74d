"""R44: activation checkpointing that keeps what attention gave, so that its recomputation sends nothing."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ringflash as rf
from ringflash.training import keep_attention
from tests.rings import in_process, note_messages, on_workers, sent_bytes

LAYERS = 4


class Layer(nn.Module):
    """Attention of two heads with a norm, a projection and a residual around it; every weight in float64."""

    def __init__(self, ring, mask):
        super().__init__()
        self.ring, self.mask = ring, mask
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.double()

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 8)).unbind(2)
        return x + self.out(torch.tanh(rf.attention(q, k, v, ring=self.ring, mask=self.mask)).flatten(2))


def trained(ring, keeps):
    """(loss, gradients of x and all weights, bytes sent forward, bytes sent backward); keeps: None is no checkpoint."""
    generator = torch.Generator().manual_seed(0)  # the global one is shared by ranks that are threads
    layers = nn.ModuleList(Layer(ring, rf.Causal()) for _ in range(LAYERS))
    for parameter in layers.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    x = ring.shard(torch.randn(2, 12, 16, generator=generator, dtype=torch.float64)).requires_grad_()
    events = []
    note_messages(ring.transport, events)
    y = x
    for i, layer in enumerate(layers):
        options = {"context_fn": keep_attention} if keeps else {}
        is_plain = keeps is None or i % 2 == 0
        y = layer(y) if is_plain else checkpoint(layer, y, use_reentrant=False, **options)
    forward = sent_bytes(events)
    loss = y.square().sum()
    loss.backward()
    gradients = [x.grad, *(p.grad for p in layers.parameters())]
    return loss.detach(), gradients, forward, sent_bytes(events) - forward


def compared(ring):
    """(whether no bit differs from the run without checkpoints, bytes sent backward with none, with it, and plainly)."""
    runs = {keeps: trained(ring, keeps) for keeps in (None, True, False)}
    one, other = runs[None], runs[True]
    is_same = torch.equal(one[0], other[0]) and all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))
    return is_same, [runs[keeps][3] for keeps in (None, True, False)], one[2]


def test_recomputation_sends_nothing_and_changes_no_bit():
    for is_same, (without, keeping, plain), forward in in_process(3, rf.Zigzag(), compared):
        assert is_same
        assert keeping == without
        assert plain == without + forward // 2, "half of the layers are recomputed, with their hops"


def test_real_processes_keep_as_well(workers):
    for is_same, (without, keeping, _), _ in on_workers(workers, 2, rf.Zigzag(), compared):
        assert is_same and keeping == without


def test_a_second_backward_takes_the_same_results_again():
    layer = Layer(rf.Ring(), rf.Causal())
    x = torch.randn(1, 6, 16, dtype=torch.float64).requires_grad_()
    y = checkpoint(layer, x, use_reentrant=False, context_fn=keep_attention).sum()
    first, second = (torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_nothing_is_kept_outside_of_a_checkpoint_and_checkpoints_do_not_mix():
    calls = []

    class Counting(rf.RingAttention):
        def forward(self, *tensors):
            calls.append(torch.is_grad_enabled())
            return super().forward(*tensors)

    attend = Counting(mask=rf.Causal())
    x = torch.randn(1, 5, 2, 8, dtype=torch.float64).requires_grad_()
    outs = [
        checkpoint(lambda t: attend(t, t, t).sin(), x * s, use_reentrant=False, context_fn=keep_attention)
        for s in (1, 2)
    ]
    plain = [attend(t, t, t).sin() for t in (x * 1, x * 2)]
    for a, b in zip(outs, plain, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(*(torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for y in (a, b)))
    assert len(calls) == 6


def exchanges(ring, is_kept, how):
    """How often this rank sends in backward, and the gradient, of one attention in checkpoints within checkpoints."""
    generator = torch.Generator().manual_seed(1)
    x = ring.shard(torch.randn(1, 12, 2, 4, generator=generator, dtype=torch.float64)).requires_grad_()
    options = {"use_reentrant": False, "context_fn": keep_attention}

    def attend(t):
        return rf.attention(t, t, t, ring=ring, mask=rf.Causal()).sin()

    def around(t):
        return checkpoint(attend, t, **options).sin()

    def with_evaluation(t):
        with torch.inference_mode():
            total = attend(t.detach()).sum().item()
        return attend(t) * total

    layer = {"nested": around, "evaluation": with_evaluation, "alone": attend}[how]
    y = checkpoint(layer, x, **options) if is_kept else layer(x)
    events = []
    note_messages(ring.transport, events)
    y.sum().backward()
    return x.grad, len(events)


@pytest.mark.parametrize("how", ["alone", "nested", "evaluation"])
def test_checkpoints_within_checkpoints_and_evaluation_send_nothing_either(how):
    one = in_process(3, rf.Zigzag(), exchanges, False, how)
    other = in_process(3, rf.Zigzag(), exchanges, True, how)
    for (plain, sent), (kept, sent_again) in zip(one, other, strict=True):
        assert torch.equal(plain, kept) and sent == sent_again


def test_a_backward_inside_the_first_run_does_not_end_it():
    def inner(u):
        return rf.attention(u.sin(), u, u).sin()

    def layer(x):
        t = x.detach().requires_grad_()
        (g,) = torch.autograd.grad(checkpoint(inner, t, use_reentrant=False).sum(), t)
        return (inner(x) * g).sin()

    x = torch.randn(1, 6, 2, 4, dtype=torch.float64, requires_grad=True)
    gradients = [
        torch.autograd.grad(checkpoint(layer, x, use_reentrant=False, **options).sum(), x)[0]
        for options in ({}, {"context_fn": keep_attention})
    ]
    assert torch.equal(*gradients)


def compared_always(ring):
    calls = []
    gather = ring.transport.all_gather_object
    ring.transport.all_gather_object = lambda value: calls.append(value) or gather(value)
    ring = rf.Ring(layout=ring.layout, transport=ring.transport, check="always")
    x = torch.randn(1, 4, 2, 4, dtype=torch.float64).requires_grad_()
    y = checkpoint(lambda t: rf.attention(t, t, t, ring=ring), x, use_reentrant=False, context_fn=keep_attention)
    before = len(calls)
    y.sum().backward()
    return before, len(calls)


def test_recomputed_calls_are_not_compared_among_the_ranks_again():
    assert in_process(2, rf.Zigzag(), compared_always) == [(1, 1)] * 2


def test_a_result_changed_in_place_is_an_error():
    def layer(x):
        out = rf.attention(x, x, x)
        kept = out.sin()
        with torch.no_grad():
            out.mul_(2.0)
        return kept

    x = torch.randn(1, 5, 2, 8, dtype=torch.float64).requires_grad_()
    y = checkpoint(layer, x, use_reentrant=False, context_fn=keep_attention)
    with pytest.raises(RuntimeError, match="keep_attention: a result of attention was changed in place"):
        y.sum().backward()


@pytest.mark.parametrize("later", [1, 3], ids=["other_shape", "more_calls"])
def test_recomputation_that_calls_otherwise_is_an_error(later):
    lengths = iter([[6], [5] if later == 1 else [6, 6]])

    def layer(x):
        for n in next(lengths):
            x = x + nn.functional.pad(rf.attention(x[:, :n], x[:, :n], x[:, :n]).sin(), (0, 0, 0, 0, 0, 6 - n))
        return x

    x = torch.randn(1, 6, 2, 8, dtype=torch.float64).requires_grad_()
    y = (
        checkpoint(layer, x, use_reentrant=False, context_fn=keep_attention, early_stop=False)
        if later == 3
        else checkpoint(layer, x, use_reentrant=False, context_fn=keep_attention)
    )
    with pytest.raises(RuntimeError, match="keep_attention: (in recomputation q has shape|recomputation makes call 2)"):
        y.sum().backward()
