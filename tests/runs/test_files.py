"""Run folders, atomic writes, and one-line errors."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY
from hypothesis import given
from hypothesis import strategies as st

from gpt2small_hf.errors import UsageError, run_command
from gpt2small_hf.runs.files import append_jsonl, atomic_write, read_json, read_jsonl, write_json, write_jsonl
from gpt2small_hf.runs.provenance import made_by

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(value=json_values)
def test_json_round_trip(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("json") / "value.json"
    write_json(path, value)
    assert read_json(path) == value


def test_non_finite_numbers_become_null(tmp_path):
    write_json(tmp_path / "a.json", {"loss": math.nan, "norms": [1.0, math.inf], "deep": {"x": -math.inf}})
    assert json.loads((tmp_path / "a.json").read_text()) == {"loss": None, "norms": [1.0, None], "deep": {"x": None}}


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "result.txt"
    path.write_text("old")

    def fail_halfway():
        with atomic_write(path) as temporary:
            temporary.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_halfway()
    assert [p.name for p in tmp_path.iterdir()] == ["result.txt"]
    assert path.read_text() == "old"


def test_folder_is_replaced_with_its_contents(tmp_path):
    folder = tmp_path / "model"
    for content in ("first", "second"):
        with atomic_write(folder) as temporary:
            temporary.mkdir()
            (temporary / content).touch()
    assert [p.name for p in tmp_path.rglob("*")] == ["model", "second"]


def test_line_truncated_by_a_kill_is_ignored(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_jsonl(path, {"step": 1, "loss": math.inf})
    with path.open("a") as file:
        file.write('{"step": 2, "lo')
    assert read_jsonl(path) == [{"step": 1, "loss": None}]


@pytest.mark.parametrize(("content", "words"), [(None, "does not exist"), ("{", "not valid JSON")])
def test_error_of_an_unreadable_json_file_names_it(tmp_path, content, words):
    path = tmp_path / "meta.json"
    if content:
        path.write_text(content)
    with pytest.raises(UsageError, match=rf"meta\.json.*{words}|meta\.json {words}"):
        read_json(path)


def test_made_by_has_inputs_versions_and_commit(tmp_path):
    (tmp_path / "input").write_text("abc")
    made = made_by([tmp_path / "input"])
    assert made.inputs[str(tmp_path / "input")].startswith("ba7816bf8f01cfea")  # SHA-256 of "abc", FIPS 180-2
    assert {"python", "torch", "transformers"} <= set(made.versions)
    head = subprocess.run(["git", "-C", REPOSITORY, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    assert not head or str(made.commit).startswith(head)


def test_usage_error_is_one_line_and_status_2(capsys):
    def main():
        raise UsageError("data/x is missing. Prepare it first.")

    assert run_command(main) == 2
    assert capsys.readouterr().err == "error: data/x is missing. Prepare it first.\n"


def test_folder_that_cannot_be_written_is_a_one_line_error(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert run_command((tmp_path / "file" / "folder").mkdir) == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'file' / 'folder'}: Not a directory. Choose another place.\n"


def test_other_errors_keep_their_traceback(tmp_path):
    with pytest.raises(FileNotFoundError):
        run_command((tmp_path / "missing").read_bytes)


def test_error_of_an_unknown_command_names_the_nearest():
    done = subprocess.run([sys.executable, "-m", "gpt2small_hf", "prepair"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "error: prepair is not a command. Did you mean prepare?\n")


def test_commands_are_listed_without_arguments():
    done = subprocess.run([sys.executable, "-m", "gpt2small_hf"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "prepare" in done.stdout


@given(st.lists(st.text(), max_size=4))
def test_jsonl_round_trip_of_any_text(tmp_path_factory, texts):
    path = tmp_path_factory.mktemp("jsonl") / "rows.jsonl"
    rows = [{"text": text} for text in [*texts, "next line \x85, line separator \u2028"]]
    write_jsonl(path, rows)
    with path.open("ab") as file:
        file.write(b'{"text": "cut of' + b"\xe2\x80")  # within a character
    assert read_jsonl(path) == rows


@pytest.mark.slow
def test_closed_pipe_ends_a_command_without_an_error():
    code = (
        "import sys\nfrom gpt2small_hf.errors import run_command\n"
        "sys.exit(run_command(lambda: [print('x' * 99) for _ in range(9999)]))"
    )
    done = subprocess.run(
        ["bash", "-c", '"$1" -c "$2" | head -1', "bash", sys.executable, code], capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("x" * 99 + "\n", "")


def kill_while(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"import os\nfrom gpt2small_hf.runs import files\n{code}"])
    assert done.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_leftovers_of_a_killed_write_are_removed_by_the_next(tmp_path):
    path, other = tmp_path / "model", tmp_path / ".model.elsewhere-1.tmp"
    other.touch()
    kill_while(f"""
with files.atomic_write(files.Path({str(path)!r})) as temporary:
    temporary.mkdir()
    (temporary / "weights").touch()
    os.kill(os.getpid(), 9)
""")
    assert len([*tmp_path.iterdir()]) == 2
    with atomic_write(path) as temporary:
        temporary.mkdir()
    assert {*tmp_path.rglob("*")} == {path, other}  # another machine's process may still write it


@pytest.mark.slow
def test_folder_is_restored_after_a_kill_during_its_replacement(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "old").touch()
    kill_while(f"""
rename = files.Path.rename
files.Path.rename = lambda self, target: (rename(self, target), os.kill(os.getpid(), 9))
with files.atomic_write(files.Path({str(path)!r})) as temporary:
    temporary.mkdir()
""")
    assert not path.exists()
    with pytest.raises(RuntimeError), atomic_write(path):
        raise RuntimeError
    assert {*tmp_path.rglob("*")} == {path, path / "old"}


def test_files_are_flushed_before_they_are_renamed(tmp_path, monkeypatch):
    flushed, fsync = [], os.fsync

    def record(descriptor):
        flushed.append((os.fstat(descriptor).st_ino, (tmp_path / "model").exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    with atomic_write(tmp_path / "model") as temporary:
        temporary.mkdir()
        (temporary / "weights").write_text("x")
    before = {inode for inode, named in flushed if not named}
    assert before == {(tmp_path / "model").stat().st_ino, (tmp_path / "model" / "weights").stat().st_ino}
    assert flushed[-1] == (tmp_path.stat().st_ino, True)


def test_contents_of_a_folder_that_cannot_be_renamed_are_replaced(tmp_path, monkeypatch):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "one")
    (tmp_path / "link").symlink_to("two")
    for folder in (tmp_path / "one", tmp_path / "link", Path()):
        inode = folder.stat().st_ino
        for content in ("first", "second"):
            with atomic_write(folder) as temporary:
                temporary.mkdir()
                (temporary / content).mkdir()
                (temporary / "config.json").touch()
        assert {path.name for path in folder.iterdir()} == {"second", "config.json"}
        assert folder.stat().st_ino == inode
    assert (tmp_path / "link").is_symlink()
