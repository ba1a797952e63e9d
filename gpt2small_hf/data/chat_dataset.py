# pyright: strict, reportUnknownMemberType=false, reportUnknownArgumentType=false
"""`ChatDataset`: rows of complete conversations, packed so that they do not attend to each other, or padded."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast

from gpt2small_hf.data.chat.conversations import Conversation, read_conversations
from gpt2small_hf.data.chat.encoding import BATCH, EncodedChat, encode
from gpt2small_hf.data.chat.formats import Message
from gpt2small_hf.data.chat.template_checks import set_template
from gpt2small_hf.data.packing import pack_unsplit
from gpt2small_hf.data.row_dataset import IGNORED, RowDataset
from gpt2small_hf.errors import UsageError
from gpt2small_hf.formatting import counted
from gpt2small_hf.invocation import command


@dataclass
class ChatCounts:
    """Number of conversations read, shortened and left out."""

    conversations: int
    """Read."""
    shortened: int = 0
    """Kept without their first turns, because they are longer than `max_length`."""
    turns_removed: int = 0
    too_long: int = 0
    """Left out because they are longer than `max_length`."""
    nothing_to_learn: int = 0
    """Left out because they have no supervised token."""
    empty_answers: int = 0
    """Kept with an empty answer, whose only supervised token is the end token."""

    @property
    def kept(self) -> int:
        return self.conversations - self.too_long - self.nothing_to_learn

    def __str__(self) -> str:
        parts = [counted(self.conversations, "conversation")]
        if self.shortened:
            parts.append(f"{self.shortened:,} too long, kept without their first turns ({self.turns_removed:,} in all)")
        if self.too_long:
            parts.append(f"{self.too_long:,} too long and left out")
        if self.nothing_to_learn:
            parts.append(f"{self.nothing_to_learn:,} without a token to learn, left out")
        if self.empty_answers:
            parts.append(f"{self.empty_answers:,} with an empty answer")
        return ", ".join(parts)


class ChatDataset(RowDataset):
    """Rows of complete conversations, with labels that are -100 except at supervised tokens.

    `packing` says how:
    - `best_fit`: several in a row (`packing.pack_unsplit`); `position_ids` restart at 0 with each, and the model
      attends within each one only.
    - `padding`: one in a row; `collate` pads the rows of a batch to the longest.

    The loss over all tokens is the same either way.
    """

    is_chat = True

    @classmethod
    def from_files(
        cls,
        files: str | Path | Sequence[str | Path],
        tokenizer: PreTrainedTokenizerFast,
        *,
        seq_len: int,
        template: str | None = None,
        max_length: int | None = None,
        loss_on: str = "assistant",
        packing: str = "best_fit",
        overlong: str = "keep_end",
        skip_bad_rows: bool = False,
    ) -> ChatDataset:
        """Read conversations from files and encode them.

            rows = ChatDataset.from_files("chats.jsonl", tokenizer, seq_len=1024, template="chatml")
            batch = rows.collate([rows[0], rows[1]])  # input_ids, labels, position_ids: (2, T), T at most 1024

        `files` are .jsonl, .json and .parquet files, folders, globs or Hub ids, as `train --chat_data` takes them.
        `template` (`chatml`, `llama2`, `alpaca`, a file or Jinja; unset, the tokenizer's own, else ChatML) becomes the
        tokenizer's chat template. `skip_bad_rows` leaves out rows that cannot be read instead of raising an error at
        the first. The other arguments are those of the constructor.

        Raises: UsageError for files, rows or a template that cannot be used.
        """
        names = [str(file) for file in ([files] if isinstance(files, (str, Path)) else files)]
        set_template(tokenizer, template)
        chats = read_conversations(names, None, validation_fraction=0, skip_bad_rows=skip_bad_rows)["train"].chats
        how: dict[str, Any] = {"max_length": max_length, "loss_on": loss_on, "packing": packing, "overlong": overlong}
        return cls(chats, tokenizer, seq_len=seq_len, **how)

    def __init__(
        self,
        conversations: Sequence[Conversation],
        tokenizer: PreTrainedTokenizerFast,
        *,
        seq_len: int,
        max_length: int | None = None,
        loss_on: str = "assistant",
        packing: str = "best_fit",
        overlong: str = "keep_end",
    ) -> None:
        """Encode conversations by the tokenizer's template.

        Args:
            conversations: for training or validation.
            tokenizer: with a chat template that `set_template` has checked.
            seq_len: maximum number of tokens in a row.
            max_length: maximum number of tokens in a conversation, up to `seq_len`; unset, `seq_len`.
            loss_on: supervised tokens: `assistant` turns, the `last` of them, or `all`.
            packing: see the class.
            overlong: how to treat longer conversations. `keep_end`: remove the first turns, a question and its answer
                at a time and never the system turn, until the rest fits; `drop`: leave the conversation out.

        Raises: UsageError if no conversation is left.
        """
        self.seq_len, self.loss_on = seq_len, loss_on
        self.pad_id = int(tokenizer.pad_token_id or 0)  # pyright: ignore[reportArgumentType]
        limit = seq_len if max_length is None else min(max_length, seq_len)
        self.counts = ChatCounts(len(conversations))
        self.chats: list[Conversation] = []
        """The kept conversations, without the removed turns."""
        self.removed: list[int] = []
        """Number of removed turns of each kept conversation."""
        self.encoded: list[EncodedChat] = []
        self.longest = 0
        """Tokens of the longest conversation, before any turn was removed."""
        console = Console(stderr=True)
        few = len(conversations) <= BATCH or not console.is_terminal
        for start in track(
            range(0, len(conversations), BATCH), "encoding chats", console=console, transient=True, disable=few
        ):
            chats = conversations[start : start + BATCH]
            for chat, encoded in zip(chats, encode(tokenizer, [chat.messages for chat in chats]), strict=True):
                self._add(tokenizer, chat, encoded, limit, overlong)
        if not self.encoded:
            raise UsageError(self._nothing_left(limit, overlong))
        self.n_tokens = sum(self.lengths)
        self.pack(packing)
        supervised = self.supervised_tokens()
        # Supervised tokens only; end tokens count as tokens and have no bytes.
        text = str(tokenizer.decode(supervised, skip_special_tokens=True))
        self.bytes_per_token = max(1, len(text.encode())) / len(supervised)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each conversation."""
        return [len(one.input_ids) for one in self.encoded]

    def pack(self, packing: str) -> None:
        """Assign the conversations to rows."""
        packed = packing == "best_fit"
        self.packing = packing
        self.rows = pack_unsplit(self.lengths, self.seq_len) if packed else [[n] for n in range(len(self.encoded))]
        """The numbers of each row's conversations."""

    def _nothing_left(self, limit: int, overlong: str) -> str:
        reasons: list[str] = []
        if self.counts.too_long:
            fix = "Raise --max_length or --seq_len" + (", or take --overlong keep_end" if overlong == "drop" else "")
            reasons.append(f"{self.counts.too_long:,} are longer than {limit:,} tokens. {fix}")
        if self.counts.nothing_to_learn:
            fix = f"Preview them: {command('preview')}"
            reasons.append(f"in {self.counts.nothing_to_learn:,} no token is supervised: no assistant answers. {fix}")
        whole = counted(self.counts.conversations, "conversation")
        return f"none of {whole} can be used: {'; '.join(reasons)}."

    def _add(
        self, tokenizer: PreTrainedTokenizerFast, chat: Conversation, encoded: EncodedChat, limit: int, overlong: str
    ) -> None:
        removed = 0
        self.longest = max(self.longest, len(encoded.input_ids))
        if len(encoded.input_ids) > limit and overlong == "keep_end":
            shorter = _shortened(tokenizer, chat.messages, limit)
            if shorter is not None:
                removed = len(chat.messages) - len(shorter)
                chat, encoded = Conversation(shorter, chat.where), encode(tokenizer, [shorter])[0]
        if len(encoded.input_ids) > limit:
            self.counts.too_long += 1
        elif not encoded.supervised(self.loss_on).any():
            self.counts.nothing_to_learn += 1
        else:
            self.chats.append(chat)
            self.removed.append(removed)
            self.encoded.append(encoded)
            empty = any(turn["role"] == "assistant" and not turn["content"] for turn in chat.messages)
            self.counts.empty_answers += empty
            self.counts.shortened += removed > 0
            self.counts.turns_removed += removed

    def supervised_per_row(self) -> np.ndarray:
        """Number of supervised tokens of each row."""
        return np.array([sum(int(self.encoded[n].supervised(self.loss_on).sum()) for n in row) for row in self.rows])

    def supervised_tokens(self) -> np.ndarray:
        """Ids of the supervised tokens, row after row."""
        order = (self.encoded[number] for row in self.rows for number in row)
        return np.concatenate([one.input_ids[one.supervised(self.loss_on)] for one in order])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        """Row number `row`: `input_ids`, `labels` (unshifted) and, of packed rows, `position_ids`, int64, (T,) each."""
        parts = [self.encoded[number] for number in self.rows[row]]
        found = {
            "input_ids": np.concatenate([part.input_ids for part in parts]),
            "labels": np.concatenate(
                [np.where(part.supervised(self.loss_on), part.input_ids, IGNORED) for part in parts]
            ),
        }
        if self.packing == "best_fit":
            found["position_ids"] = np.concatenate([np.arange(len(part.input_ids)) for part in parts])
        return found

    def collate(self, rows: list[dict[str, np.ndarray]]) -> dict[str, torch.Tensor]:
        """Rows → a batch, int64, shape (rows, longest) each.

        Padding is at the end of a row, where causal attention hides it, so no mask is needed; its `position_ids`
        restart at 0, like one more document.
        """
        fill = {"input_ids": self.pad_id, "labels": IGNORED, "position_ids": 0}
        batch: dict[str, torch.Tensor] = {}
        for name in rows[0]:
            columns = [torch.from_numpy(row[name]) for row in rows]
            batch[name] = pad_sequence(columns, batch_first=True, padding_value=fill[name])
        for row, positions in zip(rows, batch.get("position_ids", []), strict=False):
            padding = positions[len(row["position_ids"]) :]
            padding.copy_(torch.arange(len(padding)))
        return batch

    def padding_row(self) -> dict[str, np.ndarray]:
        """Return two padding tokens: `collate` pads."""
        padding = {"input_ids": self.pad_id, "labels": IGNORED, "position_ids": 0}
        return {name: np.full(2, padding[name]) for name in self[0]}

    @property
    def tokens_per_row(self) -> float:
        return self.n_tokens / len(self)

    def supervised_bytes(self, tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
        """Return the mean over all supervised tokens for each of them: conversations are decoded as a whole."""
        return np.full(self.n_supervised, self.bytes_per_token)

    def training_tokens(self, most: int) -> Iterator[np.ndarray]:
        """Yield all supervised tokens at once."""
        yield self.supervised_tokens()

    def row_starts(self, row: int) -> np.ndarray:
        """Where the conversations of a row start."""
        return np.cumsum([0, *(len(self.encoded[chat].input_ids) for chat in self.rows[row][:-1])])

    def row_facts(self, row: int) -> list[str]:
        """Return the number of conversations in a row and of turns removed from them."""
        facts = [counted(len(self.rows[row]), "conversation")]
        if removed := sum(self.removed[chat] for chat in self.rows[row]):
            facts.append(f"{counted(removed, 'turn')} did not fit")
        if sum(len(self.encoded[chat].input_ids) for chat in self.rows[row]) < self.seq_len:
            facts.append("padding not shown")
        return facts

    def part_heading(self, row: int, part: int, tokens: str) -> str:
        """Return the source of a conversation in the row, and its number of supervised tokens."""
        chat = self.rows[row][part]
        supervised = int(self.encoded[chat].supervised(self.loss_on).sum())
        lost = f", without its first {counted(self.removed[chat], 'turn')}" if self.removed[chat] else ""
        place = f"conversation {part + 1} of {len(self.rows[row])}: {self.chats[chat].where}"
        return f"{place}: {tokens}, {supervised:,} supervised{lost}"

    @property
    def largest_id(self) -> int:
        return max(int(one.input_ids.max()) for one in self.encoded)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of ids, labels and rows: equal exactly when two datasets are the same to training."""
        digest = hashlib.sha256(repr(self.rows).encode())
        for one in self.encoded:
            digest.update(one.input_ids.astype("<i8").tobytes() + one.supervised(self.loss_on).tobytes())
        return digest.hexdigest()

    def describe(self) -> dict[str, Any]:
        """Return the counts that a run records."""
        return {
            **vars(self.counts),
            "rows": len(self.rows),
            "tokens": self.n_tokens,
            "supervised_tokens": self.n_supervised,
            "supervised_share": self.n_supervised / self.n_tokens,
        }


def _shortened(tokenizer: PreTrainedTokenizerFast, chat: list[Message], limit: int) -> list[Message] | None:
    """Return the system turn and the most last turns that fit, starting with a user turn; None if none fit."""
    system = chat[:1] if chat[0]["role"] == "system" else []
    starts = [n for n, message in enumerate(chat) if message["role"] == "user"][1:]
    fits = bisect_left(
        starts, True, key=lambda start: len(encode(tokenizer, [system + chat[start:]])[0].input_ids) <= limit
    )
    return system + chat[starts[fits] :] if fits < len(starts) else None
