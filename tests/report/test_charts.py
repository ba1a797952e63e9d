"""Charts of good and failed runs, and the functions that compute their data."""

import math
from dataclasses import replace

import numpy as np
import pytest

from gpt2small_hf.report.charts import (
    band,
    best,
    draw_charts,
    grad_norm_figure,
    learning_rate_figure,
    loss_figure,
    new_skips,
    robust_top,
    throughput_figure,
    values,
)
from gpt2small_hf.runs.layout import RunFolder
from gpt2small_hf.runs.results import MetricsRow
from gpt2small_hf.runs.typed_json import save_lines


def training_row(step, loss, **more):
    """A line of `metrics.jsonl` as the trainer writes it."""
    usual = {
        "loss": loss,
        "loss_min": loss - 0.1,
        "loss_max": loss + 0.1,
        "grad_norm": 0.5,
        "grad_norm_mean": 0.5,
        "grad_norm_max": 0.8,
        "clipped": 0.0,
        "learning_rate": 1e-3 * min(step, 100) / 100,
        "tokens_per_second": 20_000.0,
        "mfu": 0.4,
        "data_wait": 0.01,
    }
    return MetricsRow.of(step, **(usual | more))


def run_rows(n=40, **at_300):
    """A run of `n` lines, 25 steps each, evaluated every 100; `at_300` replaces values of one line."""
    rows = [MetricsRow.of(0, eval_loss=7.0)]
    for step in range(25, 25 * n + 1, 25):
        loss = 3 + 4 * math.exp(-step / 200)
        rows.append(replace(training_row(step, loss), **(at_300 if step == 300 else {})))
        if step % 100 == 0:
            rows.append(MetricsRow.of(step, eval_loss=loss + 0.05))
    return rows


def folder_of(path, rows):
    """A run folder that contains metrics only."""
    run = RunFolder(path)
    save_lines(run.metrics, rows)
    return run


def labels(figure):
    """Return every legend entry of a chart."""
    return [label for axes in figure.axes for label in axes.get_legend_handles_labels()[1]]


def annotations(figure):
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def test_all_charts_of_a_real_run_are_drawn(tiny_run, tmp_path):
    run = RunFolder(tmp_path / "copy")
    save_lines(run.metrics, MetricsRow.load_lines(tiny_run.metrics))
    for path, source in [(run.resolved, tiny_run.resolved), (run.heldout, tiny_run.heldout)]:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(source.read_bytes())
    drawn = draw_charts(run)
    assert {run.chart("loss"), run.chart("grad_norm"), run.chart("learning_rate")} <= set(drawn)
    for path in drawn:
        head = path.read_bytes()[:24]
        assert head[:4] == b"\x89PNG"
        assert (int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:], "big")) == (960, 540)


@pytest.mark.slow
def test_charts_depend_on_the_rows_alone(tmp_path):
    name = "run"  # it is the title
    one, same, other = (
        {path.name: path.read_bytes() for path in draw_charts(folder_of(tmp_path / place / name, rows))}
        for place, rows in [
            ("a", run_rows()),
            ("b", run_rows()),
            ("c", run_rows(loss=5.0, grad_norm_max=0.9, learning_rate=5e-4, tokens_per_second=9_000.0)),
        ]
    )
    assert len(one) == 4
    assert one == same
    assert all(one[chart] != other[chart] for chart in one)


def test_metrics_that_were_not_logged_have_no_chart(tmp_path):
    rows = [MetricsRow.of(0, eval_loss=7.0), MetricsRow.of(25, loss=6.0), MetricsRow.of(25, train_runtime=3.0)]
    run = folder_of(tmp_path / "run", rows)
    assert draw_charts(run) == [run.chart("loss")]
    assert draw_charts(RunFolder(tmp_path / "nothing")) == []


@pytest.mark.parametrize("rows", [[MetricsRow.of(0, eval_loss=7.0)], [training_row(25, 6.0)]], ids=["before", "one"])
def test_one_row_is_enough(tmp_path, rows):
    assert draw_charts(folder_of(tmp_path / "run", rows))


def test_run_with_only_nulls_is_drawn(tmp_path):
    rows = [MetricsRow.of(step, **dict.fromkeys(training_row(0, 0).to_json().keys() - {"step"})) for step in (25, 50)]
    run = folder_of(tmp_path / "run", [*rows, MetricsRow.of(50, eval_loss=None)])
    assert draw_charts(run) == [run.chart("loss"), run.chart("grad_norm")]


def test_the_best_held_out_loss_is_marked_with_its_step():
    rows = [MetricsRow.of(step, eval_loss=loss) for step, loss in [(0, 7.0), (100, 3.1234), (200, 3.5)]]
    assert annotations(loss_figure(rows)) == ["best 3.123, step 100"]
    assert best(values(rows, "step"), values(rows, "eval_loss")) == (100, 3.1234)
    assert best(np.array([0, 10, 20]), np.array([np.nan, 2.0, 2.0])) == (10, 2.0)
    assert best(np.array([0]), np.array([np.nan])) is None


def test_the_peak_of_the_learning_rate_is_marked_with_its_step():
    assert annotations(learning_rate_figure(run_rows())) == ["peak 1.0e-03, step 100"]


def test_spike_is_marked_at_the_edge_and_does_not_extend_the_axis():
    calm, spiky = loss_figure(run_rows()), loss_figure(run_rows(loss=90.0, loss_max=812.0))
    assert "higher, up to 812" in labels(spiky)
    assert not any("higher" in label for label in labels(calm))
    assert spiky.axes[0].get_ylim()[1] < 8
    norms = grad_norm_figure(run_rows(grad_norm_mean=40.0, grad_norm_max=4_000.0), clip=1.0)
    assert norms.axes[0].get_ylim()[1] < 2
    assert "higher, up to 4e+03" in labels(norms)


def test_loss_far_above_that_of_a_uniform_guess_is_a_spike_of_any_length():
    rows = [training_row(step, 6.0 if step < 500 else 1e6) for step in range(25, 1001, 25)]
    assert loss_figure(rows, vocab_size=1024).axes[0].get_ylim()[1] < 10
    assert loss_figure(rows).axes[0].get_ylim()[1] > 1e6


def test_axis_includes_the_start_of_a_long_run():
    rows = [MetricsRow.of(0, eval_loss=10.9), *(training_row(step, 3.0) for step in range(10, 5001, 10))]
    assert loss_figure(rows, vocab_size=50_257).axes[0].get_ylim()[1] > 10.9


def test_a_value_that_is_not_finite_leaves_a_gap_and_a_mark():
    figure = loss_figure(run_rows(loss=None, loss_min=None, loss_max=None))
    training = next(line for line in figure.axes[0].lines if line.get_label() == "training")
    assert np.isnan(training.get_ydata()).sum() == 1
    assert "not finite" in labels(figure)
    assert "not finite" not in labels(loss_figure(run_rows()))
    assert "not finite" in labels(grad_norm_figure(run_rows(grad_norm=None)))


def test_clipping_is_drawn_if_it_is_on():
    rows = run_rows(clipped=0.3)
    assert "clipped to 1" in labels(grad_norm_figure(rows, clip=1.0))
    assert len(grad_norm_figure(rows, clip=1.0).axes) == 2
    assert len(grad_norm_figure(rows, clip=0.0).axes) == 1


@pytest.mark.parametrize("first", [25, 525], ids=["a whole run", "a log that was lost up to step 500"])
def test_the_first_interval_is_in_the_charts_of_norms_and_speed(first):
    rows = [training_row(step, 3.0, clipped=0.3, data_wait=0.05) for step in range(first, first + 500, 25)]
    rows[0] = replace(rows[0], clipped=0.9, tokens_per_second=5_000.0, grad_norm_mean=0.7)
    for figure, top in ((grad_norm_figure(rows, clip=1.0), 0.7), (throughput_figure(rows), 5_000.0)):
        line = figure.axes[0].lines[0]
        assert line.get_xdata()[:2].tolist() == [first - 25, first]
        assert line.get_ydata()[:2].tolist() == [top, top]
        below = next(axes for axes in figure.axes if axes.get_ylabel() in ("clipped", "waiting\nfor data"))
        (area,) = [path.get_extents() for fill in below.collections for path in fill.get_paths()]
        assert area.x0 == first - 25


def test_a_spike_in_the_first_interval_is_marked_once():
    first = training_row(25, 3.0, grad_norm_max=40.0, tokens_per_second=1e6)
    rows = [first, *(training_row(step, 3.0) for step in range(50, 1001, 25))]
    for figure in (grad_norm_figure(rows), throughput_figure(rows)):
        (mark,) = [line for line in figure.axes[0].lines if str(line.get_label()).startswith("higher")]
        assert mark.get_xdata().tolist() == [25]


def test_norms_of_many_sizes_get_a_logarithmic_axis():
    rows = [training_row(step, 3.0, grad_norm_mean=0.1, grad_norm_max=10.0 ** (step % 4)) for step in range(1, 101)]
    assert grad_norm_figure(rows).axes[0].get_yscale() == "log"
    assert grad_norm_figure(run_rows()).axes[0].get_yscale() == "linear"


def test_mfu_and_speed_coincide_on_one_device():
    left, right = (axes for axes in throughput_figure(run_rows()).axes if axes.get_ylabel() != "waiting\nfor data")
    assert right.get_ylim()[1] / left.get_ylim()[1] == pytest.approx(0.4 / 20_000)
    without = [replace(row, mfu=None, data_wait=None) for row in run_rows()]
    assert len(throughput_figure(without).axes) == 1


def test_a_long_line_is_thinned_and_keeps_its_extremes():
    steps = np.arange(0, 1_000_000, 10)
    mean = np.sin(steps / 1e5)
    low, high = mean - 1, mean + 1
    high[70_001], low[12_345] = 500.0, -500.0
    mean[2_000:2_100] = np.nan
    line = band(steps, low, mean, high)
    assert len(line.steps) <= 600
    assert (line.high.max(), line.low.min()) == (500.0, -500.0)
    assert line.high.argmax() == np.searchsorted(line.steps, 700_010, side="right") - 1
    assert np.nanmax(np.abs(line.mean - np.sin(line.steps / 1e5))) < 0.02


def test_a_line_is_broken_where_rows_are_missing_and_nowhere_else():
    def gaps(steps):
        ones = np.ones(len(steps))
        line = band(np.array(steps, dtype=float), ones, ones, ones)
        return line.steps[np.isnan(line.mean)].tolist()

    assert gaps([25, 50, 75, 600, 625, 650]) == [599]
    assert gaps([25, 50, 75, 175, 275, 375]) == []  # rows became rarer
    assert gaps([1, 25, 50]) == gaps([25]) == gaps([]) == []


def test_top_of_an_axis_ignores_few_high_values_except_those_to_keep():
    found = np.concatenate([np.linspace(3, 4, 200), [900.0]])
    assert robust_top(found) == 4
    assert robust_top(found[:-1] * 2) == 8
    assert robust_top(found, np.array([7.0])) == 7
    assert robust_top(found, np.array([7.0, 20.0]), ceiling=10) == 7
    assert robust_top(np.array([50.0, np.nan]), ceiling=10) == 50


@pytest.mark.slow
@pytest.mark.parametrize(("unigram", "is_drawn"), [(5.0, True), (6.5, True), (2.5, True), (9.0, False), (0.1, False)])
def test_the_unigram_loss_is_a_line_inside_the_axes_or_a_note_at_their_edge(unigram, is_drawn):
    rows = [MetricsRow.of(step, loss=6 - step / 50) for step in range(0, 150, 10)]
    figure = loss_figure(rows, 300, unigram)
    assert figure is not None
    (axes,) = figure.axes
    low, high = axes.get_ylim()
    lines = [line for line in axes.lines if "unigram" in str(line.get_label())]
    assert len(lines) == is_drawn
    assert (low < unigram < high) == is_drawn
    notes = [text.get_text() for text in axes.texts if "unigram" in text.get_text()]
    assert notes == ([] if is_drawn else [f"unigram {unigram:.3f} {'↑' if unigram > high else '↓'}"])


def test_skipped_steps_are_counted_by_kind_also_after_a_resume():
    rows = [
        training_row(25, 3.0),
        training_row(50, 3.0, skipped_loss=0, skipped_spike=3),
        training_row(75, 3.0, skipped_loss=0, skipped_spike=3),
        training_row(100, 3.0),  # the resumed run, before its first
        training_row(125, 3.0, skipped_loss=2, skipped_spike=1),
    ]
    assert new_skips(rows) == [(50, {"spike": 3}), (125, {"loss": 2, "spike": 1})]
    figure = grad_norm_figure(rows)
    assert "6 steps skipped" in labels(figure)


def test_numbers_are_read_from_the_first_name_that_has_one():
    logged = [{"loss": 1, "loss_max": 9}, {"loss": None, "loss_max": 2.5}, {"loss_max": 1e38}, {}]
    rows = [MetricsRow.of(0, **row) for row in logged]
    assert values(rows, "loss", "loss_max")[:2].tolist() == [1.0, 2.5]
    assert np.isnan(values(rows, "loss", "loss_max")[2:]).all()


def test_charts_have_fewer_points_than_pixels():
    rows = [training_row(step, 3.0) for step in range(10, 50_001, 10)]
    for figure in (loss_figure(rows), grad_norm_figure(rows), learning_rate_figure(rows), throughput_figure(rows)):
        for axes in figure.axes:
            assert max((len(line.get_xdata()) for line in axes.lines), default=0) <= 600
            assert max((len(path.vertices) for fill in axes.collections for path in fill.get_paths()), default=0) < 3000
