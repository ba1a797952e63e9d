# pyright: strict
"""Items of several models on several tasks → scores with errors, paired differences to a baseline, and tables.

A difference is decided if its p value, adjusted for all comparisons of its measure in the table (Holm), is below 0.05.
The errors are those of other items, not of other seeds: models that differ only in their seed can differ by more.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gpt2small_hf.errors import UsageError
from gpt2small_hf.evaluation.estimates import (
    CONFIDENCE,
    Difference,
    bootstrap_interval,
    holm,
    paired_difference,
    ratio,
    standard_error,
    student_factor,
    two_sided_p,
)
from gpt2small_hf.evaluation.items import LOWER_IS_BETTER, Measured, TaskItems
from gpt2small_hf.evaluation.task import Rows
from gpt2small_hf.formatting import number, perplexity
from gpt2small_hf.runs.records import MadeBy
from gpt2small_hf.runs.results import Completion, Score, TaskScore
from gpt2small_hf.runs.typed_json import Part, Record

Found = Mapping[str, Mapping[str, TaskItems]]
"""Task → model → items, both in the order of the table."""

HELD_OUT = "heldout"
MEAN = "mean of the tasks"
PERCENT = {"accuracy", "accuracy_norm", "exact_match"}


@dataclass(frozen=True, kw_only=True)
class Comparison(Part):
    """A model's measure less the baseline's on the same items."""

    task: str
    model: str
    measure: str
    difference: float
    standard_error: float | None
    p: float
    """Adjusted for the other comparisons of this measure."""
    verdict: str
    """`better`, `worse` or `undecided`."""


@dataclass(frozen=True, kw_only=True)
class GroupScore(Part):
    """A measure of a task over the runs of a recipe, or over the last checkpoints of a run."""

    task: str
    group: str
    measure: str
    n_models: int
    is_checkpoints: bool
    mean: float
    standard_deviation: float
    """Of one model: over seeds, or over checkpoints."""


@dataclass(frozen=True, kw_only=True)
class ModelCompletion(Completion):
    """A completion by one of the models."""

    model: str


@dataclass(frozen=True, kw_only=True)
class EvaluationResults(Record):
    """The contents of results.json."""

    baseline: str | None
    scores: list[TaskScore]
    comparisons: list[Comparison] = field(default_factory=list[Comparison])
    groups: list[GroupScore] = field(default_factory=list[GroupScore])
    group_comparisons: list[Comparison] = field(default_factory=list[Comparison])
    """`model` is a recipe. The error is that of other seeds."""
    notes: list[str] = field(default_factory=list[str])
    completions: list[ModelCompletion] = field(default_factory=list[ModelCompletion])
    made_by: MadeBy | None = None


def pooled(name: str, parts: Sequence[TaskItems]) -> TaskItems:
    """Return the items of a group's tasks as those of one task."""
    hashes = "\n".join(part.header.items_sha256 for part in parts)
    items = [item for part in parts for item in part.items]
    header = replace(
        parts[0].header, task=name, n_items=len(items), items_sha256=hashlib.sha256(hashes.encode()).hexdigest()
    )
    return TaskItems(header, items)


def with_groups(found: Found, groups: Mapping[str, Sequence[str]]) -> Found:
    """Put each group in the place of its tasks; a model without one of these has no score of the group."""
    inside = {leaf: group for group, leaves in groups.items() for leaf in leaves}
    shown: dict[str, Mapping[str, TaskItems]] = {}
    for name, models in found.items():
        group = inside.get(name)
        if group is None:
            shown[name] = models
        elif group not in shown:
            leaves = groups[group]
            shown[group] = {
                model: pooled(group, [found[leaf][model] for leaf in leaves])
                for model in models
                if all(model in found.get(leaf, {}) for leaf in leaves)
            }
    return shown


def results_of(found: Found, baseline: str | None) -> EvaluationResults:
    """Compute all scores, and the differences to `baseline` where it was measured on the same items.

    Raises: UsageError if two models were measured on different items of a benchmark.
    """
    scores = [score_of(task, model, items) for task, models in found.items() for model, items in models.items()]
    notes: list[str] = []
    compared: list[tuple[str, str, str, Difference]] = []
    for task, models in found.items():
        if baseline is None or baseline not in models:
            continue
        for model, items in models.items():
            if model != baseline and same_items(task, items, models[baseline], notes):
                compared += differences(task, model, items, models[baseline])
    compared += mean_differences(compared)
    return EvaluationResults(baseline=baseline, scores=scores, comparisons=verdicts(compared), notes=notes)


def same_items(task: str, one: TaskItems, other: TaskItems, notes: list[str]) -> bool:
    """Return whether two models were measured on the same items. Held-out rows may differ: a note says why.

    Raises: UsageError if the items of a benchmark differ.
    """
    if one.header.items_sha256 == other.header.items_sha256:
        return True
    names = f"{one.header.model} and {other.header.model}"
    if task != HELD_OUT:
        raise UsageError(
            f"{names} were measured on different items of {task}, so they cannot be compared. Measure both again with "
            "the same --task_data, --limit, --num_fewshot and --chat_template, with --overwrite."
        )
    notes.append(
        f"The held-out rows of {names} differ, as with different tokenizers or texts: no difference is computed. Bits "
        "per byte are comparable if the text is the same."
    )
    return False


def score_of(task: str, model: str, items: TaskItems) -> TaskScore:
    """Compute the scores of a task."""
    is_text = task == HELD_OUT
    return TaskScore(
        task=task,
        model=model,
        scores={name: score(one, bootstrap=is_text) for name, one in items.measures().items()},
        chance=items.chance,
        items_sha256=items.header.items_sha256,
    )


def score(found: Measured, *, bootstrap: bool = False) -> Score:
    """Return a measure with its standard error and 95 % interval: of Student's t, or of a bootstrap over the items."""
    value, error, n = ratio(*found), standard_error(*found), len(found.values)
    if math.isnan(error) or math.isnan(value):
        return Score(value=value, standard_error=None, low=None, high=None, n_items=n)
    half = student_factor(min(n - 1, 1000)) * error
    low, high = bootstrap_interval(*found) if bootstrap else (value - half, value + half)
    return Score(value=value, standard_error=error, low=low, high=high, n_items=n)


def differences(task: str, model: str, items: TaskItems, baseline: TaskItems) -> list[tuple[str, str, str, Difference]]:
    """Return the paired differences in each measure that both models have."""
    ours, theirs = items.measures(), baseline.measures()
    return [
        (task, model, name, paired_difference(one.values, theirs[name].values, one.weights, theirs[name].weights))
        for name, one in ours.items()
        if name in theirs
    ]


def mean_differences(compared: Sequence[tuple[str, str, str, Difference]]) -> list[tuple[str, str, str, Difference]]:
    """Return the mean difference over the benchmarks in each measure of two or more; their items are independent."""
    found: dict[tuple[str, str], list[Difference]] = {}
    for task, model, name, difference in compared:
        if task != HELD_OUT:
            found.setdefault((model, name), []).append(difference)
    means: list[tuple[str, str, str, Difference]] = []
    for (model, name), parts in found.items():
        if len(parts) > 1:
            value = float(np.mean([part.value for part in parts]))
            error = math.sqrt(sum(part.standard_error**2 for part in parts)) / len(parts)
            means.append((MEAN, model, name, Difference(value, error, two_sided_p(value, error, 1000))))
    return means


def verdicts(compared: Sequence[tuple[str, str, str, Difference]]) -> list[Comparison]:
    """Adjust the p values of each measure for their number, and decide."""
    found: list[Comparison] = []
    adjusted: dict[int, float] = {}
    for name in dict.fromkeys(measure for _, _, measure, _ in compared):
        places = [at for at, one in enumerate(compared) if one[2] == name]
        adjusted |= dict(zip(places, holm([compared[at][3].p for at in places]), strict=True))
    for at, (task, model, name, one) in enumerate(compared):
        is_better = (one.value < 0) == (name in LOWER_IS_BETTER)
        decided = adjusted[at] < 1 - CONFIDENCE
        found.append(
            Comparison(
                task=task,
                model=model,
                measure=name,
                difference=one.value,
                standard_error=one.standard_error,
                p=adjusted[at],
                verdict="undecided" if not decided else "better" if is_better else "worse",
            )
        )
    return found


# ---- tables ----------------------------------------------------------------------------------------------------------


def heldout_table(results: EvaluationResults) -> Rows:
    """Return the losses on held-out rows as a table; none if they were not measured."""
    measured = [one for one in results.scores if one.task == HELD_OUT]
    rows: Rows = []
    for one in measured:
        loss, bits = one.scores["loss_nats"], one.scores.get("bits_per_byte")
        rows.append(
            [
                one.model,
                number(loss.value, ".6f"),
                number(loss.standard_error, ".4f"),
                f"{number(loss.low, '.4f')} to {number(loss.high, '.4f')}",
                perplexity(math.exp(loss.value)) if loss.value < 700 else "",
                number(bits and bits.value, ".4f"),
                str(loss.n_items),
                _difference(results.comparisons, one, "loss_nats"),
            ]
        )
    header = ["held-out rows", "loss (nats/token)", "error", "95 % interval", "perplexity", "bits/byte", "rows"]
    return [[*header, "difference"], *rows] if rows else []


def benchmark_table(results: EvaluationResults) -> Rows:
    """Return the benchmarks as a table; none if there are no benchmarks."""
    measured = [one for one in results.scores if one.task != HELD_OUT]
    names = list(dict.fromkeys(name for one in measured for name in one.scores))
    header = ["task", "model", "items", "chance"]
    for name in names:
        header += [_heading(name), *(["difference"] if results.comparisons else [])]
    rows: Rows = []
    for one in measured:
        first = next(iter(one.scores.values()))
        row = [one.task, one.model, f"{first.n_items:,}", "" if one.chance is None else f"{100 * one.chance:.1f}"]
        for name in names:
            row.append(_cell(one, name))
            if results.comparisons:
                row.append(_difference(results.comparisons, one, name))
        rows.append(row)
    for model in dict.fromkeys(one.model for one in results.comparisons if one.task == MEAN):
        mean = TaskScore(task=MEAN, model=model, scores={})
        cells = [cell for name in names for cell in ("", _difference(results.comparisons, mean, name))]
        rows.append([MEAN, model, "", "", *cells])
    return [header, *rows] if rows else []


def group_table(results: EvaluationResults) -> Rows:
    """Return the means over seeds or checkpoints as a table; none without groups."""
    header = ["task", "recipe or run", "models", "measure", "mean", "standard deviation"]
    rows: Rows = []
    for one in results.groups:
        factor, style = (100, ".2f") if one.measure in PERCENT else (1, ".4f")
        row = [one.task, one.group, f"{one.n_models} {'checkpoints' if one.is_checkpoints else 'seeds'}"]
        row += [_heading(one.measure), f"{factor * one.mean:{style}}", f"{factor * one.standard_deviation:{style}}"]
        found = TaskScore(task=one.task, model=one.group, scores={})
        rows.append([*row, _difference(results.group_comparisons, found, one.measure)])
    return [[*header, "difference"], *rows] if rows else []


def completion_tables(results: EvaluationResults) -> dict[str, Rows]:
    """Return a table of the models' completions for each prompt: model, greedy, sampled."""
    tables: dict[str, Rows] = {}
    for one in results.completions:
        tables.setdefault(one.prompt, [["model", "greedy", "sampled"]]).append([one.model, one.greedy, one.sampled])
    return tables


def notes_of(results: EvaluationResults) -> list[str]:
    """Return explanations of the tables, one sentence each."""
    found = list(results.notes)
    if results.comparisons:
        found.append(
            f"Differences are from {results.baseline} on the same items, with their standard error. They are decided "
            "at 5 % for all comparisons of a measure together (Holm). Errors are those of other items; other seeds of "
            "the same recipe differ too."
        )
    if any(not one.is_checkpoints for one in results.groups):
        found.append(
            "Standard deviations over seeds are of one run. The differences of recipes are those of runs with the same "
            "seeds, with the standard error of their mean: a verdict on a recipe needs these, not the items' errors."
        )
    if any(one.is_checkpoints for one in results.groups):
        found.append("Standard deviations over checkpoints include what the model learned between them.")
    if any(not one.has_signal for one in results.scores):
        found.append("(chance): the 95 % interval contains chance, so the task has no signal for this model.")
    return found


def describe_score(one: TaskScore) -> str:
    """Return the first of a task's scores, with its standard error and chance, as words."""
    name, found = next(iter(one.scores.items()), (None, None))
    if name is None or found is None:
        return f"{one.task} not finite"
    if name not in PERCENT:
        return f"{one.task} {number(found.value, '.4f')} ± {number(found.standard_error, '.4f')} {_heading(name)}"
    error = "" if found.standard_error is None else f" ± {100 * found.standard_error:.1f}"
    return f"{one.task} {100 * found.value:.1f}{error} %" + (
        "" if one.chance is None else f" (chance {100 * one.chance:.1f})"
    )


def _heading(name: str) -> str:
    known = {"accuracy": "accuracy (%)", "accuracy_norm": "per character (%)", "bits_per_byte": "bits/byte"}
    return known.get(name, name)


def _cell(one: TaskScore, name: str) -> str:
    if name not in one.scores:
        return ""
    found = one.scores[name]
    if name not in PERCENT:
        return f"{number(found.value, '.4f')} ± {number(found.standard_error, '.4f')}"
    is_chance = one.chance is not None and found.low is not None and found.low <= one.chance
    text = f"{100 * found.value:.2f} ± {100 * (found.standard_error or 0):.2f}"
    return f"{text} (chance)" if is_chance else text


def _difference(comparisons: Sequence[Comparison], one: TaskScore, name: str) -> str:
    for found in comparisons:
        if (found.task, found.model, found.measure) == (one.task, one.model, name):
            factor, style = (100, ".2f") if name in PERCENT else (1, ".4f")
            value, error = factor * found.difference, factor * (found.standard_error or 0)
            return f"{value:+{style[0:]}} ± {error:{style}} {found.verdict}"
    return ""
