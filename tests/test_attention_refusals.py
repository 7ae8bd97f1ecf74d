"""What attention() cannot do is said at once: the argument, its value, what is accepted; and nothing is sent."""

import pytest
import torch

import ringflash as rf
from tests.rings import Untouchable

Q, KV = (1, 8, 4, 16), (1, 8, 2, 16)


def attend(q=Q, k=KV, v=KV, *, dtype=torch.float32, **options):
    """attention() of zeros of these shapes, or of what is given instead, in a ring that must not be used."""
    q, k, v = (torch.zeros(x, dtype=dtype) if isinstance(x, tuple) else x for x in (q, k, v))
    ring = options.pop("ring", rf.Ring(layout=rf.Contiguous(), transport=Untouchable()))
    return rf.attention(q, k, v, ring=ring, **options)


def test_the_plain_call_would_have_used_the_ring():
    """The refusals below come before this."""
    with pytest.raises(AssertionError, match="a value was sent"):
        attend()


SHAPES = [
    ({"q": [1.0]}, TypeError, "q is list; must be a tensor"),
    ({"v": None}, TypeError, "v is NoneType; must be a tensor"),
    ({"q": (8, 4, 16)}, ValueError, "q has shape (8, 4, 16); must have 4 axes [batch, tokens, heads, dim]"),
    ({"k": (1, 1, 8, 2, 16)}, ValueError, "k has shape (1, 1, 8, 2, 16); must have 4 axes"),
    ({"dtype": torch.int64}, TypeError, "q is torch.int64; must be float16, bfloat16, float32 or float64"),
    ({"dtype": torch.complex64}, TypeError, "q is torch.complex64; must be float16"),
    ({"dtype": torch.float8_e4m3fn}, TypeError, "q is torch.float8_e4m3fn; must be float16"),
    ({"v": torch.zeros(KV).bfloat16()}, TypeError, "q is torch.float32 and v is torch.bfloat16; must be alike"),
    ({"q": torch.zeros(Q).to_sparse()}, TypeError, "q is torch.sparse_coo; must be a plain tensor"),
    (
        {"k": torch.nested.nested_tensor([torch.zeros(KV)], layout=torch.jagged)},
        TypeError,
        "k is nested; must be a plain",
    ),
    ({"k": torch.zeros(KV, device="meta")}, ValueError, "q is on cpu and k on meta; must be on one device"),
    ({"k": (2, 8, 2, 16), "v": (2, 8, 2, 16)}, ValueError, "q has batch 1 and k has 2; must be equal"),
    ({"v": (3, 8, 2, 16)}, ValueError, "q has batch 1 and v has 3; must be equal"),
    ({"v": (1, 7, 2, 16)}, ValueError, "k has 8 tokens and 2 heads, v has 7 and 2; must be equal"),
    ({"v": (1, 8, 4, 16)}, ValueError, "k has 8 tokens and 2 heads, v has 8 and 4; must be equal"),
    ({"k": (1, 8, 2, 32)}, ValueError, "q has head dim 16 and k has 32; must be equal"),
    ({"q": (1, 8, 7, 16)}, ValueError, "q has 7 heads and k has 2; query heads must be a multiple of key heads"),
    ({"q": (1, 8, 1, 16)}, ValueError, "q has 1 heads and k has 2; query heads must be a multiple of key heads"),
    ({"k": (1, 8, 0, 16), "v": (1, 8, 0, 16)}, ValueError, "only tokens may be 0"),
    ({"v": (1, 8, 2, 0)}, ValueError, "v (1, 8, 2, 0); only tokens may be 0"),
    ({"q": (0, 8, 2, 4), "k": (0, 8, 2, 4), "v": (0, 8, 2, 4)}, ValueError, "q has shape (0, 8, 2, 4), v (0, 8, 2, 4)"),
]


@pytest.mark.parametrize(("given", "error", "message"), SHAPES, ids=[message[:40] for _, _, message in SHAPES])
def test_tensors_that_do_not_fit_are_refused(given, error, message):
    """R71; R20 (7 heads over 2) and R11 (8-bit inputs) among them."""
    with pytest.raises(error) as caught:
        attend(**given)
    assert str(caught.value).startswith("attention: ") and message in str(caught.value)


SQUARE = torch.ones(8, 8).tril()
MASKS = [
    (torch.rand(16, 16) > 0.5, TypeError, "mask is Tensor; must be a Mask such as Causal()"),
    (torch.zeros(16, 16), TypeError, "say the rule, for example Causal() & Window(1023, 0)"),
    (torch.block_diag(SQUARE, SQUARE).bool(), TypeError, "Boolean and additive mask tensors are not supported"),
    (torch.ones(1, 1, 16, 16).tril().bool(), TypeError, "mask is Tensor; must be a Mask"),
    ("causal", TypeError, "mask is str; must be a Mask such as Causal()"),
    (rf.Causal, TypeError, "must be a Mask such as Causal()"),
    (True, TypeError, "mask is bool; must be a Mask"),
    (
        rf.Documents([8], causal=True),
        ValueError,
        "padding=0) is made for 8 tokens, of which rank 0 of 2 holds 4 under Contiguous(); k has 8. Make it",
    ),
    (rf.Documents([20], causal=True), ValueError, "for 20 tokens, of which rank 0 of 2 holds 10 under Contiguous(); k"),
    (rf.Causal() & rf.Documents([15], causal=True), ValueError, "is made for 15 tokens, of which rank 0 of 2 holds 7"),
    (rf.Documents([[16], [16]], causal=True), ValueError, "is made for 2 batch rows, q has 1"),
    (rf.Padding.right([16, 3], length=16), ValueError, "is made for 2 batch rows, q has 1"),
]


@pytest.mark.parametrize(("mask", "error", "message"), MASKS, ids=[f"{i}-{m[2][:30]}" for i, m in enumerate(MASKS)])
def test_masks_that_are_no_rule_or_made_for_another_length_are_refused(mask, error, message):
    """R36: nothing is dropped in silence, not even a tensor that happens to be causal."""
    with pytest.raises(error) as caught:
        attend(mask=mask)
    assert message in str(caught.value)


def test_causality_cannot_be_asked_for_beside_a_mask():
    """R36: there is one way to say it."""
    with pytest.raises(TypeError, match="is_causal"):
        attend(mask=rf.Full(), is_causal=True)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (
            rf.Documents([8], causal=True),
            "mask Documents(lengths=(8,), causal=True, padding=0) is made for 8 tokens, the sequence has 16; add a",
        ),
        (rf.Documents([20], causal=True), "padding=0) is made for 20 tokens, the sequence has 16"),
        (
            rf.Causal() & rf.Documents([15], causal=True),
            "is made for 15 tokens, the sequence has 16; add a document or pad",
        ),
    ],
)
def test_a_mask_for_another_length_than_was_said_is_refused(mask, message):
    with pytest.raises(ValueError, match="is made for") as caught:
        attend(mask=mask, length=16)
    assert message in str(caught.value)


SETTINGS = [
    ({"score": "plain"}, TypeError, "attention: score is str; must be a Score or None"),
    ({"length": "16"}, TypeError, "attention: length is str; must be an integer >= 0"),
    ({"length": 16.0}, TypeError, "attention: length is float; must be an integer >= 0"),
    ({"length": True}, TypeError, "attention: length is bool; must be an integer >= 0"),
    ({"length": -16}, ValueError, "attention: length = -16; must be >= 0"),
    ({"query_length": 16.0}, TypeError, "attention: query_length is float; must be an integer >= 0"),
    ({"backend": ["triton"]}, ValueError, "attention: backend = ['triton']; must be None, a KernelTable or one of"),
    ({"return_lse": 1}, TypeError, "attention: return_lse is int; must be True or False"),
    ({"score": rf.Score}, TypeError, "attention: score is type; must be a Score or None"),
    ({"route": "values"}, ValueError, "attention: route = 'values'; must be None, 'keys' or 'queries'"),
    ({"deterministic": "yes"}, TypeError, "attention: deterministic is str; must be True, False or None"),
    ({"scale": True}, TypeError, "Score: scale is bool; must be a float or None"),
    ({"ring": "world"}, TypeError, "attention: ring is str; must be a Ring or None"),
    (
        {"scale": 0.5, "score": rf.Score(0.5)},
        ValueError,
        "attention: scale = 0.5 and score = Score(scale=0.5, softcap=None",
    ),
    (
        {"scale": 0.0, "score": rf.Score()},
        ValueError,
        "attention: scale = 0.0 and score = Score(scale=None, softcap=None",
    ),
    ({"scale": 10**400}, ValueError, "Score: scale is too large; must be finite"),
    ({"score": rf.Score(alibi=[0.5])}, ValueError, "attention: score.alibi has 1 slopes; q has 4 heads"),
    ({"score": rf.Score(sinks=torch.zeros(2))}, ValueError, "attention: score.sinks has 2 entries; q has 4 heads"),
    (
        {"score": rf.Score(sinks=torch.zeros(4, device="meta"))},
        ValueError,
        "attention: score.sinks is on meta and q on cpu; must be on one",
    ),
    ({"scale": float("nan")}, ValueError, "Score: scale = nan; must be finite"),
    ({"scale": float("inf")}, ValueError, "Score: scale = inf; must be finite"),
    ({"scale": "0.5"}, TypeError, "Score: scale is str; must be a float or None"),
    ({"scale": torch.tensor(0.5)}, TypeError, "Score: scale is Tensor; must be a float or None"),
    (
        {"backend": "cuda"},
        ValueError,
        "attention: backend = 'cuda'; must be None, a KernelTable or one of 'hopper', 'triton', 'cudnn', 'flash', 'fa4', "
        "'reference'",
    ),
    (
        {"length": 15},
        ValueError,
        "attention: rank 0 of 2 holds 8 tokens; Contiguous() gives it 7 of length = 15. Pass the",
    ),
    (
        {"length": 32},
        ValueError,
        "attention: rank 0 of 2 holds 8 tokens; Contiguous() gives it 16 of length = 32. Pass the",
    ),
    (
        {"length": 16, "query_length": 9, "q": (1, 3, 4, 16)},
        ValueError,
        "attention: rank 0 of 2 holds 3 tokens; Contiguous() gives it 4 of query_length = 9. Pass the",
    ),
    (
        {"length": 9, "ring": None},
        ValueError,
        "attention: length = 9 without a ring, where the tensors have 8 tokens; leave length out",
    ),
    (
        {"mask": rf.Documents([16], causal=True), "q": (1, 4, 4, 16)},
        ValueError,
        "mask Documents(lengths=(16,), causal=True, padding=0): 8 queries over 16 keys; this mask",
    ),
]


@pytest.mark.parametrize(("given", "error", "message"), SETTINGS, ids=[str(list(given)) for given, _, _ in SETTINGS])
def test_settings_that_contradict_or_do_not_exist_are_refused(given, error, message):
    with pytest.raises(error) as caught:
        attend(**given)
    assert str(caught.value).startswith(message) or message in str(caught.value).removeprefix("attention: ")


@pytest.mark.parametrize("name", ["softmax_scale", "dropout_p", "attn_mask", "window_size", "causal", "layout"])
def test_an_argument_that_does_not_exist_is_not_swallowed(name):
    """R47: dropout among them."""
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        attend(**{name: 0.1})


def test_settings_are_named_never_positional():
    q = torch.zeros(Q)
    with pytest.raises(TypeError, match="positional"):
        rf.attention(q, q, q, rf.Causal())


@pytest.mark.parametrize("name", ["triton", "cudnn"])
def test_a_backend_that_was_named_and_cannot_serve_is_an_error_not_a_fallback(name):
    wide = (1, 8, 2, 300)
    with pytest.raises(NotImplementedError) as caught:
        attend(wide, wide, wide, dtype=torch.float64, backend=name)
    text = str(caught.value)
    assert text.startswith(f"attention: backend '{name}' cannot run this call: ") and text.endswith(
        ". Use backend='reference' or None"
    )


SCORES = [
    ({"softcap": 0.0}, ValueError, "softcap = 0.0; must be > 0"),
    ({"softcap": -1}, ValueError, "softcap = -1.0; must be > 0"),
    ({"softcap": "30"}, TypeError, "softcap is str; must be a float or None"),
    ({"softcap": True}, TypeError, "softcap is bool"),
    ({"alibi": 0.5}, TypeError, "alibi is float; must be a list, tuple or tensor of slopes"),
    ({"alibi": []}, ValueError, "alibi is empty; must be a list, tuple or tensor of slopes, one per head"),
    ({"alibi": [0.5, None]}, TypeError, r"alibi\[1\] is NoneType; must be a float"),
    ({"alibi": [0.5, float("inf")]}, ValueError, r"alibi\[1\] = inf; must be finite"),
    ({"alibi": torch.zeros(2, 2)}, ValueError, r"alibi has shape \(2, 2\); must be one slope per query head"),
    ({"alibi": torch.zeros(2, requires_grad=True)}, NotImplementedError, "alibi requires a gradient"),
    ({"sinks": [0.0]}, TypeError, "sinks is list; must be a tensor"),
    ({"sinks": torch.zeros(2, 2)}, ValueError, r"sinks has shape \(2, 2\)"),
    ({"sinks": torch.tensor([0.0, float("inf")])}, ValueError, "sinks holds inf or NaN"),
    ({"sinks": torch.tensor([0.0, float("nan")])}, ValueError, "sinks holds inf or NaN"),
    ({"sinks": torch.zeros(2).int()}, ValueError, "sinks has shape .2,. and torch.int32; must be .Hq., of 16"),
    ({"dropout": 1.0, "seed": 1}, ValueError, r"dropout = 1.0; must be in \[0, 1\)"),
    ({"dropout": -0.1, "seed": 1}, ValueError, "dropout = -0.1"),
    ({"dropout": 0.1}, ValueError, "dropout = 0.1 and seed = None; dropout needs a seed"),
    ({"seed": 1}, ValueError, "dropout = 0.0 and seed = 1; dropout needs a seed, and a seed is for dropout"),
    ({"dropout": 0.1, "seed": 1.5}, TypeError, "seed is float; must be an integer"),
    ({"dropout": 0.1, "seed": -1}, ValueError, "seed = -1; must be >= 0"),
    ({"dropout": None}, TypeError, "dropout is NoneType; must be a float"),
]


@pytest.mark.parametrize(("terms", "error", "message"), SCORES, ids=[str(terms)[:40] for terms, _, _ in SCORES])
def test_scores_that_make_no_sense_are_refused_when_they_are_made(terms, error, message):
    with pytest.raises(error, match=f"Score: {message}"):
        rf.Score(**terms)
