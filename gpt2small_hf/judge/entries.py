# pyright: strict
"""Files of answers → the entries of every prompt: the models, and controls whose scores are known in advance."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gpt2small_hf.errors import UsageError
from gpt2small_hf.judge.records import MODEL, REFERENCE, REPEATED, SHUFFLED, JudgedEntry
from gpt2small_hf.runs.answer_files import AnswersFile, AnswersHeader, Question

MAX_SHARE = 0.9
"""Share of equal or empty answers above which a warning is printed."""


@dataclass(frozen=True)
class Entry:
    """One of the answers in every prompt."""

    label: str
    kind: str
    answers: list[str]
    """In the order of the questions."""
    header: AnswersHeader | None = None
    """Of a model's file."""

    def record(self) -> JudgedEntry:
        """Return what identifies the entry."""
        digest = hashlib.sha256(json.dumps(self.answers).encode()).hexdigest()
        return JudgedEntry(label=self.label, kind=self.kind, answers_sha256=digest)


def read_entries(paths: Sequence[Path], judge_model: str, limit: int | None) -> tuple[list[Question], list[Entry]]:
    """Read the files of answers.

    Returns: the questions, and an entry for each file.
    Raises: UsageError for fewer than two files, equal labels, incomplete or empty files, other questions, equal ids of
        questions, and a file with the judge's own answers.
    """
    if len(paths) < 2:
        raise UsageError(f"{len(paths)} file of answers cannot be compared. Give the files of two models or more.")
    files = [AnswersFile.load(path) for path in paths]
    for path, file in zip(paths, files, strict=True):
        file.check_complete(path)
        if file.header.questions_sha256 != files[0].header.questions_sha256:
            raise UsageError(
                f"{path} answers other questions than {paths[0]} (SHA-256 {file.header.questions_sha256[:12]}, not "
                f"{files[0].header.questions_sha256[:12]}). Run `answer` with the same --questions."
            )
        if judge_model.casefold() in (file.header.label.casefold(), file.header.model.casefold()):
            raise UsageError(
                f"--judge_model {judge_model} is also judged ({path}): models prefer their own answers. Choose another "
                "judge, or leave that file out."
            )
    for what, names in (
        ("label", [file.header.label for file in files]),
        ("question id", [one.id for one in files[0].answers]),
    ):
        name, count = Counter(names).most_common(1)[0]
        if count > 1:
            raise UsageError(f"the {what} {name!r} occurs {count} times. Give each its own.")
    questions: list[Question] = list(files[0].answers[:limit])
    entries = [
        Entry(file.header.label, MODEL, [one.answer for one in file.answers[:limit]], file.header) for file in files
    ]
    return questions, entries


def add_controls(questions: Sequence[Question], models: Sequence[Entry], seed: int) -> list[Entry]:
    """Return the models followed by the controls.

    - The first model again, under another label: the difference of the two is noise.
    - The reference answers, if all questions have one.
    - Answers to other questions: reference answers, or else those of the first model.

    Raises: UsageError if a model has the label of a control.
    """
    first = models[0]
    references = [one.reference for one in questions if one.reference is not None]
    controls = [Entry(f"{first.label} (repeated)", REPEATED, first.answers)]
    has_references = len(references) == len(questions)
    if has_references:
        controls.append(Entry("reference", REFERENCE, references))
    if len(questions) > 1:
        other = shuffled(references if has_references else first.answers, seed)
        controls.append(Entry(f"shuffled {'reference' if has_references else first.label}", SHUFFLED, other))
    for one in models:
        if one.label in {control.label for control in controls}:
            raise UsageError(f"the label {one.label!r} is that of a control. Rename the model, or give --no_controls.")
    return [*models, *controls]


def shuffled(answers: Sequence[str], seed: int) -> list[str]:
    """Give each question the answer to another one, with a different text where there is one."""
    generator, found = np.random.default_rng(seed), list[str]()
    for at, own in enumerate(answers):
        others = [text for text in answers if text != own] or [*answers[:at], *answers[at + 1 :]]
        found.append(others[int(generator.integers(len(others)))])
    return found


def warnings_of(models: Sequence[Entry]) -> list[str]:
    """Return sentences about answers that cannot tell the models apart."""
    found: list[str] = []
    n = len(models[0].answers)
    n_equal = sum(len({one.answers[at] for one in models}) == 1 for at in range(n))
    if n_equal > MAX_SHARE * n:
        found.append(f"The models give equal answers to {n_equal} of {n} questions.")
    for one in models:
        text, count = Counter(one.answers).most_common(1)[0]
        if n > 1 and count > MAX_SHARE * n:
            found.append(
                f"{one.label} gives the same {'answer' if text else 'empty answer'} to {count} of {n} questions."
            )
    return found
