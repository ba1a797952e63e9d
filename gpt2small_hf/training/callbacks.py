"""Callbacks of a run: metrics, samples, charts, early stopping, signals and the progress line."""

from __future__ import annotations

import math
import os
import signal
import time
from collections import deque
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import (
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import SaveStrategy

from gpt2small_hf.errors import RunInterruptedError, print_stderr
from gpt2small_hf.evaluation.completions import complete
from gpt2small_hf.formatting import duration
from gpt2small_hf.model.modeling_gpt2small import GPT2SmallForCausalLM
from gpt2small_hf.report.charts import draw_charts
from gpt2small_hf.report.tables import one_line
from gpt2small_hf.runs.files import append_jsonl
from gpt2small_hf.runs.json_records import save_lines
from gpt2small_hf.runs.layout import RunFolder
from gpt2small_hf.runs.results import MetricsRow, Sample

SECONDS_BETWEEN_PLAIN_LINES = 10
SECONDS_BETWEEN_CHARTS = 60
SECONDS_OF_PACE = 30
STEPS_OF_WARM_UP = 3
"""Initial steps excluded from the speed: they allocate memory and compile."""
MOST_SAMPLES = 10
STEPS_BETWEEN_SAMPLES = 150
CHARACTERS_OF_SAMPLE = 60


class MetricsLog(TrainerCallback):
    """Append what the Trainer logs to `metrics.jsonl`, one JSON object per line, each with its step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Remove lines after the start step, and the final summary: a resumed run logs them again."""
        if state.is_world_process_zero and self.path.exists():
            rows = [row for row in MetricsRow.load_lines(self.path) if row.step <= state.global_step]
            if state.global_step == 0:  # an evaluation at the start (--eval_on_start) is done again
                rows = rows[:1]
            save_lines(self.path, [row for row in rows if not row.has("train_loss")])

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Write one line."""
        if state.is_world_process_zero and logs:
            append_jsonl(self.path, MetricsRow.of(state.global_step, **logs).to_json())


class SampleCallback(TrainerCallback):
    """Append completions of the prompts to `samples.jsonl`: before the first step, and at ten checkpoints at most."""

    def __init__(
        self,
        path: Path,
        tokenizer: PreTrainedTokenizerBase,
        prompts: list[str],
        *,
        chat: bool,
        progress: ProgressLine,
        all_checkpoints: bool = False,
        starts_scheduled: bool = True,
    ) -> None:
        """Configure the samples.

        Args:
            path: samples file of the run.
            tokenizer: tokenizer of the model.
            prompts: prompts to complete.
            chat: whether the prompts are questions for the chat template.
            progress: displays that sampling is in progress.
            all_checkpoints: sample at every scheduled checkpoint.
            starts_scheduled: False if training resumes at a checkpoint that only a signal requested: an
                uninterrupted run has no samples of that step.
        """
        self.path, self.tokenizer, self.prompts, self.chat = path, tokenizer, prompts, chat
        self.progress, self.all_checkpoints = progress, all_checkpoints
        self.starts_scheduled = starts_scheduled

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Remove samples after the start step; write those of the start step if they are missing or incomplete."""
        if state.is_world_process_zero and self.path.exists():
            rows = [row for row in Sample.load_lines(self.path) if row.step <= state.global_step]
            n_last = sum(row.step == state.global_step for row in rows)
            if n_last < len(self.prompts):
                rows = rows[: len(rows) - n_last]
            save_lines(self.path, rows)
        if self.starts_scheduled:
            self.on_save(args, state, control, **kwargs)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write the samples of this step, unless they exist or none are due."""
        if not samples_are_due(args, state, every=self.all_checkpoints):
            return
        model = unsharded_model(kwargs["model"])
        if not state.is_world_process_zero:
            return
        if any(row.step == state.global_step for row in Sample.load_lines(self.path)):
            return
        self.progress.show("sampling…")
        rows = complete(model, self.tokenizer, self.prompts, chat=self.chat)
        for row in rows:
            append_jsonl(self.path, Sample(step=state.global_step, **vars(row)).to_json())
        self.progress.sample = (rows[0].greedy if self.chat else rows[0].sampled) if rows else None


def samples_are_due(args: TrainingArguments, state: TrainerState, *, every: bool = False) -> bool:
    """Return whether a checkpoint of this step gets samples.

    Step 0 and the last planned step do. With `every`, so do all scheduled checkpoints; without it, every n-th of them,
    with the smallest n that keeps samples at least 150 steps apart and at ten checkpoints at most: sampling takes as
    long as several steps. The result depends only on the step, so a resumed run has the samples of an uninterrupted
    one. A checkpoint that only a signal requested is not scheduled.
    """
    if state.global_step in (0, state.max_steps):
        return True
    strategy = args.eval_strategy if args.save_strategy == SaveStrategy.BEST else args.save_strategy
    if strategy == SaveStrategy.EPOCH:
        number, total = state.epoch or 0.0, math.ceil(state.num_train_epochs)
        interval = state.max_steps / total
    else:
        interval = state.eval_steps if args.save_strategy == SaveStrategy.BEST else state.save_steps
        number, total = state.global_step / interval, math.ceil(state.max_steps / interval)
    nearest = round(number)
    if strategy == "no" or abs(number - nearest) > 1e-6:
        return False
    stride = max(math.ceil(STEPS_BETWEEN_SAMPLES / interval), math.ceil(total / MOST_SAMPLES))
    return every or nearest % stride == 0


def unsharded_model(model: nn.Module) -> Any:
    """Return the model itself, or a copy with weights gathered from all shards; all ranks must call it."""
    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return model
    assert isinstance(model, GPT2SmallForCausalLM)
    weights = {
        name: parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        for name, parameter in model.named_parameters()
    }
    gathered = GPT2SmallForCausalLM(model.config).to(model.device)  # pyright: ignore[reportArgumentType]
    gathered.load_state_dict(weights, strict=False)  # tied weights are listed once
    return gathered


class ChartCallback(TrainerCallback):
    """Draw the run's charts at checkpoints, at most once a minute."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        self.drawn = time.perf_counter()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Draw the charts if they are due. Nothing else depends on them, so timing by the clock is safe."""
        if state.is_world_process_zero and time.perf_counter() - self.drawn >= SECONDS_BETWEEN_CHARTS:
            draw_charts(self.run)
            self.drawn = time.perf_counter()


class EarlyStopping(TrainerCallback):
    """Stop training after `patience` consecutive evaluations without a new lowest held-out loss.

    The decision depends only on the log, so a resumed run stops at the same step as an uninterrupted one.
    """

    def __init__(self, patience: int) -> None:
        self.patience = patience

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Stop at once if the run was killed after it had stopped."""
        if rising(state.log_history, self.patience):
            control.should_training_stop = True

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Stop training if the loss has not improved."""
        if rising(state.log_history, self.patience):
            control.should_training_stop = True
            if state.is_world_process_zero:
                times = "" if self.patience == 1 else f" {self.patience} times in a row"
                print_stderr(
                    f"step {state.global_step:,}: the held-out loss was not the lowest{times}; training ends here."
                )


def rising(log: list[dict[str, Any]], patience: int | None) -> bool:
    """Return whether none of the last `patience` evaluations has a new lowest held-out loss."""
    losses = [row["eval_loss"] for row in log if "eval_loss" in row]
    losses = [math.inf if loss is None or math.isnan(loss) else loss for loss in losses]
    if patience is None or len(losses) <= patience:
        return False
    return min(losses[-patience:]) >= min(losses[:-patience])


class StopOnSignal(TrainerCallback):
    """Save and stop on SIGTERM or SIGINT to any rank, on all ranks after the same step. A second signal kills."""

    def __init__(self, progress: ProgressLine, to_resume: str = "the same command") -> None:
        """Take the progress line to write messages to, and how to refer to the command that resumes the run."""
        self.progress, self.to_resume = progress, to_resume
        self.received = 0
        """The signal that this rank received; 0 for none. Only the handler sets it: it may run at any moment."""
        self.caught = 0
        """The signal that ended training, on this rank or another; 0 for none."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Install the signal handlers."""
        self.former = {number: signal.signal(number, self.catch) for number in (signal.SIGTERM, signal.SIGINT)}

    def catch(self, number: int, frame: FrameType | None) -> None:
        """Record the signal until the end of the step."""
        self.received = number
        self.close()
        self.progress.write_at_once("stopping after this step, once it is saved; a second signal ends at once.")

    def close(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in getattr(self, "former", {}).items():
            signal.signal(number, handler)
        self.former = {}

    def agreed(self, device: torch.device) -> int:
        """Return the signal that any rank has received; 0 for none. All ranks must call it after the same step.

        A signal that arrives during the call takes effect after the next step, as the other ranks cannot know it yet.
        """
        self.caught = self.received
        if dist.is_initialized():
            caught = torch.tensor(self.received, device=device)
            dist.all_reduce(caught, dist.ReduceOp.MAX)
            self.caught = int(caught)
        return self.caught

    def interruption(self, saved: Path | None, *, resumable: bool = True) -> RunInterruptedError:
        """Create the error that ends the run; `saved` is the checkpoint to resume from, if `resumable`."""
        name = signal.Signals(self.caught).name
        to_resume = self.to_resume[0].upper() + self.to_resume[1:]
        kept = "no checkpoint was saved" if saved is None else f"saved {saved}. {to_resume} resumes from it"
        if saved is not None and not resumable:
            kept = f"saved {saved}, from which training cannot resume: with --save_only_model it has no optimizer state"
        return RunInterruptedError(f"{name}; {kept}.", self.caught)


class ProgressLine(TrainerCallback):
    """Print step, loss, learning rate, gradient norm, speed and time left to stderr, in this order.

    On a terminal the line is redrawn in place after a bar; otherwise a line is printed every ten seconds. Each
    evaluation and each sample add a permanent line: step, losses, and the start of the first sample.
    """

    def __init__(self, tokens_per_step: int) -> None:
        self.tokens_per_step = tokens_per_step
        self.console = Console(stderr=True, highlight=False)
        self.bar = Progress(BarColumn(20), TextColumn("{task.description}"), console=self.console, transient=True)
        self.logged: dict[str, float] = {}
        self.evaluated = False
        self.sample: str | None = None

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
        if self.evaluated or self.sample is not None:
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
            if self.evaluated or self.sample is not None:
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
            if self.sample is not None:
                words.append(f"▸{one_line(self.sample, CHARACTERS_OF_SAMPLE)}")
            line = Text("  ".join(words))  # no markup: a sample may contain anything
            if self.console.is_terminal:
                self.console.print(line, no_wrap=True, overflow="ellipsis")
            else:
                self.console.print(line, soft_wrap=True)
        self.evaluated, self.sample = False, None

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
