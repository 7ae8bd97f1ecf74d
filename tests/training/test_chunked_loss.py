"""Cross entropy from hidden states: the numbers of plain torch, and never more than a chunk of logits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from ringflash.testing.compare import assert_all_close, relative_error
from ringflash.training import linear_cross_entropy
from tests.memory import peak_bytes


def drawn(T, H, V, *, with_bias=False, ignored=0.25, dtype=torch.float64, seed=0):
    """hidden [T, H], weight [V, H], bias and labels, some of them ignored."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    labels = torch.randint(V, (T,), generator=generator)
    labels[torch.rand(T, generator=generator) < ignored] = -100
    return {"hidden": normal(T, H), "weight": normal(V, H), "bias": normal(V) if with_bias else None}, labels


def plain(hidden, weight, labels, bias):
    logits = functional.linear(hidden, weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return functional.cross_entropy(logits, labels, reduction="none")


def results(losses, inputs):
    """Losses and gradients, each token with another weight."""
    weights = torch.linspace(-1.0, 2.0, losses.numel(), dtype=losses.dtype)
    needed = {f"d{name}": x for name, x in inputs.items() if x is not None}
    return {
        "losses": losses.detach(),
        **dict(zip(needed, torch.autograd.grad(losses, list(needed.values()), weights), strict=True)),
    }


@settings(max_examples=60, deadline=None)
@given(
    T=st.integers(0, 20),
    H=st.integers(1, 6),
    V=st.integers(1, 9),
    chunk_tokens=st.integers(1, 25),
    with_bias=st.booleans(),
    ignored=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_losses_and_gradients_are_those_of_plain_torch(T, H, V, chunk_tokens, with_bias, ignored):
    inputs, labels = drawn(T, H, V, with_bias=with_bias, ignored=ignored)
    losses = linear_cross_entropy(**inputs, labels=labels, chunk_tokens=chunk_tokens)
    assert_all_close(results(losses, inputs), results(plain(**inputs, labels=labels), inputs), torch.float64)


def test_sixteen_bits_err_at_most_twice_as_much_as_plain_torch():
    inputs, labels = drawn(300, 32, 257, with_bias=True, dtype=torch.bfloat16)
    exact = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    oracle = results(plain(**exact, labels=labels), exact)
    ours = results(linear_cross_entropy(**inputs, labels=labels, chunk_tokens=7), inputs)
    theirs = results(plain(**inputs, labels=labels), inputs)
    for name, expected in oracle.items():
        assert ours[name].dtype == (torch.float32 if name == "losses" else torch.bfloat16)
        assert relative_error(ours[name], expected) <= 2 * relative_error(theirs[name], expected), name


def test_sums_over_many_chunks_do_not_stop_growing_in_bfloat16():
    """1,024 chunks of one token each add the same to the weight's gradient; a sum in bf16 would stop at 256 of them."""
    hidden, weight = torch.ones(1024, 1, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.bfloat16).requires_grad_()
    losses = linear_cross_entropy(hidden, weight, torch.zeros(1024, dtype=torch.int64), chunk_tokens=1)
    losses.sum().backward()
    assert weight.grad.flatten().tolist() == [-512.0, 512.0]


@pytest.mark.parametrize("size", [1e4, -1e4])
def test_large_logits_do_not_overflow(size):
    weight = torch.tensor([[size], [0.0]])
    losses = linear_cross_entropy(torch.ones(2, 1), weight, torch.tensor([0, 1]))
    assert losses.tolist() == ([0.0, 1e4] if size > 0 else [1e4, 0.0])


def test_shapes_follow_labels_and_labels_may_be_short_integers():
    inputs, labels = drawn(12, 3, 5)
    losses = linear_cross_entropy(inputs["hidden"].view(2, 6, 3), inputs["weight"], labels.view(2, 6).int())
    assert losses.shape == (2, 6)
    assert not losses._is_view(), "FSDP2 warns where a module returns a view"
    assert linear_cross_entropy(inputs["hidden"][0], inputs["weight"], torch.tensor(2)).shape == ()


def test_another_label_can_be_ignored():
    inputs, labels = drawn(12, 3, 5, ignored=0.0)
    losses = linear_cross_entropy(**inputs, labels=labels, ignore_index=2)
    expected = plain(**inputs, labels=labels).masked_fill(labels == 2, 0.0)
    assert_all_close({"losses": losses}, {"losses": expected}, torch.float64)


def test_nan_in_ignored_tokens_reaches_nothing():
    inputs, labels = drawn(12, 3, 5, ignored=0.0, with_bias=True)
    labels[[2, 7]] = -100
    expected = torch.autograd.grad(plain(**inputs, labels=labels).sum(), list(inputs.values()))
    spoiled = inputs["hidden"].detach().clone()
    spoiled[[2, 7]] = float("nan")
    inputs["hidden"] = spoiled.requires_grad_()
    losses = linear_cross_entropy(**inputs, labels=labels, chunk_tokens=5)
    gradients = torch.autograd.grad(losses.sum(), list(inputs.values()))
    assert_all_close(dict(zip(inputs, gradients, strict=True)), dict(zip(inputs, expected, strict=True)), torch.float64)


def test_frozen_weights_get_no_gradient_and_hidden_still_does():
    inputs, labels = drawn(12, 3, 5, with_bias=True)
    inputs["weight"].requires_grad_(False)
    expected = torch.autograd.grad(plain(**inputs, labels=labels).sum(), inputs["hidden"])[0]
    linear_cross_entropy(**inputs, labels=labels, chunk_tokens=5).sum().backward()
    assert inputs["weight"].grad is None
    assert_all_close({"dhidden": inputs["hidden"].grad}, {"dhidden": expected}, torch.float64)


def test_autocast_casts_as_it_casts_a_linear_layer():
    inputs, labels = drawn(12, 3, 5, with_bias=True, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = linear_cross_entropy(**inputs, labels=labels, chunk_tokens=5)
        expected = plain(**inputs, labels=labels)
    gradients = results(losses, inputs)
    assert [x.dtype for x in gradients.values()] == [torch.float32] * 4
    for name, x in results(expected, inputs).items():
        assert relative_error(gradients[name], x) < 1e-2, name


def test_numerical_derivatives_agree():
    inputs, labels = drawn(5, 3, 4, with_bias=True)
    assert torch.autograd.gradcheck(
        lambda *x: linear_cross_entropy(x[0], x[1], labels, bias=x[2], chunk_tokens=2), tuple(inputs.values())
    )


def test_gradients_cannot_be_differentiated_again():
    inputs, labels = drawn(5, 3, 4)
    losses = linear_cross_entropy(**inputs, labels=labels)
    (dhidden,) = torch.autograd.grad(losses.sum(), inputs["hidden"], create_graph=True)
    with pytest.raises(NotImplementedError, match="linear_cross_entropy: its gradients cannot be differentiated again"):
        dhidden.square().sum().backward()


def test_evaluation_keeps_nothing():
    inputs, labels = drawn(5, 3, 4)
    with torch.no_grad():
        assert linear_cross_entropy(**inputs, labels=labels).grad_fn is None


T, H, V, CHUNK = 512, 8, 4096, 32


def peak_of(losses_of, dtype):
    """Peak of losses and their gradients beyond one chunk of logits in fp32, in such chunks."""
    inputs, labels = drawn(T, H, V, dtype=dtype)
    inputs.pop("bias")
    _, peak = peak_bytes(lambda: losses_of(**inputs, labels=labels).sum().backward())
    return peak / (CHUNK * V * 4)


def by_chunks_of_autograd(hidden, weight, labels):
    return torch.cat(
        [plain(h, weight, own, None) for h, own in zip(hidden.split(CHUNK), labels.split(CHUNK), strict=True)]
    )


def by_chunks_of_ours(hidden, weight, labels):
    return linear_cross_entropy(hidden, weight, labels, chunk_tokens=CHUNK)


@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 1.0), (torch.bfloat16, 1.5)], ids=str)
def test_at_most_one_chunk_of_logits_is_held(dtype, share):
    """The docstring's formula: 4 or 6 bytes a logit, the gradients of weight and hidden, and what sums them."""
    gradients = (V + T) * H * dtype.itemsize + (6 * V * H if dtype == torch.bfloat16 else 0)
    assert share <= peak_of(by_chunks_of_ours, dtype) <= 1.05 * (share + gradients / (CHUNK * V * 4))


def test_a_frozen_weight_takes_no_memory_for_its_gradient():
    inputs, labels = drawn(CHUNK, 256, V, dtype=torch.float32)
    inputs["weight"].requires_grad_(False)
    _, peak = peak_bytes(lambda: linear_cross_entropy(**inputs, labels=labels).sum().backward())
    # Logits, a copy of hidden, whose ignored tokens are zeros, and hidden's gradient.
    assert peak <= 1.05 * 4 * CHUNK * (V + 2 * 256)


def test_the_probe_sees_the_chunks_that_ordinary_autograd_keeps():
    assert peak_of(by_chunks_of_autograd, torch.float32) > T / CHUNK


HIDDEN, WEIGHT, LABELS = torch.ones(2, 3), torch.ones(5, 3), torch.tensor([0, 4])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: linear_cross_entropy(None, WEIGHT, LABELS), TypeError, "hidden is NoneType; must be a floating"),
        (lambda: linear_cross_entropy(HIDDEN.long(), WEIGHT, LABELS), TypeError, "hidden is torch.int64"),
        (
            lambda: linear_cross_entropy(HIDDEN, WEIGHT.double(), LABELS),
            TypeError,
            "weight is torch.float64 on cpu; must be as",
        ),
        (
            lambda: linear_cross_entropy(HIDDEN, WEIGHT, LABELS, bias=1.0),
            TypeError,
            "bias is float; must be a floating",
        ),
        (
            lambda: linear_cross_entropy(HIDDEN, WEIGHT, LABELS.float()),
            TypeError,
            "labels is a tensor of torch.float32",
        ),
        (
            lambda: linear_cross_entropy(HIDDEN, WEIGHT, LABELS[:1]),
            ValueError,
            r"hidden \(2, 3\) does not fit labels \(1,\)",
        ),
        (
            lambda: linear_cross_entropy(HIDDEN, WEIGHT.T, LABELS),
            ValueError,
            r"weight has shape \(3, 5\); must be \[V, 3\]",
        ),
        (lambda: linear_cross_entropy(HIDDEN, WEIGHT[:0], LABELS), ValueError, r"weight has shape \(0, 3\)"),
        (
            lambda: linear_cross_entropy(HIDDEN, WEIGHT, LABELS, bias=torch.ones(4)),
            ValueError,
            r"bias has shape \(4,\); must be \[5\]",
        ),
        (
            lambda: linear_cross_entropy(HIDDEN, WEIGHT, LABELS, chunk_tokens=0),
            ValueError,
            "chunk_tokens = 0; must be >= 1",
        ),
        (
            lambda: linear_cross_entropy(HIDDEN, WEIGHT, LABELS, ignore_index=None),
            TypeError,
            "ignore_index is NoneType",
        ),
        (
            lambda: linear_cross_entropy(HIDDEN, WEIGHT, LABELS + 1),
            ValueError,
            r"labels range from 1 to 5; must be in \[0, 5\)",
        ),
        (lambda: linear_cross_entropy(HIDDEN, WEIGHT, LABELS - 1), ValueError, "labels range from -1 to 3"),
        (
            lambda: linear_cross_entropy(HIDDEN, WEIGHT, LABELS.to("meta")),
            ValueError,
            "labels is on meta; must be where hidden is, on cpu",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call, error, message):
    with pytest.raises(error, match=f"linear_cross_entropy: {message}"):
        call()
