"""A prepared folder → rows for training: a map-style `Dataset` over memory-mapped files, and its collator.

`tokens.py` writes the folder, `packing.py` says where rows lie.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpt2small_hf.data.packing import count_rows, row_span
from gpt2small_hf.runs import DataFolder, UsageError, read_json


class TokenDataset(torch.utils.data.Dataset[dict[str, np.ndarray]]):
    """Rows of `seq_len` tokens cut from one split's token stream. Nothing is read before a row is asked for."""

    def __init__(self, folder: Path, split: str, seq_len: int, *, max_rows: int | None = None) -> None:
        """Open a split; of its rows, only the first `max_rows` if given.

        Raises: UsageError if the folder is not a whole prepared set, has no such split, or not one row of it.
        """
        meta = read_meta(folder)
        check_whole(folder, meta)
        if split not in meta["splits"]:
            raise UsageError(
                f"{folder} has no {split} split (it has {', '.join(meta['splits'])}). "
                "Prepare it with --validation_fraction above 0 or with --validation_text."
            )
        counts = meta["splits"][split]
        self.seq_len = seq_len
        self.n_tokens: int = counts["tokens"]
        self.bytes_per_token: float = counts["bytes"] / counts["tokens"]
        self.paths = [Path(folder) / name for name in counts["files"]]
        self.dtype = np.dtype(meta["dtype"]).newbyteorder("<")
        self.shards: list[np.ndarray] = []
        self.open()
        self.n_rows = count_rows(self.n_tokens, seq_len)
        if not self.n_rows:
            raise UsageError(
                f"the {split} split of {folder} has {self.n_tokens:,} tokens, less than one row of {seq_len:,}. "
                f"Lower --seq_len to {self.n_tokens:,} or less, or prepare more text."
            )
        if max_rows is not None:
            self.n_rows = min(self.n_rows, max_rows)

    def open(self) -> None:
        """Map the files. Done again in every worker process: a map does not travel, its path does."""
        self.shards = [np.memmap(path, self.dtype, "r") for path in self.paths]
        self.first_tokens = np.cumsum([0, *map(len, self.shards)])

    def __len__(self) -> int:
        return self.n_rows

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        """Row number `row`: {"input_ids": int64, shape (seq_len,)}."""
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        return {"input_ids": self.tokens(*row_span(row % len(self), self.seq_len))}

    def tokens(self, start: int, end: int) -> np.ndarray:
        """Tokens of the stream from `start` up to `end`, int64. They may lie across files."""
        parts = []
        shard = int(np.searchsorted(self.first_tokens, start, side="right")) - 1
        while start < end:
            offset = start - int(self.first_tokens[shard])
            parts.append(self.shards[shard][offset : offset + end - start])
            start += len(parts[-1])
            shard += 1
        return np.concatenate(parts).astype(np.int64)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"shards": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.open()


def collate(rows: list[dict[str, np.ndarray]]) -> dict[str, torch.Tensor]:
    """Rows → a batch, int64, shape (rows, seq_len) each. Labels are the inputs, unshifted: the model shifts."""
    input_ids = torch.from_numpy(np.stack([row["input_ids"] for row in rows]))
    return {"input_ids": input_ids, "labels": input_ids.clone()}


def read_meta(folder: Path) -> dict[str, Any]:
    """What `prepare` says of a folder: counts, tokenizer, sources.

    Raises: UsageError if the folder is not a whole prepared set.
    """
    data = DataFolder(Path(folder))
    if data.meta.exists():
        meta = read_json(data.meta)
        if not isinstance(meta, dict) or not {"fingerprint", "splits", "tokenizer", "dtype"} <= meta.keys():
            raise UsageError(f"{data.meta} was not written by prepare. Name another folder.")
        return meta
    if data.unfinished().root.exists():
        raise UsageError(f"{folder} is not finished: its preparation was stopped. The same command finishes it.")
    what = "is not a prepared set (it has no meta.json)" if data.root.exists() else "does not exist"
    raise UsageError(f"{folder} {what}. Make one: python -m gpt2small_hf prepare --text FILES --output_dir {folder}")


def check_whole(folder: Path, meta: dict[str, Any]) -> None:
    """See that every file `meta` speaks of is there at its full size.

    Raises: UsageError naming the first that is not.
    """
    damaged = "The set was damaged or copied in part: copy it again, or prepare it again with --overwrite."
    width = np.dtype(meta["dtype"]).itemsize
    for split, counts in meta["splits"].items():
        paths = [Path(folder) / name for name in counts["files"]]
        missing = [path for path in paths if not path.is_file()]
        if missing:
            raise UsageError(f"{missing[0]} is missing. {damaged}")
        found = sum(path.stat().st_size for path in paths) // width
        if found != counts["tokens"]:
            raise UsageError(
                f"the {split} files of {folder} hold {found:,} tokens, meta.json says {counts['tokens']:,}. {damaged}"
            )
    tokenizer = DataFolder(Path(folder)).tokenizer
    if not (tokenizer / "tokenizer.json").is_file():
        raise UsageError(f"{tokenizer} holds no tokenizer.json. {damaged}")
