"""RingAttention: attention() with its settings kept."""

import pytest
import torch

import ringflash as rf
from ringflash.testing.sharded import draw
from tests.rings import in_process

SETTINGS = {
    "mask": rf.Causal(),
    "scale": 0.3,
    "score": rf.Score(0.7),
    "backend": "reference",
    "deterministic": True,
}


def inputs(**changes):
    drawn = draw(queries=12, heads=(4, 2), **changes)
    return [drawn[name].requires_grad_() for name in ("q", "k", "v")]


@pytest.mark.parametrize("name", SETTINGS)
def test_each_setting_is_passed_on(name):
    setting = {name: SETTINGS[name]}
    assert torch.equal(rf.RingAttention(**setting)(*inputs()), rf.attention(*inputs(), **setting))
    assert name in ("backend", "deterministic") or not torch.equal(
        rf.RingAttention(**setting)(*inputs()), rf.attention(*inputs())
    )


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"backend": "nobody"}, ValueError, "backend = 'nobody'"),
        ({"scale": 0.0, "score": rf.Score()}, ValueError, r"RingAttention: scale = 0.0 and score = .*; give one"),
        ({"ring": "world"}, TypeError, "RingAttention: ring is str; must be a Ring or None"),
        ({"mask": "causal"}, TypeError, "RingAttention: mask is str; must be a Mask"),
        ({"scale": "1"}, TypeError, "scale is str"),
        ({"score": 0.5}, TypeError, "RingAttention: score is float; must be a Score or None"),
        ({"deterministic": 1}, TypeError, "RingAttention: deterministic is int; must be True, False or None"),
    ],
)
def test_settings_are_checked_when_the_module_is_made(settings, error, message):
    with pytest.raises(error, match=message):
        rf.RingAttention(**settings)


def test_a_mask_in_the_call_takes_the_place_of_the_modules_own():
    module = rf.RingAttention(mask=rf.Causal())
    documents = rf.Documents([5, 7], causal=True)
    assert torch.equal(module(*inputs(), documents), rf.attention(*inputs(), mask=documents))
    assert torch.equal(module(*inputs(), rf.Full()), rf.attention(*inputs()))
    assert torch.equal(module(*inputs()), rf.attention(*inputs(), mask=rf.Causal()))


def test_every_form_of_the_call_has_its_gradients():
    """R45: optional arguments left out, by position, by name."""
    module = rf.RingAttention()
    documents = rf.Documents([5, 7], causal=True)
    results = []
    for positional, named in [
        ((documents, 12, True), {}),
        ((documents, None), {"return_lse": True}),
        ((), {"mask": documents, "length": 12, "return_lse": True}),
    ]:
        tensors = inputs()
        out, lse = module(*tensors, *positional, **named)
        (out.sum() + lse.sum()).backward()
        results.append([out, lse, *(x.grad for x in tensors)])
    assert all(torch.equal(x, y) for other in results[1:] for x, y in zip(other, results[0], strict=True))
    assert isinstance(module(*inputs()), torch.Tensor)


def test_the_module_attends_over_its_ring():
    whole = inputs()
    expected = rf.attention(*whole, mask=rf.Causal())

    def step(ring):
        module = rf.RingAttention(ring=ring, mask=rf.Causal())
        return ring.gather(module(*(ring.shard(x.detach()) for x in whole), length=12), length=12)

    for out in in_process(5, rf.Zigzag(), step):
        torch.testing.assert_close(out, expected)


def test_the_module_has_no_weights_and_no_state_and_says_its_settings():
    module = rf.RingAttention(mask=rf.Window(3, 0), scale=0.5)
    assert list(module.parameters()) == list(module.buffers()) == [] and module.state_dict() == {}
    assert "mask=Window(left=3, right=0), scale=0.5, score=None, backend=None" in repr(module)


def test_dropout_follows_train_and_eval_and_takes_a_seed_per_call():
    """R47."""
    module = rf.RingAttention(score=rf.Score(dropout=0.5, seed=1))
    dropped = module(*inputs())
    assert torch.equal(dropped, rf.attention(*inputs(), score=rf.Score(dropout=0.5, seed=1)))
    assert torch.equal(module(*inputs(), seed=2), rf.attention(*inputs(), score=rf.Score(dropout=0.5, seed=2)))
    assert not torch.equal(module(*inputs(), seed=2), dropped)
    plain = module.eval()(*inputs(), seed=2)
    assert torch.equal(plain, rf.attention(*inputs()))


def test_a_seed_without_dropout_is_refused():
    with pytest.raises(ValueError, match="RingAttention: seed = 3, but its score has no dropout; leave seed out"):
        rf.RingAttention()(*inputs(), seed=3)
