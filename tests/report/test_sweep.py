"""Statistics of a sweep, checked against hand computation and simulated noise."""

import math
from functools import partial

import numpy as np
import pytest
from conftest import REPOSITORY

from gpt2small_hf.errors import UsageError
from gpt2small_hf.report.sweep import (
    compare,
    draw,
    notes,
    seed_noise,
    stopped_because,
    summarise,
    table_rows,
    write_report,
)
from gpt2small_hf.runs.files import read_json, write_json, write_jsonl
from gpt2small_hf.runs.layout import RunFolder, SweepFolder
from gpt2small_hf.runs.results import SeedNoise
from tests.benchmarks.sim_sweep import INIT, RATIOS, REST, TRAINING, as_losses, differences, false_verdicts, simulate

SEEDS = (1, 2, 3)
approx = partial(pytest.approx, abs=1e-6)  # they are rounded
GRID = [("baseline", i, t) for i in SEEDS for t in SEEDS]


# ---- by hand -----------------------------------------------------------------------------------------------------


def test_seed_noise_equals_hand_computation():
    # Two initial weights x two training seeds: 1 3 / 4 8.
    losses = {("baseline", 1, 1): 1.0, ("baseline", 1, 2): 3.0, ("baseline", 2, 1): 4.0, ("baseline", 2, 2): 8.0}
    losses["other", 1, 1] = 100.0
    noise = seed_noise(losses)
    assert noise.init_seed == approx(math.sqrt((3**2 + 5**2) / 2 / 2))
    assert noise.seed == approx(math.sqrt((2**2 + 4**2) / 2 / 2))
    assert noise.both == approx(math.sqrt((7**2 + 1**2) / 2 / 2))
    assert seed_noise({("baseline", 1, 1): 1.0}) == SeedNoise(init_seed=None, seed=None, both=None)


def test_seed_noise_equals_the_estimates_of_a_two_way_layout():
    rng = np.random.default_rng(0)
    grid = rng.normal(size=(3, 3))
    rows, columns, mean = grid.mean(1), grid.mean(0), grid.mean()
    m_init, m_seed = 3 * np.sum((rows - mean) ** 2) / 2, 3 * np.sum((columns - mean) ** 2) / 2
    m_rest = np.sum((grid - rows[:, None] - columns + mean) ** 2) / 4
    losses = {("baseline", i, t): grid[i - 1, t - 1] for _, i, t in GRID}
    noise = seed_noise(losses)
    assert noise.init_seed == approx(math.sqrt((m_init + 2 * m_rest) / 3))
    assert noise.seed == approx(math.sqrt((m_seed + 2 * m_rest) / 3))
    assert noise.both == approx(math.sqrt((m_init + m_seed + m_rest) / 3))


def test_difference_is_from_the_baseline_with_the_same_seeds():
    # The recipe has the two worst pairs of seeds, and is better by 0.5 all the same.
    losses = {(name, i, t): 4 + 0.1 * i + 0.2 * t for name, i, t in GRID}
    losses |= {("other", k, k): 3.5 + 0.3 * k for k in (2, 3)}
    found = compare(losses)["other"]
    assert found.value == pytest.approx(-0.5)
    assert found.of_runs == pytest.approx([-0.5, -0.5])


@pytest.mark.parametrize(
    ("other", "error", "interval", "verdict"),
    [  # scipy 1.17.1: stats.ttest_rel(other, baseline).confidence_interval(0.95) and stats.sem of the differences
        ([3.8912, 3.9377], 0.00540000, (-0.0924135, 0.0448135), "undecided"),
        ([3.8912, 3.9377, 3.9021], 0.00312410, (-0.0374419, -0.0105581), "lower"),
        ([4.0101, 4.0519, 4.0236, 4.1002], 0.00199557, (0.0890242, 0.1017258), "higher"),
    ],
)
def test_difference_and_limits_are_those_of_scipys_paired_t_test(other, error, interval, verdict):
    baseline = [3.9204, 3.9561, 3.9265, 4.0013]
    losses = {("baseline", k, k): loss for k, loss in enumerate(baseline)}
    losses |= {("baseline", 0, 1): 9.0, ("wild", 0, 0): 8.0, ("wild", 1, 1): 4.0}  # without influence
    found = compare({**losses, **{("other", k, k): loss for k, loss in enumerate(other)}})["other"]
    assert found.standard_error == pytest.approx(error, abs=1e-8)
    assert (found.value - found.decided_above, found.value + found.decided_above) == pytest.approx(interval, abs=1e-5)
    assert found.verdict == verdict


def test_too_few_runs_are_undecided():
    found = compare({("baseline", 1, 1): 4.0, ("other", 1, 1): 3.0})["other"]
    assert (found.value, found.standard_error, found.verdict) == (pytest.approx(-1.0), None, "undecided")
    assert compare({("other", 1, 1): 3.0}) == {}
    assert compare({}) == {}


def test_seeds_that_the_baseline_was_not_run_with_are_not_compared():
    losses = dict.fromkeys(GRID, 4.0)
    assert compare({**losses, ("other", 7, 7): 3.0}) == {}
    found = compare({**losses, ("other", 1, 1): 3.0, ("other", 7, 7): 0.0})["other"]
    assert (found.of_runs, found.value, found.verdict) == ([-1.0, None], -1.0, "undecided")


# ---- against noise of known size ---------------------------------------------------------------------------------


def test_noise_of_known_size_is_recovered():
    baseline, others = simulate(np.random.default_rng(1), 400, ratio=1.0, recipes=1)
    found = [seed_noise(as_losses(*sweep)) for sweep in zip(baseline, others, strict=True)]
    for name, size in {"init_seed": (INIT, REST), "seed": (TRAINING, REST), "both": (INIT, TRAINING, REST)}.items():
        assert math.sqrt(np.mean([getattr(noise, name) ** 2 for noise in found])) == pytest.approx(
            math.hypot(*size), rel=0.05
        )


def test_compare_gives_the_simulated_sweeps_the_verdicts_that_are_counted():
    baseline, others = simulate(np.random.default_rng(2), 40, ratio=5.0, pairs=3)
    values, above = differences(baseline, others)
    for sweep in range(40):
        found = compare(as_losses(baseline[sweep], others[sweep])).values()
        assert [difference.value for difference in found] == pytest.approx(values[sweep])
        assert [difference.decided_above for difference in found] == pytest.approx(above[sweep])
        decided = np.abs(values[sweep]) > above[sweep]
        assert [difference.verdict != "undecided" for difference in found] == decided.tolist()


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("design", [{"pairs": 2}, {"pairs": 3}, {"pairs": 2, "recipes": 2}, {"carried": 0.0}], ids=str)
def test_false_verdicts_are_one_in_twenty_for_any_variance(ratio, design):
    """The rate is 5 % ± 4 standard errors for recipes with a large variance and for the others."""
    sweeps = 30_000 if design.get("recipes") == 2 else 8000
    found = false_verdicts(np.random.default_rng(3), sweeps, ratio=ratio, **design)
    for kind in ("scattering", "others"):
        share, error = found[kind]
        assert error < 0.0025
        assert share == pytest.approx(0.05, abs=4 * error)
    assert found["any"][0] < 1 - 0.95 ** design.get("recipes", 17) + 0.01


# ---- from files --------------------------------------------------------------------------------------------------


def resolved(fingerprint: str) -> dict:
    told = read_json(REPOSITORY / "tests" / "runs" / "old_run" / "text" / "resolved.json")
    return {**told, "data": {**told["data"], "fingerprint": fingerprint}}


def write_run(run: RunFolder, loss: float, *, fingerprint: str = "f" * 64, rows: int = 10) -> None:
    """What `report/sweep.py` reads of a finished run."""
    write_json(run.resolved, resolved(fingerprint))
    write_jsonl(run.metrics, [{"step": 1, "loss": 5.0, "tokens_per_second": 1000.0}])
    made_by = read_json(run.resolved)["made_by"]
    write_json(run.heldout, {"rows": {"rows": rows, "seq_len": 8}, "after": {"loss": loss}, "made_by": made_by})


@pytest.fixture
def sweep(tmp_path):
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
    write_json(stopped.resolved, resolved("f" * 64))
    folder.log(stopped).write_text("$ python train.py\nstep 1\nstopped: 20 bad steps in a row.\n")
    return folder, recipes


def test_report_is_made_from_files_and_names_differences_larger_than_noise(sweep):
    folder, recipes = sweep
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


def test_report_of_an_unfinished_sweep_has_the_finished_runs(sweep):
    folder, recipes = sweep
    assert "no run has ended yet" in write_report(SweepFolder(folder.root / "none"), recipes)
    for _, i, t in GRID[1:]:
        folder.run("baseline", i, t).heldout.unlink()
    shown = write_report(folder, recipes)
    assert "baseline     1" in shown
    folder.run("baseline", 1, 1).heldout.unlink()
    assert "The baseline has not been run" in write_report(folder, recipes)


def test_runs_on_other_rows_are_not_compared(sweep):
    folder, recipes = sweep
    write_run(folder.run("good", 2, 2), 3.0, rows=11)
    with pytest.raises(
        UsageError, match=r"good-i2-t2 and .*baseline-i1-t1 were not measured on the same held-out rows"
    ):
        summarise(folder, recipes)
    write_run(folder.run("good", 2, 2), 3.0, fingerprint="e" * 64)
    with pytest.raises(UsageError, match="were not measured on the same held-out rows"):
        summarise(folder, recipes)


def test_runs_of_a_recipe_exclude_those_of_a_recipe_with_a_common_prefix(sweep):
    folder, _ = sweep
    assert list(folder.runs("good")) == [(1, 1), (2, 2)]
    assert folder.runs("good-i1")[2, 2].root.name == "good-i1-i2-t2"


def test_run_failed_if_its_last_attempt_did_and_not_by_a_full_disk(tmp_path):
    log = tmp_path / "run.log"
    assert stopped_because(log) is None
    log.write_text("$ python train.py\nstopped: 20 bad steps in a row.\n")
    assert stopped_because(log) == "20 bad steps in a row."
    with log.open("a") as file:
        file.write("$ python train.py\nstep 2\n")
    assert stopped_because(log) is None
    for reason in ("the disk is full (…).", "the disk is too full for the checkpoint of step 3", "out of memory (…)."):
        log.write_text(f"$ python train.py\nstopped: {reason} Last good checkpoint: none was saved.\n")
        assert stopped_because(log) is None


def test_chart_has_a_dot_for_each_run_and_accepts_any_result(sweep):
    folder, recipes = sweep
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
