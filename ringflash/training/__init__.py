"""Helpers for training on sharded sequences."""

from ringflash.training.batch import position_ids, shift_labels

__all__ = ["position_ids", "shift_labels"]
