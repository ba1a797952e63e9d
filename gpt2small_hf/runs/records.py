# pyright: strict
"""Typed contents of meta.json and resolved.json; `results.py` has the other files of a run.

No module outside this package uses their JSON keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpt2small_hf.runs.typed_json import Json, Part, Record

# ---- parts of several files -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MadeBy(Part):
    """Provenance of a result."""

    command: str
    commit: str | None = None
    """Of the checkout; `-dirty` is appended if files differ from it."""
    model_code: dict[str, str] = field(default_factory=dict[str, str])
    """SHA-256 of each file of the model's code."""
    date: str
    versions: dict[str, str]
    inputs: dict[str, str] = field(default_factory=dict[str, str])
    """SHA-256 of each input file."""


@dataclass(frozen=True, kw_only=True)
class DataSource(Part):
    """One file, data set or built-in text of the data."""

    file: str | None = None
    dataset: str | None = None
    name: str | None = None
    config: str | None = None
    split: str | None = None
    revision: str | None = None
    bytes: int | None = None
    sha256: str | None = None
    conversations: int | None = None

    @property
    def label(self) -> str:
        """Its name as the user gave it."""
        return self.file or self.dataset or self.name or ""


@dataclass(frozen=True, kw_only=True)
class SplitCounts(Part):
    """The size of a split of prepared text."""

    tokens: int
    documents: int
    bytes: int
    max_id: int = 0
    """The largest token id."""
    files: list[str] = field(default_factory=list[str])


@dataclass(frozen=True, kw_only=True)
class TokenizerFacts(Part):
    """The tokenizer of prepared text."""

    name: str
    of_hub: bool | None = None
    """Whether `name` is an id on the Hub."""
    sha256: str | None = None
    vocab_size: int
    eos_token_id: int


# ---- meta.json ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PreparedSet(Record):
    """`meta.json` of a prepared folder, written when all its files are complete."""

    dtype: str
    """Of the token files: `uint16` or `uint32`, little-endian."""
    splits: dict[str, SplitCounts]
    held_out: str | None = None
    """`tails`, `documents` or `files`; None if nothing is held out, or an earlier version did not record it."""
    tokenizer: TokenizerFacts
    sources: dict[str, list[DataSource]]
    fingerprint: str
    """SHA-256 of `inputs`."""
    inputs: dict[str, Any] = field(default_factory=dict[str, Any])
    """All that determines the token ids, compared as a whole."""
    made_by: MadeBy | None = None


@dataclass(frozen=True, kw_only=True)
class PreparationProgress(Record):
    """`progress.json` of an unfinished prepared folder: how much of it is on disk."""

    fingerprint: str
    batch_chars: int
    batches: int = 0
    splits: dict[str, SplitCounts] = field(default_factory=dict[str, SplitCounts])


# ---- resolved.json -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RunSettings(Part):
    """The settings of a run that are not the Trainer's; those that no code reads from the file are `extra`."""

    prompts: list[str]
    seq_len: int | None = None
    packing: str | None = None
    decay: str | None = None
    init_seed: int | None = None
    lora_rank: int | None = None
    lora_alpha: float | None = None
    lora_dropout: float | None = None
    find_batch_size: bool | None = None


@dataclass(frozen=True, kw_only=True)
class ChatSettings(Part):
    """The settings of a run on chats."""

    loss_on: str
    template: str | None = None


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Part):
    """The model's configuration."""

    vocab_size: int
    max_position_embeddings: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    tie_word_embeddings: bool
    embd_pdrop: float = 0.0
    attn_pdrop: float = 0.0
    resid_pdrop: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TrainerSettings(Part):
    """TrainingArguments; those that no code reads from the file are `extra`."""

    max_steps: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    learning_rate: float
    lr_scheduler_type: str
    lr_scheduler_kwargs: dict[str, Any] | None = None
    warmup_steps: float
    optim: str
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    weight_decay: float
    max_grad_norm: float | None = None
    neftune_noise_alpha: float | None = None
    seed: int
    data_seed: int | None = None
    bf16: bool
    fp16: bool
    tf32: bool | None = None
    torch_compile: bool
    dataloader_drop_last: bool
    logging_steps: float
    load_best_model_at_end: bool = False


@dataclass(frozen=True, kw_only=True)
class ChatCounts(Part):
    """The conversations of a split, and the rows made of them."""

    conversations: int
    shortened: int
    too_long: int
    nothing_to_learn: int
    rows: int
    tokens: int
    supervised_share: float

    @property
    def trained_on(self) -> int:
        """The conversations that have supervised tokens in a row."""
        return self.conversations - self.too_long - self.nothing_to_learn


@dataclass(frozen=True, kw_only=True)
class RunData(Part):
    """The data of a run: `splits` and `tokenizer` of prepared text; `train` and `validation` of chats."""

    folder: str
    fingerprint: str
    sources: dict[str, list[DataSource]] = field(default_factory=dict[str, list[DataSource]])
    splits: dict[str, SplitCounts] = field(default_factory=dict[str, SplitCounts])
    tokenizer: TokenizerFacts | None = None
    held_out: str | None = None
    """`tails`, `documents` or `files`."""
    train: ChatCounts | None = None
    validation: ChatCounts | None = None
    new_tokens: list[str] = field(default_factory=list[str])
    """Special tokens added to the base's tokenizer."""


@dataclass(frozen=True, kw_only=True)
class BaseModel(Part):
    """The model that a run starts from."""

    init_from: str
    sha256: str
    """Of its weights."""
    of_hub: bool | None = None
    trained_on: list[DataSource] | None = None


@dataclass(frozen=True, kw_only=True)
class DeviceFacts(Part):
    """The devices of a run."""

    type: str
    name: str
    count: int
    """Processes, each with one device."""
    threads: int


@dataclass(frozen=True, kw_only=True)
class ParameterCounts(Part):
    """Parameters of the model while it is trained."""

    total: int
    trained: int
    adapter: int | None = None


@dataclass(frozen=True, kw_only=True)
class Resolved(Record):
    """`resolved.json`: all settings, with data, device, commit and versions."""

    run: RunSettings
    prompts_from: str | None = None
    """`default`, `given`, `held-out chats` or `training chats`."""
    prompts_in_training: list[bool] | None = None
    """For each prompt of a run on chats whether it is a user's turn in the training chats."""
    chat: ChatSettings | None = None
    data: RunData
    base: BaseModel | None = None
    model: ModelSettings
    trainer: TrainerSettings
    rows_per_step: int | None = None
    loss_before_nats: float | None = None
    """Held-out loss before training; None if nothing is held out. Earlier versions only logged it, at step 0."""
    device: DeviceFacts
    parameters: ParameterCounts | None = None
    made_by: MadeBy

    def settings(self, part: str) -> Json:
        """Return all settings of `model`, `run`, `chat` or `trainer` by name, to compare those of two runs."""
        found: Part | None = getattr(self, part)
        return found.to_json() if found else {}

    @property
    def seq_len(self) -> int:
        """Tokens in a row."""
        return self.run.seq_len or self.model.max_position_embeddings

    @property
    def recipe_name(self) -> str | None:
        """File name of the recipe, the one input on record."""
        return next((Path(path).name for path in self.made_by.inputs), None)
