"""Let the model write. Short, so one process does it: on the whole weights, without the ring."""

import torch

import ringflash as rf
from long_context.model import Transformer
from long_context.text import START


@torch.no_grad()
def write(model: Transformer, prompt: str, *, length: int, temperature: float, seed: int) -> str:
    """Continue `prompt` by `length` bytes, one after another. temperature 0 takes the likeliest byte each time."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    prefix = START + prompt.encode()
    # One buffer of the final size for every byte: kernels meet a single shape, and what is not written yet cannot be
    # seen, the mask is causal. Quadratic where a cache of keys would be linear; this is a few hundred bytes.
    tokens = torch.zeros(1, len(prefix) + length, dtype=torch.int64, device=device)
    tokens[0, : len(prefix)] = torch.tensor(list(prefix))
    positions = torch.arange(tokens.shape[1], device=device)
    for place in range(len(prefix), tokens.shape[1]):
        logits = model(tokens, positions, rf.Causal())[0, place - 1].float().cpu()
        logits[START[0]] = -torch.inf  # it opens documents and is never a label
        if temperature == 0:
            tokens[0, place] = logits.argmax()
        else:
            chances = (logits / temperature).softmax(dim=0)
            tokens[0, place] = torch.multinomial(chances, 1, generator=generator)[0]
    # A byte-level model may end inside a character, or write half of one.
    return bytes(tokens[0, len(START) :].tolist()).decode("utf-8", errors="replace")
