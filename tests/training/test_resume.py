"""Resuming: an interrupted run ends like an uninterrupted one; a run with other settings is refused."""

import os
import platform
import resource
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import processes, run_train, tiny_words
from safetensors.torch import load_file

from gpt2small_hf.errors import RunInterruptedError, UsageError, run_command
from gpt2small_hf.runs.files import read_json, read_jsonl, sha256, write_json
from gpt2small_hf.runs.layout import RunFolder
from gpt2small_hf.runs.records import DeviceFacts, Resolved
from gpt2small_hf.training import callbacks, finalize
from gpt2small_hf.training.checkpoint_files import is_complete
from gpt2small_hf.training.resume import device_notice, differences
from gpt2small_hf.training.trainer import CausalLMTrainer

# 20 steps of two micro-batches; an epoch has 9 steps; saved at 5, 10, 15 and 20; logged at 4, 8, …
LENGTHS = ["--gradient_accumulation_steps", "2", "--save_steps", "5", "--logging_steps", "4", "--embd_pdrop", "0.1"]
LENGTHS += ["--save_total_limit", "2", "--eval_steps", "8", "--per_device_train_batch_size", "16"]
TIMES = {"tokens_per_second", "memory_gib", "data_wait", "mfu"}


def die_at_call(number, owner, name):
    """Let the process end by SIGKILL when it calls `owner.name` for the given time."""
    function, calls = getattr(owner, name), []

    def call(*args, **kwargs):
        calls.append(name)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    setattr(owner, name, call)


KILLS = {
    "between two micro-batches": (28, CausalLMTrainer, "training_step"),
    "while a checkpoint's optimizer is written": (4, torch, "save"),
    "before a checkpoint gets its name": (2, Path, "rename"),
    "between a checkpoint and its samples": (3, callbacks, "complete"),
    "between the last checkpoint and its samples": (5, callbacks, "complete"),
    "between epochs": (2, CausalLMTrainer, "_run_epoch"),
    "before older checkpoints are removed": (4, CausalLMTrainer, "_rotate"),
    "before the closing line": (1, CausalLMTrainer, "_finalize_training"),
    "after training, before the model is saved": (1, finalize, "save_model"),
    "before the held-out result": (1, finalize, "save_results"),
}


def train_until(where, words):
    torch.set_num_threads(1)
    if where:
        die_at_call(*KILLS[where])
    run_train(words)


def what_was_logged(folder: RunFolder):
    rows = [row for row in read_jsonl(folder.metrics) if row.get("symptom") != "waiting for data"]
    assert "train_loss" in rows[-1]
    ends = ("_runtime", "_per_second")
    return [{key: row[key] for key in row if key not in TIMES and not key.endswith(ends)} for row in rows]


def what_is_left(folder: RunFolder):
    """All that an interruption must not change."""
    kept = {path.name: sha256(path / "model.safetensors") for path in folder.checkpoints.iterdir()}
    best = {name: read_json(folder.checkpoints / name / "trainer_state.json")["best_global_step"] for name in kept}
    weights = sha256(folder.model / "model.safetensors")
    return weights, what_was_logged(folder), read_jsonl(folder.samples), kept, best


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    place = tmp_path_factory.mktemp("uninterrupted")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        return run_train([*tiny_words(place, place / "run"), *LENGTHS])


@pytest.mark.slow
@pytest.mark.parametrize("where", KILLS)
def test_killed_run_resumes_to_the_same_weights_log_and_samples(where, uninterrupted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*tiny_words(tmp_path, tmp_path / "run"), *LENGTHS]
    process = processes.Process(target=train_until, args=(where, words))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    again = run_train(words)
    assert sha256(again.model / "model.safetensors") == sha256(uninterrupted.model / "model.safetensors")
    assert what_was_logged(again) == what_was_logged(uninterrupted)
    assert read_jsonl(again.samples) == read_jsonl(uninterrupted.samples)
    assert [row["step"] for row in read_jsonl(again.samples)] == [0, 5, 10, 15, 20]
    assert {path.name for path in again.checkpoints.iterdir()} == {"checkpoint-15", "checkpoint-20"}
    before, after = (read_json(done.heldout) | {"made_by": None} for done in (uninterrupted, again))
    assert before == after


def run_as(rank, world_size, words, place):
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "ACCELERATE_USE_CPU": "true"}
    if world_size > 1:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{place}/meet-{time.time_ns() // 10**11}", rank=rank, world_size=world_size
        )
    sys.stdout = sys.stderr = (Path(place) / f"said-by-{rank}").open("a", buffering=1)
    sys.exit(run_command(lambda: run_train(words)))


@pytest.mark.slow
@pytest.mark.parametrize(("number", "world_size"), [(signal.SIGTERM, 1), (signal.SIGINT, 1), (signal.SIGTERM, 2)])
def test_signal_to_one_rank_saves_once_and_stops_all(number, world_size, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*tiny_words(tmp_path, tmp_path / "run"), "--max_steps", "100000", "--save_steps", "100000"]
    words += ["--eval_strategy", "no", "--num_train_epochs", "1"]
    ranks = [processes.Process(target=run_as, args=(rank, world_size, words, tmp_path)) for rank in range(world_size)]
    for process in ranks:
        process.start()
    folder = RunFolder(tmp_path / "run")
    deadline = time.monotonic() + 120
    while not (folder.metrics.exists() and any("loss" in row for row in read_jsonl(folder.metrics))):
        assert time.monotonic() < deadline
        assert all(process.is_alive() for process in ranks), (tmp_path / "said-by-0").read_text()
        time.sleep(0.05)
    step = read_jsonl(folder.metrics)[-1]["step"]
    os.kill(ranks[-1].pid, number)
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [128 + number] * world_size
    (saved,) = folder.checkpoints.iterdir()
    assert is_complete(saved)
    state = read_json(saved / "trainer_state.json")
    assert state["global_step"] < step + 2000  # it was not the end that stopped it
    assert len(list(saved.glob("rng_state*"))) == world_size
    said = (tmp_path / "said-by-0").read_text()
    assert f"{number.name}; saved {saved}. The same command resumes from it" in said
    if world_size == 2:
        assert "saved" not in (tmp_path / "said-by-1").read_text().replace("once it is saved", "")


def fill_the_disk(words, place, largest):
    save, calls = CausalLMTrainer._save_checkpoint, []

    def call(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
        return save(self, *args, **kwargs)

    CausalLMTrainer._save_checkpoint = call
    run_as(0, 1, words, place)


@pytest.mark.slow
@pytest.mark.parametrize("largest", [20_000, 70_000])  # in the weights; in the optimizer's state
def test_full_disk_stops_the_run_and_keeps_the_last_complete_checkpoint(largest, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = tiny_words(tmp_path, tmp_path / "run")
    process = processes.Process(target=fill_the_disk, args=(words, tmp_path, largest))
    process.start()
    process.join(120)
    said = (tmp_path / "said-by-0").read_text()
    assert process.exitcode == 3, said
    good = tmp_path / "run" / "checkpoints" / "checkpoint-10"
    assert f"Last good checkpoint: {good}" in said
    assert list(good.parent.iterdir()) == [good]
    assert is_complete(good)
    run_train(words)  # there is room again


# 287 rows in batches of 32: an epoch has nine steps.
BY_EPOCHS = ["--eval_strategy", "epoch", "--save_strategy", "epoch", "--logging_steps", "3", "--embd_pdrop", "0.1"]
BY_EPOCHS += ["--per_device_train_batch_size", "32", "--num_train_epochs", "3", "--max_steps", "-1"]
BY_EPOCHS += ["--load_best_model_at_end"]
MIXED = ["--eval_strategy", "epoch", "--logging_strategy", "epoch", "--save_steps", "3", "--embd_pdrop", "0.1"]
MIXED += ["--per_device_train_batch_size", "32", "--save_total_limit", "9"]
ONE_CHECKPOINT = ["--save_total_limit", "1", "--load_best_model_at_end", "--eval_steps", "4", "--save_steps", "4"]
ONE_CHECKPOINT += ["--metric_for_best_model", "loss", "--greater_is_better", "true"]  # the worst: then not the last
ONE_CHECKPOINT += ["--per_device_train_batch_size", "32"]
SCHEDULES = {"epochs": BY_EPOCHS, "mixed": MIXED, "one checkpoint": ONE_CHECKPOINT}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """An uninterrupted run of each of `SCHEDULES`."""
    place = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        return {name: run_train([*tiny_words(place, place / name), *more]) for name, more in SCHEDULES.items()}


def signal_at(step, monkeypatch):
    """Send this process SIGTERM when a step's weights are updated, once."""
    on_step_end = callbacks.MetricsLog.on_step_end

    def call(self, args, state, control, **kwargs):
        if state.global_step == step:
            monkeypatch.undo()
            os.kill(os.getpid(), signal.SIGTERM)
        return on_step_end(self, args, state, control, **kwargs)

    monkeypatch.setattr(callbacks.MetricsLog, "on_step_end", call)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "step"),
    # In mid-epoch; where the schedule saves; at an epoch's last step; at the run's last. kill_runs.py has all pairs.
    [("epochs", 5), ("epochs", 9), ("epochs", 27), ("mixed", 12), ("mixed", 20), ("one checkpoint", 5)],
)
def test_signal_at_a_step_changes_nothing(schedule, step, finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*tiny_words(tmp_path, tmp_path / "run"), *SCHEDULES[schedule]]
    again, to_resume = (["--overwrite"], " without --overwrite") if schedule == "mixed" else ([], "")
    with pytest.MonkeyPatch.context() as patch:
        signal_at(step, patch)
        with pytest.raises(RunInterruptedError, match=f"The same command{to_resume} resumes from it") as caught:
            run_train([*words, *again])
    saved = tmp_path / "run" / "checkpoints" / f"checkpoint-{step}"
    assert caught.value.status == 128 + signal.SIGTERM
    assert str(saved) in str(caught.value)
    assert is_complete(saved)
    assert what_is_left(run_train(words)) == what_is_left(finished[schedule])


def take_back(folder: RunFolder, place: Path) -> RunFolder:
    """A copy of a finished run as it was before its model was saved."""
    copy = RunFolder(place)
    shutil.copytree(folder.root, copy.root)
    shutil.rmtree(copy.model)
    copy.heldout.unlink()
    return copy


@pytest.fixture(scope="module")
def best_kept(tmp_path_factory):
    """A finished run that kept the first of its checkpoints, and the words of its command but the last, the folder."""
    place = tmp_path_factory.mktemp("best_kept")
    words = [*tiny_words(place, place / "run"), *ONE_CHECKPOINT, "--save_total_limit", "9"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        folder = run_train(words)
    assert read_json(folder.checkpoints / "checkpoint-20" / "trainer_state.json")["best_global_step"] == 4
    kept = sha256(folder.model / "model.safetensors")
    assert kept == sha256(folder.checkpoints / "checkpoint-4" / "model.safetensors")
    return folder, kept, [*words, "--output_dir"]


@pytest.fixture
def moved(best_kept, tmp_path, monkeypatch):
    """The same run elsewhere, before its model was saved; there is nothing where it was."""
    folder, kept, words = best_kept
    copy = take_back(folder, tmp_path / "moved")
    away = folder.root.rename(folder.root.with_name("away"))
    monkeypatch.chdir(tmp_path)
    yield copy, kept, words
    away.rename(folder.root)


@pytest.mark.slow
def test_best_checkpoint_is_found_after_the_run_was_moved(moved):
    copy, kept, words = moved
    shutil.rmtree(copy.checkpoints / "checkpoint-20")  # so that it trains, saves and removes older checkpoints
    run_train([*words, "moved", "--save_total_limit", "2"])
    assert sha256(copy.model / "model.safetensors") == kept
    assert {path.name for path in copy.checkpoints.iterdir()} == {"checkpoint-4", "checkpoint-20"}


@pytest.mark.slow
def test_missing_best_checkpoint_is_an_error_that_loses_no_checkpoint(moved, capsys):
    copy, _, words = moved
    shutil.rmtree(copy.checkpoints / "checkpoint-4")
    newest = copy.checkpoints / "checkpoint-20"
    with pytest.raises(
        UsageError, match=r"checkpoint-4, the best one up to there, is missing.*--resume .*checkpoint-20"
    ):
        run_train([*words, str(copy.root)])
    assert is_complete(newest)
    run_train([*words, str(copy.root), "--resume", str(newest)])
    assert "The best one is chosen among those from here on" in capsys.readouterr().err
    assert sha256(copy.model / "model.safetensors") == sha256(newest / "model.safetensors")


@pytest.mark.slow
def test_best_checkpoint_is_chosen_among_later_ones_if_the_former_best_is_missing(moved):
    copy, _, words = moved
    shutil.rmtree(copy.checkpoints / "checkpoint-4")
    run_train([*words, str(copy.root), "--resume", str(copy.checkpoints / "checkpoint-8")])
    state = read_json(copy.checkpoints / "checkpoint-20" / "trainer_state.json")
    losses = {row["step"]: row["eval_loss"] for row in state["log_history"] if "eval_loss" in row and row["step"] > 8}
    assert state["best_global_step"] == max(losses, key=lambda step: losses[step]) == 12  # the worst is best there


@pytest.mark.slow
def test_damaged_settings_are_a_one_line_error(tiny_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    copy = RunFolder(tmp_path / "run")
    shutil.copytree(tiny_run.root, copy.root)
    for damage in ("{}", "[]", "{"):
        copy.resolved.write_text(damage)
        with pytest.raises(UsageError, match=r"resolved\.json"):
            run_train(tiny_words(tmp_path, copy.root))


def test_run_whose_checkpoints_are_all_damaged_is_not_started_again(tiny_run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    copy = take_back(tiny_run, tmp_path / "run")
    for checkpoint in copy.checkpoints.iterdir():
        (checkpoint / "model.safetensors").write_bytes(b"")
    with pytest.raises(UsageError, match="resume from no checkpoint"):
        run_train(tiny_words(tmp_path, copy.root))
    assert {path.name for path in copy.checkpoints.iterdir()} == {path.name for path in tiny_run.checkpoints.iterdir()}
    shutil.rmtree(copy.checkpoints)
    lines = copy.metrics.read_text().splitlines()
    copy.metrics.write_text("\n".join([lines[0], "garbage", *lines[1:]]) + "\n")
    with pytest.raises(UsageError, match=r"metrics\.jsonl, line 2, is not JSON"):
        run_train(tiny_words(tmp_path, copy.root))


def test_longer_run_starts_from_the_existing_weights(tiny_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    copy = RunFolder(tmp_path / "run")
    shutil.copytree(tiny_run.root, copy.root)
    for weights in ("run", "run/checkpoints/checkpoint-20"):
        with pytest.raises(UsageError, match=rf"max_steps: 20 -> 30.*--init_from \S*{weights},"):
            run_train([*tiny_words(tmp_path, copy.root), "--max_steps", "30"])
        copy.heldout.unlink(missing_ok=True)


@pytest.mark.slow
def test_signal_message_reports_a_checkpoint_of_weights_only(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    signal_at(7, monkeypatch)
    with pytest.raises(
        RunInterruptedError, match="checkpoint-7, from which training cannot resume: with --save_only_model"
    ):
        run_train([*tiny_words(tmp_path, tmp_path / "run"), "--save_only_model"])


DAMAGES = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "garbage": lambda path: path.write_bytes(b"?" * path.stat().st_size),
    "one byte": lambda path: path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1])),
}


def test_damage_to_any_checkpoint_file_is_detected(tiny_run, tmp_path):
    checkpoint = tiny_run.checkpoints / "checkpoint-20"
    names = {path.name for path in checkpoint.iterdir()}
    assert names >= {"rng_state.pth", "config.json", "guard_0.json", "optimizer.pt", "model.safetensors"}
    for name in names:
        for kind, damage in DAMAGES.items():
            if name == "checkpoint.json" and kind == "missing":
                continue  # as in an earlier version's, see below
            copy = tmp_path / kind / name / "checkpoint-20"
            shutil.copytree(checkpoint, copy)
            assert is_complete(copy)
            damage(copy / name)
            assert not is_complete(copy), (name, kind)


def test_checkpoint_of_an_earlier_version_needs_its_random_state(tiny_run, tmp_path):
    copy = tmp_path / "checkpoint-20"
    shutil.copytree(tiny_run.checkpoints / "checkpoint-20", copy)
    (copy / "checkpoint.json").unlink()
    assert is_complete(copy)
    (copy / "rng_state.pth").unlink()
    assert not is_complete(copy)


@pytest.mark.slow
def test_resuming_skips_damaged_checkpoints(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = tiny_words(tmp_path, tmp_path / "run")
    folder = run_train(words)
    before = sha256(folder.model / "model.safetensors")
    for name, damage in [
        ("trainer_state.json", "cut"),
        ("optimizer.pt", "garbage"),
        ("scheduler.pt", "empty"),
        ("model.safetensors", "cut"),
        ("rng_state.pth", "missing"),
        ("config.json", "cut"),
        ("guard_0.json", "cut"),
    ]:
        folder.heldout.unlink()
        path = folder.checkpoints / "checkpoint-20" / name
        DAMAGES[damage](path)
        run_train(words)
        said = capsys.readouterr()
        assert f"skipping {path.parent}" in said.err
        assert f"resuming from {folder.checkpoints / 'checkpoint-10'}" in said.out
        assert sha256(folder.model / "model.safetensors") == before
        assert is_complete(path.parent)


@pytest.mark.slow
def test_run_resumes_only_with_its_own_settings(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = tiny_words(tmp_path, tmp_path / "run")
    folder = run_train(words)
    files = {path: sha256(path) for path in folder.root.rglob("*") if path.is_file()}
    (tmp_path / "other.txt").write_text("Quite another text. " * 200)
    for change, message in [
        (["--text", "other.txt"], "text: data/corpus-.* -> data/other-"),
        (["--max_steps", "30"], "max_steps: 20 -> 30.*--init_from .*run.*--branch_from .*warmup_stable_decay"),
        (["--hidden_size", "32"], "hidden_size: 16 -> 32"),
        (["--tie_word_embeddings", "--learning_rate", "1"], "tie_word_emb.*; learning_rate: 0.01 -> 1.0"),
        (["--gradient_accumulation_steps", "2"], "rows a step: 4 -> 8"),
        (["--packing", "isolate"], "packing: stream -> isolate"),
        (["--data_seed", "1"], "data_seed: None -> 1"),
        (["--dataloader_drop_last", "true"], "dataloader_drop_last: False -> True"),
        (["--load_best_model_at_end", "true"], "load_best_model_at_end: False -> True"),
        (["--resume", "never"], "contains a run"),
        (["--overwrite", "--resume", str(folder.checkpoints / "checkpoint-10")], "cannot be combined"),
    ]:
        for finished in (True, False):
            if not finished:
                folder.heldout.rename(tmp_path / "heldout.json")
            with pytest.raises(UsageError, match=message):
                run_train([*words, *change])
            if not finished:
                (tmp_path / "heldout.json").rename(folder.heldout)
    # What is not learned from may change.
    run_train([*words, "--save_steps", "7", "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2"])
    assert "is finished, with these settings" in capsys.readouterr().out
    assert {path: sha256(path) for path in folder.root.rglob("*") if path.is_file()} == files


def test_settings_that_affect_the_weights_are_compared(tiny_run):
    now = read_json(tiny_run.resolved)
    parts = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    evaluations = {"eval_strategy": "epoch", "eval_steps": 7, "eval_delay": 5, "eval_on_start": True}
    choice = {"save_strategy": "epoch", "save_steps": 7, "metric_for_best_model": "x", "greater_is_better": True}
    decides = {"dataloader_drop_last": True, "dataloader_in_order": False, "accelerator_config": {}, "fsdp": True}
    decides |= {"deepspeed": "zero.json", "load_best_model_at_end": True, "ignore_data_skip": True}
    reported = {
        "logging_steps": 7,
        "report_to": "x",
        "dataloader_num_workers": 2,
        "save_total_limit": 3,
        "use_cpu": False,
    }
    draws, drops = {"model": {"resid_pdrop": 0.1}}, {"trainer": {"dataloader_drop_last": True}}
    best, plateau = {"load_best_model_at_end": True}, {"lr_scheduler_type": "reduce_lr_on_plateau"}
    on_gpu = {"device": {"type": "cuda"}}
    of_transformers = {"transformers_version": "5.23.9", "architectures": ["X"], "auto_map": {}, "dtype": "bfloat16"}

    def differing(before: dict[str, Any], present: dict[str, Any]) -> list[str]:
        return differences(Resolved.from_json(before, "before:"), Resolved.from_json(present, "now:"))

    assert differing(now | {"model": now["model"] | of_transformers}, now) == []
    assert differing(now | {"model": now["model"] | {"hidden_size": 8}}, now) == ["hidden_size: 8 -> 16"]
    for changes, settings, refused in [
        (reported, {}, False),
        (decides, {}, True),
        (parts, {}, False),
        (parts, draws, True),
        (parts, {"run": {"lora_dropout": 0.1}}, True),
        (parts, drops, True),
        (evaluations, {}, False),
        (evaluations, draws, True),
        (evaluations, draws | on_gpu, False),
        (evaluations, {"trainer": best}, True),
        (evaluations, {"trainer": plateau}, True),
        (choice, {}, False),
        (choice, {"trainer": best}, True),
    ]:
        for name, value in changes.items():
            present = now | {part: now[part] | values for part, values in settings.items()}
            before = present | {"trainer": present["trainer"] | {name: value}}
            assert [line.partition(":")[0] for line in differing(before, present)] == [name] * refused, settings


def test_notice_of_another_device_ignores_how_earlier_versions_named_a_cpu():
    cpu, gpu = (
        DeviceFacts(type=type, name=name, count=1, threads=1) for type, name in (("cpu", "EPYC"), ("cuda", "H100"))
    )
    assert device_notice(cpu, cpu) is None
    assert device_notice(replace(cpu, name=platform.machine()), cpu) is None
    for before, now in ((gpu, cpu), (cpu, gpu), (replace(cpu, name="another CPU"), cpu)):
        said = f"the run was started on {before.name}: on {now.name} it is the same up to rounding."
        assert device_notice(before, now) == said


def test_resume_refuses_another_number_of_processes(tiny_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    copy = take_back(tiny_run, tmp_path / "run")
    settings = read_json(copy.resolved)
    settings["device"]["count"] = 2
    write_json(copy.resolved, settings)
    with pytest.raises(UsageError, match="processes: 2 -> 1"):
        run_train(tiny_words(tmp_path, copy.root))


@pytest.mark.slow
def test_smaller_micro_batches_give_the_same_weights_up_to_rounding(tiny_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    copy = take_back(tiny_run, tmp_path / "run")
    shutil.rmtree(copy.checkpoints / "checkpoint-20")
    parts = ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2"]
    run_train([*tiny_words(tmp_path, copy.root), *parts])
    weights, theirs = (load_file(run.model / "model.safetensors") for run in (copy, tiny_run))
    for name, weight in weights.items():
        torch.testing.assert_close(weight, theirs[name], atol=1e-4, rtol=0)


@pytest.mark.slow
def test_checkpoint_of_another_run_requires_its_settings(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    first = run_train(tiny_words(tmp_path, tmp_path / "run"))
    words = [*tiny_words(tmp_path, tmp_path / "other"), "--resume", str(first.checkpoints / "checkpoint-10")]
    with pytest.raises(UsageError, match=r"checkpoint-10 is of a run with other settings: seed: 42 -> 7"):
        run_train([*words, "--seed", "7"])
    capsys.readouterr()
    other = run_train(words)
    assert f"{other.metrics} does not exist: earlier log lines are lost" in capsys.readouterr().err
    assert sha256(other.model / "model.safetensors") == sha256(first.model / "model.safetensors")


@pytest.mark.slow
def test_run_without_a_checkpoint_starts_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = tiny_words(tmp_path, tmp_path / "run")
    folder = run_train(words)
    whole = sha256(folder.model / "model.safetensors")
    folder.heldout.unlink()
    shutil.rmtree(folder.checkpoints)
    run_train(words)
    assert sha256(folder.model / "model.safetensors") == whole
    assert [row["step"] for row in read_jsonl(folder.metrics) if "loss" in row] == [5, 10, 15, 20]


WSD = ["--lr_scheduler_type", "warmup_stable_decay", "--save_total_limit", "9"]


@pytest.mark.slow
def test_branch_decays_from_any_stable_checkpoint_in_its_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trunk = run_train([*tiny_words(tmp_path, tmp_path / "trunk"), *WSD, "--logging_steps", "1", "--save_steps", "4"])
    before = {path: sha256(path) for path in trunk.root.rglob("*") if path.is_file()}
    stable = trunk.checkpoints / "checkpoint-8"
    words = [*tiny_words(tmp_path, tmp_path / "branch"), *WSD, "--logging_steps", "1", "--save_steps", "2"]
    words += ["--branch_from", str(stable), "--max_steps", "12"]
    branch = run_train(words)
    assert before == {path: sha256(path) for path in trunk.root.rglob("*") if path.is_file()}
    rows = {row["step"]: row for row in read_jsonl(branch.metrics) if "loss" in row}
    theirs = {row["step"]: row for row in read_jsonl(trunk.metrics) if "loss" in row}
    assert list(rows) == list(range(1, 13))
    assert [rows[step]["loss"] for step in range(1, 10)] == [theirs[step]["loss"] for step in range(1, 10)]
    rates = [rows[step]["learning_rate"] for step in range(8, 13)]
    assert rates == pytest.approx([0.01, 0.01, 0.0075, 0.005, 0.0025])
    assert [row["step"] for row in read_jsonl(branch.samples)] == [0, 4, 8, 10, 12]
    # An interrupted branch resumes like any run, and ends the same.
    whole = sha256(branch.model / "model.safetensors")
    branch.heldout.unlink()
    (branch.checkpoints / "checkpoint-12" / "optimizer.pt").unlink()
    run_train(words)
    assert sha256(branch.model / "model.safetensors") == whole
    for change, message in [
        (["--branch_from", str(trunk.checkpoints / "checkpoint-20")], "at step 20, and the run ends at step 12"),
        (
            ["--branch_from", str(trunk.checkpoints / "checkpoint-20"), "--max_steps", "25"],
            "below its peak.*--init_from",
        ),
        (["--seed", "3"], "only length and schedule, but these settings differ: seed: 42 -> 3"),
        (["--output_dir", str(trunk.root)], "starts a new run"),
    ]:
        with pytest.raises(UsageError, match=message):
            run_train([*words, "--output_dir", str(tmp_path / "other"), *change])
