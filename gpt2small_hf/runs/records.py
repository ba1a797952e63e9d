# pyright: strict
"""Typed contents of resolved.json, heldout.json and answers.jsonl. No other module reads or writes their JSON keys."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpt2small_hf.runs.json_records import Json, Part, Record

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
    files: list[str]


@dataclass(frozen=True, kw_only=True)
class TokenizerFacts(Part):
    """The tokenizer of prepared text."""

    name: str
    of_hub: bool | None = None
    """Whether `name` is an id on the Hub."""
    sha256: str | None = None
    vocab_size: int
    eos_token_id: int


# ---- evaluation/heldout.json -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Measures(Part):
    """The mean loss of some tokens, in three units."""

    loss_nats: float = field(metadata={"key": "loss"})
    perplexity: float | None = None
    """exp(loss); None if it is too large for a number."""
    bits_per_byte: float | None = None
    """loss / ln 2 / bytes per token, which is comparable between tokenizers."""
    standard_error_nats: float | None = field(default=None, metadata={"key": "standard_error"})


@dataclass(frozen=True, kw_only=True)
class NewText(Measures):
    """The loss of the held-out tokens that are in no overlap with the training text."""

    share: float
    """Of all held-out tokens."""
    recorded_overlap_tokens: int | None = field(default=None, metadata={"key": "overlap_tokens"})
    searched_tokens: int | None = None
    """Training tokens that were compared, from the first."""

    @property
    def overlap_tokens(self) -> int:
        """The length of an overlap, in tokens; earlier versions did not record it."""
        return self.recorded_overlap_tokens or 13


@dataclass(frozen=True, kw_only=True)
class HeldOutRows(Part):
    """The rows that a loss was measured on."""

    rows: int
    seq_len: int
    predicted_tokens: int | None = None
    conversations: int | None = None
    loss_on: str | None = None


@dataclass(frozen=True, kw_only=True)
class AnswerCounts(Part):
    """Number of answered held-out questions, and of answers that end with a stop token."""

    asked: int
    ended: int
    max_new_tokens: int


@dataclass(frozen=True, kw_only=True)
class HeldOutLosses(Part):
    """The loss on held-out rows. If nothing is held out there are 0 rows and no losses."""

    rows: HeldOutRows
    before: Measures | None = None
    """Before training."""
    unigram: Measures | None = None
    """Of a model that predicts the token frequencies of the training data."""
    after: Measures | None = None
    """After training."""


@dataclass(frozen=True, kw_only=True)
class HeldOut(HeldOutLosses, Record):
    """`evaluation/heldout.json`: the results of the evaluation tasks, without generated text."""

    new_text: NewText | None = None
    """After training; None of chats, and if all tokens are in an overlap with the training text."""
    answers: AnswerCounts | None = None
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    """Results of further tasks, by name."""
    step: int | None = None
    """Of the weights."""
    last_step: int | None = None
    """That training ended at."""
    made_by: MadeBy


# ---- evaluation/answers.jsonl ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Answer(Part):
    """A line of `evaluation/answers.jsonl`: a held-out question and the finished model's answer."""

    messages: list[dict[str, Any]]
    """The conversation up to the question."""
    answer: str
    ended: bool
    """Whether the answer ended with a stop token."""

    @property
    def turns(self) -> list[str]:
        """Return the text of each message, up to the question."""
        return [message["content"] for message in self.messages]


@dataclass(frozen=True, kw_only=True)
class Answers(AnswerCounts):
    """The result of the task `answers`: counts for `heldout.json`, and the lines of `answers.jsonl`."""

    answers: list[Answer] = field(default_factory=list[Answer])

    @property
    def counts(self) -> AnswerCounts:
        """Return the counts alone."""
        return AnswerCounts(asked=self.asked, ended=self.ended, max_new_tokens=self.max_new_tokens)


# ---- evaluation/completions.json and samples.jsonl ---------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SamplingSettings(Part):
    """How text was generated."""

    max_new_tokens: int
    temperature: float
    top_k: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class Completion(Part):
    """A prompt and its two continuations, without the prompt."""

    prompt: str
    """As the model read it."""
    greedy: str
    sampled: str
    settings: SamplingSettings


@dataclass(frozen=True, kw_only=True)
class Sample(Completion):
    """A line of `samples.jsonl`: a completion by the model of a step."""

    step: int


@dataclass(frozen=True, kw_only=True)
class Completions(Record):
    """`evaluation/completions.json`: prompts that the finished model continued or answered."""

    completions: list[Completion]
    is_chat: bool | None = None
    made_by: MadeBy | None = None


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
