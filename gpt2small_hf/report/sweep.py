"""Compare runs of several recipes and seeds: which differences of the held-out loss are larger than noise?

Reads run folders; writes a table, JSON and a chart. `gpt2small_hf/sweep.py` starts the runs.

The baseline is run with every pair of n initial-weight seeds and n training seeds (dropout, order of
rows), every other recipe with a few pairs (i, i). Part of a seed's effect is the same in every recipe, so each run is
compared with the baseline's run of the same two seeds, and the mean of these differences is tested by a paired t
test:

    standard error = standard deviation of the differences / sqrt(runs)        decided above t(runs - 1) standard errors

t is Student's 97.5 % quantile. The standard deviation is that of the recipe's own differences, so the test is exact
for differences that are normal: a recipe that does not differ from the baseline gets a verdict with a probability of
5 %, whatever the variances of the recipes, and whether or not a seed has the same effect in all of them.

The cost is power. Two runs give a poor estimate of a recipe's variance: if it is that of the baseline, a difference
must be 16 standard deviations of the loss that seeds do not explain to be decided in four sweeps of five. With three
runs it is 4.6, with four 3.0.

Rejected, with the share of false verdicts for 17 recipes with 2 or 3 runs, every fourth of which has 0.1 to 20 times
the standard deviation of the baseline (`tests/benchmarks/sim_sweep.py` has the model of the noise):
- one variance for all recipes: 16 to 28 % for recipes with a larger variance;
- a variance moderated by those of the other recipes (limma, Smyth 2004): 1 to 23 %;
- the baseline's mean predicted by a least-squares fit of recipes and seeds over all runs, and its error combined with
  the recipe's by Welch's degrees of freedom: 3 to 12 %; by Cochran and Cox's weights: 1.5 to 6 %. The latter decides
  differences that are 30 % smaller, but is too cautious if other recipes have a larger variance.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from gpt2small_hf.config.recipe import BASELINE
from gpt2small_hf.errors import UsageError
from gpt2small_hf.formatting import number
from gpt2small_hf.report.charts import BAD, FAINT, GREY, MAIN
from gpt2small_hf.report.tables import console_table, escaped, markdown_table
from gpt2small_hf.runs.files import atomic_write, write_json
from gpt2small_hf.runs.layout import RunFolder
from gpt2small_hf.runs.provenance import made_by
from gpt2small_hf.runs.reader import Run

CONFIDENCE = 0.95

Key = tuple[str, int, int]
"""Recipe, initial-weight seed, training seed."""
Losses = Mapping[Key, float]


@dataclass(frozen=True)
class SweepFolder:
    """The files of a sweep: a run folder and a log for each recipe and pair of seeds, and the results."""

    root: Path

    def run(self, recipe: str, init_seed: int, seed: int) -> RunFolder:
        """Return a run: `init_seed` is for the initial weights, `seed` for dropout and the order of rows."""
        return RunFolder(self.root / f"{recipe}-i{init_seed}-t{seed}")

    def log(self, run: RunFolder) -> Path:
        """Output of the run's processes."""
        return self.root / f"{run.root.name}.log"

    def runs(self, recipe: str) -> dict[tuple[int, int], RunFolder]:
        """Return the started runs of a recipe, by their two seeds."""
        found = {}
        for path in self.root.glob(f"{recipe}-i*-t*/"):
            if match := re.fullmatch(r"-i(\d+)-t(\d+)", path.name[len(recipe) :]):
                found[int(match[1]), int(match[2])] = RunFolder(path)
        return dict(sorted(found.items()))

    @property
    def lock(self) -> Path:
        """Lock file of a running sweep."""
        return self.root / ".lock"

    @property
    def table(self) -> Path:
        """The results as Markdown."""
        return self.root / "sweep.md"

    @property
    def results(self) -> Path:
        """The results as JSON."""
        return self.root / "sweep.json"

    @property
    def chart(self) -> Path:
        """The results as a chart."""
        return self.root / "sweep.png"


# ---- noise -------------------------------------------------------------------------------------------------------


def seed_noise(losses: Losses) -> dict[str, float | None]:
    """Return standard deviations of the baseline's loss over seeds.

    Each is the square root of half the mean squared difference of two runs: `init_seed`, of all pairs of runs that
    differ in their initial weights only; `seed`, in their training seed only; `both`, in both. On a complete grid of
    seeds these are the two-way layout's unbiased estimates of var(init) + var(rest), of var(seed) + var(rest) and of
    the sum of the three: with its mean squares M, (M_init + (n-1) M_rest) / n, and so on. None without such a pair.
    """
    halves: dict[tuple[bool, bool], list[float]] = {}
    grid = [(i, t, loss) for (recipe, i, t), loss in losses.items() if recipe == BASELINE]
    for (i, t, one), (j, u, other) in combinations(grid, 2):
        halves.setdefault((i != j, t != u), []).append((one - other) ** 2 / 2)
    kinds = {"init_seed": (True, False), "seed": (False, True), "both": (True, True)}
    return {name: math.sqrt(np.mean(halves[kind])) if kind in halves else None for name, kind in kinds.items()}


@dataclass(frozen=True)
class Difference:
    """A recipe's loss less the baseline's with the same seeds."""

    value: float
    of_runs: list[float | None]
    """Of each run; None for seeds that the baseline was not run with. `value` is their mean."""
    standard_error: float | None
    """None for a single run."""
    factor: float | None
    """The number of standard errors that a difference must exceed to be decided."""

    @property
    def decided_above(self) -> float | None:
        """Return the threshold for a decided difference, in nats."""
        return None if self.standard_error is None or self.factor is None else self.factor * self.standard_error

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
        if len(known) > 1:
            found[recipe] = Difference(
                float(known.mean()), of_runs, float(standard_error(known)), student_factor(len(known) - 1)
            )
        elif len(known):
            found[recipe] = Difference(float(known[0]), of_runs, None, None)
    return found


def standard_error(differences: np.ndarray) -> np.ndarray:
    """Estimate the standard error of the mean over the last axis, which must have two values or more."""
    return differences.std(axis=-1, ddof=1) / math.sqrt(differences.shape[-1])


@cache
def student_factor(dof: int) -> float:
    """Return the 97.5 % quantile of Student's t: 12.7 for one degree of freedom, 2.09 for 20, 1.96 for many.

    With t = sqrt(dof) tan(angle), angles have density cos(angle)^(dof-1), which is summed up numerically.
    """
    angles = (np.arange(200_000) + 0.5) * (math.pi / 2 / 200_000)
    shares = np.cumsum(np.cos(angles) ** (dof - 1))
    return math.sqrt(dof) * math.tan(angles[np.searchsorted(shares, CONFIDENCE * shares[-1])])


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


def summarise(folder: SweepFolder, recipes: Mapping[str, Path]) -> dict[str, Any]:
    """Return the contents of `sweep.json`: results of all finished or failed runs, recipes sorted by difference.

    Raises: UsageError if two runs were not measured on the same held-out rows of the same text.
    """
    finished: dict[Key, Run] = {}
    losses: dict[Key, float] = {}
    stopped: dict[Key, str] = {}
    for recipe in recipes:
        for (i, t), folder_of_run in folder.runs(recipe).items():
            if folder_of_run.finished:
                run = finished[recipe, i, t] = Run(folder_of_run)
                losses[recipe, i, t] = run.loss_nats
                check_rows(run, next(iter(finished.values())))
            elif why := stopped_because(folder.log(folder_of_run)):
                stopped[recipe, i, t] = why
    differences = compare(losses)
    rows = [
        row_of(
            recipe,
            what_changes(path),
            {key: run for key, run in finished.items() if key[0] == recipe},
            losses,
            {key: why for key, why in stopped.items() if key[0] == recipe},
            differences.get(recipe),
        )
        for recipe, path in recipes.items()
        if any(key[0] == recipe for key in [*finished, *stopped])
    ]
    return {
        "noise": {"baseline": {name: round_loss(sd) for name, sd in seed_noise(losses).items()}},
        "recipes": sorted(rows, key=lambda row: place(row, rows)),
        "made_by": made_by([run.folder.heldout for run in finished.values()]).to_json(),
    }


def place(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> float:
    """Return the sort key of a recipe: its difference from the baseline, or infinity if a run of it was stopped."""
    if row["stopped"] or row["difference"] is not None:
        return math.inf if row["stopped"] else row["difference"]
    base = next((other["heldout_loss"] for other in rows if other["recipe"] == BASELINE), None)
    return row["heldout_loss"] - (base or 0.0)


def check_rows(run: Run, other: Run) -> None:
    """Raise: UsageError if two runs were not measured on the same rows of the same text."""
    if run.measured_on != other.measured_on:
        raise UsageError(
            f"{run.folder.root} and {other.folder.root} were not measured on the same held-out rows, so their "
            "losses are not comparable. Repeat one with the other's text and row length, or move it out of the folder."
        )


def row_of(
    recipe: str,
    changes: str,
    finished: Mapping[Key, Run],
    losses: Losses,
    stopped: Mapping[Key, str],
    difference: Difference | None,
) -> dict[str, Any]:
    """Return the results of a recipe."""
    mean = float(np.mean([losses[key] for key in finished])) if finished else None
    of_runs: Sequence[float | None] = [None] * len(finished)
    if recipe == BASELINE and mean is not None:
        of_runs = [losses[key] - mean for key in finished]
    elif difference is not None:
        of_runs = difference.of_runs
    if stopped:
        difference = None  # the remaining runs are a biased selection
    speeds = [speed for run in finished.values() if (speed := run.usual("tokens_per_second")) is not None]
    return {
        "recipe": recipe,
        "changes": changes,
        "heldout_loss": round_loss(mean),
        "runs": [
            {"init_seed": i, "seed": t, "loss": round_loss(losses[r, i, t]), "difference": round_loss(value)}
            for (r, i, t), value in zip(finished, of_runs, strict=True)
        ],
        "stopped": [{"init_seed": i, "seed": t, "because": why} for (_, i, t), why in stopped.items()],
        "difference": round_loss(difference.value) if difference else None,
        "standard_error": round_loss(difference.standard_error) if difference else None,
        "decided_above": round_loss(difference.decided_above) if difference else None,
        "verdict": "stopped" if stopped else difference.verdict if difference else None,
        "tokens_per_second": round(float(np.median(speeds))) if speeds else None,
        "parameters": next((run.n_parameters for run in finished.values()), None),
    }


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
    if not results["recipes"]:
        return f"no run has ended yet in {folder.root}"
    write_json(folder.results, results)
    header, rows = table_rows(results)
    text = (0, 6, len(header) - 1)
    sentences = notes(results)
    page = [
        f"# {escaped(folder.root.resolve().name)}",
        f"![difference of each run from the baseline]({folder.chart.name})",
    ]
    page += [markdown_table(header, rows, text), "\n".join(f"- {escaped(sentence)}" for sentence in sentences)]
    with atomic_write(folder.table) as temporary:
        temporary.write_text("\n\n".join(page) + "\n", encoding="utf-8")
    figure = draw(results)
    with atomic_write(folder.chart) as temporary:
        figure.savefig(temporary, format="png")
    console = console_table(header[:-1], [row[:-1] for row in rows], text[:-1])
    return "\n".join(["", console, "", *sentences, "", f"wrote {folder.table}, {folder.results}, {folder.chart}"])


def table_rows(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the table of results."""
    header = ["recipe", "runs", "held-out loss", "difference", "standard error", "decided above", "verdict"]
    header += ["tokens/s", "parameters", "what it shows"]
    rows = []
    for row in results["recipes"]:
        n_stopped = len(row["stopped"])
        verdict = f"{n_stopped} stopped" if n_stopped else row["verdict"] or ""
        rows.append(
            [
                row["recipe"],
                str(len(row["runs"]) + n_stopped),
                number(row["heldout_loss"], ".4f"),
                "" if row["recipe"] == BASELINE else number(row["difference"], "+.4f"),
                "" if row["recipe"] == BASELINE else number(row["standard_error"], ".4f"),
                "" if row["recipe"] == BASELINE else number(row["decided_above"], ".4f"),
                verdict,
                number(row["tokens_per_second"], ",.0f"),
                number(row["parameters"], ","),
                row["changes"],
            ]
        )
    return header, rows


def notes(results: dict[str, Any]) -> list[str]:
    """Return explanations of the table, one sentence each."""
    noise, found = results["noise"], []
    sds = {name: number(sd, ".4f") for name, sd in noise["baseline"].items()}
    found.append(
        f"Noise of the baseline (standard deviation of a run): {sds['init_seed']} with other initial weights, "
        f"{sds['seed']} with another training seed, {sds['both']} with both."
    )
    compared = [row for row in results["recipes"] if row["standard_error"] is not None]
    if compared:
        m = len(compared)
        found.append(
            "A difference is from the baseline's runs with the same seeds, and decided by a paired t test: above "
            "Student's t times its standard error, which is computed from the recipe's own runs alone."
        )
        found.append(
            f"For a recipe without an effect, the probability of a verdict is one in twenty. With {m} comparisons "
            f"that is {m / 20:.1f} on average, and at least one with a probability of up to {1 - CONFIDENCE**m:.0%}."
        )
        if any(len(row["runs"]) == 2 for row in compared):
            found.append(
                "Two runs give a poor estimate of a recipe's variance. With --seeds_per_intervention 3, differences "
                "3.5 times smaller are detected."
            )
    elif any(row["recipe"] == BASELINE for row in results["recipes"]):
        found.append("Too few runs to tell a difference from noise.")
    else:
        found.append("The baseline has not been run, so no recipe can be compared.")
    found += [
        f"{row['recipe']}, seeds {stop['init_seed']} and {stop['seed']}, was stopped: {stop['because']}"
        for row in results["recipes"]
        for stop in row["stopped"]
    ]
    return found


def draw(results: dict[str, Any]) -> Figure:
    """Draw one row for each recipe: a dot for each run, a line at the mean, whiskers for the noise.

    The axis is the difference from the baseline with the same seeds, or from its mean for the baseline itself. A band
    shows the standard deviation of the baseline's runs.
    """
    rows: Sequence[dict[str, Any]] = results["recipes"]
    figure = Figure(figsize=(8, 1.4 + 0.28 * len(rows)), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    band = results["noise"]["baseline"]["both"] or 0.0
    dots = {row["recipe"]: [r["difference"] for r in row["runs"] if r["difference"] is not None] for row in rows}
    found = np.array([0.0, *(value for values in dots.values() for value in values)])
    # Bad settings can be worse by any amount: the axis shows the good ones.
    cut = max(-2.5 * found.min(), 10 * band, 0.01)
    whiskers = {row["recipe"]: row["decided_above"] or 0.0 for row in rows}
    # Whiskers of undecided recipes may be longer than any difference: they are clipped.
    decided = [row for row in rows if row["verdict"] in ("lower", "higher")]
    inside = [row for row in decided if row["difference"] <= cut]
    low = min(found.min(), -band, *(row["difference"] - whiskers[row["recipe"]] for row in inside))
    high = max(found[found <= cut].max(), band, *(row["difference"] + whiskers[row["recipe"]] for row in inside))
    margin = 0.04 * (high - low) or 0.01
    axes.set_xlim(low - margin, high + margin)
    axes.axvline(0, color=GREY, linewidth=1, zorder=1)
    if band:
        label = f"standard deviation of the baseline's runs, {band:.4f}"
        axes.axvspan(-band, band, color=FAINT, alpha=0.5, linewidth=0, zorder=0, label=label)
    looks = {"lower": (MAIN, "o"), "higher": (BAD, "s")}
    at_edge: dict[str, Any] = {"xytext": (-4, 0), "textcoords": "offset points", "ha": "right", "va": "center"}
    for at, row in enumerate(rows):
        color, marker = looks.get(row["verdict"], (GREY, "D"))
        values = np.array(dots[row["recipe"]])
        shown, mean = values[values <= high], row["difference"]
        label = row["verdict"] if row["verdict"] in ("lower", "higher", "undecided") else None
        axes.plot(shown, np.full(len(shown), at), marker, color=color, markersize=5, alpha=0.7, zorder=3, label=label)
        if mean is not None and mean <= high:
            axes.errorbar([mean], [at], xerr=[whiskers[row["recipe"]]], color=color, linewidth=1, capsize=2, zorder=2)
            axes.plot([mean] * 2, [at - 0.3, at + 0.3], color=color, linewidth=2, zorder=2)
        if row["stopped"]:
            axes.annotate("stopped ×", (high + margin, at), color=BAD, fontsize=9, **at_edge)
        elif len(shown) < len(values):
            axes.annotate(f"{values.mean():+.2f} ▸", (high + margin, at), color=BAD, fontsize=9, **at_edge)
    axes.set_yticks(range(len(rows)), [row["recipe"] for row in rows], parse_math=False)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(
        "held-out loss less the baseline's with the same seeds (nats per token)\n"
        "dots: runs; whiskers: differences within noise"
    )
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    if once:
        figure.legend(once.values(), once.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=8.5)
    return figure
