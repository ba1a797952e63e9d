"""Metrics on disk → pictures. Reads files, needs no PyTorch."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from gpt2small_hf.runs import read_jsonl, whole


def draw_loss(metrics: Path, chart: Path, *, title: str, unigram: float | None = None) -> None:
    """Draw training and held-out loss, in nats per token, against steps.

    Args:
        metrics: `metrics.jsonl` of the run.
        chart: the PNG to write.
        title: what the run is.
        unigram: loss of the best guess that ignores context, drawn as a line to beat.
    """
    rows = read_jsonl(metrics)
    train = [(row["step"], row["loss"]) for row in rows if row.get("loss") is not None]
    heldout = [(row["step"], row["eval_loss"]) for row in rows if row.get("eval_loss") is not None]

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")  # no pyplot: no window system, no global state
    axes = figure.add_subplot()
    if train:
        axes.plot(*zip(*train, strict=True), color="#9db8d9", linewidth=1, label="training")
    if heldout:
        axes.plot(*zip(*heldout, strict=True), color="#1f4e8c", linewidth=2, marker="o", markersize=4, label="held-out")
        step, loss = heldout[-1]
        axes.annotate(f"{loss:.3f}", (step, loss), textcoords="offset points", xytext=(-4, 8), ha="right")
    if unigram is not None:
        axes.axhline(unigram, color="#b0552f", linewidth=1, linestyle="--", label=f"unigram {unigram:.3f}")
    axes.set(title=title, xlabel="step", ylabel="loss (nats per token)")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    with whole(chart) as temporary:
        figure.savefig(temporary, format="png")
