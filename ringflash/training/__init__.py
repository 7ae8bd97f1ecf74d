"""Helpers for training on sharded sequences."""

from ringflash.training.batch import Packing, documents, position_ids, shard_batch, shift_labels

__all__ = [
    "Packing",
    "documents",
    "position_ids",
    "shard_batch",
    "shift_labels",
]
