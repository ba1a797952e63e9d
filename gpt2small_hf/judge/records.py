# pyright: strict
"""Typed contents of a judgement's files: calls.jsonl and scores.json."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpt2small_hf.runs.records import MadeBy
from gpt2small_hf.runs.typed_json import Part, Record

# ---- calls.jsonl ----------------------------------------------------------------------------------------------------

MODEL, REPEATED, REFERENCE, SHUFFLED = "model", "repeated", "reference", "shuffled"
"""Kinds of entries: a model's answers, and three controls."""


@dataclass(frozen=True, kw_only=True)
class JudgedEntry(Part):
    """One of the answers in every prompt."""

    label: str
    kind: str
    answers_sha256: str


@dataclass(frozen=True, kw_only=True)
class JudgementHeader(Record):
    """What decides all prompts: a judgement resumes only with the same header."""

    judge_model: str
    temperature: float | None = None
    seed: int
    n_questions: int
    questions_sha256: str
    instructions_sha256: str
    entries: list[JudgedEntry]


@dataclass(frozen=True, kw_only=True)
class Call(Part):
    """One call that the endpoint answered."""

    run: int
    """From 0."""
    question: int
    """Index, from 0."""
    id: str
    order: list[str]
    """Labels by place; place 0 has letter A."""
    prompt: str
    reply: str | None = None
    """Raw; null if the endpoint refused this call."""
    error: str | None = None
    finish_reason: str | None = None
    model: str | None = None
    """The judge's name and version as the endpoint reports them."""
    system_fingerprint: str | None = None
    endpoint: str
    is_structured: bool
    """Whether the endpoint was asked for a JSON schema."""
    seed: int | None = None
    """Sent to the endpoint; null if it takes none."""
    attempts: int
    date: str
    seconds: float
    """Of the last attempt."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


# ---- scores.json ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EntryScores(Part):
    """The scores of a model, or of a control."""

    label: str
    kind: str
    run_means: list[float | None]
    """Mean score of each run."""
    mean: float | None = None
    interval: list[float] = field(default_factory=list[float])
    """95 % bootstrap interval of the mean over questions."""
    rank: int | None = None
    """Of the mean, among models."""
    mean_rank: float | None = None
    """Mean of the ranks within each reply, among models; ties share theirs."""
    mean_rank_interval: list[float] = field(default_factory=list[float])
    n_missing: int
    """Scores that are missing, duplicated or invalid: excluded, never zero."""
    difference: float | None = None
    """Mean score less the baseline's, over questions with both."""
    difference_error: float | None = None
    p: float | None = None
    """Of the difference, adjusted for the number of models (Holm)."""
    verdict: str | None = None
    mean_characters: float
    test_loss: float | None = None
    epochs_trained: float | None = None
    epochs_kept: float | None = None


@dataclass(frozen=True, kw_only=True)
class Control(Part):
    """A control, and whether it came out as it must for a judge that reads the answers."""

    name: str
    is_passed: bool
    difference: float | None = None
    """Null if no question has scores of both entries; the control then fails."""
    standard_error: float | None = None
    p: float
    finding: str


@dataclass(frozen=True, kw_only=True)
class PlaceEffect(Part):
    """Points that an answer gets for its place in the prompt."""

    place: int
    """From 1."""
    points: float
    standard_error: float | None = None
    p: float
    """Adjusted for the number of places (Holm)."""


@dataclass(frozen=True, kw_only=True)
class LengthEffect(Part):
    """Points per 100 characters that an answer is longer than usual for its question and model."""

    points: float
    standard_error: float | None = None
    p: float


@dataclass(frozen=True, kw_only=True)
class QuestionScores(Part):
    """A question, all answers, and their scores."""

    id: str
    question: str
    reference: str | None = None
    answers: dict[str, str]
    scores: dict[str, list[float | None]]
    """By label: of each run; null if it is excluded."""


@dataclass(frozen=True, kw_only=True)
class Scores(Record):
    """scores.json: the results of a judgement."""

    judge_model: str
    judge_versions: list[str]
    """Names that the endpoint reported."""
    runs: int
    seed: int
    baseline: str
    questions_sha256: str
    n_calls: int
    n_refused: int
    """Calls that the endpoint refused, such as those stopped by its content filter."""
    prompt_tokens: int
    completion_tokens: int
    cost: float | None = None
    entries: list[EntryScores]
    controls: list[Control] = field(default_factory=list[Control])
    places: list[PlaceEffect] = field(default_factory=list[PlaceEffect])
    length: LengthEffect | None = None
    retest_correlation: float | None = None
    """Pearson correlation of an answer's scores in two runs, mean over pairs of runs."""
    warnings: list[str] = field(default_factory=list[str])
    questions: list[QuestionScores]
    made_by: MadeBy

    @property
    def failed_controls(self) -> list[Control]:
        """The controls that came out wrong: the scores then do not measure the answers."""
        return [one for one in self.controls if not one.is_passed]

    def of_kind(self, *kinds: str) -> list[EntryScores]:
        """Return the entries of some kinds."""
        return [one for one in self.entries if one.kind in kinds]
