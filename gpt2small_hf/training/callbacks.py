"""What a run writes down and shows while it trains, and how a signal ends it."""

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
from gpt2small_hf.runs.files import append_jsonl, read_jsonl, write_jsonl
from gpt2small_hf.runs.layout import RunFolder

SECONDS_BETWEEN_PLAIN_LINES = 10
SECONDS_BETWEEN_CHARTS = 60
SECONDS_OF_PACE = 30
STEPS_OF_WARM_UP = 3
"""The first steps allocate and compile: speed is measured after them."""
MOST_SAMPLES = 10
STEPS_BETWEEN_SAMPLES = 150
CHARACTERS_OF_SAMPLE = 60


class MetricsLog(TrainerCallback):
    """Append what the Trainer logs to `metrics.jsonl`, one JSON object a line, each with its step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Forget lines past the step that training starts from, and an earlier end: a resumed run logs them again."""
        if state.is_world_process_zero and self.path.exists():
            rows = [row for row in read_jsonl(self.path) if row["step"] <= state.global_step]
            if state.global_step == 0:  # an evaluation at the start (--eval_on_start) is done again
                rows = rows[:1]
            write_jsonl(self.path, [row for row in rows if "train_runtime" not in row])

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


class Samples(TrainerCallback):
    """Append completions of the prompts to `samples.jsonl`: before the first step, and at up to ten checkpoints."""

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
        """Take the file, and what is asked.

        Args:
            path: the run's samples.
            tokenizer: of the model.
            prompts: asked each time.
            chat: whether they are questions.
            progress: says that samples are made.
            all_checkpoints: sample at each checkpoint.
            starts_scheduled: False if training resumes at a step that is saved only because of a signal: an
                uninterrupted run has no samples of it.
        """
        self.path, self.tokenizer, self.prompts, self.chat = path, tokenizer, prompts, chat
        self.progress, self.all_checkpoints = progress, all_checkpoints
        self.starts_scheduled = starts_scheduled

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Forget what is past the step that training starts from; write what a kill kept from being written there."""
        if state.is_world_process_zero and self.path.exists():
            rows = [row for row in read_jsonl(self.path) if row["step"] <= state.global_step]
            n_last = sum(row["step"] == state.global_step for row in rows)
            if n_last < len(self.prompts):
                rows = rows[: len(rows) - n_last]
            write_jsonl(self.path, rows)
        if self.starts_scheduled:
            self.on_save(args, state, control, **kwargs)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write the samples of this step, unless they are there or the step has none."""
        if not samples_are_due(args, state, every=self.all_checkpoints):
            return
        model = unsharded_model(kwargs["model"])
        if not state.is_world_process_zero:
            return
        if self.path.exists() and any(row["step"] == state.global_step for row in read_jsonl(self.path)):
            return
        self.progress.show("sampling…")
        rows = complete(model, self.tokenizer, self.prompts, chat=self.chat)
        for row in rows:
            append_jsonl(self.path, {"step": state.global_step, **row})
        self.progress.sample = rows[0]["greedy" if self.chat else "sampled"] if rows else None


def samples_are_due(args: TrainingArguments, state: TrainerState, *, every: bool = False) -> bool:
    """Whether a checkpoint of this step gets samples.

    Step 0 and the last planned one do, and with `every` all scheduled checkpoints; without it, every n-th of them, with
    the smallest n for which they are 150 steps apart or more and at most ten: samples take as long as some steps.
    It depends on the step alone, not on time or on earlier checkpoints: a resumed run has the samples
    of one that was not interrupted. A checkpoint that a signal asked for is not on the schedule.
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
    """The model as it is, with adapters if it has some, or gathered from its shards; every rank must ask."""
    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return model
    assert isinstance(model, GPT2SmallForCausalLM)
    weights = {
        name: parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        for name, parameter in model.named_parameters()
    }
    whole = GPT2SmallForCausalLM(model.config).to(model.device)  # pyright: ignore[reportArgumentType]
    whole.load_state_dict(weights, strict=False)  # a tied head stands among them once
    return whole


class Charts(TrainerCallback):
    """Draw the run's charts at a checkpoint, unless they were drawn less than a minute ago."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        self.drawn = time.perf_counter()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Draw them from the files. Nothing depends on them, so the clock may decide."""
        if state.is_world_process_zero and time.perf_counter() - self.drawn >= SECONDS_BETWEEN_CHARTS:
            draw_charts(self.run)
            self.drawn = time.perf_counter()


class EarlyStopping(TrainerCallback):
    """End training once the held-out loss was not the lowest `patience` times in a row.

    It asks the log alone, so a run that was resumed stops where it would have.
    """

    def __init__(self, patience: int) -> None:
        self.patience = patience

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop at once a run that had stopped and was then killed."""
        if rising(state.log_history, self.patience):
            control.should_training_stop = True

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Look, and stop."""
        if rising(state.log_history, self.patience):
            control.should_training_stop = True
            if state.is_world_process_zero:
                times = "" if self.patience == 1 else f" {self.patience} times in a row"
                print_stderr(
                    f"step {state.global_step:,}: the held-out loss was not the lowest{times}; training ends here."
                )


def rising(log: list[dict[str, Any]], patience: int | None) -> bool:
    """Whether the held-out loss was not the lowest so far in the last `patience` measurements."""
    losses = [row["eval_loss"] for row in log if "eval_loss" in row]
    losses = [math.inf if loss is None or math.isnan(loss) else loss for loss in losses]
    if patience is None or len(losses) <= patience:
        return False
    return min(losses[-patience:]) >= min(losses[:-patience])


class StopOnSignal(TrainerCallback):
    """At SIGTERM or SIGINT on any rank, save and stop, on all ranks after the same step. A second signal kills."""

    def __init__(self, progress: ProgressLine, to_resume: str = "the same command") -> None:
        """Take the line that signals are answered on, and the words for the command that resumes the run."""
        self.progress, self.to_resume = progress, to_resume
        self.received = 0
        """The signal that this rank received; 0 for none. Only the handler sets it: it may run at any moment."""
        self.caught = 0
        """The signal that ended training, on this rank or another; 0 for none."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Listen."""
        self.former = {number: signal.signal(number, self.catch) for number in (signal.SIGTERM, signal.SIGINT)}

    def catch(self, number: int, frame: FrameType | None) -> None:
        """Remember the signal until the step's end."""
        self.received = number
        self.close()
        self.progress.write_at_once("stopping after this step, once it is saved; a second signal ends at once.")

    def close(self) -> None:
        """Leave signals to who had them before."""
        for number, handler in getattr(self, "former", {}).items():
            signal.signal(number, handler)
        self.former = {}

    def agreed(self, device: torch.device) -> int:
        """The signal that any rank has received, on all of them; 0 for none. All ranks ask after the same step.

        One that arrives meanwhile counts after the next step: the other ranks do not know of it yet.
        """
        self.caught = self.received
        if dist.is_initialized():
            caught = torch.tensor(self.received, device=device)
            dist.all_reduce(caught, dist.ReduceOp.MAX)
            self.caught = int(caught)
        return self.caught

    def interruption(self, saved: Path | None, *, resumable: bool = True) -> RunInterruptedError:
        """The error that ends the run; `saved` is the checkpoint to resume from, if it is `resumable`."""
        name = signal.Signals(self.caught).name
        to_resume = self.to_resume[0].upper() + self.to_resume[1:]
        kept = "no checkpoint was saved" if saved is None else f"saved {saved}. {to_resume} resumes from it"
        if saved is not None and not resumable:
            kept = f"saved {saved}, of which training cannot resume: with --save_only_model it has no optimizer state"
        return RunInterruptedError(f"{name}; {kept}.", self.caught)


class ProgressLine(TrainerCallback):
    """One line on stderr, always in the same order: step, loss, learning rate, gradient norm, speed, time left.

    On a terminal it is redrawn in place beside a bar; elsewhere a line is printed every ten seconds. Each evaluation
    and each sample leave a line: step, losses, the beginning of the first prompt's text.
    """

    def __init__(self, tokens_per_step: int) -> None:
        self.tokens_per_step = tokens_per_step
        self.console = Console(stderr=True, highlight=False)
        self.bar = Progress(BarColumn(20), TextColumn("{task.description}"), console=self.console, transient=True)
        self.logged: dict[str, float] = {}
        self.evaluated = False
        self.sample: str | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Show the bar."""
        self.first_step = state.global_step
        # (seconds spent in steps, step), of the last half minute or more: a busy machine's speed changes.
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
        **kwargs: Any,
    ) -> None:
        """Remember the newest figures."""
        self.logged.update(logs or {})

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Print what was evaluated and sampled since the last step; start the clock again."""
        if self.evaluated or self.sample is not None:
            self.print_history(state)
        if self.interrupted:
            self.mark, self.interrupted = time.perf_counter(), False

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Show the newest figures."""
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
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Say why the bar does not move."""
        if not self.interrupted:
            self.interrupted = True
            self.show("evaluating…")

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Keep the line for the next step's beginning: samples of this step come after the evaluation."""
        self.interrupted = self.evaluated = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Leave the checkpoint's time out of the next step's."""
        self.interrupted = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave the last figures on the screen."""
        if state.is_world_process_zero:
            self.close()
            if self.evaluated or self.sample is not None:
                self.print_history(state)
            self.console.print(self.words(state), soft_wrap=True)

    def count_step(self, now: float, step: int) -> None:
        """Add the time of a step, without evaluation and checkpoint before it; leave out the first, slow steps."""
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
        """Put what the run is doing beside steps behind the bar, until the next step."""
        if self.bar.live.is_started:
            step = self.bar.tasks[self.task].description.partition("  ")[0]
            self.bar.update(self.task, description=f"{step}  {activity}", refresh=True)

    def print_history(self, state: TrainerState) -> None:
        """Print a line of the step, its losses and the beginning of a sample, above the bar if there is one."""
        if state.is_world_process_zero:
            names = [("loss", "loss"), *([("eval_loss", "held-out")] if self.evaluated else [])]
            words = [f"step {state.global_step:,}/{state.max_steps:,}"]
            words += [f"{label} {self.logged[name]:.3f}" for name, label in names if name in self.logged]
            if self.sample is not None:
                words.append(f"▸{one_line(self.sample, CHARACTERS_OF_SAMPLE)}")
            line = Text("  ".join(words))  # no markup: a model can write anything
            if self.console.is_terminal:
                self.console.print(line, no_wrap=True, overflow="ellipsis")
            else:
                self.console.print(line, soft_wrap=True)
        self.evaluated, self.sample = False, None

    def write_at_once(self, line: str) -> None:
        """Write a line from a signal handler, in the place of the bar, which is drawn again below it."""
        erase = "\r\x1b[2K" if self.bar.live.is_started and not self.console.legacy_windows else ""
        # Not print: the signal may have come while stderr's buffer is being written.
        os.write(2, f"{erase}{line}\n".encode())

    def close(self) -> None:
        """Take the bar off the terminal; harmless when there is none."""
        if self.bar.live.is_started:
            self.bar.stop()

    def words(self, state: TrainerState) -> str:
        """The line itself. Speed and time left are known once some steps after the first, slow ones are done."""
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
            # Evaluations, checkpoints and samples to come take their share of the time.
            elapsed = (self.mark - self.began) / self.in_steps
            left = f"left {duration((state.max_steps - state.global_step) * seconds_a_step * elapsed)}"
        else:
            left = None
        if torch.cuda.is_available():
            words.append(f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
        return "  ".join([*words, left] if left else words)


def _thousands(number: float) -> str:
    return f"{number:.0f}" if number < 10_000 else f"{number / 1000:.0f}k"
