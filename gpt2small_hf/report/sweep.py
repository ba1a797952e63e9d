"""Runs of several recipes and seeds → which changes of the held-out loss are larger than its noise.

Reads run folders, writes table, JSON and picture; `gpt2small_hf/sweep.py` makes the runs.

The comparison. The baseline is run with every pair of n initial-weight seeds and n training seeds (dropout, order of
rows), every other recipe with a few pairs (i, i). All losses together are fitted by least squares as

    loss = recipe + effect of the initial-weight seed + effect of the training seed + rest

which is the additive two-way layout, with the seeds as blocks (Scheffé 1959, The Analysis of Variance, chapter 4). The
difference of two recipes' terms is like against like: a recipe's runs against what the baseline has with the same
seeds, estimated from all of the baseline's runs and so less noisy than its single run with those. The variance of the
rest is the residuals' sum of squares over their degrees of freedom; three seeds and two pairs leave 4, and 1 a recipe.

Why so: two pairs alone have one degree of freedom, and the baseline alone has two for each kind of seed, too few to
say how large noise is. Together they have enough for two standard errors to mean what they should. Rejected: a recipe's
mean against that of all of the baseline's runs, with the baseline's noise. It holds even if a seed does something else
in every recipe, but sees only differences some three times as large. The fit needs no more than that seeds do roughly
the same in all recipes: what does not carry over is in the rest, and counts as noise. If little or nothing carries
over, one in ten differences passes for real in place of one in twenty.
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

from gpt2small_hf.report.charts import BAD, FAINT, GREY, MAIN
from gpt2small_hf.report.page import Run
from gpt2small_hf.report.tables import console_table, escaped, markdown_table, number
from gpt2small_hf.runs import RunFolder, UsageError, made_by, read_json, whole, write_json

BASELINE = "baseline"
CONFIDENCE = 0.95
WILD = 4
"""A recipe whose differences scatter so many times as far as the median recipe's is left out of the common noise."""

Key = tuple[str, int, int]
"""Recipe, initial-weight seed, training seed."""
Losses = Mapping[Key, float]


@dataclass(frozen=True)
class SweepFolder:
    """The files of a sweep: a run folder and a log for each recipe and pair of seeds, and the results."""

    root: Path

    def run(self, recipe: str, init_seed: int, seed: int) -> RunFolder:
        """The run of a recipe with one seed for its initial weights and one for dropout and the order of rows."""
        return RunFolder(self.root / f"{recipe}-i{init_seed}-t{seed}")

    def log(self, run: RunFolder) -> Path:
        """What the run's processes said."""
        return self.root / f"{run.root.name}.log"

    def runs(self, recipe: str) -> dict[tuple[int, int], RunFolder]:
        """The runs of a recipe that were begun, by their two seeds."""
        found = {}
        for path in self.root.glob(f"{recipe}-i*-t*/"):
            if match := re.fullmatch(r"-i(\d+)-t(\d+)", path.name[len(recipe) :]):
                found[int(match[1]), int(match[2])] = RunFolder(path)
        return dict(sorted(found.items()))

    @property
    def lock(self) -> Path:
        """Held by a sweep, and by the runs it began."""
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
        """The results as a picture."""
        return self.root / "sweep.png"


# ---- noise -------------------------------------------------------------------------------------------------------


def seed_noise(losses: Losses) -> dict[str, float | None]:
    """What a change of seeds does to the baseline: standard deviations of its loss.

    Each is the root of half the mean squared difference of two runs: `init_seed`, of all pairs of runs that differ in
    their initial weights only; `seed`, in their training seed only; `both`, in both. On a whole grid of seeds these are
    the two-way layout's unbiased estimates of var(init) + var(rest), of var(seed) + var(rest) and of the sum of the
    three: with its mean squares M, (M_init + (n-1) M_rest) / n, and so on. None where there is no such pair.
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
    of_runs: list[float]
    """Of each run, the seeds' effects being those of the fit; `value` is their mean."""
    standard_error: float | None
    """None where nothing tells of noise."""
    factor: float | None
    """So many standard errors are passed by chance once in twenty times (Student's t; 2 for many runs)."""

    @property
    def verdict(self) -> str:
        """`lower`, `higher`, or `undecided` where noise may be all of it."""
        if self.standard_error is None or self.factor is None or abs(self.value) <= self.factor * self.standard_error:
            return "undecided"
        return "lower" if self.value < 0 else "higher"


@dataclass(frozen=True)
class Fit:
    """The least-squares fit of the module's docstring."""

    differences: dict[str, float]
    unit_variances: dict[str, float]
    """Of each difference, in units of the variance of the rest."""
    residuals: dict[str, np.ndarray]
    """Of each recipe's runs."""
    rest: float | None
    """Standard deviation of the rest; None if no degree of freedom is left to tell it."""
    dof: int


def fit(losses: Losses) -> Fit:
    """Fit recipes and seeds. A recipe that shares no seeds with the baseline has no difference."""
    if not losses:
        return Fit({}, {}, {}, None, 0)
    keys, values = list(losses), np.array(list(losses.values()))
    columns = [(part, level) for part in range(3) for level in dict.fromkeys(key[part] for key in keys)]
    design = np.array([[key[part] == level for part, level in columns] for key in keys], dtype=float)
    inverse = np.linalg.pinv(design)  # of all solutions the shortest: differences are the same in each
    residuals = values - design @ inverse @ values
    dof = len(values) - int(np.linalg.matrix_rank(design))
    differences, variances, of_recipe = {}, {}, {}
    for recipe in dict.fromkeys(key[0] for key in keys):
        of_recipe[recipe] = residuals[[key[0] == recipe for key in keys]]
        contrast = np.array([float(column == (0, recipe)) - float(column == (0, BASELINE)) for column in columns])
        weights = contrast @ inverse
        if recipe != BASELINE and np.allclose(weights @ design, contrast):
            differences[recipe], variances[recipe] = float(weights @ values), float(weights @ weights)
    rest = math.sqrt(residuals @ residuals / dof) if dof else None
    return Fit(differences, variances, of_recipe, rest, dof)


def compare(losses: Losses) -> tuple[dict[str, Difference], Fit]:
    """Each recipe's difference from the baseline with its standard error, and the fit that noise is taken from.

    The standard error is that of the fit, or that of the recipe's own residuals where these scatter further. Recipes
    that scatter far more than others (`WILD`) are left out of the noise: one bad setting would hide all differences.
    """
    recipes = [recipe for recipe in dict.fromkeys(key[0] for key in losses) if recipe != BASELINE]
    scatter = {}
    for recipe in recipes:
        seeds = [key[1:] for key in losses if key[0] == recipe and (BASELINE, *key[1:]) in losses]
        if len(seeds) > 1:
            scatter[recipe] = np.std([losses[recipe, i, t] - losses[BASELINE, i, t] for i, t in seeds], ddof=1)
    wild = {recipe for recipe, found in scatter.items() if found > WILD * np.median(list(scatter.values()))}
    common = fit({key: loss for key, loss in losses.items() if key[0] not in wild})
    factor = student_factor(common.dof) if common.dof else None
    found = {}
    for recipe in recipes:
        left_out = wild - {recipe}
        own = fit({key: loss for key, loss in losses.items() if key[0] not in left_out}) if recipe in wild else common
        if recipe not in own.differences:
            continue
        error = None
        if common.rest is not None:
            n, squares = len(own.residuals[recipe]), float(np.sum(own.residuals[recipe] ** 2))
            error = common.rest * math.sqrt(own.unit_variances[recipe])
            error = max(error, math.sqrt(squares / (n - 1) / n)) if n > 1 else error
        value = own.differences[recipe]
        found[recipe] = Difference(value, (value + own.residuals[recipe]).tolist(), error, factor)
    return found, common


@cache
def student_factor(dof: float) -> float:
    """How many standard errors hold 95 % of Student's t: 12.7 for one degree of freedom, 2.09 for 20, 1.96 for many.

    With t = sqrt(dof) tan(angle), angles have density cos(angle)^(dof-1), which is summed up numerically.
    """
    angles = (np.arange(200_000) + 0.5) * (math.pi / 2 / 200_000)
    shares = np.cumsum(np.cos(angles) ** (dof - 1))
    return math.sqrt(dof) * math.tan(angles[np.searchsorted(shares, CONFIDENCE * shares[-1])])


# ---- from run folders --------------------------------------------------------------------------------------------


def stopped_because(log: Path) -> str | None:
    """Why a run was stopped for good, from its log: it does not learn. None if it goes on, or never began.

    A full disk stops a run too, but that one can go on.
    """
    if not log.is_file():
        return None
    last_time = log.read_text(encoding="utf-8", errors="replace").split("\n$ ")[-1]
    why = [line.removeprefix("stopped: ") for line in last_time.splitlines() if line.startswith("stopped: ")]
    return why[-1] if why and "the disk is full" not in why[-1] else None


def summarise(folder: SweepFolder, recipes: Mapping[str, Path]) -> dict[str, Any]:
    """The results of all runs that ended, as `sweep.json` has them; recipes by difference, the lowest first.

    Raises: UsageError if two runs were not measured on the same held-out rows of the same text.
    """
    finished: dict[Key, Run] = {}
    losses: dict[Key, float] = {}
    stopped: dict[Key, str] = {}
    for recipe in recipes:
        for (i, t), folder_of_run in folder.runs(recipe).items():
            if folder_of_run.finished:
                run = finished[recipe, i, t] = Run(folder_of_run)
                losses[recipe, i, t] = read_json(folder_of_run.heldout)["after"]["loss"]
                check_rows(run, next(iter(finished.values())))
            elif why := stopped_because(folder.log(folder_of_run)):
                stopped[recipe, i, t] = why
    differences, noise = compare(losses)
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
        "noise": {
            "baseline": {name: six(sd) for name, sd in seed_noise(losses).items()},
            "rest": six(noise.rest),
            "degrees_of_freedom": noise.dof,
            "standard_errors_needed": round(student_factor(noise.dof), 3) if noise.dof else None,
        },
        "recipes": sorted(rows, key=lambda row: place(row, rows)),
        "made_by": made_by([run.folder.heldout for run in finished.values()]),
    }


def place(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> float:
    """Where a recipe stands in the table: at its difference from the baseline; behind all others if it was stopped."""
    if row["stopped"] or row["difference"] is not None:
        return math.inf if row["stopped"] else row["difference"]
    base = next((other["heldout_loss"] for other in rows if other["recipe"] == BASELINE), None)
    return row["heldout_loss"] - (base or 0.0)


def check_rows(run: Run, other: Run) -> None:
    """Raise: UsageError if two runs were not measured on the same rows of the same text."""
    if run.measured_on != other.measured_on:
        raise UsageError(
            f"{run.folder.root} and {other.folder.root} were not measured on the same held-out rows, so they do not "
            "compare. Do one of them again with the other's text and row length, or move it out of the folder."
        )


def row_of(
    recipe: str,
    changes: str,
    finished: Mapping[Key, Run],
    losses: Losses,
    stopped: Mapping[Key, str],
    difference: Difference | None,
) -> dict[str, Any]:
    """What is known of a recipe."""
    mean = float(np.mean([losses[key] for key in finished])) if finished else None
    of_runs: Sequence[float | None] = [None] * len(finished)
    if recipe == BASELINE and mean is not None:
        of_runs = [losses[key] - mean for key in finished]
    elif difference is not None:
        of_runs = difference.of_runs
    if stopped:
        difference = None  # what the runs that survived have in common is luck
    speeds = [speed for run in finished.values() if (speed := run.usual("tokens_per_second")) is not None]
    return {
        "recipe": recipe,
        "changes": changes,
        "heldout_loss": six(mean),
        "runs": [
            {"init_seed": i, "seed": t, "loss": six(losses[r, i, t]), "difference": six(value)}
            for (r, i, t), value in zip(finished, of_runs, strict=True)
        ],
        "stopped": [{"init_seed": i, "seed": t, "because": why} for (_, i, t), why in stopped.items()],
        "difference": six(difference.value) if difference else None,
        "standard_error": six(difference.standard_error) if difference else None,
        "verdict": "stopped" if stopped else difference.verdict if difference else None,
        "tokens_per_second": round(float(np.median(speeds))) if speeds else None,
        "parameters": next((run.n_parameters for run in finished.values()), None),
    }


def what_changes(recipe: Path) -> str:
    """What a recipe says that it shows, in its comment `# Shows:`."""
    for line in recipe.read_text(encoding="utf-8").splitlines():
        if line.startswith("# Shows:"):
            return line.removeprefix("# Shows:").strip().removesuffix(".")
    return ""


def six(value: float | None) -> float | None:
    """Rounded to the six decimals that losses are reported with."""
    return None if value is None else round(value, 6)


# ---- what is shown -----------------------------------------------------------------------------------------------


def write_report(folder: SweepFolder, recipes: Mapping[str, Path]) -> str:
    """Write sweep.json, sweep.md and sweep.png from the run folders that are there, whatever is missing.

    `recipes`: the recipe of each name.

    Returns: the table for the console.
    Raises:  as `summarise`.
    """
    results = summarise(folder, recipes)
    if not results["recipes"]:
        return f"no run has ended yet in {folder.root}"
    write_json(folder.results, results)
    header, rows = table_rows(results)
    text = (0, 5, len(header) - 1)
    sentences = notes(results)
    page = [
        f"# {escaped(folder.root.resolve().name)}",
        f"![difference of each run from the baseline]({folder.chart.name})",
    ]
    page += [markdown_table(header, rows, text), "\n".join(f"- {escaped(sentence)}" for sentence in sentences)]
    with whole(folder.table) as temporary:
        temporary.write_text("\n\n".join(page) + "\n", encoding="utf-8")
    figure = draw(results)
    with whole(folder.chart) as temporary:
        figure.savefig(temporary, format="png")
    console = console_table(header[:-1], [row[:-1] for row in rows], text[:-1])
    return "\n".join(["", console, "", *sentences, "", f"wrote {folder.table}, {folder.results}, {folder.chart}"])


def table_rows(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The results as a table: header, rows."""
    header = ["recipe", "runs", "held-out loss", "difference", "standard error", "verdict"]
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
                verdict,
                number(row["tokens_per_second"], ",.0f"),
                number(row["parameters"], ","),
                row["changes"],
            ]
        )
    return header, rows


def notes(results: dict[str, Any]) -> list[str]:
    """What has to be known to read the table, a sentence each."""
    noise, found = results["noise"], []
    sds = {name: number(sd, ".4f") for name, sd in noise["baseline"].items()}
    found.append(
        f"Noise of the baseline (standard deviation of a run): {sds['init_seed']} with other initial weights, "
        f"{sds['seed']} with another training seed, {sds['both']} with both."
    )
    compared = [row for row in results["recipes"] if row["standard_error"] is not None]
    if noise["rest"] is not None and compared:
        found.append(
            f"A difference is from the baseline with the same seeds, which leaves {noise['rest']:.4f} of noise. It is "
            f"decided above {noise['standard_errors_needed']:.2f} standard errors: Student's t with "
            f"{noise['degrees_of_freedom']} degrees of freedom, from all recipes together."
        )
        found.append(
            f"By chance alone that happens once in twenty comparisons, and here are {len(compared)}: "
            f"expect {len(compared) / 20:.1f}. All are from the same baseline, so they err together."
        )
    elif any(row["recipe"] == BASELINE for row in results["recipes"]):
        found.append("Too few runs to tell a difference from noise.")
    else:
        found.append("The baseline has not been run, so there is nothing to compare with.")
    found += [
        f"{row['recipe']}, seeds {stop['init_seed']} and {stop['seed']}, was stopped: {stop['because']}"
        for row in results["recipes"]
        for stop in row["stopped"]
    ]
    return found


def draw(results: dict[str, Any]) -> Figure:
    """A row a recipe: a dot a run, a line at the mean, and around it what is within noise.

    Drawn are differences from the baseline with the same seeds, for the baseline itself from its mean; behind all, as a
    band, the standard deviation of the baseline's runs.
    """
    rows: Sequence[dict[str, Any]] = results["recipes"]
    figure = Figure(figsize=(8, 1.4 + 0.28 * len(rows)), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    band = results["noise"]["baseline"]["both"] or 0.0
    factor = results["noise"]["standard_errors_needed"] or 0.0
    dots = {row["recipe"]: [r["difference"] for r in row["runs"] if r["difference"] is not None] for row in rows}
    found = np.array([0.0, *(value for values in dots.values() for value in values)])
    # Bad settings can be worse by any amount; the good ones are what is to be told apart.
    cut = max(-2.5 * found.min(), 10 * band, 0.01)
    whiskers = {row["recipe"]: factor * (row["standard_error"] or 0.0) for row in rows}
    inside = [row for row in rows if row["difference"] is not None and row["difference"] <= cut]
    low = min(found.min(), -band, *(row["difference"] - whiskers[row["recipe"]] for row in inside))
    high = max(found[found <= cut].max(), band, *(row["difference"] + whiskers[row["recipe"]] for row in inside))
    room = 0.04 * (high - low) or 0.01
    axes.set_xlim(low - room, high + room)
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
            axes.annotate("stopped ×", (high + room, at), color=BAD, fontsize=9, **at_edge)
        elif len(shown) < len(values):
            axes.annotate(f"{values.mean():+.2f} ▸", (high + room, at), color=BAD, fontsize=9, **at_edge)
    axes.set_yticks(range(len(rows)), [row["recipe"] for row in rows], parse_math=False)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(
        "held-out loss less the baseline's with the same seeds (nats per token)\n"
        "a dot is a run; what a whisker reaches from the mean may be noise"
    )
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    if once:
        figure.legend(once.values(), once.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=8.5)
    return figure
