"""Stored calls → scores.json: means, differences, controls and effects."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gpt2small_hf.evaluation.estimates import Array, bootstrap_interval, holm
from gpt2small_hf.judge.calls import Plan, cost
from gpt2small_hf.judge.effects import (
    difference,
    length_effect,
    mean_over,
    place_effects,
    ranks_of,
    ranks_within_replies,
    retest_correlation,
)
from gpt2small_hf.judge.entries import Entry, warnings_of
from gpt2small_hf.judge.prompt import parse_scores
from gpt2small_hf.judge.records import (
    MODEL,
    REFERENCE,
    REPEATED,
    SHUFFLED,
    Call,
    Control,
    EntryScores,
    LengthEffect,
    PlaceEffect,
    QuestionScores,
    Scores,
)
from gpt2small_hf.runs.answer_files import questions_sha256
from gpt2small_hf.runs.files import finite
from gpt2small_hf.runs.provenance import made_by

LEVEL = 0.05
"""Of the verdicts on models, after Holm's adjustment."""
CONTROL_LEVEL = 0.01
"""Of the controls: one sound judge in a hundred is marked by the repeated model."""
MAX_MISSING = 0.1
"""Share of scores of a model that may be excluded without a warning."""


def read_scores(plan: Plan, calls: Sequence[Call]) -> tuple[Array, NDArray[np.int64]]:
    """Read the scores in the replies.

    Returns: scores, NaN where one is excluded, and places in the prompts, both of shape (entries, questions, runs).
    """
    shape = len(plan.entries), len(plan.questions), plan.settings.runs
    scores, places = np.full(shape, np.nan), np.full(shape, -1)
    number = {entry.label: at for at, entry in enumerate(plan.entries)}
    for call in calls:
        order = [number[label] for label in call.order]
        places[order, call.question, call.run] = range(len(order))
        for place, score in parse_scores(call.reply or "", len(order)).items():
            scores[order[place], call.question, call.run] = score
    return scores, places


def summarize(plan: Plan, calls: Sequence[Call], baseline: str) -> Scores:
    """Compute the results of a judgement.

    Args:
        plan: the judgement.
        calls: all of its calls.
        baseline: label of the model that others are compared with.
    """
    scores, places = read_scores(plan, calls)
    models = [at for at, entry in enumerate(plan.entries) if entry.kind == MODEL]
    lengths = np.array([[len(text) for text in entry.answers] for entry in plan.entries], float)
    entries = entry_scores(plan.entries, scores, lengths, baseline)
    length = length_effect(scores[models], lengths[models])
    tokens = sum(call.prompt_tokens or 0 for call in calls), sum(call.completion_tokens or 0 for call in calls)
    return Scores(
        judge_model=plan.settings.judge_model,
        judge_versions=sorted({" ".join(filter(None, (c.model, c.system_fingerprint))) for c in calls if c.model}),
        runs=plan.settings.runs,
        seed=plan.settings.seed,
        baseline=baseline,
        questions_sha256=questions_sha256(plan.questions),
        n_calls=len(calls),
        n_refused=sum(call.error is not None for call in calls),
        prompt_tokens=tokens[0],
        completion_tokens=tokens[1],
        cost=cost(plan.settings, *tokens),
        entries=entries,
        controls=check_controls(plan.entries, scores),
        places=[
            PlaceEffect(place=place, points=points, standard_error=_known(error), p=p)
            for place, (points, error, p) in enumerate(place_effects(scores, places), 1)
        ],
        length=length and LengthEffect(points=length.value, standard_error=_known(length.standard_error), p=length.p),
        retest_correlation=retest_correlation(scores[models]),
        warnings=[
            *warnings_of([plan.entries[at] for at in models]),
            *(
                f"{entry.n_missing} of {scores[0].size} scores of {entry.label} are missing or invalid."
                for entry in entries
                if entry.n_missing > MAX_MISSING * scores[0].size
            ),
        ],
        questions=_question_scores(plan, scores),
        made_by=made_by(),
    )


def entry_scores(entries: Sequence[Entry], scores: Array, lengths: Array, baseline: str) -> list[EntryScores]:
    """Return the scores of every entry. Ranks and adjusted p values are among models only."""
    models = [at for at, entry in enumerate(entries) if entry.kind == MODEL]
    base = next(at for at in models if entries[at].label == baseline)
    means: Array = mean_over(mean_over(scores, axis=2), axis=1)
    ranks = ranks_of([-math.inf if math.isnan(means[at]) else means[at] for at in models])
    ranked = dict(zip(models, ranks, strict=True))
    within = dict(zip(models, ranks_within_replies(scores[models]), strict=True))
    differences = {at: diff for at in models if at != base and (diff := difference(scores, at, base))}
    adjusted = dict(zip(differences, holm([diff.p for diff in differences.values()]), strict=True))
    found: list[EntryScores] = []
    for at, entry in enumerate(entries):
        header, diff = entry.header, differences.get(at)
        found.append(
            EntryScores(
                label=entry.label,
                kind=entry.kind,
                run_means=finite(mean_over(scores[at], axis=0).tolist()),
                mean=_known(means[at]),
                interval=_interval(mean_over(scores[at], axis=1)),
                rank=ranked.get(at),
                mean_rank=_known(mean_over(within[at], axis=0)) if at in within else None,
                mean_rank_interval=_interval(within[at]) if at in within else [],
                n_missing=int(np.isnan(scores[at]).sum()),
                difference=diff and diff.value,
                difference_error=diff and _known(diff.standard_error),
                p=adjusted.get(at),
                verdict=verdict(diff.value, adjusted[at]) if diff else None,
                mean_characters=float(lengths[at].mean()),
                test_loss=header and header.test_loss,
                epochs_trained=header.epochs.trained if header and header.epochs else None,
                epochs_kept=header.epochs.kept if header and header.epochs else None,
            )
        )
    return found


def verdict(value: float, p: float) -> str:
    """Return better, worse or undecided."""
    return "undecided" if p >= LEVEL else "better" if value > 0 else "worse"


def check_controls(entries: Sequence[Entry], scores: Array) -> list[Control]:
    """Return the controls of a judgement, each with what it must show.

    - The repeated model has the same answers as the first model: their scores differ by noise only.
    - No model scores above the reference answers.
    - Shuffled reference answers score below the reference answers. Without references: shuffled answers of the first
      model do not score above its own.
    """
    at = {entry.kind: number for number, entry in enumerate(entries) if entry.kind != MODEL}
    found: list[Control] = []
    if REPEATED in at:
        found.append(_control("repeated model", scores, at[REPEATED], 0, entries, may=(False, False)))
    if REFERENCE in at:
        models = [number for number, entry in enumerate(entries) if entry.kind == MODEL]
        best = max(models, key=lambda number: -math.inf if math.isnan(m := mean_over(scores[number], (0, 1))) else m)
        found.append(_control("reference answers", scores, at[REFERENCE], best, entries, may=(True, False)))
        if SHUFFLED in at:
            check = _control(
                "shuffled answers", scores, at[REFERENCE], at[SHUFFLED], entries, may=(True, False), must=True
            )
            found.append(check)
    elif SHUFFLED in at:
        found.append(_control("shuffled answers", scores, 0, at[SHUFFLED], entries, may=(True, False)))
    return found


def _control(
    name: str, scores: Array, of: int, than: int, entries: Sequence[Entry], may: tuple[bool, bool], must: bool = False
) -> Control:
    """Compare two entries; a significant difference may be positive and negative as `may` says, or must be positive."""
    found = difference(scores, of, than)
    if found is None:
        finding = f"no question has valid scores of {entries[of].label} and of {entries[than].label}"
        return Control(name=name, is_passed=False, p=1.0, finding=finding)
    is_significant = found.p < CONTROL_LEVEL
    is_passed = (is_significant and found.value > 0) if must else not is_significant or may[found.value < 0]
    error = found.standard_error
    return Control(
        name=name,
        is_passed=bool(is_passed),
        difference=found.value,
        standard_error=_known(error),
        p=found.p,
        finding=f"{entries[of].label} less {entries[than].label}: {found.value:+.1f} ± {error:.1f} points",
    )


def _question_scores(plan: Plan, scores: Array) -> list[QuestionScores]:
    return [
        QuestionScores(
            id=one.id,
            question=one.question,
            reference=one.reference,
            answers={entry.label: entry.answers[at] for entry in plan.entries},
            scores={entry.label: finite(scores[number, at].tolist()) for number, entry in enumerate(plan.entries)},
        )
        for at, one in enumerate(plan.questions)
    ]


def _interval(values: Array) -> list[float]:
    values = values[~np.isnan(values)]
    return list(bootstrap_interval(values)) if len(values) > 1 else []


def _known(value: float) -> float | None:
    return None if math.isnan(value) else float(value)
