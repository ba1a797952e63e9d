"""The run folder: one training at a time, any empty folder, and no moment at which a kill blocks or loses a run."""

import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import safetensors.torch
import tokenizers
import torch
from conftest import REPOSITORY, chats, processes, run_script, run_train, tiny_words

from gpt2small_hf.cli import main
from gpt2small_hf.errors import UsageError
from gpt2small_hf.runs.files import (
    append_jsonl,
    atomic_write,
    is_leftover,
    locked,
    read_jsonl,
    sha256,
    write_json,
    write_jsonl,
)
from gpt2small_hf.runs.layout import RunFolder
from gpt2small_hf.training.run_folder import restore
from gpt2small_hf.training.trainer import CausalLMTrainer
from training.test_resume import die_at_call

RUN, FILES = "gpt2small_hf.training.run", "gpt2small_hf.runs.files"
FOLDER, FINALIZE = "gpt2small_hf.training.run_folder", "gpt2small_hf.training.finalize"
SHORT = ("--max_steps", "2", "--eval_strategy", "no")


def weights(folder: RunFolder | Path) -> str:
    return sha256((folder.model if isinstance(folder, RunFolder) else folder / "model") / "model.safetensors")


# ---- several processes ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_launch_of_ranks_that_are_not_connected_is_refused_once(tmp_path):
    words = [word for word in tiny_words(tmp_path, tmp_path / "run") if word != "--use_cpu"]
    command = [sys.executable, str(REPOSITORY / "train.py"), *words]
    environment = {**os.environ, "WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "", "MASTER_ADDR": "127.0.0.1"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        environment["MASTER_PORT"] = str(free.getsockname()[1])
    ranks = [
        subprocess.Popen(
            command, cwd=tmp_path, env={**environment, "RANK": rank, "LOCAL_RANK": rank}, stderr=subprocess.PIPE
        )
        for rank in ("0", "1")
    ]
    said = [process.communicate(timeout=120)[1].decode() for process in ranks]
    assert [process.returncode for process in ranks] == [2, 2], said
    errors = [[line for line in lines.splitlines() if "[transformers]" not in line] for lines in said]
    assert [len(lines) for lines in errors] == [1, 0]
    assert errors[0][0].startswith("error: 2 processes were launched (WORLD_SIZE)")
    assert "--use_cpu" in errors[0][0]
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "data").exists()


def train_and_wait(words, at_step, connection):
    """Train, and stop before a step until the parent kills this process."""
    torch.set_num_threads(1)
    step, calls = CausalLMTrainer.training_step, []

    def call(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == at_step:
            connection.send("there")
            connection.recv()
        return step(self, *args, **kwargs)

    CausalLMTrainer.training_step = call
    run_train(words)


@pytest.mark.slow
def test_run_folder_admits_one_training_until_it_is_killed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = tiny_words(tmp_path, tmp_path / "run")
    alone = run_train(tiny_words(tmp_path, tmp_path / "alone"))
    (tmp_path / "link").symlink_to("run")
    parent, child = processes.Pipe()
    # Its workers must not keep the lock of a process that was killed. A process of the fork server would start them by
    # another server, which ends with the last of them; and they end only when what started them does.
    with_worker = [*words, "--dataloader_num_workers", "1", "--dataloader_multiprocessing_context", "fork"]
    training = processes.Process(target=train_and_wait, args=(with_worker, 12, child))
    training.start()
    child.close()  # a training that fails then ends `recv` with EOFError
    assert parent.recv() == "there"
    workers = psutil.Process(training.pid).children(recursive=True)
    assert workers
    branch = ("--branch_from", str(alone.checkpoints / "checkpoint-10"))
    for more in ((), ("--overwrite",), ("--output_dir", "link"), ("--resume", "never"), branch):
        with pytest.raises(UsageError, match="another process trains in"):
            run_train([*words, *more])
    run_train([*words, "--preflight_only"])
    training.kill()
    training.join()
    assert weights(run_train(words)) == weights(alone)
    steps = [row["step"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "loss" in row]
    assert steps == [5, 10, 15, 20]
    assert psutil.wait_procs(workers, 60)[1] == []


def test_lock_is_skipped_with_a_warning_where_the_file_system_has_none(tmp_path, monkeypatch, capsys):
    fcntl = pytest.importorskip("fcntl")

    def flock(*args):
        raise OSError(37, "No locks available")  # as NFS without its lock daemon answers

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(tmp_path / ".lock", "refused"):
        assert "without locks" in capsys.readouterr().err


# ---- folders that cannot be renamed -----------------------------------------------------------------------------


@pytest.mark.slow
def test_run_takes_any_empty_folder_and_overwrites_in_it(fixed_folder, tmp_path):
    words = [*tiny_words(tmp_path, fixed_folder), *SHORT]
    inode, is_link = fixed_folder.stat().st_ino, fixed_folder.is_symlink()
    with pytest.raises(UsageError, match="multiple of --num_attention_heads"):
        run_train([*words, "--hidden_size", "17"])
    run_train([*words, "--preflight_only"])
    assert {path.name for path in fixed_folder.iterdir()} <= {"data"}
    first = weights(run_train(words))
    again = run_train([*words, "--seed", "7", "--overwrite"])
    assert weights(again) != first
    assert not again.former.exists()
    run_train([*words, "--seed", "7"])  # finished
    assert (fixed_folder.stat().st_ino, fixed_folder.is_symlink()) == (inode, is_link)


# ---- killed -----------------------------------------------------------------------------------------------------


def train_until(call, words):
    torch.set_num_threads(1)
    number, owner, name = call
    die_at_call(number, importlib.import_module(owner) if isinstance(owner, str) else owner, name)
    run_train(words)


def kill_at(call, words):
    process = processes.Process(target=train_until, args=(call, words))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL


@pytest.fixture(scope="module")
def short_run(tmp_path_factory) -> tuple[Path, str]:
    """A finished run of two steps and its weights. Not to be changed."""
    place = tmp_path_factory.mktemp("short")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        return place, weights(run_train([*tiny_words(place, place / "run"), *SHORT]))


FIRST_MOMENTS = {
    "before the lock": (1, FOLDER, "lock_folder"),
    "before the folder is opened": (1, FOLDER, "restore"),
    "before the text is prepared": (1, RUN, "build_run_inputs"),
    "before the first file": (1, RUN, "start_folder"),
    "before the recipe has its name": (-3, FILES, "replace_path"),
    "before the first rows have their name": (-2, FILES, "replace_path"),
    "before resolved.json has its name": (-1, FILES, "replace_path"),
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", FIRST_MOMENTS)
def test_run_killed_before_its_first_step_starts_again(moment, short_run, tmp_path, monkeypatch):
    place, expected = short_run
    shutil.copytree(place / "data", tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    words = [*tiny_words(tmp_path, tmp_path / "run"), *SHORT]
    number, owner, name = FIRST_MOMENTS[moment]
    kill_at((4 + number if number < 0 else number, owner, name), words)
    again = run_train(words)
    assert weights(again) == expected
    assert not [path for path in again.root.rglob("*") if is_leftover(path)]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "more"), [(1, ()), (2, ("--overwrite",)), (7, ())])
def test_run_killed_while_another_steps_aside_loses_neither(number, more, short_run, tmp_path, monkeypatch):
    place, expected = short_run
    shutil.copytree(place, tmp_path / "place")
    monkeypatch.chdir(tmp_path / "place")
    words = [*tiny_words(place, tmp_path / "place" / "run"), *SHORT]  # the text's name is in its fingerprint
    folder = RunFolder(tmp_path / "place" / "run")
    kill_at((number, Path, "rename"), [*words, "--overwrite"])
    kill_at((1, CausalLMTrainer, "training_step"), [*words, "--overwrite"])
    assert weights(folder.former) == expected
    run_train([*words, *more])
    assert weights(folder) == expected
    assert not folder.former.exists()
    assert not folder.former_incomplete.exists()


@pytest.mark.parametrize("names", ["checkpoints/checkpoint-5", "report.md"])
def test_former_run_is_not_put_back_over_what_was_made_since(names, tmp_path):
    folder, name = RunFolder(tmp_path), names.partition("/")[0]
    for root in (folder.former_incomplete, folder.root):
        (root / names).parent.mkdir(parents=True, exist_ok=True)
        (root / names).write_text(str(root))
    (folder.former_incomplete / "recipe.yaml").write_text("")
    with pytest.raises(UsageError, match=f"/{name} is newer. Remove one"):
        restore(folder)
    assert all((root / names).read_text() == str(root) for root in (folder.former_incomplete, folder.root))
    assert not folder.recipe.exists()
    (folder.root / names).unlink()  # an empty folder may stay
    restore(folder)
    assert (folder.root / names).read_text() == str(folder.former_incomplete)
    assert folder.recipe.exists()
    assert not folder.former_incomplete.exists()


@pytest.mark.slow
def test_overwriting_twice_keeps_the_last_finished_run(short_run, tmp_path, monkeypatch):
    place, _ = short_run
    shutil.copytree(place, tmp_path / "place")
    monkeypatch.chdir(tmp_path / "place")
    words = [*tiny_words(place, tmp_path / "place" / "run"), *SHORT, "--overwrite"]
    folder = RunFolder(tmp_path / "place" / "run")
    kill_at((1, FINALIZE, "draw_charts"), [*words, "--seed", "7"])  # it is finished, and the former one is still there
    second = weights(folder)
    for _ in range(2):
        kill_at((1, CausalLMTrainer, "training_step"), words)
        assert weights(folder.former) == second


@pytest.mark.slow
def test_run_finished_and_killed_before_it_removed_the_former_one_removes_it(short_run, tmp_path, monkeypatch):
    place, _ = short_run
    shutil.copytree(place, tmp_path / "place")
    monkeypatch.chdir(tmp_path / "place")
    words = [*tiny_words(place, tmp_path / "place" / "run"), *SHORT, "--seed", "7"]
    kill_at((1, FINALIZE, "draw_charts"), [*words, "--overwrite"])
    assert not run_train(words).former.exists()


# ---- a full disk ------------------------------------------------------------------------------------------------

FULL_DISK = """
import importlib, resource, sys
sys.path.insert(0, {tests!r})
from conftest import run_train
from gpt2small_hf.errors import run_command
owner, _, name = {where!r}.rpartition(".")
owner = importlib.import_module(owner)
function = getattr(owner, name)
def call(*args, **kwargs):  # from here on no file may grow
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    return function(*args, **kwargs)
setattr(owner, name, call)
sys.exit(run_command(lambda: run_train({words!r})))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "status"),
    [
        ("gpt2small_hf.data.corpus.prepare.resume_or_start", 2),
        ("gpt2small_hf.data.corpus.prepare.train_tokenizer", 2),  # tokenizers raises no OSError
        ("gpt2small_hf.data.corpus.prepare.SplitWriter", 2),
        ("gpt2small_hf.training.run.start_folder", 2),
        ("gpt2small_hf.training.callbacks.complete", 3),  # the first sample
        ("gpt2small_hf.training.checkpointing.not_finite", 3),  # the checkpoint
        ("gpt2small_hf.training.finalize.save_model", 3),
        ("gpt2small_hf.training.finalize.run_tasks", 3),
        ("gpt2small_hf.training.finalize.draw_charts", 3),
    ],
)
def test_full_disk_ends_a_run_in_one_line_and_the_same_command_resumes(where, status, short_run, tmp_path, monkeypatch):
    pytest.importorskip("resource")
    monkeypatch.chdir(tmp_path)
    words = [*tiny_words(tmp_path, tmp_path / "run"), *SHORT]
    code = FULL_DISK.format(tests=str(REPOSITORY / "tests"), where=where, words=words)
    done = run_script(["-c", code], tmp_path)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    assert "File too large" in done.stderr
    assert len(done.stderr.splitlines()[-1]) < 300
    assert run_train(words).chart("loss").exists()


@contextmanager
def full_disk():
    """No file may grow, as on a full disk."""
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def files_of(place):
    return {path.relative_to(place): path.read_bytes() for path in place.rglob("*") if path.is_file()}


WRITERS = {
    "report": (["report", "run"], "run/charts/"),
    "convert": (["convert", "run", "converted", "--to", "gpt2"], "converted"),
    "preview": (["preview", "chats.jsonl", "--html", "page.html"], "page.html"),
    "prepare": (["prepare", "--text", "corpus.jsonl", "--vocab_size", "300", "--output_dir", "set"], "set.partial"),
    "sweep table": (["sweep", "ladder", "--table_only", "--output_dir", "sweep"], "sweep"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", WRITERS)
def test_commands_on_a_full_disk_name_the_file_and_leave_nothing(what, tiny_run, tmp_path, monkeypatch, capsys):
    words, name = WRITERS[what]
    tiny_words(tmp_path, tmp_path)
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats()), encoding="utf-8")
    (tmp_path / "ladder").mkdir()
    (tmp_path / "ladder" / "baseline.yaml").touch()
    for folder in ("run", "sweep/baseline-i1-t1"):
        shutil.copytree(tiny_run.root, tmp_path / folder, ignore=shutil.ignore_patterns("checkpoints", "report.md"))
    monkeypatch.chdir(tmp_path)
    before = files_of(tmp_path)
    command, *rest = words
    with full_disk():
        status = main([command, *rest])
    said = capsys.readouterr().err.splitlines()[-1]
    assert status == 2, said
    assert name in said
    assert "File too large" in said
    assert files_of(tmp_path) == before
    assert main([command, *rest]) == 0


def test_full_disk_is_named_with_the_file_that_was_written(tmp_path):
    rows, text = [{"a": 1}], "x" * 10_000
    writers = {
        "one.json": lambda path: write_json(path, text),
        "rows.jsonl": lambda path: write_jsonl(path, rows),
        "log.jsonl": lambda path: append_jsonl(path, rows[0]),
    }
    for name, write in writers.items():
        with full_disk(), pytest.raises(OSError, match="File too large") as caught:
            write(tmp_path / name)
        assert caught.value.filename == str(tmp_path / name)
    for save in (lambda path: tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(path)), save_weights):
        with (
            full_disk(),
            pytest.raises(OSError, match=r"File too large|os error") as caught,
            atomic_write(tmp_path / "x") as path,
        ):
            save(path)
        assert caught.value.filename == str(tmp_path / "x")
    assert not [path for path in tmp_path.iterdir() if path.stat().st_size]


def save_weights(path):
    safetensors.torch.save_file({"x": torch.zeros(1000)}, path)
