"""attention() as one operator: R72 (torch.compile), R44 in compiled code, modes that watch operators."""

from contextlib import nullcontext
from functools import partial
from itertools import count

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import ringflash as rf
from ringflash import operator, resolved
from ringflash.kernels.table import Cell
from ringflash.parallel import function
from ringflash.training import keep_attention
from tests.rings import in_process, on_workers

OPERATOR = torch.ops.ringflash.attention.default


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch._dynamo.reset()


class Net(nn.Module):
    """Two layers of attention with two heads, in float64."""

    def __init__(self, ring=None, mask=None):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.qkv = nn.ParameterList(
            0.3 * torch.randn(48, 16, generator=generator, dtype=torch.float64) for _ in range(2)
        )
        self.attend = rf.RingAttention(ring=ring, mask=mask)

    def forward(self, x, mask=None):
        for weight in self.qkv:
            q, k, v = nn.functional.linear(x, weight).unflatten(-1, (3, 2, 8)).unbind(2)
            x = x + torch.tanh(self.attend(q, k, v, mask)).flatten(2)
        return x


def drawn(length, seed=0):
    return torch.randn(2, length, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def step(function, parameters, x, *arguments):
    """(result, gradients of x and parameters) of a sum of squares."""
    x = x.clone().requires_grad_()
    y = function(x, *arguments)
    return y.detach(), torch.autograd.grad(y.square().sum(), [x, *parameters])


def assert_same(one, other, tolerance=1e-10):
    torch.testing.assert_close(one[0], other[0], rtol=0, atol=tolerance)
    for a, b in zip(one[1], other[1], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * max(1.0, float(b.abs().max())))


def compiled_and_not(ring, lengths):
    """Graphs after each length, of a network compiled as one graph whose numbers are those of the other."""
    torch._dynamo.reset()
    net = Net(ring, rf.Causal())
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(net, fullgraph=True, backend=counter)
    graphs = []
    for length in lengths:
        x = ring.shard(drawn(length))
        assert_same(step(compiled, net.parameters(), x), step(net, net.parameters(), x))
        graphs.append(counter.frame_count)
    return graphs


@pytest.mark.slow
def test_R72_a_compiled_network_is_one_graph_with_the_same_numbers(workers):
    """Each new length compiles at most once, and from the third on nothing."""
    for graphs in on_workers(workers, 2, rf.Zigzag(), compiled_and_not, [12, 12, 20, 28, 36], timeout_s=150):
        assert graphs == [1, 1, 2, 2, 2]


def exchanges_of_a_step(ring):
    """Of the ranks' comparisons, of a step without and with the operator."""
    counted, real = [], ring.transport.all_gather_object
    ring.transport.all_gather_object = lambda value: counted.append(value) or real(value)
    watched = rf.Ring(transport=ring.transport, check="always")
    q = ring.shard(drawn(12)).unflatten(-1, (2, 8)).requires_grad_()
    found = []
    for mode in (nullcontext(), Watching()):
        counted.clear()
        with mode:
            rf.attention(q, q, q, ring=watched, mask=rf.Causal()).sum().backward()
        found.append(len(counted))
    return found


def test_ranks_compare_a_call_once_with_the_operator_too():
    """Backward finds what forward has compared."""
    assert in_process(2, rf.Zigzag(), exchanges_of_a_step) == [[1, 1], [1, 1]]


def graphs_of(function, calls, parameters=()):
    """Graphs after each call; each is the same as without compilation."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    after = []
    for x, *arguments in calls:
        assert_same(step(compiled, parameters, x, *arguments), step(function, parameters, x, *arguments))
        after.append(counter.frame_count)
    return after


def test_another_packed_batch_compiles_nothing_anew():
    net = Net()
    packings = [rf.Documents(lengths, causal=True) for lengths in ([5, 7], [1, 2, 9], [12])]
    calls = [(drawn(12), mask) for mask in packings]
    calls += [(drawn(12), mask & rf.Window(2, 0)) for mask in packings]
    assert graphs_of(net, calls, list(net.parameters())) == [1, 1, 1, 2, 2, 2]


def test_another_ring_of_the_same_place_compiles_nothing_anew():
    def read(x, ring):
        q = x.unflatten(-1, (2, 8))
        return rf.attention(q, q, q, ring=ring, mask=rf.Causal()) * ring.ranks + ring.rank

    assert graphs_of(read, [(drawn(12), rf.Ring()), (drawn(12), rf.Ring(layout=rf.Striped()))]) == [1, 1]


@pytest.mark.parametrize(
    "make",
    [
        lambda: rf.Full(),
        lambda: rf.Causal() & rf.Window(3, 0),
        lambda: rf.Chunked(5) & rf.Causal(),
        lambda: rf.FirstKeys(2) & rf.Causal() | rf.Window(3, 0),
    ],
    ids=["full", "window", "chunked", "union"],
)
def test_rules_may_be_made_in_compiled_code(make):
    def attend(x):
        q = x.unflatten(-1, (2, 8))
        return rf.attention(q, q, q, mask=make())

    assert graphs_of(attend, [(drawn(12),), (drawn(12, seed=1),)]) == [1, 1]


def test_every_kind_of_mask_says_what_compiled_code_takes_it_for():
    """Each by itself: torch 2.11 knows no subclass of a class that it was told of."""

    def kinds(cls):
        return [cls, *(kind for child in cls.__subclasses__() for kind in kinds(child))]

    ours = [kind for kind in kinds(rf.Mask) + kinds(rf.Union) if kind.__module__.startswith("ringflash.")]
    assert len(ours) >= 13
    assert all("is_constant" in vars(kind) for kind in ours)


def test_what_changes_with_the_batch_is_made_outside():
    def attend(x, mask):
        q = x.unflatten(-1, (2, 8))
        return rf.attention(q, q, q, mask=mask & rf.Window(2, 0))

    mask = rf.Documents([5, 7], causal=True)
    # Torch 2.11 has no graph break for this, and raises where later ones go on in eager code.
    breaks = torch.__version__ >= (2, 12)
    with pytest.raises(torch._dynamo.exc.Unsupported if breaks else torch._dynamo.exc.InternalTorchDynamoError):
        torch.compile(attend, fullgraph=breaks, backend="aot_eager")(drawn(12), mask)
    torch._dynamo.reset()
    if not breaks:
        return
    broken = torch.compile(attend, backend="aot_eager")  # in two graphs, and right
    assert torch.equal(broken(drawn(12), mask), attend(drawn(12), mask))


def test_scores_and_lse_are_differentiated_in_compiled_code():
    sinks = torch.tensor([0.3, -1.0], dtype=torch.float64, requires_grad=True)

    def attend(x, seed):
        q = x.unflatten(-1, (2, 8))
        bent = rf.Score(softcap=2.0, alibi=(0.5, 0.25), sinks=sinks)
        out, lse = rf.attention(q, q, q, mask=rf.Causal(), score=bent, return_lse=True)
        again = rf.attention(out, q, q, score=rf.Score(scale=0.0, dropout=0.3, seed=seed))
        return again.flatten(2) * lse.mean(-1, keepdim=True)

    # A number that changes is a constant at first and a variable from then on.
    assert graphs_of(attend, [(drawn(12), seed) for seed in (5, 6, 7, 8)], [sinks]) == [1, 2, 2, 2]


@pytest.mark.parametrize(
    "score",
    [
        lambda x: rf.Score(scale=x, softcap=3 * x),
        lambda x: rf.Score(alibi=(x, 2 * x)),
        lambda x: rf.Score(dropout=x, seed=3),
    ],
    ids=["scale", "alibi", "dropout"],
)
def test_numbers_of_a_score_may_change(score):
    """As those of the layers of a model do, each of which is compiled."""

    def attend(x, number):
        q = x.unflatten(-1, (2, 8))
        return rf.attention(q, q, q, mask=rf.Causal(), score=score(number))

    assert graphs_of(attend, [(drawn(12), number) for number in (0.5, 0.6, 0.7)])[0] == 1


def test_scale_that_is_zero_is_a_scale_in_compiled_code():
    def average(x):
        q = x.unflatten(-1, (2, 8))
        return rf.attention(q, q, q, scale=0.0)

    x = drawn(12)
    expected = x.unflatten(-1, (2, 8)).mean(1, keepdim=True).expand(-1, 12, -1, -1)
    compiled = torch.compile(average, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(compiled, expected, rtol=0, atol=1e-12)


def test_a_kernel_table_is_asked_in_compiled_code(monkeypatch):
    table = rf.KernelTable("cpu", {Cell("forward", 64, "full", 1024): {"reference": 1.0}}, {})
    q = drawn(12).unflatten(-1, (2, 8))
    asked, real = [], resolved.choose
    monkeypatch.setattr(resolved, "choose", lambda call, backend: asked.append(backend) or real(call, backend))
    for backend in (table, "reference", None):
        compiled = torch.compile(partial(rf.attention, backend=backend), fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(q, q, q), rf.attention(q, q, q, backend=backend))
    assert asked == [table, table, "reference", "reference", None, None]
    with pytest.raises(ValueError, match="backend = 'quick'"):
        torch.compile(partial(rf.attention, backend="quick"), fullgraph=True, backend="aot_eager")(q, q, q)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(2, 12, 2, 4, dtype=torch.float64)}, "attention: q has head dim 8 and k has 4"),
        ({"v": torch.zeros(2, 11, 2, 8, dtype=torch.float64)}, "attention: k has 12 tokens and 2 heads"),
        ({"length": 13}, "attention: length = 13 without a ring"),
        ({"route": "sideways"}, "attention: route = 'sideways'"),
        ({"mask": rf.Documents([5, 8], causal=True)}, "made for 13 tokens"),
    ],
    ids=["head_dim", "tokens", "length", "route", "mask"],
)
def test_errors_of_compiled_code_are_those_of_attention(change, message):
    q = drawn(12).unflatten(-1, (2, 8))
    arguments = {"q": q, "k": q, "v": q} | change
    for attend in (rf.attention, torch.compile(rf.attention, fullgraph=True, backend="aot_eager")):
        with pytest.raises(ValueError, match=message):
            attend(**arguments)


def test_a_torch_without_such_operators_is_told(monkeypatch):
    monkeypatch.setattr(operator, "CAN_TRACE", False)
    q = drawn(12).unflatten(-1, (2, 8))
    assert rf.attention(q, q, q).shape == q.shape
    with Watching(), pytest.raises(NotImplementedError, match="has no operators that take a Ring and a Mask"):
        rf.attention(q, q, q)


class Watching(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, op, types, arguments=(), options=None):
        self.seen.append(op)
        return op(*arguments, **(options or {}))


def test_modes_that_watch_operators_see_one_of_ours():
    q = drawn(12).unflatten(-1, (2, 8)).requires_grad_()
    with Watching() as watching:
        rf.attention(q, q, q).sum().backward()
    assert [op for op in watching.seen if op.namespace == "ringflash"] == [
        OPERATOR,
        torch.ops.ringflash.attention_backward.default,
    ]


@pytest.mark.parametrize("layout", ["plain", "transposed", "last axis slow"])
def test_what_tracers_are_told_of_results_is_what_they_are(layout):
    """Sizes, types and strides, which compiled code relies on."""
    shape = {"plain": (2, 12, 4, 8), "transposed": (2, 4, 12, 8), "last axis slow": (8, 12, 4, 2)}[layout]
    x = torch.randn(shape)
    q = {"plain": x, "transposed": x.transpose(1, 2), "last axis slow": x.permute(3, 1, 2, 0)}[layout]
    k, v = q[:, :, :2], q[:, :, 2:, :5]
    real, told = [], []
    for there, device in ((real, "cpu"), (told, "meta")):
        inputs = [t.detach().to(device).requires_grad_() for t in (q, k, v)]
        if device == "meta":  # nothing runs on it but what tracers are told
            with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
                inputs = [mode.from_tensor(t.detach()).requires_grad_() for t in (q, k, v)]
                out, lse = rf.attention(*inputs, return_lse=True)
                there += [out, lse, *torch.autograd.grad(out.sum() + lse.sum(), inputs)]
        else:
            with Watching():
                out, lse = rf.attention(*inputs, return_lse=True)
                there += [out, lse, *torch.autograd.grad(out.sum() + lse.sum(), inputs)]
    for a, b in zip(real, told, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def of_attention(ctx, op, *arguments, **options):
    return CheckpointPolicy.MUST_SAVE if op == OPERATOR else CheckpointPolicy.PREFER_RECOMPUTE


def of_tanh(ctx, op, *arguments, **options):
    return CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.tanh.default else CheckpointPolicy.PREFER_RECOMPUTE


KEEPING = {
    "keep_attention": keep_attention,
    "keep_attention with a policy": partial(keep_attention, of_tanh),
    "a policy that names the operator": partial(create_selective_checkpoint_contexts, of_attention),
}


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("context_fn", [None, *KEEPING.values()], ids=["none", *KEEPING])
def test_R44_recomputation_forms_no_score_again(is_compiled, context_fn, monkeypatch):
    passes, real = count(), function.forward_pass
    monkeypatch.setattr(function, "forward_pass", lambda *arguments: (next(passes), real(*arguments))[1])
    net = Net(mask=rf.Causal())
    options = {} if context_fn is None else {"context_fn": context_fn}

    def again(x):
        return checkpoint(net, x, use_reentrant=False, **options)

    if is_compiled:
        again = torch.compile(again, fullgraph=True, backend="aot_eager")
    expected = step(net, net.parameters(), drawn(12))
    before = next(passes)
    assert_same(step(again, net.parameters(), drawn(12)), expected)
    assert next(passes) - before - 1 == (4 if context_fn is None else 2)


def test_R44_a_compiled_layer_in_a_checkpoint_that_keeps_attention_forms_no_score_again(monkeypatch):
    passes, real = count(), function.forward_pass
    monkeypatch.setattr(function, "forward_pass", lambda *arguments: (next(passes), real(*arguments))[1])
    net = Net(mask=rf.Causal())
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    expected = step(net, net.parameters(), drawn(12))
    before = next(passes)
    kept = partial(checkpoint, compiled, use_reentrant=False, context_fn=keep_attention)
    assert_same(step(kept, net.parameters(), drawn(12)), expected)
    assert next(passes) - before - 1 == 2


def test_second_derivatives_are_refused_by_the_operator():
    q = drawn(12).unflatten(-1, (2, 8)).requires_grad_()
    with Watching():
        out = rf.attention(q, q, q)
        (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        with pytest.raises((RuntimeError, NotImplementedError)):
            torch.autograd.grad(dq.sum(), q)
