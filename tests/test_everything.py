"""Everything at once, drawn: layout x mask x lengths x heads x dims x score x frozen inputs x route x ranks, to the oracle.

A short run is part of the tests. A long one, as before a release:

    python -m tests.test_everything EXAMPLES SEED
"""

import sys

import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

import ringflash as rf
from ringflash.testing.compare import assert_close
from ringflash.testing.oracle import dense_gradients
from ringflash.testing.sharded import draw
from tests.drawn import layouts, masks, unions
from tests.philox import kept_pairs
from tests.rings import in_process

FEW = 60
INPUTS = ("q", "k", "v", "sinks")


@st.composite
def scores(draw_, heads):
    terms = draw_(st.sets(st.sampled_from(["softcap", "alibi", "sinks", "dropout"])))
    values = {
        "softcap": 1.7,
        "alibi": tuple(0.1 * (h + 1) for h in range(heads)),
        "sinks": torch.linspace(-1, 1, heads, dtype=torch.float64),
        "dropout": 0.3,
    }
    chosen = {name: values[name] for name in sorted(terms)}
    if "dropout" in terms:
        chosen["seed"] = draw_(st.integers(0, 2**62 - 1))
    return rf.Score(scale=draw_(st.sampled_from([None, 0.0, 0.6, -0.4])), **chosen)


@st.composite
def calls(draw_):
    """All of one call on a ring, as whole sequences."""
    keys, batch = draw_(st.integers(0, 33)), draw_(st.integers(1, 3))
    is_cross = draw_(st.sampled_from([False, False, False, True]))
    if is_cross:
        queries = draw_(st.integers(0, 33))
        simple = st.sampled_from([rf.Full(), rf.Causal(), rf.Window(5, 2), rf.Prefix(4), rf.FirstKeys(3)])
        padded = st.just(
            rf.Padding.right([max(0, keys - 2 * row) for row in range(batch)], length=keys, keys_only=True)
        )
        mask = draw_(simple | padded)
        layout = draw_(st.sampled_from([rf.Contiguous(), rf.Zigzag(), rf.Striped()]))
    else:
        queries = keys
        mask = draw_(masks(keys) | masks(keys, batch) | unions(keys))
        layout = draw_(layouts(keys, mask))
    group, Hk = draw_(st.integers(1, 3)), draw_(st.integers(1, 2))
    problem = {
        "batch": batch,
        "queries": queries,
        "keys": keys,
        "heads": (group * Hk, Hk),
        "dim": draw_(st.integers(1, 9)),
        "value_dim": draw_(st.integers(1, 9)),
        "seed": draw_(st.integers(0, 99)),
    }
    ranks = draw_(st.integers(1, 5))
    # What each rank does not train. All of it on one rank is refused, for it would leave the others waiting.
    some = st.sets(st.sampled_from(INPUTS[:3]), max_size=2)
    frozen = [draw_(some) for _ in range(ranks)]
    options = {"deterministic": draw_(st.booleans()), "route": draw_(st.sampled_from([None, "keys", "queries"]))}
    return problem, mask, layout, ranks, draw_(scores(group * Hk)), frozen, options


def results_of_rank(ring, problem, mask, score, frozen, options):
    """out, lse and the gradients of what this rank trains, of its shard; None for what it does not."""
    x = draw(**problem)
    N, M = x["k"].shape[1], x["q"].shape[1]
    local = {name: ring.shard(x[name]).clone() for name in ("q", "k", "v")}
    if score.sinks is not None:
        local["sinks"] = score.sinks.clone()
    trained = [name for name in local if name not in frozen[ring.rank]]
    for name in trained:
        local[name].requires_grad_()
    if score.sinks is not None:
        score = rf.Score(**{**vars(score), "sinks": local["sinks"]})
    out, lse = rf.attention(
        local["q"], local["k"], local["v"], ring=ring, mask=mask, score=score, length=N, query_length=M,
        return_lse=True, **options,
    )  # fmt: skip
    grads = torch.autograd.grad(
        [out, lse], [local[name] for name in trained], [ring.shard(x[n]) for n in ("dout", "dlse")]
    )
    return {"out": out.detach(), "lse": lse.detach(), **{f"d{n}": g for n, g in zip(trained, grads, strict=True)}}


def check(call):
    problem, mask, layout, ranks, score, frozen, options = call
    x = draw(**problem)
    (B, M, Hq, _), N = x["q"].shape, x["k"].shape[1]
    kept = kept_pairs(score.seed, score.dropout, B, Hq, M, N) if score.dropout else None
    expected = dense_gradients(**x, mask=mask, score=score, kept=kept)
    everyone = in_process(ranks, layout, results_of_rank, problem, mask, score, frozen, options)
    for rank, results in enumerate(everyone):
        for name, actual in results.items():
            if name == "dsinks":
                continue
            positions = layout.positions(M if name in ("out", "lse", "dq") else N, rank, ranks)
            assert_close(actual, expected[name][:, positions], torch.float64, f"{name} of rank {rank}")
        assert {"dq", "dk", "dv"} - set(results) == {f"d{name}" for name in frozen[rank]}
    if score.sinks is not None:
        # Like any weight's: the ranks' gradients are summed.
        total = torch.stack([results["dsinks"] for results in everyone]).sum(0)
        assert_close(total, expected["dsinks"], torch.float64, "dsinks")


@settings(deadline=None, max_examples=FEW, suppress_health_check=[HealthCheck.too_slow])
@given(calls())
def test_everything_at_once_equals_dense_attention(call):
    check(call)


def long_run(examples, number):
    """As the test, `examples` times, from a seed."""
    quiet = settings(
        deadline=None, max_examples=examples, database=None, derandomize=False, suppress_health_check=list(HealthCheck)
    )
    count = []

    def one(call):
        check(call)
        count.append(call)

    seed(number)(quiet(given(calls())(one)))()
    print(f"{len(count)} examples from seed {number}: every output and gradient within 1e-10 of the oracle")


if __name__ == "__main__":
    torch.set_num_threads(1)
    long_run(int(sys.argv[1]), int(sys.argv[2]))
