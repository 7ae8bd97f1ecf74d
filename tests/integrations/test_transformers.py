"""Models of transformers over a ring: the numbers of eager attention on one process, or a refusal that names the layer.

Runs with the transformers of .venv, and with the oldest supported one (test_transformers_versions.py).
"""

import copy
import inspect
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoConfig, AutoModelForCausalLM

import ringflash as rf
from ringflash.integrations.transformers import check_model, local_inputs, register
from ringflash.integrations.transformers.attend import attend
from ringflash.integrations.transformers.shown import show
from ringflash.parallel.inprocess import run
from ringflash.testing.oracle import dense_gradients
from ringflash.training import count_tokens
from tests.integrations.families import (
    FAMILIES,
    VOCABULARY,
    assert_alike,
    build,
    eager,
    gradients,
    labels_of,
    make,
    restarting,
    tokens,
)

N = 22  # no multiple of 4
PACKED = [7, 1, 14]


def over_ring(model, batch, ranks, layout=None, change=None):
    """(logits, loss, gradients) of a batch of whole sequences over an in-process ring, each rank with its own copy."""
    copies = [copy.deepcopy(model) for _ in range(ranks)]

    def step(member):
        ring = rf.Ring(transport=member, layout=layout)
        inputs = local_inputs(batch, ring, averaged_over=1)
        if change is not None:
            change(inputs, ring)
        out = copies[ring.rank](**inputs, use_cache=False)
        if torch.is_grad_enabled() and out.loss is not None:
            out.loss.backward()
        return ring.gather(out.logits.detach(), length=inputs["length"]), out.loss

    results = run(ranks, step)
    loss = None if results[0][1] is None else sum(loss.detach() for _, loss in results)
    grads = [gradients(one) for one in copies]
    total = {name: None if grads[0][name] is None else sum(g[name] for g in grads) for name in grads[0]}
    return results[0][0], loss, total


def alone(model, **inputs):
    out = model(**inputs)
    out.loss.backward()
    return out.logits.detach(), out.loss.detach(), gradients(model)


def packed_batch(rows=2, lengths=PACKED):
    ids = tokens(rows, sum(lengths))
    return {"input_ids": ids, "labels": labels_of(ids, lengths), "position_ids": restarting(lengths)}


@pytest.mark.parametrize("lengths", [[N], PACKED], ids=["one document", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_eager_attention(family, lengths):
    """Windows, softcap, sinks and experts included; alone (documents told by position ids only), on 2 and on 4 ranks."""
    batch = packed_batch(lengths=lengths)
    expected = eager(make(family, "eager"), batch["input_ids"], lengths)
    found = {"alone": alone(make(family, "ring"), **batch, use_cache=False)}
    for ranks in (2, 4):
        found[ranks] = over_ring(make(family, "ring"), batch, ranks)
    for logits, loss, grads in found.values():
        assert_alike(logits, expected[0])
        assert_alike(loss, expected[1])
        assert_alike(grads, expected[2])


@pytest.mark.parametrize(
    "layout",
    [rf.Contiguous(), rf.Striped(), rf.Balanced(rf.Documents(PACKED, causal=True))],
    ids=["contiguous", "striped", "balanced"],
)
def test_every_layout_gives_the_same(layout):
    batch = packed_batch()
    expected = eager(make("Mistral", "eager"), batch["input_ids"], PACKED)
    for found, want in zip(over_ring(make("Mistral", "ring"), batch, 3, layout), expected, strict=True):
        assert_alike(found, want)


def test_rows_of_a_batch_may_be_packed_differently():
    ids, by_row = tokens(2, N), [PACKED, [10, 12]]
    parts = [(ids[row : row + 1], lengths) for row, lengths in enumerate(by_row)]
    batch = {
        "input_ids": ids,
        "labels": torch.cat([labels_of(*part) for part in parts]),
        "position_ids": torch.cat([restarting(lengths) for lengths in by_row]),
    }
    expected = [eager(make("Mistral", "eager"), *part) for part in parts]
    weights = [(N - len(lengths)) / sum(N - len(lengths) for lengths in by_row) for lengths in by_row]
    want = {
        name: sum(w * grads[name] for w, (_, _, grads) in zip(weights, expected, strict=True))
        for name in expected[0][2]
    }
    for logits, _, grads in (alone(make("Mistral", "ring"), **batch), over_ring(make("Mistral", "ring"), batch, 3)):
        assert_alike(logits, torch.cat([one[0] for one in expected]))
        assert_alike(grads, want)


@pytest.mark.parametrize("scale", [0.0, 0.05, 1.0])
def test_the_scale_of_a_layer_is_kept(scale):
    """R10: 0 is a scale."""

    def scaled(attention):
        model = make("Llama", attention)
        for layer in model.model.layers:
            layer.self_attn.scaling = scale
        return model

    batch = packed_batch()
    expected = eager(scaled("eager"), batch["input_ids"], PACKED)
    for found in (alone(scaled("ring"), **batch, use_cache=False), over_ring(scaled("ring"), batch, 2)):
        assert_alike(found[0], expected[0])
        # With scale 0 no gradient reaches q and k.
        assert_alike(
            torch.cat([x.flatten() for x in found[2].values()]), torch.cat([x.flatten() for x in expected[2].values()])
        )


@pytest.mark.parametrize(
    "more", [{}, {"use_cache": True}, {"attention_mask": torch.ones(1, N)}], ids=["", "cache", "ones"]
)
def test_documents_told_by_position_ids_alone_do_not_see_each_other(more):
    """R30. transformers itself looks for them only without a cache and without attention_mask."""
    model = make("Llama", "ring").eval()
    ids = tokens(1, N)
    other = ids.clone()
    other[0, 3] = (ids[0, 3] + 1) % VOCABULARY
    before, after = (model(x, position_ids=restarting(PACKED), **more).logits for x in (ids, other))
    changed = (before != after).any(-1)[0]
    assert changed.tolist() == [3 <= i < 7 for i in range(N)]


def test_documents_told_by_position_ids_alone_are_refused_over_a_ring():
    """R30: without mask= the ring cannot know them."""
    with pytest.raises(ValueError, match=r"layer 0, LlamaAttention: position_ids are \[.*local_inputs does"):
        over_ring(make("Llama", "ring"), packed_batch(), 2, change=lambda inputs, ring: inputs.update(mask=None))


def test_documents_may_be_told_by_cumulative_lengths():
    ids = tokens(1, N)
    borders = torch.tensor([0, 7, 8, 22], dtype=torch.int32)
    flash = {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": 14, "max_length_k": 14}
    batch = {"input_ids": ids, "labels": labels_of(ids, PACKED)}
    expected = eager(make("Llama", "eager"), ids, PACKED)
    for found, want in zip(over_ring(make("Llama", "ring"), {**batch, **flash}, 2), expected, strict=True):
        assert_alike(found, want)
    alone_with = alone(make("Llama", "ring"), **batch, **flash, position_ids=restarting(PACKED), use_cache=False)
    assert_alike(alone_with[2], expected[2])
    # Borders alone, where positions go on: rotary embeddings know distances only.
    assert_alike(alone(make("Llama", "ring"), **batch, **flash, use_cache=False)[2], expected[2])
    with pytest.raises(ValueError, match="layer 0, LlamaAttention: cu_seq_lens_q ends at .22., the call has 9 queries"):
        make("Llama", "ring")(tokens(1, 9), **flash)
    with pytest.raises(ValueError, match="layer 0, LlamaAttention: cu_seq_lens_q beside ring="):
        make("Llama", "ring")(ids, **flash, ring=rf.Ring())
    with pytest.raises(ValueError, match="position_ids and cu_seq_lens_q tell of different documents"):
        local_inputs({**batch, **flash, "position_ids": restarting([N])}, rf.Ring(), averaged_over=1)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_real_token(side):
    """R33, R34: alone and over a ring, loss and gradients too."""
    real = [13, 5]
    ids, mask = tokens(2, 13), torch.zeros(2, 13, dtype=torch.int64)
    for row, n in enumerate(real):
        mask[row, slice(0, n) if side == "right" else slice(13 - n, 13)] = 1
    labels = ids.masked_fill(mask == 0, -100)
    if side == "left":
        labels[1, 13 - real[1]] = -100  # which has nothing before it
    model = make("Mistral", "eager")
    parts = [row[m.bool()][None] for row, m in zip(ids, mask, strict=True)]
    logits = [model(part, use_cache=False).logits[0] for part in parts]
    losses = [
        torch.nn.functional.cross_entropy(x[:-1], part[0, 1:], reduction="sum")
        for x, part in zip(logits, parts, strict=True)
    ]
    loss = sum(losses) / (sum(real) - 2)
    loss.backward()
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    for found in (
        alone(make("Mistral", "ring"), **batch, use_cache=False),
        over_ring(make("Mistral", "ring"), batch, 2),
    ):
        for row, want in enumerate(logits):
            assert_alike(found[0][row][mask[row].bool()], want)
        assert_alike(found[1], loss)
        assert_alike(found[2], gradients(model))


def test_hidden_tokens_beside_a_ring_are_refused_with_the_remedy():
    """R33: each rank's part of attention_mask says nothing of the others'."""

    def hide(inputs, ring):
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs["attention_mask"][0, 0] = 0

    with pytest.raises(ValueError, match="layer 0, LlamaAttention: attention_mask hides tokens.*Padding.from_mask"):
        over_ring(make("Llama", "ring"), packed_batch(), 2, change=hide)


def test_a_mask_of_ones_beside_a_ring_hides_nothing():
    batch = packed_batch()
    expected = eager(make("Llama", "eager"), batch["input_ids"], PACKED)
    found = over_ring(
        make("Llama", "ring"),
        batch,
        2,
        change=lambda inputs, ring: inputs.update(attention_mask=torch.ones_like(inputs["input_ids"])),
    )
    assert_alike(found[2], expected[2])


def test_checkpointed_layers_give_the_same():
    """As Trainer's gradient_checkpointing does it: the arguments of a call come along when it is done again."""
    batch = packed_batch()
    expected = eager(make("Mistral", "eager"), batch["input_ids"], PACKED)
    model = make("Mistral", "ring")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_alike(over_ring(model, batch, 2)[2], expected[2])


def test_under_autocast_attention_is_that_of_16_bits():
    """Rotary embeddings leave q and k in fp32 beside a v of 16 bits; torch's own attention takes all in 16."""
    batch = packed_batch(lengths=[N])
    _, loss, grads = eager(make("Llama", "eager"), batch["input_ids"], [N])
    with torch.autocast("cpu", torch.bfloat16):
        found = alone(make("Llama", "ring"), **batch, use_cache=False)
        theirs = alone(make("Llama", "sdpa"), **batch, use_cache=False)
    assert_alike(found[1], loss, 0.02)
    errors = [
        sum(float((x - grads[name]).norm() / grads[name].norm()) for name, x in those.items())
        for those in (found[2], theirs[2])
    ]
    assert errors[0] <= 2 * errors[1]


CAUSAL = torch.ones(N, N, dtype=torch.bool).tril()[None, None]


@pytest.mark.parametrize("kind", ["boolean", "additive"])
def test_a_prepared_mask_that_is_causal_is_recognised(kind):
    """R36."""
    ids = tokens(1, N)
    mask = (
        CAUSAL if kind == "boolean" else torch.zeros(CAUSAL.shape).masked_fill(~CAUSAL, torch.finfo(torch.float32).min)
    )
    expected = eager(make("Llama", "eager"), ids, [N])
    found = alone(make("Llama", "ring"), input_ids=ids, attention_mask=mask, labels=ids, use_cache=False)
    for have, want in zip(found, expected, strict=True):
        assert_alike(have, want)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.rand(CAUSAL.shape, generator=torch.Generator().manual_seed(0)) < 0.5, "other keys than one interval"),
        (-torch.rand(CAUSAL.shape), "does more than show and hide"),
        (CAUSAL.long(), "does more than show and hide"),
    ],
    ids=["random", "a bias", "integers"],
)
def test_a_prepared_mask_that_is_no_interval_is_refused_by_the_name_of_the_layer(mask, message):
    """R36."""
    with pytest.raises(NotImplementedError, match=f"layer 0, LlamaAttention.*{message}"):
        make("Llama", "ring")(tokens(1, N), attention_mask=mask)


def test_a_prepared_mask_beside_a_ring_is_refused():
    with pytest.raises(NotImplementedError, match="attention_mask is a tensor.*say the rule by mask="):
        over_ring(
            make("Llama", "ring"), packed_batch(), 2, change=lambda inputs, ring: inputs.update(attention_mask=CAUSAL)
        )


def test_a_padding_mask_with_holes_is_refused():
    mask = torch.ones(1, N, dtype=torch.int64)
    mask[0, 5] = 0
    with pytest.raises(NotImplementedError, match="layer 0, LlamaAttention.*other keys than one interval"):
        make("Llama", "ring")(tokens(1, N), attention_mask=mask)


def layer(**facts):
    """A layer with nothing but what attention functions look at."""
    return SimpleNamespace(is_causal=True, layer_idx=3, config=None, **facts)


def asked(function, S, **more):
    """What transformers asks a mask function, in the words of the version that is here."""
    from transformers import AttentionMaskInterface

    is_new = "q_length" in inspect.signature(AttentionMaskInterface()["sdpa"]).parameters
    words = {"q_length": S, "q_offset": 0, "device": "cpu"} if is_new else {"cache_position": torch.arange(S)}
    return {
        "batch_size": 1,
        "kv_length": S,
        "kv_offset": 0,
        "mask_function": function,
        "attention_mask": None,
        **words,
        **more,
    }


def prefix(b, h, q, k):
    return (k <= q) | (k < 5)


def chunks(b, h, q, k):
    return (k <= q) & (k // 4 == q // 4)


def first_and_own(b, h, q, k):
    return (k == q) | (k == 0)


@pytest.mark.parametrize(
    ("function", "rule"), [(prefix, rf.Prefix(5)), (chunks, rf.Chunked(4) & rf.Causal())], ids=["prefix", "chunks"]
)
@pytest.mark.parametrize("pairs_at_once", [40, 2**26], ids=["3 rows at a time", "at once"])
def test_any_mask_of_intervals_that_a_model_makes_is_honoured_without_a_ring(
    function, rule, pairs_at_once, monkeypatch
):
    """R35, and chunks as Llama 4 has them, gradients included."""
    monkeypatch.setattr(sys.modules[show.__module__], "PAIRS_AT_ONCE", pairs_at_once)
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 13, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2, 4))
    want = dense_gradients(q=q.detach(), k=k.detach(), v=v.detach(), dout=dout.detach(), mask=rule, scale=0.5)
    shown = show(**asked(function, 13))
    out, _ = attend(layer(), *(x.transpose(1, 2) for x in (q, k, v)), shown, scaling=0.5)
    out.backward(dout.detach())
    for found, name in ((out, "out"), (q.grad, "dq"), (k.grad, "dk"), (v.grad, "dv")):
        assert_alike(found, want[name], 1e-10)


def test_a_mask_of_several_intervals_is_refused_by_the_name_of_the_layer():
    q, k, v = (torch.randn(1, heads, 13, 8) for heads in (4, 2, 2))
    with pytest.raises(NotImplementedError, match="^layer 3, SimpleNamespace: its mask shows some query other keys"):
        attend(layer(), q, k, v, show(**asked(first_and_own, 13)))


@pytest.mark.parametrize(
    ("function", "more", "message"),
    [
        (prefix, {}, "own mask shows other keys than Causal"),
        (chunks, {}, "own mask shows other keys than Causal"),
        (lambda b, h, q, k: k <= q, {"local_size": 64}, "its mask is local, of size 64, but its window is None"),
    ],
    ids=["prefix", "chunks", "chunks larger than a shard"],
)
def test_what_a_model_wants_beyond_causal_and_windows_is_refused_over_a_ring(function, more, message):
    """R35: a prefix is never silently causal. Each rank sees its own part of it only, so it is not guessed."""
    at = torch.arange(8)[None]

    def step(member):
        ring = rf.Ring(transport=member, layout=rf.Contiguous())
        q, k, v = (torch.randn(1, heads, 8, 8) for heads in (4, 2, 2))
        attend(layer(), q, k, v, show(**asked(function, 8, **more)), ring=ring, position_ids=at + 8 * ring.rank)

    with pytest.raises(NotImplementedError, match=f"^layer 3, SimpleNamespace: .*{message}"):
        run(2, step)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"position_bias": torch.zeros(1)}, "passes position_bias"),
        ({"output_attentions": True}, "output_attentions = True"),
        ({"dropout": 0.1}, "attention_dropout = 0.1 in training; must be 0"),
    ],
    ids=["a bias", "probabilities", "dropout"],
)
def test_what_cannot_be_served_is_refused_by_name(options, message):
    """R47: dropout."""
    q, k, v = (torch.randn(1, heads, 8, 8) for heads in (4, 2, 2))
    with pytest.raises(NotImplementedError, match=f"^layer 3, SimpleNamespace: {message}"):
        attend(layer(), q, k, v, None, **options)


def test_dropout_of_the_configuration_is_refused_in_training_and_ignored_in_evaluation():
    """R47."""
    model = build("Llama", "ring", attention_dropout=0.1)
    model.load_state_dict(make("Llama", "ring").state_dict())
    ids = tokens(1, N)
    with pytest.raises(NotImplementedError, match="layer 0, LlamaAttention: attention_dropout = 0.1 in training"):
        model.train()(ids)
    assert_alike(model.eval()(ids).logits, eager(make("Llama", "eager"), ids, [N])[0])


@pytest.mark.parametrize("layout", [rf.Zigzag(), rf.Contiguous()], ids=["zigzag", "contiguous"])
def test_positions_that_count_a_rank_s_own_tokens_are_refused(layout):
    """R62: those that a model makes up when none are given."""
    batch = {"input_ids": tokens(1, 16), "labels": tokens(1, 16)}
    with pytest.raises(
        ValueError, match=r"layer 0, LlamaAttention: position_ids are \[0, 1, 2.*this rank's tokens stand at"
    ):
        over_ring(make("Llama", "ring"), batch, 2, layout, change=lambda inputs, ring: inputs.pop("position_ids"))


def test_documents_may_keep_the_positions_of_the_whole_sequence():
    batch = packed_batch()
    whole = torch.arange(N)[None]
    found = over_ring(
        make("Llama", "ring"), batch, 2, change=lambda inputs, ring: inputs.update(position_ids=ring.shard(whole))
    )
    # Rotary embeddings know distances only.
    assert_alike(found[0], eager(make("Llama", "eager"), batch["input_ids"], PACKED)[0])


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (rf.Padding.right(N - 2, length=N), ValueError, "is causal, and mask Padding.* shows later tokens.*Causal"),
        (rf.Documents([N], causal=False), ValueError, "is causal, and mask Documents.* shows later tokens"),
        (rf.Prefix(5), ValueError, "is causal, and mask Prefix.* shows later tokens"),
        (CAUSAL, TypeError, "mask is Tensor; must be a Mask"),
    ],
    ids=["padding alone", "documents", "prefix", "a tensor"],
)
def test_a_mask_that_lets_a_causal_layer_see_later_tokens_is_refused(mask, error, message):
    with pytest.raises(error, match=f"^layer 0, LlamaAttention: {message}"):
        over_ring(make("Llama", "ring"), packed_batch(), 2, change=lambda inputs, ring: inputs.update(mask=mask))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"layer_types": ["linear_attention", "full_attention"]},
            "layers of type linear_attention, which know nothing of",
        ),
        ({"is_encoder_decoder": True}, "of an encoder and decoder"),
    ],
    ids=["recurrent layers", "encoder and decoder"],
)
def test_models_that_are_more_than_layers_of_attention_are_refused_over_a_ring(config, message):
    one = layer()
    one.config = SimpleNamespace(**config)
    q, k, v = (torch.randn(1, heads, 8, 8) for heads in (4, 2, 2))
    with pytest.raises(NotImplementedError, match=f"^layer 3, SimpleNamespace: .*{message}"):
        attend(one, q, k, v, None, ring=rf.Ring(), position_ids=torch.arange(8)[None])


def test_another_model_in_the_same_process_stays_as_it_is():
    """R67: bit for bit, before and after registration, during a call over a ring and after one that failed."""
    reference, ids = make("Llama", "eager").eval(), tokens(1, N)
    before = reference(ids).logits
    register()
    seen = []
    over_ring(make("Llama", "ring"), packed_batch(), 2, change=lambda inputs, ring: seen.append(reference(ids).logits))
    with pytest.raises(NotImplementedError):
        make("Llama", "ring")(ids, attention_mask=CAUSAL.long())
    assert all(torch.equal(before, after) for after in (*seen, reference(ids).logits))


def test_a_model_can_be_switched_on_and_off():
    """R67."""
    model, ids = make("Llama", "eager").eval(), tokens(1, N)
    if not hasattr(model, "set_attn_implementation"):
        pytest.skip("this transformers sets the attention of a model when it is made")
    eager_logits = model(ids).logits
    model.set_attn_implementation("ring")
    check_model(model)
    model.set_attn_implementation("eager")
    assert torch.equal(model(ids).logits, eager_logits)
    model.set_attn_implementation("ring")
    assert_alike(model(ids).logits, eager_logits)


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma2"])
def test_generation_without_a_ring_is_that_of_eager_attention(family):
    """R68: greedy, alone and with a sample padded on the left, past the window."""
    ids, mask = tokens(2, 7), torch.ones(2, 7, dtype=torch.int64)
    mask[1, :3] = 0
    made = [
        make(family, attention).eval().generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
        for attention in ("eager", "ring")
    ]
    assert made[0].shape == (2, 12) and torch.equal(*made)


def test_generation_over_a_ring_is_refused():
    """R68: by transformers, which does not know the argument; and by the layer, in the second step of a loop by hand."""
    model = make("Llama", "ring").eval()
    with pytest.raises(ValueError, match="ring"):
        model.generate(tokens(1, 7), max_new_tokens=5, ring=rf.Ring())
    ring = rf.Ring()
    first = model(tokens(1, 7), position_ids=torch.arange(7)[None], ring=ring, use_cache=True)
    with pytest.raises(
        NotImplementedError, match="layer 0, LlamaAttention: 1 queries and 8 keys.*To generate, leave ring="
    ):
        model(tokens(1, 1), position_ids=torch.tensor([[7]]), past_key_values=first.past_key_values, ring=ring)


def test_a_static_cache_is_refused_with_what_to_do():
    with pytest.raises(NotImplementedError, match="static caches.*Leave cache_implementation out"):
        make("Llama", "ring").eval().generate(tokens(1, 7), max_new_tokens=2, cache_implementation="static")


def test_a_model_with_an_attention_of_its_own_is_refused_or_stays_as_it_is():
    """Before it asked for masks by name, transformers 4 gave Bloom its own, whatever attention was named."""
    register()
    config = AutoConfig.for_model("bloom", vocab_size=64, hidden_size=32, n_layer=2, n_head=4)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="ring")
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    plain.load_state_dict(model.state_dict())
    logits = refusal = None
    try:
        logits = model.eval()(input_ids=tokens(1, 7)).logits
    except NotImplementedError as error:
        refusal = str(error)
    if logits is None:
        assert "the model's attention is its own and asks no registry" in refusal
    else:
        assert torch.equal(logits, plain.eval()(input_ids=tokens(1, 7)).logits)


@pytest.mark.parametrize("S", [3, 5])
def test_a_short_input_over_a_ring_is_exact(S):
    """R68. In evaluation (R61) each rank holds the logits of its own tokens only."""
    ids = tokens(1, S)
    batch = {"input_ids": ids, "labels": ids}
    expected = eager(make("Llama", "eager"), ids, [S])
    widths = []
    model = make("Llama", "ring").eval()
    with torch.no_grad():
        for ranks in (1, 2):
            found = over_ring(model, batch, ranks, change=lambda i, ring: widths.append(i["input_ids"].shape[1]))
            assert_alike(found[0], expected[0])
            assert_alike(found[1], expected[1])
    assert sorted(widths[1:]) == [S // 2, S - S // 2]


def test_fewer_tokens_than_ranks_are_refused():
    """R68."""
    with pytest.raises(
        ValueError, match="local_inputs: 1 tokens on 2 ranks leave some rank without any.*without a ring"
    ):
        over_ring(make("Llama", "ring"), {"input_ids": tokens(1, 1)}, 2)


@pytest.mark.parametrize("averaged_over", [1, 3])
def test_the_denominator_counts_the_whole_batch(averaged_over):
    """Under DDP gradients are averaged over the ranks; so are the losses that are reported."""
    batch = packed_batch()

    def step(member):
        inputs = local_inputs(batch, rf.Ring(transport=member), averaged_over=averaged_over)
        return inputs, float(inputs["num_items_in_batch"])

    for inputs, count in run(3, step):
        assert count == pytest.approx(2 * (N - len(PACKED)) / averaged_over)
        assert inputs["shift_labels"].shape == inputs["labels"].shape == inputs["input_ids"].shape
        assert bool((inputs["labels"] == -100).all())  # a model that would shift them again finds none


def test_micro_batches_share_one_denominator():
    """R41, as docs/huggingface.md has it, with gradients that are averaged over the ranks."""
    batches = [packed_batch(1, [9, 13]), packed_batch(1, [3])]
    models = [make("Llama", "ring") for _ in range(2)]

    def step(member):
        ring = rf.Ring(transport=member)
        parts = [local_inputs(batch, ring, averaged_over=2) for batch in batches]
        tokens = count_tokens([part["shift_labels"] for part in parts], ring, averaged_over=2)
        for part in parts:
            models[ring.rank](**{**part, "num_items_in_batch": tokens.count / tokens.averaged_over}).loss.backward()

    run(2, step)
    model = make("Llama", "eager")
    # Means over 20 and 2 tokens; `eager` clears the gradients that it gave before.
    many = {name: 20 / 22 * x.clone() for name, x in eager(model, batches[0]["input_ids"], [9, 13])[2].items()}
    few = eager(model, batches[1]["input_ids"], [3])[2]
    averaged = {name: (x + gradients(models[1])[name]) / 2 for name, x in gradients(models[0]).items()}
    assert_alike(averaged, {name: many[name] + 2 / 22 * x for name, x in few.items()})


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"labels": tokens(1, N)}, "batch has labels; must have input_ids"),
        ({"input_ids": tokens(1, N), "token_type_ids": tokens(1, N)}, "dims does not say where token_type_ids is cut"),
        ({"input_ids": tokens(1, N), "attention_mask": CAUSAL}, r"attention_mask has shape .*must be \[1, 22\]"),
        ({"input_ids": tokens(1, N), "attention_mask": torch.arange(N)[None]}, "other numbers than 0 and 1"),
        ({"input_ids": tokens(1, N), "position_ids": torch.arange(N)[None] + 2}, "must start at 0"),
        ({"input_ids": tokens(1, N), "position_ids": torch.arange(9)[None]}, "position_ids have shape"),
    ],
    ids=["no tokens", "an unknown name", "4 axes", "document ids", "positions from 2", "positions of another length"],
)
def test_a_batch_that_cannot_be_cut_is_refused_by_name(batch, message):
    """R36: what a batch says is never dropped."""
    with pytest.raises(ValueError, match=message):
        local_inputs(batch, rf.Ring(), averaged_over=1)


def test_other_names_are_cut_where_they_are_declared():
    ring = rf.Ring()
    kinds = tokens(1, N)
    inputs = local_inputs(
        {"input_ids": tokens(1, N), "token_type_ids": kinds}, ring, averaged_over=1, dims={"token_type_ids": 1}
    )
    assert (
        torch.equal(inputs["token_type_ids"], kinds) and "labels" not in inputs and "num_items_in_batch" not in inputs
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_models_whose_layers_get_the_ring_pass_the_check(family):
    model = make(family, "ring")
    check_model(model)
    assert model.training


def test_a_model_whose_layers_do_not_get_the_ring_fails_the_check():
    """Nothing else would tell: each rank would attend to its own tokens."""
    with pytest.raises(ValueError, match='LlamaForCausalLM gives other logits over a ring.*attn_implementation="ring"'):
        check_model(make("Llama", "eager"))
    model = make("Llama", "ring")
    forward = model.model.layers[1].forward
    model.model.layers[1].forward = lambda *a, ring=None, mask=None, **k: forward(*a, **k)
    with pytest.raises(ValueError, match="some layer does not get it"):
        check_model(model)


def test_a_model_with_a_loss_of_its_own_that_shifts_labels_fails_the_check():
    model = make("Llama", "ring")
    model.loss_function = lambda logits, labels, **others: torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
    )
    with pytest.raises(ValueError, match="has a loss of 0.000 over a ring, .*must take shift_labels"):
        check_model(model)


def test_a_name_that_transformers_takes_for_flash_attention_is_refused():
    with pytest.raises(ValueError, match="name = 'ringflash'; must not contain 'flash'"):
        register("ringflash")
    with pytest.raises(ValueError, match="name = 'sdpa' is taken"):
        register("sdpa")
