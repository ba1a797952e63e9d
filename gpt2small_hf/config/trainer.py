# pyright: strict
"""The settings of transformers' Trainer, with our defaults, read without importing torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any

from gpt2small_hf.config.declared import declared, declared_keys
from gpt2small_hf.config.parser import require_at_least, setting
from gpt2small_hf.errors import UsageError
from gpt2small_hf.invocation import command
from gpt2small_hf.runs.files import parse_json

if TYPE_CHECKING:
    from transformers import TrainingArguments as DeclaredTrainingArguments
else:
    _ENUMS = ("transformers.trainer_utils", "transformers.debug_utils")
    DeclaredTrainingArguments = declared("transformers.training_args", "TrainingArguments", *_ENUMS)

OWN_OPTIMIZERS = declared_keys("gpt2small_hf.training.optimizers", "OPTIMIZERS")
"""Names of --optim that transformers does not have."""
DEEPSEEK_STEPS = "deepseek_steps"
WITHOUT_WARMUP = {"constant", "reduce_lr_on_plateau", "greedy"}
"""Schedules of transformers that ignore `warmup_steps`."""
# Settings of the Trainer that a run does not use. `--help_all` does not list them.
NOT_FOR_RUNS = {
    *("do_train", "do_eval", "do_predict", "local_rank", "push_to_hub", "disable_tqdm", "use_cache"),
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
OPTIMIZER_PACKAGES = {  # by how their names begin
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


@dataclass(frozen=True)  # pyright: ignore[reportGeneralTypeIssues]
class TrainerSettings(DeclaredTrainingArguments):
    """The Trainer's own arguments with the defaults of a pre-training run, as they are given."""

    _argument_group_name = "training (transformers.TrainingArguments)"

    output_dir: str | None = field(default=None, init=False)  # the run has one, with its checkpoints in a subfolder
    learning_rate: float = setting(6e-4, "Peak learning rate.")
    optim: str = setting(
        "adamw_torch_fused",
        "Optimizer: a name of transformers, or muon: Muon for the matrices of the blocks and AdamW for the rest, with "
        "the same learning rate and weight decay (Liu et al. 2025).",
    )
    lr_scheduler_type: str = setting(
        "cosine_with_min_lr",
        "Learning-rate schedule: a name of transformers, or deepseek_steps: the peak up to 80 percent of training, "
        "31.6 percent of it up to 90, then 10 (Bi et al. 2024).",
    )
    lr_scheduler_kwargs: dict[str, Any] | str | None = setting(
        None,
        "JSON object with settings of the schedule. cosine_with_min_lr: min_lr_rate, the final share of the peak "
        "(0.1). warmup_stable_decay: decay_share, the share of all steps in the decay (0.2), or num_decay_steps; "
        "decay_type linear, cosine or 1-sqrt (linear); min_lr_ratio, the final share of the peak (0).",
    )
    warmup_steps: float | None = setting(  # pyright: ignore[reportIncompatibleVariableOverride]
        None,
        "Steps of linear warm-up, or below 1 the share of all steps. Unset: 0.05, or 0 for a schedule without warm-up "
        "such as constant.",
    )
    weight_decay: float = setting(0.1, "Weight decay; --decay names the parameters.")
    adam_beta2: float = setting(0.95, "Decay rate of AdamW's mean of squared gradients.")
    num_train_epochs: float = setting(1.0, "Number of epochs.")
    logging_steps: float = setting(10, "Steps between two lines of metrics.jsonl.")
    # With the filter, the Trainer logs a NaN loss as a finite number.
    logging_nan_inf_filter: bool = setting(False, "Hide NaN losses from the log. Leave it off.")
    save_total_limit: int | None = setting(2, "Maximum number of checkpoints to keep.")
    dataloader_pin_memory: bool | None = setting(  # pyright: ignore[reportIncompatibleVariableOverride]
        None, "Pin rows in memory, for faster copies to the GPU. Unset: if there is a GPU."
    )
    ddp_find_unused_parameters: bool | None = setting(
        False, "Search for parameters without gradient at each step. This package's models have none."
    )
    disable_tqdm: bool | None = setting(True, "Disable tqdm: a run has a progress line of its own.")

    def __post_init__(self) -> None:
        if self.hub_token or self.push_to_hub:
            raise UsageError(
                f"a token is never a flag, and a run is published after training: {command('push', 'RUN', 'USER/REPO')}"
            )
        for name in [self.report_to] if isinstance(self.report_to, str) else self.report_to or []:
            _require("report_to", name, ["none", "all", "kubeflow", *REPORTERS])
        if self.load_best_model_at_end and str(self.eval_strategy) != str(self.save_strategy):
            raise UsageError(
                f"--load_best_model_at_end needs an evaluation at each checkpoint: give --eval_strategy "
                f"{self.save_strategy} and an --eval_steps that divides --save_steps."
            )
        if self.resume_from_checkpoint:
            raise UsageError("--resume_from_checkpoint is not supported. Use --resume.")
        if self.auto_find_batch_size:
            raise UsageError("--auto_find_batch_size changes the rows per step. Use --find_batch_size, which does not.")
        if self.use_cache:
            raise UsageError("--use_cache true keeps keys and values in training, which reads none. Leave it out.")
        require_at_least(self, _AT_LEAST)
        for name, strategy in _INTERVALS.items():
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError(
                    f"--{name} is {value:g}. Give steps, or below 1 a share of all; for none: --{strategy} no."
                )
        if self.max_steps != -1 and self.max_steps < 1:
            raise UsageError(f"--max_steps is {self.max_steps}. Give 1 or more, or leave it out for whole epochs.")
        if self.num_train_epochs <= 0:
            raise UsageError(f"--num_train_epochs is {self.num_train_epochs:g}. Give a number above 0.")
        optimizers = [member.value for member in declared("transformers.training_args", "OptimizerNames")]
        _require("optim", self.optim, [TrainerSettings.optim, *OWN_OPTIMIZERS, *optimizers])
        schedules = [member.value for member in declared("transformers.trainer_utils", "SchedulerType")]
        _require("lr_scheduler_type", self.lr_scheduler_type, [*schedules, DEEPSEEK_STEPS])
        if self.optim in OWN_OPTIMIZERS and self.optim_args:
            raise UsageError(f"--optim {self.optim} takes no --optim_args. Leave them out.")
        if self.seed >= 1 << 32:
            raise UsageError(f"--seed is {self.seed}. Give a number below 2^32.")
        self._complete_schedule()

    def _complete_schedule(self) -> None:
        """Set what depends on the name of the schedule. Raises: UsageError if it would ignore --warmup_steps."""
        name, settings = str(self.lr_scheduler_type), self.lr_scheduler_kwargs
        if isinstance(settings, str):
            try:
                settings = parse_json(settings)
            except ValueError as error:
                raise UsageError(f"--lr_scheduler_kwargs {settings} is not JSON ({error}).") from None
        if name in ("cosine_with_min_lr", "cosine_warmup_with_min_lr") and settings is None:
            settings = {"min_lr_rate": 0.1}
        elif name == "warmup_stable_decay":
            given: dict[str, Any] = settings or {}
            settings = {"decay_type": "linear"} | ({} if "num_decay_steps" in given else {"decay_share": 0.2}) | given
        object.__setattr__(self, "lr_scheduler_kwargs", settings)
        has_none = name in WITHOUT_WARMUP
        if self.warmup_steps is None:
            object.__setattr__(self, "warmup_steps", 0 if has_none else 0.05)
        elif has_none and self.warmup_steps > 0:
            raise UsageError(
                f"--lr_scheduler_type {name} has no warm-up, but --warmup_steps is {self.warmup_steps:g}. "
                "Give 0, or use constant_with_warmup."
            )


def _require(flag: str, value: str, known: list[str]) -> None:
    """Accept the value of a flag that is a name. Raises: UsageError naming the nearest that is known."""
    if value in known:
        return
    likeness = [SequenceMatcher(None, value, name[: len(value)]).ratio() for name in known]  # adamw → adamw_torch
    near = known[likeness.index(max(likeness))]
    hint = f"Did you mean {near}?" if max(likeness) >= 0.6 else f"Choose one of {', '.join(dict.fromkeys(known))}."
    raise UsageError(f"--{flag} {value} is not known. {hint}")
