"""The guard: each kind of bad step is named, skipped and counted, and good ones are those of the stock Trainer."""

import math
import os
import time

import numpy as np
import pytest
import torch
from conftest import processes, run_train, tiny_config, tiny_words
from torch import distributed as dist
from torch import nn
from transformers import Trainer, TrainingArguments

from gpt2small_hf import GPT2SmallForCausalLM
from gpt2small_hf.errors import RunStoppedError
from gpt2small_hf.runs.files import read_jsonl
from gpt2small_hf.training.guard import KINDS
from gpt2small_hf.training.trainer import CausalLMTrainer

ROWS = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 100, (480, 8), generator=torch.Generator())]


def make(kind, place, **changes):
    torch.manual_seed(0)
    settings = {"max_steps": 40, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "logging_steps": 1}
    settings |= {"learning_rate": 1e-2, "logging_nan_inf_filter": False, "save_strategy": "no", "use_cpu": True}
    names = ("spike_factor", "max_bad_steps", "flops_per_token", "peak_flops")
    own = {name: changes.pop(name) for name in names if name in changes}
    settings |= {"report_to": "none"}
    args = TrainingArguments(
        output_dir=str(place), disable_tqdm=True, dataloader_pin_memory=False, **(settings | changes)
    )
    return kind(GPT2SmallForCausalLM(tiny_config()), args, train_dataset=ROWS, **own)


def spoil(trainer, kind, steps):
    """Make the given steps (counted from 0) bad, by what a weight's gradient or the logits are."""
    weight, parameter = "model.layers.1.mlp.up_proj.weight", trainer.model.model.layers[1].mlp.up_proj.weight
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


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5])
def test_without_bad_steps_it_trains_as_the_stock_trainer_does(tmp_path, max_grad_norm):
    ours, stock = (make(kind, tmp_path, max_grad_norm=max_grad_norm) for kind in (CausalLMTrainer, Trainer))
    for trainer in (ours, stock):
        trainer.train()
    for mine, theirs in zip(ours.model.parameters(), stock.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)
    for mine, theirs in zip(ours.state.log_history[:-1], stock.state.log_history[:-1], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], abs=1e-4)
        assert mine["clipped"] == (mine["grad_norm"] > max_grad_norm > 0)
    assert sum(ours.guard.skipped.values()) == 0


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_step_changes_nothing_is_named_and_counted_and_training_goes_on(
    kind, optim, max_grad_norm, tmp_path, capsys
):
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
    assert trainer.guard.skipped == {**dict.fromkeys(KINDS, 0), kind: 2}
    assert all(p.isfinite().all() for p in trainer.model.parameters())
    said = capsys.readouterr().err
    assert said.count("the step is skipped") == 1
    assert f"step 35: {kind}, gradient norm" in said
    assert (weight in said) == (kind == "non_finite")
    logged = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["step"] for row in logged if not math.isfinite(row["loss"])] == ([35, 38] if kind == "loss" else [])
    assert all(row["loss"] > 1 for row in logged if math.isfinite(row["loss"]))  # never 0.0 for what was lost
    assert logged[-1][f"skipped_{kind}"] == 2


def test_bad_steps_in_a_row_end_a_run_with_its_last_good_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*tiny_words(tmp_path, tmp_path / "run"), "--max_bad_steps", "3"]
    train = CausalLMTrainer.train
    monkeypatch.setattr(
        CausalLMTrainer,
        "train",
        lambda self, **kw: (spoil(self, "non_finite", range(12, 99)), train(self, **kw))[1],
    )
    with pytest.raises(RunStoppedError, match=r"3 bad steps in a row up to step 15 .3 non_finite.*checkpoint-10\.$"):
        run_train(words)
    assert {row["step"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")} >= {5, 10}
    assert not (tmp_path / "run" / "model").exists()


def test_an_infinite_spike_factor_skips_no_spike(tmp_path):
    trainer = make(CausalLMTrainer, tmp_path, spike_factor=math.inf)
    spoil(trainer, "spike", (34, 37))
    trainer.train()
    assert not any(trainer.guard.skipped.values())
    assert max(row["grad_norm_max"] for row in trainer.state.log_history if "loss" in row) > 1e6


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
    results.put((rank, trainer.guard.skipped, weights.numpy(), last["loss"], last["num_input_tokens_seen"]))


@pytest.mark.slow
def test_one_ranks_bad_step_is_skipped_by_all_and_their_weights_stay_equal(tmp_path):
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
    """Rows that take a while to fetch."""

    def __getitem__(self, row):
        time.sleep(0.005)
        return super().__getitem__(row)


def test_an_interval_counts_its_tokens_and_knows_its_pace_and_how_long_it_waited(tmp_path):
    trainer = make(CausalLMTrainer, tmp_path, logging_steps=4, flops_per_token=1e6, peak_flops=1e12)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["num_input_tokens_seen"] for row in rows] == [step * 2 * 2 * 8 for step in range(4, 41, 4)]
    assert all(row["mfu"] == pytest.approx(row["tokens_per_second"] * 1e-6) for row in rows)
    assert all(0 < row["memory_gib"] < 64 for row in rows)
    assert all(0 <= row["data_wait"] < 1 for row in rows)
    assert {"mfu"} & trainer.state.log_history[-1].keys() == set()  # the end is no interval
    assert trainer.state.log_history[-1]["num_input_tokens_seen"] == 40 * 2 * 2 * 8
    slow = make(CausalLMTrainer, tmp_path, logging_steps=4, max_steps=10)
    slow.train_dataset = SlowRows(ROWS)
    slow.train()
    assert slow.state.log_history[-1]["num_input_tokens_seen"] == 10 * 2 * 2 * 8
    assert slow.state.log_history[-1]["tokens_per_second"] > 0  # of the last two steps
    assert slow.state.log_history[-2]["data_wait"] > 2 * max(row["data_wait"] for row in rows)
    assert "mfu" not in slow.state.log_history[0]  # the device's peak is not known
