"""`gpt2small evaluate`: the loss of a run, comparisons, continuing, and bad input."""

import json

import pytest

from gpt2small_hf.commands.evaluate import main
from gpt2small_hf.errors import UsageError
from gpt2small_hf.evaluation.comparison import EvaluationResults
from gpt2small_hf.evaluation.items import TaskItems
from gpt2small_hf.runs.files import read_json


@pytest.fixture
def place(tiny_run, tmp_path, monkeypatch):
    """The folder in which the run was trained: its data is found from there."""
    monkeypatch.chdir(tiny_run.root.parents[1])
    return tmp_path / "evaluation"


def evaluate(place, *words):
    main([*map(str, words), "--output_dir", str(place)])
    return EvaluationResults.load(place / "results.json")


def test_a_runs_held_out_loss_is_that_of_its_end(tiny_run, place, capsys):
    found = evaluate(place, tiny_run.root)
    loss = found.scores[0].scores["loss_nats"]
    recorded = read_json(tiny_run.heldout)["after"]
    assert loss.value == pytest.approx(recorded["loss"], abs=1e-5)
    assert loss.standard_error == pytest.approx(recorded["standard_error"], rel=1e-4)
    assert found.scores[0].scores["bits_per_byte"].value == pytest.approx(recorded["bits_per_byte"], abs=1e-5)
    assert f"{loss.value:.6f}" in (place / "table.md").read_text()
    assert capsys.readouterr().out.splitlines()[-1].startswith("next: ")


@pytest.mark.slow
def test_checkpoints_are_compared_on_the_same_rows(tiny_run, place, capsys):
    found = evaluate(place, f"{tiny_run.root}:all", "--max_rows", 6)
    assert len(found.scores) > 1
    assert {one.model for one in found.comparisons} == {one.model for one in found.scores[1:]}
    assert len({one.items_sha256 for one in found.scores}) == 1
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"chat {tiny_run.root}")


@pytest.mark.slow
def test_prompts_are_completed_by_each_checkpoint(tiny_run, place, capsys):
    found = evaluate(place, f"{tiny_run.root}:all", "--prompts", "Once the fox", "Then <b>", "--max_rows", 4)
    assert not found.scores  # held-out text is measured with --text or --data_dir then
    models = list(dict.fromkeys(one.model for one in found.completions))
    assert len(models) > 1
    assert len(found.completions) == 2 * len(models)
    last = next(one for one in found.completions if one.model == models[-1])
    recorded = json.loads(tiny_run.completions.read_text())["completions"][0]
    assert (last.prompt, last.greedy, last.sampled) == tuple(recorded[key] for key in ("prompt", "greedy", "sampled"))
    page = (place / "table.md").read_text()
    assert page.count("## ") == 2
    assert "<b>" not in page
    assert all(model in capsys.readouterr().out for model in models[-1:])


@pytest.mark.slow
def test_what_was_measured_is_kept_and_other_settings_are_refused(tiny_run, place):
    first = evaluate(place, tiny_run.root, "--max_rows", 4)
    (path,) = (place / "items").rglob("heldout.jsonl")
    before = path.stat().st_mtime_ns
    assert evaluate(place, tiny_run.root, "--max_rows", 4).scores == first.scores
    assert path.stat().st_mtime_ns == before
    with pytest.raises(UsageError, match=r"has results with items \w+, not \w+\. Give another --output_dir, or"):
        evaluate(place, tiny_run.root, "--max_rows", 3)
    assert evaluate(place, tiny_run.root, "--max_rows", 3, "--overwrite").scores[0].scores["loss_nats"].n_items == 3


@pytest.mark.slow
def test_benchmarks_of_local_files_and_new_text(tiny_run, place, tmp_path):
    pytest.importorskip("lm_eval")
    questions, text = tmp_path / "questions", tmp_path / "new.txt"
    questions.mkdir()
    rows = [{"query": f"The fox {n}", "choices": [" saw", " ran"], "gold": n % 2} for n in range(12)]
    (questions / "foxes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text.write_text("The fox saw the river and the crow. " * 60)
    words = ("--task_data", questions, "--limit", 10, "--text", text, "--batch_size", 3)
    found = evaluate(place, tiny_run.root, *words)
    assert [one.task for one in found.scores] == ["heldout", "foxes"]
    (path,) = (place / "items").rglob("foxes.jsonl")
    kept = TaskItems.load(path)
    assert kept.header.n_items == 10
    assert kept.header.settings["limit"] == 10
    assert kept.header.settings["prefix_token"] == "<|endoftext|>"
    assert (place / "tasks" / "foxes.yaml").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["absent-model"], "absent-model does not exist"),
        (["RUN", "--baseline", "other"], "--baseline other is not one of the models"),
        (["RUN", "--limit", "0"], "--limit is 0. Give 1 or more"),
        (["RUN", "--text", "a.txt", "--data_dir", "."], "--text cannot be combined with --data_dir"),
        (["RUN", "--task_data", "absent"], "--task_data absent does not exist"),
        (["RUN", "RUN"], "is named 2 times"),
        (["RUN", "--seq_len", "100000"], "has a context of"),
    ],
)
def test_bad_input_is_one_line(tiny_run, place, words, message):
    with pytest.raises(UsageError, match=message):
        main([str(tiny_run.root) if word == "RUN" else word for word in words] + ["--output_dir", str(place)])
    assert not (place / "results.json").exists()
