"""Everything that can be set in a run: dataclasses, and how recipe and flags fill them.

The model's settings are read from `GPT2SmallConfig`, the data's from `PrepareArguments`, the Trainer's from
transformers' `TrainingArguments`; only what belongs to a run as a whole is declared here. Nothing here imports torch:
a mistake is answered in a fraction of a second. `trainer_arguments.py` makes of the settings what a Trainer takes.
"""

from __future__ import annotations

import math
from argparse import SUPPRESS
from dataclasses import MISSING, dataclass, field, fields, make_dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gpt2small_hf.data.arguments import CHAT_PACKINGS, PACKINGS, ChatArguments, PrepareArguments
from gpt2small_hf.declared import declared
from gpt2small_hf.errors import UsageError
from gpt2small_hf.flags import FlagParser, as_flags, as_yaml, extended, find_recipe, merge_recipes, read_recipe
from gpt2small_hf.invocation import command
from gpt2small_hf.resources import resource
from gpt2small_hf.runs.files import parse_json
from gpt2small_hf.runs.layout import RunFolder

if TYPE_CHECKING:
    from transformers import TrainingArguments as DeclaredTrainingArguments

    from gpt2small_hf.training.trainer_arguments import TrainerArguments
else:
    _ENUMS = ("transformers.trainer_utils", "transformers.debug_utils")
    DeclaredTrainingArguments = declared("transformers.training_args", "TrainingArguments", *_ENUMS)

DEFAULT_RECIPE = resource("examples/tiny.yaml")
MUON = "muon"
DEEPSEEK_STEPS = "deepseek_steps"
WITHOUT_WARMUP = {"constant", "reduce_lr_on_plateau", "greedy"}
"""Shapes of transformers that pass over `warmup_steps`."""
# The Trainer has them; a run does not use them, so they are kept out of the manual.
_NOT_FOR_RUNS = {
    *("do_train", "do_eval", "do_predict", "local_rank", "push_to_hub", "disable_tqdm"),
    *("resume_from_checkpoint", "auto_find_batch_size"),
} | {f"hub_{name}" for name in ("token", "private_repo", "model_id", "strategy", "always_push", "revision")}
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
_INTERVALS = {"logging_steps": "logging_strategy", "eval_steps": "eval_strategy", "save_steps": "save_strategy"}
# Modules, any of which will do, and the package that each needs.
REPORTERS = {
    **{name: (name, name) for name in ("clearml", "codecarbon", "dagshub", "dvclive", "mlflow", "neptune", "swanlab")},
    **{name: (name, name) for name in ("trackio", "wandb")},
    "tensorboard": ("tensorboard tensorboardX", "tensorboard"),
    **{"azure_ml": ("azureml", "azureml-core"), "comet_ml": ("comet_ml", "comet-ml"), "flyte": ("flytekit",) * 2},
}
OPTIMIZERS = {  # by how their names begin
    **dict.fromkeys(
        ("adamw_bnb", "adamw_8bit", "ademamix", "lion", "paged", "rmsprop_bnb"), ("bitsandbytes", "bitsandbytes")
    ),
    **dict.fromkeys(("adamw_torch_4bit", "adamw_torch_8bit"), ("torchao", "torchao")),
    **dict.fromkeys(("lomo", "adalomo"), ("lomo_optim", "lomo-optim")),
    "adamw_anyprecision": ("torchdistx", "git+https://github.com/pytorch/torchdistx"),
    "apollo": ("apollo_torch", "apollo-torch"),
    "galore": ("galore_torch", "galore-torch"),
    "grokadamw": ("grokadamw", "grokadamw"),
    "schedule_free": ("schedulefree", "schedulefree"),
    "stable_adamw": ("optimi", "torch-optimi"),
}
# Settings of which one replaces the others.
ALTERNATIVES = (
    {"data_dir", "text", "dataset", "chat_data"},
    {"max_steps", "num_train_epochs", "tokens", "tokens_per_parameter"},
)
# A run takes these from its tokenizer; use_cache is for generation and stays at its default.
_NOT_FLAGS = {"vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "use_cache"}
# What a run that begins with a model may have otherwise than it; a longer context is learned.
OF_A_BASE = {"embd_pdrop", "attn_pdrop", "resid_pdrop", "max_position_embeddings"}
PROMPT = "Every effort moves you"
_TEXT_SOURCES = ("data_dir", "text", "dataset", "validation_text", "tokenizer", "vocab_size")


COMMON_SETTINGS = {  # what `train --help` prints; argparse adds the defaults
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
        "num_train_epochs": "Passes over the training rows.",
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


@dataclass
class RunArguments:
    """The run as a whole: its folder, its rows and what it shows."""

    _argument_group_name = "run"

    output_dir: Path = field(default=Path(), init=False)  # filled from the Trainer's flag of this name
    overwrite: bool = field(default=False, metadata={"help": "Replace a run that is already in the run folder."})
    resume: str = field(
        default="auto",
        metadata={
            "help": "Where to go on with a run that is in the run folder: `auto`, at its newest whole checkpoint, if "
            "its settings are these; a checkpoint's folder; or `never`."
        },
    )
    branch_from: Path | None = field(
        default=None,
        metadata={
            "help": "A checkpoint of another run, from its stable phase: this run goes on there with the same settings "
            "and brings the learning rate down by --max_steps (as the end of warmup_stable_decay)."
        },
    )
    init_from: str | None = field(
        default=None,
        metadata={
            "help": "Begin with this model instead of initial weights: a run folder, a model folder or checkpoint of "
            "ours, or the Hub id of one. Its sizes and its tokenizer come with it."
        },
    )
    data_dir: Path | None = field(
        default=None,
        metadata={
            "help": "Folder written by the command `prepare`. Unset: the text named below is prepared, "
            "in data/, and found there again by the next run that names the same."
        },
    )
    seq_len: int | None = field(
        default=None, metadata={"help": "Tokens per row while training; unset: max_position_embeddings."}
    )
    packing: Literal["stream", "bos_bestfit", "isolate", "best_fit", "padding"] | None = field(
        default=None,
        metadata={
            "help": "How documents become training rows. stream (unset): one after the other, cut where a row is full. "
            "bos_bestfit: each row begins with a document, what fits nowhere is cropped. isolate: as stream, but "
            "documents do not see each other. Held-out rows are always cut from the stream. Of chats: best_fit, "
            "several whole ones to a row, which do not see each other; padding, one to a row; unset, padding if packed "
            "rows would give fewer than 10 steps an epoch."
        },
    )
    tokens: int | None = field(
        default=None,
        metadata={"help": "Total training tokens, rounded up to a whole number of steps. Replaces --max_steps."},
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
        metadata={
            "help": "Skip a step whose gradient norm exceeds this multiple of the median over the last 128 steps; "
            "inf: skip no spike."
        },
    )
    max_bad_steps: int = field(
        default=20,
        metadata={"help": "Stop after this number of skipped steps in a row: spikes, losses or gradients not finite."},
    )
    allow_high_initial_loss: bool = field(
        default=False,
        metadata={
            "help": "Train although the loss of the initial weights is far above that of an even guess; only a note is "
            "printed then."
        },
    )
    early_stopping_patience: int | None = field(
        default=None,
        metadata={
            "help": "Stop when the held-out loss was not the lowest so many times in a row, and keep the checkpoint "
            "where it was: with 1, as soon as it rises. Needs --load_best_model_at_end."
        },
    )
    lora_rank: int | None = field(
        default=None,
        metadata={
            "help": "LoRA rank. The base weights are frozen (Hu et al. 2021; needs peft). The final model has the "
            "adapter merged; adapter/ has it alone."
        },
    )
    lora_alpha: float | None = field(
        default=None,
        metadata={
            "help": "LoRA scaling: the adapter's output is multiplied by this over the rank; unset: twice the rank."
        },
    )
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout of the adapter's input during training."})
    max_answers: int = field(
        default=200,
        metadata={
            "help": "Number of held-out prompts to answer after training, to report the share of answers that end "
            "with a stop token (chat runs only)."
        },
    )
    max_eval_samples: int | None = field(
        default=None,
        metadata={
            "help": "Maximum number of held-out rows to measure on: the first ones. Compare runs on the same rows."
        },
    )
    num_threads: int | None = field(
        default=None,
        metadata={
            "help": "CPU threads that PyTorch computes with; unset: one a core. Small models are fastest with one, and "
            "threads that wait for each other come to a crawl on a busy machine."
        },
    )
    preflight_only: bool = field(
        default=False, metadata={"help": "Check model, rows, schedule and disk, show what was found, and stop there."}
    )
    find_batch_size: bool = field(
        default=False,
        metadata={
            "help": "Try which micro-batch is the largest that fits in memory and use it; the rows a step stay as set "
            "by --per_device_train_batch_size and --gradient_accumulation_steps."
        },
    )
    print_recipe: bool = field(
        default=False,
        metadata={
            "help": "Print the whole recipe, ready to be saved, and what it changes in the one it extends; no run."
        },
    )
    prompts: list[str] | None = field(
        default=None,
        metadata={
            "help": "Texts that the model continues, or in chat runs answers, greedily and sampled. Default: "
            f"{PROMPT!r}; in chat runs the first held-out questions, which `push` does not publish."
        },
    )
    sample_all_checkpoints: bool = field(
        default=False,
        metadata={
            "help": "Write samples of the prompts at every checkpoint. Default: before the first step, after the last "
            "planned one, and between them at up to ten checkpoints that are 150 steps or more apart."
        },
    )

    def __post_init__(self) -> None:
        for name in ("num_threads", "max_eval_samples", "tokens", "early_stopping_patience", "lora_rank"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name} is {value}. Give 1 or more, or leave it out.")
        if self.packing not in (None, *PACKINGS, *CHAT_PACKINGS):
            raise UsageError(f"--packing is {self.packing}. Choose one of {', '.join((*PACKINGS, *CHAT_PACKINGS))}.")
        if not 0 <= self.lora_dropout < 1:
            raise UsageError(f"--lora_dropout is {self.lora_dropout:g}. Give a number from 0 to below 1.")
        if self.max_bad_steps < 1:
            raise UsageError(f"--max_bad_steps is {self.max_bad_steps}. Give 1 or more.")
        if not self.spike_factor > 1:
            raise UsageError(f"--spike_factor is {self.spike_factor:g}. Give a number above 1.")
        if self.init_seed is not None and not 0 <= self.init_seed < 1 << 32:
            raise UsageError(f"--init_seed is {self.init_seed}. Give a number from 0 to 2^32 - 1.")
        if self.tokens_per_parameter is not None and not 0 < self.tokens_per_parameter < math.inf:
            raise UsageError(f"--tokens_per_parameter is {self.tokens_per_parameter:g}. Give a number above 0.")
        if not all(prompt.strip() for prompt in self.prompts or []):
            raise UsageError("--prompts has an empty text, which cannot be continued. Give it a word.")

    @property
    def command_to_resume(self) -> str:
        """The words for the command that resumes this run: the same, without the flags that would start it again."""
        again = {"--overwrite": self.overwrite, "--resume": self.resume != "auto"}
        flags = [flag for flag, is_given in again.items() if is_given]
        return f"the same command{' without ' * bool(flags)}{' and '.join(flags)}"


@dataclass
class TrainerSettings(DeclaredTrainingArguments):
    """The Trainer's own arguments with the defaults of a pre-training run, as they are given."""

    _argument_group_name = "training (transformers.TrainingArguments)"

    output_dir: str | None = field(
        default=None, metadata={"help": "The run folder; unset: runs/<name of the recipe>, below the current folder."}
    )
    learning_rate: float = field(default=6e-4, metadata={"help": "Peak learning rate."})
    optim: str = field(
        default="adamw_torch_fused",
        metadata={
            "help": "A name of transformers', or muon: Muon for the matrices of the blocks and AdamW for the rest, "
            "with the same learning rate and weight decay (Liu et al. 2025)."
        },
    )
    lr_scheduler_type: str = field(
        default="cosine_with_min_lr",
        metadata={
            "help": "Shape of the learning rate: a name of transformers', or deepseek_steps: the peak to 80 percent of "
            "training, 31.6 percent of it to 90, then 10 (Bi et al. 2024)."
        },
    )
    lr_scheduler_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "JSON object for the schedule. cosine_with_min_lr: min_lr_rate is where it ends, as a share of the "
            "peak; unset, 0.1. warmup_stable_decay: decay_share, the share of all steps it decays in (0.2), or "
            "num_decay_steps; decay_type linear, cosine or 1-sqrt (linear); min_lr_ratio, where it ends (0)."
        },
    )
    warmup_steps: float | None = field(
        default=None,
        metadata={
            "help": "Steps of linear warm-up, or below 1 the share of all steps. Unset: 0.05, or none for a schedule "
            "that has no warm-up, like constant."
        },
    )
    weight_decay: float = field(default=0.1, metadata={"help": "Decay of what --decay says."})
    adam_beta2: float = field(default=0.95, metadata={"help": "AdamW's memory of squared gradients."})
    num_train_epochs: float = field(default=1.0, metadata={"help": "Passes over the training rows."})
    logging_steps: float = field(default=10, metadata={"help": "Steps between lines of metrics.jsonl."})
    # With the filter on, a NaN loss is logged as a finite number: the log would lie.
    logging_nan_inf_filter: bool = field(
        default=False, metadata={"help": "Hide NaN losses from the log. Leave it off."}
    )
    save_total_limit: int | None = field(default=2, metadata={"help": "Maximum number of checkpoints to keep."})
    dataloader_pin_memory: bool | None = field(  # pyright: ignore[reportIncompatibleVariableOverride]
        default=None, metadata={"help": "Pin rows in memory for faster copies to the GPU; unset: if there is one."}
    )
    ddp_find_unused_parameters: bool | None = field(
        default=False, metadata={"help": "Search for parameters without gradient each step; every one of ours has one."}
    )
    disable_tqdm: bool | None = field(default=True, metadata={"help": "The run draws its own progress line."})

    def __post_init__(self) -> None:
        if self.hub_token or self.push_to_hub:
            raise UsageError(
                "A run is not pushed during training, and a token is never a flag. Publish the finished run: "
                f"{command('push', 'RUN', 'USER/REPO')}"
            )
        if isinstance(self.lr_scheduler_kwargs, str):
            try:
                self.lr_scheduler_kwargs = parse_json(self.lr_scheduler_kwargs)
            except ValueError as error:
                raise UsageError(f"--lr_scheduler_kwargs {self.lr_scheduler_kwargs} is no JSON ({error}).") from None
        for name in [self.report_to] if isinstance(self.report_to, str) else self.report_to or []:
            _require("report_to", name, ["none", "all", "kubeflow", *REPORTERS])
        if self.load_best_model_at_end and str(self.eval_strategy) != str(self.save_strategy):
            raise UsageError(
                f"--load_best_model_at_end measures what it saves: give --eval_strategy {self.save_strategy} "
                "and an --eval_steps that divides --save_steps."
            )
        if self.resume_from_checkpoint:
            raise UsageError("--resume_from_checkpoint is --resume here, and a run goes on by itself.")
        if self.auto_find_batch_size:
            raise UsageError("--auto_find_batch_size would change the rows a step. --find_batch_size keeps them.")
        for name, least in _AT_LEAST.items():
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise UsageError(f"--{name} is {value}. Give {least:g} or more.")
        for name, strategy in _INTERVALS.items():
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError(
                    f"--{name} is {value:g}. Give a number of steps, or below 1 a share of all steps; for none, give "
                    f"--{strategy} no."
                )
        if self.max_steps != -1 and self.max_steps < 1:
            raise UsageError(f"--max_steps is {self.max_steps}. Give 1 or more, or leave it out for whole epochs.")
        if self.num_train_epochs <= 0:
            raise UsageError(f"--num_train_epochs is {self.num_train_epochs:g}. Give a number above 0.")
        optimizers = [member.value for member in declared("transformers.training_args", "OptimizerNames")]
        _require("optim", self.optim, [TrainerSettings.optim, MUON, *optimizers])
        schedules = [member.value for member in declared("transformers.trainer_utils", "SchedulerType")]
        _require("lr_scheduler_type", self.lr_scheduler_type, [*schedules, DEEPSEEK_STEPS])
        if self.optim == MUON and self.optim_args:
            raise UsageError("--optim muon takes no --optim_args. Leave them out.")
        if self.seed >= 1 << 32:
            raise UsageError(f"--seed is {self.seed}. Give a number below 2^32.")
        self._settle_warmup()

    def _settle_warmup(self) -> None:
        """Fill in how long warm-up is. Raises: UsageError if the schedule would pass over it without a word."""
        has_none = self.lr_scheduler_type in WITHOUT_WARMUP
        if self.warmup_steps is None:
            self.warmup_steps = 0 if has_none else 0.05  # pyright: ignore[reportIncompatibleVariableOverride]
        if has_none and self.warmup_steps > 0:
            name = getattr(self.lr_scheduler_type, "value", self.lr_scheduler_type)
            raise UsageError(
                f"--lr_scheduler_type {name} has no warm-up, but --warmup_steps is {self.warmup_steps:g}. "
                "Give 0, or take constant_with_warmup."
            )


def _require(flag: str, value: str, known: list[str]) -> None:
    """Accept the value of a flag that is a name. Raises: UsageError naming the nearest that is known."""
    if value in known:
        return
    likeness = [SequenceMatcher(None, value, name[: len(value)]).ratio() for name in known]  # adamw → adamw_torch
    near = known[likeness.index(max(likeness))]
    hint = f"Did you mean {near}?" if max(likeness) >= 0.6 else f"Choose one of {', '.join(dict.fromkeys(known))}."
    raise UsageError(f"--{flag} {value} is not known. {hint}")


DeclaredConfig = declared(
    "gpt2small_hf.model.configuration_gpt2small",
    "GPT2SmallConfig",
    methods=("validate_architecture", "position_embedding", "least_parameters"),
)


def _model_arguments() -> type:
    """A dataclass of the configuration's own fields, types made plain for argparse, with their defaults and help."""
    rows = [
        (f.name, float if f.type == float | int else f.type, field(default=f.default, metadata=dict(f.metadata)))
        for f in fields(DeclaredConfig)
        if f.name not in _NOT_FLAGS and f.default is not MISSING
    ]
    return make_dataclass("ModelArguments", rows, namespace={"_argument_group_name": "model (GPT2SmallConfig)"})


ModelArguments = _model_arguments()


@dataclass
class Arguments:
    """All settings of one run."""

    recipe: Path
    run: RunArguments
    data: PrepareArguments
    chat: ChatArguments
    model: Any
    trainer: TrainerArguments
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
    from gpt2small_hf.training.trainer_arguments import TrainerArguments

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
        if action.dest in _NOT_FOR_RUNS:
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


def keep_best(trainer: TrainerArguments) -> None:
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
