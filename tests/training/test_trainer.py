"""The guard names, skips and counts each kind of bad step; good steps are those of the stock Trainer."""

import copy
import math
import os
import time

import numpy as np
import pytest
import torch
from conftest import processes, run_train, tiny_config, tiny_words
from datasets import Dataset
from torch import distributed as dist
from torch import nn
from transformers import (
    DataCollatorForLanguageModeling,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from gpt2small_hf import GPT2SmallForCausalLM
from gpt2small_hf.errors import RunStoppedError
from gpt2small_hf.runs.files import read_jsonl
from gpt2small_hf.training.gradient_guard import KINDS, GradientGuard
from gpt2small_hf.training.trainer import CausalLMTrainer

ROWS = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 100, (480, 8), generator=torch.Generator())]


def make(kind, place, model=None, **changes):
    torch.manual_seed(0)
    settings = {"max_steps": 40, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "logging_steps": 1}
    settings |= {"learning_rate": 1e-2, "logging_nan_inf_filter": False, "save_strategy": "no", "use_cpu": True}
    names = ("spike_factor", "max_bad_steps", "flops_per_token", "peak_flops", "train_dataset", "data_collator")
    own = {name: changes.pop(name) for name in names if name in changes}
    settings |= {"report_to": "none"}
    args = TrainingArguments(
        output_dir=str(place), disable_tqdm=True, dataloader_pin_memory=False, **(settings | changes)
    )
    return kind(model or GPT2SmallForCausalLM(tiny_config()), args, **({"train_dataset": ROWS} | own))


def spoil(trainer, kind, steps, weight="model.layers.1.mlp.up_proj.weight"):
    """Spoil the given steps (counted from 0): a weight's gradient or the logits."""
    parameter = trainer.model.get_parameter(weight)
    bad = {
        "non_finite": lambda g: g.index_fill(0, torch.tensor([1]), torch.inf),
        "overflow": lambda g: torch.full_like(g, 1e25),
        "spike": lambda g: torch.full_like(g, 1e6),
    }
    if kind == "loss":
        trainer.model.lm_head.register_forward_hook(
            lambda module, inputs, logits: logits * math.nan if trainer.state.global_step in steps else logits
        )
    else:
        parameter.register_hook(lambda g: bad[kind](g) if trainer.state.global_step in steps else g)
    return weight


@pytest.mark.slow
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5])
def test_training_without_bad_steps_equals_the_stock_trainer(tmp_path, max_grad_norm):
    ours, stock = (make(kind, tmp_path, max_grad_norm=max_grad_norm) for kind in (CausalLMTrainer, Trainer))
    for trainer in (ours, stock):
        trainer.train()
    for mine, theirs in zip(ours.model.parameters(), stock.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)
    for mine, theirs in zip(ours.state.log_history[:-1], stock.state.log_history[:-1], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], abs=1e-4)
        assert mine["clipped"] == (mine["grad_norm"] > max_grad_norm > 0)
    assert sum(ours.detector.skipped.values()) == 0


def other_model(**changes):
    sizes = {"vocab_size": 101, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2}
    sizes |= {"bos_token_id": 100, "eos_token_id": 100}
    return GPT2LMHeadModel(GPT2Config(**(sizes | changes)))


class GuardedTrainer(GradientGuard, Trainer):
    """A user's own Trainer with the mix-in."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_mix_in_skips_bad_steps_of_a_plain_trainer(kind, tmp_path):
    torch.manual_seed(0)
    trainer = make(GuardedTrainer, tmp_path, other_model(), weight_decay=0.1)
    spoil(trainer, kind, [36], "transformer.h.1.mlp.c_fc.weight")
    weights = {}

    def remember(*args, **kwargs):
        weights[trainer.state.global_step] = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])

    trainer.callback_handler.callbacks[0].on_step_begin = remember
    trainer.train()
    assert [step for step in range(39) if torch.equal(weights[step], weights[step + 1])] == [36]
    assert trainer.detector.skipped == {**dict.fromkeys(KINDS, 0), kind: 1}
    logged = [row for row in trainer.state.log_history if "loss" in row]
    assert logged[-1][f"skipped_{kind}"] == 1
    assert [row["step"] for row in logged if not math.isfinite(row["loss"])] == ([37] if kind == "loss" else [])
    assert 1 < trainer.state.log_history[-1]["train_loss"] < 5


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_other_models_and_plain_datasets_train_as_with_the_stock_trainer(model, tmp_path, tiny_tokenizer):
    """Rows of different lengths that a collator pads; the tokens of the rows are counted, not the padding."""
    lengths = [3 + n % 5 for n in range(40)]
    rows = Dataset.from_dict({"input_ids": [list(range(n, n + length)) for n, length in enumerate(lengths)]})
    tiny_tokenizer.pad_token = tiny_tokenizer.eos_token
    collate = DataCollatorForLanguageModeling(tiny_tokenizer, mlm=False)

    def train(kind):
        torch.manual_seed(0)
        if model == "gpt2":
            built = other_model(vocab_size=300, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        else:
            sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
            built = LlamaForCausalLM(LlamaConfig(vocab_size=300, **sizes))
        given = {"train_dataset": rows, "data_collator": collate, "num_train_epochs": 2, "max_steps": -1}
        trainer = make(kind, tmp_path, built, **given)
        trainer.train()
        trainer.eval_dataset = rows
        return trainer, trainer.evaluate()["eval_loss"], trainer.predict(rows.select(range(2))).predictions

    (ours, loss, logits), (stock, expected, _) = train(CausalLMTrainer), train(Trainer)
    for mine, theirs in zip(ours.model.parameters(), stock.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)
    assert loss == pytest.approx(expected, abs=1e-5)
    assert logits.shape[-1] == 300
    assert ours.state.num_input_tokens_seen == 2 * sum(lengths)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_logits_are_skipped_only_by_models_that_take_the_argument(tmp_path):
    peft = pytest.importorskip("peft")
    ours, other = GPT2SmallForCausalLM(tiny_config()), other_model()
    adapted = [
        peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(task_type="CAUSAL_LM", fan_in_fan_out=model is other))
        for model in (ours, other)
    ]
    models = [ours, adapted[0], other, adapted[1]]
    found = [make(CausalLMTrainer, tmp_path, model).takes_skip_logits for model in models]
    assert found == [True, True, False, False]
    trainer = make(CausalLMTrainer, tmp_path)
    batch = {"input_ids": torch.ones(2, 8, dtype=torch.long), "labels": torch.ones(2, 8, dtype=torch.long)}
    assert trainer.prediction_step(trainer.model, batch, prediction_loss_only=False)[1].shape == (2, 8, 101)
    _, outputs = trainer.compute_loss(trainer.model, batch, return_outputs=True)
    assert outputs.logits is None


@pytest.mark.slow
@pytest.mark.parametrize(("optim", "max_grad_norm"), [("adamw_torch", 1.0), ("adamw_torch_fused", 0.0)])
@pytest.mark.parametrize("kind", KINDS)
def test_bad_step_changes_nothing_and_is_named_and_counted(kind, optim, max_grad_norm, tmp_path, capsys):
    trainer = make(CausalLMTrainer, tmp_path, max_grad_norm=max_grad_norm, optim=optim)
    bad_steps = (34, 37)
    weight = spoil(trainer, kind, bad_steps)
    before = []

    def remember(*args, **kwargs):
        before.append([p.detach().clone() for p in trainer.model.parameters()])

    trainer.callback_handler.callbacks[0].on_step_begin = remember
    trainer.train()
    after = [*before[1:], list(trainer.model.parameters())]
    changed = [
        any(not torch.equal(a, b) for a, b in zip(*pair, strict=True)) for pair in zip(before, after, strict=True)
    ]
    assert changed == [step not in bad_steps for step in range(40)]
    assert trainer.detector.skipped == {**dict.fromkeys(KINDS, 0), kind: 2}
    assert all(p.isfinite().all() for p in trainer.model.parameters())
    said = capsys.readouterr().err
    assert said.count(": skipped (") == 1
    assert f"step 35: skipped ({kind})" in said
    assert (weight in said) == (kind == "non_finite")
    logged = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["step"] for row in logged if not math.isfinite(row["loss"])] == ([35, 38] if kind == "loss" else [])
    assert all(row["loss"] > 1 for row in logged if math.isfinite(row["loss"]))  # never 0.0 for what was lost
    assert logged[-1][f"skipped_{kind}"] == 2


@pytest.mark.slow
def test_bad_steps_in_a_row_stop_a_run_at_its_last_good_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*tiny_words(tmp_path, tmp_path / "run"), "--max_bad_steps", "3"]
    train = CausalLMTrainer.train
    monkeypatch.setattr(
        CausalLMTrainer,
        "train",
        lambda self, **kw: (spoil(self, "non_finite", range(12, 99)), train(self, **kw))[1],
    )
    with pytest.raises(RunStoppedError, match=r"^3 steps.* step 15 .*: 3 non_finite.*checkpoint-10\.$"):
        run_train(words)
    assert {row["step"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")} >= {5, 10}
    assert not (tmp_path / "run" / "model").exists()


@pytest.mark.slow
def test_infinite_spike_factor_skips_no_spike(tmp_path):
    trainer = make(CausalLMTrainer, tmp_path, spike_factor=math.inf)
    spoil(trainer, "spike", (34, 37))
    trainer.train()
    assert not any(trainer.detector.skipped.values())
    assert max(row["grad_norm_max"] for row in trainer.state.log_history if "loss" in row) > 1e6


@pytest.mark.slow
def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    trainer = make(CausalLMTrainer, tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    with torch.no_grad():
        trainer.model.model.embed_positions.weight[-1] = torch.nan  # a position that no row of eight tokens reaches
    with pytest.raises(RunStoppedError, match=r"embed_positions\.weight is not finite at step 2, so nothing was saved"):
        trainer.train()
    assert list(tmp_path.iterdir()) == []


def train_as_one_of_two(rank, place, results):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": ""}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}/meet", rank=rank, world_size=2)
    # Rank 0 reads for both: accelerate joins their batches and cuts them up.
    trainer = make(CausalLMTrainer, place, accelerator_config={"dispatch_batches": True})
    assert trainer.args.world_size == 2
    if rank == 1:
        spoil(trainer, "loss", (34, 37))
    trainer.train()
    assert isinstance(trainer.model_wrapped, nn.parallel.DistributedDataParallel)
    weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    last = trainer.state.log_history[-2]
    results.put((rank, trainer.detector.skipped, weights.numpy(), last["loss"], last["num_input_tokens_seen"]))


@pytest.mark.slow
def test_bad_step_of_one_rank_is_skipped_by_all(tmp_path):
    results = processes.Queue()
    ranks = [processes.Process(target=train_as_one_of_two, args=(rank, tmp_path, results)) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        answers = {rank: rest for rank, *rest in (results.get(timeout=120) for _ in ranks)}
    finally:
        for process in ranks:
            process.join(10)
            process.kill()
    # Rank 0 saw gradients that are not finite, rank 1 where they came from.
    assert answers[0][0] == answers[1][0] == {**dict.fromkeys(KINDS, 0), "loss": 2}
    assert (answers[0][1] == answers[1][1]).all()
    assert np.isfinite(answers[0][1]).all()
    assert 1 < answers[0][2] < 5
    assert answers[0][3] == answers[1][3] == 40 * 2 * 2 * 2 * 8


class SlowRows(list):
    """Rows that are slow to read."""

    def __getitem__(self, row):
        time.sleep(0.005)
        return super().__getitem__(row)


@pytest.mark.slow
def test_log_counts_tokens_speed_and_waiting_of_an_interval(tmp_path):
    trainer = make(CausalLMTrainer, tmp_path, logging_steps=4, flops_per_token=1e6, peak_flops=1e12)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["num_input_tokens_seen"] for row in rows] == [step * 2 * 2 * 8 for step in range(4, 41, 4)]
    assert all(row["mfu"] == pytest.approx(row["tokens_per_second"] * 1e-6) for row in rows)
    assert all(0 < row["memory_gib"] < 64 for row in rows)
    assert all(0 <= row["data_wait"] < 1 for row in rows)
    assert {"mfu"} & trainer.state.log_history[-1].keys() == set()  # the last line is not of an interval
    assert trainer.state.log_history[-1]["num_input_tokens_seen"] == 40 * 2 * 2 * 8
    slow = make(CausalLMTrainer, tmp_path, logging_steps=4, max_steps=10)
    slow.train_dataset = SlowRows(ROWS)
    slow.train()
    assert slow.state.log_history[-1]["num_input_tokens_seen"] == 10 * 2 * 2 * 8
    assert slow.state.log_history[-1]["tokens_per_second"] > 0  # of the last two steps
    assert slow.state.log_history[-2]["data_wait"] > 2 * max(row["data_wait"] for row in rows)
    assert "mfu" not in slow.state.log_history[0]  # the device's peak is not known
