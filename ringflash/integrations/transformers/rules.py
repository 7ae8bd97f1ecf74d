"""Who sees whom in a layer: by the model's own mask, or where a ring or a mask was given by that and the layer's window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ringflash.integrations.transformers.shown import Ends, Shown, as_mask, blocks_of, cut_at, ends_of, is_plain, read
from ringflash.ring import Ring
from ringflash.schedule.documents import Documents, Padding
from ringflash.schedule.integers import integers
from ringflash.schedule.layout import shard_positions
from ringflash.schedule.mask import Causal, Full, Intersection, Mask, Union, Window

KINDS = {"full_attention", "sliding_attention", "attention"}  # of layers that a ring can serve, by config.layer_types


@dataclass(frozen=True)
class Layer:
    """A layer as its attention function sees it.

    queries, keys: tokens of the call.
    window: tokens that a query sees at most, itself included; None for all.
    said_causal: what the layer says of this call; None is what its module says of all.
    """

    module: nn.Module
    queries: int
    keys: int
    window: int | None
    said_causal: bool | None

    def __str__(self) -> str:
        return f"layer {getattr(self.module, 'layer_idx', '?')}, {type(self.module).__name__}"

    @property
    def remedy(self) -> str:
        return 'Use attn_implementation="eager" for this model'

    @property
    def is_causal(self) -> bool:
        return bool(getattr(self.module, "is_causal", True) if self.said_causal is None else self.said_causal)

    @property
    def windowed(self) -> Mask:
        """The layer's window alone."""
        if self.window is None:
            return Full()
        return Window(self.window - 1, None if self.is_causal else self.window - 1)

    @property
    def rule(self) -> Mask:
        """What the layer shows of a sequence without documents or padding."""
        return (Causal() if self.is_causal else Full()) & self.windowed


def own_rule(layer: Layer, shown: Shown | Tensor | None, position_ids: Tensor | None, borders: Tensor | None) -> Mask:
    """Of a call without ring and mask: what the model's mask shows, cut where position ids start again at 0.

    borders: cumulative lengths of the documents, as collators for FlashAttention give them.
    """
    kept = shown.kept if isinstance(shown, Shown) else {}
    key = layer.is_causal, layer.keys
    rule: Mask | None = kept.get(key)
    if rule is None:
        ends = _ends(layer, shown)
        for is_border in (_restarts(layer, position_ids), _from_borders(layer, borders)):
            if is_border is not None and bool(is_border.any()):
                ends = cut_at(ends, is_border)
        rule = kept[key] = as_mask(ends, layer.keys)
    return rule


def _ends(layer: Layer, shown: Shown | Tensor | None) -> Ends:
    if shown is None:
        return ends_of(layer.rule, layer.queries, layer.keys)
    if isinstance(shown, Shown):
        if layer.keys > shown.asked["kv_length"]:
            raise NotImplementedError(
                f"{layer}: attends to {layer.keys} keys, and its mask knows {shown.asked['kv_length']}. {layer.remedy}"
            )
        ends = shown.ends
    elif is_plain(shown, layer.keys):
        ends = read(blocks_of(shown, layer.keys), layer.keys)
    else:
        raise NotImplementedError(
            f"{layer}: attention_mask of shape {tuple(shown.shape)} and {shown.dtype} does more than show and hide; must be "
            f"[B, 1, Sq, Sk], boolean, or 0 where shown and the lowest number where hidden. {layer.remedy}"
        )
    if ends is None:
        raise NotImplementedError(
            f"{layer}: its mask shows some query other keys than one interval whose ends move on with the queries. "
            f"{layer.remedy}"
        )
    if ends[0].shape[-1] != layer.queries:
        raise ValueError(f"{layer}: a mask of {ends[0].shape[-1]} queries meets {layer.queries} queries")
    return ends


def _restarts(layer: Layer, position_ids: Tensor | None) -> Tensor | None:
    """Where documents begin: transformers itself looks for them only where neither a mask nor a cache is there."""
    if position_ids is None or not layer.is_causal or layer.queries != layer.keys or position_ids.dim() != 2:
        return None
    return _first_false(position_ids.cpu() == 0)


def _jumps(position_ids: Tensor) -> Tensor:
    """Where transformers takes a new document to begin."""
    return _first_false(position_ids.diff(dim=-1, prepend=position_ids[:, :1]) != 1)


def _first_false(is_border: Tensor) -> Tensor:
    is_border = is_border.clone()
    is_border[:, :1] = False
    return is_border


def _from_borders(layer: Layer, borders: Tensor | None) -> Tensor | None:
    if borders is None:
        return None
    ends = integers(f"{layer}: cu_seq_lens_q", borders.flatten())
    if ends[:1] != [0] or ends[-1] != layer.queries or layer.queries != layer.keys:
        raise ValueError(
            f"{layer}: cu_seq_lens_q ends at {ends[-1:]}, the call has {layer.queries} queries and {layer.keys} keys; must "
            "be the borders of the documents of these tokens"
        )
    is_border = torch.zeros(1, layer.queries, dtype=torch.bool)
    is_border[0, [end for end in ends[:-1] if end > 0]] = True
    return is_border


def said_rule(
    layer: Layer,
    shown: Shown | Tensor | None,
    position_ids: Tensor | None,
    borders: Tensor | None,
    ring: Ring | None,
    mask: Mask | Union | None,
    length: int | None,
) -> Mask | Union:
    """Of a call with a ring or a mask: `mask`, or all that comes before, within the layer's window.

    Checked once per forward and kind of layer: that the model's own mask asks for nothing else, and that position ids are
    those of this rank's tokens.
    """
    kept = shown.kept if isinstance(shown, Shown) else {}
    key = (ring, mask, length, layer.window, layer.is_causal)
    if key not in kept:
        _check_call(layer, shown, borders, mask, ring)
        if ring is None:
            N = layer.keys
        else:
            known = mask.length if isinstance(mask, Mask) else None
            N = ring.whole_length(str(layer), layer.keys, known if length is None else length)
        here = torch.arange(N) if ring is None else ring.positions(N)
        said: Mask | Union = (Causal() if layer.is_causal else Full()) if mask is None else mask
        parts = said.parts if isinstance(said, Union) else (said,)
        _check_causal(layer, parts, N)
        if ring is not None:
            _check_rope(layer, parts, N, ring)
        ids = _check_positions(layer, parts, here, position_ids)
        _check_own_mask(layer, shown, ids)
        kept[key] = said & layer.windowed
    rule: Mask | Union = kept[key]
    return rule


def _check_call(
    layer: Layer, shown: Shown | Tensor | None, borders: Tensor | None, mask: Mask | Union | None, ring: object
) -> None:
    if ring is not None and not isinstance(ring, Ring):
        raise TypeError(f"{layer}: ring is {type(ring).__name__}; must be a Ring, such as Ring(mesh['cp'])")
    if mask is not None and not isinstance(mask, (Mask, Union)):
        raise TypeError(f"{layer}: mask is {type(mask).__name__}; must be a Mask such as Causal() or Documents(...)")
    config = getattr(layer.module, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise NotImplementedError(f"{layer}: of an encoder and decoder; with ring= or mask= only decoders are served")
    others = sorted(set(getattr(config, "layer_types", None) or ()) - KINDS)
    if others:
        raise NotImplementedError(
            f"{layer}: the model has layers of type {', '.join(others)}, which know nothing of a ring; must be full or "
            "sliding attention. Leave ring= and mask= out"
        )
    if layer.queries != layer.keys:
        raise NotImplementedError(
            f"{layer}: {layer.queries} queries and {layer.keys} keys, as in generation from a cache; with ring= or mask= "
            "they must be the same tokens. To generate, leave ring= and mask= out and give every rank the whole prompt"
        )
    if borders is not None:
        raise ValueError(
            f"{layer}: cu_seq_lens_q beside ring= or mask=; say documents by mask=, as local_inputs does, and leave it out"
        )
    if isinstance(shown, Tensor):
        raise NotImplementedError(
            f"{layer}: attention_mask is a tensor of shape {tuple(shown.shape)}; with ring= or mask= say the rule by mask="
        )
    if isinstance(shown, Shown) and shown.local_size not in (None, layer.window):
        raise NotImplementedError(
            f"{layer}: its mask is local, of size {shown.local_size}, but its window is {layer.window}; chunks are not "
            "served over a ring. Leave ring= and mask= out"
        )


def _check_causal(layer: Layer, parts: tuple[Mask, ...], N: int) -> None:
    """Of the whole sequence, so that all ranks refuse alike."""
    position = torch.arange(N)
    for part in parts if layer.is_causal else ():
        lo, hi = part.bounds(position) if part != Causal() else (position, position)
        if bool(((hi > position + 1) & (lo < hi)).any()):
            raise ValueError(
                f"{layer}: is causal, and mask {part} shows later tokens; must show none. Write Causal() & ..., or "
                "Documents(..., causal=True)"
            )
    if not layer.is_causal and all(_hides_all_later(part, position) for part in parts):
        raise ValueError(
            f"{layer}: is not causal, and mask {' | '.join(map(str, parts))}, such as local_inputs makes, shows no later "
            "tokens; pass mask=Full(), or Documents(..., causal=False)"
        )


def _hides_all_later(part: Mask, position: Tensor) -> bool:
    """Of positions that see earlier ones."""
    lo, hi = part.bounds(position)
    is_seen = lo < hi
    return bool((hi <= position + 1)[is_seen].all() and (lo < position)[is_seen].any())


def _check_rope(layer: Layer, parts: tuple[Mask, ...], N: int, ring: Ring) -> None:
    """Rotary frequencies that change with the length of the sequence: each rank finds them by its own positions."""
    config = getattr(layer.module, "config", None)
    for kind, longest in _rope_by_length(config):
        if ring.ranks == 1 or longest >= N:
            continue
        positions_restart = any(_restarting(part) for part in parts)
        shards = (shard_positions(ring.layout, N, rank, ring.ranks) for rank in range(ring.ranks))
        ends = [int(positions[-1]) + 1 for positions in shards if positions.numel()]
        # Of two sets of frequencies the second serves all that is longer.
        if kind != "longrope" or positions_restart or min(ends) <= longest:
            raise NotImplementedError(
                f"{layer}: rotary embeddings of type {kind!r} change with the length beyond {longest} tokens, and each rank "
                f"would go by its own part of {N}. Leave ring= out, or choose embeddings that do not, such as 'yarn'"
            )


def _rope_by_length(config: object) -> list[tuple[str, int]]:
    """(type, the length up to which frequencies stay as they are) of rotary embeddings that depend on the length."""
    said = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(said, Mapping):
        return []
    longest = getattr(config, "max_position_embeddings", 0)
    found = []
    for one in (said, *(value for value in said.values() if isinstance(value, Mapping))):
        kind = one.get("rope_type", one.get("type"))
        if kind == "dynamic":
            found.append((kind, longest))
        elif kind == "longrope":
            original = one.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            found.append((kind, original or longest))
    return found


def _restarting(part: Mask) -> list[Mask]:
    """What a mask is made of after whose borders positions may count from 0."""
    rules = part.masks if isinstance(part, Intersection) else (part,)
    return [rule for rule in rules if isinstance(rule, (Documents, Padding))]


def _check_positions(layer: Layer, parts: tuple[Mask, ...], here: Tensor, position_ids: Tensor | None) -> Tensor:
    """The position ids on the CPU, if they are those of this rank's tokens: in the whole sequence, or in each document."""
    if position_ids is None or position_ids.dim() != 2:
        found = "no position_ids" if position_ids is None else f"position_ids of shape {tuple(position_ids.shape)}"
        raise NotImplementedError(
            f"{layer}: gets {found}, so whether they are those of this rank's tokens cannot be seen; must be [1 or B, S]. "
            "Leave ring= and mask= out"
        )
    ids = position_ids.to("cpu", torch.int64)
    seen, starts = torch.zeros((), dtype=torch.bool), torch.zeros((), dtype=torch.int64)
    for part in parts:
        lo, hi = part.bounds(here)
        seen = seen | (lo < hi)
        for rule in _restarting(part):
            starts = torch.maximum(starts, rule.bounds(here)[0])
    if ids.shape[-1] != here.shape[0] or not any(
        bool(((ids == expected) | ~seen).all()) for expected in (here, here - starts)
    ):
        raise ValueError(
            f"{layer}: position_ids are {_shortened(ids)}; this rank's tokens stand at {_shortened(here)} of the whole "
            "sequence. Pass those, or positions in each document: local_inputs does, or ring.shard(position_ids, 1) of the "
            "whole sequence's, together with mask="
        )
    return ids


def _check_own_mask(layer: Layer, shown: Shown | Tensor | None, ids: Tensor) -> None:
    """Refuse a model that wants something else than its layers say: a prefix, chunks, an overlay, hidden tokens."""
    if not isinstance(shown, Shown):
        return
    if shown.hides_tokens:
        raise ValueError(
            f"{layer}: attention_mask hides tokens; with ring= or mask= say so by mask=Causal() & "
            "Padding.from_mask(attention_mask) of the WHOLE batch, as local_inputs does, and leave attention_mask out"
        )
    jumps = _jumps(ids)
    expected = cut_at(ends_of(layer.rule, layer.queries, layer.keys), jumps)
    found = None if shown.ends is None else cut_at(shown.ends, jumps)
    if found is None or not all(bool((a == b).all()) for a, b in zip(found, expected, strict=True)):
        raise NotImplementedError(
            f"{layer}: the model's own mask shows other keys than {layer.rule}, such as a prefix or images that see "
            "themselves; that is not served over a ring. Leave ring= and mask= out"
        )


def _shortened(ids: Tensor) -> str:
    numbers = ids.flatten()[:8].tolist()
    return f"{numbers}{'...' if ids.numel() > 8 else ''}"
