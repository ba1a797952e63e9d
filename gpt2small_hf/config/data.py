"""The settings of `prepare`, of `preview` and of chats, which `train` has too. Nothing here imports torch."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from gpt2small_hf.errors import UsageError

PACKINGS = ("stream", "bos_bestfit", "isolate")
CHAT_PACKINGS = ("best_fit", "padding")
OVERLONG = ("keep_end", "drop")
LOSS_ON = ("assistant", "last", "all")
SMALLEST_VOCABULARY = 256 + 1  # each byte and the end of text
LARGEST_VOCABULARY = 2**32
# Of `preview`, unless told.
CHAT_SEQ_LEN, TEXT_SEQ_LEN = 1024, 256
VOCABULARY = 1024


@dataclass(frozen=True)
class PrepareArguments:
    """Which text to prepare, with which tokenizer, and what to hold out."""

    _argument_group_name = "data"

    text: list[str] | None = field(
        default=None,
        metadata={
            "help": "Files, folders or globs to read: .txt (a document each), .jsonl and .parquet (a document a row), "
            ".safetensors with ids in a tensor `tokens`; anything else is read as .txt. A folder stands for its .txt, "
            ".jsonl and .parquet files. Without --text and --dataset: the language reference inside Python (0.46 MB)."
        },
    )
    dataset: str | None = field(default=None, metadata={"help": "Hub id of a data set to read instead of --text."})
    dataset_config: str | None = field(default=None, metadata={"help": "Which configuration of the data set."})
    dataset_split: str = field(default="train", metadata={"help": "Which of the data set's splits to read."})
    dataset_revision: str | None = field(
        default=None, metadata={"help": "Commit, branch or tag of the data set (default: the newest, and recorded)."}
    )
    streaming: bool = field(
        default=False, metadata={"help": "Read the data set over the network as needed, without a copy on disk."}
    )
    text_column: str = field(default="text", metadata={"help": "Field or column that holds the text of a row."})
    tokenizer: str | None = field(
        default=None,
        metadata={
            "help": "Hub id (openai-community/gpt2) or folder of a ready tokenizer. Default, or `train`: train a "
            "byte-level BPE on the train documents (on about 100 MB of them, evenly spread, when there is more)."
        },
    )
    vocab_size: int | None = field(
        default=None,
        metadata={
            "help": "Entries of the tokenizer trained here (default 1,024, right for a megabyte; GPT-2 has 50,257). "
            "With a ready tokenizer: stop if a token id does not fit a model with so many."
        },
    )
    validation_fraction: float | None = field(
        default=None,
        metadata={
            "help": "Part of the documents to hold out (default 0.05; 0: none, which needs --eval_strategy no in a "
            "run). Below 20 documents it is the tail of each that is held out instead."
        },
    )
    validation_text: list[str] | None = field(
        default=None, metadata={"help": "Files to hold out, as for --text; then nothing is taken from the train text."}
    )
    errors: Literal["strict", "replace"] = field(
        default="strict",
        metadata={"help": "At bytes that are not UTF-8: stop and name the place, or put U+FFFD there and go on."},
    )
    num_workers: int | None = field(
        default=None, metadata={"help": "Threads that encode (default: one a core). The result is the same."}
    )

    def __post_init__(self) -> None:
        if self.text and self.dataset:
            raise UsageError("--text and --dataset are two sources. Give one of them.")
        if self.validation_text and self.validation_fraction is not None:
            raise UsageError("--validation_text is the whole validation split. Leave out --validation_fraction.")
        if not 0 <= self.held_out < 1:
            raise UsageError(f"--validation_fraction is {self.validation_fraction}. Give a number from 0 to below 1.")
        if self.trains_tokenizer and self.new_vocab_size < SMALLEST_VOCABULARY:
            raise UsageError(
                f"--vocab_size is {self.vocab_size}, but each byte and the end of text need an entry: "
                f"give at least {SMALLEST_VOCABULARY}."
            )
        if self.new_vocab_size > LARGEST_VOCABULARY:
            raise UsageError(
                f"--vocab_size is {self.vocab_size:,}, but token ids have 32 bits: give at most {LARGEST_VOCABULARY:,}."
            )
        if self.num_workers is not None and self.num_workers < 1:
            raise UsageError(f"--num_workers is {self.num_workers}. Give at least 1.")

    @property
    def trains_tokenizer(self) -> bool:
        return self.tokenizer in (None, "train")

    @property
    def new_vocab_size(self) -> int:
        return 1024 if self.vocab_size is None else self.vocab_size

    @property
    def held_out(self) -> float:
        """The fraction of the train text that goes to validation."""
        if self.validation_text:
            return 0.0
        return 0.05 if self.validation_fraction is None else self.validation_fraction

    @property
    def n_workers(self) -> int:
        return self.num_workers or os.cpu_count() or 1


@dataclass(frozen=True)
class ChatArguments:
    """Which chats to learn from, how they are written down, and what of them is learned."""

    _argument_group_name = "chats"

    chat_data: list[str] | None = field(
        default=None,
        metadata={
            "help": "Chats or instructions to learn from, in place of text: .jsonl, .json, .parquet files, folders or "
            "Hub ids. NAME[:935] takes these rows, user/name:SPLIT that split. Their shape is recognised: messages, "
            "ShareGPT, Alpaca, prompt and completion, rendered Llama-2 text. Needs --init_from."
        },
    )
    validation_data: list[str] | None = field(
        default=None,
        metadata={
            "help": "Chats to measure on. Unset: a file named validation beside one named train in a folder of "
            "--chat_data, else --validation_fraction of the conversations."
        },
    )
    template: str | None = field(
        default=None,
        metadata={
            "help": "How a conversation becomes text: chatml, llama2, alpaca, a file of Jinja or Jinja itself, with "
            "{%% generation %%} around what the assistant says. Unset: the tokenizer's own, else chatml. It is kept in "
            "the tokenizer, so that whoever loads the model asks in the same way."
        },
    )
    loss_on: Literal["assistant", "last", "all"] = field(
        default="assistant",
        metadata={"help": "What is learned: the assistant's turns with their end token, the last of them, or all."},
    )
    max_length: int | None = field(
        default=None, metadata={"help": "Tokens that a conversation has at most; unset: --seq_len."}
    )
    overlong: Literal["keep_end", "drop"] = field(
        default="keep_end",
        metadata={
            "help": "A longer conversation loses its first turns until the rest fits, or is left out. Both are counted."
        },
    )
    add_special_tokens: bool = field(
        default=False,
        metadata={
            "help": "Make the template's markers single tokens, so that nobody can type one. Their embeddings begin as "
            "the mean of all. Without: an answer ends with the end-of-text token, other markers are words."
        },
    )
    skip_bad_rows: bool = field(
        default=False,
        metadata={"help": "Leave out rows that are no conversation, and count them, instead of stopping at the first."},
    )

    def __post_init__(self) -> None:
        for name, known in {"loss_on": LOSS_ON, "overlong": OVERLONG}.items():
            if getattr(self, name) not in known:
                raise UsageError(f"--{name} is {getattr(self, name)}. Choose one of {', '.join(known)}.")
        if self.max_length is not None and self.max_length < 2:
            raise UsageError(f"--max_length is {self.max_length}. Give 2 or more.")


@dataclass(frozen=True)
class PreviewArguments:
    """Which rows to show, and how."""

    _argument_group_name = "rows"

    tokenizer: str | None = field(
        default=None,
        metadata={
            "help": "Of chats: the folder of a run, a model or a tokenizer, or a Hub id. Unset: one of "
            f"{VOCABULARY:,} entries is trained on the chats, to look at them; a model is trained with its own."
        },
    )
    seq_len: int | None = field(
        default=None,
        metadata={
            "help": f"Tokens of a row; of chats, at most. Unset: for chats the context of the model that --tokenizer "
            f"names, and no more than {CHAT_SEQ_LEN:,}; for prepared text {TEXT_SEQ_LEN}, or as many as there are."
        },
    )
    packing: Literal["padding", "best_fit", "stream", "bos_bestfit", "isolate"] | None = field(
        default=None,
        metadata={
            "help": "How rows are made. Of chats: padding (unset), one conversation to a row; best_fit, several. Of "
            "prepared text: stream (unset), bos_bestfit, isolate. `train --help_all` explains them."
        },
    )
    split: Literal["train", "validation"] | None = field(
        default=None,
        metadata={
            "help": "Of a prepared folder: which split to show; unset, train. Of a folder of chats: only its files of "
            "that name; unset, all."
        },
    )
    n_rows: int = field(default=3, metadata={"help": "How many rows to show (also -n).", "aliases": ["-n"]})
    first_row: int = field(default=0, metadata={"help": "The first of them; rows are counted from 0."})
    html: Path | None = field(
        default=None, metadata={"help": "Also write a page to look at in a browser. It needs nothing beside itself."}
    )

    def __post_init__(self) -> None:
        least = {"seq_len": 2, "n_rows": 1, "first_row": 0}
        for name, smallest in least.items():
            value = getattr(self, name)
            if value is not None and value < smallest:
                raise UsageError(f"--{name} is {value}. Give {smallest} or more.")
        # What lies there is replaced: it had better be a page.
        if self.html is not None and (self.html.suffix.lower() not in (".html", ".htm") or self.html.is_dir()):
            raise UsageError(f"--html {self.html} is not the name of a page. Name a file that ends with .html.")


@dataclass(frozen=True)
class ChatFlags(ChatArguments):
    """What `train` has for chats, without the names of the data."""

    _argument_group_name = "chats, as for train"

    chat_data: list[str] | None = field(init=False, default=None)
    validation_data: list[str] | None = field(init=False, default=None)

    def as_given(self) -> dict[str, Any]:
        """Those that differ from their defaults."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.init and getattr(self, f.name) != f.default}
