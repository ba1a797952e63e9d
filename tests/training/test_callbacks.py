"""Callbacks: the checkpoints that get samples, signals, and the progress line on a terminal and in a file."""

import itertools
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import REPOSITORY, run_script, run_train, tiny_words
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed as dist
from transformers import TrainerControl, TrainerState, TrainingArguments

from gpt2small_hf.runs.files import read_jsonl
from gpt2small_hf.training.callbacks import StopOnSignal, samples_are_due
from gpt2small_hf.training.progress import ProgressLine


def steps_with_samples(strategy, max_steps, interval, **more):
    """Return the steps after 0 that get samples; `interval` is the steps of an epoch if saved by epoch."""
    how = {"save_strategy": strategy} | ({"save_steps": interval} if strategy == "steps" else {})
    args = TrainingArguments(output_dir="unused", use_cpu=True, **how)
    epochs = -(-max_steps // interval)
    state = TrainerState(max_steps=max_steps, save_steps=interval, num_train_epochs=epochs)
    found = []
    for step in range(1, max_steps + 1):
        state.global_step, state.epoch = step, step / interval
        if samples_are_due(args, state, **more):
            found.append(step)
    return found


@given(st.sampled_from(["steps", "epoch"]), st.integers(1, 3000), st.integers(1, 300))
def test_samples_are_taken_at_ten_checkpoints_at_most(strategy, max_steps, interval):
    found = steps_with_samples(strategy, max_steps, interval)
    scheduled = [step for step in range(1, max_steps + 1) if step % interval == 0 or step == max_steps]
    assert set(found) <= set(scheduled)
    assert found[-1] == max_steps
    assert len(found) <= 11
    assert all(later - earlier >= 150 for earlier, later in itertools.pairwise(found[:-1]))
    assert steps_with_samples(strategy, max_steps, interval, every=True) == scheduled


def test_samples_are_evenly_spaced():
    assert steps_with_samples("epoch", 3600, 120) == list(range(360, 3601, 360))
    assert steps_with_samples("steps", 784, 112) == [224, 448, 672, 784]
    assert steps_with_samples("epoch", 360, 12) == [156, 312, 360]
    assert steps_with_samples("steps", 30, 5) == [30]
    assert steps_with_samples("steps", 2500, 500) == [500, 1000, 1500, 2000, 2500]


@pytest.mark.slow
def test_short_run_is_sampled_at_its_start_and_end(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*tiny_words(tmp_path, tmp_path / "run"), "--save_steps", "1", "--eval_strategy", "no"]
    assert [row["step"] for row in read_jsonl(run_train(words).samples)] == list(range(21))
    run = run_train([*words, "--overwrite", "--sample_all_checkpoints", "false"])
    assert [row["step"] for row in read_jsonl(run.samples)] == [0, 20]


@pytest.mark.slow
def test_charts_are_drawn_once_in_a_short_run(tmp_path, monkeypatch):
    """They are drawn at the end, and not at each of twenty checkpoints."""
    monkeypatch.chdir(tmp_path)
    written = []
    monkeypatch.setattr(os, "replace", lambda old, new, to=os.replace: (written.append(str(new)), to(old, new))[1])
    run = run_train([*tiny_words(tmp_path, tmp_path / "run"), "--save_steps", "1", "--eval_strategy", "no"])
    assert run.chart("loss").exists()
    assert sum(name.endswith("loss.png") for name in written) == 1


# ---- the terminal -----------------------------------------------------------------------------------------------


def on_a_terminal(words, place, interrupt_at=None):
    """Return what `train.py` writes to a terminal of 24 x 120; type Ctrl-C when the text first appears."""
    pty = pytest.importorskip("pty")
    from fcntl import ioctl
    from struct import pack
    from termios import TIOCSWINSZ

    ours, theirs = pty.openpty()
    ioctl(ours, TIOCSWINSZ, pack("HHHH", 24, 120, 0, 0))
    process = subprocess.Popen(
        [sys.executable, REPOSITORY / "train.py", *words],
        cwd=place,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(REPOSITORY)},
        start_new_session=True,
        preexec_fn=lambda: ioctl(0, __import__("termios").TIOCSCTTY, 0),
    )
    os.close(theirs)
    screen = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the last process has closed the terminal
            break
        if not piece:
            break
        screen += piece
        if interrupt_at and interrupt_at in screen:
            os.write(ours, b"\x03")
            interrupt_at = None
    os.close(ours)
    return process.wait(), screen.decode()


def lines_of(screen):
    """Return the lines that remain on a terminal; interprets returns, erased lines and cursor moves up."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[?0-9;]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", screen):
        if token == "\r":
            column = 0
        elif token == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif token.startswith("\x1b["):
            if token[-1] == "K":
                lines[row] = ""
            elif token[-1] == "A":
                row -= int(token[2:-1] or 1)
        else:
            lines[row] = lines[row][:column].ljust(column) + token + lines[row][column + len(token) :]
            column += len(token)
    return [line.rstrip() for line in lines]


@pytest.mark.slow
def test_terminal_keeps_a_line_for_each_evaluation_with_a_sample(tmp_path):
    status, screen = on_a_terminal(tiny_words(tmp_path, tmp_path / "run"), tmp_path)
    assert status == 0
    assert "sampling…" in screen
    assert "evaluating…" in screen
    kept = [line for line in lines_of(screen) if line.startswith("step ")]
    assert re.fullmatch(r"step 0/20  ▸.+", kept[0])
    for line, step in zip(kept[1:], (10, 20), strict=False):
        assert re.fullmatch(rf"step {step}/20  loss \d\.\d{{3}}  held-out \d\.\d{{3}}  ▸.+", line)


@pytest.mark.slow
def test_ctrl_c_prints_a_message_on_its_own_line(tmp_path):
    words = [*tiny_words(tmp_path, tmp_path / "run"), "--max_steps", "100000", "--eval_strategy", "no"]
    status, screen = on_a_terminal([*words, "--save_strategy", "no"], tmp_path, interrupt_at=b"left ")
    assert status == 128 + signal.SIGINT
    assert any(line.startswith("stopping after this step") for line in lines_of(screen)), screen


def test_signal_during_agreement_takes_effect_after_the_next_step(tmp_path, monkeypatch):
    """The other ranks do not know of the signal yet, and it must not be lost."""
    all_reduce = dist.all_reduce

    def interrupted(*args, **kwargs):
        all_reduce(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGTERM)

    stop = StopOnSignal(ProgressLine(1))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    stop.on_train_begin(None, None, None)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(dist, "all_reduce", interrupted)
            assert stop.agreed(torch.device("cpu")) == 0
        assert stop.agreed(torch.device("cpu")) == signal.SIGTERM
        assert stop.agreed(torch.device("cpu")) == signal.SIGTERM
    finally:
        stop.close()
        dist.destroy_process_group()


@pytest.mark.slow
def test_log_file_keeps_a_line_for_each_evaluation(tmp_path):
    done = run_script([str(REPOSITORY / "train.py"), *tiny_words(tmp_path, tmp_path / "run")], tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^step 10/20  loss \d\.\d{3}  held-out \d\.\d{3}  ▸", done.stderr, re.MULTILINE)
    assert "\x1b" not in done.stderr


def test_time_left_ignores_the_first_steps(monkeypatch):
    """After three slow steps and a long evaluation, it is computed from the other steps and their share of the time."""
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    progress, state, control = ProgressLine(1000), TrainerState(max_steps=1000), TrainerControl()
    args = TrainingArguments("unused", use_cpu=True)
    progress.on_train_begin(args, state, control)
    for step in range(1, 104):
        progress.on_step_begin(args, state, control)
        now += 60.0 if step <= 3 else 0.5
        state.global_step = step
        progress.on_step_end(args, state, control)
        if step == 3:
            assert "left" not in progress.words(state)
    assert progress.words(state).endswith("2000 tok/s  left 7m28s")  # 897 steps of half a second
    progress.on_evaluate(args, state, control)
    now += 50.0  # as long as the hundred steps
    progress.evaluated = False
    progress.on_step_begin(args, state, control)
    now += 0.5
    state.global_step = 104
    progress.on_step_end(args, state, control)
    assert progress.words(state).endswith("2000 tok/s  left 14m52s")
