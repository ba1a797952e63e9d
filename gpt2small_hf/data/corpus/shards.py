"""Append token ids to flat files; after a kill they are truncated to the last recorded counts.

`prepare.py` decides what is written; `data/text_dataset.py` reads it.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from gpt2small_hf.runs.layout import DataFolder
from gpt2small_hf.runs.records import SplitCounts

SHARD_TOKENS = 100_000_000
OFFSET = np.dtype("<u8")


class SplitWriter:
    """Appends documents of one split to its shards of SHARD_TOKENS ids each, and to its list of document starts."""

    def __init__(self, folder: DataFolder, split: str, dtype: np.dtype, counts: SplitCounts) -> None:
        """Append after `counts`; what the files contain beyond them is removed."""
        self.folder, self.split, self.dtype, self.counts = folder, split, dtype, counts
        n_full, used = divmod(counts.tokens, SHARD_TOKENS)
        keep = [folder.documents(split), *(folder.tokens(split, shard) for shard in range(n_full + bool(used)))]
        for file in folder.root.glob(f"{split}-*.bin"):
            if file not in keep:
                file.unlink()
        self.documents_file = reopen(folder.documents(split), counts.documents * OFFSET.itemsize)
        self.shard_file = reopen(folder.tokens(split, n_full), used * dtype.itemsize) if used else None

    def append(self, ids: np.ndarray, starts: np.ndarray, n_bytes: int) -> None:
        """Add `ids` (one at least), in which documents start at `starts`, made from `n_bytes` bytes of text."""
        self.documents_file.write((self.counts.tokens + starts).astype(OFFSET).tobytes())
        n_tokens = self.counts.tokens
        self.counts = replace(
            self.counts,
            tokens=n_tokens + len(ids),
            documents=self.counts.documents + len(starts),
            bytes=self.counts.bytes + n_bytes,
            max_id=max(self.counts.max_id, int(ids.max())),
        )
        while len(ids):
            shard, used = divmod(n_tokens, SHARD_TOKENS)
            if self.shard_file is None or used == 0:
                if self.shard_file:
                    sync(self.shard_file)
                    self.shard_file.close()
                self.shard_file = reopen(self.folder.tokens(self.split, shard), 0)
            now, ids = np.split(ids, [SHARD_TOKENS - used])
            self.shard_file.write(now.astype(self.dtype).tobytes())
            n_tokens += len(now)

    def flush(self) -> SplitCounts:
        """Put all of it on disk and return the counts."""
        sync(self.shard_file)
        sync(self.documents_file)
        return self.counts

    def finish(self) -> SplitCounts:
        """Write the stream's length last among the document starts. Returns: the counts, with the shards' names."""
        self.documents_file.write(np.array([self.counts.tokens], OFFSET).tobytes())
        self.flush()
        n_shards = math.ceil(self.counts.tokens / SHARD_TOKENS)
        files = [self.folder.tokens(self.split, shard).name for shard in range(n_shards)]
        return replace(self.counts, files=files)

    def close(self) -> None:
        self.documents_file.close()
        if self.shard_file:
            self.shard_file.close()


def reopen(path: Path, length: int) -> BinaryIO:
    """Open a file for appending after its first `length` bytes; the rest is dropped."""
    file = path.open("ab")
    file.truncate(length)
    return file


def sync(file: BinaryIO | None) -> None:
    if file:
        file.flush()
        os.fsync(file.fileno())
