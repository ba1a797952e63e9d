"""Runs on chats that train LoRA's adapters: what changes, what stays, the adapter alone, and runs that were cut off."""

import importlib.util
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from conftest import CHAT_CONTEXT, REPOSITORY, chat_words, run_train, tiny_config
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import gpt2small_hf.training.run as run_module
from gpt2small_hf import GPT2SmallForCausalLM
from gpt2small_hf.config.resolve import read_config
from gpt2small_hf.errors import UsageError
from gpt2small_hf.report.page import facts
from gpt2small_hf.runs.files import read_json, read_jsonl
from gpt2small_hf.runs.layout import RunFolder
from gpt2small_hf.runs.reader import Run
from gpt2small_hf.training.budget import flops_per_token, lora_parameters, sizes
from gpt2small_hf.training.inputs import RunInputs, build_run_inputs
from gpt2small_hf.training.paths import check_packages

peft = pytest.importorskip("peft")

# PEFT 0.21 reads a property that transformers 5.23 has renamed.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

LORA = ("--lora_rank", "4")
LENGTH = ("--num_train_epochs", "3", "--learning_rate", "0.03", "--save_total_limit", "9", "--max_answers", "2")
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a saved model; a head that is the embedding, too."""
    return dict(GPT2SmallForCausalLM.from_pretrained(folder).state_dict())


def losses(run: RunFolder) -> list[float]:
    return [row["eval_loss"] for row in read_jsonl(run.metrics) if "eval_loss" in row]


@dataclass
class Made:
    """A finished run."""

    run: RunFolder
    place: Path
    base: Path
    more: tuple[str, ...]
    """Arguments of this run, in addition to those of all runs here."""

    def words(self, root: Path) -> list[str]:
        """Words for the same run in another folder."""
        return chat_words(self.place, root, *LORA, *LENGTH, "--init_from", str(self.base), *self.more)

    def inputs(self) -> RunInputs:
        """What it began with, without adapters."""
        words = chat_words(self.place, self.place / "unused", "--init_from", str(self.base), *self.more)
        return build_run_inputs(read_config(words, REPOSITORY / "examples" / "tiny.yaml"))


@pytest.fixture(scope="module")
def tied_base(chat_place, tmp_path_factory) -> Path:
    """Initial weights, the head of which is the embedding."""
    folder = tmp_path_factory.mktemp("tied") / "model"
    tokenizer = AutoTokenizer.from_pretrained(chat_place / "base" / "model")
    torch.manual_seed(0)
    GPT2SmallForCausalLM(tiny_config(vocab_size=len(tokenizer), tie_word_embeddings=True)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["no new tokens", "new tokens", "new tokens, tied"])
def made(request, chat_place, tied_base, tmp_path_factory) -> Made:
    base = tied_base if "tied" in request.param else chat_place / "base" / "model"
    more = () if "no " in request.param else ("--add_special_tokens",)
    made = Made(RunFolder(tmp_path_factory.mktemp("lora") / "run"), chat_place, base, more)
    run_train(made.words(made.run.root))
    return made


def test_only_adapters_new_rows_and_new_positions_are_trained(made):
    before, began, after = weights(made.base), made.inputs().build().state_dict(), weights(made.run.model)
    assert began.keys() == after.keys() == before.keys()
    for name, tensor in after.items():
        layer = name.removesuffix(".weight").split(".")[-1]
        if layer in ("embed_tokens", "embed_positions", "lm_head"):
            old = len(before[name])
            assert torch.equal(tensor[:old], before[name]), name
            assert len(tensor) == (CHAT_CONTEXT if layer == "embed_positions" else old + 2 * len(made.more)), name
            new, initial = tensor[old:], began[name][old:]
            if layer == "embed_positions":  # rows end before the context does: its last positions are never trained
                new, initial = new[:8], initial[:8]
            assert (new != initial).any(1).all(), name
        elif layer in ADAPTED and name.endswith("weight"):
            change = tensor - before[name]
            assert change.any()
            assert torch.linalg.matrix_rank(change, rtol=1e-3) <= 4, name
        else:
            assert torch.equal(tensor, before[name]), name


def test_it_learns(made):
    assert losses(made.run)[-1] < losses(made.run)[0] - 0.05
    assert read_json(made.run.heldout)["after"]["loss"] == pytest.approx(losses(made.run)[-1], abs=1e-4)
    assert read_json(made.run.heldout)["before"]["loss"] == losses(made.run)[0]


def test_the_adapters_folder_holds_what_was_trained_and_no_more(made):
    path = made.run.adapter / "adapter_model.safetensors"
    saved = load_file(path)
    assert all(".lora_" in name or name.endswith("trainable_tokens_delta") for name in saved)
    rows = {name.split(".")[-3]: len(tensor) for name, tensor in saved.items() if "trainable_tokens" in name}
    assert rows.pop("embed_positions") == CHAT_CONTEXT - len(weights(made.base)["model.embed_positions.weight"])
    assert set(rows.values()) == {2 for _ in made.more}
    of_layers = sum(tensor.numel() for name, tensor in saved.items() if ".lora_" in name)
    config = GPT2SmallForCausalLM.from_pretrained(made.run.model).config
    assert of_layers == lora_parameters(config, 4)
    assert flops_per_token(config, 64) - flops_per_token(config, 64, 4) == 2 * sizes(config).multiplied - 6 * of_layers
    counts = read_json(made.run.resolved)["parameters"]
    assert counts["trained"] == sum(tensor.numel() for tensor in saved.values())
    assert counts["total"] == sizes(config).total + counts["trained"]
    assert counts["adapter"] == of_layers
    share = f"{counts['trained']:,} of {counts['total']:,} parameters"
    report = dict(facts(Run(made.run)))
    assert report["trained"].startswith(share)
    targets = ", ".join(sorted(ADAPTED))
    assert report["LoRA"] == f"rank 4, alpha 8, dropout 0, on {targets} of each block; merged into the model's weights"
    assert path.stat().st_mode == (made.run.adapter / "adapter_config.json").stat().st_mode  # others may read it too


@torch.no_grad()
def test_the_adapter_alone_makes_the_same_model_of_the_base(made):
    inputs = made.inputs()
    plain, merged = inputs.build().eval(), AutoModelForCausalLM.from_pretrained(made.run.model).eval()
    batch = inputs.heldout.collate([inputs.heldout[n] for n in range(len(inputs.heldout))])
    every = torch.arange(2 * CHAT_CONTEXT).reshape(2, -1) * 7 % plain.config.vocab_size
    inputs = [{k: v for k, v in batch.items() if k != "labels"}, {"input_ids": every}]
    before = [plain(**some).logits for some in inputs]
    adapted = peft.PeftModel.from_pretrained(plain, made.run.adapter).eval()
    for some, was in zip(inputs, before, strict=True):
        torch.testing.assert_close(adapted(**some).logits, merged(**some).logits, atol=1e-4, rtol=0)
        assert (merged(**some).logits - was).abs().max() > 0.1


@pytest.mark.parametrize("made", ["no new tokens", "new tokens, tied"], indirect=True)
def test_merged_model_answers_without_the_package(made, run_isolated):
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(made.run.model),
        AutoTokenizer.from_pretrained(made.run.model),
    )
    chat = [{"role": "user", "content": "What did the fox see?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    here = model.generate(**inputs, do_sample=False, max_new_tokens=20)[0].tolist()
    said = run_isolated(
        f"""
from transformers import AutoModelForCausalLM, AutoTokenizer
folder = {str(made.run.model)!r}
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
assert type(model).__module__.startswith("transformers_modules")
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
inputs = tokenizer.apply_chat_template({chat}, add_generation_prompt=True, return_dict=True, return_tensors="pt")
print(model.generate(**inputs, do_sample=False, max_new_tokens=20)[0].tolist())
"""
    )
    assert said.strip() == str(here)


def test_the_checks_before_the_first_step_find_nothing(made, tmp_path, capsys):
    run_train([*made.words(tmp_path / "run"), "--preflight_only"])
    said = capsys.readouterr().out
    verdicts = dict(re.findall(r"^(\S+(?: \S+)*?) +(ok|note|fail)  ", said, flags=re.MULTILINE))
    assert len(verdicts) >= 15
    # The chats are few, and fill less than half of the context.
    assert {name for name, verdict in verdicts.items() if verdict != "ok"} <= {"positions", "steps", "checkpoint"}
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def long_base(chat_place, tmp_path_factory) -> Path:
    """A model whose context is longer than any of the chats."""
    folder = tmp_path_factory.mktemp("long") / "model"
    tokenizer = AutoTokenizer.from_pretrained(chat_place / "base" / "model")
    torch.manual_seed(0)
    config = tiny_config(vocab_size=len(tokenizer), max_position_embeddings=CHAT_CONTEXT)
    GPT2SmallForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def lora_words(place: Path, root: Path, base: Path, *more: str) -> list[str]:
    return chat_words(place, root, *LORA, "--init_from", str(base), "--add_special_tokens", *more)


@pytest.mark.parametrize("packing", ["best_fit", "padding"])
def test_new_positions_that_no_chat_reaches_are_a_note(chat_place, long_base, tmp_path, capsys, packing):
    longer = ("--max_position_embeddings", str(4 * CHAT_CONTEXT), "--num_train_epochs", "1", "--packing", packing)
    run = run_train(lora_words(chat_place, tmp_path / "run", long_base, *longer))
    said = capsys.readouterr().out
    assert re.search(rf"positions +note +the longest chat has \d+ tokens, of a context of {4 * CHAT_CONTEXT}: ", said)
    assert f"positions from {CHAT_CONTEXT} on stay untrained" in said
    assert run.finished


def test_new_tokens_that_get_no_gradient_still_fail(chat_place, long_base, tmp_path, monkeypatch):
    """They are in every chat, so that something keeps them from being learned."""
    words = lora_words(chat_place, tmp_path / "run", long_base)
    inputs = build_run_inputs(read_config(words, REPOSITORY / "examples" / "tiny.yaml"))
    build = inputs.build

    def frozen():
        model = build()
        delta = next(p for name, p in model.named_parameters() if "embed_tokens" in name and p.requires_grad)
        delta.register_hook(torch.zeros_like)
        return model

    monkeypatch.setattr(run_module, "build_run_inputs", lambda config: replace(inputs, build=frozen))
    with pytest.raises(UsageError, match=r"gradients: .*embed_tokens.* got one that is all zero"):
        run_train(words)


def same_weights(one: RunFolder, other: RunFolder) -> bool:
    first, second = weights(one.model), weights(other.model)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def cut_off(run: RunFolder, root: Path, n_checkpoints: int | None = None) -> RunFolder:
    """Return a copy that was interrupted after `n_checkpoints` checkpoints, or after its last step."""
    shutil.copytree(run.root, root)
    cut = RunFolder(root)
    checkpoints = sorted(cut.checkpoints.iterdir(), key=lambda path: int(path.name.split("-")[1]))
    for path in [] if n_checkpoints is None else checkpoints[n_checkpoints:]:
        shutil.rmtree(path)
    for folder in (cut.model, cut.adapter):
        shutil.rmtree(folder)
    cut.heldout.unlink()
    return cut


def assert_same_log(rows: list[dict], before: list[dict]) -> None:
    """The last line, which has the time that training took, is written again."""
    assert rows[:-1] == before[:-1]
    assert rows[-1].keys() == before[-1].keys()
    assert rows[-1]["train_loss"] == before[-1]["train_loss"]


def test_a_run_cut_off_after_an_epoch_ends_with_the_same_weights(made, tmp_path, capsys):
    cut = cut_off(made.run, tmp_path / "cut", 1)
    run_train(made.words(cut.root))
    assert "resuming from" in capsys.readouterr().out
    assert same_weights(cut, made.run)
    assert losses(cut) == losses(made.run)


def test_a_run_cut_off_after_its_last_step_is_finished_from_its_checkpoint(made, tmp_path):
    cut = cut_off(made.run, tmp_path / "cut")
    before = read_jsonl(cut.metrics)
    run_train(made.words(cut.root))
    assert same_weights(cut, made.run)
    assert_same_log(read_jsonl(cut.metrics), before)  # nothing was trained again


@pytest.mark.parametrize("made", ["new tokens"], indirect=True)
def test_a_run_that_early_stopping_ended_keeps_its_best_epoch_also_when_cut_off_after_it(made, tmp_path):
    stopping = ("--early_stopping_patience", "1", "--load_best_model_at_end", "--num_train_epochs", "40")
    more = (*stopping, "--learning_rate", "0.2", "--lr_scheduler_type", "constant")
    run = run_train([*made.words(tmp_path / "run"), *more])
    measured = losses(run)[1:]
    assert 2 <= len(measured) < 40
    assert measured[-1] > min(measured)
    assert read_json(run.heldout)["after"]["loss"] == pytest.approx(min(measured), abs=1e-5)
    cut = cut_off(run, tmp_path / "cut")
    before = read_jsonl(cut.metrics)
    run_train([*made.words(cut.root), *more])
    assert same_weights(cut, run)
    assert_same_log(read_jsonl(cut.metrics), before)


def test_without_peft_a_run_is_refused_in_one_line(chat_place, tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "peft" else find(name, *more))
    args = read_config(chat_words(chat_place, tmp_path / "run", *LORA), REPOSITORY / "examples" / "tiny.yaml")
    with pytest.raises(UsageError, match="--lora_rank needs a package that is not installed: pip install peft"):
        check_packages(args)
