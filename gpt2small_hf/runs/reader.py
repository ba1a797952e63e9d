# pyright: strict
"""Read the files of a run folder."""

from __future__ import annotations

import json
import math
import statistics
from functools import cached_property
from pathlib import Path
from typing import Any

from gpt2small_hf.errors import UsageError
from gpt2small_hf.runs.files import read_json, read_jsonl
from gpt2small_hf.runs.layout import RunFolder, checkpoints_in, number_of
from gpt2small_hf.runs.records import Resolved
from gpt2small_hf.runs.results import Answer, HeldOut

Rows = list[dict[str, Any]]


class Run:
    """The contents of a run folder."""

    def __init__(self, folder: RunFolder) -> None:
        """Read them.

        Raises: UsageError if it is not a run folder, or a file in it is broken.
        """
        self.resolved = read_resolved(folder)
        self.folder = folder
        self.name = folder.root.resolve().name
        self.metrics = _lines(folder.metrics)
        self.train = [row for row in self.metrics if "loss" in row]
        self.heldout = HeldOut.load(folder.heldout) if folder.finished else None
        self.logged_step: int = max((row["step"] for row in self.metrics), default=0)
        # A killed run may leave a newer, incomplete checkpoint.
        self.newest = next(filter(_is_readable, checkpoints_in(folder.checkpoints)), None)
        self.step: int = max(self.logged_step, 0 if self.newest is None else number_of(self.newest))
        # Runs without samples of checkpoints have those of the finished model.
        written: Rows = read_json(folder.completions)["completions"] if folder.completions.is_file() else []
        self.samples = _lines(folder.samples) or [{"step": self.step, **completion} for completion in written]

    @property
    def tokens(self) -> int | None:
        """Return the number of training tokens so far; None if they were not counted."""
        logged = logged_tokens(self.metrics)
        if self.newest is None or number_of(self.newest) <= self.logged_step:
            return logged
        return max(logged or 0, tokens_of(self.newest)) or None

    def usual(self, name: str) -> float | None:
        """Return the median of a logged metric; None if it was not logged."""
        found = [row[name] for row in self.train if row.get(name) is not None]
        return statistics.median(found) if found else None

    @cached_property
    def n_parameters(self) -> int | None:
        """Return the number of parameters of the saved model, a tied head counted once; None if no model is saved."""
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
        """Return the finished model's answers to held-out questions (chat runs only)."""
        return Answer.load_lines(self.folder.answers)

    @property
    def measured(self) -> HeldOut | None:
        """Return the results on held-out data; None if the run is not finished, or nothing was held out."""
        return self.heldout if self.heldout is not None and self.heldout.after is not None else None

    @property
    def loss_nats(self) -> float:
        """Return the held-out loss of a finished run. Raises: UsageError if nothing was held out."""
        if self.heldout is None or self.heldout.after is None:
            raise UsageError(
                f"{self.folder.root} has no held-out loss: the run is not finished, or has no validation data."
            )
        return self.heldout.after.loss_nats

    @property
    def measured_on(self) -> tuple[Any, ...] | None:
        """Return the data fingerprint and the rows: held-out losses are comparable if these are equal."""
        if self.heldout is None:
            return None
        return self.resolved.data.fingerprint, self.heldout.rows


def read_resolved(folder: RunFolder) -> Resolved:
    """Read `resolved.json` alone. Raises: UsageError if the folder is missing or not a run folder."""
    if not folder.root.exists():
        raise UsageError(f"{folder.root} does not exist. Name a run folder, such as runs/tiny.")
    if not folder.resolved.is_file():
        raise UsageError(f"{folder.root} is not a run folder. Name one, such as runs/tiny.")
    return Resolved.load(folder.resolved)


def logged_tokens(rows: Rows) -> int | None:
    """Return the last number of training tokens in some log lines; None if there is none."""
    return next((row["num_input_tokens_seen"] for row in reversed(rows) if "num_input_tokens_seen" in row), None)


def tokens_of(checkpoint: Path) -> int:
    """Return the training tokens up to a checkpoint, logged or not; 0 if an earlier version did not count them."""
    logged = read_json(checkpoint / "trainer_state.json")["num_input_tokens_seen"]
    return logged + sum(read_json(path).get("tokens", 0) for path in checkpoint.glob("guard_*.json"))


def _is_readable(checkpoint: Path) -> bool:
    try:
        tokens_of(checkpoint)
    except (UsageError, OSError, LookupError, TypeError, AttributeError):
        return False
    return True


def _lines(path: Path) -> Rows:
    return read_jsonl(path) if path.is_file() else []
