"""What would be wrong over a ring without a word: it is right, or refused by name."""

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from transformers import StaticCache

import ringflash as rf
from ringflash.integrations.transformers import check_model, local_inputs
from ringflash.integrations.transformers.rules import Layer, own_rule
from ringflash.integrations.transformers.shown import show
from tests.integrations.families import SIZES, assert_alike, build, eager, labels_of, make, restarting, tokens
from tests.integrations.test_transformers import alone, asked, over_ring

DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
LONG = {
    "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "rope_theta": 10000.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip


def rotary(attention, kind, longest):
    torch.manual_seed(0)
    facts = {"max_position_embeddings": longest, "rope_parameters": dict(kind)}
    return build("Llama", attention, **facts).train()


@pytest.mark.parametrize(("kind", "longest"), [(DYNAMIC, 16), (LONG, 64)], ids=["dynamic", "longrope"])
@pytest.mark.parametrize(("ranks", "length"), [(2, 16), (2, 19), (4, 25), (2, 40)], ids=str)
def test_rotary_embeddings_that_change_with_the_length(kind, longest, ranks, length):
    """Each rank goes by its own last position: the frequencies must be alike on all, or it is refused."""
    ids = tokens(1, length)
    batch = {"input_ids": ids, "labels": labels_of(ids, [length])}
    is_served = length <= 16 or (kind is LONG and length == 40)
    if not is_served:
        with pytest.raises(
            NotImplementedError, match=f"layer 0.*'{kind['rope_type']}' change with the length beyond 16"
        ):
            over_ring(rotary("ring", kind, longest), batch, ranks)
        return
    expected = alone(rotary("eager", kind, longest), **batch, use_cache=False)
    for found, want in zip(over_ring(rotary("ring", kind, longest), batch, ranks), expected, strict=True):
        assert_alike(found, want)


def test_packed_documents_go_by_their_own_lengths():
    ids, lengths = tokens(1, 40), [30, 10]
    batch = {"input_ids": ids, "labels": labels_of(ids, lengths), "position_ids": restarting(lengths)}
    with pytest.raises(NotImplementedError, match="'longrope' change with the length"):
        over_ring(rotary("ring", LONG, 64), batch, 2)


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma3"])
def test_a_static_cache_is_read_as_it_was_when_the_mask_was_made(family):
    ids, found = tokens(1, 12), {}
    for attention in ("eager", "ring"):
        model = make(family, attention).eval()
        cache = StaticCache(config=model.config, max_cache_len=16)
        with torch.no_grad():
            steps = [
                model(ids[:, a:b], past_key_values=cache, use_cache=True).logits for a, b in ((0, 8), (8, 11), (11, 12))
            ]
        found[attention] = torch.cat(steps, 1)
    assert_alike(found["ring"], found["eager"])


def test_keys_that_the_mask_knows_nothing_of_are_refused():
    shown = show(**asked(lambda b, h, q, k: k <= q, 6))
    layer = Layer(torch.nn.Linear(1, 1), 6, 6, None, True)
    assert own_rule(layer, shown, None, None) == rf.Causal()
    with pytest.raises(NotImplementedError, match="attends to 9 keys, and its mask knows 6"):
        own_rule(Layer(torch.nn.Linear(1, 1), 6, 9, None, True), shown, None, None)


@pytest.mark.parametrize(
    ("lengths", "mask", "is_right"),
    [
        ([23], None, False),
        ([9, 14], None, False),
        ([23], rf.Full(), True),
        ([9, 14], rf.Documents([9, 14], causal=False), True),
    ],
    ids=["language model's", "packed", "full", "documents"],
)
def test_a_bidirectional_model_is_not_served_as_a_language_model(lengths, mask, is_right):
    sizes = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    models = {}
    for attention in ("eager", "ring"):
        torch.manual_seed(0)
        config = transformers.BertConfig(**sizes, attn_implementation=attention)
        models[attention] = transformers.BertModel(config).eval()
    ids = tokens(1, 23)

    def step(member):
        ring = rf.Ring(transport=member)
        inputs = local_inputs({"input_ids": ids, "position_ids": restarting(lengths)}, ring, averaged_over=1)
        inputs["mask"] = inputs["mask"] if mask is None else mask
        with torch.no_grad():
            return ring.gather(models["ring"](**inputs).last_hidden_state, length=23)

    if not is_right:
        with pytest.raises(
            ValueError, match=r"BertSelfAttention: is not causal, and mask .* shows no later tokens; pass mask=Full"
        ):
            rf.parallel.inprocess.run(2, step)
        return
    with torch.no_grad():
        parts = [models["eager"](input_ids=part).last_hidden_state for part in ids.split(lengths, 1)]
    assert_alike(rf.parallel.inprocess.run(2, step)[0], torch.cat(parts, 1))


def test_a_model_that_looks_into_its_mask_is_told_what_it_is():
    with pytest.raises(AttributeError, match=r"asks its mask for 'dtype'.*attn_implementation='eager'"):
        show(**asked(lambda b, h, q, k: k <= q, 6)).dtype  # noqa: B018
    assert not hasattr(show(), "size")


def test_a_ring_that_is_none_is_named():
    ids = tokens(1, 8)
    with pytest.raises(TypeError, match=r"layer 0, LlamaAttention: ring is str; must be a Ring"):
        make("Llama", "ring")(ids, position_ids=torch.arange(8)[None], ring="cp", mask=rf.Causal())


def test_one_document_may_be_said_twice():
    """By a batch of one document from DataCollatorWithFlattening(return_flash_attn_kwargs=True)."""
    ids, borders = tokens(1, 19), torch.tensor([0, 19], dtype=torch.int32)
    batch = {"input_ids": ids, "labels": labels_of(ids, [19]), "position_ids": restarting([19])}
    logits, _, _ = over_ring(make("Llama", "ring"), {**batch, "cu_seq_lens_q": borders, "cu_seq_lens_k": borders}, 2)
    assert_alike(logits, eager(make("Llama", "eager"), ids, [19])[0])
    with pytest.raises(ValueError, match="tell of different documents"):
        over_ring(make("Llama", "ring"), {**batch, "cu_seq_lens_q": torch.tensor([0, 9, 19])}, 2)


def test_models_that_count_positions_in_another_way_fail_the_check():
    sizes = {**SIZES, "is_decoder": True, "max_position_embeddings": 64}
    model = transformers.RobertaForCausalLM(transformers.RobertaConfig(**sizes, attn_implementation="ring"))
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.3)
    with pytest.raises(ValueError, match="gives other logits when it makes up positions itself.*such as Roberta"):
        check_model(model)


@pytest.mark.parametrize("kind", ["Model", "ForSequenceClassification", "ForQuestionAnswering"])
def test_models_of_another_kind_fail_the_check_with_a_word(kind):
    config = transformers.LlamaConfig(**SIZES, attn_implementation="ring")
    with pytest.raises(ValueError, match=f"check_model: Llama{kind} does not give logits"):
        check_model(getattr(transformers, f"Llama{kind}")(config))


def compiled_against_eager(what, batches):
    """In a worker of two: the largest differences of loss and of gradients, over batches of documents of these lengths."""
    ring, worst = rf.Ring(), 0.0
    plain, compiled = make("Gemma2", "ring"), make("Gemma2", "ring")
    if what == "model":
        called = torch.compile(compiled, backend="aot_eager")
    else:
        called = compiled
        for layer in compiled.model.layers:
            layer.compile(backend="aot_eager")
    for lengths in batches:
        ids = tokens(1, sum(lengths))
        batch = {"input_ids": ids, "labels": labels_of(ids, lengths), "position_ids": restarting(lengths)}
        inputs = local_inputs(batch, ring, averaged_over=1)
        losses = [model(**inputs, use_cache=False).loss for model in (plain, called)]
        for loss in losses:
            loss.backward()
        pairs = [losses, *((a.grad, b.grad) for a, b in zip(plain.parameters(), compiled.parameters(), strict=True))]
        worst = max([worst, *(float((a - b).detach().abs().max()) for a, b in pairs)])
    return worst


@pytest.mark.parametrize("what", ["model", "layers"])
def test_compiled_models_and_layers_give_the_same_over_a_ring(own_workers, what):
    batches = [[22], [10, 12], [4, 18], [7, 9, 15]]
    assert max(own_workers(2).run(compiled_against_eager, what, batches, timeout_s=150.0)) < 1e-5


def test_a_compiled_model_gives_the_same_alone():
    ids, lengths = tokens(2, 22), [8, 14]
    inputs = {
        "input_ids": ids,
        "labels": labels_of(ids, lengths),
        "position_ids": restarting(lengths),
        "use_cache": False,
    }
    found = torch.compile(make("Mistral", "ring"), backend="aot_eager")(**inputs)
    expected = make("Mistral", "ring")(**inputs)
    assert_alike(found.logits.detach(), expected.logits.detach())
    assert_alike(found.loss.detach(), expected.loss.detach())
