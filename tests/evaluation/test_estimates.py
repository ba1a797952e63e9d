"""Estimates and their errors: against simulations and known values."""

import math

import numpy as np
import pytest

from gpt2small_hf.evaluation.estimates import (
    bootstrap_interval,
    holm,
    paired_difference,
    ratio,
    standard_error,
    student_factor,
    two_sided_p,
)


@pytest.fixture
def generator():
    return np.random.default_rng(5)


def test_standard_error_of_a_mean_is_the_textbook_formula(generator):
    values = generator.normal(size=50)
    assert standard_error(values) == pytest.approx(values.std(ddof=1) / math.sqrt(50))
    assert math.isnan(standard_error(values[:1]))


def test_standard_error_of_a_ratio_is_the_spread_of_repeated_samples(generator):
    weights = generator.integers(5, 60, size=(2000, 80)).astype(float)
    values = 3.0 * weights + generator.normal(size=weights.shape) * np.sqrt(weights)
    found = [ratio(v, w) for v, w in zip(values, weights, strict=True)]
    estimated = [standard_error(v, w) for v, w in zip(values, weights, strict=True)]
    assert np.mean(estimated) == pytest.approx(np.std(found), rel=0.05)


def test_bootstrap_interval_has_the_normal_length(generator):
    values, weights = generator.normal(2, 1, size=400), np.full(400, 1.0)
    for found in (bootstrap_interval(values), bootstrap_interval(values, weights)):
        assert found[1] - found[0] == pytest.approx(2 * 1.96 * standard_error(values), rel=0.1)
        assert found[0] < ratio(values) < found[1]
    assert bootstrap_interval(values) == bootstrap_interval(values)


def test_paired_difference_of_equal_models_has_the_level(generator):
    """Items that are hard for both models cancel out; one comparison in twenty of equal models is below 0.05."""
    hard = generator.normal(0, 5, size=(1000, 60))
    one, other = (hard + generator.normal(size=hard.shape) for _ in range(2))
    found = [paired_difference(a, b) for a, b in zip(one, other, strict=True)]
    assert np.mean([each.p < 0.05 for each in found]) == pytest.approx(0.05, abs=0.02)
    assert np.mean([each.standard_error for each in found]) == pytest.approx(math.sqrt(2 / 60), rel=0.05)


def test_paired_difference_detects_a_shift_that_separate_errors_hide(generator):
    hard = generator.normal(0, 5, size=200)
    found = paired_difference(hard + 0.3 + generator.normal(size=200) * 0.5, hard)
    assert found.p < 0.001
    assert 2 * standard_error(hard) > 0.3


def test_paired_difference_refuses_other_numbers_of_items():
    with pytest.raises(ValueError, match="3 items cannot be paired with 2"):
        paired_difference(np.zeros(3), np.zeros(2))


def test_identical_scores_do_not_differ():
    same = np.array([1.0, 0.0, 1.0])
    assert paired_difference(same, same).p == 1


@pytest.mark.parametrize(("dof", "factor"), [(1, 12.706), (2, 4.303), (5, 2.571), (20, 2.086), (1000, 1.962)])
def test_quantiles_and_p_values_equal_published_tables(dof, factor):
    assert student_factor(dof) == pytest.approx(factor, abs=1e-3)
    assert two_sided_p(-factor, 1.0, dof) == pytest.approx(0.05, abs=2e-4)


def test_holm_adjusts_as_published():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []
