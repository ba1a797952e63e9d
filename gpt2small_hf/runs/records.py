# pyright: strict
"""Typed contents of resolved.json, heldout.json and answers.jsonl. No other module reads or writes their JSON keys.

A field has the name of its key, or the `key` of its metadata where a file's name for it has no unit. Keys that this
version does not know are kept and written back. A file without `schema_version` is of version 0: the development
versions of gpt2small_hf 0.1, which did not record all of what is optional here.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from gpt2small_hf.errors import UsageError
from gpt2small_hf.runs.files import read_json, read_jsonl, write_json

SCHEMA_VERSION = 1
"""Of files written by this version."""

Json = dict[str, Any]
P = TypeVar("P", bound="Part")
R = TypeVar("R", bound="Record")


# ---- from JSON and back ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Part:
    """A JSON object with typed fields. Optional fields have an empty default: None, or a collection without items."""

    extra: Json = field(default_factory=dict[str, Any], repr=False, compare=False)
    """Keys that this version does not know, with their values."""
    absent: frozenset[str] = field(default=frozenset(), repr=False, compare=False)
    """Optional fields that the file did not have: they are not written back while they are empty."""

    @classmethod
    def from_json(cls: type[P], value: Any, where: str) -> P:
        """Check the types of all fields and build the object.

        Args:
            value: parsed JSON.
            where: the file and, within it, the key, for errors.

        Raises: UsageError naming the first field that is missing or has a value of another type.
        """
        if not isinstance(value, dict):
            raise _mistyped(where, value, "an object")
        known, given, extra = _fields(cls), cast(Json, value), cast(Json, {})
        values: Json = {}
        for key, item in given.items():
            if found := known.get(key):
                is_plain = type(item) in found.plain
                values[found.name] = item if is_plain else _parse(item, found.type, _inside(where, key))
            else:
                extra[key] = item
        absent: list[str] = []
        for key, found in known.items():
            if key not in given:
                if found.is_required:
                    raise UsageError(f"{_inside(where, key)} is missing, expected {_words(found.type)}. {RESTORE}")
                absent.append(found.name)
        return cls(**values, extra=extra, absent=frozenset(absent))

    @classmethod
    def load_lines(cls: type[P], path: Path) -> list[P]:
        """Read a JSON Lines file; one that does not exist has no lines. Raises: UsageError as `from_json`."""
        lines = read_jsonl(path) if path.is_file() else []
        return [cls.from_json(line, f"{path}, line {number}:") for number, line in enumerate(lines, 1)]

    def to_json(self) -> Json:
        """Return the object as it is written."""
        known = {found.name: (key, getattr(self, found.name)) for key, found in _fields(type(self)).items()}
        written = {key: _plain(value) for name, (key, value) in known.items() if value or name not in self.absent}
        return {**written, **self.extra}


@dataclass(frozen=True, kw_only=True)
class Record(Part):
    """The contents of one file, or of one line of it."""

    schema_version: int = 0

    @classmethod
    def load(cls: type[R], path: Path) -> R:
        """Read a file. Raises: UsageError naming the file, the key, the value found and the type expected."""
        return cls.from_json(read_json(path), f"{path}:")

    def save(self, path: Path) -> None:
        """Write the file, complete or not at all, as one of this version."""
        write_json(path, {**self.to_json(), "schema_version": SCHEMA_VERSION})


@dataclass(frozen=True)
class _Field:
    name: str
    type: Any
    plain: frozenset[type]
    """Types of JSON values that are taken as they are."""
    is_required: bool


@cache
def _fields(cls: type[Part]) -> dict[str, _Field]:
    """The typed fields of a class, by JSON key."""
    types, found = get_type_hints(cls), dict[str, _Field]()
    for one in dataclasses.fields(cls):
        if one.name not in ("extra", "absent"):
            is_required = one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
            expected = types[one.name]
            found[one.metadata.get("key", one.name)] = _Field(one.name, expected, _plain_types(expected), is_required)
    return found


def _alternatives(expected: Any) -> tuple[Any, ...]:
    return get_args(expected) if get_origin(expected) in (Union, UnionType) else (expected,)


def _plain_types(expected: Any) -> frozenset[type]:
    found = {one for one in _alternatives(expected) if one in (str, int, float, bool, NoneType)}
    return frozenset(found | {int} if float in found else found)


def _parse(value: Any, expected: Any, where: str) -> Any:
    """Return a JSON value as the type expected. Raises: UsageError if it is of another one."""
    for one in _alternatives(expected):
        origin, inner = get_origin(one) or one, get_args(one)
        if one is Any or type(value) in _plain_types(one):
            return value
        if isinstance(origin, type) and issubclass(origin, Part) and value is not None:
            return origin.from_json(value, where)
        if origin is list and isinstance(value, list):
            items = cast(list[Any], value)
            return [_parse(item, inner[0], f"{where}[{at}]") for at, item in enumerate(items)]
        if origin is dict and isinstance(value, dict):
            return {key: _parse(item, inner[1], _inside(where, key)) for key, item in cast(Json, value).items()}
    raise _mistyped(where, value, _words(expected))


def _plain(value: Any) -> Any:
    if isinstance(value, Part):
        return value.to_json()
    if isinstance(value, list):
        return [_plain(item) for item in cast(list[Any], value)]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in cast(Json, value).items()}
    return value


def _inside(where: str, key: str) -> str:
    return f"{where} {key}" if where.endswith(":") else f"{where}.{key}"


RESTORE = "Restore the file, or make it again with the command that wrote it."


def _mistyped(where: str, value: Any, expected: str) -> UsageError:
    found = repr(value)
    found = found if len(found) <= 60 else f"{found[:59]}…"
    return UsageError(f"{where.removesuffix(':')} is {found}, expected {expected}. {RESTORE}")


def _words(expected: Any) -> str:
    """A type as an error names it: `int or null`, `list of str`, `object`."""
    names = {NoneType: "null", Any: "any value", dict: "object"}
    words: list[str] = []
    for one in _alternatives(expected):
        origin: Any = get_origin(one) or one
        word = names.get(origin) or str(getattr(origin, "__name__", origin))
        if origin is list:
            word = f"list of {_words(get_args(one)[0])}"
        elif isinstance(origin, type) and issubclass(origin, Part):
            word = "object"
        words.append(word)
    return " or ".join(words)


# ---- what several files have -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MadeBy(Part):
    """How a result was made."""

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
    """loss / ln 2 / bytes per token, which compares models whatever their tokenizers."""
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
    """Held-out questions that were answered, and the answers that ended by themselves."""

    asked: int
    ended: int
    max_new_tokens: int


@dataclass(frozen=True, kw_only=True)
class HeldOut(Record):
    """`evaluation/heldout.json`: the loss on held-out rows. If nothing was held out there are 0 rows and no losses."""

    rows: HeldOutRows
    before: Measures | None = None
    """Before training."""
    unigram: Measures | None = None
    """Of a guess that knows only how frequent each token is in the training data."""
    after: Measures | None = None
    new_text: NewText | None = None
    """After training; None of chats, and if all tokens are in an overlap with the training text."""
    answers: AnswerCounts | None = None
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
        """What was said, up to the question."""
        return [message["content"] for message in self.messages]


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
    """What a run is trained on."""

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
    """`resolved.json`: every setting in force, with data, device, commit and versions."""

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
