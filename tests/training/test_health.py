"""Each symptom is reported once in a run that has it, and none in a healthy run."""

import math
import time

import pytest
import torch
from conftest import tiny_config
from torch.optim.lr_scheduler import LambdaLR

from gpt2small_hf import GPT2SmallForCausalLM
from gpt2small_hf.config.trainer import TrainerSettings
from gpt2small_hf.runs.files import read_jsonl, write_jsonl
from gpt2small_hf.runs.results import MetricsRow
from gpt2small_hf.training.callbacks import MetricsLog
from gpt2small_hf.training.health import HealthCallback, Symptoms, gain_of, is_spike
from gpt2small_hf.training.trainer import CausalLMTrainer
from gpt2small_hf.training.trainer_arguments import training_arguments

# Each token is followed by its successor: learned in a few dozen steps.
COUNTING = [
    {"input_ids": ids, "labels": ids} for ids in (torch.arange(start, start + 16) % 100 for start in range(100))
]
# Random labels, which can only be memorised.
LOTTERY = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 100, (60, 16), generator=torch.Generator())]


def make(place, rows=COUNTING, heldout=None, *, optimizers=(None, None), config=None, seed=0, **changes):
    torch.manual_seed(seed)
    settings = {"max_steps": 40, "per_device_train_batch_size": 8, "logging_steps": 1, "learning_rate": 1e-2}
    settings |= {"save_strategy": "no", "use_cpu": True, "report_to": "none", "seed": seed}
    model = GPT2SmallForCausalLM(tiny_config(**(config or {})))
    metrics = place / "metrics.jsonl"
    return CausalLMTrainer(
        model,
        training_arguments(TrainerSettings(**(settings | changes)), place / "checkpoints"),
        train_dataset=rows,
        eval_dataset=heldout,
        optimizers=(None, None) if optimizers == (None, None) else optimizers(model),
        callbacks=[MetricsLog(metrics), HealthCallback(metrics)],
    )


def symptoms(place):
    """Return the logged symptoms with their steps, in order."""
    return [(row["symptom"], row["step"]) for row in read_jsonl(place / "metrics.jsonl") if "symptom" in row]


# ---- healthy runs -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["cosine_with_min_lr", "constant"])
@pytest.mark.parametrize("batch", [1, 2])
def test_short_and_noisy_trainings_have_no_symptom(tmp_path, capsys, batch, schedule):
    for seed in range(2):
        trainer = make(
            tmp_path / str(seed),
            [row for i, row in enumerate(COUNTING) if i % 5],
            COUNTING[::5],
            per_device_train_batch_size=batch,
            seed=seed,
            lr_scheduler_type=schedule,
            lr_scheduler_kwargs=None,
            eval_strategy="steps",
            eval_steps=10,
            max_steps=35,
        )
        trainer.train()
        assert symptoms(tmp_path / str(seed)) == []
    assert "symptom" not in capsys.readouterr().err


# ---- runs with a symptom ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_batch_of_random_labels_is_a_spike(tmp_path, capsys):
    trainer = make(tmp_path, max_steps=60)
    collate, calls = trainer.data_collator, []

    def spoiled(rows):
        calls.append(len(rows))
        batch = collate(rows)
        return batch | ({"labels": batch["labels"].flip(1)} if len(calls) == 45 else {})

    trainer.data_collator = spoiled
    trainer.train()
    assert symptoms(tmp_path) == [("loss spike", 45)]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("symptom: step 45, loss spike: the loss jumped to ")
    (row,) = [row for row in read_jsonl(tmp_path / "metrics.jsonl") if "symptom" in row]
    assert row.keys() == {"step", "symptom", "says"}
    assert line.endswith(row["says"])


@pytest.mark.slow
def test_spike_within_an_interval_is_detected(tmp_path):
    trainer = make(tmp_path, max_steps=100, logging_steps=4)
    head = trainer.model.lm_head
    head.register_forward_hook(lambda module, inputs, out: -out if trainer.state.global_step == 85 else out)
    trainer.train()
    assert symptoms(tmp_path) == [("loss spike", 88)]


@pytest.mark.slow
def test_rate_too_low_to_learn_is_a_plateau(tmp_path, capsys):
    make(tmp_path, learning_rate=1e-7, max_steps=80).train()
    assert [name for name, _ in symptoms(tmp_path)] == ["plateau"]
    assert "try a --learning_rate three times lower and one three times higher" in capsys.readouterr().err


@pytest.mark.slow
def test_random_labels_are_a_plateau(tmp_path):
    torch.manual_seed(0)
    fresh = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 100, (960, 16))]
    make(tmp_path, fresh, max_steps=120).train()
    assert [name for name, _ in symptoms(tmp_path)] == ["plateau"]


@pytest.mark.slow
def test_ten_memorised_rows_are_overfitting(tmp_path, capsys):
    trainer = make(tmp_path, LOTTERY[:10], LOTTERY[10:], eval_strategy="steps", eval_steps=10, max_steps=120)
    trainer.train()
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    ((name, step),) = symptoms(tmp_path)
    assert name == "overfitting"
    evaluated = {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row and row["step"] <= step}
    best = min(evaluated, key=evaluated.__getitem__)
    assert step == max(evaluated) >= best + 30
    assert f"its best, {evaluated[best]:.3f} at step {best}, for 3 evaluations" in capsys.readouterr().err


def optimizer_with(share):
    def pair(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return optimizer, LambdaLR(optimizer, share)

    return pair


@pytest.mark.slow
def test_rate_that_never_rises_is_reported_after_the_warm_up(tmp_path, capsys):
    # As if a step were counted for each of 100 micro-batches.
    make(tmp_path, optimizers=optimizer_with(lambda step: min(1.0, step / 500)), warmup_steps=5).train()
    assert symptoms(tmp_path)[0] == ("learning rate", 10)
    assert "never above half of its peak of 1.0e-02, though warm-up should take 5 steps" in capsys.readouterr().err


@pytest.mark.slow
def test_rate_of_zero_is_reported(tmp_path):
    make(tmp_path, learning_rate=0.0).train()
    assert ("learning rate", 7) in symptoms(tmp_path)


@pytest.mark.slow
def test_gradient_norm_above_100_is_reported(tmp_path, capsys):
    trainer = make(tmp_path, max_steps=5)
    with torch.no_grad():
        trainer.model.lm_head.weight.mul_(1000)
    trainer.train()
    assert symptoms(tmp_path) == [("gradient norm", 1)]
    assert "where 0.1 to 10 is usual" in capsys.readouterr().err


class SlowRows(list):
    """Rows that are slow to read."""

    def __getitem__(self, row):
        time.sleep(0.01)
        return super().__getitem__(row)


@pytest.mark.slow
def test_waiting_for_rows_is_reported(tmp_path, capsys):
    make(tmp_path, SlowRows(COUNTING), max_steps=8).train()
    assert symptoms(tmp_path) == [("waiting for data", 5)]
    assert "raise --dataloader_num_workers" in capsys.readouterr().err


# ---- once a run ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_resumed_run_reports_each_symptom_once(tmp_path, capsys):
    settings = {"eval_strategy": "steps", "eval_steps": 5, "save_strategy": "steps", "save_steps": 60}
    settings |= {"save_total_limit": None, "learning_rate": 2e-2}
    sets = LOTTERY[:10], LOTTERY[10:20]
    make(tmp_path, *sets, max_steps=60, **settings).train()
    said = symptoms(tmp_path)
    assert [name for name, _ in said] == ["overfitting"]
    checkpoint = str(tmp_path / "checkpoints" / "checkpoint-60")
    capsys.readouterr()
    make(tmp_path, *sets, max_steps=90, **settings).train(resume_from_checkpoint=checkpoint)
    assert symptoms(tmp_path) == said
    assert "symptom" not in capsys.readouterr().err
    # Without the earlier log, the same steps report the symptom again.
    write_jsonl(tmp_path / "metrics.jsonl", [])
    make(tmp_path, *sets, max_steps=90, **settings).train(resume_from_checkpoint=checkpoint)
    assert [name for name, _ in symptoms(tmp_path)] == ["overfitting"]


@pytest.mark.slow
def test_resumed_run_removes_symptoms_after_its_checkpoint(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 40, "max_steps": 60}
    trainer = make(tmp_path, **settings)
    spike = trainer.model.lm_head.register_forward_hook(
        lambda m, i, out: -out if trainer.state.global_step == 50 else out
    )
    trainer.train()
    assert symptoms(tmp_path) == [("loss spike", 51)]
    spike.remove()
    make(tmp_path, **settings).train(resume_from_checkpoint=str(tmp_path / "checkpoints" / "checkpoint-40"))
    assert symptoms(tmp_path) == []


# ---- without training ---------------------------------------------------------------------------------------------


def well(n=100, *, end=2500, noise=0.04, seed=0):
    """Return rows like those of a healthy run: a power law in the steps, noise, warm-up and cosine."""
    draws = (torch.randn(n, 2, generator=torch.Generator().manual_seed(seed)) * noise).tolist()
    steps = [end * (i + 1) // n for i in range(n)]
    for step, (a, b) in zip(steps, draws, strict=True):
        rate = step / 100 if step < 100 else 0.55 + 0.45 * math.cos(math.pi * (step - 100) / (end - 100))
        loss = 2 + 5 * (1 + step / 50) ** -0.4 + a
        yield {"step": step, "loss": loss, "loss_max": loss + 0.3 + b, "grad_norm_max": 1.0, "learning_rate": rate}


def named(rows, **changes):
    judge = Symptoms(**({"peak_rate": 1.0, "warmup_steps": 100, "total_steps": 2500} | changes))
    return [symptom.symptom for row in rows for symptom in judge.judge(MetricsRow.of(**row))]


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.1, 0.5])
def test_noise_is_not_a_symptom(noise):
    assert [named(well(noise=noise, seed=seed)) for seed in range(40)] == [[]] * 40


def test_skewed_losses_of_single_rows_are_not_spikes():
    for seed in range(40):
        skewed = torch.randn(500, generator=torch.Generator().manual_seed(seed)).mul(0.4).exp().tolist()
        assert named({"step": i, "loss": 2 * factor} for i, factor in enumerate(skewed)) == []


def test_missing_and_not_finite_values_are_ignored():
    rows = [row | {"loss": None, "loss_max": math.nan, "grad_norm_max": math.inf} for row in well()]
    assert named([{"step": 0, "eval_loss": None}, *rows, {"step": 2500, "train_runtime": 7.0}]) == []


@pytest.mark.parametrize("share", [0.5, 1.0, 9.0])
def test_spike_is_detected_in_the_mean_and_maximum_of_an_interval(share):
    for key in ("loss", "loss_max"):
        rows = list(well())
        rows[60][key] *= 1 + share
        assert named(rows) == ["loss spike"]


def test_early_spike_requires_a_doubled_loss():
    before = [7.0 - 0.1 * i for i in range(10)]
    assert not is_spike(9.0, before)
    assert is_spike(14.0, before)
    assert not is_spike(14.0, before[:9])
    assert is_spike(9.0, [*before, *before])


def test_gain_and_its_error_are_those_of_a_linear_fit():
    steps = torch.arange(0, 1000, 10).double().numpy()
    line = 4 - 0.001 * steps
    assert gain_of(steps, line) == (pytest.approx(0.99), pytest.approx(0, abs=1e-9))
    gains = []
    for seed in range(200):
        noise = torch.randn(100, generator=torch.Generator().manual_seed(seed)).double().numpy()
        gain, error = gain_of(steps, line + 0.05 * noise)
        gains.append((gain - 0.99) / error)
    assert float(torch.tensor(gains).std()) == pytest.approx(1, abs=0.15)


@pytest.mark.parametrize("rate", [1.0, 0.4])
def test_constant_loss_is_a_plateau_while_the_rate_is_high(rate):
    rows = [row | {"loss": 3.0 + 0.01 * (-1) ** i, "learning_rate": rate} for i, row in enumerate(well())]
    assert named([row for row in rows if row["step"] < 1500]) == (["plateau"] if rate == 1 else ["learning rate"])


def test_slowly_falling_loss_is_not_a_plateau():
    assert named(row | {"loss": 3 - 3e-5 * row["step"], "loss_max": 3.0} for row in well()) == []


def test_constant_loss_during_warm_up_is_not_a_plateau():
    rows = [row | {"loss": 3.0} for row in well()]
    assert named(rows, warmup_steps=2000) == []


EVALUATED = {"better": [4.0, 3.9, 3.8, 3.7, 3.6, 3.5], "worse": [4.0, 3.9, 3.95, 4.0, 4.1, 4.2]}
EVALUATED |= {"level": [4.0, 3.9, 3.901, 3.905, 3.902, 3.903], "to and fro": [4.0, 3.9, 3.95, 3.85, 3.9, 3.95]}


@pytest.mark.parametrize(("name", "says"), [("better", 0), ("worse", 1), ("level", 0), ("to and fro", 0)])
def test_overfitting_requires_three_consecutive_evaluations_above_the_best(name, says):
    training, rows = list(well()), []
    for i, loss in enumerate(EVALUATED[name]):
        rows += [*training[10 * i : 10 * i + 10], {"step": 250 * (i + 1), "eval_loss": loss}]
    assert named(rows) == ["overfitting"] * says
    if says:
        assert named(row | {"epoch": 0.9} for row in rows) == []  # no row was seen twice
        rising = [row | ({"loss": 3 + row["step"] / 10_000} if "loss" in row else {}) for row in rows]
        assert "overfitting" not in named(rising)  # it is a divergence


def test_log_that_starts_late_reports_no_warm_up_symptom():
    assert named(row for row in well() if row["step"] > 1500) == []


def test_two_intervals_of_waiting_are_not_a_symptom():
    waits = [0.0, 0.5, 0.5, 0.0, 0.5, 0.5, 0.5, 0.5, 0.0]
    rows = [row | {"data_wait": wait} for row, wait in zip(well(9), waits, strict=True)]
    assert named(rows) == []
    assert named([*rows, *[rows[-1] | {"data_wait": 0.11}] * 5]) == ["waiting for data"]


def test_held_out_loss_above_its_start_is_reported_once_as_divergence():
    found = Symptoms(peak_rate=1.0, warmup_steps=1, total_steps=20)
    losses = {0: 5.0, 5: 4.0, 10: 5.005, 15: 133.0, 20: 140.0}
    named = [row for step, loss in losses.items() for row in found.judge(MetricsRow.of(step, eval_loss=loss))]
    assert [(row.step, row.symptom) for row in named] == [(15, "divergence")]
    assert "133.000" in named[0].says
    assert "5.000" in named[0].says


def test_falling_training_loss_is_not_a_divergence():
    found = Symptoms(peak_rate=1.0, warmup_steps=1, total_steps=20)
    rows = [MetricsRow.of(0, eval_loss=5.0), MetricsRow.of(9, loss=0.1), MetricsRow.of(10, eval_loss=6.0)]
    assert not [symptom for row in rows for symptom in found.judge(row) if symptom.symptom == "divergence"]
