"""Callbacks of a run: metrics, samples, charts, early stopping and signals."""

from __future__ import annotations

import math
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch
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
from gpt2small_hf.model.modeling_gpt2small import GPT2SmallForCausalLM
from gpt2small_hf.report.charts import draw_charts
from gpt2small_hf.runs.files import append_jsonl
from gpt2small_hf.runs.layout import RunFolder
from gpt2small_hf.runs.results import MetricsRow, Sample
from gpt2small_hf.runs.typed_json import save_lines
from gpt2small_hf.training.progress import ProgressLine

SECONDS_BETWEEN_CHARTS = 60
MOST_SAMPLES = 10
STEPS_BETWEEN_SAMPLES = 150


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
