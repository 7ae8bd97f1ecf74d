"""attention() on one device and what it promises to every caller: forms of arguments, strides, gradients, memory."""

import subprocess
import sys
from functools import partial
from itertools import product

import pytest
import torch
from torch.autograd import forward_ad

import ringflash as rf
from ringflash import resolved
from ringflash.testing.compare import assert_all_close, assert_close
from ringflash.testing.oracle import dense_attention, dense_gradients
from ringflash.testing.sharded import attend_sharded, draw
from tests.rings import LAYOUTS, attend_in_process, dense, in_process, masks, name_of

PROBLEM = {"queries": 24, "heads": (4, 2), "dim": 8}


def local_inputs(**changes):
    inputs = draw(**(PROBLEM | changes))
    return [inputs[name].requires_grad_() for name in ("q", "k", "v")]


@pytest.mark.parametrize("name", masks(24))
def test_one_device_equals_dense_attention(name):
    mask = masks(24)[name]
    assert_all_close(attend_sharded(None, **draw(**PROBLEM), mask=mask), dense(PROBLEM, mask=mask), torch.float64)


def test_lse_is_returned_only_if_asked_for():
    q, k, v = local_inputs(dtype=torch.bfloat16)
    out = rf.attention(q, k, v)
    assert isinstance(out, torch.Tensor) and out.shape == (1, 24, 4, 8) and out.dtype == torch.bfloat16
    same, lse = rf.attention(q, k, v, return_lse=True)
    assert torch.equal(out, same)
    assert lse.shape == (1, 24, 4) and lse.dtype == torch.float32


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("scale", [0.0, 0.05, 1.0, -0.3, 2])
@pytest.mark.parametrize("mask", [rf.Causal(), rf.Documents([7, 17], causal=False)], ids=name_of)
def test_any_scale_is_used_forward_and_backward(mask, scale, ranks):
    """R10: 0.0 is a value and gives the plain average."""
    problem = PROBLEM | {"dim": 64, "dtype": torch.float32}
    (results, *_) = attend_in_process(ranks, rf.Zigzag(), problem, {"mask": mask, "scale": scale})
    assert_all_close(results, dense(problem, mask=mask, scale=scale), torch.float32)
    (same, *_) = attend_in_process(ranks, rf.Zigzag(), problem, {"mask": mask, "score": rf.Score(scale=scale)})
    assert all(torch.equal(same[name], results[name]) for name in results)


def test_scale_zero_averages():
    """R10, by hand."""
    q, k, v = local_inputs()
    out = rf.attention(q, k, v, mask=rf.Causal(), scale=0.0)
    means = v.detach().cumsum(1) / torch.arange(1, 25)[None, :, None, None]
    assert_close(out, means.repeat_interleave(2, dim=2), torch.float64)


def test_no_scale_is_one_over_the_root_of_head_dim():
    q, k, v = local_inputs()
    assert torch.equal(rf.attention(q, k, v), rf.attention(q, k, v, scale=8**-0.5))
    assert torch.equal(rf.attention(q, k, v), rf.attention(q, k, v, score=rf.Score()))


def test_every_form_of_arguments_has_its_gradients():
    """R45: each optional argument left out, None or given; what is no tensor gets no gradient, and nothing miscounts."""
    forms = {
        "ring": [None, rf.Ring()],
        "mask": [None, rf.Causal()],
        "scale": [None, 0.5],
        "length": [None, 24],
        "return_lse": [True, False],
    }
    more = [{"backend": None}, {"backend": "reference"}, {"deterministic": None}, {"deterministic": True}]
    for options in [{}, *more, *(dict(zip(forms, values, strict=True)) for values in product(*forms.values()))]:
        inputs = local_inputs()
        result = rf.attention(*inputs, **options)
        out = result[0] if isinstance(result, tuple) else result
        out.square().sum().backward()
        assert all(x.grad is not None and x.grad.shape == x.shape for x in inputs), options
        by_name = rf.attention(**dict(zip("qkv", inputs, strict=True)), **options)
        assert torch.equal(by_name[0] if isinstance(by_name, tuple) else by_name, out)


@pytest.mark.parametrize("wanted", [w for w in product([True, False], repeat=3) if any(w)], ids=name_of)
def test_frozen_inputs_get_no_gradient_and_the_others_get_theirs(wanted):
    inputs = draw(**PROBLEM)
    tensors = [inputs[name].requires_grad_(needed) for name, needed in zip(("q", "k", "v"), wanted, strict=True)]
    rf.attention(*tensors, mask=rf.Causal()).backward(inputs["dout"])
    expected = dense_gradients(**(inputs | {"dlse": None}), mask=rf.Causal())
    for x, name, needed in zip(tensors, ("dq", "dk", "dv"), wanted, strict=True):
        if needed:
            assert_close(x.grad, expected[name], torch.float64, name)
        else:
            assert x.grad is None


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_which_inputs_are_frozen_may_differ_from_rank_to_rank(layout):
    """Gradients of a key travel past ranks that do not want their own."""
    inputs = draw(**PROBLEM)
    wanted = [{"q"}, {"k", "v"}, {"v"}, {"q", "k", "v"}]
    expected = dense_gradients(**(inputs | {"dlse": None}), mask=rf.Causal())

    def step(ring):
        local = {name: ring.shard(inputs[name]).requires_grad_(name in wanted[ring.rank]) for name in ("q", "k", "v")}
        rf.attention(**local, ring=ring, mask=rf.Causal()).backward(ring.shard(inputs["dout"]))
        return {f"d{name}": x.grad for name, x in local.items()}

    for rank, gradients in enumerate(in_process(4, layout, step)):
        positions = layout.positions(24, rank, 4)
        for name, gradient in gradients.items():
            if name[1] in wanted[rank]:
                assert_close(gradient, expected[name][:, positions], torch.float64, name)
            else:
                assert gradient is None


def test_without_gradients_nothing_is_kept():
    """R61, its smaller half."""
    q, k, v = local_inputs()
    with torch.no_grad():
        out = rf.attention(q, k, v)
    assert not out.requires_grad and out.grad_fn is None
    assert torch.equal(out, rf.attention(q, k, v).detach())


@pytest.mark.parametrize("head", [torch.square, torch.clone], ids=["curved", "linear"])
def test_a_second_derivative_is_an_error_never_a_wrong_number(head):
    """R46: also where the first gradient does not depend on the output, as under a plain sum."""
    q, k, v = local_inputs()
    loss = head(rf.attention(q, k, v)).sum()
    dq, dk = torch.autograd.grad(loss, (q, k), create_graph=True)
    with pytest.raises(NotImplementedError, match="attention: its gradients cannot be differentiated again"):
        torch.autograd.grad(dq.square().sum(), v, retain_graph=True)
    with pytest.raises(NotImplementedError, match="attention: its gradients cannot be differentiated again"):
        (loss + dk.square().sum()).backward()


def test_creating_a_graph_does_not_change_the_first_derivative():
    q, k, v = local_inputs()
    loss = rf.attention(q, k, v).square().sum()
    with_graph = torch.autograd.grad(loss, (q, k, v), create_graph=True)
    assert all(map(torch.equal, with_graph, torch.autograd.grad(loss, (q, k, v))))


TRANSFORMS = {
    "vmap": lambda f, q, k, v: torch.func.vmap(f)(q[None], k[None], v[None]),
    "grad": lambda f, q, k, v: torch.func.grad(lambda x: f(x, k, v).sum())(q),
    "vjp": lambda f, q, k, v: torch.func.vjp(f, q, k, v),
    "jvp": lambda f, q, k, v: torch.func.jvp(partial(f, k=k, v=v), (q,), (q,)),
    "jacrev": lambda f, q, k, v: torch.func.jacrev(f)(q, k, v),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_function_transforms_are_refused_by_name(name):
    """R46."""
    q, k, v = (x.detach() for x in local_inputs())
    with pytest.raises(NotImplementedError, match="attention: called inside a torch.func transform"):
        TRANSFORMS[name](rf.attention, q, k, v)


def test_forward_mode_derivatives_are_errors():
    """R46."""
    q, k, v = (x.detach() for x in local_inputs())
    with (
        forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match="attention: q carries a forward-mode tangent"),
    ):
        rf.attention(forward_ad.make_dual(q, q), k, v)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast_does_not_round_what_is_inside(dtype):
    """Types are what the inputs have; the reference's fp32 products stay fp32."""
    inputs = draw(queries=64, heads=(2, 2), dim=16, dtype=dtype)

    def results():
        tensors = [inputs[name].clone().requires_grad_() for name in ("q", "k", "v")]
        out, lse = rf.attention(*tensors, mask=rf.Causal(), return_lse=True)
        return [out, lse, *torch.autograd.grad(out, tensors, inputs["dout"])]

    plain = results()
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, results(), plain))


def as_stored(kind, x):
    """The values of x [B, S, H, D] in other memory."""
    if kind == "fused":
        B, S, H, D = x.shape
        return torch.cat([x, x + 1, x - 1], dim=2).reshape(B, S, 3 * H * D).chunk(3, dim=-1)[0].reshape(B, S, H, D)
    if kind == "heads_first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "dim_slowest":
        return x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    assert kind == "every_second_token"
    return x.repeat_interleave(2, dim=1)[:, ::2]


@pytest.mark.parametrize("kind", ["fused", "heads_first", "dim_slowest", "every_second_token"])
@pytest.mark.parametrize("which", ["qkv", "v", "q"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_strides_do_not_change_a_bit(ranks, which, kind):
    """R23, R24: in forward and backward, and inputs are not modified."""
    inputs = draw(queries=16, heads=(2, 2), dim=64, dtype=torch.float32)
    stored = {name: as_stored(kind, x) if name in which else x for name, x in inputs.items()}

    def step(member_inputs, ring):
        local = [ring.shard(member_inputs[name]) if ranks > 1 else member_inputs[name] for name in ("q", "k", "v")]
        if member_inputs is stored:
            local = [as_stored(kind, x) if name in which else x for name, x in zip("qkv", local, strict=True)]
        local = [x.detach().requires_grad_() for x in local]
        before = [x.detach().clone() for x in local]
        out, lse = rf.attention(*local, ring=ring, mask=rf.Causal(), return_lse=True)
        # A gradient with its own strides: what a transposed consumer sends back.
        dout = as_stored("dim_slowest", ring.shard(inputs["dout"]))
        gradients = torch.autograd.grad(out, local, dout)
        assert all(torch.equal(x, old) for x, old in zip(local, before, strict=True))
        return [out, lse, *gradients]

    plain = in_process(ranks, rf.Zigzag(), partial(step, inputs))
    strided = in_process(ranks, rf.Zigzag(), partial(step, stored))
    for mine, expected in zip(strided, plain, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(mine, expected, strict=True))


def test_gradients_reach_the_fused_projection():
    """R23: q, k, v are chunks of one tensor."""
    base = torch.randn(2, 12, 3 * 4 * 8, dtype=torch.float64).requires_grad_()
    twin = base.detach().clone().requires_grad_()
    q, k, v = (x.unflatten(-1, (4, 8)) for x in base.chunk(3, dim=-1))
    rf.attention(q, k, v, mask=rf.Causal()).square().sum().backward()
    out, _ = dense_attention(*(x.unflatten(-1, (4, 8)) for x in twin.chunk(3, dim=-1)), rf.Causal())
    out.square().sum().backward()
    assert_close(base.grad, twin.grad, torch.float64)


@pytest.mark.parametrize(
    ("enabled", "asked", "expected"), [(False, None, False), (True, None, True), (True, False, False)]
)
def test_determinism_follows_torch_unless_named(monkeypatch, enabled, asked, expected):
    calls = []
    choose = resolved.choose
    monkeypatch.setattr(resolved, "choose", lambda call, name: calls.append(call) or choose(call, name))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: enabled)
    rf.attention(*local_inputs(), deterministic=asked)
    assert {call.deterministic for call in calls} == {expected}


LONG = """
import torch, ringflash as rf

torch.set_num_threads(1)

def peak_mib():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) // 1024

def attend(tokens):
    q, k, v = (torch.randn(1, tokens, 1, 16, requires_grad=True) for _ in range(3))
    rf.attention(q, k, v, mask=rf.Window(512, 0)).sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))

attend(1024)
before = peak_mib()
attend(65536)
print(peak_mib() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak from /proc")
def test_64k_tokens_fit_in_memory():
    """Inputs, gradients and fp32 sums are 4 MiB each; one matrix of 64k x 64k would be 4096 MiB even in bool."""
    done = subprocess.run([sys.executable, "-c", LONG], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 128


def test_calls_of_equal_settings_are_told_apart_by_what_equality_does_not_see():
    """Sinks are not compared, and 1 equals True: a call resolved before must not serve another."""
    q, k, v = local_inputs()
    plain = rf.attention(q, k, v, score=rf.Score(softcap=2.0))
    for sinks in (torch.zeros(q.shape[2], dtype=q.dtype), torch.ones(q.shape[2], dtype=q.dtype)):
        sunk = rf.attention(q, k, v, score=rf.Score(softcap=2.0, sinks=sinks), return_lse=True)
        once = rf.attention(q, k, v, score=rf.Score(softcap=2.0), return_lse=True)
        expected = torch.logaddexp(once[1], sinks)
        assert torch.allclose(sunk[1], expected)
        assert torch.allclose(sunk[0], plain * torch.exp(once[1] - expected)[..., None])
    length = torch.tensor(k.shape[1])
    rf.attention(q, k, v, length=length)
    rf.attention(q, k, v, length=length.numpy())
    length += 1
    with pytest.raises(ValueError, match="length = "):
        rf.attention(q, k, v, length=length)
    rf.attention(q, k, v, deterministic=True)
    with pytest.raises(TypeError, match="deterministic is int; must be True, False or None"):
        rf.attention(q, k, v, deterministic=1)
    with pytest.raises(TypeError, match="mask is list; must be a Mask"):
        rf.attention(q, k, v, mask=[[True]])
    with pytest.raises(TypeError, match="ring is str; must be a Ring or None"):
        rf.attention(q, k, v, ring="ring")
