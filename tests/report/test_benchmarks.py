"""Benchmarks in a report: the chart over steps, the table of the last scores, results that `evaluate` wrote."""

import pytest

from gpt2small_hf.evaluation.comparison import EvaluationResults
from gpt2small_hf.report.benchmarks import benchmark_sections, benchmarks_figure
from gpt2small_hf.report.charts import draw_charts
from gpt2small_hf.report.page import as_markdown, as_text
from gpt2small_hf.runs.files import append_jsonl
from gpt2small_hf.runs.reader import Run
from gpt2small_hf.runs.results import BenchmarkScores, MetricsRow, Score, TaskScore
from report.test_page import run as run  # the fixture


def scored(step, task="verbs", value=0.6, chance=0.5, half=0.05, measure="accuracy"):
    score = Score(value=value, standard_error=half / 2, low=value - half, high=value + half, n_items=400)
    one = TaskScore(task=task, model=f"step {step}", scores={measure: score}, chance=chance)
    return one


def row_of(step, *scores):
    found = BenchmarkScores(scores=list(scores), harness="0.4.13", limit=400, seconds=1.0)
    return MetricsRow.of(step, benchmarks=found.to_json())


def test_chart_has_scores_intervals_and_chance_of_each_task():
    rows = [row_of(step, scored(step, value=0.5 + step / 100), scored(step, "pairs", chance=0.25)) for step in (5, 10)]
    figure = benchmarks_figure([MetricsRow.of(0, eval_loss=3.0), *rows])
    (axes,) = figure.axes
    lines = {line.get_label(): line for line in axes.lines}
    assert lines["verbs"].get_xydata().tolist() == [[5, pytest.approx(55)], [10, pytest.approx(60)]]
    assert {line.get_ydata()[0] for line in axes.lines if line.get_linestyle() == ":"} == {50, 25}
    bands = [one for one in axes.collections if one.get_label().startswith("_") and one.get_alpha() == 0.15]
    assert bands[0].get_datalim(axes.transData).ymin == pytest.approx(50)
    assert bands[0].get_datalim(axes.transData).ymax == pytest.approx(65)


def test_there_is_no_chart_without_accuracies():
    assert benchmarks_figure([MetricsRow.of(5, loss=3.0), row_of(5, scored(5, measure="bits_per_byte"))]) is None


def test_report_has_the_last_scores_and_marks_chance(run):
    before = as_markdown(Run(run), [])
    for row in (row_of(10, scored(10, value=0.7)), row_of(20, scored(20, value=0.52), scored(20, "pairs", value=0.9))):
        append_jsonl(run.metrics, row.to_json())
    assert "Benchmarks" not in before
    charts = [path.name for path in draw_charts(run)]
    assert "benchmarks.png" in charts
    for page in (as_markdown(Run(run), []), as_text(Run(run))):
        assert "Benchmarks at step 20" in page
        assert "52.00 ± 2.50 (chance)" in page
        assert "90.00 ± 2.50" in page
        assert "70.00" not in page
        assert "0.4.13" in page


def test_report_lists_what_evaluate_wrote_in_the_run(run):
    assert benchmark_sections(Run(run)) == []
    for folder, value in (("", 0.61), ("local", 0.62)):
        results = EvaluationResults(baseline=None, scores=[scored(20, value=value)])
        (run.heldout.parent / folder).mkdir(exist_ok=True)
        results.save(run.heldout.parent / folder / "results.json")
    page = as_markdown(Run(run), [])
    assert "61.00 ± 2.50" in page
    assert "62.00 ± 2.50" in page
    assert page.index("evaluation/local/results.json") < page.index("evaluation/results.json")
