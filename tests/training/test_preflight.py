"""Each check passes a correct run and reports the one fault put into a real trainer; none changes its state."""

import json
import math
import os
import random
import re

import numpy as np
import pytest
import torch
from conftest import CORPUS, processes, tiny_config
from torch import distributed as dist

from gpt2small_hf import GPT2SmallForCausalLM
from gpt2small_hf.config.data import PrepareArguments
from gpt2small_hf.config.resolve import load_recipe
from gpt2small_hf.config.trainer import TrainerSettings
from gpt2small_hf.data.corpus.prepare import prepare
from gpt2small_hf.data.text_dataset import TextDataset
from gpt2small_hf.data.tokenizer import load_tokenizer
from gpt2small_hf.errors import UsageError
from gpt2small_hf.runs.layout import DataFolder
from gpt2small_hf.training.inputs import RunInputs
from gpt2small_hf.training.model_checks import Check
from gpt2small_hf.training.preflight import preflight, show
from gpt2small_hf.training.trainer import CausalLMTrainer
from gpt2small_hf.training.trainer_arguments import training_arguments


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("preflight")
    text = "".join(json.dumps({"text": line * 4}) + "\n" for line in CORPUS)
    (place / "corpus.jsonl").write_text(text, encoding="utf-8")
    return prepare(PrepareArguments(text=[str(place / "corpus.jsonl")], vocab_size=300), place / "set")


class RowsWithLabels(TextDataset):
    """Rows whose supervised labels are those after `answers_from`; some rows may have none."""

    answers_from = 16
    rows_without = range(0)

    def __getitem__(self, row):
        ids = super().__getitem__(row)["input_ids"]
        labels = np.where(np.arange(len(ids)) >= self.answers_from, ids, -100)
        return {"input_ids": ids, "labels": np.full_like(ids, -100) if row in self.rows_without else labels}


def make(folder, place, *, kind=TextDataset, packing="stream", model=GPT2SmallForCausalLM, config=None, **changes):
    torch.manual_seed(0)
    settings = {"max_steps": 20, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "use_cpu": True}
    settings |= {"save_strategy": "no", "report_to": "none", "logging_steps": 5}
    rows = kind(folder, "train", 32, packing=packing)
    return CausalLMTrainer(
        model(tiny_config(**{"vocab_size": 300} | (config or {}))),
        training_arguments(TrainerSettings(**(settings | changes)), place / "checkpoints"),
        train_dataset=rows,
        eval_dataset=kind(folder, "validation", 32),
        data_collator=rows.collate,
        processing_class=load_tokenizer(str(DataFolder(folder).tokenizer)),
    )


def checked(trainer, folder, *, rows=None, heldout=None, free_bytes=None, **changes):
    """Return the checks by name."""
    rows = rows or trainer.train_dataset
    heldout = heldout or type(trainer.train_dataset)(folder, "validation", 32)
    settings = {name: changes.pop(name) for name in ("prompts", "allow_high_initial_loss") if name in changes}
    config = load_recipe("tiny", output_dir=folder / "runs" / "not there yet", **settings)
    config = config.with_settings(prompts=settings.get("prompts", []))
    size = trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps
    config = config.with_settings(per_device_train_batch_size=size[0], gradient_accumulation_steps=size[1])
    tokenizer, model = trainer.processing_class, trainer.accelerator.unwrap_model(trainer.model)
    inputs = RunInputs(config, rows, heldout, tokenizer, model.config, lambda: model, {}, [], **changes)
    return {check.name: check for check in preflight(trainer, config, inputs, free_bytes=free_bytes)}


def failed(checks):
    return {name for name, check in checks.items() if check.verdict == "fail"}


# ---- correct runs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"config": {"tie_word_embeddings": True, "attention_bias": True}},
        {"config": {"init_scheme": "torch", "resid_pdrop": 0.5, "attn_pdrop": 0.5}},
        {"packing": "isolate", "config": {"attn_implementation": "eager"}},
        {"packing": "bos_bestfit", "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
        {"kind": RowsWithLabels},
        {"max_steps": 1},
    ],
    ids=str,
)
def test_correct_run_passes(folder, tmp_path, settings):
    checks = checked(make(folder, tmp_path, **settings), folder)
    assert failed(checks) == set()
    assert {check.verdict for check in checks.values()} <= {"ok", "note"}
    assert ("documents" in checks) == (settings.get("packing") == "isolate")
    assert len(checks) >= 13


def test_fp16_on_a_cpu_is_noted(folder, tmp_path):
    trainer = make(folder, tmp_path, fp16=True)
    assert not trainer.accelerator.native_amp
    check = checked(trainer, folder)["precision"]
    assert check.verdict == "note"
    assert "float32" in check.found
    assert "--bf16" in check.found


def test_prompts_longer_than_half_the_context_are_noted(folder, tmp_path):
    trainer = make(folder, tmp_path)
    checks = checked(trainer, folder, prompts=["a", "a" * 500])
    assert checks["prompts"].verdict == "note"
    assert checks["prompts"].found.startswith("1 of 2 are longer than half the context (16 tokens): the longest has ")
    assert checked(trainer, folder, prompts=["a"])["prompts"] == Check("prompts", "ok", "the longest has 1 token")


def test_checks_report_their_figures(folder, tmp_path):
    trainer = make(folder, tmp_path, warmup_steps=4)
    checks = checked(trainer, folder)
    ids = trainer.train_dataset[0]["input_ids"][:32]
    assert checks["first row"].found == f"begins {trainer.processing_class.decode(ids)!r}"
    assert re.match(r"5\.\d{3}, where a guess among 300 tokens has 5\.704$", checks["initial loss"].found)
    assert (
        checks["training labels"].found == f"100.0% of the tokens in {len(trainer.train_dataset)} rows are supervised"
    )
    assert checks["learning rate"].found == "0 -> 1.0e-02 at step 4 -> 1.0e-03 at step 20"
    n = sum(p.numel() for p in trainer.model.parameters() if p.ndim == 2)
    assert checks["weight decay"].found.startswith(f"0.1 on 15 tensors of {n:,} parameters, none on 16 of ")
    there = len(trainer.train_dataset) * 32
    assert checks["tokens"] == Check(
        "tokens", "ok", f"2,560 trained on, of {there:,}: {2560 / there:.1f} epochs of the text"
    )


@pytest.mark.parametrize("accumulation", [1, 3, 100])
def test_tokens_trained_on_are_those_the_trainer_counts(folder, tmp_path, accumulation):
    """The last step of an epoch has fewer rows; with 100 micro-batches per step, each step is an epoch."""
    trainer = make(
        folder, tmp_path, max_steps=10, per_device_train_batch_size=32, gradient_accumulation_steps=accumulation
    )
    assert len(trainer.train_dataset) % 32
    found = checked(trainer, folder)["tokens"].found
    trainer.train()
    assert trainer.state.epoch > 1
    assert found.startswith(f"{trainer.state.num_input_tokens_seen:,} trained on, of ")


def test_first_row_is_shown_with_special_tokens(folder, tmp_path):
    trainer = make(folder, tmp_path, packing="bos_bestfit")
    assert checked(trainer, folder)["first row"].found.startswith("begins '<|endoftext|>")


def test_share_of_supervised_labels_is_reported(folder, tmp_path):
    checks = checked(make(folder, tmp_path, kind=RowsWithLabels), folder)
    assert checks["training labels"].found.startswith(f"{16 / 31:.1%} of the tokens")


def test_rows_without_labels_are_counted_and_skipped(folder, tmp_path):
    trainer = make(folder, tmp_path, kind=RowsWithLabels)
    trainer.train_dataset.rows_without = range(0, 7)
    checks = checked(trainer, folder)
    assert failed(checks) == set()
    assert checks["training labels"].verdict == "note"
    assert f"7 of {len(trainer.train_dataset)} rows have none, row 0 first" in checks["training labels"].found


# ---- no trace -----------------------------------------------------------------------------------------------------


class RandomRows(TextDataset):
    """Rows that draw random numbers when they are read, as augmented ones do."""

    def __getitem__(self, row):
        random.random()
        np.random.rand()
        torch.rand(1)
        return super().__getitem__(row) | {"labels": super().__getitem__(row)["input_ids"]}


@pytest.mark.slow
def test_preflight_changes_no_later_step(folder, tmp_path):
    trained = []
    for first in (True, False):
        trainer = make(folder, tmp_path, kind=RandomRows, config={"resid_pdrop": 0.1, "embd_pdrop": 0.1})
        trainer.model.model.layers[0].eval()  # a mode set for one submodule
        if first:
            modes = [module.training for module in trainer.model.modules()]
            settings = trainer.args.to_json_string(), trainer.model.config.to_json_string()
            draws = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
            attributes = {name: id(value) for name, value in vars(trainer).items()}
            checked(trainer, folder)
            assert attributes == {name: id(value) for name, value in vars(trainer).items()}
            assert draws == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
            assert settings == (trainer.args.to_json_string(), trainer.model.config.to_json_string())
            assert modes == [module.training for module in trainer.model.modules()]
            assert all(p.grad is None for p in trainer.model.parameters())
        trainer.train()
        trained.append([p.detach() for p in trainer.model.parameters()])
    assert trainer.state.global_step == 20
    assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))


def test_state_is_restored_after_an_error(folder, tmp_path):
    trainer = make(folder, tmp_path)
    trainer.model.model.norm.register_forward_hook(lambda *args: 1 / 0)
    trainer.model.train()
    with pytest.raises(ZeroDivisionError):
        checked(trainer, folder)
    assert all(module.training for module in trainer.model.modules())
    assert trainer.args.average_tokens_across_devices


def train_as_one_of_two(rank, folder, place, results):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": ""}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}/meet", rank=rank, world_size=2)
    trainer = make(folder, place, max_steps=2)
    wrong = failed(checked(trainer, folder)) if rank == 0 else None
    trainer.train()
    results.put((rank, trainer.args.world_size, wrong, trainer.state.global_step))


@pytest.mark.slow
def test_one_rank_of_two_can_check_while_the_other_waits(folder, tmp_path):
    results = processes.Queue()
    ranks = [processes.Process(target=train_as_one_of_two, args=(rank, folder, tmp_path, results)) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        answers = sorted(results.get(timeout=120) for _ in ranks)
    finally:
        for process in ranks:
            process.join(10)
            process.kill()
    assert answers == [(0, 2, set(), 2), (1, 2, None, 2)]


# ---- faults -------------------------------------------------------------------------------------------------------


def test_tied_head_with_torch_initialisation_fails_with_the_cause(folder, tmp_path):
    trainer = make(folder, tmp_path, config={"tie_word_embeddings": True, "init_scheme": "torch"})
    checks = checked(trainer, folder)
    assert failed(checks) == {"initial loss"}
    assert "too large for a tied head; set --init_scheme gpt2" in checks["initial loss"].found
    assert "--allow_high_initial_loss" in checks["initial loss"].found
    assert "initial loss" not in checked(trainer, folder, base={"init_from": "another run"})
    allowed = checked(trainer, folder, allow_high_initial_loss=True)
    assert failed(allowed) == set()
    assert allowed["initial loss"].verdict == "note"


def test_too_large_initial_weights_fail(folder, tmp_path):
    checks = checked(make(folder, tmp_path, config={"initializer_range": 0.5}), folder)
    assert failed(checks) == {"initial loss"}
    assert "--initializer_range 0.02" in checks["initial loss"].found


def test_slightly_high_initial_loss_is_noted(folder, tmp_path):
    trainer = make(folder, tmp_path, config={"init_scheme": "torch"})
    with torch.no_grad():
        trainer.model.lm_head.weight.mul_(3)
    assert checked(trainer, folder)["initial loss"].verdict == "note"


@pytest.mark.slow
def test_trained_weights_fail_as_initial_weights(folder, tmp_path):
    trainer = make(folder, tmp_path)
    trainer.train()
    checks = checked(trainer, folder, allow_high_initial_loss=True)
    assert failed(checks) == {"initial loss"}
    assert "too low for untrained weights" in checks["initial loss"].found


def test_weight_that_is_not_finite_fails(folder, tmp_path):
    trainer = make(folder, tmp_path)
    with torch.no_grad():
        trainer.model.model.norm.weight[3] = math.nan
    checks = checked(trainer, folder, allow_high_initial_loss=True)
    assert {"initial loss", "accumulation", "gradients"} <= failed(checks)
    assert checks["initial loss"].found.startswith("nan, ")


class DeafForCausalLM(GPT2SmallForCausalLM):
    """Accepts further arguments, and drops num_items_in_batch."""

    def forward(self, input_ids, labels=None, num_items_in_batch=None, **kwargs):
        return super().forward(input_ids, labels=labels, **kwargs)


def test_loss_that_grows_with_accumulation_fails(folder, tmp_path):
    checks = checked(make(folder, tmp_path, model=DeafForCausalLM), folder)
    assert failed(checks) == {"accumulation"}
    (once, _), (apart, _) = re.findall(r"(\d+\.\d+), (\d+\.\d+)", checks["accumulation"].found)
    assert float(apart) == pytest.approx(4 * float(once), rel=0.01)


@pytest.mark.parametrize("split", ["training", "held-out"])
def test_set_without_labels_fails_before_the_model_runs(folder, tmp_path, split):
    trainer = make(folder, tmp_path, kind=RowsWithLabels)
    heldout = RowsWithLabels(folder, "validation", 32)
    (trainer.train_dataset if split == "training" else heldout).answers_from = 32
    checks = checked(trainer, folder, heldout=heldout)
    assert failed(checks) == {f"{split} labels"}
    assert "all labels are -100" in checks[f"{split} labels"].found
    assert "gradients" not in checks


def test_first_label_of_a_row_does_not_count(folder, tmp_path):
    trainer = make(folder, tmp_path, kind=RowsWithLabels)
    original = RowsWithLabels.__getitem__

    class FirstAlone(RowsWithLabels):
        def __getitem__(self, row):
            item = original(self, row)
            return item | {"labels": np.where(np.arange(32) == 0, item["input_ids"], -100)}

    rows = FirstAlone(folder, "train", 32)
    assert failed(checked(trainer, folder, rows=rows)) == {"training labels"}


def test_too_large_ids_of_a_folder_fail_before_the_model_runs(folder, tmp_path):
    checks = checked(make(folder, tmp_path, config={"vocab_size": 250}), folder)
    assert failed(checks) == {"token ids"}
    assert re.match(r"the largest is 29\d, but the model has vocab_size=250: ", checks["token ids"].found)
    assert "gradients" not in checks


def test_too_large_ids_in_rows_fail(folder, tmp_path):
    class OneTooMany(TextDataset):
        def __getitem__(self, row):
            item = super().__getitem__(row)
            item["input_ids"][-1] = 300
            return item

    trainer = make(folder, tmp_path)
    checks = checked(trainer, folder, rows=OneTooMany(folder, "train", 32))
    assert failed(checks) == {"token ids"}
    assert "is 300, but the model has vocab_size=300" in checks["token ids"].found


@pytest.mark.parametrize("n_layers_broken", [1, 2])
def test_mask_that_is_not_causal_fails(folder, tmp_path, n_layers_broken):
    trainer = make(folder, tmp_path)
    for layer in trainer.model.model.layers[:n_layers_broken]:
        layer.self_attn.is_causal = False
    assert failed(checked(trainer, folder)) == {"causality"}


def test_mask_that_is_off_by_one_fails(folder, tmp_path, monkeypatch):
    trainer = make(folder, tmp_path)
    attention = trainer.model.model.layers[1].self_attn
    forward, ahead = attention.forward, torch.ones(32, 32, dtype=torch.bool).tril(1)
    monkeypatch.setattr(
        attention,
        "forward",
        lambda x, attention_mask=None, **kw: forward(x, ahead[None, None, : x.shape[1], : x.shape[1]], **kw),
    )
    assert failed(checked(trainer, folder)) == {"causality"}


def test_attention_across_documents_fails(folder, tmp_path, monkeypatch):
    trainer = make(folder, tmp_path, packing="isolate")
    decoder = trainer.model.model
    forward = decoder.forward

    def flatten(position_ids=None, **kwargs):
        return forward(position_ids=torch.arange(position_ids.shape[1])[None].expand_as(position_ids), **kwargs)

    monkeypatch.setattr(decoder, "forward", flatten)
    assert failed(checked(trainer, folder)) == {"documents"}


def test_frozen_parameter_is_named(folder, tmp_path):
    trainer = make(folder, tmp_path)
    trainer.model.model.layers[1].mlp.up_proj.weight.requires_grad_(False)
    checks = checked(trainer, folder)
    assert failed(checks) == {"gradients"}
    assert checks["gradients"].found.startswith("model.layers.1.mlp.up_proj.weight got no gradient")


def test_parameters_with_zero_gradient_are_named(folder, tmp_path):
    trainer = make(folder, tmp_path)
    with torch.no_grad():
        trainer.model.model.layers[0].self_attn.o_proj.weight.zero_()
    checks = checked(trainer, folder)
    assert failed(checks) == {"gradients"}
    assert re.search(r"self_attn.q_proj.weight and \d more got one that is all zero", checks["gradients"].found)


def test_gradient_that_is_not_finite_is_named(folder, tmp_path):
    trainer = make(folder, tmp_path)
    trainer.model.model.layers[0].mlp.down_proj.bias.register_hook(
        lambda g: g.index_fill(0, torch.tensor([1]), torch.inf)
    )
    checks = checked(trainer, folder)
    assert "gradients" in failed(checks)
    assert checks["gradients"].found.startswith("model.layers.0.mlp.down_proj.bias got one that is not finite")


def test_warm_up_longer_than_the_run_fails(folder, tmp_path):
    checks = checked(make(folder, tmp_path, warmup_steps=25), folder)
    assert failed(checks) == {"learning rate"}
    assert "goes to 8.0e-03 and never reaches its peak of 1.0e-02" in checks["learning rate"].found
    assert "of 20 steps warm-up takes 25" in checks["learning rate"].found


def test_run_that_is_only_warm_up_is_noted(folder, tmp_path):
    assert checked(make(folder, tmp_path, warmup_steps=20), folder)["learning rate"].verdict == "note"


def test_learning_rate_of_zero_fails(folder, tmp_path):
    assert failed(checked(make(folder, tmp_path, learning_rate=0.0), folder)) == {"learning rate"}


@pytest.mark.parametrize(
    ("schedule", "found"),
    [
        ({"lr_scheduler_type": "constant"}, "1.0e-02 at step 0 -> 1.0e-02 at step 20"),
        ({"lr_scheduler_type": "linear", "warmup_steps": 0.25}, "0 -> 1.0e-02 at step 5 -> 0"),
    ],
)
def test_course_of_other_schedules_is_reported(folder, tmp_path, schedule, found):
    assert checked(make(folder, tmp_path, **schedule), folder)["learning rate"] == Check("learning rate", "ok", found)


def test_rate_that_depends_on_the_loss_is_noted(folder, tmp_path):
    trainer = make(folder, tmp_path)
    trainer.args.lr_scheduler_type, trainer.args.lr_scheduler_kwargs = "reduce_lr_on_plateau", None
    assert checked(trainer, folder)["learning rate"].verdict == "note"


def test_more_tokens_than_the_set_are_noted_as_epochs(folder, tmp_path):
    trainer = make(folder, tmp_path)
    trainer.args.max_steps = len(trainer.train_dataset) * 5 // 2 // 4
    check = checked(trainer, folder)["tokens"]
    assert check.verdict == "note"
    assert "2.5 epochs" in check.found


BEST = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}


@pytest.mark.parametrize(
    ("settings", "n_checkpoints"),
    [
        ({"save_strategy": "steps", "save_steps": 2}, 3),
        ({"save_strategy": "steps", "save_steps": 2, "save_total_limit": None}, 10),
        ({"save_strategy": "steps", "save_steps": 0.5}, 2),
        ({"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1, **BEST}, 3),  # best, newest, next
        ({"save_strategy": "epoch"}, 1),
        ({"save_strategy": "no"}, 0),
    ],
)
def test_disk_too_small_by_one_byte_fails(folder, tmp_path, settings, n_checkpoints):
    trainer = make(folder, tmp_path, **settings)
    needed = (n_checkpoints * 12 + 4) * trainer.model.num_parameters()
    checks = checked(trainer, folder, free_bytes=needed - 1)
    assert failed(checks) == {"disk"}
    assert f"{n_checkpoints} checkpoints and the model take" in checks["disk"].found
    assert failed(checked(trainer, folder, free_bytes=needed)) == set()


def test_model_too_large_for_the_disk_fails_before_it_is_built(folder, tmp_path):
    from gpt2small_hf.training.preflight import _disk

    trainer = make(folder, tmp_path, save_strategy="steps", save_steps=2)
    with torch.device("meta"):
        huge = GPT2SmallForCausalLM(tiny_config(vocab_size=2**34))
    check = _disk(trainer, huge, 20, tmp_path / "not" / "there", None)
    assert check.verdict == "fail"
    assert "free some" in check.found


@pytest.mark.parametrize("n_rows", [None, 3])
def test_held_out_text_that_is_the_training_text_fails(folder, tmp_path, n_rows):
    trainer = make(folder, tmp_path)
    checks = checked(trainer, folder, heldout=TextDataset(folder, "train", 32, max_rows=n_rows))
    assert failed(checks) == {"held-out text"}
    assert checks["held-out text"].found.startswith("100% of ")


def test_too_short_held_out_text_is_noted(folder, tmp_path):
    check = checked(make(folder, tmp_path), folder, heldout=TextDataset(folder, "train", 8, max_rows=1))[
        "held-out text"
    ]
    assert check == Check("held-out text", "note", "is too short to tell whether it repeats training text.")


def test_held_out_text_partly_in_the_training_text_is_noted(folder, tmp_path):
    check = checked(make(folder, tmp_path), folder)["held-out text"]
    assert check.verdict == "note"
    assert 10 < int(check.found.split("%")[0]) < 98


@pytest.mark.parametrize(("context", "known", "verdict"), [(64, 0, "ok"), (128, 0, "note"), (128, 64, "ok")])
def test_context_much_longer_than_rows_is_noted(folder, tmp_path, context, known, verdict):
    """Rows have 32 tokens: later positions are trained only if they were before this run."""
    trainer = make(folder, tmp_path, config={"max_position_embeddings": context})
    check = checked(trainer, folder, known_positions=known)["positions"]
    assert check.verdict == verdict
    assert ("positions from 32 on stay untrained" in check.found) == (verdict == "note")
    assert ("--max_position_embeddings 32" in check.found) == (verdict == "note")


# ---- the table ----------------------------------------------------------------------------------------------------

FOUND = [Check("alpha", "ok", "as it should be"), Check("beta", "note", "look"), Check("c", "ok", "fine")]


def test_table_lists_all_checks_or_only_notes_and_failures(capsys):
    show(FOUND)
    assert capsys.readouterr().out.splitlines() == [
        "3 checks before the first step: 2 ok, 1 note",
        "check        found",
        "alpha  ok    as it should be",
        "beta   note  look",
        "c      ok    fine",
    ]
    show(FOUND, everything=False)
    assert capsys.readouterr().out.splitlines()[1:] == ["check        found", "beta   note  look"]
    show(FOUND[:1], everything=False)
    assert capsys.readouterr().out == "1 check before the first step: 1 ok\n"


def test_failures_stop_the_run_with_one_line(capsys):
    with pytest.raises(UsageError) as error:
        show([*FOUND, Check("delta", "fail", "this is wrong: do that."), Check("e", "fail", "so is this: stop it.")])
    assert str(error.value) == "training was not started. delta: this is wrong: do that. e: so is this: stop it."
    said = capsys.readouterr().out
    assert said.splitlines()[0] == "5 checks before the first step: 2 ok, 1 note, 2 failed"
    assert "delta  fail  this is wrong" in said
