"""What besides the answers moves the scores: place, length, noise; and the power that a number of questions gives.

Scores have shape (entries, questions, runs), NaN where one is excluded. Questions are independent of each other, runs
of one question are not, so every error is computed over questions, with a question's runs averaged first.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from itertools import combinations
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2small_hf.evaluation.estimates import (
    CONFIDENCE,
    Array,
    Difference,
    error_of_mean,
    holm,
    paired_difference,
    ratio,
    standard_error,
    two_sided_p,
)

POWER = 0.8


def mean_over(values: Array, axis: int | tuple[int, ...]) -> Any:
    """Return the mean without NaN; NaN where there is nothing else."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # "Mean of empty slice"
        return np.nanmean(values, axis=axis)


def win_rate_half_width(n_questions: int) -> float:
    """Return half the 95 % interval of a win rate of one half, in percentage points."""
    return 100 * NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * math.sqrt(0.25 / n_questions)


def detectable_difference(n_questions: int) -> float:
    """Return the distance of a win rate from one half that is found with 80 % power, in percentage points."""
    quantiles = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) + NormalDist().inv_cdf(POWER)
    return 100 * quantiles * math.sqrt(0.25 / n_questions)


def difference(scores: Array, of: int, baseline: int) -> Difference | None:
    """Compare two entries over the questions that have a score of both; None without any."""
    values = mean_over(scores[[of, baseline]], axis=2)
    both = values[:, ~np.isnan(values).any(axis=0)]
    return paired_difference(both[0], both[1]) if both.shape[1] else None


def ranks_within_replies(scores: Array) -> Array:
    """Return each entry's mean rank for each question, 1 the best, shape (entries, questions).

    Ties share the mean of their ranks. Replies that lack a score of an entry are left out.
    """
    better = (scores[None] > scores[:, None]).sum(axis=1)
    equal = (scores[None] == scores[:, None]).sum(axis=1)
    ranks = np.where(np.isnan(scores).any(axis=0), np.nan, better + (equal + 1) / 2)
    return mean_over(ranks, axis=2)


def place_effects(scores: Array, places: NDArray[np.int64]) -> list[tuple[float, float, float]]:
    """Return points, standard error and Holm-adjusted p for each place in the prompt.

    What is left of a score without the means of its reply and of its entry is averaged for each place.

    Args:
        scores: shape (entries, questions, runs).
        places: of the entries in the prompts, same shape.
    """
    left = scores - mean_over(scores, axis=0)
    left = left - mean_over(left, axis=(1, 2))[:, None, None]
    found: list[Difference] = []
    for place in range(len(scores)):
        values: Array = mean_over(np.where(places == place, left, np.nan), axis=(0, 2))
        values = values[~np.isnan(values)]
        if len(values) == 0:
            return []
        error = float(error_of_mean(values))
        found.append(Difference(float(values.mean()), error, two_sided_p(values.mean(), error, len(values) - 1)))
    adjusted = holm([one.p for one in found])
    return [(one.value, one.standard_error, p) for one, p in zip(found, adjusted, strict=True)]


def length_effect(scores: Array, lengths: Array) -> Difference | None:
    """Return the points per 100 characters that an answer is longer than expected of its model and question.

    The slope of scores on lengths, both without the means of their model and of their question (two-way fixed effects).

    Args:
        scores: of the models, shape (models, questions, runs).
        lengths: in characters, shape (models, questions).
    """
    means: Array = mean_over(scores, axis=2)
    kept = ~np.isnan(means).any(axis=0)
    if not kept.any():
        return None
    y, x = (_without_means(values[:, kept]) for values in (means, lengths / 100))
    if np.allclose(x, 0):
        return None
    products, squares = (x * y).sum(axis=0), (x * x).sum(axis=0)
    slope, error = ratio(products, squares), standard_error(products, squares)
    return Difference(slope, error, two_sided_p(slope, error, len(products) - 1))


def retest_correlation(scores: Array) -> float | None:
    """Return the Pearson correlation of the scores in two runs, mean over pairs; None for one run or equal scores."""
    found: list[float] = []
    for one, other in combinations(range(scores.shape[2]), 2):
        pair = scores[:, :, [one, other]].reshape(-1, 2)
        pair = pair[~np.isnan(pair).any(axis=1)]
        if len(pair) > 1 and (pair.std(axis=0) > 0).all():
            found.append(float(np.corrcoef(pair.T)[0, 1]))
    return float(np.mean(found)) if found else None


def ranks_of(means: Sequence[float]) -> list[int]:
    """Return ranks of means, 1 the largest; equal means share the better rank."""
    return [1 + sum(1 for other in means if other > one) for one in means]


def _without_means(values: Array) -> Array:
    return values - values.mean(axis=0) - values.mean(axis=1, keepdims=True) + values.mean()
