# pyright: strict
"""Means over items with their errors, and paired differences between models measured on the same items.

A measure is a ratio of two sums over items: a loss is nats over tokens, bits per byte are bits over bytes, an accuracy
is correct items over items, with 1 for each. The standard error is that of the ratio estimator (Cochran, Sampling
Techniques, 1977, 2.11): of the mean of the items' influences on the ratio.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating[Any]]

CONFIDENCE = 0.95
RESAMPLES = 2000
"""Of a bootstrap: the ends of an interval then vary by about 3 percent of its length."""


@dataclass(frozen=True)
class Difference:
    """A model's measure less the baseline's on the same items."""

    value: float
    standard_error: float
    p: float
    """Two-sided probability of a difference as large, in standard errors, if there is none (Student's t test)."""


def ratio(values: Array, weights: Array | None = None) -> float:
    """Return the sum of `values` over the sum of `weights` (shape of both: items); the mean without weights."""
    return float(values.mean() if weights is None else values.sum() / weights.sum())


def influences(values: Array, weights: Array | None = None) -> Array:
    """Return each item's first-order contribution to `ratio`, shape (items,). They sum to zero."""
    if weights is None:
        return values - values.mean()
    return (values - ratio(values, weights) * weights) / weights.mean()


def standard_error(values: Array, weights: Array | None = None) -> float:
    """Estimate the standard error of `ratio`; NaN for a single item."""
    return float(error_of_mean(influences(values, weights)))


def bootstrap_interval(values: Array, weights: Array | None = None, *, seed: int = 0) -> tuple[float, float]:
    """Return the 95 % percentile interval of `ratio` over items drawn with replacement (Efron, 1979)."""
    generator = np.random.default_rng(seed)
    n, drawn = len(values), np.empty(RESAMPLES)
    for at in range(RESAMPLES):  # one at a time: all of them would take gigabytes
        chosen = generator.integers(0, n, n)
        drawn[at] = ratio(values[chosen], None if weights is None else weights[chosen])
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(drawn, [tail, 100 - tail])
    return float(low), float(high)


def paired_difference(
    values: Array, baseline: Array, weights: Array | None = None, baseline_weights: Array | None = None
) -> Difference:
    """Compare two models on the same items, by the differences of each item: what both find hard cancels out.

    Args:
        values: of the model, shape (items,).
        baseline: of the baseline, on the same items in the same order.
        weights: of the model's ratio; None for a mean.
        baseline_weights: of the baseline's ratio.

    Raises: ValueError if the numbers of items differ.
    """
    if len(values) != len(baseline):
        raise ValueError(f"{len(values)} items cannot be paired with {len(baseline)}.")
    value = ratio(values, weights) - ratio(baseline, baseline_weights)
    error = float(error_of_mean(influences(values, weights) - influences(baseline, baseline_weights)))
    return Difference(value, error, two_sided_p(value, error, len(values) - 1))


def two_sided_p(value: float, error: float, dof: int) -> float:
    """Return the probability of a t of at least `value / error` in size, with `dof` degrees of freedom."""
    if dof < 1 or math.isnan(error):
        return 1.0
    if error == 0:
        return 1.0 if value == 0 else 0.0
    angles, shares = _student(min(dof, 1000))
    return float(1 - np.interp(math.atan(abs(value / error) / math.sqrt(min(dof, 1000))), angles, shares))


def student_factor(dof: int) -> float:
    """Return the 97.5 % quantile of Student's t: 12.7 for one degree of freedom, 2.09 for 20, 1.96 for many."""
    angles, shares = _student(dof)
    return math.sqrt(dof) * math.tan(angles[np.searchsorted(shares, CONFIDENCE)])


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values adjusted for their number (Holm, 1979): reject those below a level, and the probability of any
    false rejection is below it, whatever the dependence between them.
    """
    order = sorted(range(len(p_values)), key=lambda at: p_values[at])
    adjusted, largest = [1.0] * len(p_values), 0.0
    for rank, at in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[at]))
        adjusted[at] = largest
    return adjusted


def error_of_mean(values: Array) -> Any:
    """Estimate the standard error of the mean over the last axis; NaN if that has one value."""
    n = values.shape[-1]
    return values.std(axis=-1, ddof=1) / math.sqrt(n) if n > 1 else np.full(values.shape[:-1], math.nan)[()]


@cache
def _student(dof: int) -> tuple[Array, Array]:
    """Return angles and the share of |t| <= sqrt(dof) tan(angle): angles have density cos(angle)^(dof-1)."""
    angles: Array = (np.arange(200_000) + 0.5) * (math.pi / 2 / 200_000)
    shares: Any = np.cumsum(np.cos(angles) ** (dof - 1))
    return angles, shares / shares[-1]
