"""Benchmarks at checkpoints: the model in training → rows of `metrics.jsonl`, and the share of the time they took."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from gpt2small_hf.errors import print_stderr
from gpt2small_hf.evaluation.checkpoint_tasks import CheckpointTasks
from gpt2small_hf.evaluation.comparison import describe_score
from gpt2small_hf.formatting import duration
from gpt2small_hf.runs.files import append_jsonl
from gpt2small_hf.runs.results import MetricsRow
from gpt2small_hf.training.callbacks import unsharded_model
from gpt2small_hf.training.progress import ProgressLine

LARGEST_SHARE = 0.1
"""Of the time since training started: a larger share is reported."""
SECONDS_TO_REPORT = 5
"""A shorter time is not reported, whatever its share."""


class BenchmarkCallback(TrainerCallback):
    """Evaluate `--eval_tasks` at each scheduled checkpoint. Rank 0 evaluates; the others wait at the next step."""

    def __init__(
        self,
        path: Path,
        tasks: CheckpointTasks | None,
        tokenizer: PreTrainedTokenizerBase,
        *,
        progress: ProgressLine,
        starts_scheduled: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Configure the evaluation.

        Args:
            path: metrics file of the run.
            tasks: the benchmarks; None on other ranks than 0.
            tokenizer: tokenizer of the model.
            progress: displays the scores.
            starts_scheduled: False if training resumes at a checkpoint that only a signal requested.
            clock: returns seconds.
        """
        self.path, self.tasks, self.tokenizer = path, tasks, tokenizer
        self.progress, self.starts_scheduled, self.clock = progress, starts_scheduled, clock
        self.seconds = 0.0
        self.warned = False
        self.skipped: list[str] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clock, and evaluate the checkpoint to resume from if the run was killed before it was evaluated."""
        self.began = self.clock()
        if state.global_step > 0 and self.starts_scheduled:
            self.on_save(args, state, control, **kwargs)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Append the scores of this step to the metrics, unless they exist."""
        model = unsharded_model(kwargs["model"])
        if self.tasks is None:
            return
        step = state.global_step
        if any(row.step == step and row.benchmarks is not None for row in MetricsRow.load_lines(self.path)):
            return
        self.progress.show("evaluating tasks…")
        began = self.clock()
        found, skipped = self.tasks.measure(model, self.tokenizer, step, batch_size=args.eval_batch_size)
        append_jsonl(self.path, MetricsRow.of(step, benchmarks=found.to_json()).to_json())
        self.progress.scores = [describe_score(one) for one in found.scores]
        for sentence in skipped:
            if sentence not in self.skipped:
                self.skipped.append(sentence)
                print_stderr(sentence)
        self.seconds += self.clock() - began
        if self.seconds > SECONDS_TO_REPORT and self.share > LARGEST_SHARE and not self.warned:
            self.warned = True
            print_stderr(
                f"--eval_tasks took {self.share:.0%} of the time so far ({self._times}), more than a tenth. Lower "
                "--eval_tasks_limit, name fewer tasks, or raise --save_steps."
            )

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Print the share of the time that the evaluations took."""
        if self.seconds:
            print_stderr(f"--eval_tasks took {self.share:.0%} of the time ({self._times}).")

    @property
    def share(self) -> float:
        """Share of the time since training started in this process."""
        return self.seconds / max(self.clock() - self.began, self.seconds, 1e-9)

    @property
    def _times(self) -> str:
        return f"{duration(self.seconds)} of {duration(self.clock() - self.began)}"
