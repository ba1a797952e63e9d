"""Scores of benchmarks in a run folder → the chart of a report, its tables and their notes. Needs no PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from gpt2small_hf.evaluation.comparison import EvaluationResults, benchmark_table, heldout_table, notes_of
from gpt2small_hf.evaluation.task import Rows
from gpt2small_hf.runs.reader import Run
from gpt2small_hf.runs.results import MetricsRow, Score

# Distinguishable with any colour vision (Okabe and Ito, 2008), and by marker.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "osD^vP"


@dataclass(frozen=True)
class BenchmarkSection:
    """Tables under a title, and sentences about them."""

    title: str
    tables: list[Rows]
    notes: list[str]


def benchmarks_figure(rows: Sequence[MetricsRow]) -> Figure | None:
    """Draw accuracies over steps with their 95 % intervals, and chance as a dotted line. None without accuracies.

    At most six tasks are drawn, the first ones; tables have all of them.
    """
    found: dict[str, list[tuple[int, Score, float | None]]] = {}
    for row in rows:
        for one in row.benchmarks.scores if row.benchmarks else ():
            if "accuracy" in one.scores:
                found.setdefault(one.task, []).append((row.step, one.scores["accuracy"], one.chance))
    if not found:
        return None
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for (task, points), color, marker in zip(found.items(), COLORS, MARKERS, strict=False):
        steps = [step for step, _, _ in points]
        scores = [score for _, score, _ in points]
        low, high = (
            np.array([100 * (score.value if end is None else end) for score, end in ends])
            for ends in ([(one, one.low) for one in scores], [(one, one.high) for one in scores])
        )
        line = [100 * score.value for score in scores]
        axes.plot(steps, line, color=color, marker=marker, markersize=4, linewidth=1.5, label=task, zorder=3)
        axes.errorbar(steps, line, [line - low, high - line], fmt="none", ecolor=color, alpha=0.6, capsize=2, zorder=2)
        axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0, zorder=1)
        if (chance := points[-1][2]) is not None:
            axes.axhline(100 * chance, color=color, linestyle=":", linewidth=1.2, zorder=2.5)
    axes.set_ylabel("accuracy (%), dotted: chance")
    return figure


def last_scores(run: Run) -> MetricsRow | None:
    """Return the last row of the log with scores of benchmarks; None if there is none."""
    return next((row for row in reversed(run.metrics) if row.benchmarks is not None), None)


def benchmark_sections(run: Run) -> list[BenchmarkSection]:
    """Return the last scores of training, and those that `evaluate --output_dir RUN/evaluation` wrote."""
    sections: list[BenchmarkSection] = []
    row = last_scores(run)
    if row is not None and row.benchmarks is not None:
        title = f"Benchmarks at step {row.step:,}"
        results = EvaluationResults(baseline=None, scores=row.benchmarks.scores)
        limit = row.benchmarks.limit
        first = "" if limit is None else f", on the first {limit:,} items of each task"
        source = f"Scores of --eval_tasks with lm-evaluation-harness {row.benchmarks.harness}{first}."
        sections.append(BenchmarkSection(title, [benchmark_table(results)], [source, *notes_of(results)]))
    folder = run.folder.heldout.parent
    for path in sorted([*folder.glob("results.json"), *folder.glob("*/results.json")]):
        results = EvaluationResults.load(path)
        tables = [table for table in (heldout_table(results), benchmark_table(results)) if table]
        if tables:
            name = path.relative_to(run.folder.root).as_posix()
            sections.append(BenchmarkSection(f"Evaluation in {name}", tables, notes_of(results)))
    return sections
