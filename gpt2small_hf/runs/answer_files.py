# pyright: strict
"""Files of a model's answers to a set of questions: `answer` writes one for each model, `judge` compares several.

JSON Lines: a header, then one line for each answer, in the order of the questions. Lines are appended as answers are
generated, so a killed writer resumes after the last complete one.
"""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from gpt2small_hf.errors import UsageError
from gpt2small_hf.runs.files import append_jsonl, drop_torn_line, read_jsonl, write_jsonl
from gpt2small_hf.runs.typed_json import SCHEMA_VERSION, Part, Record


@dataclass(frozen=True, kw_only=True)
class Question(Part):
    """A question and its reference answer."""

    id: str
    question: str
    reference: str | None = None


@dataclass(frozen=True, kw_only=True)
class ModelAnswer(Question):
    """A question, and what a model answered."""

    answer: str
    ended: bool
    """Whether the answer ended with a stop token, not at the maximum number of tokens."""
    n_tokens: int

    @property
    def is_match(self) -> bool | None:
        """Whether it equals the reference, without case, punctuation and spaces around; None without a reference."""
        return None if self.reference is None else _compared(self.answer) == _compared(self.reference)


@dataclass(frozen=True, kw_only=True)
class FineTuneEpochs(Part):
    """How long the model was fine-tuned: the main confounder of a comparison of base models."""

    trained: float
    kept: float
    """The epoch whose weights answered."""
    validation_losses: list[float] = field(default_factory=list[float])
    """In nats per token, after each epoch."""


@dataclass(frozen=True, kw_only=True)
class AnswersHeader(Record):
    """The model that answered, and how."""

    label: str
    """Name in tables."""
    model: str
    """Path or Hub id."""
    weights_sha256: str | None = None
    test_loss: float | None = None
    """Of the base model on held-out rows of text, in nats per token."""
    epochs: FineTuneEpochs | None = None
    questions_sha256: str
    """`questions_sha256` of all questions."""
    n_questions: int
    generation: dict[str, Any]
    """Settings of `generate`: max_new_tokens, do_sample, dtype and others that change answers."""
    versions: dict[str, str]
    date: str


@dataclass(frozen=True)
class AnswersFile:
    """The contents of a file of answers."""

    header: AnswersHeader
    answers: list[ModelAnswer]

    @classmethod
    def load(cls, path: Path) -> AnswersFile:
        """Read a file, without a last line that a killed writer cut off.

        Raises: UsageError if the file does not exist, has no header, or a line is not an answer.
        """
        if not path.is_file():
            raise UsageError(f"{path} is not a file. Name a file of answers that `answer` wrote.")
        header, *lines = read_jsonl(path) or [None]
        if not isinstance(header, dict) or "questions_sha256" not in header:
            raise UsageError(f"{path} is not a file of answers: its first line has no header. Write it with `answer`.")
        return cls(
            AnswersHeader.from_json(header, f"{path}, line 1:"),
            [ModelAnswer.from_json(line, f"{path}, line {number}:") for number, line in enumerate(lines, 2)],
        )

    def check_complete(self, path: Path) -> None:
        """Raise: UsageError if answers are missing, or are not to the questions that the header names."""
        if not self.answers:
            raise UsageError(f"{path} has no answers. Run `answer` again with the same arguments to complete it.")
        found, expected = len(self.answers), self.header.n_questions
        if found < expected:
            raise UsageError(
                f"{path} has {found} of {expected} answers. Run `answer` again with the same arguments to complete it."
            )
        if found > expected or questions_sha256(self.answers) != self.header.questions_sha256:
            raise UsageError(f"{path}: its questions are not those of its header. It was edited; run `answer` again.")


def resume_answers(path: Path, header: AnswersHeader) -> list[ModelAnswer]:
    """Start a file of answers, or prepare the one of a killed writer for more lines.

    Returns: the answers that the file already has, in their order.
    Raises: UsageError if the file has the answers of another model, other questions or other settings.
    """
    if not path.exists():
        write_jsonl(path, [{**header.to_json(), "schema_version": SCHEMA_VERSION}])
        return []
    drop_torn_line(path)
    existing = AnswersFile.load(path)
    for one in fields(AnswersHeader):
        old, new = getattr(existing.header, one.name), getattr(header, one.name)
        if one.compare and one.name not in ("schema_version", "versions", "date") and old != new:
            raise UsageError(
                f"{path} has answers with {one.name} {old!r}, not {new!r}. Choose another file, or remove that one."
            )
    return existing.answers


def append_answers(path: Path, answers: Sequence[ModelAnswer]) -> None:
    """Add answers to a file that `resume_answers` prepared."""
    for answer in answers:
        append_jsonl(path, answer.to_json())


def _compared(text: str) -> str:
    return text.lower().translate(str.maketrans("", "", string.punctuation)).strip()


def questions_sha256(questions: Sequence[Question]) -> str:
    """Return a hash of ids, questions and references in their order: models are compared on the same ones only."""
    rows = [[one.id, one.question, one.reference] for one in questions]
    return hashlib.sha256(json.dumps(rows, ensure_ascii=True).encode()).hexdigest()
