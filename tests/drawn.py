"""What hypothesis draws for laws that must hold for every mask, layout and length: all kinds, composed, with batch rows."""

import torch
from hypothesis import assume
from hypothesis import strategies as st

import ringflash as rf

reach = st.none() | st.integers(0, 12)


@st.composite
def cuts(draw, length, pieces=6):
    """A length cut into up to `pieces` + 1 lengths, some of them zero."""
    borders = sorted(draw(st.lists(st.integers(0, length), max_size=pieces)))
    return [b - a for a, b in zip([0, *borders], [*borders, length], strict=True)]


@st.composite
def documents(draw, length, batch=None):
    is_causal = draw(st.booleans())
    if batch is None:
        lengths = draw(cuts(length))
        padding = lengths.pop() if draw(st.booleans()) else 0
        return rf.Documents(lengths, causal=is_causal, padding=padding)
    rows = [draw(cuts(length)) for _ in range(batch)]
    return rf.Documents(rows, causal=is_causal, padding=[row.pop() for row in rows])


@st.composite
def paddings(draw, length, batch):
    bounds = [sorted(draw(st.tuples(st.integers(0, length), st.integers(0, length)))) for _ in range(batch)]
    return rf.Padding([a for a, _ in bounds], [b for _, b in bounds], length=length)


@st.composite
def simple_masks(draw, length, batch=None):
    """One rule. batch: rows that rules may differ over; None for rules that serve all rows."""
    kinds = ["full", "causal", "window", "documents", "prefix", "chunked", "first"]
    kind = draw(st.sampled_from(kinds if batch is None else [*kinds, "row_documents", "padding", "row_prefix"]))
    match kind:
        case "full":
            return rf.Full()
        case "causal":
            return rf.Causal()
        case "window":
            return rf.Window(draw(reach), draw(reach))
        case "prefix":
            return rf.Prefix(draw(st.integers(0, length)))
        case "row_prefix":
            return rf.Prefix(tuple(draw(st.integers(0, length)) for _ in range(batch)))
        case "chunked":
            return rf.Chunked(draw(st.integers(1, length + 2)))
        case "first":
            return rf.FirstKeys(draw(st.integers(0, length)))
        case "padding":
            return draw(paddings(length, batch))
    return draw(documents(length, batch if kind == "row_documents" else None))


@st.composite
def masks(draw, length, batch=None):
    """One rule, or up to three that hold together."""
    mask = draw(simple_masks(length, batch))
    for _ in range(draw(st.integers(0, 2))):
        mask = mask & draw(simple_masks(length, batch))
    return mask


@st.composite
def unions(draw, length):
    """First tokens, as far as another rule lets them be seen, and what a third adds; only such as can be said."""
    first = rf.FirstKeys(draw(st.integers(0, 5))) & draw(st.just(rf.Causal()) | simple_masks(length))
    union = first | (rf.Causal() & draw(simple_masks(length)))
    if draw(st.booleans()):
        union = union & draw(simple_masks(length))
    try:
        for part in union.parts:
            part.check(torch.arange(length))
    except ValueError:
        assume(False)
    return union


@st.composite
def layouts(draw, length, mask=None):
    """Any layout that a sequence of this length can be cut by."""
    return draw(
        st.sampled_from([rf.Contiguous(), rf.Zigzag(), rf.Striped()])
        | st.builds(rf.Balanced, st.just(mask) if isinstance(mask, rf.Mask) else simple_masks(length))
        | st.builds(rf.DocumentZigzag, cuts(length))
    )
