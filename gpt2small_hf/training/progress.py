"""The progress line of a run."""

from __future__ import annotations

import os
import time
from collections import deque
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text
from transformers import (
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from gpt2small_hf.formatting import duration, one_line

SECONDS_BETWEEN_PLAIN_LINES = 10
SECONDS_OF_PACE = 30
STEPS_OF_WARM_UP = 3
"""Initial steps excluded from the speed: they allocate memory and compile."""
CHARACTERS_OF_SAMPLE = 60


class ProgressLine(TrainerCallback):
    """Print step, loss, learning rate, gradient norm, speed and time left to stderr, in this order.

    On a terminal the line is redrawn in place after a bar; otherwise a line is printed every ten seconds. Each
    evaluation and each sample add a permanent line: step, losses, scores of benchmarks, the start of the first sample.
    """

    def __init__(self, tokens_per_step: int) -> None:
        self.tokens_per_step = tokens_per_step
        self.console = Console(stderr=True, highlight=False)
        self.bar = Progress(BarColumn(20), TextColumn("{task.description}"), console=self.console, transient=True)
        self.logged: dict[str, float] = {}
        self.evaluated = False
        self.sample: str | None = None
        self.scores: list[str] = []
        """Of benchmarks at this step."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Start the clock and the bar."""
        self.first_step = state.global_step
        # (seconds spent in steps, step) of the last half minute or more: the speed of a busy machine varies.
        self.pace = deque([(0.0, state.global_step)])
        self.began = self.printed = self.mark = time.perf_counter()
        self.in_steps = 0.0
        self.interrupted = False  # by an evaluation or a checkpoint, which are not part of the next step
        if state.is_world_process_zero and self.console.is_terminal:
            self.task = self.bar.add_task(self.words(state), total=state.max_steps, completed=state.global_step)
            self.bar.start()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Store the latest values."""
        self.logged.update(logs or {})

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Print evaluations and samples since the last step; restart the clock."""
        if self.evaluated or self.sample is not None or self.scores:
            self.print_history(state)
        if self.interrupted:
            self.mark, self.interrupted = time.perf_counter(), False

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Update the line."""
        now = time.perf_counter()
        self.count_step(now, state.global_step)
        if not state.is_world_process_zero:
            return
        if self.console.is_terminal:
            self.bar.update(self.task, completed=state.global_step, description=self.words(state))
        elif now - self.printed >= SECONDS_BETWEEN_PLAIN_LINES:
            self.printed = now
            self.console.print(self.words(state), soft_wrap=True)

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Show that an evaluation is running."""
        if not self.interrupted:
            self.interrupted = True
            self.show("evaluating…")

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Defer the permanent line to the start of the next step: samples of this step follow the evaluation."""
        self.interrupted = self.evaluated = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Exclude the checkpoint from the duration of the next step."""
        self.interrupted = True

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Print the last line permanently."""
        if state.is_world_process_zero:
            self.close()
            if self.evaluated or self.sample is not None or self.scores:
                self.print_history(state)
            self.console.print(self.words(state), soft_wrap=True)

    def count_step(self, now: float, step: int) -> None:
        """Add the duration of a step, without the preceding evaluation and checkpoint; ignore the first, slow steps."""
        if step <= self.first_step + STEPS_OF_WARM_UP:
            self.began = now
            self.pace = deque([(0.0, step)])
        else:
            self.in_steps += now - self.mark
            if self.in_steps - self.pace[-1][0] > 1:
                self.pace.append((self.in_steps, step))
            while len(self.pace) > 1 and self.in_steps - self.pace[1][0] > SECONDS_OF_PACE:
                self.pace.popleft()
        self.mark = now

    def show(self, activity: str) -> None:
        """Show an activity after the bar until the next step."""
        if self.bar.live.is_started:
            step = self.bar.tasks[self.task].description.partition("  ")[0]
            self.bar.update(self.task, description=f"{step}  {activity}", refresh=True)

    def print_history(self, state: TrainerState) -> None:
        """Print the step, its losses and the start of a sample, above the bar if there is one."""
        if state.is_world_process_zero:
            names = [("loss", "loss"), *([("eval_loss", "held-out")] if self.evaluated else [])]
            words = [f"step {state.global_step:,}/{state.max_steps:,}"]
            words += [f"{label} {self.logged[name]:.3f}" for name, label in names if name in self.logged]
            words += self.scores
            if self.sample is not None:
                words.append(f"▸{one_line(self.sample, CHARACTERS_OF_SAMPLE)}")
            line = Text("  ".join(words))  # no markup: a sample may contain anything
            if self.console.is_terminal:
                self.console.print(line, no_wrap=True, overflow="ellipsis")
            else:
                self.console.print(line, soft_wrap=True)
        self.evaluated, self.sample, self.scores = False, None, []

    def write_at_once(self, line: str) -> None:
        """Write a line from a signal handler, in place of the bar, which is redrawn below it."""
        erase = "\r\x1b[2K" if self.bar.live.is_started and not self.console.legacy_windows else ""
        # Not print: the signal may have come while stderr's buffer is being written.
        os.write(2, f"{erase}{line}\n".encode())

    def close(self) -> None:
        """Remove the bar from the terminal, if there is one."""
        if self.bar.live.is_started:
            self.bar.stop()

    def words(self, state: TrainerState) -> str:
        """Return the line. Speed and time left are known a few steps after the first, slow ones."""
        words = [f"step {state.global_step:,}/{state.max_steps:,}"]
        for name, label, style in [
            ("loss", "loss", ".3f"),
            ("eval_loss", "held-out", ".3f"),
            ("learning_rate", "lr", ".1e"),
            ("grad_norm", "grad", ".2f"),
        ]:
            if name in self.logged:
                words.append(f"{label} {self.logged[name]:{style}}")
        since, at_step = self.pace[0]
        if state.global_step > at_step:
            seconds_a_step = (self.in_steps - since) / (state.global_step - at_step)
            words.append(f"{_thousands(self.tokens_per_step / seconds_a_step)} tok/s")
            # Assume the same share of evaluations, checkpoints and samples in the remaining time.
            elapsed = (self.mark - self.began) / self.in_steps
            left = f"left {duration((state.max_steps - state.global_step) * seconds_a_step * elapsed)}"
        else:
            left = None
        if torch.cuda.is_available():
            words.append(f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
        return "  ".join([*words, left] if left else words)


def _thousands(number: float) -> str:
    return f"{number:.0f}" if number < 10_000 else f"{number / 1000:.0f}k"
