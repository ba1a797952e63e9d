"""Draw charts from the logged metrics. Needs no PyTorch.

Charts stay readable when a run fails: spikes are clipped and marked at the upper edge, non-finite values leave a gap
and a mark, and long logs are reduced to a few hundred points with their extremes.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, MaxNLocator

from gpt2small_hf.report.benchmarks import benchmarks_figure
from gpt2small_hf.runs.files import atomic_write
from gpt2small_hf.runs.layout import RunFolder
from gpt2small_hf.runs.records import Resolved
from gpt2small_hf.runs.results import HeldOut, MetricsRow

MAX_POINTS = 600
"""Maximum number of points in a line: more would share pixels."""
# Distinguishable with any colour vision (Okabe and Ito, 2008), and by line style or marker.
MAIN, SECOND, LIMIT, BAD, FAINT, GREY = "#0072B2", "#56B4E9", "#B0552F", "#D55E00", "#BBD6E8", "#666666"

MAX_STRETCH = 1.6
"""Maximum factor by which the loss axis is extended to include the unigram loss."""
BOUNDLESS = 1e30
"""Values from here on are treated as infinite: axes cannot show them."""
NOTHING = np.array([])
PERCENT = FuncFormatter(lambda share, _: f"{100 * share:g}%")

Rows = list[MetricsRow]


def draw_charts(run: RunFolder) -> list[Path]:
    """Draw loss, gradients, learning rate, throughput and benchmarks against steps: `charts/*.png`, 960 x 540 pixels.

    Reads `metrics.jsonl`, and `resolved.json` and `heldout.json` if they exist.

    Returns: the paths of the charts. Metrics that were not logged have no chart.
    """
    rows = sorted(MetricsRow.load_lines(run.metrics), key=lambda row: row.step)
    resolved = Resolved.load(run.resolved) if run.resolved.exists() else None
    unigram = HeldOut.load(run.heldout).unigram if run.heldout.exists() else None
    figures = {
        "loss": loss_figure(rows, resolved and resolved.model.vocab_size, unigram and unigram.loss_nats),
        "grad_norm": grad_norm_figure(rows, resolved and resolved.trainer.max_grad_norm),
        "learning_rate": learning_rate_figure(rows),
        "throughput": throughput_figure(rows),
        "benchmarks": benchmarks_figure(rows),
    }
    drawn = []
    for name, figure in figures.items():
        if figure is not None:
            _finish(figure, run, resolved, rows[-1].step)
            with atomic_write(run.chart(name), flush=False) as temporary:  # it can be drawn again
                figure.savefig(temporary, format="png")
            drawn.append(run.chart(name))
    return drawn


# ---- data ----------------------------------------------------------------------------------------------


@dataclass
class Band:
    """A line with its minimum and maximum, each of shape (points,). NaN breaks the line."""

    steps: np.ndarray
    low: np.ndarray
    mean: np.ndarray
    high: np.ndarray


def values(rows: Rows, *names: str) -> np.ndarray:
    """Return for each row the first of `names` with a finite value below 1e30; NaN if there is none.

    Returns: float64, shape (rows,).
    """
    found = np.full(len(rows), np.nan)
    for name in names:
        column = np.array([getattr(row, name) for row in rows], dtype=float)  # None becomes NaN
        found = np.where(np.isnan(found) & (np.abs(column) < BOUNDLESS), column, found)
    return found


def band(steps: np.ndarray, low: np.ndarray, mean: np.ndarray, high: np.ndarray, most: int = MAX_POINTS) -> Band:
    """Reduce a line to at most `most` points, each with minimum, mean and maximum over an interval of steps.

    The line is broken where rows are missing: where a gap is more than four times as long as the gaps next to it.
    """
    if len(steps) > most:
        stretch = (steps - steps[0]) * most // (steps[-1] - steps[0] + 1)
        starts = np.flatnonzero(np.diff(stretch, prepend=-1))
        known = np.add.reduceat(np.isfinite(mean).astype(float), starts)
        total = np.add.reduceat(np.nan_to_num(mean), starts)
        steps, low, high = steps[starts], np.fmin.reduceat(low, starts), np.fmax.reduceat(high, starts)
        mean = np.where(known > 0, total / np.maximum(known, 1), np.nan)
    way = np.diff(steps)
    breaks = np.flatnonzero(way[1:-1] > 4 * np.maximum(way[:-2], way[2:])) + 2
    return Band(
        np.insert(steps.astype(float), breaks, steps[breaks] - 1),
        *(np.insert(line, breaks, np.nan) for line in (low, mean, high)),
    )


def best(steps: np.ndarray, losses: np.ndarray) -> tuple[int, float] | None:
    """Return the first step with the lowest loss, and that loss; None if no loss is finite."""
    if not np.isfinite(losses).any():
        return None
    at = int(np.nanargmin(losses))
    return int(steps[at]), float(losses[at])


def robust_top(found: np.ndarray, keep: np.ndarray = NOTHING, ceiling: float = math.inf) -> float:
    """Return the upper limit of an axis, so that spikes do not compress the rest.

    This is the highest value of `found` that exceeds the 98th percentile by at most half the range from the 2nd to the
    98th percentile, or the highest of `keep`. Values above `ceiling` are ignored unless all are above it.
    """
    found = found[np.isfinite(found)]
    usual = found[found <= ceiling] if (found <= ceiling).any() else found
    low, high = np.percentile(usual, [2, 98])
    return float(max([usual[usual <= high + (high - low) / 2].max(), *keep[keep <= ceiling]]))


def new_skips(rows: Rows) -> list[tuple[int, dict[str, int]]]:
    """Return the steps at which `skipped_*` counts increased, and each increase; a resumed run counts from 0 again."""
    grown, last = [], {}
    for row in rows:
        if now := row.skipped:
            more = {kind: n - last.get(kind, 0) if n >= last.get(kind, 0) else n for kind, n in sorted(now.items())}
            last = now
            if any(more.values()):
                grown.append((row.step, {kind: n for kind, n in more.items() if n}))
    return grown


def describe(resolved: Resolved) -> str:
    """Return recipe, size and data of a run on one line."""
    model = resolved.model
    return " · ".join(
        [
            *([f"recipe {resolved.recipe_name}"] if resolved.recipe_name else []),
            f"{model.num_hidden_layers} layers, {model.hidden_size:,} wide, rows of {resolved.seq_len:,} tokens",
            f"data {Path(resolved.data.folder).name}",
        ]
    )


# ---- charts -----------------------------------------------------------------------------------------------


def loss_figure(rows: Rows, vocab_size: int | None = None, unigram: float | None = None) -> Figure | None:
    """Draw training loss with its extremes, held-out loss with its minimum, unigram loss. None without losses."""
    train, held = _train(rows), [row for row in rows if row.has("eval_loss")]
    if not train and not held:
        return None
    figure = _figure()
    axes = figure.add_subplot()
    steps, mean = values(train, "step"), values(train, "loss")
    line = band(steps, values(train, "loss_min", "loss"), mean, values(train, "loss_max", "loss"))
    held_steps, held_losses = values(held, "step"), values(held, "eval_loss")

    shown = np.concatenate([line.low, line.mean, line.high, held_losses])
    top, bottom = math.inf, -math.inf
    if np.isfinite(shown).any():
        # A uniform guess has a loss of ln(vocabulary): values far above that are spikes, at any step.
        ceiling = 1.3 * math.log(vocab_size) if vocab_size else math.inf
        top, bottom = robust_top(shown, np.concatenate([held_losses, mean[:1]]), ceiling), float(np.nanmin(shown))
        if unigram is not None and max(top, unigram) - min(bottom, unigram) <= MAX_STRETCH * (top - bottom):
            top, bottom = max(top, unigram), min(bottom, unigram)
        margin = 0.05 * (top - bottom) or 0.05 * abs(top) or 0.5
        top += margin
        bottom -= margin
        axes.set_ylim(bottom, top)
    if len(train):
        _plot_band(axes, line, "training", "training, lowest to highest")
    if len(held):
        marker = "o" if len(held) <= 50 else ""
        axes.plot(
            held_steps, held_losses, color=MAIN, linewidth=2, marker=marker, markersize=4, label="held-out", zorder=4
        )
    if (found := best(held_steps, held_losses)) is not None and found[1] <= top:
        step, loss = found
        axes.plot(step, loss, "*", color=MAIN, markersize=14, markeredgecolor="white", zorder=5)
        _write(axes, f"best {loss:.3f}, step {step:,}", (step, loss), rows[-1].step)
    if unigram is not None and bottom <= unigram <= top:
        axes.axhline(unigram, color=LIMIT, linewidth=1.2, linestyle="--", label=f"unigram {unigram:.3f}", zorder=2.5)
    elif unigram is not None:  # far from the run's losses, which would be compressed
        edge = (0.99, "↑", "top") if unigram > top else (0.01, "↓", "bottom")
        words = f"unigram {unigram:.3f} {edge[1]}"
        axes.text(0.99, edge[0], words, transform=axes.transAxes, ha="right", va=edge[2], color=LIMIT, fontsize=8.5)
    _mark_above(axes, np.concatenate([line.steps, held_steps]), np.concatenate([line.high, held_losses]), top)
    _mark(axes, steps[np.isnan(mean)], "x", "not finite")
    _mark(axes, held_steps[np.isnan(held_losses)], "X", "held-out loss not finite")
    axes.set_ylabel("loss (nats per token)")
    return figure


def grad_norm_figure(rows: Rows, clip: float | None = None) -> Figure | None:
    """Draw mean and maximum gradient norm, the clipping limit, and the share of clipped steps. None without norms."""
    train = [row for row in _train(rows) if row.has("grad_norm")]
    if not train:
        return None
    figure = _figure()
    clipped = values(train, "clipped")
    axes, below = _panels(figure, bool(clip) and bool(np.isfinite(clipped).any()))
    steps, mean = values(train, "step"), values(train, "grad_norm_mean", "grad_norm")
    high = values(train, "grad_norm_max", "grad_norm_mean", "grad_norm")
    line = band(*_with_start(steps, mean, mean, high))
    _plot_band(axes, line, "mean", "mean to largest")
    shown = np.concatenate([line.mean, line.high])
    shown = shown[np.isfinite(shown)]
    if len(shown):
        if shown.min() > 0 and np.percentile(shown, 98) > 8 * np.percentile(shown, 25):
            axes.set_yscale("log")
            bottom, top = (
                min(shown.min(), clip or math.inf) / 1.2,
                1.2 * max(10 ** robust_top(np.log10(shown)), clip or 0),
            )
            axes.set_ylim(bottom, top)
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
            between = "25" if top < 100 * bottom else ""  # the axis has too few powers of ten to read values
            axes.yaxis.set_minor_formatter(
                FuncFormatter(lambda value, _: f"{value:,g}" if f"{value:e}"[0] in between else "")
            )
        else:
            top = 1.05 * max(robust_top(shown), clip or 0) or 1
            axes.set_ylim(0, top)
        _mark_above(axes, steps, high, top)
    if clip:
        axes.axhline(clip, color=LIMIT, linewidth=1.2, linestyle="--", label=f"clipped to {clip:g}", zorder=2.5)
    # The mean leaves out non-finite norms: the last step's norm and the counts show them.
    _mark(axes, steps[np.isnan(values(train, "grad_norm")) | np.isnan(mean)], "x", "not finite")
    if skips := new_skips(train):
        total = sum(n for _, kinds in skips for n in kinds.values())
        _mark(axes, np.array([float(step) for step, _ in skips]), "v", f"{total:,} steps skipped", height=0.91)
    axes.set_ylabel("gradient norm before clipping")
    if below is not None:
        _share(below, steps, clipped, "clipped", LIMIT)
    return figure


def learning_rate_figure(rows: Rows) -> Figure | None:
    """Draw the learning rate and its peak. None if it was not logged."""
    train = _train(rows)
    steps, rates = values(train, "step"), values(train, "learning_rate")
    if not np.isfinite(rates).any():
        return None
    figure = _figure()
    axes = figure.add_subplot()
    line = band(steps, rates, rates, rates)
    _plot(axes, line, color=MAIN)
    at = int(np.nanargmax(rates))
    axes.plot(steps[at], rates[at], "o", color=MAIN, markersize=6)
    _write(axes, f"peak {rates[at]:.1e}, step {steps[at]:,.0f}", (steps[at], rates[at]), steps[-1])
    axes.set_ylim(0, 1.15 * rates[at] or 1)
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: re.sub(r"\.?0+e", "e", f"{value:.2e}") if value else "0")
    )
    axes.set_ylabel("learning rate")
    return figure


def throughput_figure(rows: Rows) -> Figure | None:
    """Draw tokens per second, MFU, and the share of time waiting for data. None without tokens per second."""
    train = _train(rows)
    steps, speed = values(train, "step"), values(train, "tokens_per_second")
    if not np.isfinite(speed).any():
        return None
    figure = _figure()
    waits, mfu = values(train, "data_wait"), values(train, "mfu")
    axes, below = _panels(figure, bool(np.isfinite(waits).any() and np.nanmax(waits) >= 0.005))
    line = band(*_with_start(steps, speed, speed, speed))
    usual = float(np.nanmedian(speed))
    _plot(axes, line, f"tokens/s, median {usual:,.0f}")
    top = 1.1 * robust_top(speed) or 1
    axes.set_ylim(0, top)
    _mark_above(axes, steps, speed, top)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_ylabel("tokens per second")
    if np.isfinite(mfu).any():
        right = axes.twinx()
        of_peak = band(*_with_start(steps, mfu, mfu, mfu))
        label = f"MFU (right), median {np.nanmedian(mfu):.1%}"
        right.plot(of_peak.steps, of_peak.mean, color=LIMIT, linewidth=1.2, linestyle=":", label=label)
        # On one device MFU is proportional to speed: the axes are scaled so that the two lines coincide.
        right.set_ylim(0, (top * float(np.nanmedian(mfu)) / usual if usual > 0 else 0) or 1)
        right.yaxis.set_major_formatter(PERCENT)
        right.spines["top"].set_visible(False)
        right.set_ylabel("share of the device's peak (MFU)")
    if below is not None:
        _share(below, steps, waits, "waiting\nfor data", BAD)
    return figure


def _train(rows: Rows) -> Rows:
    return [row for row in rows if row.has("loss")]


def _with_start(
    steps: np.ndarray, low: np.ndarray, mean: np.ndarray, high: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Prepend a point at the start of the first interval: means over an interval are logged at its end."""
    start = max(0, 2 * steps[0] - steps[1] if len(steps) > 1 else 0)
    low, mean, high = (np.insert(line, 0, line[0]) for line in (low, mean, high))
    return np.insert(steps, 0, start), low, mean, high


# ---- drawing --------------------------------------------------------------------------------------------


def _figure() -> Figure:
    return Figure(figsize=(8, 4.5), dpi=120, layout="constrained")  # pyplot would need a display and has global state


def _panels(figure: Figure, two: bool) -> tuple[Axes, Axes | None]:
    if not two:
        return figure.add_subplot(), None
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[5, 1])
    return upper, lower


def _finish(figure: Figure, run: RunFolder, resolved: Resolved | None, last_step: int) -> None:
    """Add what all charts share: title, step axis, grid, legend."""
    upper = figure.axes[0]
    name = run.root.resolve().name
    upper.set_title(name[:80], loc="left", weight="bold", fontsize=11, pad=20, parse_math=False)
    words = describe(resolved)[:120] if resolved else ""
    upper.text(0, 1.025, words, transform=upper.transAxes, fontsize=8.5, color=GREY, parse_math=False)
    left = [axes for axes in figure.axes if axes.yaxis.get_label_position() == "left"]
    for axes in left:
        axes.set_xlim(-0.02 * (last_step or 1), 1.02 * (last_step or 1))
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 2.5, 5, 10]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    left[-1].set_xlabel("step")
    handles = [axes.get_legend_handles_labels() for axes in figure.axes]
    lines, labels = [line for found, _ in handles for line in found], [label for _, found in handles for label in found]
    if labels:
        columns = len(labels) if len(labels) < 6 else math.ceil(len(labels) / 2)  # which fits into the width
        figure.legend(lines, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=8.5)


def _plot_band(axes: Axes, line: Band, label: str, extremes: str) -> None:
    _plot(axes, line, label)
    if np.any(line.high > line.low):
        axes.fill_between(line.steps, line.low, line.high, color=FAINT, linewidth=0, label=extremes, zorder=2)


def _plot(axes: Axes, line: Band, label: str | None = None, color: str = SECOND) -> None:
    axes.plot(line.steps, line.mean, color=color, linewidth=1.5, label=label, zorder=3)
    gaps = np.isnan(np.concatenate([[np.nan], line.mean, [np.nan]]))
    alone = gaps[:-2] & gaps[2:] & ~gaps[1:-1]  # a point between two gaps has no line
    axes.vlines(line.steps[alone], line.low[alone], line.high[alone], color=FAINT, linewidth=3, zorder=2)
    axes.plot(line.steps[alone], line.mean[alone], ".", color=color, markersize=6, zorder=3)


def _mark(axes: Axes, steps: np.ndarray, marker: str, label: str, height: float = 0.97) -> None:
    """Mark steps at the upper edge, independently of the axis limits."""
    if len(steps):
        places = axes.get_xaxis_transform()
        steps = np.unique(np.round(steps, -max(0, int(math.log10(max(steps.max(), 1))) - 2)))  # no more than pixels
        axes.plot(
            steps, np.full(len(steps), height), marker, color=BAD, transform=places, label=label, markersize=6, zorder=6
        )


def _mark_above(axes: Axes, steps: np.ndarray, found: np.ndarray, top: float) -> None:
    above = np.nan_to_num(found, nan=-math.inf) > top
    if above.any():
        _mark(axes, steps[above], "^", f"higher, up to {found[above].max():,.3g}")


def _share(axes: Axes, steps: np.ndarray, share: np.ndarray, label: str, color: str) -> None:
    line = band(*_with_start(steps, share, share, share))
    axes.fill_between(line.steps, 0, line.mean, color=color, alpha=0.35, linewidth=0, step="pre")
    most = next(top for top in (0.1, 0.25, 0.5, 1) if top == 1 or np.nanmax(share) <= top)
    axes.set_ylim(0, most)
    axes.set_yticks([0, most])
    axes.yaxis.set_major_formatter(PERCENT)
    axes.set_ylabel(label, fontsize=8.5, rotation=0, ha="right", va="center")


def _write(axes: Axes, words: str, at: tuple[float, float], last_step: float) -> None:
    """Label a point, on the side with more space."""
    left = at[0] > last_step / 2
    halo = [withStroke(linewidth=3, foreground="white")]
    offset, side = ((4, 10), "right") if left else ((8, 8), "left")
    axes.annotate(words, at, textcoords="offset points", xytext=offset, ha=side, zorder=7, path_effects=halo)
