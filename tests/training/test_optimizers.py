"""Muon with AdamW: each takes its own parameters and steps as it would alone, and to others they are one optimizer."""

import copy
import importlib
import io
import json
import pickle

import pytest
import torch
from accelerate import Accelerator
from changed_copy import write_changed
from conftest import REPOSITORY, tiny_config
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers.training_args import OptimizerNames

from gpt2small_hf import GPT2SmallForCausalLM
from gpt2small_hf.config import declared
from gpt2small_hf.config import trainer as trainer_settings
from gpt2small_hf.config.resolve import read_config
from gpt2small_hf.config.trainer import TrainerSettings
from gpt2small_hf.errors import UsageError
from gpt2small_hf.training import trainer as trainer_module
from gpt2small_hf.training import trainer_arguments
from gpt2small_hf.training.optimizers import MuonWithAdamW, muon_with_adamw
from gpt2small_hf.training.schedules import rates
from gpt2small_hf.training.trainer import CausalLMTrainer
from gpt2small_hf.training.trainer_arguments import training_arguments

ROWS = [
    {"input_ids": ids, "labels": ids}
    for ids in torch.randint(0, 100, (96, 8), generator=torch.Generator().manual_seed(1))
]
MATRICES = {
    f"model.layers.{i}.{name}.weight"
    for i in range(2)
    for name in (*(f"self_attn.{p}_proj" for p in "qkvo"), "mlp.up_proj", "mlp.down_proj")
}

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="PyTorch before 2.9 has no Muon")


def arguments(place="unused", **changes):
    settings = {"optim": "muon", "learning_rate": 1e-2, "warmup_steps": 0, "per_device_train_batch_size": 2}
    settings |= {"use_cpu": True, "report_to": "none", "save_strategy": "no", "logging_steps": 1}
    return training_arguments(TrainerSettings(**settings | changes), place)


def make_model(**changes):
    torch.manual_seed(0)
    return GPT2SmallForCausalLM(tiny_config(**changes))


def make_trainer(place, decay="matrices", sizes=None, **changes):
    return CausalLMTrainer(
        make_model(**sizes or {}), arguments(place, **changes), train_dataset=ROWS, eval_dataset=ROWS[:4], decay=decay
    )


def make_optimizer(model, **changes):
    args = arguments(**changes)
    return muon_with_adamw(model, [name for name, p in model.named_parameters() if p.ndim == 2], args)


def gradients(model, seed):
    """Give every parameter the gradient of the loss on two rows."""
    model.zero_grad()
    ids = torch.stack([row["input_ids"] for row in ROWS[2 * seed : 2 * seed + 2]])
    model(input_ids=ids, labels=ids, skip_logits=True).loss.backward()  # as the Trainer calls it


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---- the optimizer -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("decay", ["matrices", "all"])
def test_muon_trains_the_matrices_of_the_blocks_and_adamw_the_rest(decay, tied, tmp_path):
    ours, stock = (
        make_trainer(tmp_path, decay, {"tie_word_embeddings": tied, "attention_bias": True}, optim=optim)
        for optim in ("muon", "adamw_torch_fused")
    )
    of = []
    for trainer in (ours, stock):
        names = {p: name for name, p in trainer.model.named_parameters()}
        groups = trainer.create_optimizer().param_groups
        of.append({names[p]: group for group in groups for p in group["params"]})
        assert sum(len(group["params"]) for group in groups) == len(names) == len(of[-1])  # each stands once
    mine, theirs = of
    assert {name for name, group in mine.items() if group["muon"]} == MATRICES
    assert {name: group["weight_decay"] for name, group in mine.items()} == {
        name: group["weight_decay"] for name, group in theirs.items()
    }
    for name, group in mine.items():
        assert group["lr"] == theirs[name]["lr"]
        if name in MATRICES:
            alone = torch.optim.Muon([torch.zeros(2, 2)], adjust_lr_fn="match_rms_adamw").defaults
            assert {key: group[key] for key in alone} == alone | {key: group[key] for key in ("lr", "weight_decay")}
        else:
            assert {key: group[key] for key in ("betas", "eps", "fused")} == {
                key: theirs[name][key] for key in ("betas", "eps", "fused")
            }


def test_steps_equal_those_of_muon_and_adamw_alone():
    ours, apart = make_model(), make_model()
    optimizer = make_optimizer(ours)
    matrices = [p for name, p in apart.named_parameters() if name in MATRICES]
    rest = [p for name, p in apart.named_parameters() if name not in MATRICES]
    muon = torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(
        [
            {"params": [p for p in rest if p.ndim == 2], "weight_decay": 0.1},
            {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=(0.9, 0.95),
        fused=True,
    )
    before = weights(ours)
    for step in range(6):
        rate = 1e-2 * (1 - step / 8)
        for one in (optimizer, muon, adamw):
            for group in one.param_groups:
                group["lr"] = rate
        gradients(ours, step)
        gradients(apart, step)
        optimizer.step()
        muon.step()
        adamw.step()
        assert same(weights(ours), weights(apart))
    assert not any(torch.equal(before[name], p) for name, p in ours.named_parameters())


def test_muon_updates_have_the_scale_of_adamw_for_every_shape():
    for sizes in ({}, {"hidden_size": 64, "intermediate_size": 512}):
        model = make_model(**sizes)
        before = weights(model)
        optimizer = make_optimizer(model, weight_decay=0.0, learning_rate=1.0)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
        for name in MATRICES:  # AdamW's is from 0.2 to 0.4 in training (Liu et al. 2025, 2.2)
            assert 0.15 < (weights(model)[name] - before[name]).square().mean().sqrt() < 0.25


def test_parameter_without_gradient_is_skipped():
    model = make_model()
    optimizer = make_optimizer(model)
    for step in range(2):
        gradients(model, step)
        optimizer.step()
    idle = {"model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.o_proj.bias", "lm_head.weight"}
    for without in (idle, set(weights(model))):
        gradients(model, 2)
        for name, p in model.named_parameters():
            if name in without:
                p.grad = None
        before, state = weights(model), copy.deepcopy([optimizer.state[p] for p in model.parameters()])
        optimizer.step()
        for (name, p), old in zip(model.named_parameters(), state, strict=True):
            assert torch.equal(p, before[name]) == (name in without)
            assert same(optimizer.state[p], old) == (name in without)


def saved_and_loaded(model, optimizer):
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = make_model()
    again.load_state_dict(saved["model"])
    # With other settings: those that were saved win, as they do in any optimizer.
    other = make_optimizer(again, learning_rate=1.0, weight_decay=0.5, adam_beta2=0.5)
    other.load_state_dict(saved["optimizer"])
    return again, other


def accelerated(model, optimizer):
    return model, Accelerator(cpu=True).prepare(optimizer)


@pytest.mark.parametrize(
    "way",
    [saved_and_loaded, lambda *both: pickle.loads(pickle.dumps(both)), lambda *both: copy.deepcopy(both), accelerated],
)
def test_saved_pickled_copied_or_wrapped_optimizer_continues_to_the_bit(way):
    model, reference = make_model(), make_model()
    optimizer, expected = make_optimizer(model), make_optimizer(reference)
    for step in range(3):
        for one, its in ((model, optimizer), (reference, expected)):
            gradients(one, step)
            its.step()
    model, optimizer = way(model, optimizer)
    for group in (*optimizer.param_groups, *expected.param_groups):
        group["lr"] = 3e-3  # what a schedule does: both parts must see it
    for step in range(3, 6):
        for one, its in ((model, optimizer), (reference, expected)):
            gradients(one, step)
            its.step()
            its.zero_grad()
            assert all(p.grad is None for p in one.parameters())
        assert same(weights(model), weights(reference))


def test_gradient_scaler_skips_steps_that_are_not_finite():
    model, plain = make_model(), make_model()
    optimizer, expected = make_optimizer(model), make_optimizer(plain)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    ids = torch.stack([row["input_ids"] for row in ROWS[:2]])
    for bad in (True, False):
        before = weights(model)
        model.zero_grad()
        scaler.scale(model(input_ids=ids, labels=ids, skip_logits=True).loss).backward()
        if bad:
            model.lm_head.weight.grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        assert same(weights(model), before) == bad
    gradients(plain, 0)
    expected.step()
    assert same(weights(model), weights(plain))  # scales are powers of two


def test_closure_is_called_with_gradients_and_its_result_returned():
    model = make_model()
    optimizer = make_optimizer(model)
    ids = ROWS[0]["input_ids"][None]

    def closure():
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(20)]
    assert losses[-1] < losses[0] - 1


def test_later_groups_and_other_shapes_are_refused():
    optimizer = make_optimizer(make_model())
    with pytest.raises(RuntimeError, match="takes all its parameters when it is made"):
        optimizer.add_param_group({"params": [torch.zeros(2, 2)]})
    with pytest.raises(ValueError, match="2D"):
        MuonWithAdamW([{"params": [torch.zeros(2, requires_grad=True)], "muon": True}], lr=0.1)


# ---- in the Trainer ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_trainer_takes_the_steps_of_a_plain_loop(tmp_path):
    settings = {"max_steps": 6, "max_grad_norm": 0.5, "train_sampling_strategy": "sequential", "warmup_steps": 2}
    trainer = make_trainer(tmp_path, **settings)
    trainer.train()
    model = make_model().train()
    optimizer = make_optimizer(model)
    share = rates(arguments(**settings), 6)
    for step in range(6):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * share(step)
        gradients(model, step)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    assert same(weights(trainer.model), weights(model))
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["clipped"] for row in rows] == [1] * 6
    assert [row["learning_rate"] for row in rows] == [1e-2 * share(step) for step in range(6)]


@pytest.mark.slow
def test_resumed_run_equals_the_uninterrupted_run(tmp_path):
    settings = {"max_steps": 12, "save_strategy": "steps", "save_steps": 6, "gradient_accumulation_steps": 2}
    settings |= {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"decay_share": 0.7}}
    sizes = {"resid_pdrop": 0.1}
    whole = make_trainer(tmp_path / "whole", sizes=sizes, **settings)
    whole.train()
    again = make_trainer(tmp_path / "again", sizes=sizes, **settings)
    seen = []
    again.callback_handler.callbacks[0].on_step_begin = lambda *args, **kwargs: seen.append(
        [group["lr"] for group in again.optimizer.param_groups]
    )
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-6"))
    assert same(weights(again.model), weights(whole.model))
    for mine, theirs in zip(again.optimizer.state.values(), whole.optimizer.state.values(), strict=True):
        assert same(mine, theirs)
    share = rates(arguments(**settings), 12)
    assert seen == [[1e-2 * share(step)] * 4 for step in range(6, 12)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["non_finite", "spike"])
def test_skipped_step_leaves_weights_and_moments_unchanged(kind, tmp_path):
    trainer = make_trainer(tmp_path, max_steps=40)
    bad = {34: torch.inf} if kind == "non_finite" else {34: 1e6, 36: 1e6}
    trainer.model.model.layers[1].mlp.up_proj.weight.register_hook(
        lambda g: torch.full_like(g, bad.get(trainer.state.global_step, 0)) + g
    )
    before = []

    def remember(*args, **kwargs):
        state = [copy.deepcopy(trainer.optimizer.state[p]) for p in trainer.model.parameters()]
        before.append((weights(trainer.model), state))

    trainer.callback_handler.callbacks[0].on_step_begin = remember
    trainer.train()
    remember()
    for step in range(1, 40):
        (old, old_state), (new, new_state) = before[step], before[step + 1]
        assert same(old, new) == (step in bad)
        assert all(same(*pair) for pair in zip(old_state, new_state, strict=True)) == (step in bad)
    assert trainer.detector.skipped[kind] == len(bad)


def test_sharded_matrices_are_refused(tmp_path):
    trainer = make_trainer(tmp_path)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        fully_shard(trainer.model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(UsageError, match="--optim muon needs whole matrices, and FSDP, DeepSpeed"):
            trainer.create_optimizer()
    finally:
        dist.destroy_process_group()


# ---- the flag ----------------------------------------------------------------------------------------------------


def test_name_is_recorded_as_given():
    for name in ("muon", *(kind.value for kind in OptimizerNames)):
        assert json.loads(arguments(optim=name).to_json_string())["optim"] == name
    assert TrainerSettings().optim == "adamw_torch_fused"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--optim", "mun"], "--optim mun is not known. Did you mean muon?"),
        (["--optim", "adamw"], "--optim adamw is not known. Did you mean adamw_torch_fused?"),
        (["--optim", "adafctor"], "--optim adafctor is not known. Did you mean adafactor?"),
        (["--optim", "qqq"], "--optim qqq is not known. Choose one of adamw_torch_fused, muon,"),
        (["--optim", "muon", "--optim_args", "momentum=0.9"], "--optim muon takes no --optim_args"),
    ],
)
def test_unknown_name_is_a_one_line_error_with_the_nearest(words, message):
    with pytest.raises(UsageError) as caught:
        read_config(words)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# ---- another optimizer -------------------------------------------------------------------------------------------

ADDED = {
    "def muon_with_adamw(": """def plain_sgd(model, decayed, args, is_sharded):
    return torch.optim.SGD(model.parameters(), lr=args.learning_rate)


def muon_with_adamw(""",
    '{"muon": muon_with_adamw}': '{"muon": muon_with_adamw, "plain_sgd": plain_sgd}',
}


@pytest.mark.slow
def test_optimizer_added_to_a_copy_of_its_module_trains(tmp_path, monkeypatch):
    (tmp_path / "copied").mkdir()
    (tmp_path / "copied" / "__init__.py").touch()
    write_changed("gpt2small_hf/training/optimizers.py", ADDED, tmp_path / "copied" / "optimizers.py")
    monkeypatch.syspath_prepend(tmp_path)
    copied = importlib.import_module("copied.optimizers")
    names = declared.declared_keys("copied.optimizers", "OPTIMIZERS")
    assert names == list(copied.OPTIMIZERS) == ["muon", "plain_sgd"]
    for module in (trainer_settings, trainer_arguments):
        monkeypatch.setattr(module, "OWN_OPTIMIZERS", names)
    monkeypatch.setattr(trainer_module, "OPTIMIZERS", copied.OPTIMIZERS)
    assert read_config(["--optim", "plain_sgd"]).trainer.optim == "plain_sgd"
    trainer = make_trainer(tmp_path, optim="plain_sgd", max_steps=2)
    trainer.train()
    assert type(getattr(trainer.optimizer, "optimizer", None)) is torch.optim.SGD
    assert trainer.state.global_step == 2


def test_architecture_guide_names_the_file_of_a_new_optimizer():
    guide = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    (line,) = [line for line in guide.split("\n- ") if line.startswith("**An optimizer**")]
    assert "`training/optimizers.py`" in line
    assert line.count(".py`") == 2  # the other one is this file
    assert "`tests/training/test_optimizers.py`" in line
