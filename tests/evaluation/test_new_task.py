"""A task added to a copy of the package, in two files, is measured, reported, staged and on the card."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from changed_copy import write_changed
from conftest import REPOSITORY

from gpt2small_hf.runs.files import read_json

MODULE = """
from gpt2small_hf.evaluation.task import Task
from gpt2small_hf.runs.results import Measures

WORST = Task(
    "worst token",
    Measures,
    lambda inputs: inputs.heldout is not None,
    lambda model, inputs: Measures(loss_nats=float(inputs.losses(model).max())),
    lambda found: [["worst token", "loss"], ["of all held-out ones", f"{found.loss_nats:.1f}"]],
    lambda found: "It is the maximum over tokens.",
)
"""
ENTRY = {
    "from gpt2small_hf.formatting": "from gpt2small_hf.evaluation.worst import WORST\nfrom gpt2small_hf.formatting",
    "TASKS: list[Task[Any]] = [": "TASKS: list[Task[Any]] = [WORST, ",
}
SCRIPT = """
import sys
from pathlib import Path

import gpt2small_hf
from gpt2small_hf.data.text_dataset import TextDataset
from gpt2small_hf.evaluation.tasks import evaluate, save_results
from gpt2small_hf.model.modeling_gpt2small import GPT2SmallForCausalLM
from gpt2small_hf.publishing.card import render
from gpt2small_hf.publishing.publication import Publication
from gpt2small_hf.publishing.source import find_source
from gpt2small_hf.publishing.stage import stage
from gpt2small_hf.report.page import as_markdown
from gpt2small_hf.runs.layout import RunFolder
from gpt2small_hf.runs.reader import Run

assert Path(gpt2small_hf.__file__).is_relative_to(Path.cwd())
run, staged = RunFolder(Path("run")), Path("staged")
model = GPT2SmallForCausalLM.from_pretrained(run.model)
train, heldout = (TextDataset(Path(sys.argv[1]), split, 32) for split in ("train", "validation"))
results = evaluate(model, ["heldout", "worst token"], heldout=heldout, train=train, loss_before=5.5)
save_results(run, results, seq_len=32, step=20, last_step=20, made_by=Run(run).heldout.made_by)
Path("report.md").write_text(as_markdown(Run(run), []), encoding="utf-8")
stage(find_source(run.root), staged)
Path("card.md").write_text(render(find_source(run.root), staged, Publication("you/short")), encoding="utf-8")
"""


@pytest.mark.slow
def test_new_task_is_one_module_and_an_entry_of_the_list(tiny_run, tmp_path):
    shutil.copytree(REPOSITORY / "gpt2small_hf", tmp_path / "gpt2small_hf", ignore=shutil.ignore_patterns("*.pyc"))
    for name in ("model_card.j2", "LICENSE", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, tmp_path)
    shutil.copytree(tiny_run.root, tmp_path / "run")
    (tmp_path / "gpt2small_hf/evaluation/worst.py").write_text(MODULE, encoding="utf-8")
    tasks = "gpt2small_hf/evaluation/tasks.py"
    write_changed(tasks, ENTRY, tmp_path / tasks)
    data = tiny_run.root.parents[1] / read_json(tiny_run.resolved)["data"]["folder"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, data], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    worst = read_json(tmp_path / "staged/evaluation/heldout.json")["tasks"]["worst token"]["loss"]
    for page in ("report.md", "card.md"):
        text = (tmp_path / page).read_text(encoding="utf-8")
        evaluation = text[re.search(r"^## (Evaluation|Held-out loss)$", text, re.MULTILINE).start() :]
        assert f"| worst token | loss |\n| :--- | ---: |\n| of all held-out ones | {worst:.1f} |\n" in evaluation
        assert "It is the maximum over tokens." in evaluation


def test_architecture_guide_names_the_files_of_a_new_task():
    guide = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    (entry,) = [entry for entry in guide.split("\n- ") if entry.startswith("**An evaluation task**")]
    assert set(re.findall(r"`(\w+/[\w/.]*)`", entry)) == {
        "evaluation/", "evaluation/tasks.py", "tests/evaluation/test_new_task.py"
    }  # fmt: skip
    assert Path(REPOSITORY / "gpt2small_hf" / "evaluation" / "tasks.py").is_file()
