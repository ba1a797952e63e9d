"""The search for the largest micro-batch keeps the rows per step, and the result up to rounding."""

import pytest
import torch
from conftest import run_train, tiny_words
from safetensors.torch import load_file

from gpt2small_hf import GPT2SmallConfig, GPT2SmallForCausalLM
from gpt2small_hf.config.trainer import TrainerSettings
from gpt2small_hf.errors import RunStoppedError, UsageError
from gpt2small_hf.runs.files import read_json
from gpt2small_hf.training.batch_size import Trial, find_batch_size, trials_table
from gpt2small_hf.training.trainer import CausalLMTrainer
from gpt2small_hf.training.trainer_arguments import training_arguments


def arguments(place, rows, micro_batches):
    settings = TrainerSettings(
        per_device_train_batch_size=rows, gradient_accumulation_steps=micro_batches, use_cpu=True
    )
    return training_arguments(settings, place)


def model_of(width, context=32):
    sizes = {"hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 300}
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
    torch.manual_seed(0)
    return GPT2SmallForCausalLM(GPT2SmallConfig(max_position_embeddings=context, **sizes, **ids))


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "micro_batches"), [(2, 6), (12, 1), (1, 7)])
def test_largest_divisor_that_fits_keeps_the_rows_per_step(tmp_path, rows, micro_batches):
    args, model = arguments(tmp_path, rows, micro_batches), model_of(16)
    before = torch.get_rng_state(), [p.detach().clone() for p in model.parameters()]
    size, accumulation, trials = find_batch_size(model, args, 32)
    wanted = rows * micro_batches
    assert [trial.rows for trial in trials] == [n for n in range(1, wanted + 1) if wanted % n == 0]
    assert (size, accumulation) == (wanted, 1)
    assert all(trial.tokens_per_second > 0 and trial.gib > 0 for trial in trials)
    assert f"--per_device_train_batch_size {wanted} --gradient_accumulation_steps 1" in trials_table(
        trials, size, accumulation
    )
    assert torch.equal(torch.get_rng_state(), before[0])
    assert all(torch.equal(a, b) and a.grad is None for a, b in zip(model.parameters(), before[1], strict=True))


@pytest.mark.slow
def test_size_that_does_not_fit_ends_the_search(tmp_path, monkeypatch):
    # A failing allocator: no machine has 2^40 bytes.
    args, model = arguments(tmp_path, 8, 1), model_of(16)
    forward = GPT2SmallForCausalLM.forward

    def hungry(self, input_ids, **kwargs):
        if len(input_ids) > 2:
            torch.empty(1 << 50)
        return forward(self, input_ids=input_ids, **kwargs)

    monkeypatch.setattr(GPT2SmallForCausalLM, "forward", hungry)
    size, accumulation, trials = find_batch_size(model, args, 32)
    assert [(trial.rows, trial.tokens_per_second is None) for trial in trials] == [(1, False), (2, False), (4, True)]
    assert (size, accumulation) == (2, 4)
    assert "4 rows" in (table := trials_table(trials, size, accumulation))
    assert "does not fit" in table
    monkeypatch.setattr(GPT2SmallForCausalLM, "forward", lambda self, **kwargs: torch.empty(1 << 50))
    with pytest.raises(UsageError, match="not even one row of 32 tokens"):
        find_batch_size(model, args, 32)


def test_memory_on_a_cpu_is_extrapolated():
    from gpt2small_hf.training.batch_size import _will_fit

    grown = [Trial(1, 1.0, 1.0), Trial(2, 2.0, 1.0)]
    assert _will_fit(grown, 3)
    assert not _will_fit(grown, 1 << 20)


@pytest.mark.slow
def test_run_records_and_reuses_the_size_with_the_same_result(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [*tiny_words(tmp_path, tmp_path / "found"), "--find_batch_size", "--gradient_accumulation_steps", "2"]
    found = run_train(words)
    assert "using --per_device_train_batch_size 8 --gradient_accumulation_steps 1" in capsys.readouterr().out
    resolved = read_json(found.resolved)
    assert resolved["trainer"]["per_device_train_batch_size"] == 8
    assert resolved["rows_per_step"] == 8
    given = run_train([*tiny_words(tmp_path, tmp_path / "given"), "--gradient_accumulation_steps", "2"])
    weights = [load_file(folder.model / "model.safetensors") for folder in (found, given)]
    for name in weights[0]:
        torch.testing.assert_close(weights[0][name], weights[1][name], atol=1e-5, rtol=0)
    found.heldout.unlink()
    (found.checkpoints / "checkpoint-20" / "optimizer.pt").unlink()
    run_train(words)
    assert "micro-batch" not in capsys.readouterr().out.split("resuming from")[-1]
    words[words.index("--output_dir") + 1] = str(tmp_path / "other")
    other = run_train([*words, "--resume", str(found.checkpoints / "checkpoint-10")])
    assert "micro-batch" not in capsys.readouterr().out.split("resuming from")[-1]
    assert read_json(other.resolved)["trainer"]["per_device_train_batch_size"] == 8


@pytest.mark.gpu
def test_search_on_a_gpu_ends_by_running_out_of_memory(tmp_path):
    args = training_arguments(TrainerSettings(per_device_train_batch_size=1 << 20, bf16=True), tmp_path)
    size, accumulation, trials = find_batch_size(model_of(768, 1024), args, 1024)
    assert trials[-1].tokens_per_second is None
    assert size == trials[-2].rows
    assert size * accumulation == 1 << 20


# ---- out of memory during training --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("step", "kept"), [(0, "none was saved"), (11, "checkpoint-10")])
def test_out_of_memory_stops_a_run_with_remedies_and_its_last_checkpoint(tmp_path, monkeypatch, step, kept):
    """At step 0 a check before training runs out of memory."""
    compute_loss = CausalLMTrainer.compute_loss

    def too_much(trainer, *args, **kwargs):
        if trainer.state.global_step >= step:
            torch.empty(2**50)  # the allocator refuses
        return compute_loss(trainer, *args, **kwargs)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(CausalLMTrainer, "compute_loss", too_much)
    with pytest.raises(RunStoppedError, match=r"^out of memory \(.*--activation_checkpointing") as stopped:
        run_train(tiny_words(tmp_path, tmp_path / "run"))
    assert str(stopped.value).endswith(f"{kept}.")
    assert stopped.value.status == 3


@pytest.mark.slow
def test_debug_underflow_overflow_is_a_one_line_error(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = tiny_words(tmp_path, tmp_path / "run")
    with pytest.raises(RunStoppedError, match="--debug underflow_overflow found"):
        run_train([*words, "--debug", "underflow_overflow", "--learning_rate", "1e30", "--max_grad_norm", "0"])
    assert "Detected inf/nan" in capsys.readouterr().out
