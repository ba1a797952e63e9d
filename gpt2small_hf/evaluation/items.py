# pyright: strict
"""A model's results on each item of a task, on disk: means, errors and paired differences are computed from them.

A file has one JSON object a line: the header, then the items in the order of the task.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gpt2small_hf.evaluation.estimates import Array
from gpt2small_hf.runs.files import read_jsonl
from gpt2small_hf.runs.typed_json import Part, save_lines

LOWER_IS_BETTER = {"loss_nats", "bits_per_byte", "word_perplexity", "byte_perplexity"}


class Measured(NamedTuple):
    """A measure: the sum of `values` over that of `weights`, or the mean of `values`. Shapes: (items,)."""

    values: Array
    weights: Array | None = None


@dataclass(frozen=True, kw_only=True)
class Header(Part):
    """What was measured, on what, and how."""

    task: str
    model: str
    weights_sha256: str
    items_sha256: str
    """Of the prompts and answers, or of the rows: results of other items are not compared."""
    n_items: int
    settings: dict[str, Any]
    """Few-shot examples, template, limit, dtype, batch size, the token before a text, versions."""


@dataclass(frozen=True, kw_only=True)
class Choices(Part):
    """A question with given answers, or one text to predict after a context."""

    id: int
    log_likelihoods: list[float | None]
    """Of each answer, in nats; None if not finite."""
    n_bytes: list[int]
    n_characters: list[int]
    gold: int = 0
    is_greedy: bool | None = None
    """Whether greedy decoding gives the answer. For a single answer only."""


@dataclass(frozen=True, kw_only=True)
class Text(Part):
    """The loss on a text or a row."""

    id: int
    nats: float | None
    n_tokens: int | None = None
    n_bytes: float | None = None


@dataclass(frozen=True, kw_only=True)
class Metrics(Part):
    """What the harness computed for an item of another kind of task."""

    id: int
    metrics: dict[str, float]
    response: str | None = None
    ended: bool | None = None


Item = Choices | Text | Metrics


@dataclass(frozen=True)
class TaskItems:
    """The contents of an items file."""

    header: Header
    items: Sequence[Item]

    @property
    def chance(self) -> float | None:
        """Accuracy of a guess; None without answers to choose from."""
        choices = [len(item.log_likelihoods) for item in self.items if isinstance(item, Choices)]
        return float(np.mean([1 / n for n in choices])) if choices and min(choices) > 1 else None

    def measures(self) -> dict[str, Measured]:
        """Return the task's measures by name, the first one first. Each item has a value of each.

        - `accuracy`: the gold answer has the largest log-likelihood. A tie counts as one over the number of answers
          with it, so that a model without any knowledge scores chance. Of a single answer: greedy decoding gives it.
        - `accuracy_norm`: the same with log-likelihoods per character, as the harness's `acc_norm`.
        - `bits_per_byte`: of the gold answer; of texts and rows, over all their bytes.
        """
        first = self.items[0]
        if isinstance(first, Choices):
            return _of_choices([item for item in self.items if isinstance(item, Choices)])
        if isinstance(first, Text):
            return _of_texts([item for item in self.items if isinstance(item, Text)])
        found = [item for item in self.items if isinstance(item, Metrics)]
        return {name: Measured(np.array([item.metrics[name] for item in found])) for name in first.metrics}

    def save(self, path: Path) -> None:
        """Write the file, complete or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        save_lines(path, [self.header, *self.items])

    @classmethod
    def load(cls, path: Path) -> TaskItems:
        """Read a file. Raises: UsageError naming the line that has another form."""
        header, *lines = read_jsonl(path)
        kinds = {"log_likelihoods": Choices, "nats": Text, "metrics": Metrics}
        kind = next((kinds[key] for key in kinds if lines and key in lines[0]), Metrics)
        items = [kind.from_json(line, f"{path}, line {number}:") for number, line in enumerate(lines, 2)]
        return cls(Header.from_json(header, f"{path}, line 1:"), items)


def hash_items(items: Sequence[Any]) -> str:
    """Return the SHA-256 of prompts and answers, which JSON can write."""
    found = hashlib.sha256()
    for item in items:
        found.update(json.dumps(item, ensure_ascii=False).encode() + b"\n")
    return found.hexdigest()


def _of_choices(items: Sequence[Choices]) -> dict[str, Measured]:
    gold = [item.log_likelihoods[item.gold] for item in items]
    n_bytes = np.array([item.n_bytes[item.gold] for item in items], dtype=float)
    nats = np.array([math.nan if one is None else -one for one in gold])
    bits = Measured(nats / math.log(2) / n_bytes)
    if items[0].is_greedy is not None:
        return {"accuracy": Measured(np.array([float(item.is_greedy or 0) for item in items])), "bits_per_byte": bits}
    return {
        "accuracy": Measured(np.array([_share_of_best(item.log_likelihoods, item.gold) for item in items])),
        "accuracy_norm": Measured(np.array([_share_of_best(_per_character(item), item.gold) for item in items])),
        "bits_per_byte": bits,
    }


def _share_of_best(scores: Sequence[float | None], gold: int) -> float:
    """Return 1 if the gold answer alone has the best score, 1/k if it is one of k, else 0."""
    known = [-math.inf if score is None else score for score in scores]
    best = max(known)
    return float(known[gold] == best) / known.count(best)


def _per_character(item: Choices) -> list[float | None]:
    pairs = zip(item.log_likelihoods, item.n_characters, strict=True)
    return [None if score is None else score / max(n, 1) for score, n in pairs]


def _of_texts(items: Sequence[Text]) -> dict[str, Measured]:
    nats = np.array([math.nan if item.nats is None else item.nats for item in items])
    found: dict[str, Measured] = {}
    if all(item.n_tokens for item in items):
        found["loss_nats"] = Measured(nats, np.array([item.n_tokens or 0 for item in items], dtype=float))
    if all(item.n_bytes for item in items):
        found["bits_per_byte"] = Measured(
            nats / math.log(2), np.array([item.n_bytes or 0 for item in items], dtype=float)
        )
    return found
