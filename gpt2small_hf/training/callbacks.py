"""What a run writes down and shows while it trains, and how a signal ends it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
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

from gpt2small_hf.evaluation.completions import complete
from gpt2small_hf.model.modeling_gpt2small import GPT2SmallForCausalLM
from gpt2small_hf.report.charts import draw_charts
from gpt2small_hf.runs import RunFolder, append_jsonl, read_jsonl, say, write_jsonl
from gpt2small_hf.training.resume import rising

SECONDS_BETWEEN_PLAIN_LINES = 10
SECONDS_OF_PACE = 30


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
    """Append to `samples.jsonl` what the model makes of each prompt: at the first step, and whenever it is saved."""

    def __init__(self, path: Path, tokenizer: PreTrainedTokenizerBase, prompts: list[str], *, chat: bool) -> None:
        self.path, self.tokenizer, self.prompts, self.chat = path, tokenizer, prompts, chat

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
        self.on_save(args, state, control, **kwargs)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write the samples of this step, unless they are there."""
        model = whole_model(kwargs["model"])
        if not state.is_world_process_zero:
            return
        if self.path.exists() and any(row["step"] == state.global_step for row in read_jsonl(self.path)):
            return
        for row in complete(model, self.tokenizer, self.prompts, chat=self.chat):
            append_jsonl(self.path, {"step": state.global_step, **row})


def whole_model(model: nn.Module) -> Any:
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
    """Draw the run's pictures whenever it is saved."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Draw them from the files."""
        if state.is_world_process_zero:
            draw_charts(self.run)


class StopWhenRising(TrainerCallback):
    """End training once the held-out loss was not the lowest `patience` times in a row.

    It asks the log alone, so a run that was resumed stops where it would have.
    """

    def __init__(self, patience: int) -> None:
        self.patience = patience

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Look, and stop."""
        if rising(state.log_history, self.patience):
            control.should_training_stop = True
            if state.is_world_process_zero:
                times = "" if self.patience == 1 else f" {self.patience} times in a row"
                say(f"step {state.global_step:,}: the held-out loss was not the lowest{times}; training ends here.")


class StopOnSignal(TrainerCallback):
    """At SIGTERM or SIGINT on any rank, save and stop, on all ranks after the same step. A second signal kills."""

    def __init__(self) -> None:
        self.caught = 0
        """The signal that ended training, on this rank or another; 0 for none."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Listen."""
        self.former = {number: signal.signal(number, self.catch) for number in (signal.SIGTERM, signal.SIGINT)}

    def catch(self, number: int, frame: FrameType | None) -> None:
        """Remember the signal until the step's end."""
        self.caught = number
        self.close()
        # Not print: the signal may have come while stderr's buffer is being written.
        os.write(2, b"stopping after this step, once it is saved; a second signal ends at once.\n")

    def close(self) -> None:
        """Leave signals to who had them before."""
        for number, handler in getattr(self, "former", {}).items():
            signal.signal(number, handler)
        self.former = {}

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Agree with the other ranks, and stop."""
        caught = self.caught
        if dist.is_initialized():
            agreed = torch.tensor(caught, device=args.device)
            dist.all_reduce(agreed, dist.ReduceOp.MAX)
            caught = int(agreed)
        if caught:
            self.caught = caught
            control.should_save = control.should_training_stop = True


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
