"""Philox-4x32-10 once more, in numpy's 64-bit words, straight from the paper: what dropout's kept pairs are judged by."""

import numpy as np
import torch


def first_words(key, counters):
    """The first output word for counters uint64 [..., 4], each a 32-bit word, and a 64-bit key."""
    mask, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    c = [counters[..., i].astype(np.uint64) for i in range(4)]
    k = [np.uint64(key & 0xFFFFFFFF), np.uint64(key >> 32)]
    for round_ in range(10):
        if round_:
            k = [(k[0] + np.uint64(0x9E3779B9)) & mask, (k[1] + np.uint64(0xBB67AE85)) & mask]
        left, right = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(right >> shift) ^ c[1] ^ k[0], right & mask, (left >> shift) ^ c[3] ^ k[1], left & mask]
    return c[0]


def kept_pairs(seed, dropout, batch, heads, queries, keys):
    """Which pairs are kept, bool [B, H, Sq, Sk], where the last query stands at the last key."""
    at = np.meshgrid(
        np.arange(batch), np.arange(heads), np.arange(queries) + keys - queries, np.arange(keys), indexing="ij"
    )
    row, head, query, key = ((x % 2**32).astype(np.uint64) for x in at)
    words = first_words(seed, np.stack([query, key, head, row], -1))
    return torch.from_numpy((words >= round(dropout * 2**32)).astype(bool))
