"""Which documents are held out for validation. Deterministic, and the same whatever the order of the documents.

A whole document goes to one side, chosen by a hash of how it begins, so copies of a document never are in both splits.
In a corpus of a few long documents the tail of each is held out instead.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from itertools import chain, islice

from gpt2small_hf.data.corpus.readers import Block, Document
from gpt2small_hf.errors import UsageError

FEW_DOCUMENTS = 20
HEAD = 1 << 16  # number of characters (or ids) of a document that its hash covers
HASHES = 1 << 64


class Holdout:
    """Split documents into train and validation, with about `fraction` of the text in the latter."""

    def __init__(self, documents: Iterator[Document], fraction: float) -> None:
        """Choose the rule by the first documents: about 20 / `fraction` of them are opened here.

        - There are more: those with a low hash are held out, `fraction` of them all. About 20 are expected among those
          seen already, so that none at all happens once in e^20 corpora.
        - There are fewer: as many as fit in `fraction` of the bytes, in the order of their hashes.
        - There are fewer than 20: of each its tail.

        Raises: UsageError if all documents have the same beginning.
        """
        self.fraction = fraction
        self.tails = False
        self.below = 0
        self.chosen: set[int] = set()
        if not fraction:
            return
        limit = max(FEW_DOCUMENTS, math.ceil(20 / fraction))
        n_documents = 0
        sizes: dict[int, int] = {}
        for document in islice(documents, limit):
            n_documents += 1
            key = content_hash(next(document.blocks, ""))
            sizes[key] = sizes.get(key, 0) + document.size
        if n_documents < FEW_DOCUMENTS:
            self.tails = True
        elif len(sizes) < 2:
            raise UsageError(
                f"all {n_documents:,} documents have the same beginning, so none can be held out. "
                "Name other files with --validation_text, or pass --validation_fraction 0."
            )
        elif n_documents == limit:
            self.below = int(fraction * HASHES)
        else:
            room = fraction * sum(sizes.values())
            for key in sorted(sizes):
                if sizes[key] <= room:
                    self.chosen.add(key)
                    room -= sizes[key]
            self.chosen = self.chosen or {min(sizes, key=lambda key: (sizes[key], key))}

    @property
    def held_out(self) -> str | None:
        """What goes to validation, for meta.json: `tails` of documents, or whole `documents`; None if nothing does."""
        if not self.fraction:
            return None
        return "tails" if self.tails else "documents"

    def split(self, documents: Iterable[Document]) -> Iterator[tuple[str, Iterator[Block]]]:
        """(split, blocks) of each document, or of its head and of its tail. Read the one before asking for the next."""
        for document in documents:
            if self.tails:
                yield from head_and_tail(document, self.fraction)
            else:
                first = next(document.blocks, "")
                key = content_hash(first)
                side = "validation" if key < self.below or key in self.chosen else "train"
                yield side, chain([first], document.blocks)


def content_hash(block: Block) -> int:
    head = block[:HEAD]
    data = head.encode() if isinstance(head, str) else head.astype("<u4").tobytes()
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big")


def head_and_tail(document: Document, fraction: float) -> Iterator[tuple[str, Iterator[Block]]]:
    """A document's head for train, then its last `fraction` for validation, to be read in this order."""
    rest: list[Block] = []

    def head() -> Iterator[Block]:
        left = math.ceil(document.size * (1 - fraction))
        for block in document.blocks:
            length = len(block.encode()) if isinstance(block, str) else len(block)
            if length <= left:
                left -= length
                yield block
            else:
                at = line_start(block, left) if isinstance(block, str) else left
                rest.append(block[at:])
                yield block[:at]
                return

    yield "train", head()
    yield "validation", chain(rest, document.blocks)


def line_start(text: str, n_bytes: int) -> int:
    """Where the first line starts at or after `n_bytes` UTF-8 bytes of `text`; failing that a space, or right there."""
    at = len(text.encode()[:n_bytes].decode(errors="ignore"))
    line = text.find("\n", max(at - 1, 0)) + 1
    if 0 < line < len(text):
        return line
    space = text.find(" ", at)
    return space if space > 0 else at
