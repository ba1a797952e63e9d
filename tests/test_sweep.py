"""`sweep`: a folder of recipes becomes runs and a table, whatever stops it on the way."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import CORPUS, REPOSITORY, run_script

from gpt2small_hf import GPT2SmallConfig
from gpt2small_hf.commands.sweep import main
from gpt2small_hf.config.commands import SweepArguments
from gpt2small_hf.config.recipe import find_recipes
from gpt2small_hf.config.resolve import read_config
from gpt2small_hf.errors import RunStoppedError, UsageError
from gpt2small_hf.runs.files import read_json, sha256
from gpt2small_hf.runs.layout import SweepFolder
from gpt2small_hf.sweep import check_recipes, list_jobs
from gpt2small_hf.training.budget import cerebras_weight_decay, sizes

SMALL_LADDER = REPOSITORY / "examples" / "interventions-small"
BASELINE = """# Shows:   ten steps.
text: {corpus}
vocab_size: 300
max_position_embeddings: 32
hidden_size: 16
num_hidden_layers: 1
num_attention_heads: 2
embd_pdrop: 0.1
per_device_train_batch_size: 4
max_steps: {steps}
num_threads: 1
use_cpu: true
learning_rate: 0.01
logging_steps: 5
save_steps: 5
prompts: [Once the fox]
"""


def write_recipes(place: Path, steps: int = 10) -> Path:
    """A baseline and one change to it."""
    corpus = place / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": line * 4}) + "\n" for line in CORPUS), encoding="utf-8")
    recipes = place / "ladder"
    recipes.mkdir()
    (recipes / "baseline.yaml").write_text(BASELINE.format(corpus=corpus, steps=steps), encoding="utf-8")
    (recipes / "hot.yaml").write_text(
        "# Shows:   a higher rate.\nextends: baseline.yaml\nlearning_rate: 0.03\n", encoding="utf-8"
    )
    return recipes


def start(place: Path, *words: str) -> subprocess.Popen[str]:
    """The command, in a process of its own, as from a terminal."""
    command = [sys.executable, "-m", "gpt2small_hf", "sweep", "ladder", "--seeds", "2", *words]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    # A shell makes its background jobs ignore SIGINT, also their children: the tests may run in such a job.
    return subprocess.Popen(
        command,
        cwd=place,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def finished(place: Path) -> dict[str, str]:
    """Each finished run with the hash of its weights."""
    folders = [path.parent for path in (place / "runs" / "ladder").glob("*/evaluation")]
    return {
        folder.name: sha256(folder / "model" / "model.safetensors")
        for folder in folders
        if (folder / "evaluation" / "heldout.json").exists()
    }


def wait_for(condition, process: subprocess.Popen[str], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


ALL_RUNS = {f"{name}-i{i}-t{i}" for name in ("baseline", "hot") for i in (1, 2)} | {"baseline-i1-t2", "baseline-i2-t1"}


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A sweep that was killed during its second run and given again: its place, and what each command printed.

    Only the sweep is killed: its running training continues, and must end before another sweep can start.
    """
    place = tmp_path_factory.mktemp("swept")
    write_recipes(place)
    process = start(place)
    wait_for(lambda: (place / "runs/ladder/baseline-i1-t2/resolved.json").exists(), process)
    process.kill()
    killed, _ = process.communicate()
    while True:
        process = start(place, "--n_jobs", "2")
        out, err = process.communicate()
        if process.returncode == 0:
            return place, killed, out
        assert "error: another sweep, or a run that it started, trains in runs/ladder." in err
        time.sleep(0.5)


@pytest.mark.slow
def test_every_run_has_its_own_seeds_and_the_results_are_written(swept):
    place, _, out = swept
    assert finished(place).keys() == ALL_RUNS
    assert len(set(finished(place).values())) == 6
    folder = SweepFolder(place / "runs" / "ladder")
    resolved = read_json(folder.run("baseline", 1, 2).resolved)
    assert resolved["run"]["init_seed"] == 1
    assert resolved["trainer"]["seed"] == resolved["trainer"]["data_seed"] == 2
    assert folder.chart.read_bytes()[:4] == b"\x89PNG"
    results = {row["recipe"]: row for row in read_json(folder.results)["recipes"]}
    losses = [read_json(folder.run("hot", i, i).heldout)["after"]["loss"] for i in (1, 2)]
    assert results["hot"]["heldout_loss"] == pytest.approx(sum(losses) / 2, abs=1e-6)
    assert results["hot"]["changes"] == "a higher rate"
    lines = [line for line in out.splitlines() if "held-out" in line and "-t" in line]
    assert len(lines) == 4
    assert "3 left, about" in lines[0]
    assert lines[-1].endswith("the last")


@pytest.mark.slow
def test_repeated_sweep_skips_finished_runs_and_refuses_changed_recipes(swept, monkeypatch, capfd):
    place, *_ = swept
    monkeypatch.chdir(place)
    before, words = finished(place), ["ladder", "--seeds", "2"]
    hot = place / "ladder" / "hot.yaml"
    was = hot.read_text()
    # Neither comments nor how often is logged or saved decide what is learned, as train.py sees it on resume.
    hot.write_text(was.replace("# Shows:   a", "# Shows:   some") + "logging_steps: 4\nsave_steps: 2\n")
    main(words)
    assert "6 runs of 2 recipes, 0 of them not finished" in capfd.readouterr().out
    assert finished(place) == before

    hot.write_text(was + "eval_strategy: epoch\n")  # with dropout, an evaluation changes what is drawn
    with pytest.raises(UsageError, match="with another recipe or text: hot-i1-t1, hot-i2-t2"):
        main(words)
    hot.write_text(was.replace("0.03", "0.02"))
    with pytest.raises(UsageError, match=r"with another recipe or text: hot-i1-t1, hot-i2-t2\. Repeat them"):
        main(words)
    assert finished(place) == before
    main([*words, "--overwrite"])
    assert "2 of them not finished" in capfd.readouterr().out
    after = finished(place)
    assert {name for name in after if after[name] != before[name]} == {"hot-i1-t1", "hot-i2-t2"}


@pytest.mark.slow
def test_killed_sweep_resumes_and_ends_with_the_weights_of_runs_alone(swept):
    place, killed, out = swept
    assert "6 runs of 2 recipes, 6 of them not finished" in killed
    assert "6 runs of 2 recipes, 4 of them not finished" in out
    for t in (1, 2):  # the run before the kill, and the one that it left without its sweep
        name, seeds = f"baseline-i1-t{t}", ["--init_seed", "1", "--seed", f"{t}", "--data_seed", f"{t}"]
        words = ["-m", "gpt2small_hf", "train", "ladder/baseline.yaml", *seeds, "--output_dir", f"alone/{name}"]
        done = run_script(words, place)
        assert done.returncode == 0, done.stderr
        weights = place / "alone" / name / "model" / "model.safetensors"
        assert sha256(weights) == finished(place)[name]


@pytest.mark.slow
def test_signal_stops_a_sweep_after_its_runs_are_saved(tmp_path):
    number = signal.SIGINT  # the other signals have the same handler
    write_recipes(tmp_path, steps=4000)
    process = start(tmp_path, "--n_jobs", "2", "--only", "baseline")
    logs = [tmp_path / "runs/ladder" / f"baseline-i1-t{t}.log" for t in (1, 2)]
    metrics = [tmp_path / "runs/ladder" / f"baseline-i1-t{t}" / "metrics.jsonl" for t in (1, 2)]
    wait_for(lambda: all(path.exists() and "learning_rate" in path.read_text() for path in metrics), process)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + number
    assert err.splitlines()[-1] == f"interrupted: {number.name}. Run the same command to resume."
    for log in logs:
        assert log.read_text().splitlines()[-1].startswith("interrupted: SIGTERM; saved runs/ladder/baseline-i1-t")
    assert "no run has ended yet" in out


@pytest.mark.slow
def test_a_run_that_does_not_learn_is_a_result_and_one_that_fails_ends_the_sweep(tmp_path, monkeypatch, capfd):
    recipes = write_recipes(tmp_path)
    hot = recipes / "hot.yaml"
    hot.write_text("extends: baseline.yaml\nlearning_rate: 1e30\nmax_bad_steps: 3\n")
    monkeypatch.chdir(tmp_path)
    words = ["ladder", "--seeds", "1", "--seeds_per_intervention", "1"]
    main(words)
    out = capfd.readouterr().out
    assert "hot-i1-t1  stopped: 3 steps in a row were skipped" in out
    row = read_json(tmp_path / "runs/ladder/sweep.json")["recipes"][-1]
    assert (row["recipe"], row["verdict"], row["heldout_loss"]) == ("hot", "stopped", None)
    assert "3 steps in a row were skipped" in row["stopped"][0]["because"]
    main(words)
    assert "0 of them not finished" in capfd.readouterr().out

    (tmp_path / "runs/ladder/hot-i1-t1/metrics.jsonl").unlink()
    (tmp_path / "runs/ladder/hot-i1-t1/metrics.jsonl").mkdir()  # nothing can be logged there
    (tmp_path / "runs/ladder/hot-i1-t1.log").unlink()
    with pytest.raises(RunStoppedError, match=r"hot-i1-t1 failed; its output is in runs/ladder/hot-i1-t1\.log\."):
        main(words)
    assert "metrics.jsonl: Is a directory" in capfd.readouterr().err


def test_the_baseline_is_run_with_every_pair_of_seeds_and_each_change_with_pairs_of_equal_ones(tmp_path):
    recipes = find_recipes(write_recipes(tmp_path))
    jobs = list_jobs(recipes, SweepArguments(seeds=3), SweepFolder(Path("runs/ladder")))
    names = [job.folder.root.name for job in jobs]
    assert names[:9] == [f"baseline-i{i}-t{t}" for i in (1, 2, 3) for t in (1, 2, 3)]
    assert names[9:] == ["hot-i1-t1", "hot-i2-t2"]
    assert jobs[1].words[1:] == [
        "--init_seed",
        "1",
        "--seed",
        "2",
        "--data_seed",
        "2",
        "--output_dir",
        "runs/ladder/baseline-i1-t2",
    ]


def test_recipes_that_are_measured_on_other_rows_are_refused_before_any_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    recipes = write_recipes(tmp_path)
    (recipes / "hot.yaml").write_text("extends: baseline.yaml\nseq_len: 16\n")
    with pytest.raises(UsageError, match=r"hot\.yaml is evaluated on other held-out rows than .*baseline\.yaml"):
        main([str(recipes)])
    (recipes / "hot.yaml").write_text("extends: baseline.yaml\nlerning_rate: 16\n")
    with pytest.raises(UsageError, match="Did you mean learning_rate"):
        main([str(recipes)])
    (recipes / "hot.yaml").rename(recipes / "other.yaml")  # --only looks at the recipes it names, and the baseline
    (recipes / "hot.yaml").write_text("extends: baseline.yaml\nseq_len: 16\n")
    with pytest.raises(UsageError, match=r"hot\.yaml is evaluated on other held-out rows"):
        main([str(recipes), "--only", "hot"])
    assert not list((tmp_path / "runs").glob("*/*-i*"))


@pytest.mark.slow
def test_small_interventions_are_measured_on_the_same_rows(tmp_path, monkeypatch):
    """Every recipe is accepted, measured on the baseline's rows, says three things, and follows the rule it names."""
    monkeypatch.chdir(tmp_path)
    recipes = find_recipes(SMALL_LADDER)
    jobs = list_jobs(recipes, SweepArguments(seeds=1), SweepFolder(tmp_path))
    fingerprints = check_recipes({job.recipe: job for job in jobs})
    assert len(set(fingerprints.values())) == 1
    at_full_size = {path.stem for path in (REPOSITORY / "examples" / "interventions").glob("*.yaml")}
    others = {"float32", "local-baseline", "local-stacked", "weight-decay-0.33724", "tied-small-init"}
    assert at_full_size - others <= recipes.keys()
    told = [[line.split()[1] for line in path.read_text().splitlines()[:3]] for path in recipes.values()]
    assert told == [["Shows:", "Machine:", "Expect:"]] * len(recipes)
    rule = read_config([str(recipes["weight-decay-rule"])], recipes["weight-decay-rule"])
    no_ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    n = sizes(GPT2SmallConfig(vocab_size=rule.data.new_vocab_size, **no_ids, **vars(rule.model))).total
    tokens, batch = 1300 * 1024, 1024
    ruled = cerebras_weight_decay(batch, rule.trainer.learning_rate, tokens, tokens / n)
    assert rule.trainer.weight_decay == pytest.approx(ruled, rel=0.01)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seeds", "0"], "--seeds is 0. Give 1 or more."),
        (["--n_jobs", "0"], "--n_jobs is 0. Give 1 or more."),
        (
            ["--seeds", "2", "--seeds_per_intervention", "3"],
            "--seeds_per_intervention is 3, but the baseline is run with 2",
        ),
        (["--only", "hit"], "has no recipe hit.yaml. Did you mean hot?"),
        (["--seed", "2"], "--seed is not a flag. Did you mean --seeds?"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        main([str(write_recipes(tmp_path)), *words])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_the_table_is_made_again_from_files_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main([str(write_recipes(tmp_path)), "--table_only"])
    assert capsys.readouterr().out == "no run has ended yet in runs/ladder\n"
    assert not (tmp_path / "data").exists()


def test_a_folder_without_a_baseline_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"has no baseline\.yaml to compare with"):
        main([str(tmp_path)])
