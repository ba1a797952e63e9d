"""Everything that can be set in a run: dataclasses, and how recipe and flags fill them.

The model's settings are read from `GPT2SmallConfig`, the data's from `PrepareArguments`, the Trainer's from
transformers' `TrainingArguments`; only what belongs to a run as a whole is declared here.
"""

from __future__ import annotations

import math
from argparse import SUPPRESS
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import TrainingArguments, get_scheduler

from gpt2small_hf.data.tokens import PrepareArguments
from gpt2small_hf.flags import FlagParser, as_flags, as_yaml, extended, laid_over, read_recipe
from gpt2small_hf.model.configuration_gpt2small import GPT2SmallConfig
from gpt2small_hf.runs import RunFolder, UsageError

# The Trainer has them; a run does not use them, so they are kept out of the manual.
_NOT_FOR_RUNS = {"do_train", "do_eval", "do_predict", "local_rank", "push_to_hub", "disable_tqdm"} | {
    f"hub_{name}" for name in ("token", "private_repo", "model_id", "strategy", "always_push", "revision")
}
_AT_LEAST = {
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "learning_rate": 0,
    "weight_decay": 0,
    "warmup_steps": 0,
    "max_grad_norm": 0,
    "seed": 0,
}
# Settings of which one replaces the others.
ALTERNATIVES = (
    {"data_dir", "text", "dataset"},
    {"max_steps", "num_train_epochs", "tokens", "tokens_per_parameter"},
)
# A run takes these from its tokenizer; use_cache is for generation and stays at its default.
_NOT_FLAGS = {"vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "use_cache"}


@dataclass
class RunArguments:
    """The run as a whole: its folder, its rows and what it shows."""

    _argument_group_name = "run"

    output_dir: Path = field(default=Path(), init=False)  # filled from the Trainer's flag of this name
    overwrite: bool = field(default=False, metadata={"help": "Replace a run that is already in the run folder."})
    data_dir: Path | None = field(
        default=None,
        metadata={
            "help": "Folder written by `python -m gpt2small_hf prepare`. Unset: the text named below is prepared, "
            "in data/, and found there again by the next run that names the same."
        },
    )
    seq_len: int | None = field(
        default=None, metadata={"help": "Tokens per row while training; unset: max_position_embeddings."}
    )
    tokens: int | None = field(
        default=None,
        metadata={"help": "Train on so many tokens, rounded up to whole steps, in place of --max_steps."},
    )
    tokens_per_parameter: float | None = field(
        default=None,
        metadata={"help": "The same, as a multiple of the model's parameters. 20 is Chinchilla's (Hoffmann 2022)."},
    )
    parameters_counted: Literal["all", "non_embedding"] = field(
        default="all", metadata={"help": "Which parameters --tokens_per_parameter counts; a tied head counts once."}
    )
    init_seed: int | None = field(
        default=None,
        metadata={
            "help": "Seed of the initial weights, each drawn by its name: what a setting does not touch starts alike. "
            "Unset: --seed, which otherwise decides dropout alone; --data_seed decides the order of rows."
        },
    )
    decay: Literal["matrices", "all"] = field(
        default="matrices",
        metadata={"help": "What --weight_decay shrinks: matrices and embeddings, or norms and biases too."},
    )
    spike_factor: float = field(
        default=50.0,
        metadata={"help": "Skip a step whose gradient norm is above so many medians of the last 128."},
    )
    max_bad_steps: int = field(
        default=20,
        metadata={"help": "Stop after so many skipped steps in a row: spikes, and losses or gradients not finite."},
    )
    max_eval_samples: int | None = field(
        default=None,
        metadata={"help": "Measure on the first so many held-out rows only. Compare runs on the same rows."},
    )
    num_threads: int | None = field(
        default=None,
        metadata={
            "help": "CPU threads that PyTorch computes with; unset: one a core. Small models are fastest with one, and "
            "threads that wait for each other come to a crawl on a busy machine."
        },
    )
    print_recipe: bool = field(
        default=False,
        metadata={
            "help": "Print the whole recipe, ready to be saved, and what it changes in the one it extends; no run."
        },
    )
    prompts: list[str] = field(
        default_factory=lambda: ["Every effort moves you"],
        metadata={"help": "Texts that the finished model continues, greedily and sampled."},
    )

    def __post_init__(self) -> None:
        for name in ("num_threads", "max_eval_samples", "tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name} is {value}. Give 1 or more, or leave it out.")
        if self.max_bad_steps < 1:
            raise UsageError(f"--max_bad_steps is {self.max_bad_steps}. Give 1 or more.")
        if not self.spike_factor > 1:
            raise UsageError(f"--spike_factor is {self.spike_factor:g}. Give a number above 1.")
        if self.init_seed is not None and not 0 <= self.init_seed < 1 << 32:
            raise UsageError(f"--init_seed is {self.init_seed}. Give a number from 0 to 2^32 - 1.")
        if self.tokens_per_parameter is not None and not 0 < self.tokens_per_parameter < math.inf:
            raise UsageError(f"--tokens_per_parameter is {self.tokens_per_parameter:g}. Give a number above 0.")
        if not all(prompt.strip() for prompt in self.prompts):
            raise UsageError("--prompts has an empty text, which cannot be continued. Give it a word.")


@dataclass
class TrainerArguments(TrainingArguments):
    """The Trainer's own arguments with the defaults of a pre-training run."""

    _argument_group_name = "training (transformers.TrainingArguments)"

    output_dir: str | None = field(
        default=None, metadata={"help": "The run folder; unset: runs/<name of the recipe>, below the current folder."}
    )
    learning_rate: float = field(default=6e-4, metadata={"help": "Peak learning rate."})
    lr_scheduler_type: str = field(default="cosine_with_min_lr", metadata={"help": "Shape of the learning rate."})
    lr_scheduler_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "JSON object for the schedule. cosine_with_min_lr: min_lr_rate is where it ends, as a share of the "
            "peak; unset, 0.1."
        },
    )
    warmup_steps: float = field(
        default=0.05, metadata={"help": "Steps of linear warm-up, or below 1 the share of all steps."}
    )
    weight_decay: float = field(default=0.1, metadata={"help": "AdamW's decay of what --decay says."})
    adam_beta2: float = field(default=0.95, metadata={"help": "AdamW's memory of squared gradients."})
    num_train_epochs: float = field(default=1.0, metadata={"help": "Passes over the training rows."})
    logging_steps: float = field(default=10, metadata={"help": "Steps between lines of metrics.jsonl."})
    # With the filter on, a NaN loss is logged as a finite number: the log would lie.
    logging_nan_inf_filter: bool = field(
        default=False, metadata={"help": "Hide NaN losses from the log. Leave it off."}
    )
    save_total_limit: int | None = field(default=2, metadata={"help": "Checkpoints to keep: the newest so many."})
    dataloader_pin_memory: bool = field(
        default=torch.cuda.is_available(), metadata={"help": "Pin rows in memory for faster copies to the GPU."}
    )
    ddp_find_unused_parameters: bool | None = field(
        default=False, metadata={"help": "Search for parameters without gradient each step; every one of ours has one."}
    )
    disable_tqdm: bool | None = field(default=True, metadata={"help": "The run draws its own progress line."})
    resume_from_checkpoint: str | None = field(
        default=None,
        metadata={"help": "Go on with the run: `true` from its newest whole checkpoint, or a folder's name."},
    )

    def __post_init__(self) -> None:
        if self.hub_token or self.push_to_hub:
            raise UsageError("A run is not pushed, and a token is never a flag: publish the finished model folder.")
        for name, least in _AT_LEAST.items():
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise UsageError(f"--{name} is {value}. Give {least:g} or more.")
        if self.max_steps != -1 and self.max_steps < 1:
            raise UsageError(f"--max_steps is {self.max_steps}. Give 1 or more, or leave it out for whole epochs.")
        if self.num_train_epochs <= 0:
            raise UsageError(f"--num_train_epochs is {self.num_train_epochs:g}. Give a number above 0.")
        if self.lr_scheduler_type == "cosine_with_min_lr" and self.lr_scheduler_kwargs is None:
            self.lr_scheduler_kwargs = {"min_lr_rate": 0.1}
        if self.seed >= 1 << 32:
            raise UsageError(f"--seed is {self.seed}. Give a number below 2^32.")
        try:
            super().__post_init__()
        except ValueError as error:
            if "bf16" in str(error):
                raise UsageError(
                    "--bf16 needs a GPU that computes in bfloat16. Leave it out (in a recipe: --bf16 false), "
                    "or compute on the CPU with --use_cpu."
                ) from None
            raise
        self._try_schedule()

    def _try_schedule(self) -> None:
        """Raise: UsageError if the schedule does not take its settings. The Trainer would find out after all else."""
        settings = self.lr_scheduler_kwargs
        try:
            if isinstance(settings, str):
                raise ValueError("it is no JSON object")
            get_scheduler(self.lr_scheduler_type, torch.optim.SGD([torch.zeros(1)]), 1, 10, dict(settings or {}))
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"--lr_scheduler_kwargs {self.lr_scheduler_kwargs} does not suit --lr_scheduler_type "
                f"{getattr(self.lr_scheduler_type, 'value', self.lr_scheduler_type)} ({error})."
            ) from None


def _model_arguments() -> type:
    """A dataclass of the configuration's own fields, types made plain for argparse, with their defaults and help."""
    rows = [
        (f.name, float if f.type == float | int else f.type, field(default=f.default, metadata=dict(f.metadata)))
        for f in fields(GPT2SmallConfig)
        if f.name in GPT2SmallConfig.__annotations__ and f.name not in _NOT_FLAGS and f.default is not MISSING
    ]
    return make_dataclass("ModelArguments", rows, namespace={"_argument_group_name": "model (GPT2SmallConfig)"})


ModelArguments = _model_arguments()


@dataclass
class Arguments:
    """All settings of one run."""

    recipe: Path
    run: RunArguments
    data: PrepareArguments
    model: Any
    trainer: TrainerArguments


def parse_arguments(words: list[str], default_recipe: Path) -> Arguments:
    """Read `[recipe.yaml] [--flag value …]`.

    Raises: UsageError for an unreadable recipe, an unknown key or flag (naming the nearest), or a wrong value.
    """
    return parse_with(words, default_recipe, prog="python train.py", purpose="Train a model from scratch.")[0]


def parse_with(
    words: list[str],
    default_recipe: Path,
    *,
    prog: str,
    purpose: str,
    more: tuple[type, ...] = (),
    in_any_case: Sequence[str] = (),
) -> tuple[Any, ...]:
    """Read a recipe and flags for a command that also takes the dataclasses `more`; `in_any_case` are flags that win.

    Returns: the `Arguments`, then an instance of each of `more`. Raises: as `parse_arguments`.
    """
    parser = FlagParser(
        *more,
        RunArguments,
        PrepareArguments,
        ModelArguments,
        TrainerArguments,
        prog=prog,
        usage=f"{prog} [recipe.yaml] [--flag value …]",
        description=f"{purpose} A recipe is a YAML file of these flags; flags override the recipe. "
        f"Without a recipe: {default_recipe.parent.name}/{default_recipe.name}.",
    )
    for action in parser._actions:
        if action.dest in _NOT_FOR_RUNS:
            action.help = SUPPRESS
    # The recipe is the first word or none: anywhere else a flag that takes several words would swallow it.
    recipe_path = default_recipe
    if words and not words[0].startswith("-"):
        recipe_path, words = Path(words[0]), words[1:]
    recipe = read_recipe(recipe_path, ALTERNATIVES)
    for key in recipe:
        parser.require(key, where=f"{recipe_path}: ")
    recipe = under_flags(recipe, words)
    lengths = [name for name in ("max_steps", "tokens", "tokens_per_parameter") if name in recipe.keys() | given(words)]
    if len(lengths) > 1:
        raise UsageError(f"--{lengths[0]} and --{lengths[1]} both say how long to train. Leave one out.")
    words = [*as_flags(recipe), *words, *in_any_case]
    *others, run, data, model, trainer = parser.fill(words)
    named = parser.parse_known_args(words)[0].output_dir
    run.output_dir = Path(named) if named else Path("runs") / recipe_path.stem
    trainer.output_dir = str(RunFolder(run.output_dir).checkpoints)
    return Arguments(recipe=recipe_path, run=run, data=data, model=model, trainer=trainer), *others


# What only the machine of the run can answer: whether it computes in these.
ANY_PRECISION = ("--bf16", "false", "--fp16", "false", "--tf32", "false")


def whole_recipe(words: list[str], default_recipe: Path) -> dict[str, Any]:
    """Every setting of ours, and of the Trainer's those that we or the recipe set, as they are in force."""
    args, *_ = parse_with(words, default_recipe, prog="python train.py", purpose="", in_any_case=ANY_PRECISION)
    parts = {**vars(args.data), **vars(args.run), **vars(args.model)}
    settings = read_recipe(args.recipe, ALTERNATIVES)
    names = [*TrainerArguments.__annotations__, *settings, *sorted(given(words))]
    trainer = {name: getattr(args.trainer, name) for name in names if hasattr(args.trainer, name)}
    said, _ = FlagParser(TrainerArguments).parse_known_args([*as_flags(settings), *words])
    trainer |= {name: getattr(said, name) for name in ("bf16", "fp16", "tf32") if name in trainer}
    hidden = {"output_dir", "disable_tqdm", "resume_from_checkpoint", "print_recipe", "overwrite"}
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
    path = Path(words[0]) if words and not words[0].startswith("-") else default_recipe
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
    kept = laid_over(recipe, dict.fromkeys(names), ALTERNATIVES)
    if "data_dir" in names:  # a prepared folder has its text and its tokenizer
        kept = {key: value for key, value in kept.items() if key not in {f.name for f in fields(PrepareArguments)}}
    return {key: value for key, value in kept.items() if key not in names}
