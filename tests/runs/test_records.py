"""Records: files of earlier versions load, unknown keys are kept, errors name wrong types."""

import ast
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import REPOSITORY

from gpt2small_hf.errors import UsageError
from gpt2small_hf.report.charts import draw_charts
from gpt2small_hf.report.page import as_markdown
from gpt2small_hf.report.sweep import draw, table_rows, write_report
from gpt2small_hf.runs.files import read_json, read_jsonl, write_jsonl
from gpt2small_hf.runs.layout import DataFolder, RunFolder, SweepFolder
from gpt2small_hf.runs.reader import Run
from gpt2small_hf.runs.records import PreparedSet, Resolved
from gpt2small_hf.runs.results import Answer, Completions, HeldOut, MetricsRow, Sample, SweepResults
from gpt2small_hf.runs.typed_json import SCHEMA_VERSION, Part, Record

OLD_RUN = Path(__file__).parent / "old_run"
"""Files written by a development version of 0.1, before files had a `schema_version`."""
OLD_FILES = {
    "../../data/old_prepared/set/meta.json": PreparedSet,
    "text/resolved.json": Resolved,
    "chat/resolved.json": Resolved,
    "text/evaluation/heldout.json": HeldOut,
    "chat/evaluation/heldout.json": HeldOut,
    "text/evaluation/completions.json": Completions,
    "sweep.json": SweepResults,
}
OLD_LINES = {
    "text/metrics.jsonl": MetricsRow,
    "chat/metrics.jsonl": MetricsRow,
    "text/samples.jsonl": Sample,
    "chat/evaluation/answers.jsonl": Answer,
}


@pytest.mark.parametrize(("name", "kind"), OLD_FILES.items(), ids=OLD_FILES)
def test_files_of_version_0_load_and_keep_all_values_when_saved(name: str, kind: type[Record], tmp_path):
    record = kind.load(OLD_RUN / name)
    assert record.schema_version == 0
    record.save(tmp_path / "new.json")
    assert read_json(tmp_path / "new.json") == {**read_json(OLD_RUN / name), "schema_version": SCHEMA_VERSION}
    again = kind.load(tmp_path / "new.json")
    assert replace(again, schema_version=0) == record
    assert again.to_json() == read_json(tmp_path / "new.json")


@pytest.mark.parametrize(("name", "kind"), OLD_LINES.items(), ids=OLD_LINES)
def test_lines_of_version_0_load_and_keep_all_values(name: str, kind: type[Part]):
    assert [row.to_json() for row in kind.load_lines(OLD_RUN / name)] == read_jsonl(OLD_RUN / name)


@pytest.mark.parametrize("name", ["text", "chat"])
def test_run_of_version_0_is_reported(name, tmp_path):
    shutil.copytree(OLD_RUN / name, tmp_path / name)
    run = Run(RunFolder(tmp_path / name))
    assert run.heldout is not None
    assert run.heldout.before is not None
    assert run.loss_before_nats == run.heldout.before.loss_nats  # from the log
    page = as_markdown(run, draw_charts(run.folder))
    assert f"Finished: {run.logged_step:,} steps" in page
    assert f"| after training | {run.loss_nats:.3f} |" in page
    assert "charts/loss.png" in page


def test_sweep_folder_of_version_0_is_reported(tmp_path):
    (tmp_path / "recipe.yaml").write_text("# Shows:   what it shows.\n", encoding="utf-8")
    for name in ("baseline-i1-t1", "baseline-i2-t2", "hot-i1-t1", "hot-i2-t2"):
        shutil.copytree(OLD_RUN / "text", tmp_path / name)
    shutil.copy(OLD_RUN / "sweep.json", tmp_path)
    folder = SweepFolder(tmp_path)
    old = SweepResults.load(folder.results)
    assert [row[:2] for row in table_rows(old)[1]] == [["hot", "2"], ["baseline", "4"]]
    assert draw(old).axes
    assert "hot" in write_report(folder, dict.fromkeys(("baseline", "hot"), tmp_path / "recipe.yaml"))
    assert {row.recipe: len(row.runs) for row in SweepResults.load(folder.results).recipes} == {"baseline": 2, "hot": 2}


def test_type_error_in_a_line_names_it(tmp_path):
    answers, lines = Answer.load_lines(OLD_RUN / "chat/evaluation/answers.jsonl"), tmp_path / "answers.jsonl"
    write_jsonl(lines, [answers[0].to_json(), {**answers[1].to_json(), "ended": "no"}])
    with pytest.raises(UsageError, match=r"answers\.jsonl, line 2: ended is 'no', expected bool\. "):
        Answer.load_lines(lines)


def test_unknown_keys_are_kept_and_changed_fields_written(tmp_path):
    old = read_json(OLD_RUN / "text/resolved.json")
    del old["rows_per_step"]
    record = Resolved.from_json({**old, "from_tomorrow": [1]}, "resolved.json:")
    assert record.rows_per_step is None
    assert record.to_json() == {**old, "from_tomorrow": [1]}
    assert replace(record, rows_per_step=8).to_json() == {**old, "from_tomorrow": [1], "rows_per_step": 8}


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (["device", "count"], "two", "device.count is 'two', expected int"),
        (["device", "count"], True, "device.count is True, expected int"),
        (["run", "prompts"], ["Once", 3], "run.prompts[1] is 3, expected str"),
        (["run", "seq_len"], 8.5, "run.seq_len is 8.5, expected int or null"),
        (["data", "sources", "train"], {}, "data.sources.train is {}, expected list of object"),
        (["model"], None, "model is None, expected object"),
    ],
)
def test_type_error_names_file_and_key(path: list[str], value: object, said: str, tmp_path):
    told = read_json(OLD_RUN / "text/resolved.json")
    part = told
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    (tmp_path / "resolved.json").write_text(json.dumps(told))
    with pytest.raises(UsageError) as refusal:
        Resolved.load(tmp_path / "resolved.json")
    assert str(refusal.value).startswith(f"{tmp_path / 'resolved.json'}: {said}. ")


FOLDERS = (RunFolder(Path()), SweepFolder(Path()), DataFolder(Path()))
PATHS = {name for folder in FOLDERS for name in dir(folder) if isinstance(getattr(folder, name), Path)}
"""Names of the paths in runs, sweeps and prepared sets."""
TYPED_FILE = re.compile(
    rf"\.({'|'.join(sorted(PATHS))})(\.read_text\(.*)?$|MANIFEST|(checkpoint|trainer_state|meta|progress)\.json"
)
READERS = {"read_json", "read_jsonl", "parse_json", "json.load", "json.loads"}
RECORDS, VARIABLES = {"resolved", "heldout", "measured"}, {"meta", "manifest"}


def test_files_of_runs_and_prepared_sets_are_read_as_json_only_in_the_package_runs():
    found = []
    for path in (REPOSITORY / "gpt2small_hf").rglob("*.py"):
        if path.parent.name == "runs":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            raw = []
            if isinstance(node, ast.Call) and ast.unparse(node.func) in READERS:
                raw = [node] if TYPED_FILE.search(ast.unparse(node.args[0])) else []
            elif isinstance(node, ast.Subscript) or (isinstance(node, ast.Attribute) and node.attr == "get"):
                of_attribute = getattr(node.value, "attr", "") in RECORDS
                raw = [node.value] if of_attribute or getattr(node.value, "id", "") in VARIABLES else []
            found += [f"{path.name}, line {of.lineno}" for of in raw]
    assert not found
