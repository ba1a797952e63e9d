# pyright: strict, reportUnknownMemberType=false, reportUnknownArgumentType=false
"""`TextDataset`: rows of a prepared folder, read from memory-mapped token files, and their collator."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from gpt2small_hf.config.data import PACKINGS, PrepareArguments
from gpt2small_hf.data.corpus.encoder import token_bytes
from gpt2small_hf.data.corpus.metadata import DAMAGED, check_complete, read_meta
from gpt2small_hf.data.corpus.prepare import prepare
from gpt2small_hf.data.corpus.shards import OFFSET
from gpt2small_hf.data.packing import (
    PACK_CROPPED_VERSION,
    pack_cropped,
    restarting_positions,
)
from gpt2small_hf.data.row_dataset import IGNORED, RowDataset
from gpt2small_hf.errors import UsageError
from gpt2small_hf.formatting import counted
from gpt2small_hf.runs.files import atomic_write
from gpt2small_hf.runs.layout import DataFolder
from gpt2small_hf.runs.records import SplitCounts

BLOCK = 4_000_000


class TextDataset(RowDataset):
    """Rows of `seq_len` tokens made from one split's token stream. No token is read before a row is asked for.

    `packing` says how:
    - `stream`: the stream cut every `seq_len` tokens, as the reference series does; a row may begin inside a document.
    - `bos_bestfit`: every row begins with a document, and each document with an end-of-text token, GPT-2's BOS: the
      token before it in the stream (added before the first document). `packing.pack_cropped` chooses them.
      Documents are cropped to one row: see `cropped_share`.
    - `isolate`: the rows of `stream` with attention within documents only: `position_ids` restart at 0 at each
      end-of-text token. That token is still predicted from its own document,
      and a document's first token from it alone; no label is masked.

    Held-out rows are always made with `stream`, however the training rows are: runs are compared on the same rows.
    """

    is_chat = False

    @classmethod
    def from_files(
        cls,
        files: str | Path | Sequence[str | Path],
        tokenizer: str | Path | None = None,
        *,
        seq_len: int,
        split: str = "train",
        packing: str = "stream",
        validation_fraction: float = 0.0,
        output_dir: str | Path | None = None,
    ) -> TextDataset:
        """Prepare text files and open one split of them; files that were prepared before are only opened.

            rows = TextDataset.from_files("book.txt", "openai-community/gpt2", seq_len=256)
            rows[0]["input_ids"].shape  # (256,)

        Args:
            files: files, folders or globs, as `prepare --text` takes them.
            tokenizer: Hub id or folder; unset, a byte-level BPE is trained on the text. `tokenizer_dir` has a copy.
            seq_len: tokens in a row.
            split: `train` or `validation`.
            packing: see the class.
            validation_fraction: share of the text in the `validation` split.
            output_dir: folder of the token files; unset, `data/<name>-<hash>` in the working directory.

        Raises: UsageError for files or a tokenizer that cannot be read, and for a split shorter than one row.
        """
        args = PrepareArguments(
            text=[str(file) for file in ([files] if isinstance(files, (str, Path)) else files)],
            tokenizer=None if tokenizer is None else str(tokenizer),
            validation_fraction=validation_fraction,
        )
        folder = prepare(args, None if output_dir is None else Path(output_dir))
        return cls(folder, split, seq_len, packing=packing)

    def __init__(
        self, folder: str | Path, split: str, seq_len: int, *, packing: str = "stream", max_rows: int | None = None
    ) -> None:
        """Open a split of a prepared folder; of its rows, only the first `max_rows` if given.

        The first `bos_bestfit` rows of a length take a second or so a million documents; they are kept in the folder.

        Raises: UsageError if the folder is not a complete prepared set, has no such split, or not one row of it, and
            for an unknown packing.
        """
        if packing not in PACKINGS:
            raise UsageError(
                f"packing is {packing!r}, which is unknown. Set --packing to one of {', '.join(PACKINGS)}."
            )
        folder = Path(folder)
        meta = read_meta(folder)
        check_complete(folder, meta)
        self.folder, self.split = DataFolder(folder), split
        self.tokenizer_dir = self.folder.tokenizer
        if split not in meta.splits:
            raise UsageError(
                f"{folder} has no {split} split (it has {', '.join(meta.splits)}). "
                "Prepare it with --validation_fraction above 0 or with --validation_text."
            )
        self.counts = counts = meta.splits[split]
        self.seq_len = seq_len
        self.packing = packing
        self.eos_id = meta.tokenizer.eos_token_id
        self.n_tokens = counts.tokens
        self.paths = [folder / name for name in counts.files]
        self.dtype = np.dtype(meta.dtype).newbyteorder("<")
        self.n_rows = self.n_tokens // seq_len
        if not self.n_rows:
            raise UsageError(
                f"the {split} split of {folder} has {self.n_tokens:,} tokens, less than one row of {seq_len:,}. "
                f"Lower --seq_len to {self.n_tokens:,} or less, or prepare more text."
            )
        self.open()
        if self.index is not None:
            self.n_rows = int(self.index[0]) - 1
        # Independent of `max_rows`; a last partial row counts as left out.
        self.cropped_share = 1 - self.n_rows * seq_len / self.n_tokens
        if max_rows is not None:
            self.n_rows = min(self.n_rows, max_rows)

    def open(self) -> None:
        """Map the files; again in every worker process, because only paths can be pickled."""
        self.shards = [np.memmap(path, self.dtype, "r") for path in self.paths]
        self.first_tokens = np.cumsum([0, *map(len, self.shards)])
        self.index: np.ndarray | None = None
        if self.packing == "bos_bestfit":
            self.documents = open_documents(self.folder.documents(self.split), self.counts)
            index_path = self.folder.rows(self.split, self.packing, self.seq_len)
            self.index = open_index(index_path, self.documents, self.seq_len)

    def __len__(self) -> int:
        return self.n_rows

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        """Row number `row`: {"input_ids": int64, shape (seq_len,)}; with `isolate`, `position_ids` like it."""
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        row %= len(self)
        if self.index is not None:
            return {"input_ids": self._from_documents(self.index[self.index[row] : self.index[row + 1]])}
        input_ids = self.tokens(row * self.seq_len, (row + 1) * self.seq_len)
        if self.packing == "isolate":
            return {"input_ids": input_ids, "position_ids": restarting_positions(input_ids, self.eos_id)}
        return {"input_ids": input_ids}

    def collate(self, rows: list[dict[str, np.ndarray]]) -> dict[str, torch.Tensor]:
        """Rows → a batch, int64, shape (rows, seq_len) each. Labels are the inputs, unshifted: the model shifts.

        `position_ids` are there if the rows have them; `labels` are those of rows that have their own.
        """
        batch = {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]}
        return batch if "labels" in batch else batch | {"labels": batch["input_ids"].clone()}

    def padding_row(self) -> dict[str, np.ndarray]:
        """Return the last row without its labels."""
        row = self[-1]
        return {**row, "labels": np.full_like(row["input_ids"], IGNORED)}

    @property
    def tokens_per_row(self) -> float:
        return self.seq_len

    @property
    def largest_id(self) -> int:
        return self.counts.max_id

    def supervised_per_row(self) -> np.ndarray:
        """All but the first token of each row."""
        return np.full(len(self), self.seq_len - 1)

    def supervised_tokens(self) -> np.ndarray:
        """Ids of the supervised tokens. Of rows that are cut from the stream only, as held-out rows are."""
        return self._supervised(self.tokens(0, len(self) * self.seq_len))

    def supervised_bytes(self, tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
        """Bytes of text of each supervised token; an end-of-text token has none."""
        return self._supervised(token_bytes(tokenizer, self.tokens(0, len(self) * self.seq_len)))

    def _supervised(self, stream: np.ndarray) -> np.ndarray:
        assert self.packing != "bos_bestfit"
        return stream.reshape(len(self), self.seq_len)[:, 1:].reshape(-1)

    def training_tokens(self, most: int, overlap: int = 0) -> Iterator[np.ndarray]:
        """Yield the first `most` tokens of the split's stream, in blocks that overlap by some."""
        end = min(self.n_tokens, most)
        for start in range(0, end, BLOCK):
            yield self.tokens(max(0, start - overlap), min(start + BLOCK, end))

    def row_starts(self, row: int) -> np.ndarray:
        """Return the starts of the documents if they are isolated, else only 0."""
        found = self[row]
        return np.flatnonzero(found["position_ids"] == 0) if "position_ids" in found else np.zeros(1, int)

    def row_facts(self, row: int) -> list[str]:
        """Return the number of documents in a row if they are isolated, else of end-of-text tokens."""
        if self.packing == "isolate":
            return [counted(len(self.row_starts(row)), "document")]
        return [counted(int((self[row]["input_ids"] == self.eos_id).sum()), "end-of-text token")]

    def part_heading(self, row: int, part: int, tokens: str) -> str:
        """The document's number in its row, if documents are isolated."""
        return f"document {part + 1} of {len(self.row_starts(row))}: {tokens}" if self.packing == "isolate" else ""

    def _from_documents(self, documents: np.ndarray) -> np.ndarray:
        """The row of these documents: an end-of-text token before each, the last one cropped to what is left."""
        row = np.full(self.seq_len, self.eos_id, np.int64)
        at = 0
        for document in documents:
            start, end = map(int, self.documents[document : document + 2])  # its own end-of-text token is the last
            length = min(end - start, self.seq_len - at)
            row[at + 1 : at + length] = self.tokens(start, start + length - 1)
            at += length
        return row

    def tokens(self, start: int, end: int) -> np.ndarray:
        """Tokens of the split's stream from `start` up to `end`, int64, whatever the packing; across files too."""
        parts: list[np.ndarray] = [np.empty(0, np.int64)]
        shard = int(np.searchsorted(self.first_tokens, start, side="right")) - 1
        while start < end:
            offset = start - int(self.first_tokens[shard])
            parts.append(self.shards[shard][offset : offset + end - start])
            start += len(parts[-1])
            shard += 1
        return np.concatenate(parts)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"shards": [], "documents": None, "index": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.open()


# ---- rows of whole documents ------------------------------------------------------------------------------------


def open_index(path: Path, documents: np.ndarray, seq_len: int) -> np.ndarray:
    """Load the rows of `packing.pack_cropped` from the file at `path`, or compute and save them.

    The file's last number is a checksum of the others and of all they were made from: a damaged file, or one made
    from other documents or by another version, is replaced.

    `documents`: where each starts in the stream, then the stream's length.
    """
    made_from = zlib.crc32(documents.data, zlib.crc32(f"{PACK_CROPPED_VERSION} {seq_len}".encode()))
    with suppress(OSError, ValueError, EOFError):  # absent, no array, cut off
        saved = np.load(path, mmap_mode="r")
        is_index = saved.ndim == 1 and saved.dtype == "<i8" and len(saved)
        if is_index and saved[-1] == zlib.crc32(saved[:-1].data, made_from):
            return saved[:-1]
    index = pack_cropped(np.diff(documents), seq_len).astype("<i8")
    with suppress(OSError), atomic_write(path) as temporary, temporary.open("wb") as file:  # it may be read-only
        np.save(file, np.append(index, zlib.crc32(index.data, made_from)))
    return index


def open_documents(path: Path, counts: SplitCounts) -> np.ndarray:
    """Where each document of a split starts in its stream, then the stream's length: uint64, memory-mapped.

    Raises: UsageError if the file does not match the counts in meta.json.
    """
    size = path.stat().st_size if path.is_file() else 0
    if size == (counts.documents + 1) * OFFSET.itemsize:
        documents = np.memmap(path, OFFSET, "r")
        if documents[0] == 0 and documents[-1] == counts.tokens and (documents[1:] > documents[:-1]).all():
            return documents
    raise UsageError(f"{path} is not a valid list of the starts of {counts.documents:,} documents. {DAMAGED}")
