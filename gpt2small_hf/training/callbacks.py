"""What a run writes down and shows while it trains: the metrics file and the progress line."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from gpt2small_hf.runs import append_jsonl, read_jsonl, write_jsonl

SECONDS_BETWEEN_PLAIN_LINES = 10
SECONDS_OF_PACE = 30


class MetricsLog(TrainerCallback):
    """Append what the Trainer logs to `metrics.jsonl`, one JSON object a line, each with its step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Forget lines past the step that training starts from: a resumed run logs them again."""
        if state.is_world_process_zero and self.path.exists():
            write_jsonl(self.path, [row for row in read_jsonl(self.path) if row["step"] <= state.global_step])

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write one line."""
        if state.is_world_process_zero and logs:
            append_jsonl(self.path, {"step": state.global_step, **logs})


class ProgressLine(TrainerCallback):
    """One line on stderr, always in the same order: step, loss, learning rate, gradient norm, speed, time left.

    On a terminal it is redrawn in place under a bar; elsewhere a line is printed every ten seconds.
    """

    def __init__(self, tokens_per_step: int) -> None:
        self.tokens_per_step = tokens_per_step
        self.console = Console(stderr=True, highlight=False)
        self.bar = Progress(BarColumn(20), TextColumn("{task.description}"), console=self.console, transient=True)
        self.logged: dict[str, float] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clock."""
        # Speed is that of the last half minute or more: a busy machine's is not the same all the way.
        self.pace = [(time.perf_counter(), state.global_step)]
        self.printed = time.perf_counter()
        if state.is_world_process_zero and self.console.is_terminal:
            self.task = self.bar.add_task("", total=state.max_steps, completed=state.global_step)
            self.bar.start()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Remember the newest figures."""
        self.logged.update(logs or {})

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Show them."""
        if not state.is_world_process_zero:
            return
        if self.console.is_terminal:
            self.bar.update(self.task, completed=state.global_step, description=self.words(state))
        elif time.perf_counter() - self.printed >= SECONDS_BETWEEN_PLAIN_LINES:
            self.printed = time.perf_counter()
            self.console.print(self.words(state), soft_wrap=True)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave the last figures on the screen."""
        if state.is_world_process_zero:
            self.close()
            self.console.print(self.words(state), soft_wrap=True)

    def close(self) -> None:
        """Take the bar off the terminal; harmless when there is none."""
        if self.bar.live.is_started:
            self.bar.stop()

    def words(self, state: TrainerState) -> str:
        """The line itself."""
        now = time.perf_counter()
        while len(self.pace) > 1 and now - self.pace[1][0] > SECONDS_OF_PACE:
            self.pace.pop(0)
        since, at_step = self.pace[0]
        if now - self.pace[-1][0] > 1:
            self.pace.append((now, state.global_step))
        steps_a_second = (state.global_step - at_step) / (now - since)
        words = [f"step {state.global_step:,}/{state.max_steps:,}"]
        for name, label, style in [
            ("loss", "loss", ".3f"),
            ("eval_loss", "held-out", ".3f"),
            ("learning_rate", "lr", ".1e"),
            ("grad_norm", "grad", ".2f"),
        ]:
            if name in self.logged:
                words.append(f"{label} {self.logged[name]:{style}}")
        words.append(f"{_thousands(steps_a_second * self.tokens_per_step)} tok/s")
        if torch.cuda.is_available():
            words.append(f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
        left = (state.max_steps - state.global_step) / steps_a_second if steps_a_second else 0
        words.append(f"left {duration(left)}")
        return "  ".join(words)


def duration(seconds: float) -> str:
    """Seconds as people say them: 42s, 3m07s, 3h12m."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 1:
        return f"{rest}s"
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def _thousands(number: float) -> str:
    return f"{number:.0f}" if number < 10_000 else f"{number / 1000:.0f}k"
