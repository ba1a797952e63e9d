"""The flags of `plan`, `sweep`, `chat` and `answer` that are not settings of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from gpt2small_hf.config.parser import require_at_least, setting
from gpt2small_hf.errors import UsageError


@dataclass(frozen=True)
class PlanArguments:
    """The devices to plan for."""

    _argument_group_name = "plan"

    device_name: str | None = setting(
        None, "Device to plan for, such as H100, A100 or RTX 4090. Unset: the one of this machine."
    )
    n_devices: int | None = setting(None, "Number of devices. Unset: those of this machine.")
    mfu: float | None = setting(
        None,
        "Expected share of the device's peak FLOP/s (MFU). Unset: what the reference series measured on this device in "
        "this precision, or the range that it measured on others.",
    )

    def __post_init__(self) -> None:
        require_at_least(self, {"n_devices": 1})
        if self.mfu is not None and not 0 < self.mfu <= 1:
            raise UsageError(f"--mfu is {self.mfu:g}. Give a share above 0, up to 1.")


@dataclass(frozen=True)
class SweepArguments:
    """The runs of a sweep, and their folder."""

    _argument_group_name = "sweep"

    seeds: int = setting(3, "Number of initial-weight seeds of the baseline, and of training seeds for each of them.")
    seeds_per_intervention: int | None = setting(
        None, "Number of seed pairs (1, 1), (2, 2), … of every other recipe; unset: 2, at most --seeds."
    )
    n_jobs: int = setting(1, "Number of runs at a time. On a CPU each uses the num_threads of its recipe.")
    output_dir: Path | None = setting(None, "Folder of the runs and of the table; unset: runs/<name of FOLDER>.")
    only: list[str] = field(
        default_factory=list, metadata={"help": "Recipes to run; the table has all that were run. Unset: all."}
    )
    overwrite: bool = setting(False, "Repeat runs whose recipe or text has changed.")
    table_only: bool = setting(False, "Write the table of the finished runs, without training.")

    def __post_init__(self) -> None:
        require_at_least(self, dict.fromkeys(("seeds", "seeds_per_intervention", "n_jobs"), 1))
        if self.n_pairs > self.seeds:
            raise UsageError(
                f"--seeds_per_intervention is {self.seeds_per_intervention}, but the baseline is run with {self.seeds} "
                f"(--seeds), and runs are compared with the baseline of the same seeds. Give at most {self.seeds}."
            )

    @property
    def n_pairs(self) -> int:
        """Seed pairs of each recipe but the baseline."""
        return min(2, self.seeds) if self.seeds_per_intervention is None else self.seeds_per_intervention


@dataclass(frozen=True)
class ChatArguments:
    """How answers are generated."""

    system: str | None = setting(None, "System message. The model's chat template must accept one.")
    max_new_tokens: int = setting(256, "Longest answer, in tokens.")
    temperature: float = setting(0.8, "Logits are divided by this: lower is closer to the likeliest answer.")
    top_k: int = setting(50, "Sample from this number of likeliest tokens. 0: all.")
    top_p: float = setting(1.0, "Sample from the likeliest tokens that have this probability together.")
    greedy: bool = setting(False, "Choose the likeliest token each time, in place of sampling.")
    seed: int | None = setting(None, "Random seed of sampling. Unset: other answers each time.")
    trust_remote_code: bool = setting(False, "Run Python code that is stored with the model, if it needs it.")

    def __post_init__(self) -> None:
        require_at_least(self, {"max_new_tokens": 1, "top_k": 0, "seed": 0})
        if not 0 < self.temperature < float("inf"):
            raise UsageError(
                f"--temperature is {self.temperature:g}. Give a number above 0, or --greedy for the likeliest answer."
            )
        if not 0 < self.top_p <= 1:
            raise UsageError(f"--top_p is {self.top_p:g}. Give a probability above 0, up to 1.")


@dataclass(frozen=True)
class AnswerArguments:
    """The questions, and how they are answered."""

    questions: str | None = setting(
        None,
        "Questions: .jsonl, .json or .parquet with question and reference, instruction, input and output (Alpaca), or "
        "messages; FILE[935:1045] for some rows.",
    )
    output: Path = setting(Path("answers"), "Folder of the files of answers.")
    max_new_tokens: int = setting(256, "Longest answer, in tokens.")
    batch_size: int = setting(16, "Questions that are answered together; answers do not depend on it.")
    prompt_format: str | None = setting(
        None,
        "Prompt: template (the tokenizer's chat template), alpaca, or plain (the question alone). Unset: the template "
        "if there is one, else alpaca.",
        choices=["template", "alpaca", "plain"],
    )
    trust_remote_code: bool = setting(False, "Run Python code that is stored with the model, if it needs it.")

    def __post_init__(self) -> None:
        require_at_least(self, {"max_new_tokens": 1, "batch_size": 1})
