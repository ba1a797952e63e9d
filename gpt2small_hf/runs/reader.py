# pyright: strict
"""Read the files of a run folder."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from gpt2small_hf.errors import UsageError
from gpt2small_hf.runs.layout import RunFolder, checkpoints_in, number_of
from gpt2small_hf.runs.records import Resolved
from gpt2small_hf.runs.results import (
    Answer,
    Completions,
    GuardState,
    HeldOut,
    HeldOutRows,
    MetricsRow,
    Sample,
    TrainerProgress,
)


class Run:
    """The contents of a run folder. Each file is read when it is first needed; a damaged one raises a UsageError."""

    def __init__(self, folder: RunFolder) -> None:
        """Raise: UsageError if the folder is missing or not a run folder."""
        if not folder.resolved.is_file():
            reason = "is not a run folder. Name one" if folder.root.exists() else "does not exist. Name a run folder"
            raise UsageError(f"{folder.root} {reason}, such as runs/tiny.")
        self.folder = folder
        self.name = folder.root.resolve().name

    @cached_property
    def resolved(self) -> Resolved:
        """All settings."""
        return Resolved.load(self.folder.resolved)

    @cached_property
    def metrics(self) -> list[MetricsRow]:
        """The log."""
        return MetricsRow.load_lines(self.folder.metrics)

    @cached_property
    def train(self) -> list[MetricsRow]:
        """The rows of the log that have a training loss, finite or not."""
        return [row for row in self.metrics if row.has("loss")]

    @property
    def train_loss_nats(self) -> float | None:
        """The last training loss in the log; None if there is none, or it is not finite."""
        return self.train[-1].loss if self.train else None

    @cached_property
    def heldout(self) -> HeldOut | None:
        """The results of a finished run."""
        return HeldOut.load(self.folder.heldout) if self.folder.finished else None

    @cached_property
    def logged_step(self) -> int:
        """The last step in the log."""
        return max((row.step for row in self.metrics), default=0)

    @cached_property
    def newest(self) -> Path | None:
        """The newest checkpoint that can be read: a killed run may leave a newer, incomplete one."""
        return next(filter(_is_readable, checkpoints_in(self.folder.checkpoints)), None)

    @property
    def step(self) -> int:
        """The last step in the log or of a checkpoint."""
        return max(self.logged_step, 0 if self.newest is None else number_of(self.newest))

    @cached_property
    def samples(self) -> list[Sample]:
        """Samples over training; of runs without, those of the finished model."""
        if found := Sample.load_lines(self.folder.samples):
            return found
        path = self.folder.completions
        written = Completions.load(path).completions if path.is_file() else []
        return [Sample(step=self.step, **vars(one)) for one in written]

    @property
    def tokens(self) -> int | None:
        """The number of training tokens so far; None if they were not counted."""
        logged = logged_tokens(self.metrics)
        if self.newest is None or number_of(self.newest) <= self.logged_step:
            return logged
        return max(logged or 0, tokens_of(self.newest)) or None

    def usual(self, name: str) -> float | None:
        """Return the median of a logged metric; None if it was not logged."""
        found = [value for row in self.train if (value := getattr(row, name)) is not None]
        return statistics.median(found) if found else None

    @cached_property
    def n_parameters(self) -> int | None:
        """The number of parameters of the saved model, a tied head counted once; None if no model is saved."""
        saved = [self.folder.model / "model.safetensors", *self.folder.checkpoints.glob("*/model.safetensors")]
        for path in saved:
            try:
                with path.open("rb") as file:  # length of the header, then the header: JSON with each tensor's shape
                    header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            except (OSError, ValueError):
                continue
            return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
        return None

    @cached_property
    def answers(self) -> list[Answer]:
        """The finished model's answers to held-out questions (chat runs only)."""
        return Answer.load_lines(self.folder.answers)

    @property
    def measured(self) -> HeldOut | None:
        """The results on held-out data; None if the run is not finished, or nothing was held out."""
        return self.heldout if self.heldout is not None and self.heldout.after is not None else None

    @property
    def loss_nats(self) -> float:
        """The held-out loss of a finished run. Raises: UsageError if nothing was held out."""
        if self.heldout is None or self.heldout.after is None:
            raise UsageError(
                f"{self.folder.root} has no held-out loss: the run is not finished, or has no validation data."
            )
        return self.heldout.after.loss_nats

    @property
    def loss_before_nats(self) -> float | None:
        """The held-out loss before training; None if it was not measured or not finite."""
        logged = (row.eval_loss for row in self.metrics if row.step == 0)
        return self.resolved.loss_before_nats or next(filter(None, logged), None)

    @property
    def measured_on(self) -> tuple[str, HeldOutRows] | None:
        """The data fingerprint and the rows: held-out losses are comparable if these are equal."""
        return self.heldout and (self.resolved.data.fingerprint, self.heldout.rows)


def read_resolved(folder: RunFolder) -> Resolved:
    """Read `resolved.json` alone. Raises: UsageError if the folder is missing or not a run folder."""
    return Run(folder).resolved


def logged_tokens(rows: Sequence[MetricsRow]) -> int | None:
    """Return the last number of training tokens in some rows of a log; None if there is none."""
    counts = (row.num_input_tokens_seen for row in reversed(rows))
    return next((count for count in counts if count is not None), None)


def progress_of(checkpoint: Path) -> TrainerProgress:
    """Return how far training was at a checkpoint. Raises: UsageError if its file is missing or damaged."""
    return TrainerProgress.load(checkpoint / "trainer_state.json")


def tokens_of(checkpoint: Path) -> int:
    """Return the training tokens up to a checkpoint, logged or not; 0 if an earlier version did not count them."""
    unlogged = sum(GuardState.load(path).tokens for path in checkpoint.glob("guard_*.json"))
    return progress_of(checkpoint).num_input_tokens_seen + unlogged


def _is_readable(checkpoint: Path) -> bool:
    try:
        tokens_of(checkpoint)
    except (UsageError, OSError):
        return False
    return True
