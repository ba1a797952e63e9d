"""Detect symptoms of bad training in the rows of `metrics.jsonl`: what is seen, the likely cause, what to try.

Each symptom is reported once per run. `gradient_guard.py` skips bad steps automatically; symptoms need a person to act.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from gpt2small_hf.runs.files import append_jsonl
from gpt2small_hf.runs.results import MetricsRow

# A spike exceeds the recent median by this share of it, by this number of nats, by this multiple of the largest recent
# rise, and by this number of standard deviations of the logarithm of the loss.
SPIKE_SHARE, SPIKE_LEAST, SPIKE_RISES, SPIKE_DEVIATIONS = 0.1, 0.2, 2.0, 6.0
RECENT, HISTORY, ENOUGH, FEW = 8, 64, 16, 10
"""Logging intervals: for the median, for the noise (at most), for the noise (at least), to detect a doubled loss."""
PLATEAU_ROWS, PLATEAU_SHARE = 30, 0.25
"""Minimum length of a plateau: logging intervals, and share of the run."""
PLATEAU_GAIN = 0.02
"""Maximum decrease of the loss on a plateau, as a share of the loss, including its uncertainty."""
WORSE_EVALUATIONS, WORSE_SHARE = 3, 0.002
"""Consecutive evaluations above the best, each by this share of it: smaller differences are noise."""
MOST_NORM = 100.0
WAITING_ROWS, MOST_WAITING = 5, 0.1


class Symptoms:
    """Detects symptoms in rows of metrics, read in order."""

    def __init__(self, *, peak_rate: float, warmup_steps: int, total_steps: int) -> None:
        """Take the peak learning rate, and the lengths of warm-up and training in optimizer steps."""
        self.peak_rate, self.warmup_steps, self.total_steps = peak_rate, warmup_steps, total_steps
        self.named: set[str] = set()
        self.losses: dict[str, deque[float]] = {key: deque(maxlen=HISTORY) for key in ("loss_max", "loss")}
        self.start: float | None = None
        self.best: tuple[float, int] | None = None
        self.worse = 0
        self.since_best: list[float] = []
        self.at_full_rate: list[tuple[int, float]] = []
        self.highest_rate = 0.0
        self.waits: deque[float] = deque(maxlen=WAITING_ROWS)

    def judge(self, row: MetricsRow) -> list[MetricsRow]:
        """Return the symptoms that a row shows for the first time. A row with a symptom marks it as reported."""
        if row.symptom is not None:
            self.named.add(row.symptom)
            return []
        seen = {
            "loss spike": self._spike(row),
            "plateau": self._plateau(row),
            "divergence": self._divergence(row),
            "overfitting": self._overfitting(row),
            "learning rate": self._rate(row),
            "gradient norm": self._norm(row),
            "waiting for data": self._waiting(row),
        }
        new = {name: says for name, says in seen.items() if says and name not in self.named}
        self.named |= new.keys()
        return [MetricsRow.of(row.step, symptom=name, says=says) for name, says in new.items()]

    def _spike(self, row: MetricsRow) -> str | None:
        says = None
        for key, before in self.losses.items():
            if (value := getattr(row, key)) is not None:
                if is_spike(value, before):
                    says = says or (
                        f"the loss jumped to {value:.2f} from about {usual(before):.2f}: a bad batch, or too high a "
                        "rate; if it stays up, resume from an earlier checkpoint with a lower --learning_rate or "
                        "--max_grad_norm."
                    )
                before.append(value)
        return says

    def _plateau(self, row: MetricsRow) -> str | None:
        if row.loss is None or row.learning_rate is None or row.step <= self.warmup_steps:
            return None
        if row.learning_rate < self.peak_rate / 2:  # the decay, where the loss changes little
            self.at_full_rate = []
            return None
        self.at_full_rate.append((row.step, row.loss))
        begin = row.step - PLATEAU_SHARE * self.total_steps
        n = max(PLATEAU_ROWS, sum(step >= begin for step, _ in self.at_full_rate))
        steps, losses = np.array(self.at_full_rate[-n:], dtype=float).T
        if len(steps) < n or steps[0] > begin + (steps[1] - steps[0]):
            return None
        gain, error = gain_of(steps, losses)
        if gain > 2 * error or gain + 2 * error > PLATEAU_GAIN * losses.mean():
            return None
        return (
            f"the loss has stayed at {losses.mean():.2f} for {steps[-1] - steps[0]:,.0f} steps: the learning rate may "
            "be far off, or the labels may not follow from the input; look at the rows, and try a --learning_rate "
            "three times lower and one three times higher."
        )

    def _divergence(self, row: MetricsRow) -> str | None:
        if row.eval_loss is None:
            return None
        if row.step == 0:
            self.start = row.eval_loss
        if self.start is None or row.eval_loss <= self.start * (1 + WORSE_SHARE):
            return None
        training = self.losses["loss"]
        if training and training[-1] <= self.start:  # overfitting, see below
            return None
        return (
            f"the held-out loss is {row.eval_loss:.3f}, above the {self.start:.3f} before training: the model gets "
            "worse; lower --learning_rate, warm up longer, or clip at --max_grad_norm 1."
        )

    def _overfitting(self, row: MetricsRow) -> str | None:
        if row.loss is not None:
            self.since_best.append(row.loss)
        if row.eval_loss is None:
            return None
        if self.best is None or row.eval_loss <= self.best[0]:
            self.best, self.worse, self.since_best = (row.eval_loss, row.step), 0, []
            return None
        self.worse = self.worse + 1 if row.eval_loss > self.best[0] * (1 + WORSE_SHARE) else 0
        half = len(self.since_best) // 2
        # In the first epoch no row has been repeated.
        if self.worse < WORSE_EVALUATIONS or not half or (row.epoch is not None and row.epoch <= 1):
            return None
        if statistics.fmean(self.since_best[-half:]) >= statistics.fmean(self.since_best[:half]):
            return None
        return (
            f"the held-out loss has been above its best, {self.best[0]:.3f} at step {self.best[1]:,}, for {self.worse} "
            "evaluations while the training loss falls: the model memorises its training rows; use the checkpoint of "
            "that step, or train on more text, or with dropout."
        )

    def _rate(self, row: MetricsRow) -> str | None:
        if row.learning_rate is None:
            return None
        self.highest_rate = max(self.highest_rate, row.learning_rate)
        # In the second half the rate may be decaying, and a log that starts there does not contain its peak.
        well_after_warmup = max(2 * self.warmup_steps, self.warmup_steps + 5) <= row.step <= self.total_steps / 2
        if not well_after_warmup or self.highest_rate > self.peak_rate / 2:
            return None
        return (
            f"the learning rate is {row.learning_rate:.1e} and was never above half of its peak of "
            f"{self.peak_rate:.1e}, though warm-up should take {self.warmup_steps:,} steps: training is slow; see "
            "--learning_rate, --lr_scheduler_type and --warmup_steps, which counts optimizer steps."
        )

    def _norm(self, row: MetricsRow) -> str | None:
        norm = row.grad_norm if row.grad_norm_max is None else row.grad_norm_max
        if norm is None or norm <= MOST_NORM:
            return None
        return (
            f"the gradient norm reached {norm:,.0f}, where 0.1 to 10 is usual: training is unstable; lower "
            "--learning_rate, warm up longer, or clip at --max_grad_norm 1."
        )

    def _waiting(self, row: MetricsRow) -> str | None:
        if row.data_wait is not None:
            self.waits.append(row.data_wait)
        if len(self.waits) < WAITING_ROWS or min(self.waits) <= MOST_WAITING:
            return None
        return (
            f"{statistics.fmean(self.waits):.0%} of the time is spent waiting for rows: they are read too slowly; "
            "raise --dataloader_num_workers, or put the prepared folder on a faster disk."
        )


def usual(before: Sequence[float]) -> float:
    """Return the median of the recent losses."""
    return statistics.median(list(before)[-RECENT:])


def is_spike(value: float, before: Sequence[float]) -> bool:
    """Return whether a loss exceeds the previous losses by more than noise explains.

    Noise is estimated from the differences of consecutive losses, whose standard deviation is √2 times as large, so
    that a falling loss does not count as noise. Noise grows during training, so the most recent differences are also
    measured separately. Losses of few rows are skewed, their logarithms hardly. A rise is also compared to the
    largest recent rise.
    """
    if len(before) < FEW:
        return False
    level, largest_rise = usual(before), float(np.diff(before).max())
    share = SPIKE_SHARE if len(before) >= ENOUGH else 1.0
    if value - level <= max(share * level, SPIKE_LEAST, SPIKE_RISES * largest_rise):
        return False
    least = 1e-3  # nats: below, losses are rounding
    changes = np.diff(np.log(np.maximum(before, least)))
    noise = max(float(changes.std()), float(changes[-RECENT:].std())) / math.sqrt(2)
    return math.log(value / max(level, least)) > SPIKE_DEVIATIONS * noise


def gain_of(steps: np.ndarray, losses: np.ndarray) -> tuple[float, float]:
    """Fit a line through the losses; return its decrease from first to last step, and the standard error."""
    x = steps - steps.mean()
    slope = (x @ losses) / (x @ x)
    off = losses - losses.mean() - slope * x
    error = math.sqrt((off @ off) / (len(x) - 2) / (x @ x))
    length = steps[-1] - steps[0]
    return float(-slope * length), float(error * length)


class HealthCallback(TrainerCallback):
    """Report each symptom on stderr and in `metrics.jsonl`, once per run, also across resumes."""

    def __init__(self, metrics: Path) -> None:
        """Take the run's metrics file. Add this callback after the one that writes it."""
        self.metrics = metrics

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Read the metrics and the symptoms that were logged up to this step."""
        groups = kwargs["optimizer"].param_groups
        self.symptoms = Symptoms(
            peak_rate=groups[0].get("initial_lr", args.learning_rate),
            warmup_steps=args.get_warmup_steps(state.max_steps),
            total_steps=state.max_steps,
        )
        if state.is_world_process_zero:
            for row in MetricsRow.load_lines(self.metrics):
                if row.step <= state.global_step:
                    self.symptoms.judge(row)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Report new symptoms."""
        if not state.is_world_process_zero or not logs:
            return
        for row in self.symptoms.judge(MetricsRow.of(state.global_step, **logs)):
            print(f"symptom: step {row.step:,}, {row.symptom}: {row.says}", file=sys.stderr)
            append_jsonl(self.metrics, row.to_json())
