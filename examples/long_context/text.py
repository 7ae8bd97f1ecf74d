"""Real text for a byte-level language model: the Python standard library's own sources.

Every machine that can run this example has them. Documents (files) are laid end to end into one long stream and the
stream is cut into sequences of equal length: *packing*. No padding, no wasted token; the attention mask keeps the
documents of one sequence apart.

Everything here is a pure function of the text, the seed and an index, so all ranks compute the same batch and nothing
is communicated.
"""

import hashlib
import random
import sysconfig
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import torch

# Opens every document, so that its first real byte is predicted from something. Python refuses NUL in a source file.
START = b"\0"

# Packages that others installed, tests (half of the bytes), and folders that hold tables instead of programs.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}


@dataclass(frozen=True)
class Corpus:
    """Documents as bytes, each beginning with START."""

    train: tuple[bytes, ...]
    validation: tuple[bytes, ...]

    @property
    def fingerprint(self) -> int:
        """48 bits of a hash of the whole text: ranks with another Python would train on other text, unnoticed."""
        text_hash = hashlib.sha256()
        for document in (*self.train, *self.validation):
            text_hash.update(document)
        return int.from_bytes(text_hash.digest()[:6], "big")


@dataclass(frozen=True)
class Packed:
    """One sequence of S tokens made of whole or cut documents.

    tokens: [1, S] int64, the whole sequence. lengths: of its documents, in order; they sum to S.
    """

    tokens: torch.Tensor
    lengths: tuple[int, ...]


def standard_library(*, held_out: int = 16) -> Corpus:
    """Read the running interpreter's library, sorted by path; every `held_out`-th file is for validation."""
    root = Path(sysconfig.get_path("stdlib"))
    documents = []
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        # _sysconfigdata spells out how this machine built its Python: paths and compiler flags, unlike its neighbour's.
        if SKIPPED_FOLDERS.intersection(inside.parts) or path.name.startswith("_sysconfigdata"):
            continue
        text = path.read_bytes()
        if text and START not in text:
            documents.append(START + text)
    if len(documents) < held_out:
        raise FileNotFoundError(
            f"standard_library: {len(documents)} source files below {root}, at least {held_out} are needed; "
            "this Python was installed without its sources, use another one"
        )
    return Corpus(
        train=tuple(text for number, text in enumerate(documents, 1) if number % held_out),
        validation=tuple(text for number, text in enumerate(documents, 1) if number % held_out == 0),
    )


class Packing:
    """Sequences of `length` tokens by number: `packing[7]` is the same on every rank, in every run with this seed.

    An epoch lays all documents in a shuffled order into one stream, cuts it every `length` bytes and visits the cuts in
    a shuffled order. A document that crosses a cut becomes two, and the second half cannot look back at the first.
    """

    def __init__(self, documents: Sequence[bytes], *, length: int, seed: int) -> None:
        total = sum(map(len, documents))
        # A sequence longer than the text (a million tokens of validation) sees documents more than once.
        repeats = -(-length // total)
        self.documents = tuple(documents) * repeats
        self.length = length
        self.seed = seed
        self.per_epoch = total * repeats // length
        self._epoch = lru_cache(maxsize=1)(self._shuffle)

    def _shuffle(self, epoch: int) -> tuple[list[bytes], list[int], list[int]]:
        """Documents in this epoch's order, where each begins in the stream, and the order of the sequences."""
        shuffle = random.Random(f"{self.seed}/{epoch}").shuffle
        order = list(self.documents)
        shuffle(order)
        begins = [0, *accumulate(map(len, order))]
        sequences = list(range(self.per_epoch))
        shuffle(sequences)
        return order, begins, sequences

    def __getitem__(self, index: int) -> Packed:
        epoch, place = divmod(index, self.per_epoch)
        order, begins, sequences = self._epoch(epoch)
        begin = sequences[place] * self.length
        end = begin + self.length

        pieces = []
        document = bisect_right(begins, begin) - 1
        while begin < end:
            piece = order[document][begin - begins[document] : end - begins[document]]
            pieces.append(piece)
            begin += len(piece)
            document += 1

        text = torch.frombuffer(bytearray(b"".join(pieces)), dtype=torch.uint8)
        return Packed(tokens=text.long()[None], lengths=tuple(map(len, pieces)))
