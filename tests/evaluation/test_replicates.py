"""Runs of a sweep and checkpoints of a run: their spread, and differences between recipes."""

import math
from pathlib import Path

import numpy as np
import pytest

from gpt2small_hf.evaluation.comparison import EvaluationResults, TaskScore, group_table, notes_of
from gpt2small_hf.evaluation.models import ModelSource
from gpt2small_hf.evaluation.replicates import Replicate, group_scores, replicates_of
from gpt2small_hf.runs.layout import RunFolder
from gpt2small_hf.runs.results import Score


def source(path, step=None):
    folder = Path(path)
    kind = "run" if step is None else "checkpoint"
    label = folder.name if step is None else f"{folder.name}:{step}"
    return ModelSource(label, kind, str(folder / "model"), "gpt2small", RunFolder(folder), step)


def score(model, value, task="arc", measure="accuracy"):
    found = Score(value=value, standard_error=0.01, low=value - 0.02, high=value + 0.02, n_items=100)
    return TaskScore(task=task, model=model, scores={measure: found}, chance=0.25)


def test_runs_of_a_sweep_are_grouped_by_recipe_and_others_by_their_last_checkpoints(tmp_path):
    names = ["baseline-i0-t0", "baseline-i1-t1", "wide-v-i0-t0"]
    sources = [source(tmp_path / "sweep" / name) for name in names]
    sources += [source(tmp_path / "tiny", step) for step in range(100, 700, 100)] + [source(tmp_path / "tiny")]
    sources += [ModelSource("gpt2", "hub", "gpt2", "gpt2")]
    found = replicates_of(sources)
    assert found["baseline-i1-t1"] == Replicate("baseline", (1, 1))
    assert found["wide-v-i0-t0"] == Replicate("wide-v", (0, 0))
    assert [label for label in found if found[label].seeds is None] == [
        *(f"tiny:{step}" for step in (300, 400, 500, 600)),
        "tiny",
    ]
    elsewhere = replicates_of([*sources[:3], source(tmp_path / "other" / "baseline-i0-t0")])
    assert {one.group for one in elsewhere.values()} == {"sweep/baseline", "sweep/wide-v", "other/baseline"}


def test_recipes_differ_by_the_paired_t_test_over_seeds():
    generator = np.random.default_rng(0)
    of_seed, noise = generator.normal(0, 0.05, 6), generator.normal(0, 0.002, (2, 6))
    values = {"base": 0.4 + of_seed + noise[0], "better": 0.42 + of_seed + noise[1]}
    replicates = {f"{name}-{seed}": Replicate(name, (seed, seed)) for name in values for seed in range(6)}
    scores = [score(f"{name}-{seed}", float(values[name][seed])) for name in values for seed in range(6)]
    groups, (difference,) = group_scores(scores, replicates, "base-3")
    apart = values["better"] - values["base"]
    assert difference.model == "better"
    assert difference.difference == pytest.approx(apart.mean())
    assert difference.standard_error == pytest.approx(apart.std(ddof=1) / math.sqrt(6))
    assert difference.verdict == "better"
    assert [one.standard_deviation for one in groups] == pytest.approx([one.std(ddof=1) for one in values.values()])
    header, *rows = group_table(
        EvaluationResults(baseline="base-3", scores=scores, groups=groups, group_comparisons=[difference])
    )
    assert [row[1:3] for row in rows] == [["base", "6 seeds"], ["better", "6 seeds"]]
    assert rows[0][header.index("difference")] == ""
    assert rows[1][header.index("difference")].endswith("better")


def test_a_difference_smaller_than_the_noise_of_seeds_is_undecided():
    replicates = {f"{name}-{seed}": Replicate(name, (seed, seed)) for name in ("base", "same") for seed in range(3)}
    values = {"base": (0.40, 0.44, 0.41), "same": (0.43, 0.42, 0.42)}
    scores = [score(f"{name}-{seed}", values[name][seed]) for name in values for seed in range(3)]
    _, (difference,) = group_scores(scores, replicates, "base-0")
    assert difference.verdict == "undecided"


def test_a_single_run_has_no_spread_and_checkpoints_are_not_compared():
    replicates = {"one": Replicate("alone", (0, 0))} | {f"tiny:{step}": Replicate("tiny", None) for step in (1, 2, 3)}
    scores = [score("one", 0.3), *(score(f"tiny:{step}", 0.3 + step / 100) for step in (1, 2, 3))]
    (group,), differences = group_scores(scores, replicates, "one")
    assert (group.group, group.n_models, group.is_checkpoints) == ("tiny", 3, True)
    assert group.standard_deviation == pytest.approx(0.01)
    assert not differences
    assert any(
        "checkpoints" in one for one in notes_of(EvaluationResults(baseline=None, scores=scores, groups=[group]))
    )
