"""`RowDataset`: what training and evaluation require of a dataset, of text or of conversations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

IGNORED = -100
"""The label of a token without a loss, as PyTorch's cross-entropy has it."""


class RowDataset(torch.utils.data.Dataset[dict[str, np.ndarray]], ABC):
    """Rows of token ids. A supervised token is one whose loss counts.

    A row is {"input_ids": int64 (T,)}, and `labels` (unshifted) and `position_ids` of the same shape where needed.
    """

    is_chat: ClassVar[bool]
    seq_len: int
    """Maximum number of tokens in a row."""
    packing: str
    n_tokens: int
    """Tokens of the split, in rows or not."""
    cropped_share: float = 0.0
    """Share of the split's tokens that packing leaves out of all rows."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, row: int) -> dict[str, np.ndarray]: ...

    @abstractmethod
    def collate(self, rows: list[dict[str, np.ndarray]]) -> dict[str, torch.Tensor]:
        """Return the batch of some rows: `input_ids`, `labels` and perhaps `position_ids`, int64, (rows, T) each."""

    @abstractmethod
    def padding_row(self) -> dict[str, np.ndarray]:
        """Return a row without a supervised token, with the keys that all rows have, and `labels`."""

    @property
    @abstractmethod
    def tokens_per_row(self) -> float:
        """Mean number of tokens of a row, without padding."""

    @property
    @abstractmethod
    def largest_id(self) -> int:
        """The largest token id of the split."""

    @property
    def n_supervised(self) -> int:
        """Number of supervised tokens of all rows."""
        return int(self.supervised_per_row().sum())

    @abstractmethod
    def supervised_per_row(self) -> np.ndarray:
        """Number of supervised tokens of each row, int64, (rows,)."""

    @abstractmethod
    def supervised_tokens(self) -> np.ndarray:
        """Ids of the supervised tokens, row after row, int64, flat."""

    @abstractmethod
    def supervised_bytes(self, tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
        """Bytes of text of each supervised token, in the order of `supervised_tokens`; perhaps their mean."""

    @abstractmethod
    def training_tokens(self, most: int) -> Iterator[np.ndarray]:
        """Yield the ids that training predicts, in blocks; about the first `most` of them."""

    @abstractmethod
    def row_starts(self, row: int) -> np.ndarray:
        """Return the start in a row of each document or conversation that attends only to itself."""

    @abstractmethod
    def row_facts(self, row: int) -> list[str]:
        """Return facts about a row for its preview heading, besides its number of tokens."""

    @abstractmethod
    def part_heading(self, row: int, part: int, tokens: str) -> str:
        """Return the heading of one part of a row (see `row_starts`) that has these `tokens`; empty for none."""


class PaddedLength(torch.utils.data.Dataset[dict[str, np.ndarray]]):
    """Rows, followed by padding rows up to a multiple of some number.

    Processes that share the work get the same number of rows, in full batches; accelerate would repeat some of them.
    """

    def __init__(self, rows: RowDataset, multiple: int) -> None:
        self.rows, self.multiple = rows, multiple

    def __len__(self) -> int:
        return -(-len(self.rows) // self.multiple) * self.multiple

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        """Return a row, always with labels."""
        if row >= len(self.rows):
            return self.rows.padding_row()
        real = self.rows[row]
        return {"labels": real["input_ids"], **real}
