"""Documents of the splits → batches of about a megabyte → their ids, in order, on many threads. No files."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import NamedTuple, TypeVar, cast

import numpy as np

from gpt2small_hf.data.corpus.encoder import Encoder, cut
from gpt2small_hf.data.corpus.readers import Block

BATCH_CHARS = 1_000_000

T = TypeVar("T")
R = TypeVar("R")


class DocumentPiece(NamedTuple):
    """A document, or a part of a long one."""

    split: str
    content: Block
    starts: bool  # whether the document starts here
    ends: bool


class EncodedBatch(NamedTuple):
    """The ids of one split in a batch."""

    ids: np.ndarray
    starts: np.ndarray  # where documents start in `ids`
    n_bytes: int  # of text


def batches(documents: Iterable[tuple[str, Iterator[Block]]], *, cuttable: bool) -> Iterator[list[DocumentPiece]]:
    """(split, blocks) of each document → pieces, in groups of BATCH_CHARS characters (or ids) or a little more.

    A long text is cut into several pieces if `cuttable`, and is one piece otherwise. An empty text gives no document.
    """
    batch, n_chars = [], 0
    for split, blocks in documents:
        starts = True
        for content, ends in with_last(pieces(blocks, cuttable=cuttable)):
            batch.append(DocumentPiece(split, content, starts, ends))
            starts = False
            n_chars += len(content)
            if n_chars >= BATCH_CHARS:
                yield batch
                batch, n_chars = [], 0
    if batch:
        yield batch


def pieces(blocks: Iterator[Block], *, cuttable: bool) -> Iterator[Block]:
    """One document's blocks → its pieces: text cut where its ids allow, ids as they come."""
    first = next(blocks, "")
    if not isinstance(first, str):
        yield first
        yield from blocks
        return
    texts = cast(Iterator[str], chain([first], blocks))
    yield from filter(None, cut(texts, BATCH_CHARS) if cuttable else ["".join(texts)])


def with_last(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Each item, and whether it is the last."""
    held: list[T] = []
    for item in items:
        if held:
            yield held.pop(), False
        held.append(item)
    if held:
        yield held.pop(), True


def encode_batch(batch: list[DocumentPiece], *, encoder: Encoder) -> dict[str, EncodedBatch]:
    """Encode a batch: for each split the ids of its pieces, with one end-of-text token after each document."""
    encoded = iter(encoder.encode([piece.content for piece in batch if isinstance(piece.content, str)]))
    ids = [next(encoded) if isinstance(piece.content, str) else piece.content for piece in batch]
    added = {}
    for split in dict.fromkeys(piece.split for piece in batch):
        stream, starts, n_tokens, n_bytes = [], [], 0, 0
        for piece, part in zip(batch, ids, strict=True):
            if piece.split != split:
                continue
            if piece.starts:
                starts.append(n_tokens)
            stream += [part, [encoder.eos_id]] if piece.ends else [part]
            n_tokens += len(part) + piece.ends
            n_bytes += len(piece.content.encode()) if isinstance(piece.content, str) else encoder.n_bytes(part)
        added[split] = EncodedBatch(np.concatenate(stream).astype(np.uint32), np.array(starts, np.int64), n_bytes)
    return added


def in_order(work: Callable[[T], R], items: Iterable[T], n_workers: int) -> Iterator[R]:
    """`map` on threads: results come in the order of the items, and at most 2 * n_workers + 1 items are in flight."""
    window: deque[Future[R]] = deque()
    with ThreadPoolExecutor(n_workers) as pool:
        try:
            for item in items:
                window.append(pool.submit(work, item))
                if len(window) > 2 * n_workers:
                    yield window.popleft().result()
            while window:
                yield window.popleft().result()
        finally:
            for future in window:
                future.cancel()
