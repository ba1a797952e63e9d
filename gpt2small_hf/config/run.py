# pyright: strict
"""The settings of a run as a whole, and of its model."""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Literal

from gpt2small_hf.config.declared import declared
from gpt2small_hf.config.parser import require_at_least, setting
from gpt2small_hf.errors import UsageError

PROMPT = "Every effort moves you"
# A run takes these from its tokenizer; use_cache is for generation and stays at its default.
_NOT_FLAGS = {"vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "use_cache"}


@dataclass(frozen=True)
class RunArguments:
    """The run as a whole: its folder, rows, length and output."""

    _argument_group_name = "run"

    output_dir: Path = setting(Path(), "Run folder; unset: runs/<name of the recipe> in the current folder.")
    overwrite: bool = setting(False, "Replace an existing run in the run folder.")
    resume: str = setting(
        "auto",
        "Checkpoint to resume from: `auto`, the latest complete one in the run folder, if its settings are the same; "
        "the folder of a checkpoint; or `never`.",
    )
    branch_from: Path | None = setting(
        None,
        "Checkpoint from the stable phase of another run with the same settings. This run starts there and decays the "
        "learning rate to its end at --max_steps, as warmup_stable_decay does.",
    )
    init_from: str | None = setting(
        None,
        "Base model to fine-tune, with its sizes and tokenizer: a run, model or checkpoint folder of this package, or "
        "the Hub id of one. Unset: initial weights.",
    )
    data_dir: Path | None = setting(
        None, "Folder written by the command `prepare`. Unset: the text is prepared in data/, and reused by later runs."
    )
    seq_len: int | None = setting(None, "Tokens per training row; unset: --max_position_embeddings.")
    packing: Literal["stream", "bos_bestfit", "isolate", "best_fit", "padding"] | None = setting(
        None,
        "How documents become training rows. stream (unset): concatenated and cut at the row length. bos_bestfit: each "
        "row starts with a document, and documents that fit in no row are cropped. isolate: as stream, without "
        "attention between documents. Held-out rows are always those of stream. best_fit: several complete chats per "
        "row, without attention between them; padding: one; unset: padding if packed rows give fewer than 10 steps "
        "per epoch, else best_fit (chat runs only).",
    )
    tokens: int | None = setting(
        None, "Total training tokens, rounded up to a whole number of steps. Replaces --max_steps."
    )
    tokens_per_parameter: float | None = setting(
        None, "Total training tokens as a multiple of the model's parameters; Chinchilla: 20 (Hoffmann et al. 2022)."
    )
    parameters_counted: Literal["all", "non_embedding"] = setting(
        "all", "Parameters that --tokens_per_parameter counts. Tied weights count once."
    )
    init_seed: int | None = setting(
        None,
        "Seed of the initial weights; unset: --seed. Each tensor is drawn from this seed and its name, so models that "
        "differ in one setting share all other weights. --data_seed decides the order of rows.",
    )
    decay: Literal["matrices", "all"] = setting(
        "matrices", "Parameters that --weight_decay applies to: matrices and embeddings, or also norms and biases."
    )
    spike_factor: float = setting(
        50.0,
        "Skip a step whose gradient norm exceeds this multiple of the median over the last 128 steps; inf: never.",
    )
    max_bad_steps: int = setting(
        20, "Maximum number of skipped steps in a row: spikes, losses or gradients that are not finite."
    )
    allow_high_initial_loss: bool = setting(
        False, "Train although the loss of the initial weights is far above that of a uniform guess."
    )
    early_stopping_patience: int | None = setting(
        None,
        "Early stopping: number of evaluations in a row without a new lowest held-out loss after which training stops. "
        "Needs --load_best_model_at_end.",
    )
    lora_rank: int | None = setting(
        None,
        "LoRA rank. The base weights are frozen (Hu et al. 2021; needs peft). The final model has the adapter merged; "
        "adapter/ has it alone.",
    )
    lora_alpha: float | None = setting(
        None, "LoRA scaling: the adapter's output is multiplied by this over the rank; unset: twice the rank."
    )
    lora_dropout: float = setting(0.0, "Dropout of the adapter's input during training.")
    max_answers: int = setting(
        200,
        "Number of held-out prompts to answer after training, to report the share of answers that end with a stop "
        "token (chat runs only).",
    )
    max_eval_samples: int | None = setting(
        None, "Maximum number of held-out rows, counted from the first. Compare only runs with the same value."
    )
    eval_tasks: list[str] | None = setting(
        None,
        "Benchmarks to evaluate at each checkpoint saved: names of --eval_task_data, of lm-evaluation-harness, or "
        "`small`. Training stays the same bit for bit. Keep their time below a tenth of the training time with "
        "--eval_tasks_limit and --save_steps; a larger share is reported. Unset: all of --eval_task_data, none without "
        "it.",
    )
    eval_tasks_limit: int | None = setting(
        None, "Maximum number of items of each of --eval_tasks, counted from the first. Unset: all."
    )
    eval_task_data: Path | None = setting(
        None, "Folder with the questions of --eval_tasks, instead of the network: as --task_data of `evaluate`."
    )
    num_threads: int | None = setting(
        None,
        "Number of CPU threads of PyTorch; unset: one per core. 1 is fastest for small models and on a busy machine.",
    )
    preflight_only: bool = setting(False, "Check model, rows, schedule and disk, print the checks, and exit.")
    find_batch_size: bool = setting(
        False,
        "Use the largest micro-batch that fits in memory. The rows per step stay those of "
        "--per_device_train_batch_size and --gradient_accumulation_steps.",
    )
    print_recipe: bool = setting(
        False, "Print the complete recipe and what it changes in the one that it extends, and exit."
    )
    prompts: list[str] | None = setting(
        None,
        "Texts that the model continues, or answers in chat runs, greedily and sampled. Unset: "
        f"{PROMPT!r}; in chat runs the first held-out questions, which `push` does not publish.",
    )
    sample_all_checkpoints: bool = setting(
        False,
        "Sample the prompts at every checkpoint. Unset: before the first step, after the last, and at up to ten "
        "checkpoints between them that are at least 150 steps apart.",
    )

    def __post_init__(self) -> None:
        counts = ("num_threads", "max_eval_samples", "tokens", "early_stopping_patience", "lora_rank", "max_bad_steps")
        counts += ("eval_tasks_limit",)
        require_at_least(self, dict.fromkeys(counts, 1))
        if not 0 <= self.lora_dropout < 1:
            raise UsageError(f"--lora_dropout is {self.lora_dropout:g}. Give a number from 0 to below 1.")
        if not self.spike_factor > 1:
            raise UsageError(f"--spike_factor is {self.spike_factor:g}. Give a number above 1.")
        if self.init_seed is not None and not 0 <= self.init_seed < 1 << 32:
            raise UsageError(f"--init_seed is {self.init_seed}. Give a number from 0 to 2^32 - 1.")
        if self.tokens_per_parameter is not None and not 0 < self.tokens_per_parameter < math.inf:
            raise UsageError(f"--tokens_per_parameter is {self.tokens_per_parameter:g}. Give a number above 0.")
        if self.eval_tasks_limit is not None and not self.has_eval_tasks:
            raise UsageError("--eval_tasks_limit needs --eval_tasks or --eval_task_data. Name the tasks.")
        if not all(prompt.strip() for prompt in self.prompts or []):
            raise UsageError("--prompts has an empty text, which cannot be continued. Give it a word.")

    @property
    def has_eval_tasks(self) -> bool:
        """Whether benchmarks are evaluated at checkpoints."""
        return bool(self.eval_tasks) or (self.eval_tasks is None and self.eval_task_data is not None)

    @property
    def command_to_resume(self) -> str:
        """Words for the command that resumes this run: without the flags that would start it again."""
        again = {"--overwrite": self.overwrite, "--resume": self.resume != "auto"}
        flags = [flag for flag, is_given in again.items() if is_given]
        return f"the same command{' without ' * bool(flags)}{' and '.join(flags)}"


DeclaredConfig = declared(
    "gpt2small_hf.model.configuration_gpt2small",
    "GPT2SmallConfig",
    methods=("validate_architecture", "position_embedding", "least_parameters"),
)


def _model_arguments() -> type:
    """Return a dataclass of the fields of `GPT2SmallConfig`, with types that argparse takes, defaults and help."""
    rows = [
        (f.name, float if f.type == float | int else f.type, field(default=f.default, metadata=dict(f.metadata)))
        for f in fields(DeclaredConfig)
        if f.name not in _NOT_FLAGS and f.default is not MISSING
    ]
    return make_dataclass(
        "ModelArguments", rows, frozen=True, namespace={"_argument_group_name": "model (GPT2SmallConfig)"}
    )


ModelArguments = _model_arguments()
