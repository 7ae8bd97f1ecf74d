"""The names of ring-flash-attention over ours: each against dense attention, in the layouts that its users' scripts make."""

import inspect
from itertools import pairwise

import numpy
import pytest
import torch
import torch.distributed as dist

import ringflash as rf
from ringflash.compat import ring_flash_attn as compat
from ringflash.ring import ring_of_group
from ringflash.testing.compare import assert_all_close
from ringflash.testing.oracle import dense_gradients
from ringflash.testing.sharded import draw
from tests.rings import subgroup

BATCHED = ["ring_flash_attn", "zigzag_ring_flash_attn", "stripe_flash_attn"]
PACKED = ["ring_flash_attn_varlen", "zigzag_ring_flash_attn_varlen", "llama3_flash_attn_varlen"]
LENGTHS = [8, 16, 0, 24]  # of packed documents; each divides into two pieces a rank, on 4 ranks


def pieces_of(name, rank, ranks, length):
    """Positions of a rank as slices, written out as users' scripts cut them, for one document."""
    if name.startswith("stripe"):
        return [range(rank, length, ranks)]
    if name.startswith("zigzag"):
        size = length // (2 * ranks)
        other = 2 * ranks - 1 - rank
        return [range(rank * size, (rank + 1) * size), range(other * size, (other + 1) * size)]
    size = length // ranks
    return [range(rank * size, (rank + 1) * size)]


def positions_of(name, rank, ranks, lengths):
    if name.startswith("llama3"):
        lengths = [sum(lengths)]
    found, before = [], 0
    for length in lengths:
        found += [before + p for piece in pieces_of(name, rank, ranks, length) for p in piece]
        before += length
    return torch.tensor(found)


def packed_arguments(name, rank, ranks, causal):
    """What stands between v and the options."""
    borders = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    if name.startswith("llama3"):
        *lengths, keys = compat.llama3_flash_attn_prepare_cu_seqlens(borders, causal, rank, ranks)
        return [*lengths, 1, keys]
    return [borders // ranks, max(LENGTHS) // ranks]


def called(rank, name, form, ranks, options):
    """Results of a rank on its positions: (positions, out, lse, dq, dk, dv), all without batch where tokens are packed."""
    group, is_member = subgroup(ranks)
    if not is_member:
        return None
    rank = torch.distributed.get_rank(group)
    is_packed = "varlen" in name
    inputs = draw(
        queries=sum(LENGTHS), heads=(2, 2) if form == "qkvpacked_func" else (4, 2), batch=1 if is_packed else 2
    )
    at = positions_of(name, rank, ranks, LENGTHS if is_packed else [sum(LENGTHS)])
    local = {key: x[:, at] for key, x in inputs.items()}
    if is_packed:
        local = {key: x[0] for key, x in local.items()}
    q, k, v = (local[key].clone().requires_grad_() for key in "qkv")
    axis = 1 if is_packed else 2
    tensors = {
        "func": lambda: (q, k, v),
        "kvpacked_func": lambda: (q, torch.stack((k, v), axis)),
        "qkvpacked_func": lambda: (torch.stack((q, k, v), axis),),
    }[form]()
    between = packed_arguments(name, rank, ranks, options.get("causal", False)) if is_packed else []
    out, lse, nothing = getattr(compat, f"{name}_{form}")(
        *tensors, *between, return_attn_probs=True, group=group, **options
    )
    assert nothing is None
    lse = lse.transpose(-1, -2)
    grads = torch.autograd.grad([out, lse], [q, k, v], [local["dout"], local["dlse"]])
    return at, dict(zip(("out", "lse", "dq", "dk", "dv"), (out.detach(), lse.detach(), *grads), strict=True))


def called_on_worker(*arguments):
    return called(torch.distributed.get_rank(), *arguments)


def expected_of(name, form, mask):
    is_packed = "varlen" in name
    inputs = draw(
        queries=sum(LENGTHS), heads=(2, 2) if form == "qkvpacked_func" else (4, 2), batch=1 if is_packed else 2
    )
    if is_packed:
        mask = rf.Documents(LENGTHS, causal=False) & mask
    results = dense_gradients(**inputs, mask=mask)
    return {key: x[0] for key, x in results.items()} if is_packed else results


@pytest.mark.parametrize("form", ["func", "kvpacked_func", "qkvpacked_func"])
@pytest.mark.parametrize("name", BATCHED + PACKED)
def test_each_function_gives_dense_attention_in_its_users_layout(name, form, workers):
    """2 and 4 ranks, causal and full, and windows over the whole sequence; out, lse and gradients."""
    for ranks, options, mask in (
        (2, {"causal": True}, rf.Causal()),
        (4, {"causal": False}, rf.Full()),
        (4, {"causal": True, "window_size": (5, 3)}, rf.Window(5, 0)),
        (2, {"window_size": (4, 2)}, rf.Window(4, 2)),
    ):
        expected = expected_of(name, form, mask)
        for at, results in filter(None, workers.run(called_on_worker, name, form, ranks, options)):
            axis = 0 if "varlen" in name else 1
            here = {key: x.index_select(axis, at) for key, x in expected.items()}
            assert_all_close(results, here, torch.float64)


SHARED = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), alibi_slopes=None, deterministic=False, "
    "return_attn_probs=False, group=None"
)
BETWEEN = {
    "ring_flash_attn_varlen": "cu_seqlens, max_seqlen, ",
    "zigzag_ring_flash_attn_varlen": "cu_seqlens, max_seqlen, ",
    "llama3_flash_attn_varlen": "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, heads_k_stride, local_k_slice, ",
}


@pytest.mark.parametrize(
    ("form", "first"), [("func", "q, k, v"), ("kvpacked_func", "q, kv"), ("qkvpacked_func", "qkv")]
)
@pytest.mark.parametrize("name", BATCHED + PACKED)
def test_signatures_are_theirs(name, form, first):
    function = getattr(compat, f"{name}_{form}")
    parameters = [p.replace(annotation=p.empty) for p in inspect.signature(function).parameters.values()]
    shown = str(inspect.Signature(parameters))[1:-1]
    assert shown == f"{first}, {BETWEEN.get(name, '')}{SHARED}"
    assert function.__name__ == f"{name}_{form}"


def test_the_lists_of_llama3_are_those_that_flash_attention_takes():
    """A rank of two with documents of 3, 6 and 3 tokens: the second document lies on both."""
    prepare = compat.llama3_flash_attn_prepare_cu_seqlens
    borders = torch.tensor([0, 3, 9, 12], dtype=torch.int32)
    for rank, causal, queries, keys in (
        (0, True, [0, 3, 6], [0, 3, 6]),
        (0, False, [0, 3, 6], [0, 3, 9]),
        (1, True, [0, 3, 6], [0, 6, 9]),
        (1, False, [0, 3, 6], [0, 6, 9]),
    ):
        q, k, most_queries, most_keys, _ = prepare(borders, causal, rank, 2)
        assert (q.tolist(), k.tolist()) == (queries, keys)
        assert q.dtype == k.dtype == torch.int32
        assert most_queries == max(b - a for a, b in pairwise(queries))
        assert most_keys == max(b - a for a, b in pairwise(keys))


def alone(**options):
    q = draw(queries=8, heads=(2, 2))["q"]
    return compat.ring_flash_attn_func(q, q, q, **options)


def packed(cu_seqlens=(0, 2, 8), max_seqlen=6, name="zigzag_ring_flash_attn_varlen_func"):
    q = draw(queries=8, heads=(2, 2))["q"][0]
    return getattr(compat, name)(q, q, q, torch.tensor(cu_seqlens), max_seqlen)


def prepared(borders, rank):
    return compat.llama3_flash_attn_prepare_cu_seqlens(torch.tensor(borders), True, rank, 2)


def llama3(**change):
    q = draw(queries=8, heads=(2, 2))["q"][0]
    cu_q, cu_k, most_q, most_k, keys = compat.llama3_flash_attn_prepare_cu_seqlens(torch.tensor([0, 2, 8]), True, 0, 1)
    arguments = {
        "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": most_q, "max_seqlen_k": most_k,
        "heads_k_stride": 1, "local_k_slice": keys, "causal": True,
    }  # fmt: skip
    return compat.llama3_flash_attn_varlen_func(q, q, q, **(arguments | change))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: alone(dropout_p=0.1), NotImplementedError, "dropout_p = 0.1; must be 0"),
        (lambda: alone(alibi_slopes=torch.ones(1, 2)), NotImplementedError, r"alibi_slopes has shape \(1, 2\)"),
        (lambda: packed((0, 2, 7)), ValueError, "cu_seqlens ends at 7; must end at the 8 tokens"),
        (lambda: packed((0, 3, 8)), ValueError, r"cu_seqlens has documents of \[3, 5\] local tokens; must be even"),
        (lambda: packed((0, 9, 8)), ValueError, "must start with 0 and not decrease"),
        (lambda: packed(max_seqlen=5), ValueError, "max_seqlen = 5; the longest document has 6"),
        (lambda: llama3(local_k_slice=slice(0, 8)), TypeError, "local_k_slice is slice; must come from"),
        (lambda: llama3(causal=False), ValueError, "causal = False, but cu_seqlens were prepared for causal = True"),
        (lambda: llama3(max_seqlen_k=5), ValueError, "max_seqlen_k = 5 are not those that local_k_slice was prepared"),
        (lambda: llama3(cu_seqlens_q=torch.tensor([0, 6, 8])), ValueError, "pass on all five of one call"),
        (lambda: alone(causal=None), TypeError, "causal is NoneType; must be True or False"),
        (lambda: prepared([0, 8], 2), ValueError, "rank = 2; must be in"),
        (lambda: prepared([2, 8], 0), ValueError, "must start with 0"),
        (
            lambda: compat.zigzag_ring_flash_attn_func(*(torch.zeros(1, 7, 2, 4) for _ in "qkv")),
            ValueError,
            "q has 7 local tokens; must be even",
        ),
        (lambda: llama3(heads_k_stride=3), ValueError, "heads_k_stride = 3; must divide the 2 key heads"),
        (
            lambda: compat.llama3_flash_attn_prepare_cu_seqlens(torch.tensor([0, 7]), True, 0, 2),
            ValueError,
            "cu_seqlens ends at 7, which world_size = 2 does not divide",
        ),
        (
            lambda: compat.ring_flash_attn_kvpacked_func(torch.zeros(1, 8, 2, 4), torch.zeros(1, 8, 3, 2, 4)),
            ValueError,
            r"kv has shape \(1, 8, 3, 2, 4\); must be \[batch, tokens, 2, heads, dim\]",
        ),
        (lambda: compat.substitute_hf_flash_attn(None, 1), NotImplementedError, "attn_implementation='ring'"),
        (lambda: compat.update_ring_flash_attn_params(None), NotImplementedError, "Pass ring= and mask="),
    ],
)  # fmt: skip
def test_what_is_not_served_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_scale_and_slopes_are_passed_on():
    inputs = draw(queries=8, heads=(2, 2))
    slopes = (0.5, 0.25)
    out = compat.stripe_flash_attn_func(
        *(inputs[x] for x in "qkv"), softmax_scale=0.0, causal=True, alibi_slopes=torch.tensor(slopes)
    )
    score = rf.Score(scale=0.0, alibi=slopes)
    expected = dense_gradients(**inputs, mask=rf.Causal(), score=score)
    assert_all_close({"out": out}, {"out": expected["out"]}, torch.float64)


def test_lengths_are_those_of_the_moment():
    """However they were written: a collective, or somebody with the same memory, tells of nothing."""
    numbers = numpy.array([0, 2, 8])
    borders = torch.from_numpy(numbers)
    q = draw(queries=8, heads=(2, 2))["q"][0]
    attend = compat.ring_flash_attn_varlen_func
    before = attend(q, q, q, borders, 8, causal=True)
    numbers[1] = 4
    after = attend(q, q, q, borders, 8, causal=True)
    assert torch.equal(after, attend(q, q, q, torch.tensor([0, 4, 8]), 8, causal=True))
    assert not torch.equal(after, before)


def same_ring_after_many_others():
    """Of which other ranks of the ring know nothing."""
    world, alone = dist.group.WORLD, [dist.new_group([0]) for _ in range(10)]
    ring = ring_of_group(world)
    if dist.get_rank() == 0:
        assert len({id(ring_of_group(group)) for group in alone}) == 10
    return ring_of_group(world) is ring


def test_one_group_has_one_ring(own_workers):
    assert ring_of_group(None) is None
    assert all(own_workers(2).run(same_ring_after_many_others))
