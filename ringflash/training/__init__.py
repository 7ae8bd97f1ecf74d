"""Helpers for training on sharded sequences."""

from ringflash.parallel.kept import keep_attention
from ringflash.training.batch import Packing, documents, position_ids, shard_batch, shift_labels
from ringflash.training.chunked_loss import linear_cross_entropy
from ringflash.training.loss import BatchTokens, count_tokens, token_loss
from ringflash.training.sequences import sequence_sums

__all__ = [
    "BatchTokens",
    "Packing",
    "count_tokens",
    "documents",
    "keep_attention",
    "linear_cross_entropy",
    "position_ids",
    "sequence_sums",
    "shard_batch",
    "shift_labels",
    "token_loss",
]
