"""Recipe and flags → the settings of one run, checked against each other. Nothing here imports torch."""

from __future__ import annotations

import importlib
from argparse import SUPPRESS
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from gpt2small_hf.config.common import COMMON_SETTINGS
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
# Settings of which one replaces the others.
ALTERNATIVES = (
    {"data_dir", "text", "dataset", "chat_data"},
    {"max_steps", "num_train_epochs", "tokens", "tokens_per_parameter"},
)
# What a run that begins with a model may have otherwise than it; a longer context is learned.
OF_A_BASE = {"embd_pdrop", "attn_pdrop", "resid_pdrop", "max_position_embeddings"}
_TEXT_SOURCES = ("data_dir", "text", "dataset", "validation_text", "tokenizer", "vocab_size")


@dataclass
class Arguments:
    """All settings of one run."""

    recipe: Path
    run: RunArguments
    data: PrepareArguments
    chat: ChatArguments
    model: Any
    trainer: Any
    """Until `complete`, the `TrainerSettings` that they are made of."""
    words: list[str]
    """The command line: recipe and flags as they are given."""
    named: set[str]
    """The settings that recipe or flags name; the others have their defaults."""


def parse_arguments(words: list[str], default_recipe: Path) -> Arguments:
    """Read `[recipe.yaml] [--flag value …]`, ready to train.

    Raises: UsageError for an unreadable recipe, an unknown key or flag (naming the nearest), or a wrong value.
    """
    return complete(read_arguments(words, default_recipe))


def read_arguments(words: list[str], default_recipe: Path) -> Arguments:
    """What `parse_arguments` reads, without what only torch can tell. Raises: as `parse_arguments`."""
    return read_with(words, default_recipe, command_name="train", purpose="Train a model.")[0]


def complete(args: Arguments, *, any_precision: bool = False) -> Arguments:
    """Make of the Trainer's settings its arguments, in place: torch is imported, and the device looked at.

    With `any_precision`, --bf16, --fp16 and --tf32 are kept, but not refused where this machine cannot compute in them.

    Raises: UsageError for what cannot be done on this machine.
    """
    TrainerArguments = importlib.import_module("gpt2small_hf.training.trainer_arguments").TrainerArguments

    given = {setting.name: getattr(args.trainer, setting.name) for setting in fields(args.trainer) if setting.init}
    kept = {name: given[name] for name in ("bf16", "fp16", "tf32")} if any_precision else {}
    try:
        args.trainer = TrainerArguments(**{**given, **dict.fromkeys(kept, False)})
    except (ValueError, TypeError, ImportError) as error:
        raise UsageError(" ".join(str(error).split())) from error
    for name, value in kept.items():
        setattr(args.trainer, name, value)
    return args


def read_with(
    words: list[str],
    default_recipe: Path,
    *,
    command_name: str,
    purpose: str,
    more: tuple[type, ...] = (),
) -> tuple[Any, ...]:
    """Read a recipe and flags for a command that also takes the dataclasses `more`.

    Returns: the `Arguments` of `read_arguments`, then an instance of each of `more`.
    Raises:  as `parse_arguments`.
    """
    prog, typed = command(command_name), words
    own = {part._argument_group_name: dict.fromkeys(setting.name for setting in fields(part)) for part in more}
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
        description=f"{purpose} A recipe is a YAML file of flags. Flags override it; what neither sets has the "
        f"default. Without a recipe: {default_recipe.parent.name}/{default_recipe.name}.",
    )
    for action in parser._actions:
        if action.dest in NOT_FOR_RUNS:
            action.help = SUPPRESS
    # The recipe is the first word or none: anywhere else a flag that takes several words would swallow it.
    recipe_path = default_recipe
    if words and not words[0].startswith("-"):
        recipe_path, words = find_recipe(words[0]), words[1:]
        if words and not words[0].startswith("-"):  # the last setting of the recipe may be a list, and would take it
            raise UsageError(f"{words[0]} stands where a flag was expected. {parser.all_flags}")
    if "" in words[1:]:
        raise UsageError(f"{words[words.index('', 1) - 1]} is empty. Give a value, or leave the flag out.")
    recipe = beside(recipe_path, read_recipe(recipe_path, ALTERNATIVES))
    for key in recipe:
        parser.require(key, where=f"{recipe_path}: ")
    recipe = under_flags(recipe, words)
    lengths = [name for name in ("max_steps", "tokens", "tokens_per_parameter") if name in recipe.keys() | given(words)]
    if len(lengths) > 1:
        raise UsageError(f"--{lengths[0]} and --{lengths[1]} both say how long to train. Leave one out.")
    words = [*as_flags(recipe), *words]
    *others, run, data, chat, model, trainer = parser.fill(words)
    folder = trainer.output_dir
    run.output_dir = Path(folder) if folder else Path("runs") / recipe_path.stem
    trainer.output_dir = str(RunFolder(run.output_dir).checkpoints)
    args = Arguments(recipe_path, run, data, chat, model, trainer, typed, named=given(words))
    settle(args)
    return args, *others


def beside(path: Path, recipe: dict[str, Any]) -> dict[str, Any]:
    """A recipe whose chats and template are found beside it, if they do not lie in the working folder."""

    def found(name: Any) -> Any:
        file = str(name).partition("[")[0]
        lies_there = isinstance(name, str) and "{" not in name and (path.parent / file).is_file()
        return str(path.parent / name) if lies_there and not Path(file).exists() else name

    files = {key: recipe[key] for key in ("chat_data", "validation_data", "template") if key in recipe}
    return recipe | {
        key: [found(one) for one in value] if isinstance(value, list) else found(value) for key, value in files.items()
    }


NOTHING_TO_MEASURE = (
    "nothing is held out, so nothing can be measured while training. Give --eval_strategy no, or hold out a part: "
    "--validation_fraction 0.1"
)


def settle(args: Arguments) -> None:
    """See that settings of different parts fit each other, and fill in what depends on another.

    Raises: UsageError naming two that do not fit, or one that would do nothing.
    """
    run, chat, named = args.run, args.chat, args.named
    if chat.chat_data is None:
        if idle := sorted(named & {f.name for f in fields(ChatArguments)}):
            raise UsageError(f"--{idle[0]} is of chats. Name some with --chat_data, or leave it out.")
        if run.packing in CHAT_PACKINGS:
            raise UsageError(f"--packing {run.packing} is of chats. For text choose one of {', '.join(PACKINGS)}.")
        unknown = run.data_dir is not None or args.data.dataset is not None  # which may have a validation split
        if not (unknown or args.data.validation_text or args.data.held_out) and args.trainer.eval_strategy != "no":
            raise UsageError(NOTHING_TO_MEASURE)
    else:
        if other := [name for name in _TEXT_SOURCES if name in named]:
            raise UsageError(
                f"--chat_data cannot be combined with --{other[0]}: chats use the tokenizer of their base model."
            )
        if run.init_from is None:
            raise UsageError("--chat_data needs a model that can write already. Name one with --init_from.")
        if run.packing in PACKINGS:
            raise UsageError(f"--packing {run.packing} is of text. For chats choose {' or '.join(CHAT_PACKINGS)}.")
        if length := named & {"tokens", "tokens_per_parameter"}:
            raise UsageError(f"--{length.pop()} is of text. For chats give --num_train_epochs or --max_steps.")
        # `inputs.py` sets what is left unset here once it knows how many chats there are.
        if (
            "load_best_model_at_end" not in named
            and args.trainer.eval_strategy == args.trainer.save_strategy == "epoch"
        ):
            keep_best(args.trainer)
    if chat.chat_data is None:
        run.packing = run.packing or "stream"
    if run.init_from is None:
        check_sizes(args)
    if run.init_from is None and run.lora_rank is not None:
        raise UsageError("--lora_rank adapts a model that has learned. Name it with --init_from.")
    if run.lora_rank is None and (run.lora_alpha is not None or run.lora_dropout):
        raise UsageError("--lora_alpha and --lora_dropout need --lora_rank.")
    if run.early_stopping_patience is not None and not args.trainer.load_best_model_at_end:
        raise UsageError(
            "--early_stopping_patience keeps the best checkpoint: give --load_best_model_at_end, and --eval_strategy "
            "and --save_strategy alike (epoch, or steps)."
        )


def check_sizes(args: Arguments) -> int:
    """See that the sizes of a new model fit each other, and its rows. Returns: `seq_len`.

    Raises: UsageError for sizes that do not.
    """
    sizes = DeclaredConfig(**vars(args.model))
    if sizes.intermediate_size is None:
        sizes.intermediate_size = 4 * sizes.hidden_size
    try:
        sizes.validate_architecture()
    except ValueError as error:
        raise UsageError(str(error)) from None
    return row_length(args, sizes.max_position_embeddings)


def row_length(args: Arguments, context: int) -> int:
    """Tokens of a row: `seq_len`, or the whole context. Raises: UsageError if they do not fit in the context."""
    seq_len = context if args.run.seq_len is None else args.run.seq_len
    if not 2 <= seq_len <= context:
        raise UsageError(
            f"seq_len is {seq_len}; a row has from 2 to {context} tokens (max_position_embeddings). "
            "Change --seq_len or --max_position_embeddings."
        )
    return seq_len


def keep_best(trainer: Any) -> None:
    """Keep the checkpoint with the lowest held-out loss; what `TrainingArguments` fills in when it is asked to."""
    trainer.load_best_model_at_end = True
    if trainer.metric_for_best_model is None:
        trainer.metric_for_best_model, trainer.greater_is_better = "loss", False


def whole_recipe(words: list[str], default_recipe: Path) -> dict[str, Any]:
    """Every setting of ours, and of the Trainer's those that we or the recipe set, as they are in force."""
    args, *_ = read_with(words, default_recipe, command_name="train", purpose="")
    complete(args, any_precision=True)
    sizes = vars(args.model)
    if args.run.init_from is not None:  # the model has its own
        sizes = {name: value for name, value in sizes.items() if name in args.named}
    parts = {**vars(args.data), **(vars(args.chat) if args.chat.chat_data else {}), **vars(args.run), **sizes}
    settings = read_recipe(args.recipe, ALTERNATIVES)
    names = [*TrainerSettings.__annotations__, *settings, *sorted(given(words))]
    trainer = {name: getattr(args.trainer, name) for name in names if hasattr(args.trainer, name)}
    hidden = {"output_dir", "disable_tqdm", "print_recipe", "overwrite", "resume", "preflight_only", "find_batch_size"}
    values = {name: getattr(value, "value", value) for name, value in {**parts, **trainer}.items()}
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in values.items()
        if name not in hidden and value is not None
    }


def show_recipe(words: list[str], default_recipe: Path) -> str:
    """A recipe with every setting, as YAML, and below it in comments what it changes in the recipe it extends.

    Raises: as `parse_arguments`.
    """
    path = find_recipe(words[0]) if words and not words[0].startswith("-") else default_recipe
    whole = whole_recipe(words, default_recipe)
    base = extended(path)
    other, what = (whole_recipe([str(base)], default_recipe), str(base)) if base else ({}, "")
    changes = [
        f"# {name}: {other.get(name, 'unset')} -> {whole.get(name, 'unset')}"
        for name in dict.fromkeys([*whole, *other])
        if other.get(name) != whole.get(name)
    ]
    text = as_yaml(whole)
    if base:
        text += "\n".join(["", f"# {path} changes in {what}:" if changes else f"# {path} is {what}.", *changes, ""])
    return text


def given(words: list[str]) -> set[str]:
    """The names of the flags among words of the command line."""
    return {word[2:].split("=")[0].replace("-", "_") for word in words if word.startswith("--")}


def under_flags(recipe: dict[str, Any], words: list[str]) -> dict[str, Any]:
    """The recipe less what a flag replaces: flags win, and of two texts or two lengths of training one stands."""
    names = given(words)
    kept = merge_recipes(recipe, dict.fromkeys(names), ALTERNATIVES)
    if "data_dir" in names:  # a prepared folder has its text and its tokenizer
        kept = {key: value for key, value in kept.items() if key not in {f.name for f in fields(PrepareArguments)}}
    if names & {"data_dir", "text", "dataset"}:  # in place of a recipe's chats
        chats = {f.name for f in fields(ChatArguments)}
        kept = {key: value for key, value in kept.items() if key not in chats}
        if kept.get("packing") in CHAT_PACKINGS:
            del kept["packing"]
    if names & {"chat_data", "init_from"}:  # a model has its tokenizer
        kept = {key: value for key, value in kept.items() if key not in ("tokenizer", "vocab_size")}
    if "chat_data" in names:  # the recipe's questions are about its own chats
        kept.pop("prompts", None)
        if kept.get("packing") in PACKINGS:
            del kept["packing"]
    return {key: value for key, value in kept.items() if key not in names}
