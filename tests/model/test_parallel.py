"""The model over two processes equals the model in one: tensor, pipeline and data parallelism, sharded or not."""

import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import processes, tiny_config
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainingArguments, default_data_collator
from transformers.distributed import DistributedConfig
from transformers.distributed.fsdp import ALL_FSDP_STYLES, _resolve_tied_embed_lm_head_plan
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES, replace_layer_number_by_wildcard
from transformers.distributed.pipeline_parallel import PipelineIdentityLayer
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from gpt2small_hf import (
    GPT2SmallForCausalLM,
    GPT2SmallForQuestionAnswering,
    GPT2SmallForSequenceClassification,
    GPT2SmallForTokenClassification,
    GPT2SmallModel,
)

CLASSES = [
    GPT2SmallModel,
    GPT2SmallForCausalLM,
    GPT2SmallForSequenceClassification,
    GPT2SmallForTokenClassification,
    GPT2SmallForQuestionAnswering,
]

# ---- the plans --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_entry_of_a_plan_names_a_module_and_a_known_style(kind):
    model = kind(tiny_config())
    modules = {replace_layer_number_by_wildcard(name) for name, _ in model.named_modules()}
    for plan, styles in ((model.tp_plan, ALL_PARALLEL_STYLES), (model.fsdp_plan, ALL_FSDP_STYLES), (model.pp_plan, ())):
        assert plan
        assert plan.keys() <= modules
        assert not styles or all(style in styles for style in plan.values())
    assert set(model._no_split_modules) <= {type(module).__name__ for module in model.modules()}


def test_tensor_plan_covers_every_linear_and_the_token_embedding():
    model = GPT2SmallForCausalLM(tiny_config())
    covered = {
        replace_layer_number_by_wildcard(name)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or name == "model.embed_tokens"
    }
    assert model.tp_plan.keys() == covered
    # Serving engines refuse a plan in the configuration with any other style.
    assert set(model.config.base_model_tp_plan.values()) == {"colwise", "rowwise"}


@pytest.mark.parametrize("kind", CLASSES[:2], ids=lambda kind: kind.__name__)
def test_sharding_and_pipeline_plans_cover_every_parameter(kind):
    model = kind(tiny_config())
    names = {replace_layer_number_by_wildcard(name) for name, _ in model.named_parameters()}
    for plan in (model.fsdp_plan, model.pp_plan):
        assert [name for name in names if not any(name.startswith(f"{entry}.") for entry in plan)] == []


# ---- two processes ----------------------------------------------------------------------------------------------


def serve(rank: int, meeting_point: str, pipe: Connection) -> None:
    """Join the other process and do what is sent, until killed."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # looked at by accelerate, used by nobody
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # one GPU is not enough for two, and gloo computes on the CPU
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    while True:
        function, args = pipe.recv()
        try:
            torch.manual_seed(0)
            pipe.send((function(*args), None))
        except Exception:
            pipe.send((None, traceback.format_exc()))


class Pair:
    """Two real processes that talk over loopback. Starting them takes seconds, so all tests of this file share them."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.starts = 0
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []

    def start(self) -> None:
        self.starts += 1
        for rank in range(2):
            here, there = processes.Pipe()
            process = processes.Process(target=serve, args=(rank, str(self.place / f"meet{self.starts}"), there))
            process.daemon = True
            process.start()
            there.close()
            self.processes.append(process)
            self.pipes.append(here)

    def stop(self) -> None:
        for process in self.processes:  # they hold nothing that would be lost
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self.processes, self.pipes = [], []

    def __call__(self, function: Callable[..., Any], *args: Any, seconds: float = 100) -> list[Any]:
        """Call the function in both processes; what it returned in each. One that fails or hangs fails the test."""
        if not self.processes:
            self.start()
        for pipe in self.pipes:
            pipe.send((function, args))
        deadline = time.monotonic() + seconds
        answers: dict[int, Any] = {}
        while len(answers) < 2:
            waiting = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in answers}
            ready = multiprocessing.connection.wait(list(waiting), max(0, deadline - time.monotonic()))
            problem = None if ready else f"process {list(waiting.values())} gave no answer in {seconds} seconds"
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    answers[rank], problem = pipe.recv()
                except EOFError:
                    problem = "it died"
                problem = problem and f"process {rank}: {problem}"
                if problem:
                    break
            if problem:  # the other may wait for this one for ever
                self.stop()
                pytest.fail(problem, pytrace=False)
        return [answers[0], answers[1]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(tmp_path_factory.mktemp("pair"))
    yield pair
    pair.stop()


VARIANTS = {
    "untied": {"vocab_size": 101},  # does not divide by two, as 50,257 does not
    # Here it does: transformers' FSDP2 keeps two copies of a tied weight, and where rows are left over PyTorch lets one
    # of them go stale after the first step, in Llama as well.
    "tied and biased": {"vocab_size": 102, "tie_word_embeddings": True, "attention_bias": True},
}


@pytest.fixture(scope="module", params=VARIANTS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model of three layers."""
    place = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    model = GPT2SmallForCausalLM(tiny_config(num_hidden_layers=3, **VARIANTS[request.param]))
    with torch.no_grad():
        for parameter in model.parameters():  # larger than at init, biases included: differences would show
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(place)
    return place


def load(folder: Path, remote: bool = False, **sizes: Any) -> GPT2SmallForCausalLM:
    """The model in training mode, distributed if sizes are given; its class is the package's or the folder's own."""
    assert dist.get_world_size() == 2
    config = {"distributed_config": DistributedConfig(**sizes)} if sizes else {}
    name = "modeling_gpt2small.GPT2SmallForCausalLM"
    kind = get_class_from_dynamic_module(name, str(folder)) if remote else GPT2SmallForCausalLM
    return kind.from_pretrained(folder, **config).train()


def full_tensor(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def rows(padding: str = "right") -> list[dict[str, Tensor]]:
    """Twelve rows of unequal lengths and label counts."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for i in range(12):
        ids = torch.randint(0, 100, (16,), generator=generator)
        mask = (torch.arange(16) < 16 - 2 * i % 7).long()
        if padding == "left":
            mask = mask.flip(0)
        labels = ids.masked_fill((mask == 0) | (torch.arange(16) < 5 * i % 11), -100)
        rows.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return rows


def batch(padding: str = "right") -> dict[str, Tensor]:
    return default_data_collator(rows(padding))


def assert_close(actual: Tensor, expected: Tensor, name: str = "") -> None:
    torch.testing.assert_close(full_tensor(actual), expected, atol=1e-5, rtol=0, msg=lambda text: f"{name} {text}")


def assert_same_gradients_and_step(model: nn.Module, alone: nn.Module) -> None:
    """After both went backward: their gradients are equal, and so are their weights after a step."""
    for (name, parameter), one in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert_close(parameter.grad, one.grad, f"gradient of {name}")
    for module in (model, alone):
        # A larger epsilon than usual: Adam would blow rounding up to whole steps where a gradient is almost 0.
        torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-4).step()
    for (name, parameter), one in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert_close(parameter, one, name)


def assert_same_text(
    model: GPT2SmallForCausalLM, alone: GPT2SmallForCausalLM, padding: str | None = "left", **settings: Any
) -> None:
    prompt = {name: tensor[:3] for name, tensor in batch("left").items() if name != "labels"}
    if padding is None:
        prompt["attention_mask"].fill_(1)
    texts = [
        each.eval().generate(**prompt, max_new_tokens=8, do_sample=False, eos_token_id=None, **settings)
        for each in (model, alone)
    ]
    assert texts[1].shape == (3, 24)
    assert torch.equal(*texts)


# ---- tensor parallelism -----------------------------------------------------------------------------------------


def load_over_tensors(folder: Path, how: Any = None) -> GPT2SmallForCausalLM:
    how = how or {"distributed_config": DistributedConfig(tp_size=2)}
    model = GPT2SmallForCausalLM.from_pretrained(folder, **how).train()
    # Everything the plan names is really split: whole copies everywhere would give the right numbers too.
    for name, parameter in model.named_parameters():
        module, _, kind = replace_layer_number_by_wildcard(name).rpartition(".")
        split = module in model.tp_plan and not (model.tp_plan[module] == "rowwise" and kind == "bias")
        if module in model.tp_plan:
            assert isinstance(parameter, DTensor), name
            assert (parameter.to_local().numel() < parameter.numel()) is split, name
    return model


def tensor_parallel_training(folder: Path, how: Any) -> None:
    model, alone = load_over_tensors(folder, how), load(folder)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is model.config.tie_word_embeddings
    out, expected = model(**batch()), alone(**batch())
    assert_close(out.logits, expected.logits)
    assert_close(out.loss, expected.loss)
    out.loss.backward()
    expected.loss.backward()
    assert_same_gradients_and_step(model, alone)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        {"distributed_config": DistributedConfig(tp_size=2)},
        {"tp_plan": "auto"},
    ],
    ids=["size", "plan"],
)
def test_split_over_tensors_logits_loss_gradients_and_a_step_are_those_of_one_process(pair, folder, how):
    pair(tensor_parallel_training, folder, how)


def tensor_parallel_inference(folder: Path) -> None:
    model, alone = load_over_tensors(folder), load(folder)
    for padding in ("left", "right"):
        with torch.no_grad():  # the library then leaves DTensor for plain local products
            assert_close(model(**batch(padding)).logits, alone(**batch(padding)).logits, padding)
    assert_same_text(model, alone)
    assert_same_text(model, alone, cache_implementation="static", disable_compile=True)


@pytest.mark.slow
def test_split_over_tensors_logits_and_greedy_text_are_those_of_one_process(pair, folder):
    pair(tensor_parallel_inference, folder)


def tensor_parallel_without_logits(folder: Path) -> None:
    model, alone = load_over_tensors(folder), load(folder)
    out, expected = model(**batch(), skip_logits=True), alone(**batch())
    assert out.logits is None
    assert_close(out.loss, expected.loss)
    out.loss.backward()
    expected.loss.backward()
    assert_same_gradients_and_step(model, alone)


@pytest.mark.slow
def test_split_over_tensors_skipping_logits_falls_back_to_the_usual_loss(pair, folder):
    pair(tensor_parallel_without_logits, folder)


# ---- pipeline parallelism ---------------------------------------------------------------------------------------


def load_over_stages(folder: Path) -> GPT2SmallForCausalLM:
    model = load(folder, pp_size=2).eval()
    elsewhere = [isinstance(layer, PipelineIdentityLayer) for layer in model.model.layers]
    assert elsewhere == [[False, True, True], [True, False, False]][dist.get_rank()]
    assert isinstance(model.lm_head, PipelineIdentityLayer) is (dist.get_rank() == 0)
    return model


def pipeline_parallel_inference(folder: Path) -> None:
    model, alone = load_over_stages(folder), load(folder).eval()
    for padding in ("left", "right"):
        inputs = {name: tensor for name, tensor in batch(padding).items() if name != "labels"}
        with torch.no_grad():
            for settings in ({}, {"logits_to_keep": 1}, {"use_cache": False}):
                assert_close(model(**inputs, **settings).logits, alone(**inputs, **settings).logits, f"{settings}")
            embeddings = {"inputs_embeds": torch.randn(2, 5, 16)}
            assert_close(model(**embeddings).logits, alone(**embeddings).logits)


@pytest.mark.slow
def test_split_over_stages_logits_are_those_of_one_process(pair, folder):
    # Positions would be added again by a second stage, whose input is the stream and not embeddings.
    pair(pipeline_parallel_inference, folder)


def pipeline_parallel_text(folder: Path) -> None:
    model, alone = load_over_stages(folder), load(folder)
    assert_same_text(model, alone, padding=None)
    # With a cache the library asks the first layer how much it holds, which on later stages is nothing: their masks
    # leave out the padding, in Llama as well.
    assert_same_text(model, alone, use_cache=False)


@pytest.mark.slow
def test_split_over_stages_greedy_text_is_that_of_one_process(pair, folder):
    pair(pipeline_parallel_text, folder)


# ---- sharded data parallelism -----------------------------------------------------------------------------------


def load_in_shards(folder: Path) -> GPT2SmallForCausalLM:
    model = load(folder, fsdp_size=2)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), name
        assert parameter.to_local().numel() < parameter.numel(), name
    return model


def sharded_modules(folder: Path, remote: bool) -> tuple[set[str], set[str]]:
    model = load(folder, remote, fsdp_size=2)
    plan = _resolve_tied_embed_lm_head_plan(model.fsdp_plan, model)
    return {""} | model._expand_parallel_plan(plan).keys(), {
        name for name, module in model.named_modules() if type(module).__name__.startswith("FSDP")
    }


@pytest.mark.slow
@pytest.mark.parametrize("remote", [False, True], ids=["package", "remote"])
def test_sharded_modules_are_those_of_the_plan_and_the_model_itself(pair, folder, remote):
    """The library and its tests recognise a sharded module by the prefix of its class's name."""
    for planned, sharded in pair(sharded_modules, folder, remote):
        assert sharded == planned


def sharded_training(folder: Path, settings: dict[str, Any]) -> None:
    model, alone = load_in_shards(folder), load(folder)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is model.config.tie_word_embeddings
    everything = batch()
    items = (everything["labels"][:, 1:] != -100).sum()
    mine = {name: tensor[dist.get_rank() :: 2] for name, tensor in everything.items()}
    assert (mine["labels"] != -100).sum() * 2 != (everything["labels"] != -100).sum()  # the halves weigh differently
    out, expected = model(**mine, num_items_in_batch=items, **settings), alone(**everything)
    total = out.loss.detach().clone()
    dist.all_reduce(total)
    assert_close(total, expected.loss)
    if out.logits is not None:
        assert_close(out.logits, expected.logits[dist.get_rank() :: 2])
    (out.loss * 2).backward()  # gradients are averaged over the two
    expected.loss.backward()
    assert_same_gradients_and_step(model, alone)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"skip_logits": True}], ids=str)
def test_in_shards_logits_loss_gradients_and_a_step_are_those_of_one_process(pair, folder, settings):
    pair(sharded_training, folder, settings)


def sharded_text(folder: Path) -> None:
    assert_same_text(load_in_shards(folder), load(folder))


@pytest.mark.slow
def test_in_shards_greedy_text_is_that_of_one_process(pair, folder):
    pair(sharded_text, folder)


# ---- saving -----------------------------------------------------------------------------------------------------


def save_again(folder: Path, sizes: dict[str, int], place: Path, remote: bool) -> None:
    load(folder, remote, **sizes).save_pretrained(place)


@pytest.mark.slow
@pytest.mark.parametrize("remote", [False, True], ids=["package", "remote"])
@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"fsdp_size": 2}], ids=str)
def test_what_was_split_is_saved_whole(pair, folder, sizes, remote, tmp_path):
    pair(save_again, folder, sizes, tmp_path, remote)
    model, again = (GPT2SmallForCausalLM.from_pretrained(place) for place in (folder, tmp_path))
    for (name, tensor), its_tensor in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(tensor, its_tensor), name
    assert {p.name for p in tmp_path.iterdir()} == {p.name for p in folder.iterdir()}
    written, expected = (json.loads((place / "config.json").read_text()) for place in (tmp_path, folder))
    assert written["auto_map"] == expected["auto_map"]
    assert written["architectures"] == ["GPT2SmallForCausalLM"]


# ---- Trainer ----------------------------------------------------------------------------------------------------


def trained(folder: Path, place: Path, kind: str, skip_logits: bool) -> dict[str, Any]:
    """Three steps of four rows each, all in one process or two in each of two: log and weights."""
    model = load_in_shards(folder) if kind == "sharded" else GPT2SmallForCausalLM.from_pretrained(folder).train()
    args = TrainingArguments(
        output_dir=str(place),
        max_steps=3,
        per_device_train_batch_size=4 if kind == "alone" else 2,
        train_sampling_strategy="sequential",
        learning_rate=1e-2,
        adam_epsilon=1e-4,
        weight_decay=0.1,
        logging_steps=1,
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )
    trainer = Trainer(
        model,
        args,
        train_dataset=rows(),
        data_collator=lambda chosen: default_data_collator(chosen) | {"skip_logits": skip_logits},
    )
    trainer.train()
    # A launch that missed its aim would be one process, or copies where shards were asked for, with the same numbers.
    assert args.world_size == (1 if kind == "alone" else 2)
    assert isinstance(trainer.model_wrapped, nn.parallel.DistributedDataParallel) is (kind == "copied")
    assert isinstance(trainer.model.lm_head.weight, DTensor) is (kind == "sharded")
    return {
        "log": [{k: line[k] for k in ("loss", "grad_norm")} for line in trainer.state.log_history if "loss" in line],
        "weights": {name: full_tensor(p).detach().numpy() for name, p in trainer.model.named_parameters()},
    }


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "skip_logits"), [("copied", False), ("copied", True), ("sharded", False)])
def test_trainer_in_two_processes_takes_the_steps_of_one(pair, folder, kind, skip_logits, tmp_path):
    alone = trained(folder, tmp_path, "alone", False)
    for each in pair(trained, folder, tmp_path, kind, skip_logits):
        for name in ("loss", "grad_norm"):
            expected = [line[name] for line in alone["log"]]
            assert [line[name] for line in each["log"]] == pytest.approx(expected, abs=1e-5), name
        for name, weight in alone["weights"].items():
            assert abs(each["weights"][name] - weight).max() < 1e-5, name
