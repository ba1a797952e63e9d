"""The statistics of a sweep: against sums by hand, and against noise whose size is known."""

import math

import numpy as np
import pytest

from gpt2small_hf.report.sweep import (
    Fit,
    SweepFolder,
    compare,
    draw,
    judge,
    notes,
    seed_noise,
    stopped_because,
    student_factor,
    summarise,
    table_rows,
    write_report,
)
from gpt2small_hf.runs import RunFolder, UsageError, read_json, write_json, write_jsonl
from tests.benchmarks.sim_sweep import false_verdicts

SEEDS = (1, 2, 3)
GRID = [("baseline", i, t) for i in SEEDS for t in SEEDS]


def simulated(rng, *, recipes=15, pairs=2, init=0.6, seed=0.6, rest=0.5, carried=1.0, wild=0):
    """Losses of a sweep in which no recipe differs; `carried` is the part of the seeds' effects all recipes share.

    The last `wild` recipes have ten times the noise.
    """
    names = ["baseline", *(f"r{n}" for n in range(recipes))]
    common = rng.normal(size=(2, 4))
    losses = {}
    for n, name in enumerate(names):
        effects = math.sqrt(carried) * common + math.sqrt(1 - carried) * rng.normal(size=(2, 4))
        for i, t in [key[1:] for key in GRID] if name == "baseline" else [(k, k) for k in SEEDS[:pairs]]:
            noise = init * effects[0, i] + seed * effects[1, t] + rest * rng.normal()
            losses[name, i, t] = 4 + noise * (10 if n > recipes - wild else 1)
    return losses


def false_positives(rng, times, **settings):
    """How often a difference of nothing is called one, of tame recipes."""
    verdicts = []
    for _ in range(times):
        found, _ = compare(simulated(rng, **settings))
        tame = list(found.values())[: len(found) - settings.get("wild", 0)]
        verdicts += [difference.verdict != "undecided" for difference in tame]
    return np.mean(verdicts)


# ---- by hand -----------------------------------------------------------------------------------------------------


def test_noise_of_the_seeds_is_that_of_the_sums_by_hand():
    # Two initial weights x two training seeds: 1 3 / 4 8.
    losses = {("baseline", 1, 1): 1.0, ("baseline", 1, 2): 3.0, ("baseline", 2, 1): 4.0, ("baseline", 2, 2): 8.0}
    losses["other", 1, 1] = 100.0
    noise = seed_noise(losses)
    assert noise["init_seed"] == pytest.approx(math.sqrt((3**2 + 5**2) / 2 / 2))
    assert noise["seed"] == pytest.approx(math.sqrt((2**2 + 4**2) / 2 / 2))
    assert noise["both"] == pytest.approx(math.sqrt((7**2 + 1**2) / 2 / 2))
    assert seed_noise({("baseline", 1, 1): 1.0}) == {"init_seed": None, "seed": None, "both": None}


def test_noise_of_the_seeds_is_that_of_the_mean_squares_of_a_two_way_layout():
    rng = np.random.default_rng(0)
    grid = rng.normal(size=(3, 3))
    rows, columns, mean = grid.mean(1), grid.mean(0), grid.mean()
    m_init, m_seed = 3 * np.sum((rows - mean) ** 2) / 2, 3 * np.sum((columns - mean) ** 2) / 2
    m_rest = np.sum((grid - rows[:, None] - columns + mean) ** 2) / 4
    losses = {("baseline", i, t): grid[i - 1, t - 1] for _, i, t in GRID}
    noise = seed_noise(losses)
    assert noise["init_seed"] == pytest.approx(math.sqrt((m_init + 2 * m_rest) / 3))
    assert noise["seed"] == pytest.approx(math.sqrt((m_seed + 2 * m_rest) / 3))
    assert noise["both"] == pytest.approx(math.sqrt((m_init + m_seed + m_rest) / 3))
    found = Fit(losses)
    assert found.dof == 4
    assert found.rest == pytest.approx(math.sqrt(m_rest))


def test_a_difference_is_from_what_the_baseline_has_with_the_same_seeds():
    # Effects of seeds that add up exactly: the recipe has the two worst pairs, and is better by 0.5 all the same.
    losses = {(name, i, t): 4 + 0.1 * i + 0.2 * t for name, i, t in GRID}
    losses |= {("other", k, k): 3.5 + 0.3 * k for k in (2, 3)}
    found, noise = compare(losses)
    assert found["other"].value == pytest.approx(-0.5)
    assert found["other"].of_runs == pytest.approx([-0.5, -0.5])
    assert noise.dof == 5
    assert noise.rest == pytest.approx(0, abs=1e-12)


def test_a_standard_error_is_that_of_the_sums_by_hand():
    # One initial weight: a randomized block design. Differences 1, 3, 2 less their mean 2: sum of squares 2, over two
    # recipes 1, over 2 degrees of freedom 1/2; the difference of two means of 3 has 2/3 of that.
    baseline, other = [5.0, 4.0, 7.0], [6.0, 7.0, 9.0]
    losses = {("baseline", 1, t): loss for t, loss in zip(SEEDS, baseline, strict=True)}
    losses |= {("other", 1, t): loss for t, loss in zip(SEEDS, other, strict=True)}
    found, noise = compare(losses)
    assert (found["other"].value, noise.dof) == (pytest.approx(2.0), 2)
    assert noise.rest == pytest.approx(math.sqrt(1 / 2))
    assert found["other"].standard_error == pytest.approx(math.sqrt(1 / 2 * 2 / 3))
    # A paired t-test of these three differences: no other run tells of noise.
    assert found["other"].standard_error == pytest.approx(np.std([1, 3, 2], ddof=1) / math.sqrt(3))
    assert found["other"].factor == pytest.approx(4.303, abs=1e-3)
    assert found["other"].verdict == "undecided"  # 2 < 4.303 x 0.577 = 2.48


@pytest.mark.parametrize(("dof", "factor"), [(1, 12.706), (2, 4.303), (5, 2.571), (20, 2.086), (1000, 1.962)])
def test_students_factor_is_that_of_the_tables(dof, factor):
    assert student_factor(dof) == pytest.approx(factor, abs=1e-3)


def test_with_too_few_runs_nothing_is_decided():
    one_each = {("baseline", 1, 1): 4.0, ("other", 1, 1): 3.0}
    found, noise = compare(one_each)
    assert (found["other"].value, found["other"].standard_error) == (pytest.approx(-1.0), None)
    assert (found["other"].verdict, noise.rest) == ("undecided", None)
    assert compare({("other", 1, 1): 3.0})[0] == {}
    assert compare({})[0] == {}
    # A seed that the baseline was not run with says nothing of the recipe.
    assert compare({**dict.fromkeys(GRID, 4.0), ("other", 7, 7): 3.0})[0] == {}


# ---- against noise of known size ---------------------------------------------------------------------------------


def test_known_noise_is_recovered():
    rng = np.random.default_rng(1)
    found = [simulated(rng, recipes=15, init=0.3, seed=0.4, rest=0.5) for _ in range(400)]
    squares = {
        name: np.mean([seed_noise(losses)[name] ** 2 for losses in found]) for name in ("init_seed", "seed", "both")
    }
    assert math.sqrt(squares["init_seed"]) == pytest.approx(math.hypot(0.3, 0.5), rel=0.05)
    assert math.sqrt(squares["seed"]) == pytest.approx(math.hypot(0.4, 0.5), rel=0.05)
    assert math.sqrt(squares["both"]) == pytest.approx(math.hypot(0.3, 0.4, 0.5), rel=0.05)
    compared = [compare(losses) for losses in found]
    assert math.sqrt(np.mean([noise.rest**2 for _, noise in compared])) == pytest.approx(0.5, rel=0.03)
    # ... and a standard error is the standard deviation of what it is the error of.
    spread = np.std([difference.value for differences, _ in compared for difference in differences.values()])
    said = np.mean([difference.standard_error for differences, _ in compared for difference in differences.values()])
    assert said == pytest.approx(spread, rel=0.12)


def test_standard_error_is_that_of_cochran_and_cox_by_hand():
    # A grid of 2 x 2 whose rest is known: 1 degree of freedom, (5 - 7 - 4 + 8) / 4 = 0.5, so s² = 4 x 0.5² = 1. It
    # predicts each corner with variance 3/4 and the two corners of a diagonal with covariance -1/4.
    losses = {("baseline", 1, 1): 5.0, ("baseline", 1, 2): 7.0, ("baseline", 2, 1): 4.0, ("baseline", 2, 2): 8.0}
    predicted, covariance = Fit(losses).predict([("baseline", 1, 1), ("baseline", 2, 2), ("baseline", 3, 3)])
    assert predicted[:2] == pytest.approx([4.5, 7.5])
    assert np.isnan(predicted[2])
    assert covariance[:2, :2] == pytest.approx(np.array([[3 / 4, -1 / 4], [-1 / 4, 3 / 4]]))
    assert Fit(losses).rest == pytest.approx(1.0)
    # Values 1 and 3: S² = 2, S²/n = 1. With covariance 1/2 and s = 2 the predictions add 1/2 x 4 = 2.
    found = judge(np.array([1.0, 3.0]), np.array([[1.0, 0.5], [0.5, 1.0]]), rest=2.0, dof=20)
    assert (found.value, found.standard_error) == (pytest.approx(2.0), pytest.approx(math.sqrt(3)))
    assert found.factor == pytest.approx((1 * 12.706 + 2 * 2.086) / 3, abs=1e-3)
    # Predictions whose errors do not correlate, or negatively, are in S² already: the t test of two values.
    found = judge(np.array([1.0, 3.0]), covariance[:2, :2], rest=2.0, dof=20)
    assert (found.standard_error, found.factor) == (pytest.approx(1.0), pytest.approx(12.706, abs=1e-3))


def test_one_run_of_a_recipe_decides_nothing():
    losses = {**dict.fromkeys(GRID, 4.0), ("other", 1, 1): 3.0}
    found = compare(losses)[0]["other"]
    assert (found.value, found.standard_error, found.verdict) == (pytest.approx(-1.0), None, "undecided")


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0, 4.0, 8.0])
@pytest.mark.parametrize("pairs", [2, 3])
def test_recipes_of_any_scatter_get_false_verdicts_once_in_twenty(ratio, pairs):
    """The more a recipe scatters, the more often two runs lie close by chance; that must not decide anything."""
    rng = np.random.default_rng(2)
    sweeps = 400
    scattering, others, either = false_verdicts(rng, sweeps, ratio=ratio, grid=3, pairs=pairs, recipes=12)
    error = math.sqrt(0.05 * 0.95 / (3 * sweeps))  # of the three recipes in twelve that scatter
    assert scattering < 0.06 + 2 * error
    assert others < 0.06 + 2 * error / math.sqrt(3)
    if ratio >= 1:
        assert scattering > 0.04 - 2 * error
    assert either < 1 - 0.94**12 + 0.05


@pytest.mark.parametrize("settings", [{}, {"recipes": 2}, {"init": 0.0, "seed": 0.0}, {"wild": 2}], ids=str)
def test_of_differences_that_are_none_about_one_in_twenty_is_called_one(settings):
    rate = false_positives(np.random.default_rng(2), 1500 // (settings.get("recipes", 15)), **settings)
    assert 0.02 < rate < 0.075


@pytest.mark.parametrize("carried", [0.5, 0.0])
def test_seeds_that_do_something_else_in_every_recipe_cost_little(carried):
    assert 0.02 < false_positives(np.random.default_rng(3), 100, carried=carried) < 0.08


def test_a_difference_of_the_size_of_noise_is_seen_more_often_than_against_all_runs():
    """What the fit is for: the seeds' effects cancel."""
    rng = np.random.default_rng(4)
    seen, seen_without = [], []
    for _ in range(200):
        losses = simulated(rng, pairs=3, init=1.0, seed=1.0, rest=0.3)
        losses = {key: loss - (1.5 if key[0] == "r0" else 0.0) for key, loss in losses.items()}
        seen.append(compare(losses)[0]["r0"].verdict == "lower")
        base = [loss for key, loss in losses.items() if key[0] == "baseline"]
        own = np.mean([loss for key, loss in losses.items() if key[0] == "r0"])
        sd = seed_noise(losses)["both"]
        seen_without.append(own < np.mean(base) - 2 * sd * math.sqrt(1 / 3 + 1 / 3))
    assert np.mean(seen) > 0.9
    assert np.mean(seen_without) < 0.4


def test_one_wild_recipe_hides_no_other_and_is_judged_by_its_own_scatter():
    losses = simulated(np.random.default_rng(5), pairs=3, init=0.0, seed=0.0, rest=0.01)
    losses["r0", 1, 1] += 0.5
    losses["r0", 2, 2] += 3.0
    for k in SEEDS:
        losses["r1", k, k] += 0.1
    found, noise = compare(losses)
    assert noise.rest == pytest.approx(0.01, rel=0.5)
    assert found["r1"].verdict == "higher"
    assert found["r0"].standard_error == pytest.approx(np.std([0.5, 3.0, 0.0], ddof=1) / math.sqrt(3), rel=0.1)
    assert found["r0"].verdict == "undecided"


# ---- from files --------------------------------------------------------------------------------------------------


def write_run(run: RunFolder, loss: float, *, fingerprint: str = "f" * 64, rows: int = 10) -> None:
    """What `report/sweep.py` reads of a finished run."""
    write_json(run.resolved, {"data": {"fingerprint": fingerprint}})
    write_jsonl(run.metrics, [{"step": 1, "loss": 5.0, "tokens_per_second": 1000.0}])
    write_json(run.heldout, {"rows": {"rows": rows, "seq_len": 8}, "after": {"loss": loss}})


@pytest.fixture
def ladder(tmp_path):
    """A sweep's folder with runs of five recipes, and the recipes: one was stopped, one was not run yet."""
    recipes = {}
    for name in ("baseline", "good", "good-i1", "bad", "burst", "later"):
        recipes[name] = tmp_path / f"{name}.yaml"
        recipes[name].write_text(f"# Shows:   what *{name}* does.\nseed: 1\n")
    folder = SweepFolder(tmp_path / "runs")
    rng = np.random.default_rng(6)
    losses = {key: 4 + 0.1 * key[1] + 0.05 * key[2] + 0.01 * rng.normal() for key in GRID}
    for name, change in (("good", -0.3), ("good-i1", 0.0), ("bad", 9.0)):
        losses |= {(name, k, k): losses["baseline", k, k] + change + 0.01 * rng.normal() for k in (1, 2)}
    losses["burst", 1, 1] = 3.0
    for key, loss in losses.items():
        write_run(folder.run(*key), loss)
    stopped = folder.run("burst", 2, 2)
    write_json(stopped.resolved, {"data": {"fingerprint": "f" * 64}})
    folder.log(stopped).write_text("$ python train.py\nstep 1\nstopped: 20 bad steps in a row.\n")
    return folder, recipes


def test_the_report_is_made_of_files_and_says_what_is_larger_than_noise(ladder):
    folder, recipes = ladder
    shown = write_report(folder, recipes)
    results = read_json(folder.results)
    rows = {row["recipe"]: row for row in results["recipes"]}
    assert list(rows) == ["good", "baseline", "good-i1", "bad", "burst"] or list(rows)[1] == "good-i1"
    assert {name: row["verdict"] for name, row in rows.items()} == {
        "baseline": None,
        "good": "lower",
        "good-i1": "undecided",
        "bad": "higher",
        "burst": "stopped",
    }
    assert rows["good"]["difference"] == pytest.approx(-0.3, abs=0.03)
    assert [run["loss"] for run in rows["good"]["runs"]] == [
        round(read_json(folder.run("good", k, k).heldout)["after"]["loss"], 6) for k in (1, 2)
    ]
    assert rows["burst"]["difference"] is None
    assert rows["burst"]["stopped"] == [{"init_seed": 2, "seed": 2, "because": "20 bad steps in a row."}]
    assert len(results["made_by"]["inputs"]) == 16
    assert folder.chart.read_bytes()[:4] == b"\x89PNG"
    page = folder.table.read_text()
    assert r"what \*good\* does |" in page
    line = next(line for line in shown.splitlines() if line.startswith("good "))
    assert line.split()[:3] == ["good", "2", f"{rows['good']['heldout_loss']:.4f}"]
    assert line.split()[6:] == ["lower", "1,000", "–"]
    assert "With 3 comparisons that is 0.1 on average, and at least one with a probability of up to 14%" in shown
    assert "burst, seeds 2 and 2, was stopped: 20 bad steps in a row." in shown


def test_half_way_there_is_a_table_of_what_there_is(ladder):
    folder, recipes = ladder
    assert "no run has ended yet" in write_report(SweepFolder(folder.root / "none"), recipes)
    for _, i, t in GRID[1:]:
        folder.run("baseline", i, t).heldout.unlink()
    shown = write_report(folder, recipes)
    assert "baseline     1" in shown
    folder.run("baseline", 1, 1).heldout.unlink()
    assert "The baseline has not been run" in write_report(folder, recipes)


def test_runs_on_other_rows_are_not_compared(ladder):
    folder, recipes = ladder
    write_run(folder.run("good", 2, 2), 3.0, rows=11)
    with pytest.raises(
        UsageError, match=r"good-i2-t2 and .*baseline-i1-t1 were not measured on the same held-out rows"
    ):
        summarise(folder, recipes)
    write_run(folder.run("good", 2, 2), 3.0, fingerprint="e" * 64)
    with pytest.raises(UsageError, match="were not measured on the same held-out rows"):
        summarise(folder, recipes)


def test_the_runs_of_a_recipe_are_not_those_of_one_whose_name_begins_alike(ladder):
    folder, _ = ladder
    assert list(folder.runs("good")) == [(1, 1), (2, 2)]
    assert folder.runs("good-i1")[2, 2].root.name == "good-i1-i2-t2"


def test_a_run_is_stopped_if_its_last_attempt_was_and_not_by_a_full_disk(tmp_path):
    log = tmp_path / "run.log"
    assert stopped_because(log) is None
    log.write_text("$ python train.py\nstopped: 20 bad steps in a row.\n")
    assert stopped_because(log) == "20 bad steps in a row."
    with log.open("a") as file:
        file.write("$ python train.py\nstep 2\n")
    assert stopped_because(log) is None
    for reason in ("the disk is full (…).", "the disk did not take the checkpoint of step 3", "out of memory (…)."):
        log.write_text(f"$ python train.py\nstopped: {reason} Last good checkpoint: none was saved.\n")
        assert stopped_because(log) is None


def test_the_chart_has_a_dot_for_each_run_and_bears_any_result(ladder):
    folder, recipes = ladder
    results = summarise(folder, recipes)
    axes = draw(results).axes[0]
    n_dots = sum(
        len(line.get_xdata()) for line in axes.lines if line.get_linestyle() == "None" and line.get_marker() in "osD"
    )
    assert n_dots == 9 + 2 + 2 + 1  # one is past the edge, and of one a run was stopped
    assert any("+9.0" in text.get_text() for text in axes.texts)
    assert any("stopped" in text.get_text() for text in axes.texts)
    for kept in (["baseline"], ["burst"], ["bad"], ["baseline", "bad"]):
        some = summarise(folder, {name: recipes[name] for name in kept})
        draw(some).savefig(folder.root / "some.png")
        assert len(table_rows(some)[1]) == len(kept)
        assert notes(some)
