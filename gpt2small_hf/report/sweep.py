"""Compare runs of several recipes and seeds: which differences of the held-out loss are larger than noise?

Reads run folders; writes a table, JSON and a chart. `gpt2small_hf/sweep.py` starts the runs.

The baseline is run with every pair of n initial-weight seeds and n training seeds (dropout, order of
rows), every other recipe with a few pairs (i, i). Part of a seed's effect is the same in every recipe, so each run is
compared with the baseline's run of the same two seeds, and the mean of these differences is tested by a paired t
test:

    standard error = standard deviation of the differences / sqrt(runs)        decided above t(runs - 1) standard errors

t is Student's 97.5 % quantile. The standard deviation is that of the recipe's own differences, so the test is exact
for differences that are normal: a recipe that does not differ from the baseline gets a verdict with a probability of
5 %, whatever the variances of the recipes. The cost is power: if a recipe's variance is that of the baseline, a
difference must be 16 standard deviations of the loss that seeds do not explain to be decided in four sweeps of five
with two runs, 4.6 with three, 3.0 with four.

Rejected, with the share of false verdicts in simulations (`tests/benchmarks/sim_sweep.py` has the model of the noise):
one variance for all recipes, 16 to 28 % for recipes with a larger one; a variance moderated by the other recipes'
(limma, Smyth 2004), 1 to 23 %; a least-squares fit of recipes and seeds over all runs, 1.5 to 12 %.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from gpt2small_hf.config.recipe import BASELINE
from gpt2small_hf.errors import UsageError
from gpt2small_hf.evaluation.estimates import CONFIDENCE, error_of_mean, student_factor
from gpt2small_hf.formatting import console_table, escaped, markdown_table, number
from gpt2small_hf.report.charts import BAD, FAINT, GREY, MAIN
from gpt2small_hf.runs.files import atomic_write
from gpt2small_hf.runs.layout import SweepFolder
from gpt2small_hf.runs.provenance import made_by
from gpt2small_hf.runs.reader import Run
from gpt2small_hf.runs.results import Noise, RecipeResult, SeedNoise, StoppedRun, SweepResults, SweepRun

Key = tuple[str, int, int]
"""Recipe, initial-weight seed, training seed."""
Losses = Mapping[Key, float]


# ---- noise -------------------------------------------------------------------------------------------------------


def seed_noise(losses: Losses) -> SeedNoise:
    """Return standard deviations of the baseline's loss over seeds.

    Each is the square root of half the mean squared difference of two runs: `init_seed`, of all pairs of runs that
    differ in their initial weights only; `seed`, in their training seed only; `both`, in both. On a complete grid of
    seeds these are the two-way layout's unbiased estimates of var(init) + var(rest), of var(seed) + var(rest) and of
    the sum of the three: with its mean squares M, (M_init + (n-1) M_rest) / n, and so on. None without such a pair.
    """
    halves: dict[tuple[bool, ...], list[float]] = {}
    grid = [(i, t, loss) for (recipe, i, t), loss in losses.items() if recipe == BASELINE]
    for (i, t, one), (j, u, other) in combinations(grid, 2):
        halves.setdefault((i != j, t != u), []).append((one - other) ** 2 / 2)

    def deviation(*differs: bool) -> float | None:
        return round_loss(math.sqrt(np.mean(halves[differs]))) if differs in halves else None

    return SeedNoise(init_seed=deviation(True, False), seed=deviation(False, True), both=deviation(True, True))


@dataclass(frozen=True)
class Difference:
    """A recipe's loss less the baseline's with the same seeds."""

    value: float
    of_runs: list[float | None]
    """Of each run; None for seeds that the baseline was not run with. `value` is their mean."""
    standard_error: float | None
    """None for a single run."""
    decided_above: float | None
    """What a decided difference must exceed, in nats: Student's t times the standard error."""

    @property
    def verdict(self) -> str:
        """Return `lower`, `higher`, or `undecided` if the difference may be noise."""
        if self.decided_above is None or abs(self.value) <= self.decided_above:
            return "undecided"
        return "lower" if self.value < 0 else "higher"


def compare(losses: Losses) -> dict[str, Difference]:
    """Compare each recipe with the baseline by a paired t test; recipes without a common pair of seeds are left out."""
    found = {}
    for recipe in dict.fromkeys(key[0] for key in losses if key[0] != BASELINE):
        of_runs = [
            loss - losses[BASELINE, i, t] if (BASELINE, i, t) in losses else None
            for (name, i, t), loss in losses.items()
            if name == recipe
        ]
        known = np.array([difference for difference in of_runs if difference is not None])
        if len(known):
            error = float(error_of_mean(known)) if len(known) > 1 else None
            above = None if error is None else student_factor(len(known) - 1) * error
            found[recipe] = Difference(float(known.mean()), of_runs, error, above)
    return found


# ---- from run folders --------------------------------------------------------------------------------------------


def stopped_because(log: Path) -> str | None:
    """Return why a run failed, from its log; None if it did not, can be resumed, or has no log.

    A run that was stopped by a full disk or a lack of memory can be resumed.
    """
    if not log.is_file():
        return None
    last_time = log.read_text(encoding="utf-8", errors="replace").split("\n$ ")[-1]
    why = [line.removeprefix("stopped: ") for line in last_time.splitlines() if line.startswith("stopped: ")]
    return why[-1] if why and not why[-1].startswith(("the disk", "out of memory", "--debug")) else None


def summarise(folder: SweepFolder, recipes: Mapping[str, Path]) -> SweepResults:
    """Return the results of all finished or failed runs, recipes sorted by difference.

    Raises: UsageError if two runs were not measured on the same held-out rows of the same text.
    """
    finished: dict[Key, Run] = {}
    stopped: dict[Key, str] = {}
    for recipe in recipes:
        for (i, t), run in folder.runs(recipe).items():
            if run.finished:
                finished[recipe, i, t] = Run(run)
            elif why := stopped_because(folder.log(run)):
                stopped[recipe, i, t] = why
    check_rows(list(finished.values()))
    losses = {key: run.loss_nats for key, run in finished.items()}
    differences = compare(losses)
    ended = {recipe for recipe, _, _ in (*finished, *stopped)}
    rows = [
        recipe_result(recipe, what_changes(path), finished, stopped, differences.get(recipe))
        for recipe, path in recipes.items()
        if recipe in ended
    ]
    baseline = next((row.loss_nats for row in rows if row.recipe == BASELINE), None) or 0.0

    def order(row: RecipeResult) -> float:
        if row.stopped or row.loss_nats is None:
            return math.inf
        return row.loss_nats - baseline if row.difference is None else row.difference

    return SweepResults(
        noise=Noise(baseline=seed_noise(losses)),
        recipes=sorted(rows, key=order),
        made_by=made_by([run.folder.heldout for run in finished.values()]),
    )


def check_rows(runs: Sequence[Run]) -> None:
    """Raise: UsageError if two runs were not measured on the same rows of the same text."""
    for run in runs:
        if run.measured_on != runs[0].measured_on:
            raise UsageError(
                f"{run.folder.root} and {runs[0].folder.root} were not measured on the same held-out rows, so their "
                "losses are not comparable. Repeat one with the other's text and row length, or move it elsewhere."
            )


def recipe_result(
    recipe: str,
    changes: str,
    finished: Mapping[Key, Run],
    stopped: Mapping[Key, str],
    difference: Difference | None,
) -> RecipeResult:
    """Return the results of a recipe."""
    runs = {key: run for key, run in finished.items() if key[0] == recipe}
    failed = [StoppedRun(init_seed=i, seed=t, because=why) for (name, i, t), why in stopped.items() if name == recipe]
    mean = float(np.mean([run.loss_nats for run in runs.values()])) if runs else None
    if recipe == BASELINE and mean is not None:
        of_runs: list[float | None] = [run.loss_nats - mean for run in runs.values()]
    else:
        of_runs = difference.of_runs if difference else [None] * len(runs)
    if failed:
        difference = None  # the remaining runs are a biased selection
    speeds = [speed for run in runs.values() if (speed := run.usual("tokens_per_second")) is not None]
    return RecipeResult(
        recipe=recipe,
        changes=changes,
        loss_nats=round_loss(mean),
        runs=[
            SweepRun(init_seed=i, seed=t, loss_nats=round(run.loss_nats, 6), difference=round_loss(value))
            for ((_, i, t), run), value in zip(runs.items(), of_runs, strict=True)
        ],
        stopped=failed,
        difference=round_loss(difference and difference.value),
        standard_error=round_loss(difference and difference.standard_error),
        decided_above=round_loss(difference and difference.decided_above),
        verdict="stopped" if failed else difference and difference.verdict,
        tokens_per_second=round(float(np.median(speeds))) if speeds else None,
        parameters=next((run.n_parameters for run in runs.values()), None),
    )


def what_changes(recipe: Path) -> str:
    """Return the comment `# Shows:` of a recipe."""
    for line in recipe.read_text(encoding="utf-8").splitlines():
        if line.startswith("# Shows:"):
            return line.removeprefix("# Shows:").strip().removesuffix(".")
    return ""


def round_loss(value: float | None) -> float | None:
    """Round a loss to six decimals."""
    return None if value is None else round(value, 6)


# ---- output -----------------------------------------------------------------------------------------------


def write_report(folder: SweepFolder, recipes: Mapping[str, Path]) -> str:
    """Write sweep.json, sweep.md and sweep.png from the existing run folders; some may be missing.

    Args:
        folder: the sweep.
        recipes: the path of each recipe, by name.

    Returns: the table for the console.
    Raises:  as `summarise`.
    """
    results = summarise(folder, recipes)
    if not results.recipes:
        return f"no run has ended yet in {folder.root}"
    results.save(folder.results)
    header, rows = table_rows(results)
    text = (0, 6, len(header) - 1)
    sentences = notes(results)
    page = [
        f"# {escaped(folder.root.resolve().name)}",
        f"![difference of each run from the baseline]({folder.chart.name})",
        markdown_table(header, rows, text),
        "\n".join(f"- {escaped(sentence)}" for sentence in sentences),
    ]
    with atomic_write(folder.table) as temporary:
        temporary.write_text("\n\n".join(page) + "\n", encoding="utf-8")
    with atomic_write(folder.chart) as temporary:
        draw(results).savefig(temporary, format="png")
    console = console_table(header[:-1], [row[:-1] for row in rows], text[:-1])
    return "\n".join(["", console, "", *sentences, "", f"wrote {folder.table}, {folder.results}, {folder.chart}"])


def table_rows(results: SweepResults) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the table of results."""
    header = ["recipe", "runs", "held-out loss", "difference", "standard error", "decided above", "verdict"]
    header += ["tokens/s", "parameters", "what it shows"]
    rows = []
    for row in results.recipes:
        compared = [(row.difference, "+.4f"), (row.standard_error, ".4f"), (row.decided_above, ".4f")]
        rows.append(
            [
                row.recipe,
                str(len(row.runs) + len(row.stopped)),
                number(row.loss_nats, ".4f"),
                *("" if row.recipe == BASELINE else number(value, style) for value, style in compared),
                f"{len(row.stopped)} stopped" if row.stopped else row.verdict or "",
                number(row.tokens_per_second, ",.0f"),
                number(row.parameters, ","),
                row.changes,
            ]
        )
    return header, rows


def notes(results: SweepResults) -> list[str]:
    """Return explanations of the table, one sentence each."""
    noise = results.noise.baseline
    found = [
        f"Noise of the baseline (standard deviation of a run): {number(noise.init_seed, '.4f')} with other initial "
        f"weights, {number(noise.seed, '.4f')} with another training seed, {number(noise.both, '.4f')} with both."
    ]
    compared = [row for row in results.recipes if row.standard_error is not None]
    if m := len(compared):
        found += [
            "A difference is from the baseline's runs with the same seeds, and decided by a paired t test: above "
            "Student's t times its standard error, which is computed from the recipe's own runs alone.",
            f"For a recipe without an effect, the probability of a verdict is one in twenty. With {m} comparisons "
            f"that is {m / 20:.1f} on average, and at least one with a probability of up to {1 - CONFIDENCE**m:.0%}.",
        ]
        if any(len(row.runs) == 2 for row in compared):
            found.append(
                "Two runs give a poor estimate of a recipe's variance. With --seeds_per_intervention 3, differences "
                "3.5 times smaller are detected."
            )
    elif any(row.recipe == BASELINE for row in results.recipes):
        found.append("Too few runs to tell a difference from noise.")
    else:
        found.append("The baseline has not been run, so no recipe can be compared.")
    return found + [
        f"{row.recipe}, seeds {run.init_seed} and {run.seed}, was stopped: {run.because}"
        for row in results.recipes
        for run in row.stopped
    ]


def draw(results: SweepResults) -> Figure:
    """Draw one row for each recipe: a dot for each run, a line at the mean, whiskers for the noise.

    The axis is the difference from the baseline with the same seeds, or from its mean for the baseline itself. A band
    shows the standard deviation of the baseline's runs.
    """
    rows = results.recipes
    figure = Figure(figsize=(8, 1.4 + 0.28 * len(rows)), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    band = results.noise.baseline.both or 0.0
    dots = [np.array([run.difference for run in row.runs if run.difference is not None]) for row in rows]
    low, high = limits(rows, np.concatenate([[0.0], *dots]), band)
    edge = high + (0.04 * (high - low) or 0.01)
    axes.set_xlim(low + high - edge, edge)
    axes.axvline(0, color=GREY, linewidth=1, zorder=1)
    if band:
        label = f"standard deviation of the baseline's runs, {band:.4f}"
        axes.axvspan(-band, band, color=FAINT, alpha=0.5, linewidth=0, zorder=0, label=label)
    looks = {"lower": (MAIN, "o"), "higher": (BAD, "s")}
    for at, (row, values) in enumerate(zip(rows, dots, strict=True)):
        color, marker = looks.get(row.verdict or "", (GREY, "D"))
        shown = values[values <= high]
        label = row.verdict if row.verdict != "stopped" else None
        axes.plot(shown, np.full(len(shown), at), marker, color=color, markersize=5, alpha=0.7, zorder=3, label=label)
        if row.difference is not None and row.difference <= high:
            whisker = [row.decided_above or 0.0]
            axes.errorbar([row.difference], [at], xerr=whisker, color=color, linewidth=1, capsize=2, zorder=2)
            axes.plot([row.difference] * 2, [at - 0.3, at + 0.3], color=color, linewidth=2, zorder=2)
        words = "stopped ×" if row.stopped else f"{values.mean():+.2f} ▸" if len(shown) < len(values) else None
        if words:
            side: dict[str, Any] = {"xytext": (-4, 0), "textcoords": "offset points", "ha": "right", "va": "center"}
            axes.annotate(words, (edge, at), color=BAD, fontsize=9, **side)
    axes.set_yticks(range(len(rows)), [row.recipe for row in rows], parse_math=False)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(
        "held-out loss less the baseline's with the same seeds (nats per token)\n"
        "dots: runs; whiskers: differences within noise"
    )
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    if once := dict(zip(labels, handles, strict=True)):
        figure.legend(once.values(), once.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=8.5)
    return figure


def limits(rows: Sequence[RecipeResult], found: np.ndarray, band: float) -> tuple[float, float]:
    """Return the ends of the axis: bad settings can be worse by any amount, and it shows the good ones.

    It includes the whiskers of decided recipes; those of undecided ones may be longer than any difference.
    """
    cut = max(-2.5 * found.min(), 10 * band, 0.01)
    whiskers = [
        (row.difference, row.decided_above or 0.0)
        for row in rows
        if row.verdict in ("lower", "higher") and row.difference is not None and row.difference <= cut
    ]
    low = min(found.min(), -band, *(value - whisker for value, whisker in whiskers))
    return low, max(found[found <= cut].max(), band, *(value + whisker for value, whisker in whiskers))
