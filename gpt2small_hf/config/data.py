# pyright: strict
"""The settings of `prepare`, of `preview` and of chats, which `train` has too. Nothing here imports torch."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from gpt2small_hf.config.parser import require_at_least, setting
from gpt2small_hf.errors import UsageError

PACKINGS = ("stream", "bos_bestfit", "isolate")
CHAT_PACKINGS = ("best_fit", "padding")
OVERLONG = ("keep_end", "drop")
LOSS_ON = ("assistant", "last", "all")
SMALLEST_VOCABULARY = 256 + 1  # each byte and the end of text
LARGEST_VOCABULARY = 2**32
# Defaults of `preview`.
CHAT_SEQ_LEN, TEXT_SEQ_LEN = 1024, 256
VOCABULARY = 1024


@dataclass(frozen=True)
class PrepareArguments:
    """Which text to prepare, with which tokenizer, and what to hold out."""

    _argument_group_name = "data"

    text: list[str] | None = setting(
        None,
        "Files, folders or globs to read: .txt (one document per file), .jsonl and .parquet (one document per row), "
        ".safetensors with ids in a tensor `tokens`; other files are read as .txt. Of a folder, its .txt, .jsonl and "
        ".parquet files are read. Without --text and --dataset: the language reference inside Python (0.46 MB).",
    )
    dataset: str | None = setting(None, "Hub id of a data set, instead of --text.")
    dataset_config: str | None = setting(None, "Configuration of the data set.")
    dataset_split: str = setting("train", "Split of the data set.")
    dataset_revision: str | None = setting(
        None, "Commit, branch or tag of the data set. Unset: the latest commit, which is recorded."
    )
    streaming: bool = setting(False, "Stream the data set over the network instead of copying it to disk.")
    text_column: str = setting("text", "Field or column with the text of a row.")
    tokenizer: str | None = setting(
        None,
        "Hub id (openai-community/gpt2) or folder of a tokenizer. Unset, or `train`: train a byte-level BPE on the "
        "training documents (on a sample of about 100 MB of them if there are more).",
    )
    vocab_size: int | None = setting(
        None,
        "Vocabulary size of the tokenizer that is trained; unset: 1,024, for about a megabyte of text (GPT-2: 50,257). "
        "With --tokenizer: upper bound of its token ids.",
    )
    validation_fraction: float | None = setting(
        None,
        "Share of the documents to hold out; unset: 0.05. With fewer than 20 documents, the end of each is held out "
        "instead. 0 holds out nothing and needs --eval_strategy no.",
    )
    validation_text: list[str] | None = setting(
        None, "Files to hold out, as for --text. Nothing is held out of --text then."
    )
    errors: Literal["strict", "replace"] = setting(
        "strict", "Bytes that are not UTF-8: `strict` raises an error with their position, `replace` reads U+FFFD."
    )
    num_workers: int | None = setting(
        None, "Number of threads that encode; unset: one per core. The result does not depend on it."
    )

    def __post_init__(self) -> None:
        if self.text and self.dataset:
            raise UsageError("--text cannot be combined with --dataset. Give one of them.")
        if self.validation_text and self.validation_fraction is not None:
            raise UsageError("--validation_text cannot be combined with --validation_fraction. Give one of them.")
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
        require_at_least(self, {"num_workers": 1})

    @property
    def trains_tokenizer(self) -> bool:
        return self.tokenizer in (None, "train")

    @property
    def new_vocab_size(self) -> int:
        return 1024 if self.vocab_size is None else self.vocab_size

    @property
    def held_out(self) -> float:
        """The fraction of the training text that is held out."""
        if self.validation_text:
            return 0.0
        return 0.05 if self.validation_fraction is None else self.validation_fraction

    @property
    def n_workers(self) -> int:
        return self.num_workers or os.cpu_count() or 1


@dataclass(frozen=True)
class ChatArguments:
    """Which chats to train on, how they become text, and which tokens are supervised."""

    _argument_group_name = "chats"

    chat_data: list[str] | None = setting(
        None,
        "Chats or instructions to train on instead of text: .jsonl, .json, .parquet files, folders or Hub ids. "
        "NAME[:935] selects rows, user/name:SPLIT a split. The format is detected: messages, ShareGPT, Alpaca, prompt "
        "and completion, rendered Llama-2 text. Needs --init_from.",
    )
    validation_data: list[str] | None = setting(
        None,
        "Chats to hold out. Unset: the files named validation in the folders of --chat_data, else "
        "--validation_fraction of the conversations (chat runs only).",
    )
    template: str | None = setting(
        None,
        "Chat template: chatml, llama2, alpaca, a Jinja file, or Jinja itself with {%% generation %%} around the "
        "assistant's turns. Unset: the tokenizer's own, else chatml. It is saved with the tokenizer (chat runs only).",
    )
    loss_on: Literal["assistant", "last", "all"] = setting(
        "assistant",
        "Supervised tokens: the assistant's turns with their end token, only the last of these turns, or all tokens "
        "(chat runs only).",
    )
    max_length: int | None = setting(
        None, "Maximum number of tokens of a conversation; unset: --seq_len (chat runs only)."
    )
    overlong: Literal["keep_end", "drop"] = setting(
        "keep_end",
        "Conversations longer than --max_length: remove their first turns until the rest fits, or leave them out. Both "
        "are counted (chat runs only).",
    )
    add_special_tokens: bool = setting(
        False,
        "Add the template's markers to the tokenizer as single tokens, which users cannot type. Their embeddings are "
        "initialised with the mean of all. Unset: an answer ends with the end-of-text token, other markers are text "
        "(chat runs only).",
    )
    skip_bad_rows: bool = setting(
        False, "Skip and count malformed conversations instead of stopping at the first (chat runs only)."
    )

    def __post_init__(self) -> None:
        require_at_least(self, {"max_length": 2})


@dataclass(frozen=True)
class PreviewArguments:
    """Which rows to print, and how."""

    _argument_group_name = "rows"

    tokenizer: str | None = setting(
        None,
        "Folder of a run, a model or a tokenizer, or a Hub id. Unset: a tokenizer with "
        f"{VOCABULARY:,} entries is trained on the chats, for the preview alone (chats only).",
    )
    seq_len: int | None = setting(
        None,
        "Tokens of a row; the maximum for chats. Unset: the context of the --tokenizer's model, up to "
        f"{CHAT_SEQ_LEN:,}, for chats; {TEXT_SEQ_LEN} for prepared text.",
    )
    packing: Literal["padding", "best_fit", "stream", "bos_bestfit", "isolate"] | None = setting(
        None,
        "How documents become rows; `train --help_all` explains the choices. Unset: padding for chats, stream for "
        "prepared text.",
    )
    split: Literal["train", "validation"] | None = setting(
        None, "Split to print. Unset: train of prepared text; all files in a folder of chats."
    )
    n_rows: int = setting(3, "Number of rows to print (also -n).", aliases=["-n"])
    first_row: int = setting(0, "Number of the first row, counted from 0.")
    html: Path | None = setting(None, "HTML file to write too. It needs no other file.")

    def __post_init__(self) -> None:
        require_at_least(self, {"seq_len": 2, "n_rows": 1, "first_row": 0})
        # An existing file is replaced, so the name must be that of a page.
        if self.html is not None and (self.html.suffix.lower() not in (".html", ".htm") or self.html.is_dir()):
            raise UsageError(f"--html {self.html} is not the name of a page. Name a file that ends with .html.")


@dataclass(frozen=True)
class ChatFlags(ChatArguments):
    """The settings of chats without the names of the data."""

    _argument_group_name = "chats, as for train"

    chat_data: list[str] | None = field(init=False, default=None)
    validation_data: list[str] | None = field(init=False, default=None)

    def as_given(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.init and getattr(self, f.name) != f.default}
