"""Comparisons: verdicts, their adjustment, what is not compared, and the tables."""

import numpy as np
import pytest

from gpt2small_hf.errors import UsageError
from gpt2small_hf.evaluation.comparison import (
    HELD_OUT,
    MEAN,
    EvaluationResults,
    benchmark_table,
    heldout_table,
    notes_of,
    pooled,
    results_of,
)
from gpt2small_hf.evaluation.items import Choices, Header, TaskItems, Text
from gpt2small_hf.formatting import console_table


def answered(model, right, *, task="arc", n=2, items="same"):
    """Items of `n` answers of which the gold one is the likeliest where `right` says so."""
    questions = [
        Choices(
            id=at,
            log_likelihoods=[-1.0 if one else -3.0] + [-2.0] * (n - 1),
            n_bytes=[4] * n,
            n_characters=[4] * n,
        )
        for at, one in enumerate(right)
    ]
    header = Header(task=task, model=model, weights_sha256=model, items_sha256=items, n_items=len(right), settings={})
    return TaskItems(header, questions)


def rows(model, losses, items="same"):
    texts = [Text(id=at, nats=10 * loss, n_tokens=10, n_bytes=40.0) for at, loss in enumerate(losses)]
    header = Header(
        task=HELD_OUT, model=model, weights_sha256=model, items_sha256=items, n_items=len(losses), settings={}
    )
    return TaskItems(header, texts)


@pytest.fixture
def generator():
    return np.random.default_rng(3)


def test_a_clear_difference_is_decided_and_an_equal_model_is_not(generator):
    coins = generator.random(400)
    models = {
        "base": answered("base", coins < 0.5),
        "better": answered("better", coins < 0.65),
        "equal": answered("equal", generator.permutation(coins) < 0.5),
    }
    found = results_of({"arc": models}, "base")
    verdicts = {(one.model, one.measure): one.verdict for one in found.comparisons}
    assert verdicts["better", "accuracy"] == "better"
    assert verdicts["better", "bits_per_byte"] == "better"
    assert verdicts["equal", "accuracy"] == "undecided"


@pytest.mark.slow
def test_verdicts_of_equal_models_are_false_in_at_most_one_table_in_twenty(generator):
    tables = 200
    false = 0
    for _ in range(tables):
        found = {
            str(task): {model: answered(model, generator.random(60) < 0.5) for model in ("base", "same")}
            for task in range(4)
        }
        results = results_of(found, "base")
        false += any(one.verdict != "undecided" for one in results.comparisons if one.measure == "accuracy")
    assert false / tables <= 0.09


def test_different_items_of_a_benchmark_are_refused():
    models = {"a": answered("a", [1, 0]), "b": answered("b", [1, 0], items="other")}
    with pytest.raises(UsageError, match="b and a were measured on different items of arc"):
        results_of({"arc": models}, "a")


def test_held_out_rows_of_other_tokens_are_shown_and_not_compared(generator):
    losses = generator.normal(3, 0.1, size=50)
    found = results_of({HELD_OUT: {"a": rows("a", losses), "b": rows("b", losses - 1, items="other")}}, "a")
    assert not found.comparisons
    assert "different tokenizers" in found.notes[0]
    assert [row[0] for row in heldout_table(found)] == ["held-out rows", "a", "b"]


def test_held_out_loss_has_six_decimals_and_a_paired_difference(generator):
    losses = generator.normal(3, 0.5, size=200)
    better = losses - 0.05 + generator.normal(0, 0.05, size=200)
    found = results_of({HELD_OUT: {"a": rows("a", losses), "b": rows("b", better)}}, "a")
    header, first, second = heldout_table(found)
    assert first[1] == f"{losses.mean():.6f}"
    assert second[header.index("difference")].endswith("better")
    low, high = (float(one) for one in first[3].split(" to "))
    assert low < losses.mean() < high


def test_a_score_that_may_be_chance_is_marked(generator):
    found = results_of({"arc": {"a": answered("a", generator.random(100) < 0.25, n=4)}}, None)
    assert not found.scores[0].has_signal
    assert "(chance)" in benchmark_table(found)[1][4]
    assert any("no signal" in note for note in notes_of(found))


def test_groups_pool_their_items():
    whole = pooled("blimp", [answered("a", [1, 1, 0], task="x"), answered("a", [0, 0, 0], task="y")])
    assert whole.header.task == "blimp"
    assert whole.header.n_items == 6
    assert whole.measures()["accuracy"].values.mean() == pytest.approx(1 / 3)


def test_mean_of_the_tasks_is_compared_too(generator):
    tasks = {}
    for task in ("x", "y", "z"):
        coins = generator.random(300)
        tasks[task] = {"base": answered("base", coins < 0.5), "better": answered("better", coins < 0.54)}
    found = results_of(tasks, "base")
    mean = [one for one in found.comparisons if one.task == MEAN and one.measure == "accuracy"]
    parts = [one for one in found.comparisons if one.task != MEAN and one.measure == "accuracy"]
    assert mean[0].difference == pytest.approx(np.mean([one.difference for one in parts]))
    assert mean[0].standard_error < min(one.standard_error for one in parts)
    header, *table = benchmark_table(found)
    assert table[-1][0] == MEAN
    assert console_table(header, table)


def test_results_are_read_back(tmp_path, generator):
    coins = generator.random(50)
    models = {"a": answered("a", coins < 0.5), "b": answered("b", coins < 0.9)}
    found = results_of({"arc": models}, "a")
    found.save(tmp_path / "results.json")
    again = EvaluationResults.load(tmp_path / "results.json")
    assert again.comparisons == found.comparisons
    assert benchmark_table(again) == benchmark_table(found)
