"""Tiny models of several families, made from configurations here; and their reference, which is eager attention."""

import copy
from functools import lru_cache

import torch
import transformers

from ringflash.integrations.transformers import register

VOCABULARY, WINDOW = 61, 4
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
KINDS = ["sliding_attention", "full_attention"]
FAMILIES = {
    "Llama": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": WINDOW},
    "Gemma2": {"sliding_window": WINDOW, "attn_logit_softcapping": 2.0, "layer_types": KINDS},
    "Gemma3": {"sliding_window": WINDOW, "layer_types": KINDS},
    "GptOss": {"sliding_window": WINDOW, "layer_types": KINDS, "num_local_experts": 2, "num_experts_per_tok": 1},
}
# GPT-OSS came after the oldest transformers that we support.
FAMILIES = {name: facts for name, facts in FAMILIES.items() if hasattr(transformers, f"{name}ForCausalLM")}


@lru_cache
def weights(family):
    """Weights large enough for attention to matter; one model is made for them, and all others are filled from it."""
    model = build(family, "eager")
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(x.shape, generator=generator) * 0.3 + (x.dim() == 1 and "norm" in name)
        for name, x in model.state_dict().items()
    }


def build(family, attention, **facts):
    register()
    kind = "Gemma3Text" if family == "Gemma3" else family
    config = getattr(transformers, f"{kind}Config")(
        **{**SIZES, **FAMILIES[family], **facts}, attn_implementation=attention
    )
    return getattr(transformers, f"{family}ForCausalLM")(config)


@lru_cache
def _made(family, attention):
    model = build(family, attention)
    model.load_state_dict(weights(family))
    return model


def make(family, attention):
    """A model in train mode with the weights of its family."""
    return copy.deepcopy(_made(family, attention)).train()


def tokens(*shape):
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(1))


def restarting(lengths):
    return torch.cat([torch.arange(n) for n in lengths])[None]


def labels_of(ids, lengths):
    """As collators make them: the first token of a document is nobody's label."""
    labels, start = ids.clone(), 0
    for n in lengths:
        labels[:, start] = -100
        start += n
    return labels


def eager(model, ids, lengths):
    """(logits, loss, gradients by name) with every document by itself: documents cannot see each other."""
    model.zero_grad()
    logits, losses = [], []
    for part in ids.split(lengths, dim=1):
        logits.append(model(part, use_cache=False).logits)
        losses.append(
            torch.nn.functional.cross_entropy(logits[-1][:, :-1].flatten(0, 1), part[:, 1:].flatten(), reduction="sum")
        )
    loss = sum(losses) / (ids.shape[0] * (ids.shape[1] - len(lengths)))
    loss.backward()
    return torch.cat(logits, 1).detach(), loss.detach(), gradients(model)


def gradients(model):
    return {name: x.grad for name, x in model.named_parameters()}


def assert_alike(found, expected, tolerance=2e-5):
    """The largest difference by the largest entry."""
    for name, want in expected.items() if isinstance(expected, dict) else [("", expected)]:
        have = found[name] if isinstance(expected, dict) else found
        error = float((have - want).abs().max() / want.abs().max().clamp_min(1e-30))
        assert error <= tolerance, f"{name}: relative error {error:.1e}"
