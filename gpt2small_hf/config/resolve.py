# pyright: strict
"""A recipe and flags, or Python values → one frozen `RunConfig`, checked as far as it can be without torch."""

from __future__ import annotations

import re
from argparse import SUPPRESS
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from gpt2small_hf.config.data import CHAT_PACKINGS, PACKINGS, ChatArguments, PrepareArguments
from gpt2small_hf.config.parser import FlagParser, as_flags
from gpt2small_hf.config.recipe import as_yaml, extended, find_recipe, merge_recipes, read_recipe
from gpt2small_hf.config.run import DeclaredConfig, ModelArguments, RunArguments
from gpt2small_hf.config.trainer import NOT_FOR_RUNS, TrainerSettings
from gpt2small_hf.errors import UsageError
from gpt2small_hf.invocation import command
from gpt2small_hf.resources import resource
from gpt2small_hf.runs.layout import RunFolder

DEFAULT_RECIPE = resource("examples/tiny.yaml")
ALTERNATIVES = (
    {"data_dir", "text", "dataset", "chat_data"},
    {"max_steps", "num_train_epochs", "tokens", "tokens_per_parameter"},
)
"""Groups of settings of which one replaces the others."""
_TEXT_SOURCES = ("data_dir", "text", "dataset", "validation_text", "tokenizer", "vocab_size")
_NOT_IN_A_PRINTED_RECIPE = {
    *("output_dir", "disable_tqdm", "print_recipe", "overwrite", "resume", "preflight_only", "find_batch_size"),
}
NOTHING_TO_MEASURE = (
    "no text or chats are held out, so there is no loss to measure during training. Give --eval_strategy no, or hold "
    "out a part: --validation_fraction 0.1"
)

COMMON_SETTINGS = {  # what `train --help` and `plan --help` print; argparse adds the defaults
    "data": {
        "text": "Text files, folders or globs.",
        "dataset": "Hub id of a data set, instead of --text.",
        "data_dir": "Folder written by the command `prepare`.",
        "chat_data": "Chats to fine-tune on (with --init_from).",
        "tokenizer": "Hub id or folder. Unset: one is trained.",
    },
    "model": {
        "init_from": "Model to fine-tune. Unset: initial weights.",
        "num_hidden_layers": "Number of layers.",
        "hidden_size": "Width of the model.",
        "num_attention_heads": "Attention heads of a layer.",
        "max_position_embeddings": "Context length in tokens.",
    },
    "schedule and optimizer": {
        "max_steps": "Optimizer steps. -1: --num_train_epochs.",
        "num_train_epochs": "Number of epochs.",
        "learning_rate": "Peak learning rate.",
        "lr_scheduler_type": "Shape of the learning rate.",
        "warmup_steps": "Steps of warm-up; below 1, their share.",
        "weight_decay": "Decay of matrices and embeddings.",
    },
    "batch": {
        "per_device_train_batch_size": "Rows of a micro-batch.",
        "gradient_accumulation_steps": "Micro-batches of a step.",
        "bf16": "Compute in bfloat16 (on a GPU).",
    },
    "evaluation and saving": {
        "eval_strategy": "When to measure the held-out loss.",
        "eval_steps": "Steps between two evaluations.",
        "save_steps": "Steps between two checkpoints.",
    },
    "run": {
        "output_dir": "Run folder. Unset: runs/<name of the recipe>.",
        "overwrite": "Replace the run in this folder.",
        "seed": "Seed of initial weights and dropout.",
    },
}


@dataclass(frozen=True)
class RunConfig:
    """All settings of one run. Values that are found later make another config with `dataclasses.replace`."""

    recipe: Path
    run: RunArguments
    data: PrepareArguments
    chat: ChatArguments
    model: Any
    """`ModelArguments`, whose fields are those of `GPT2SmallConfig`."""
    trainer: TrainerSettings
    named: frozenset[str]
    """Settings that the recipe, a flag or the caller sets; the others have their defaults."""
    words: tuple[str, ...]
    """Arguments of the command `train` that give this config."""

    @property
    def folder(self) -> RunFolder:
        """The run folder."""
        return RunFolder(self.run.output_dir)

    def with_settings(self, **changes: Any) -> RunConfig:
        """Return a copy with other values of some settings, whichever part they belong to."""
        parts = {}
        for part in ("run", "data", "chat", "model", "trainer"):
            old = getattr(self, part)
            names = {setting.name for setting in fields(old) if setting.init}
            if own := {name: value for name, value in changes.items() if name in names}:
                parts[part] = replace(old, **own)
        return replace(self, **parts)


def load_recipe(name_or_path: str | Path, **overrides: Any) -> RunConfig:
    """Load a recipe, as the settings of a run.

    >>> config = load_recipe("tiny", max_steps=20, output_dir="runs/short")
    >>> config.trainer.max_steps
    20

    Args:
        name_or_path: a YAML file, or the name of a recipe of the package, such as `tiny` or `interventions/baseline`.
        overrides: settings by their flag names; None restores a default.

    Returns: the settings, which cannot be changed.
    Raises:  UsageError for an unreadable recipe, an unknown setting (naming the nearest), or an invalid value.
    """
    parser, path = run_parser("train", "Train a model."), find_recipe(str(name_or_path))
    where = f"load_recipe({str(name_or_path)!r}): "
    values = _checked(parser, overrides, where)
    given = {name: value for name, value in overrides.items() if value is not None}
    return _resolve(parser, path, values, set(overrides), (str(name_or_path), *as_flags(given)))


def read_config(words: Sequence[str], default_recipe: Path = DEFAULT_RECIPE) -> RunConfig:
    """Read `[recipe.yaml] [--flag value …]`. Raises: as `load_recipe`."""
    return read_with(words, default_recipe, command_name="train", purpose="Train a model.")[0]


def read_with(
    words: Sequence[str],
    default_recipe: Path = DEFAULT_RECIPE,
    *,
    command_name: str,
    purpose: str,
    more: tuple[type, ...] = (),
) -> tuple[Any, ...]:
    """Return the `RunConfig` of a recipe and flags, then an instance of each of `more`. Raises: as `load_recipe`."""
    parser, flags, path = run_parser(command_name, purpose, more, default_recipe), list(words), default_recipe
    # The recipe is the first word or none: anywhere else it could be the last value of a flag that takes several.
    if flags and not flags[0].startswith("-"):
        first = flags.pop(0)
        path = find_recipe(first)
        if flags and not flags[0].startswith("-") and find_recipe(flags[0]).is_file():
            raise UsageError(
                f"{first} and {flags[0]} are two recipes. Give one; a line `extends: {first}` in a recipe of your own "
                "includes another."
            )
    if "" in flags[1:]:
        raise UsageError(f"{flags[flags.index('', 1) - 1]} is empty. Give a value, or leave the flag out.")
    values = parser.given(flags)
    others = [_make(part, values) for part in more]
    own = {setting.name for part in more for setting in fields(part)}
    values = {name: value for name, value in values.items() if name not in own}
    return _resolve(parser, path, values, set(values), tuple(words)), *others


def run_parser(
    command_name: str, purpose: str, more: tuple[type, ...] = (), default_recipe: Path = DEFAULT_RECIPE
) -> FlagParser:
    """Return the parser of a command that takes a recipe, the settings of a run, and those of `more`."""
    prog = command(command_name)
    own = {getattr(part, "_argument_group_name"): dict.fromkeys(f.name for f in fields(part)) for part in more}  # noqa: B009
    parser = FlagParser(
        *more,
        RunArguments,
        PrepareArguments,
        ChatArguments,
        ModelArguments,
        TrainerSettings,
        common={**own, **COMMON_SETTINGS},
        prog=prog,
        usage=f"{prog} [recipe.yaml] [--flag value …]",
        description=f"{purpose} A recipe is a YAML file of flags. Flags override it; settings in neither have their "
        f"defaults. Without a recipe: {default_recipe.parent.name}/{default_recipe.name}.",
    )
    for action in parser._actions:
        if action.dest in NOT_FOR_RUNS:
            action.help = SUPPRESS
    return parser


# ---- merging -----------------------------------------------------------------------------------------------------


def _resolve(
    parser: FlagParser, path: Path, values: Mapping[str, Any], overridden: set[str], words: tuple[str, ...]
) -> RunConfig:
    """Merge the values of flags over a recipe, and check the result."""
    recipe = _beside(path, read_recipe(path, ALTERNATIVES))
    settings = {**_without_overridden(_checked(parser, recipe, f"{path}: "), overridden), **values}
    lengths = [name for name in ("max_steps", "tokens", "tokens_per_parameter") if name in settings]
    if len(lengths) > 1:
        raise UsageError(f"--{lengths[0]} cannot be combined with --{lengths[1]}: both set the length of training.")
    named = frozenset(settings)
    settings.setdefault("output_dir", Path("runs") / path.stem)
    run, data, chat, model, trainer = (
        _make(part, settings)
        for part in (RunArguments, PrepareArguments, ChatArguments, ModelArguments, TrainerSettings)
    )
    config = RunConfig(path, run, data, chat, model, trainer, named, words)
    _check_combinations(config)
    if chat.chat_data is None:
        config = config.with_settings(packing=run.packing or "stream")
    elif keeps_best_by_default(config):
        config = config.with_settings(load_best_model_at_end=True)
    if run.has_eval_tasks and trainer.save_strategy == "no":
        raise UsageError("--eval_tasks are evaluated at checkpoints, but --save_strategy is no. Give steps or epoch.")
    if run.early_stopping_patience is not None and not config.trainer.load_best_model_at_end:
        raise UsageError(
            "--early_stopping_patience keeps the best checkpoint. Give --load_best_model_at_end, and the same value "
            "(epoch or steps) for --eval_strategy and --save_strategy."
        )
    return config


def _make(part: type, values: Mapping[str, Any]) -> Any:
    """Make a dataclass of those values that are its fields."""
    return part(**{f.name: values[f.name] for f in fields(part) if f.init and f.name in values})


def _checked(parser: FlagParser, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Check names and types. Returns: the values that are set. Raises: UsageError that starts with `where`."""
    for name in values:
        parser.require(name, where=where)
    return {name: parser.checked(name, value, where) for name, value in values.items() if value is not None}


def _beside(path: Path, recipe: dict[str, Any]) -> dict[str, Any]:
    """Look up chats and templates in the folder of the recipe, unless they exist in the working folder."""

    def found(name: Any) -> Any:
        file = str(name).partition("[")[0]
        is_beside = isinstance(name, str) and "{" not in name and (path.parent / file).is_file()
        return str(path.parent / name) if is_beside and not Path(file).exists() else name

    files: dict[str, Any] = {key: recipe[key] for key in ("chat_data", "validation_data", "template") if key in recipe}
    return recipe | {
        key: list(map(found, value)) if isinstance(value, list) else found(value)  # pyright: ignore[reportUnknownArgumentType]
        for key, value in files.items()
    }


def _without_overridden(recipe: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """Return a recipe without the settings that flags replace: those of the same names and their alternatives."""
    kept = merge_recipes(recipe, dict.fromkeys(names), ALTERNATIVES)
    chats = {f.name for f in fields(ChatArguments)}
    dropped = set(names)
    if "data_dir" in names:  # a prepared folder contains text and tokenizer
        dropped |= {f.name for f in fields(PrepareArguments)}
    if names & {"data_dir", "text", "dataset"}:
        dropped |= chats | ({"packing"} if kept.get("packing") in CHAT_PACKINGS else set())
    if names & {"chat_data", "init_from"}:  # a base model has a tokenizer
        dropped |= {"tokenizer", "vocab_size"}
    if "chat_data" in names:  # the prompts of a recipe are about its own chats
        dropped |= {"prompts"} | ({"packing"} if kept.get("packing") in PACKINGS else set())
    return {key: value for key, value in kept.items() if key not in dropped}


def keeps_best_by_default(config: RunConfig) -> bool:
    """Whether a chat run keeps the best checkpoint unless its number of held-out chats is too small to compare."""
    trainer = config.trainer
    is_unset = "load_best_model_at_end" not in config.named
    return is_unset and trainer.eval_strategy == trainer.save_strategy == "epoch"


# ---- checks of several settings ----------------------------------------------------------------------------------


def _check_combinations(config: RunConfig) -> None:
    """Raise: UsageError naming two settings that contradict each other, or one that would have no effect."""
    run = config.run
    if config.chat.chat_data is None:
        _check_text(config)
    else:
        _check_chats(config)
    if run.init_from is None:
        check_sizes(config)
        if run.lora_rank is not None:
            raise UsageError("--lora_rank adapts a trained model. Name it with --init_from.")
    if run.lora_rank is None and (run.lora_alpha is not None or run.lora_dropout):
        raise UsageError("--lora_alpha and --lora_dropout need --lora_rank.")


def _check_text(config: RunConfig) -> None:
    run, data, named = config.run, config.data, config.named
    if unused := sorted(named & {f.name for f in fields(ChatArguments)}):
        raise UsageError(f"--{unused[0]} is for chat runs. Name chats with --chat_data, or leave it out.")
    if run.packing in CHAT_PACKINGS:
        raise UsageError(f"--packing is {run.packing}, which is for chats. For text use {', '.join(PACKINGS)}.")
    if run.data_dir is not None:
        for name in ("text", "dataset", "validation_text", "tokenizer"):
            if getattr(data, name):
                raise UsageError(
                    f"--data_dir cannot be combined with --{name}: the prepared folder already contains text and a "
                    "tokenizer. Leave one out."
                )
    may_have_validation = run.data_dir is not None or data.dataset is not None
    if not (may_have_validation or data.validation_text or data.held_out) and config.trainer.eval_strategy != "no":
        raise UsageError(NOTHING_TO_MEASURE)


def _check_chats(config: RunConfig) -> None:
    run, named = config.run, config.named
    if other := [name for name in _TEXT_SOURCES if name in named]:
        raise UsageError(
            f"--chat_data cannot be combined with --{other[0]}: chats use the tokenizer of their base model."
        )
    if run.init_from is None:
        raise UsageError("--chat_data needs a base model. Name one with --init_from.")
    if run.packing in PACKINGS:
        raise UsageError(f"--packing is {run.packing}, which is for text. For chats use {' or '.join(CHAT_PACKINGS)}.")
    if length := sorted(named & {"tokens", "tokens_per_parameter"}):
        raise UsageError(f"--{length[0]} is for text. For chats give --num_train_epochs or --max_steps.")


def check_sizes(config: RunConfig) -> int:
    """Check the sizes of a new model and of its rows. Returns: `seq_len`. Raises: UsageError for invalid ones."""
    values: dict[str, Any] = {**config.model.__dict__}
    hidden_size, heads = values["hidden_size"], values["num_attention_heads"]
    if values["intermediate_size"] is None:
        values["intermediate_size"] = 4 * hidden_size
    try:
        DeclaredConfig(**values).validate_architecture()
    except ValueError as error:
        hint = ""
        if heads > 0 and hidden_size > heads and hidden_size % heads:
            below = hidden_size - hidden_size % heads
            hint = f" Use {below} or {below + heads}, or another --num_attention_heads."
        names = "|".join(values)
        raise UsageError(re.sub(rf"\b({names})\b", r"--\1", str(error)) + hint) from None
    return row_length(config, config.model.max_position_embeddings)


def row_length(config: RunConfig, context: int) -> int:
    """Return the tokens of a row: `seq_len`, or the whole context. Raises: UsageError if rows exceed the context."""
    seq_len = context if config.run.seq_len is None else config.run.seq_len
    if not 2 <= seq_len <= context:
        raise UsageError(
            f"--seq_len is {seq_len}; a row has from 2 to {context} tokens (--max_position_embeddings). "
            "Change --seq_len or --max_position_embeddings."
        )
    return seq_len


# ---- printing ----------------------------------------------------------------------------------------------------


def full_recipe(config: RunConfig) -> dict[str, Any]:
    """Return every setting of this package, and those of the Trainer that have another default here or are set."""
    model: dict[str, Any] = config.model.__dict__
    if config.run.init_from is not None:  # the base model has its own sizes
        model = {name: value for name, value in model.items() if name in config.named}
    chat = vars(config.chat) if config.chat.chat_data else {}
    trainer = vars(config.trainer)
    names = [name for name in [*TrainerSettings.__annotations__, *sorted(config.named)] if name in trainer]
    values = {**vars(config.data), **chat, **vars(config.run), **model, **{name: trainer[name] for name in names}}
    return {
        name: str(value) if isinstance(value, Path) else getattr(value, "value", value)
        for name, value in values.items()
        if name not in _NOT_IN_A_PRINTED_RECIPE and value is not None
    }


def show_recipe(config: RunConfig) -> str:
    """Return a recipe with every setting, as YAML, followed by comments that list its changes to the one it extends."""
    settings, base = full_recipe(config), extended(config.recipe)
    if base is None:
        return as_yaml(settings)
    other = full_recipe(read_config([str(base)]))
    changes = [
        f"# {name}: {other.get(name, 'unset')} -> {settings.get(name, 'unset')}"
        for name in dict.fromkeys([*settings, *other])
        if other.get(name) != settings.get(name)
    ]
    title = f"# {config.recipe} changes in {base}:" if changes else f"# {config.recipe} has the settings of {base}."
    return as_yaml(settings) + "\n".join(["", title, *changes, ""])
