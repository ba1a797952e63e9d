# pyright: strict
"""Scores of several runs of one recipe, or of a run's checkpoints → means, spreads, paired differences.

The errors in `comparison.py` are those of other items: they say how exactly one trained model is measured. Another seed
gives another model. What a recipe is worth is decided here, over its runs, as in `report/sweep.py`: each run is paired
with the baseline's run of the same seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from gpt2small_hf.evaluation.comparison import Comparison, GroupScore, TaskScore, verdicts
from gpt2small_hf.evaluation.estimates import Difference, paired_difference
from gpt2small_hf.evaluation.models import ModelSource
from gpt2small_hf.runs.layout import SweepFolder

LAST_CHECKPOINTS = 5


class Replicate(NamedTuple):
    """Which of the models that count as one a model is."""

    group: str
    """The recipe of a sweep, or a run of which several checkpoints are measured."""
    seeds: tuple[int, int] | None
    """Of initial weights and of training; None for a checkpoint."""


def replicates_of(sources: Sequence[ModelSource]) -> dict[str, Replicate]:
    """Return which models are replicates, by label: runs of a sweep, and of other runs the last five checkpoints."""
    found: dict[str, Replicate] = {}
    of_run: dict[str, list[ModelSource]] = {}
    sweeps = {source.run.root.resolve().parent for source in sources if source.run and SweepFolder.parts_of(source.run)}
    for source in sources:
        if source.run is None:
            continue
        of_run.setdefault(str(source.run.root), []).append(source)
        parts = SweepFolder.parts_of(source.run)
        if parts and source.kind == "run":
            sweep = source.run.root.resolve().parent.name
            group = parts[0] if len(sweeps) == 1 else f"{sweep}/{parts[0]}"
            found[source.label] = Replicate(group, parts[1:])
    for same in of_run.values():
        if len(same) > 2 and not any(source.label in found for source in same):
            group = same[-1].label.partition(":")[0]
            found |= {source.label: Replicate(group, None) for source in same[-LAST_CHECKPOINTS:]}
    return found


def group_scores(
    scores: Sequence[TaskScore], replicates: Mapping[str, Replicate], baseline: str | None
) -> tuple[list[GroupScore], list[Comparison]]:
    """Return the means over replicates, and the recipes' paired differences to the baseline's recipe.

    Groups with a single model have no spread and are left out.

    Args:
        scores: of all models and tasks.
        replicates: of `replicates_of`.
        baseline: the label of one of the baseline's runs.
    """
    scores_of: dict[tuple[str, str, str], dict[Replicate | str, float]] = {}
    for one in scores:
        if one.model in replicates:
            replicate = replicates[one.model]
            for name, score in one.scores.items():
                key = replicate if replicate.seeds else one.model
                scores_of.setdefault((one.task, replicate.group, name), {})[key] = score.value
    found: list[GroupScore] = []
    compared: list[tuple[str, str, str, Difference]] = []
    base = replicates.get(baseline or "")
    for (task, group, name), of_models in scores_of.items():
        if len(of_models) < 2:
            continue
        known = np.array(list(of_models.values()))
        runs = [key for key in of_models if isinstance(key, Replicate)]
        found.append(
            GroupScore(
                task=task,
                group=group,
                measure=name,
                n_models=len(known),
                is_checkpoints=not runs,
                mean=float(known.mean()),
                standard_deviation=float(known.std(ddof=1)),
            )
        )
        if base and base.seeds and group != base.group:
            theirs = scores_of.get((task, base.group, name), {})
            pairs = [
                (of_models[run], theirs[same]) for run in runs if (same := Replicate(base.group, run.seeds)) in theirs
            ]
            if len(pairs) > 1:
                ours, others = (np.array(values) for values in zip(*pairs, strict=True))
                compared.append((task, group, name, paired_difference(ours, others)))
    return found, verdicts(compared)
