"""docs/coming-from.md: its new lines run in the order in which they stand, alone and on a ring of two alike."""

import re
from pathlib import Path

import torch

import ringflash as rf
from ringflash.ring import Ring
from ringflash.testing.oracle import dense_gradients
from tests.rings import in_process

PAGE = Path(__file__).resolve().parents[1] / "docs" / "coming-from.md"
# A result on the whole sequence of each section: its heading and what its lines leave behind.
RESULTS = {
    "ring-flash-attention": "packed.gather(out)",
    "USP (yunchang)": "ring.gather(out)",
    "PyTorch's context parallel": "together.transpose(1, 2)",
    "TransformerEngine": "ring.gather(out)",
}


def sections():
    """Heading -> code, the first before any heading."""
    heading, *rest = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.M)
    found = {"": heading} | {part.split("\n")[0]: part for part in rest}
    return {title: "\n".join(re.findall(r"```python\n(.*?)```", text, re.S)) for title, text in found.items()}


def results_of(ring):
    """On one ring: the function of ring-flash-attention finds its group by itself, so it is left to its own tests there."""
    names, results = {"ring_under_test": ring}, {}
    code = sections()
    start = code.pop("").replace("ring = rf.Ring()", "ring = ring_under_test")
    generator = torch.Generator().manual_seed(0)
    start = start.replace("torch.manual_seed(0)\n", "").replace(
        "torch.randn(1, 64, heads, 16)", "draw(1, 64, heads, 16)"
    )
    names["draw"] = lambda *shape: torch.randn(shape, generator=generator)
    exec(compile(start, str(PAGE), "exec"), names)
    for title, lines in code.items():
        if ring.ranks > 1:
            lines = lines.replace("out = zigzag_ring_flash_attn_func(q, k, v, causal=True)", "")
        exec(compile(lines, str(PAGE), "exec"), names)
        results[title] = eval(RESULTS[title], names)
    return results


PACKED = rf.Documents([24, 40], causal=True)
MASKS = {"ring-flash-attention": PACKED, "TransformerEngine": PACKED}  # and the others are causal


def test_new_lines_give_the_same_alone_and_on_a_ring():
    alone = results_of(Ring())
    assert set(alone) == set(RESULTS)
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, 64, heads, 16, generator=generator) for heads in (8, 2, 2)]
    for title, result in alone.items():
        expected = dense_gradients(*whole, MASKS.get(title, rf.Causal()), torch.ones(1, 64, 8, 16))["out"]
        torch.testing.assert_close(result.double(), expected.double(), rtol=0, atol=2e-5)
    for results in in_process(2, rf.Zigzag(), results_of):
        for title, expected in alone.items():
            torch.testing.assert_close(results[title], expected, rtol=0, atol=2e-6)
