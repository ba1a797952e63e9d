"""Benchmarks on the card and in its metadata: only those of the weights that are published."""

import shutil

import pytest
from huggingface_hub import ModelCard

from gpt2small_hf.runs.files import append_jsonl
from gpt2small_hf.runs.layout import RunFolder
from gpt2small_hf.runs.results import BenchmarkScores, MetricsRow, Score, TaskScore
from publishing.cards import card_of

HEADER = ["task", "measure", "score", "standard error", "chance", "items", ""]


def score(value, error=0.02):
    return Score(value=value, standard_error=error, low=value - 2 * error, high=value + 2 * error, n_items=1200)


@pytest.fixture
def folder(tiny_run, tmp_path, monkeypatch):
    """A copy of a run, in which tests add scores."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_run.root, "runs/short")
    return RunFolder(tmp_path / "runs" / "short")


def add_scores(folder, step, limit=None):
    scores = [
        TaskScore(
            task="pairs_of_words",
            model=f"step {step}",
            scores={"accuracy": score(0.7), "bits_per_byte": score(1.25)},
            chance=0.5,
        ),
        TaskScore(task="verbs", model=f"step {step}", scores={"accuracy": score(0.26)}, chance=0.25),
    ]
    row = BenchmarkScores(scores=scores, harness="0.4.13", limit=limit, seconds=2.0)
    append_jsonl(folder.metrics, MetricsRow.of(step, benchmarks=row.to_json()).to_json())


def test_card_has_scores_errors_chance_and_items(folder):
    add_scores(folder, 20, limit=1200)
    card = card_of(folder.root)
    (rows,) = [rows for header, *rows in card.tables() if header == HEADER]
    assert rows == [
        ["pairs_of_words", "accuracy", "70.0%", "2.0%", "50.0%", "1,200", ""],
        ["pairs_of_words", "bits per byte", "1.2500", "0.0200", "", "1,200", ""],
        ["verbs", "accuracy", "26.0%", "2.0%", "25.0%", "1,200", "no signal at this size"],
    ]
    assert "## Benchmarks" in card.headings()
    assert "0.4.13" in card.prose
    assert "the first 1,200 items" in card.prose


def test_metadata_has_scores_with_the_harness_and_its_version(folder):
    before = {result.metric_type: result for result in ModelCard(card_of(folder.root).text).data.eval_results}
    add_scores(folder, 20)
    results = ModelCard(card_of(folder.root).text).data.eval_results
    found = {(one.dataset_name, one.metric_type): one for one in results if one.source_name}
    assert {name: one.metric_value for name, one in found.items()} == {
        ("pairs_of_words", "accuracy"): 0.7,
        ("pairs_of_words", "bits_per_byte"): 1.25,
        ("verbs", "accuracy"): 0.26,
    }
    assert {one.source_name for one in found.values()} == {"lm-evaluation-harness 0.4.13"}
    others = {one.metric_type: one for one in results if not one.source_name}
    assert others.keys() == before.keys()
    assert others["loss"].metric_value == before["loss"].metric_value


def test_card_without_scores_of_its_weights_stays_as_it_was(folder):
    before = card_of(folder.root)
    add_scores(folder, 10)
    after = card_of(folder.root)
    assert after.text == before.text
    assert "## Benchmarks" not in before.headings()
