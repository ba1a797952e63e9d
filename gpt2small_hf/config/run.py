"""The settings of a run as a whole, and of its model."""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Literal

from gpt2small_hf.config.data import CHAT_PACKINGS, PACKINGS
from gpt2small_hf.config.declared import declared
from gpt2small_hf.errors import UsageError

PROMPT = "Every effort moves you"
# A run takes these from its tokenizer; use_cache is for generation and stays at its default.
_NOT_FLAGS = {"vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "use_cache"}


@dataclass(frozen=True)
class RunArguments:
    """The run as a whole: its folder, its rows and what it shows."""

    _argument_group_name = "run"

    output_dir: Path = field(
        default=Path(), metadata={"help": "The run folder; unset: runs/<name of the recipe>, in the current folder."}
    )
    overwrite: bool = field(default=False, metadata={"help": "Replace a run that is already in the run folder."})
    resume: str = field(
        default="auto",
        metadata={
            "help": "Checkpoint to resume from: `auto`, the latest complete one in the run folder, if its settings are "
            "the same; the folder of a checkpoint; or `never`."
        },
    )
    branch_from: Path | None = field(
        default=None,
        metadata={
            "help": "Checkpoint from the stable phase of another run with the same settings. This run starts there and "
            "decays the learning rate to its end at --max_steps, as warmup_stable_decay does."
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
            "documents do not see each other. Held-out rows are always cut from the stream. Chat runs only: "
            "best_fit puts several whole chats in a row, which do not see each other; padding one. Unset: padding if "
            "packed rows would give fewer than 10 steps per epoch, else best_fit."
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
            "help": "Early stopping: stop after this number of evaluations in a row without a new lowest held-out "
            "loss, and keep the best checkpoint. Needs --load_best_model_at_end."
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
    return make_dataclass(
        "ModelArguments", rows, frozen=True, namespace={"_argument_group_name": "model (GPT2SmallConfig)"}
    )


ModelArguments = _model_arguments()
