"""Training in several processes: same steps, skipped steps and model folder as in one process."""

import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import REPOSITORY, tiny_config, tiny_words
from model.test_parallel import Pair, full_tensor, load
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainingArguments

from gpt2small_hf import GPT2SmallForCausalLM
from gpt2small_hf.config.data import PrepareArguments
from gpt2small_hf.data.chat.conversations import Conversation
from gpt2small_hf.data.chat.template_checks import set_template
from gpt2small_hf.data.chat_dataset import ChatDataset
from gpt2small_hf.data.corpus.prepare import prepare
from gpt2small_hf.data.text_dataset import TextDataset
from gpt2small_hf.data.tokenizer import train_tokenizer
from gpt2small_hf.errors import RunStoppedError
from gpt2small_hf.evaluation.heldout import heldout_losses
from gpt2small_hf.runs.files import read_json, read_jsonl
from gpt2small_hf.runs.layout import RunFolder
from gpt2small_hf.training.gradient_guard import KINDS
from gpt2small_hf.training.trainer import CausalLMTrainer

COUNTING = [(torch.arange(16) + 37 * i) % 100 for i in range(480)]  # easy to learn
ROWS = [{"input_ids": ids, "labels": ids} for ids in COUNTING]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(tmp_path_factory.mktemp("pair"))
    yield pair
    pair.stop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model whose vocabulary size is odd."""
    place = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    GPT2SmallForCausalLM(tiny_config()).save_pretrained(place)
    return place


def make(folder: Path, place: Path, kind: str, **changes: Any) -> CausalLMTrainer:
    """A Trainer that is `alone`, or one of two with all of the model (`copied`) or half of it (`sharded`)."""
    if kind == "alone":
        model = GPT2SmallForCausalLM.from_pretrained(folder).train()
    else:
        model = load(folder, **({"fsdp_size": 2} if kind == "sharded" else {}))
    settings = {
        "per_device_train_batch_size": 4 if kind == "alone" else 2,
        "train_sampling_strategy": "sequential",
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-4,  # larger than usual: Adam would blow rounding up to whole steps where a gradient is 0
        "ddp_find_unused_parameters": False,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    args = TrainingArguments(output_dir=str(place), report_to="none", disable_tqdm=True, **(settings | changes))
    # A launch that missed its aim would be one process, or copies where shards were asked for, with the same numbers.
    assert args.world_size == (1 if kind == "alone" else 2)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor) is (kind == "sharded"), name
    return CausalLMTrainer(model, args, train_dataset=ROWS)


def train(trainer: CausalLMTrainer, kind: str) -> dict[str, Any]:
    """Return the log and the weights."""
    trainer.train()
    assert isinstance(trainer.model_wrapped, nn.parallel.DistributedDataParallel) is (kind == "copied")
    return {
        "log": [row for row in trainer.state.log_history if "loss" in row],
        "weights": {name: full_tensor(p).detach().numpy() for name, p in trainer.model.named_parameters()},
    }


# ---- the steps of one process ------------------------------------------------------------------------------------


def trained(folder: Path, place: Path, kind: str) -> dict[str, Any]:
    settings = {"max_steps": 4, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
    return train(make(folder, place, kind, **settings), kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["copied", "sharded"])
def test_two_processes_take_the_steps_of_one_with_the_same_rows(pair, folder, kind, tmp_path):
    alone = trained(folder, tmp_path, "alone")
    assert alone["log"][0]["clipped"] == 1
    for each in pair(trained, folder, tmp_path, kind):
        for name in ("loss", "grad_norm", "clipped", "num_input_tokens_seen"):
            logged = [[row[name] for row in result["log"]] for result in (each, alone)]
            np.testing.assert_allclose(*logged, atol=1e-5, rtol=0, err_msg=name)
        for name, weight in alone["weights"].items():
            np.testing.assert_allclose(each["weights"][name], weight, atol=2e-6, rtol=0, err_msg=name)


def measure_chats(folder: Path, place: Path, kind: str) -> tuple[float, float]:
    """Return the Trainer's held-out loss of eleven chats, and the mean over their tokens by `heldout_losses`."""
    tokenizer = train_tokenizer(["Every effort moves you forward. "] * 20, 300)
    set_template(tokenizer, "chatml")
    said = ["Every effort. " * (1 + n % 3) for n in range(11)]
    chats = [Conversation([{"role": "user", "content": "You?"}, {"role": "assistant", "content": s}], "") for s in said]
    heldout = ChatDataset(chats, tokenizer, seq_len=128, packing="padding")
    torch.manual_seed(0)
    model = GPT2SmallForCausalLM(tiny_config(vocab_size=300, max_position_embeddings=128))
    args = TrainingArguments(
        output_dir=str(place), report_to="none", disable_tqdm=True, use_cpu=True, per_device_eval_batch_size=2
    )
    assert args.world_size == (1 if kind == "alone" else 2)
    trainer = CausalLMTrainer(model, args, data_collator=heldout.collate, train_dataset=heldout, eval_dataset=heldout)
    return trainer.evaluate()["eval_loss"], float(heldout_losses(model, heldout).mean())


@pytest.mark.slow
def test_two_processes_evaluate_each_supervised_token_once(pair, folder, tmp_path):
    """Eleven rows are not a multiple of the batches of two processes: accelerate would evaluate some rows twice."""
    for found, by_token in [measure_chats(folder, tmp_path, "alone"), *pair(measure_chats, folder, tmp_path, "copied")]:
        assert found == pytest.approx(by_token, abs=1e-5)


def measure_text(folder: Path, place: Path, kind: str, rows: int, batch_size: int) -> tuple[float, float]:
    """Return the Trainer's held-out loss of some rows of text, and the mean over their tokens by `heldout_losses`."""
    heldout = TextDataset(place / "data", "validation", 16, max_rows=rows)
    assert len(heldout) == rows
    torch.manual_seed(0)
    model = GPT2SmallForCausalLM(tiny_config(vocab_size=300, max_position_embeddings=128))
    args = TrainingArguments(
        output_dir=str(place),
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        per_device_eval_batch_size=batch_size,
    )
    assert args.world_size == (1 if kind == "alone" else 2)
    trainer = CausalLMTrainer(model, args, data_collator=heldout.collate, train_dataset=heldout, eval_dataset=heldout)
    return trainer.evaluate()["eval_loss"], float(heldout_losses(model, heldout).mean())


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "batch_size"), [(11, 2), (1, 4), (13, 3), (12, 2)])
def test_two_processes_evaluate_each_row_of_text_once(pair, folder, tmp_path, rows, batch_size):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"Every effort {n} moves {n * n} you forward.\n\n" for n in range(200)))
    prepare(PrepareArguments(text=[str(text)], vocab_size=300, validation_fraction=0.3), tmp_path / "data")
    alone = measure_text(folder, tmp_path, "alone", rows, batch_size)
    for found, by_token in [alone, *pair(measure_text, folder, tmp_path, "copied", rows, batch_size)]:
        assert found == pytest.approx(by_token, abs=1e-5)


def reductions(folder: Path, place: Path, kind: str, micro_batches: int) -> int:
    """Return how often tensors were summed over the processes in three steps."""
    trainer = make(folder, place, kind, max_steps=3, gradient_accumulation_steps=micro_batches)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train(trainer, kind)
    reduce = {"copied": "c10d::allreduce_", "sharded": "c10d::_reduce_scatter_base_"}[kind]
    return sum(event.count for event in profile.key_averages() if event.key == reduce)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["copied", "sharded"])
def test_gradients_are_reduced_once_per_step(pair, folder, kind, tmp_path):
    once, *_ = pair(reductions, folder, tmp_path, kind, 1)
    assert once >= 3
    assert pair(reductions, folder, tmp_path, kind, 4) == [once, once]


# ---- bad steps ---------------------------------------------------------------------------------------------------

# Step → kind, and the ranks that make it bad. A spike is told from 32 good steps on.
BAD = {33 + 2 * i: (kind, ranks) for i, (ranks, kind) in enumerate((r, k) for r in ((1,), (0, 1)) for k in KINDS)}
SPOILED = "model.layers.1.mlp.up_proj.weight"


def spoil(trainer: CausalLMTrainer) -> None:
    """Spoil the steps of `BAD`: the output of one layer, or the gradient of its weight."""
    rank, layer = trainer.args.process_index, trainer.model.model.layers[1].mlp.up_proj
    # Of a weight in shards, each rank's infinite row is the other's to hold.
    infinite = torch.tensor([len(layer.weight) - 1 if rank == 0 else 0], device=trainer.args.device)
    gradients = {
        "non_finite": lambda g: g.index_fill(0, infinite, torch.inf),
        "overflow": lambda g: torch.full_like(g, 1e25),
        "spike": lambda g: torch.full_like(g, 1e6),
    }
    hooks = []

    def before(module: nn.Module, inputs: Any) -> None:
        while hooks:
            hooks.pop().remove()
        kind, ranks = BAD.get(trainer.state.global_step, ("", ()))
        if kind in gradients and rank in ranks:  # here even a weight in shards is whole
            hooks.append(module.weight.register_hook(gradients[kind]))

    def after(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        kind, ranks = BAD.get(trainer.state.global_step, ("", ()))
        return output * math.nan if kind == "loss" and rank in ranks else output

    layer.register_forward_pre_hook(before)
    layer.register_forward_hook(after)


class Watch(TrainerCallback):
    """Return the steps, from 0, at which weights changed, and the broken gradients of the others."""

    def __init__(self, trainer: CausalLMTrainer) -> None:
        self.trainer = trainer
        self.unchanged: dict[int, list[str]] = {}

    def weights(self) -> list[Tensor]:
        parameters = self.trainer.model.parameters()
        return [(p.to_local() if isinstance(p, DTensor) else p).detach().clone() for p in parameters]

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.before = self.weights()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if all(torch.equal(a, b) for a, b in zip(self.before, self.weights(), strict=True)):
            self.unchanged[state.global_step] = self.trainer.detector.broken


def train_with_bad_steps(folder: Path, place: Path, kind: str, **changes: Any) -> dict[str, Any]:
    trainer = make(folder, place, kind, max_steps=50, gradient_accumulation_steps=2, max_grad_norm=1.0, **changes)
    watch = Watch(trainer)
    trainer.add_callback(watch)
    spoil(trainer)
    return {
        **train(trainer, kind),
        "unchanged": watch.unchanged,
        "skipped": trainer.detector.skipped,
    }


def assert_skipped(result: dict[str, Any], bad: dict[int, str]) -> None:
    """Assert that exactly these steps were skipped, each for its reason, and all others trained."""
    broken = {"loss": list(result["weights"]), "non_finite": [SPOILED], "overflow": [], "spike": []}
    assert result["unchanged"] == {step: broken[kind] for step, kind in bad.items()}
    assert result["skipped"] == {kind: list(bad.values()).count(kind) for kind in KINDS}
    assert all(np.isfinite(weight).all() for weight in result["weights"].values())
    losses = {row["step"] - 1: row["loss"] for row in result["log"]}
    assert [step for step in losses if not math.isfinite(losses[step])] == [s for s in bad if bad[s] == "loss"]
    assert 1 < losses[49] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "bf16"),
    [("copied", False), ("copied", True), ("sharded", False), ("sharded", True)],
    ids=lambda value: value if isinstance(value, str) else "bfloat16" if value else "float32",
)
def test_bad_step_of_one_rank_or_shard_is_skipped_by_all(pair, folder, kind, bf16, tmp_path):
    one, other = pair(train_with_bad_steps, folder, tmp_path, kind)
    for result in (one, other):
        assert_skipped(result, {step: bad for step, (bad, _) in BAD.items()})
    for name, weight in one["weights"].items():
        assert (weight == other["weights"][name]).all(), name


@pytest.mark.slow
def test_bad_steps_in_bfloat16_are_skipped_as_in_float32(folder, tmp_path):
    result = train_with_bad_steps(folder, tmp_path, "alone", bf16=True)
    assert_skipped(result, {step: bad for step, (bad, ranks) in BAD.items() if 0 in ranks})


def refuse(folder: Path, place: Path, kind: str) -> str:
    trainer = make(folder, place, kind, max_steps=2, save_strategy="steps", save_steps=2, save_only_model=True)
    weight = trainer.model.model.embed_positions.weight
    if kind == "copied" or dist.get_rank() == 1:
        with torch.no_grad():  # the last position, which no row of sixteen tokens reaches, is in the second shard
            (weight.to_local() if kind == "sharded" else weight)[-1] = torch.nan
    with pytest.raises(RunStoppedError) as caught:
        trainer.train()
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["copied", "sharded"])
def test_weights_not_finite_in_one_shard_are_saved_by_no_rank(pair, folder, kind, tmp_path):
    messages = pair(refuse, folder, tmp_path, kind)
    assert all(message.startswith("model.embed_positions.weight is not finite at step 2") for message in messages)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_only_gradients_that_are_not_finite_lower_the_float16_scale(device, folder, tmp_path, monkeypatch):
    on_gpu = device == "cuda"
    if on_gpu:  # several would each get a part of every batch
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    trainer = make(folder, tmp_path, "alone", max_steps=50, max_grad_norm=1.0, fp16=on_gpu, use_cpu=not on_gpu)
    if not on_gpu:  # PyTorch computes in float16 there too, and accelerate asks for a GPU
        monkeypatch.setattr(trainer.accelerator.state, "_mixed_precision", "fp16")
        trainer.accelerator.native_amp = True
    # PyTorch's initial scale is too large on purpose: those steps would be skipped too.
    trainer.accelerator.scaler = scaler = torch.amp.GradScaler(device, init_scale=256.0)
    watch, scales = Watch(trainer), [256.0]

    class Scale(TrainerCallback):
        def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            scales.append(scaler.get_scale())

    trainer.add_callback(watch)
    trainer.add_callback(Scale())
    spoil(trainer)
    result = {**train(trainer, "alone"), "unchanged": watch.unchanged, "skipped": trainer.detector.skipped}
    bad = {step: kind for step, (kind, ranks) in BAD.items() if 0 in ranks}
    assert_skipped(result, bad)
    lowered = [step for step in range(50) if scales[step + 1] < scales[step]]
    assert lowered == [step for step, kind in bad.items() if kind in ("loss", "non_finite")]


# ---- what is saved -----------------------------------------------------------------------------------------------


def save_in_shards(folder: Path, place: Path) -> str:
    model = load(folder, fsdp_size=2)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    model.save_pretrained(place)
    return f"{type(model).__module__}.{type(model).__qualname__}"


ISOLATED_RANKS = """
import os, sys
sys.path.append("{accelerate}")  # without it, the library distributes nothing
rank = 0 if os.fork() else 1
os.environ |= {{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": ""}}
os.environ["HF_HOME"] += str(rank)  # or both would write the same modules at the same moment
from datetime import timedelta
import torch
import torch.distributed as dist
dist.init_process_group(
    "gloo", init_method="file://{meet}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
)
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
model = AutoModelForCausalLM.from_pretrained(
    "{folder}", trust_remote_code=True, distributed_config=DistributedConfig(fsdp_size=2)
)
assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
model.save_pretrained("{place}")
if rank == 0:
    _, status = os.wait()
    assert status == 0
    print(type(model).__module__ + "." + type(model).__qualname__)
os._exit(0) if rank else None
"""


@pytest.mark.slow
@pytest.mark.parametrize("code", ["installed", "remote"])
def test_sharded_model_is_saved_as_an_unsharded_one(pair, folder, code, tmp_path, run_isolated):
    saved = tmp_path / "saved"
    if code == "installed":
        names = pair(save_in_shards, folder, saved)
        assert names == ["gpt2small_hf.model.modeling_gpt2small.FSDPGPT2SmallForCausalLM"] * 2
    else:
        (tmp_path / "accelerate").mkdir()
        for package in Path(sysconfig.get_path("purelib")).glob("accelerate*"):
            (tmp_path / "accelerate" / package.name).symlink_to(package)
        places = {"folder": folder, "place": saved, "meet": tmp_path / "meet", "accelerate": tmp_path / "accelerate"}
        name = run_isolated(ISOLATED_RANKS.format(**places), is_cold=True).split()[-1]
        assert re.fullmatch(r"transformers_modules\..*\.modeling_gpt2small\.FSDPGPT2SmallForCausalLM", name)
    # PyTorch gives the model a class of its own, known by its prefix; its name must not be what is saved.
    assert {path.name for path in saved.iterdir()} == {path.name for path in folder.iterdir()}
    configs = [read_json(place / "config.json") for place in (saved, folder)]
    assert configs[0] == configs[1]
    assert configs[0]["architectures"] == ["GPT2SmallForCausalLM"]
    weights, again = (load_file(place / "model.safetensors") for place in (folder, saved))
    assert weights.keys() == again.keys()
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    ids = torch.arange(12).view(1, 12)
    with torch.no_grad():
        expected = GPT2SmallForCausalLM.from_pretrained(folder).eval()(ids).logits[0, -1].tolist()
    printed = run_isolated(f"""
import json, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(saved)!r}, trust_remote_code=True).eval()
with torch.no_grad():
    print(json.dumps(model(torch.arange(12).view(1, 12)).logits[0, -1].tolist()))
""")
    assert json.loads(printed) == expected


# ---- the command -------------------------------------------------------------------------------------------------

# Accelerate shards nothing over what it knows to be CPUs, and does not say so: let it take them for GPUs.
AS_IF_GPUS = """
import runpy
import sys

import torch
from accelerate import DistributedType, PartialState

PartialState._prepare_backend = lambda self, *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)
PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
TRAIN = str(REPOSITORY / "train.py")


def launched(command: list[str], place: Path, *, cpu: bool = True, **settings: object) -> tuple[RunFolder, str]:
    """Return the run folder of `command` with the words of a tiny run, and its output."""
    place.mkdir(exist_ok=True)
    run = RunFolder(place / "run")
    settings = {"max_steps": 6, "logging_steps": 1, "save_steps": 3, "eval_steps": 3, "adam_epsilon": 1e-4, **settings}
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    words = [word for word in tiny_words(place, run.root) if cpu or word != "--use_cpu"]
    done = subprocess.run(
        [sys.executable, *command, *words, *flags],
        cwd=place,
        env={**os.environ, **({"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""} if cpu else {})},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return run, done.stdout


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def two_processes(launcher: str) -> list[str]:
    """Return the start of a command line; a script follows."""
    accelerate = ["-m", "accelerate.commands.launch", "--num_processes", "2", "--main_process_port", free_port()]
    if launcher.endswith(".yaml"):
        return [*accelerate, "--config_file", str(REPOSITORY / "examples" / "accelerate" / launcher)]
    if launcher == "accelerate":
        one_machine = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
        return [*accelerate, "--multi_gpu", "--main_process_ip", "127.0.0.1", *one_machine]
    address = ["--master_addr", "127.0.0.1", "--master_port", free_port()]
    return ["-m", "torch.distributed.run", "--nproc_per_node", "2", *address]


def in_shards(launcher: str, place: Path) -> list[str]:
    """Return the command line of a run that accelerate shards over two processes."""
    if launcher == "deepspeed-zero2.yaml":
        pytest.importorskip("deepspeed")
    place.mkdir()
    (place / "as_if_gpus.py").write_text(AS_IF_GPUS)
    return [*two_processes(launcher), str(place / "as_if_gpus.py"), TRAIN]


def logged(run: RunFolder, *names: str) -> list[list[float]]:
    return [[row[name] for name in names] for row in read_jsonl(run.metrics) if "loss" in row]


def assert_same_run(run: RunFolder, alone: RunFolder, *, atol: float = 2e-6) -> None:
    """Assert that two processes wrote what one wrote with the same rows per step."""
    assert [read_json(each.resolved)["device"]["count"] for each in (run, alone)] == [2, 1]
    assert len(logged(run)) == 6
    np.testing.assert_allclose(*(logged(each, "step", "loss", "grad_norm") for each in (run, alone)), atol=10 * atol)
    heldout = [read_json(each.heldout)["after"]["loss"] for each in (run, alone)]
    assert heldout[0] == pytest.approx(heldout[1], abs=10 * atol)
    for path in ("model", "checkpoints/checkpoint-3"):
        weights, expected = (load_file(each.root / path / "model.safetensors") for each in (run, alone))
        assert weights.keys() == expected.keys()
        for name, tensor in weights.items():
            np.testing.assert_allclose(tensor.numpy(), expected[name].numpy(), atol=atol, rtol=0, err_msg=name)
        code = [{file.name for file in (each.root / path).glob("*.py")} for each in (run, alone)]
        assert code[0] >= code[1]  # DeepSpeed adds some of its own to a checkpoint
        configs = [read_json(each.root / path / "config.json") for each in (run, alone)]
        assert configs[0] == configs[1]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return launched([TRAIN], tmp_path_factory.mktemp("one") / "process", per_device_train_batch_size=8)[0]


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "rows", "micro_batches"), [("torchrun", 4, 1), ("accelerate", 2, 2)])
def test_run_in_two_processes_equals_one_with_the_same_rows_per_step(
    one_process, launcher, rows, micro_batches, tmp_path
):
    sizes = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": micro_batches}
    run, said = launched([*two_processes(launcher), TRAIN], tmp_path / "two", **sizes)
    assert_same_run(run, one_process)
    assert said.count("parameters") == said.count("wrote") == 1  # the other process is silent


SHARDED = {"fsdp2-8gpu.yaml": "optimizer.bin", "deepspeed-zero2.yaml": "latest"}
"""Files of sharded checkpoints alone: a launch without sharding would write copies, and an optimizer.pt."""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", SHARDED)
def test_fsdp_run_equals_one_process_also_after_a_kill(one_process, launcher, tmp_path):
    place = tmp_path / "two"
    command = in_shards(launcher, place)
    run, _ = launched(command, place, cpu=False, per_device_train_batch_size=4)
    assert (run.checkpoints / "checkpoint-3" / SHARDED[launcher]).exists()
    assert_same_run(run, one_process)
    run.heldout.unlink()
    for lost in (run.model, run.checkpoints / "checkpoint-6"):
        shutil.rmtree(lost)
    run, said = launched(command, place, cpu=False, per_device_train_batch_size=4)
    assert f"resuming from {run.checkpoints / 'checkpoint-3'}" in said
    assert_same_run(run, one_process)


@pytest.mark.slow
def test_fsdp_with_bfloat16_rounds_no_logged_loss(one_process, tmp_path):
    place = tmp_path / "two"
    *launch, script, train_py = in_shards("fsdp2-8gpu.yaml", place)
    # By the launcher, because `--bf16` asks for a GPU that is really there.
    command = [*launch, "--mixed_precision", "bf16", script, train_py]
    run, _ = launched(command, place, cpu=False, per_device_train_batch_size=4)
    # Between 4 and 8, bfloat16 has one number in 0.03.
    np.testing.assert_allclose(logged(run, "loss"), logged(one_process, "loss"), atol=3e-3, rtol=0)
    assert logged(run, "loss") != logged(one_process, "loss")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed")
@pytest.mark.parametrize("launcher", ["ddp-8gpu.yaml", *SHARDED])
def test_run_on_two_gpus_equals_one_gpu(launcher, tmp_path, monkeypatch):
    if launcher == "deepspeed-zero2.yaml":
        pytest.importorskip("deepspeed")
    two, _ = launched(
        [*two_processes(launcher), TRAIN], tmp_path / "two", cpu=False, tf32=False, per_device_train_batch_size=4
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0])
    one, _ = launched([TRAIN], tmp_path / "one", cpu=False, tf32=False, per_device_train_batch_size=8)
    if launcher in SHARDED:
        assert (two.checkpoints / "checkpoint-3" / SHARDED[launcher]).exists()
    assert_same_run(two, one, atol=1e-4)
