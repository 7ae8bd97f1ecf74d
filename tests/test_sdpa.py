"""scaled_dot_product_attention: torch's function is the oracle, in float64."""

import pytest
import torch
from torch.nn import functional

import ringflash as rf
from tests.rings import in_process


def drawn(query=(2, 4, 9, 8), key=(2, 2, 9, 8), value=(2, 2, 9, 5)):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in (query, key, value)
    ]


def with_gradients(attend, tensors, **options):
    out = attend(*tensors, **options)
    return [out, *torch.autograd.grad(out.square().sum(), tensors)]


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        ({}, {"enable_gqa": True}),
        ({}, {"enable_gqa": True, "is_causal": True, "scale": 0.3}),
        ({"key": (2, 4, 7, 8), "value": (2, 4, 7, 5)}, {}),
        ({"query": (4, 9, 8), "key": (4, 9, 8), "value": (4, 9, 5)}, {"is_causal": True}),
        ({"key": (2, 2, 0, 8), "value": (2, 2, 0, 5), "query": (2, 4, 0, 8)}, {"enable_gqa": True}),
        ({"query": (3, 2, 4, 9, 8), "key": (3, 2, 4, 9, 8), "value": (3, 2, 4, 9, 5)}, {"scale": 0.0}),
    ],
    ids=["gqa", "causal", "cross", "no_batch", "no_tokens", "two_batches"],
)
def test_it_is_torchs_function(shapes, options):
    tensors = drawn(**shapes)
    ours = with_gradients(rf.scaled_dot_product_attention, tensors, **options)
    theirs = with_gradients(functional.scaled_dot_product_attention, tensors, **options)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def attended(ring, tensors, options):
    local = [ring.shard(x.detach(), dim=2).requires_grad_() for x in tensors]
    out = rf.scaled_dot_product_attention(*local, ring=ring, length=9, enable_gqa=True, **options)
    grads = torch.autograd.grad(out.square().sum(), local)
    return [ring.gather(x, dim=2, length=9) for x in (out, *grads)]


@pytest.mark.parametrize("options", [{"is_causal": True}, {"mask": rf.Window(3, 0)}], ids=["causal", "window"])
def test_on_a_ring_it_is_torchs_function_of_the_whole(options):
    tensors = drawn()
    rows, columns = torch.arange(9)[:, None], torch.arange(9)
    seen = (columns <= rows) & (columns >= rows - 3) if "mask" in options else columns <= rows
    theirs = with_gradients(functional.scaled_dot_product_attention, tensors, attn_mask=seen, enable_gqa=True)
    for results in in_process(3, rf.Zigzag(), attended, tensors, options):
        for a, b in zip(results, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_dropout_is_that_of_a_score():
    tensors = drawn()
    out = rf.scaled_dot_product_attention(*tensors, dropout_p=0.4, seed=7, enable_gqa=True)
    expected = rf.attention(*(x.transpose(1, 2) for x in tensors), score=rf.Score(dropout=0.4, seed=7))
    assert torch.equal(out, expected.transpose(1, 2))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"attn_mask": torch.ones(9, 9)},
            NotImplementedError,
            "attn_mask is Tensor; must be None. Say the rule as mask=",
        ),
        ({"is_causal": True, "mask": rf.Causal()}, ValueError, "is_causal = True and mask = Causal"),
        ({"is_causal": 1}, TypeError, "is_causal is int; must be True or False"),
        ({"dropout_p": 0.1}, ValueError, "dropout_p = 0.1 and seed = None"),
        ({"seed": 3}, ValueError, "dropout_p = 0.0 and seed = 3"),
        ({"enable_gqa": False}, ValueError, "query has 4 heads and key has 2; must be equal, or enable_gqa=True"),
    ],
)
def test_contradictions_are_named(change, error, message):
    with pytest.raises(error, match=message):
        rf.scaled_dot_product_attention(*drawn(), **({"enable_gqa": True} | change))


def test_shapes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="is_causal = True with 9 queries and 7 keys; must be as many"):
        rf.scaled_dot_product_attention(*drawn(key=(2, 4, 7, 8), value=(2, 4, 7, 5)), is_causal=True)
    with pytest.raises(ValueError, match=r"key has shape \(3, 4, 9, 8\), query \(2, 4, 9, 8\)"):
        rf.scaled_dot_product_attention(*drawn(key=(3, 4, 9, 8)))
