"""Benchmarks at checkpoints: training is the same without them, and their scores are logged once."""

import json
import os
import random
import signal

import numpy as np
import pytest
import torch
from conftest import processes, run_train, tiny_words
from transformers import TrainerControl, TrainerState, TrainingArguments

from gpt2small_hf.config.resolve import read_config
from gpt2small_hf.errors import UsageError
from gpt2small_hf.evaluation.checkpoint_tasks import CheckpointTasks, load_tasks, undisturbed
from gpt2small_hf.runs.files import sha256
from gpt2small_hf.runs.layout import RunFolder
from gpt2small_hf.runs.results import MetricsRow
from gpt2small_hf.training.benchmark_callback import BenchmarkCallback
from gpt2small_hf.training.paths import check_paths
from gpt2small_hf.training.progress import ProgressLine

pytest.importorskip("lm_eval")

ANIMALS = ("fox", "dog", "hare", "crow")
# An epoch has 18 steps; dropout draws a random number for each micro-batch.
DROPOUT = ["--embd_pdrop", "0.1", "--save_steps", "5", "--prompts", "Once the fox"]


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    """A task of choices, and a group of two tasks of pairs."""
    folder = tmp_path_factory.mktemp("questions")
    asked = [
        {"query": f"Once the {noun} {n}", "choices": ["saw", "met", "left"], "gold": n % 3}
        for n in range(3)
        for noun in ANIMALS
    ]
    (folder / "verbs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    (folder / "pairs").mkdir()
    for name in ("one", "two"):
        pairs = [{"sentence_good": f"The {one} saw {name}.", "sentence_bad": f"{one} the saw."} for one in ANIMALS]
        (folder / "pairs" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    return folder


def flags(questions):
    return ["--eval_task_data", str(questions), "--eval_tasks_limit", "8"]


def rows_of(run):
    return [row for row in MetricsRow.load_lines(run.metrics) if row.benchmarks is not None]


@pytest.fixture(scope="module")
def both(questions, tmp_path_factory):
    """A run without benchmarks and the same one with them."""
    place = tmp_path_factory.mktemp("both")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        plain = run_train([*tiny_words(place, place / "plain"), *DROPOUT])
        return plain, run_train([*tiny_words(place, place / "run"), *DROPOUT, *flags(questions)])


@pytest.mark.slow
def test_benchmarks_do_not_change_what_is_trained_or_saved(both):
    plain, run = both
    for name in ("checkpoint-15", "checkpoint-20"):
        for file in ("model.safetensors", "optimizer.pt", "generation_config.json", "config.json", "tokenizer.json"):
            assert sha256(run.checkpoints / name / file) == sha256(plain.checkpoints / name / file), (name, file)
    files = {path.name for path in plain.model.iterdir()}
    assert {path.name for path in run.model.iterdir()} == files
    assert all(sha256(run.model / name) == sha256(plain.model / name) for name in files)
    losses = [
        [(row.step, row.loss, row.eval_loss) for row in MetricsRow.load_lines(one.metrics) if not row.benchmarks]
        for one in both
    ]
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_scores_are_logged_at_each_checkpoint(both):
    rows = rows_of(both[1])
    assert [row.step for row in rows] == [5, 10, 15, 20]
    for row in rows:
        scores = {one.task: one for one in row.benchmarks.scores}
        assert {name: one.scores["accuracy"].n_items for name, one in scores.items()} == {"pairs": 8, "verbs": 8}
        assert {name: one.chance for name, one in scores.items()} == {"pairs": 0.5, "verbs": pytest.approx(1 / 3)}
        assert scores["verbs"].scores.keys() == {"accuracy", "accuracy_norm", "bits_per_byte"}
        assert row.benchmarks.seconds > 0
    bits = [row.benchmarks.scores[-1].scores["bits_per_byte"].value for row in rows]
    assert bits[-1] < bits[0]


def train_until_second_measure(words):
    """Train, and end by SIGKILL when the second checkpoint is to be measured."""
    torch.set_num_threads(1)
    measure, calls = CheckpointTasks.measure, []

    def call(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return measure(*args, **kwargs)

    CheckpointTasks.measure = call
    run_train(words)


@pytest.mark.slow
def test_killed_run_resumes_to_the_same_weights_and_scores(both, questions, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*tiny_words(tmp_path, tmp_path / "run"), *DROPOUT, *flags(questions)]
    process = processes.Process(target=train_until_second_measure, args=(words,))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert [row.step for row in rows_of(RunFolder(tmp_path / "run"))] == [5]
    again = run_train(words)
    assert sha256(again.model / "model.safetensors") == sha256(both[0].model / "model.safetensors")
    found, wanted = ([(row.step, row.benchmarks.scores) for row in rows_of(run)] for run in (again, both[1]))
    assert found == wanted


def test_measuring_restores_random_states_and_modes(tiny_model):
    tiny_model.train()
    tiny_model.model.layers[0].eval()
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    modes, settings = [module.training for module in tiny_model.modules()], tiny_model.generation_config
    with undisturbed(tiny_model):
        assert not any(module.training for module in tiny_model.modules())
        assert not torch.is_grad_enabled()
        tiny_model.generation_config.max_new_tokens = 3
        random.random(), np.random.rand(), torch.rand(3)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    assert [module.training for module in tiny_model.modules()] == modes
    assert tiny_model.generation_config is settings
    assert settings.max_new_tokens != 3
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--eval_task_data", "absent"], "absent"),
        (["--eval_tasks", "blimp", "--save_strategy", "no"], "--save_strategy"),
        (["--eval_tasks_limit", "5"], "--eval_tasks"),
        (["--eval_tasks", "blimp", "--eval_tasks_limit", "0"], "--eval_tasks_limit"),
    ],
)
def test_settings_without_effect_are_refused_before_training(words, value, tmp_path):
    with pytest.raises(UsageError, match=value):
        check_paths(read_config([*tiny_words(tmp_path, tmp_path / "run"), *words]))


@pytest.mark.slow
def test_unknown_task_is_refused_before_training(questions):
    with pytest.raises(UsageError, match="--eval_tasks no_such_task"):
        load_tasks(["no_such_task"], questions, None)


@pytest.mark.slow
def test_a_large_share_of_the_time_is_reported_once(questions, tiny_model, tiny_tokenizer, tmp_path, capsys):
    times = iter(range(0, 10_000, 10))
    callback = BenchmarkCallback(
        tmp_path / "metrics.jsonl",
        load_tasks(None, questions, 1),
        tiny_tokenizer,
        progress=ProgressLine(1),
        clock=lambda: float(next(times)),
    )
    args, control = TrainingArguments(output_dir=str(tmp_path), use_cpu=True), TrainerControl()
    state = TrainerState(global_step=0, max_steps=9)
    tiny_model.resize_token_embeddings(len(tiny_tokenizer))
    callback.on_train_begin(args, state, control, model=tiny_model)
    for step in (3, 6, 6):
        state.global_step = step
        callback.on_save(args, state, control, model=tiny_model)
    said = capsys.readouterr().err
    assert said.count("--eval_tasks_limit") == 1
    assert [row["step"] for row in map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())] == [3, 6]
