"""Section A of the cases: numbers that go wrong first. Merging by itself is in tests/kernels/test_partial.py."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

import ringflash as rf
from ringflash.testing.compare import assert_all_close, assert_close, relative_error
from ringflash.testing.oracle import dense_gradients
from ringflash.testing.sharded import attend_sharded, draw
from tests.rings import LAYOUTS, attend, in_process, name_of, on_workers, probe

layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
GRADIENTS = ["out", "dq", "dk", "dv"]


def with_logits(of_rank, layout, dtype, length=12):
    """Inputs whose scores against the keys of a rank are about of_rank[rank].

    Keys lie on a grid on which fp32 forms such scores exactly, in any order: at 200 it would else round each by 2e-5.
    """
    inputs = draw(queries=length, heads=(1, 1), dim=16, dtype=dtype)
    inputs["q"] = torch.ones_like(inputs["q"])
    for rank, logit in enumerate(of_rank):
        keys = layout.positions(length, rank, len(of_rank))
        on_grid = (inputs["k"][:, keys] * 0.01 * 2**12).round() / 2**12
        inputs["k"][:, keys] = on_grid + logit / 4  # 16 products, scaled by 1 / 4
    return inputs


@layouts
@pytest.mark.parametrize(
    ("logits", "dtype"),
    [((0, 200), F32), ((200, 0), F32), ((0, 89), F32), ((5, 5), F32), ((-1e4, 1e4), F64), ((1e4, -1e4), F64)],
    ids=name_of,
)
def test_R01_ranks_whose_scores_are_far_apart_merge_to_finite_numbers(logits, dtype, layout):
    """At 1e4 in fp64: there a score in fp32 is only known to a thousandth."""
    inputs = with_logits(logits, layout, dtype)
    expected = dense_gradients(**inputs, mask=rf.Full())
    for results in in_process(2, layout, partial(attend_sharded, **inputs)):
        assert_all_close(results, expected, dtype)
        assert all(x.isfinite().all() for x in results.values())
        if abs(logits[0] - logits[1]) >= 200:
            negligible = layout.positions(12, 0 if logits[0] < logits[1] else 1, 2)
            assert (results["dk"][:, negligible] == 0).all() and (results["dv"][:, negligible] == 0).all()


@pytest.mark.parametrize("rank_with_keys", [0, 1, 2])
def test_R02_ranks_without_a_visible_key_add_nothing_wherever_they_come(rank_with_keys):
    """A window of one document whose keys lie on one rank; for the other rows every partial is empty."""
    lengths = [0, 0, 0]
    lengths[rank_with_keys] = 4
    before = 4 * rank_with_keys
    lonely = rf.Documents([1] * before + [4] + [1] * (8 - before), causal=False)
    inputs = draw(queries=12, heads=(2, 1), dtype=F32)
    expected = dense_gradients(**inputs, mask=lonely)
    for results in in_process(3, rf.Contiguous(), partial(attend_sharded, **inputs, mask=lonely)):
        assert_all_close(results, expected, F32)


@layouts
def test_R02_rows_that_see_nothing_on_any_rank_are_zero_with_zero_gradients(layout):
    mask = rf.Documents([], causal=True, padding=12)
    inputs = draw(queries=12, heads=(2, 1), dtype=F32)
    for results in in_process(3, layout, partial(attend_sharded, **inputs, mask=mask)):
        assert (results.pop("lse") == -torch.inf).all()
        assert all((x == 0).all() for x in results.values())


@layouts
def test_R03_rows_before_the_first_key_are_zero_with_zero_gradients(layout):
    zeros = torch.zeros(1, 6, 1, 4)
    v = torch.tensor([1.0, 2.0, 3.0, 4.0])[None, :, None, None]
    inputs = {"q": zeros, "k": zeros[:, :4], "v": v, "dout": torch.full((1, 6, 1, 1), 1e3)}
    expected = dense_gradients(**inputs, mask=rf.Causal())
    for results in in_process(2, layout, partial(attend_sharded, **inputs, mask=rf.Causal())):
        assert_close(results["out"].flatten(), torch.tensor([0, 0, 1, 1.5, 2, 2.5]), F32)
        assert_close(results["lse"].exp().flatten(), torch.tensor([0.0, 0, 1, 2, 3, 4]), F32)
        assert (results["dq"][:, :2] == 0).all()
        assert_all_close(results, expected, F32)


def by_torch(inputs, *, is_causal):
    """Out and gradients of torch's own attention in the inputs' type."""
    q, k, v = (inputs[name].transpose(1, 2).detach().requires_grad_() for name in ("q", "k", "v"))
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    gradients = torch.autograd.grad(out, (q, k, v), inputs["dout"].transpose(1, 2))
    return dict(zip(GRADIENTS, (x.detach().transpose(1, 2) for x in (out, *gradients)), strict=True))


@pytest.mark.parametrize("peaky", [1.0, 8.0])
def test_R04_the_error_of_bfloat16_does_not_grow_with_the_ring(peaky):
    inputs = draw(queries=1024, heads=(4, 4), dim=64, dtype=BF16)
    inputs["q"] = inputs["q"] * peaky
    inputs["dlse"] = None
    expected = dense_gradients(**inputs, mask=rf.Causal())
    torchs = by_torch(inputs, is_causal=True)
    errors = {}
    for ranks in (1, 2, 4, 8):
        results = in_process(ranks, rf.Zigzag(), partial(attend_sharded, **inputs, mask=rf.Causal()))
        errors[ranks] = {name: relative_error(results[0][name], expected[name]) for name in GRADIENTS}
    for name in GRADIENTS:
        assert errors[1][name] <= 2 * relative_error(torchs[name], expected[name]), name
        for ranks in (2, 4, 8):
            assert errors[ranks][name] <= 1.25 * errors[1][name], (name, ranks)


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_R06_one_query_and_one_key_give_the_value_itself(dtype):
    """dq and dk are the difference of two equal sums; in fp32 these are rounded each in its own order."""
    q, k, v = (3 * draw(queries=1, heads=(1, 1), dim=16, dtype=dtype)[name] for name in ("q", "k", "v"))
    results = attend_sharded(None, q, k, v, torch.ones_like(v))
    assert torch.equal(results["out"], v)
    assert_close(results["lse"][0], (q.double() * k.double()).sum(-1)[0] / 4, F32)
    nothing = 0 if dtype != F32 else 16 * torch.finfo(F32).eps
    assert results["dq"].abs().max() <= nothing and results["dk"].abs().max() <= nothing
    assert torch.equal(results["dv"], torch.ones_like(v))


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize("mask", [rf.Full(), rf.Causal()], ids=name_of)
@layouts
def test_R06_one_token_per_rank_is_as_exact_as_torch(layout, mask, dtype):
    inputs = {name: (3 * x).to(dtype) for name, x in draw(queries=2, batch=64, heads=(1, 1), dim=16).items()}
    inputs |= {"dout": torch.ones_like(inputs["dout"]), "dlse": None}
    expected = dense_gradients(**inputs, mask=mask)
    torchs = by_torch(inputs, is_causal=mask == rf.Causal())
    for results in in_process(2, layout, partial(attend_sharded, **inputs, mask=mask)):
        assert_close(results["lse"], expected["lse"], F32)
        if mask == rf.Causal():
            assert torch.equal(results["out"][:, 0], inputs["v"][:, 0])
        for name in GRADIENTS:
            assert results[name].isfinite().all()
            assert (
                relative_error(results[name], expected[name]) <= 2 * relative_error(torchs[name], expected[name]) + 1e-6
            )


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("ranks", [1, 2])
def test_R07_a_key_that_dominates_by_thousands_wins_from_another_rank(ranks, dtype):
    """Logits reach 8e4. The dominating key is the last one, of the last rank."""
    inputs = draw(queries=16, heads=(1, 1), dim=64, dtype=F32)
    signs = inputs["q"][:, :1].sign()
    q = 100 * signs.expand(1, 16, 1, 64)
    k = torch.cat([100 * inputs["k"][:, :15].sign(), 100 * signs], dim=1)
    scores = torch.einsum("bqhd,bkhd->qk", q, k) / 8
    assert (scores[:, -1:] - scores[:, :-1] > 1e3).all() and scores[0, -1] == 8e4
    inputs = {"q": q.to(dtype), "k": k.to(dtype), "v": inputs["v"].to(dtype), "dout": inputs["dout"].to(dtype)}
    for results in in_process(ranks, rf.Contiguous(), partial(attend_sharded, **inputs)):
        assert torch.equal(results["out"], inputs["v"][:, -1:].expand(1, 16, 1, 64))
        assert (results["lse"] / 8e4 - 1).abs().max() <= 1e-6
        assert results["dq"].abs().max() < 1e-3 and results["dk"].abs().max() < 1e-2
        assert results["dv"][:, -1].isfinite().all() and (results["dv"][:, :-1] == 0).all()


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("mask", [rf.Full(), rf.Causal()], ids=name_of)
def test_R08_weights_add_up_to_one(mask, ranks):
    inputs = draw(queries=50, heads=(4, 2), dim=16, dtype=F32)
    inputs["v"] = torch.ones_like(inputs["v"])
    for results in in_process(ranks, rf.Zigzag(), partial(attend_sharded, **inputs, mask=mask)):
        assert (results["out"] - 1).abs().max() <= 1e-6


@pytest.mark.parametrize(
    ("mask", "layout"),
    [(rf.Full(), rf.Contiguous()), (rf.Causal(), rf.Zigzag()), (rf.Causal(), rf.Striped())],
    ids=name_of,
)
def test_R08_lse_counts_65536_keys_and_out_is_their_mean(mask, layout):
    """512 queries at the end of 65,536 keys: the numbers of the whole in the time of a slice."""
    inputs = {name: x if name in ("k", "v") else x[:, :512] for name, x in probe(65536, dim=8, dtype=F32).items()}
    rows = torch.arange(65536 - 512, 65536, dtype=torch.float64)
    seen = rows + 1 if mask == rf.Causal() else torch.full_like(rows, 65536)
    for results in in_process(8, layout, partial(attend_sharded, **inputs, mask=mask)):
        assert results["lse"].shape == (1, 512, 1) and results["lse"].dtype == F32
        assert (results["lse"].double().exp().flatten() / seen - 1).abs().max() <= 1e-5
        assert (results["out"].double().flatten() / ((seen - 1) / 2) - 1).abs().max() <= 1e-5


def results_under_seeds(ring):
    """For seeds 0, 1 and one of its own per rank: the results, and whether the generator stood still."""
    problem, options = {"queries": 16, "heads": (4, 2), "dtype": torch.float32}, {"mask": rf.Causal()}
    found = []
    for seed in (0, 1, 100 + ring.rank):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        results = attend(ring, problem, options)
        found.append((results, torch.equal(torch.get_rng_state(), before)))
    return found


def test_R13_the_result_does_not_depend_on_random_state_nor_change_it(workers):
    for found in on_workers(workers, 2, rf.Zigzag(), results_under_seeds):
        first = found[0][0]
        for results, stood_still in found:
            assert stood_still
            assert all(torch.equal(results[name], first[name]) for name in first)


class Layer(nn.Module):
    """Pre-norm attention and MLP, hidden 128, 4 heads."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.RMSNorm(128), nn.RMSNorm(128)
        self.qkv, self.out = nn.Linear(128, 384, bias=False), nn.Linear(128, 128, bias=False)
        self.up, self.down = nn.Linear(128, 256), nn.Linear(256, 128)

    def forward(self, x, ring):
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (12, 32)).chunk(3, dim=2)
        x = x + self.out(rf.attention(q, k, v, ring=ring, mask=rf.Causal()).flatten(2))
        return x + self.down(functional.gelu(self.up(self.second(x))))


def deep_stack(ring, dtype):
    """(loss, gradient of every parameter) of 24 layers over 512 tokens, summed over the ring; products in `dtype`."""
    generator = torch.Generator().manual_seed(0)  # ranks are threads, and share the global one
    x, labels = torch.randn(1, 512, 128, generator=generator), torch.randint(64, (1, 512), generator=generator)
    x, labels = ring.shard(x), ring.shard(labels)
    # Without its cache, which threads would share.
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == BF16, cache_enabled=False):
        for layer in STACK:
            x = layer(x, ring)
        logits = HEAD(x)
    loss = functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum") / 512
    gradients = torch.autograd.grad(loss, [*STACK.parameters(), *HEAD.parameters()])
    return float(loss.detach()), gradients


torch.manual_seed(1)
STACK = nn.ModuleList(Layer() for _ in range(24))
HEAD = nn.Linear(128, 64)


@pytest.mark.slow
def test_R05_errors_do_not_build_up_through_a_deep_stack():
    """bf16 products, fp32 weights, four ranks against one."""
    exact, alone = (in_process(1, rf.Zigzag(), deep_stack, dtype)[0] for dtype in (F32, BF16))
    ranks = in_process(4, rf.Zigzag(), deep_stack, BF16)
    loss = sum(part for part, _ in ranks)
    gradients = [torch.stack(parts).sum(0) for parts in zip(*(grads for _, grads in ranks), strict=True)]
    assert loss == pytest.approx(alone[0], rel=1e-3)
    for mine, one, true in zip(gradients, alone[1], exact[1], strict=True):
        assert float(mine.norm()) == pytest.approx(float(one.norm()), rel=1e-2)
        mine_cos, one_cos = (functional.cosine_similarity(x.flatten(), true.flatten(), dim=0) for x in (mine, one))
        assert mine_cos >= one_cos - 0.002
