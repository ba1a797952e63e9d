"""Statistics of simulated judges: noise floor, biases, ranks, missing scores."""

import dataclasses
import math

import numpy as np
import pytest

from gpt2small_hf.judge.calls import Plan
from gpt2small_hf.judge.effects import (
    detectable_difference,
    length_effect,
    mean_over,
    place_effects,
    ranks_within_replies,
    retest_correlation,
    win_rate_half_width,
)
from gpt2small_hf.judge.entries import Entry, shuffled, warnings_of
from gpt2small_hf.judge.judgement import build_plan
from gpt2small_hf.judge.records import MODEL, REFERENCE, REPEATED, SHUFFLED, Call
from gpt2small_hf.judge.scores import check_controls, read_scores, summarize
from gpt2small_hf.judge.tables import MARK, card_section, findings, score_table
from judge.conftest import write_answers
from judge.server import blind, fair, length_biased, position_biased, reply_of

QUALITIES = {"one": 30, "two": 34, "three": 40, "four": 50}


@pytest.fixture
def plan(tmp_path, settings) -> Plan:
    """Four models of 110 questions, three runs."""
    paths = [write_answers(tmp_path / f"{label}.jsonl", label, mean, 110) for label, mean in QUALITIES.items()]
    return build_plan(paths, settings(runs=3))


def judged_by(judge, plan: Plan, fixed_order: bool = False) -> list[Call]:
    """Return all calls of a plan, without a server."""
    found = []
    for call in plan.calls():
        order, prompt = call.order, call.prompt
        if fixed_order:
            order = list(range(len(order)))
            prompt = plan.prompt(call.question, order)
        found.append(
            Call(
                run=call.run,
                question=call.question,
                id=plan.questions[call.question].id,
                order=[plan.entries[one].label for one in order],
                prompt=prompt,
                reply=reply_of(judge, prompt, call.run),
                endpoint="",
                is_structured=True,
                attempts=1,
                date="",
                seconds=0.0,
            )
        )
    return found


def ranking(scores) -> list[str]:
    models = [one for one in scores.entries if one.kind == MODEL]
    return [one.label for one in sorted(models, key=lambda one: one.rank)]


@pytest.mark.slow
def test_fair_judge_ranks_by_quality_and_shows_no_effect(plan):
    scores = summarize(plan, judged_by(fair, plan), "one")
    assert ranking(scores) == ["four", "three", "two", "one"]
    assert scores.failed_controls == []
    assert [one.verdict for one in scores.of_kind(MODEL)][2:] == ["better", "better"]
    assert min(one.p for one in scores.places) > 0.05
    assert abs(scores.length.points) < 3 * scores.length.standard_error
    assert 0.5 < scores.retest_correlation < 0.9
    assert MARK not in findings(scores)
    for one in scores.entries:
        assert one.interval[0] < one.mean < one.interval[1]
        assert one.mean == pytest.approx(np.mean(one.run_means))


@pytest.mark.slow
def test_position_bias_is_found_and_ranks_are_those_without_it(plan):
    """With one order for all calls the same judge puts a weaker model first."""
    scores = summarize(plan, judged_by(position_biased, plan), "one")
    assert ranking(scores) == ["four", "three", "two", "one"]
    assert [one.place for one in scores.places if one.p < 0.001][:2] == [1, 2]
    # 20 and 10 points for two of seven places, less their mean; scores above 100 are cut.
    assert scores.places[0].points == pytest.approx(20 - 30 / 7, abs=3)
    assert scores.places[1].points == pytest.approx(10 - 30 / 7, abs=2)
    assert "position bias" in " ".join(findings(scores))
    values, _ = read_scores(plan, judged_by(position_biased, plan, fixed_order=True))
    means = dict(zip(QUALITIES, mean_over(values[:4], axis=(1, 2)), strict=True))
    assert max(means, key=means.__getitem__) != "four"


@pytest.mark.slow
def test_length_bias_is_found_and_measured(plan):
    scores = summarize(plan, judged_by(length_biased, plan), "one")
    assert scores.length.p < 0.001
    assert scores.length.points == pytest.approx(10, abs=2.5)


@pytest.mark.slow
def test_judge_that_does_not_read_is_marked(plan):
    scores = summarize(plan, judged_by(blind, plan), "one")
    assert [one.name for one in scores.failed_controls] == ["shuffled answers"]
    assert findings(scores)[0] == MARK
    assert MARK in card_section(scores)
    assert {one.verdict for one in scores.of_kind(MODEL)} == {None, "undecided"}


def simulated(seed: int, n: int = 110, runs: int = 3) -> tuple[list[Entry], np.ndarray]:
    """Scores of a judge with noise for each question and for each reply: two models and the controls."""
    noise = np.random.default_rng(seed)
    kinds = {"one": MODEL, "two": MODEL, "again": REPEATED, "reference": REFERENCE, "other": SHUFFLED}
    quality = np.array([40.0, 45, 40, 95, 5])[:, None, None] + noise.normal(0, 15, (1, n, 1))
    quality = quality + noise.normal(0, 10, (5, n, 1))
    quality[2] = quality[0]
    return [Entry(label, kind, [""] * n) for label, kind in kinds.items()], quality + noise.normal(0, 12, (5, n, runs))


def test_repeated_model_is_inside_its_interval_in_19_of_20_judges():
    passed = [{one.name: one.is_passed for one in check_controls(*simulated(seed))} for seed in range(20)]
    assert sum(one["repeated model"] for one in passed) >= 19
    assert sum(all(one.values()) for one in passed) >= 19


@pytest.mark.slow
def test_p_value_of_the_repeated_model_has_its_level():
    values = [check_controls(*simulated(seed))[0].p for seed in range(400)]
    assert np.mean(np.array(values) < 0.05) == pytest.approx(0.05, abs=0.025)


@pytest.mark.parametrize(
    ("entry", "shift", "failed"),
    [
        (2, 8.0, "repeated model"),
        (2, -8.0, "repeated model"),
        (1, 70.0, "reference answers"),
        (4, 90.0, "shuffled answers"),
    ],
)
def test_controls_that_come_out_wrong_are_found(entry, shift, failed):
    entries, scores = simulated(1)
    scores[entry] += shift
    assert [one.name for one in check_controls(entries, scores) if not one.is_passed] == [failed]


def test_shuffled_answers_without_references_may_not_beat_their_own():
    entries, scores = simulated(1)
    kept = [0, 1, 4]
    entries = [entries[at] for at in kept]
    assert [one.is_passed for one in check_controls(entries, scores[kept])] == [True]
    assert [one.is_passed for one in check_controls(entries, scores[kept] + [[[0]], [[0]], [[80]]])] == [False]


def test_controls_without_any_valid_score_fail():
    entries, scores = simulated(1)
    found = check_controls(entries, np.full(scores.shape, np.nan))
    assert [(one.is_passed, one.difference) for one in found] == [(False, None)] * 3


# ---- effects --------------------------------------------------------------------------------------------------------


def test_ranks_share_ties_and_skip_incomplete_replies():
    scores = np.array([[[90.0, 10]], [[50, np.nan]], [[50, 30]]])
    assert ranks_within_replies(scores).tolist() == [[1], [2.5], [2.5]]
    scores[:, 0, 1] = 10, 20, 30
    assert ranks_within_replies(scores).tolist() == [[2], [2.25], [1.75]]


def test_place_effects_of_equal_scores_are_zero_and_sum_to_zero_otherwise():
    noise = np.random.default_rng(0)
    places = np.stack([[noise.permutation(4) for _ in range(3)] for _ in range(30)]).transpose(2, 0, 1)
    assert {effect[0] for effect in place_effects(np.full(places.shape, 50.0), places)} == {0.0}
    found = place_effects(places * 5.0 + noise.normal(size=places.shape), places)
    assert [points for points, _, _ in found] == pytest.approx([-7.5, -2.5, 2.5, 7.5], abs=0.6)
    assert max(p for _, _, p in found) < 1e-6


def test_length_effect_ignores_lengths_of_models_and_questions():
    noise = np.random.default_rng(0)
    lengths = noise.uniform(0, 100, (3, 80)) + np.array([[0], [500], [900]]) + noise.uniform(0, 900, (1, 80))
    scores = noise.normal(50, 2, (3, 80, 2)) + np.array([[[0]], [[20]], [[40]]])
    found = length_effect(scores, lengths)
    assert abs(found.value) < 3 * found.standard_error
    assert length_effect(scores, np.ones((3, 80))) is None


def test_retest_correlation_is_that_of_the_shared_part():
    noise = np.random.default_rng(0)
    scores = noise.normal(size=(5, 400, 1)) + noise.normal(size=(5, 400, 3))
    assert retest_correlation(scores) == pytest.approx(0.5, abs=0.05)
    assert retest_correlation(scores[:, :, :1]) is None
    assert retest_correlation(np.full((5, 4, 2), 7.0)) is None


def test_power_of_110_questions_is_the_published_one():
    assert win_rate_half_width(110) == pytest.approx(9.34, abs=0.01)
    assert detectable_difference(110) == pytest.approx(13.36, abs=0.01)


# ---- entries --------------------------------------------------------------------------------------------------------


def test_shuffled_answers_belong_to_other_questions():
    texts = ["a", "b", "a", "c"]
    found = shuffled(texts, seed=1)
    assert all(one != own for one, own in zip(found, texts, strict=True))
    assert found == shuffled(texts, seed=1)
    assert shuffled(["a", "a"], seed=1) == ["a", "a"]


def test_equal_and_empty_answers_are_warned_of():
    def entry(label, texts):
        return Entry(label, MODEL, texts)

    various = [f"answer {at}" for at in range(20)]
    assert warnings_of([entry("one", various), entry("two", various[::-1])]) == []
    (equal,) = warnings_of([entry("one", various), entry("two", [*various[:-1], "x"])])
    assert "19 of 20" in equal
    (empty,) = warnings_of([entry("one", various), entry("two", [""] * 20)])
    assert "two gives the same empty answer to 20 of 20" in empty


def test_table_without_test_losses_is_sorted_by_mean_and_has_no_such_column(tmp_path, settings):
    paths = [
        write_answers(tmp_path / f"{label}.jsonl", label, mean, 4, epochs=False) for label, mean in QUALITIES.items()
    ]
    plan = build_plan(paths, settings(runs=1, no_controls=True))
    plan.entries[0] = dataclasses.replace(
        plan.entries[0], header=dataclasses.replace(plan.entries[0].header, test_loss=None)
    )
    scores = summarize(plan, judged_by(fair, plan), "one")
    lines = score_table(scores).splitlines()
    assert "epochs" not in lines[0]
    means = {one.label: one.mean for one in scores.entries}
    assert [line.split()[0] for line in lines[1:]] == sorted(means, key=means.__getitem__, reverse=True)
    assert "No controls were judged." in findings(scores)


def test_model_without_any_valid_score_has_no_mean_and_the_last_rank(tmp_path, settings):
    paths = [write_answers(tmp_path / f"{label}.jsonl", label, mean, 5) for label, mean in QUALITIES.items()]
    plan = build_plan(paths, settings(runs=1))
    calls = []
    for call in judged_by(fair, plan):
        letter = "ABCDEFG"[call.order.index("four")]
        calls.append(dataclasses.replace(call, reply=call.reply.replace(f'"{letter}":', '"none":')))
    scores = summarize(plan, calls, "one")
    (four,) = [one for one in scores.entries if one.label == "four"]
    assert (four.mean, four.interval, four.n_missing, four.rank, four.verdict) == (None, [], 5, 4, None)
    assert not any(math.isnan(value) for one in scores.entries for value in (one.mean or 0, *one.interval))
    assert "5 of 5 scores of four" in " ".join(scores.warnings)
