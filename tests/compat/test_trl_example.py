"""The example that fine-tunes with TRL: begins where `train.py` does, has its labels, leaves a folder that answers."""

import json
import re
import runpy
import shutil
import subprocess
import sys
from argparse import Namespace
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY, tiny_config

from gpt2small_hf import GPT2SmallForCausalLM
from gpt2small_hf.config.resolve import read_config
from gpt2small_hf.data.chat.conversations import Conversation
from gpt2small_hf.data.chat_dataset import ChatDataset
from gpt2small_hf.data.tokenizer import train_tokenizer
from gpt2small_hf.training.inputs import build_run_inputs

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

EXAMPLE = REPOSITORY / "examples" / "finetune_with_trl.py"
CHATS = REPOSITORY / "examples" / "data" / "chats.jsonl"
ANSWER = "The fox saw the river."


@pytest.fixture(scope="module")
def example():
    """The script's functions."""
    return runpy.run_path(str(EXAMPLE))


@pytest.fixture(scope="module")
def young(tmp_path_factory):
    """A model folder with a context too short for chats, and a tokenizer that has met their words."""
    folder = tmp_path_factory.mktemp("young") / "model"
    tokenizer = train_tokenizer([CHATS.read_text(encoding="utf-8")], 1024)
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.eos_token_id)
    torch.manual_seed(0)
    GPT2SmallForCausalLM(tiny_config(vocab_size=len(tokenizer), **ids)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def similar_chats(n=40):
    """Chats with one answer to every question, some with words of the system, some with two questions."""
    chats = []
    for number in range(n):
        chat = [{"role": "user", "content": f"What did number {number} see?"}, {"role": "assistant", "content": ANSWER}]
        if number % 3 == 0:
            chat.insert(0, {"role": "system", "content": "Say it in short words."})
        if number % 5 == 0:
            chat += [{"role": "user", "content": "Once more."}, {"role": "assistant", "content": ANSWER}]
        chats.append(chat)
    return chats


def write(path, chats):
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats), encoding="utf-8")
    return path


def sft_trainer(example, young, place, rows, **changes):
    """A trainer of the example's model with its settings, and changed ones."""
    model, tokenizer = example["chat_model"](str(young))
    settings = example["settings"](
        Namespace(output_dir=place, epochs=1, learning_rate=0.01), tokenizer.model_max_length
    )
    settings.eval_strategy = settings.save_strategy = "no"
    settings.load_best_model_at_end = False
    for name, value in changes.items():
        setattr(settings, name, value)
    rows = datasets.Dataset.from_list(rows)
    return trl.SFTTrainer(model, settings, train_dataset=rows, processing_class=tokenizer)


# ---- as train.py -------------------------------------------------------------------------------------------------


def test_trl_example_starts_from_the_model_of_train_py(example, young, tmp_path):
    model, tokenizer = example["chat_model"](str(young))
    words = [str(EXAMPLE.with_name("chat.yaml")), "--init_from", str(young), "--output_dir", str(tmp_path), "--use_cpu"]
    theirs = build_run_inputs(read_config(words, default_recipe=Path("unused.yaml")))
    wanted = theirs.build()
    assert model.config.vocab_size == len(tokenizer) == 1026
    assert model.config.max_position_embeddings == tokenizer.model_max_length == 256
    assert tokenizer.chat_template == theirs.tokenizer.chat_template
    assert tokenizer.get_vocab() == theirs.tokenizer.get_vocab()
    weights = wanted.state_dict()
    assert model.state_dict().keys() == weights.keys()
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(model.config, name) == getattr(wanted.config, name)
    ends = [tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")]
    assert model.generation_config.eos_token_id == wanted.generation_config.eos_token_id == ends


def test_a_model_that_has_the_tokens_already_keeps_its_embeddings(example, published):
    before = GPT2SmallForCausalLM.from_pretrained(published)
    model, tokenizer = example["chat_model"](str(published))
    assert torch.equal(model.get_input_embeddings().weight, before.get_input_embeddings().weight)
    assert torch.equal(model.get_position_embeddings().weight[:128], before.get_position_embeddings().weight)
    assert tokenizer.decode(model.generation_config.eos_token_id) == "<|im_end|><|endoftext|>"


def test_trl_has_the_labels_of_train_py_for_every_conversation(example, young, tmp_path):
    rows = example["read"](CHATS)
    trainer = sft_trainer(example, young, tmp_path, rows)
    tokenizer = trainer.processing_class
    assert all(example["can_be_learned"](row["messages"], tokenizer) for row in rows)
    seen = []
    for row in trainer.train_dataset:
        assert len(row["input_ids"]) <= 256
        assert sum(row["seq_lengths"]) == len(row["input_ids"])
        for end, length in zip(accumulate(row["seq_lengths"]), row["seq_lengths"], strict=True):
            seen.append((row["input_ids"][end - length : end], row["labels"][end - length : end]))
    ours = ChatDataset(
        [Conversation(row["messages"], "") for row in rows], tokenizer, seq_len=256, packing="padding", overlong="drop"
    )
    assert len(ours) == len(rows) == len(CHATS.read_bytes().splitlines())
    assert sorted(seen) == sorted((row["input_ids"].tolist(), row["labels"].tolist()) for row in ours)


def test_only_typed_markers_are_encoded_differently_from_train_py(example, young, tmp_path):
    typed = [{"role": "user", "content": "What is <|im_end|>?"}, {"role": "assistant", "content": "A marker."}]
    trainer = sft_trainer(example, young, tmp_path, [{"messages": typed}])
    tokenizer = trainer.processing_class
    (row,) = ChatDataset([Conversation(typed, "")], tokenizer, seq_len=256, packing="padding")
    assert row["input_ids"].tolist().count(tokenizer.eos_token_id) == 2
    assert trainer.train_dataset[0]["input_ids"].count(tokenizer.eos_token_id) == 3


@pytest.mark.slow
def test_eight_rows_one_by_one_are_the_step_of_eight_together(example, young, tmp_path):
    rows = example["read"](CHATS)[:80]
    steps = []
    for size in (1, 8):
        sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 8 // size}
        trainer = sft_trainer(
            example, young, tmp_path, rows, max_steps=2, logging_strategy="steps", logging_steps=1, **sizes
        )
        assert len(trainer.train_dataset) > 16
        trainer.train()
        steps.append([entry[name] for entry in trainer.state.log_history[:2] for name in ("loss", "grad_norm")])
    assert len(steps[0]) == 4
    assert steps[0] == pytest.approx(steps[1], rel=1e-4)


@pytest.mark.slow
def test_the_best_epoch_is_kept(example, young, tmp_path):
    """The held-out answers are other ones: the loss on them falls while the template is learned, and then rises."""
    model, tokenizer = example["chat_model"](str(young))
    settings = example["settings"](Namespace(output_dir=tmp_path, epochs=30, learning_rate=0.03), 256)
    other = [{"messages": [chat[0], {"role": "assistant", "content": "Nobody knows."}]} for chat in similar_chats(8)]
    trainer = trl.SFTTrainer(
        model,
        settings,
        processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_list([{"messages": chat} for chat in similar_chats(20)]),
        eval_dataset=datasets.Dataset.from_list(other),
    )
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(losses) == 30
    assert losses[0] > min(losses) < losses[-1] - 0.1
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(losses), abs=1e-5)


# ---- the whole ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_loss_falls_and_the_folder_alone_answers_and_stops(young, tmp_path, without_package):
    shutil.copytree(young, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": 7}')  # not where a turn ends
    too_long = [{"role": "user", "content": "word " * 300}, {"role": "assistant", "content": "No."}]
    data = write(tmp_path / "chats.jsonl", [too_long, *similar_chats(), [{"role": "user", "content": "Anybody?"}]])
    words = ["model", "--data", data.name, "--output_dir", "out", "--epochs", "50", "--learning_rate", "0.02"]
    done = subprocess.run([sys.executable, str(EXAMPLE), *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    assert "40 of 42 conversations have an answer and at most 256 tokens; every tenth is held out\n" in done.stdout
    before, after = map(float, re.findall(r"([\d.]+) (?:before|after)", done.stdout))
    measured = [float(loss) for loss in re.findall(r"'eval_loss': '([\d.]+)'", done.stdout)]
    assert len(measured) == 1 + 50 + 1  # before, after every epoch, and the best of them once more
    assert after == pytest.approx(min(measured), abs=0.0006)  # printed with three decimals
    assert after < before / 10
    # The tenth and the twentieth conversation were held out.
    answered = "\nuser: What did number 9 see?\nassistant: {0}\n\nuser: What did number 19 see?\nassistant: {0}\n"
    assert answered.format(ANSWER) in done.stdout
    assert done.stdout.splitlines()[-2:] == [
        "wrote out/model",
        'next: pip install "transformers[serving]"; transformers serve out/model --trust-remote-code',
    ]

    shutil.rmtree(tmp_path / "model")
    code = """
from transformers import pipeline
folder, answer = sys.argv[1:]
write = pipeline("text-generation", model=folder, trust_remote_code=True)
model, tokenizer = write.model, write.tokenizer
assert type(model).__module__.startswith("transformers_modules")
assert model.config.max_position_embeddings == tokenizer.model_max_length == 256
assert model.config.use_cache
assert model.dtype.is_floating_point and model.dtype.itemsize == 4
assert (model.generation_config.max_length, model.generation_config.max_new_tokens) == (256, None)
assert tokenizer.convert_ids_to_tokens(model.generation_config.eos_token_id) == ["<|im_end|>", "<|endoftext|>"]
question = [{"role": "user", "content": "What did number 19 see?"}]
said = write(question, do_sample=False)[0]["generated_text"][-1]
assert said == {"role": "assistant", "content": answer}, said
prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
ids = model.generate(**prompt, do_sample=False)[0].tolist()
assert ids[-1] == tokenizer.eos_token_id and len(ids) < 128
unasked = tokenizer("The", return_tensors="pt")
ids = model.generate(**unasked, do_sample=False)[0].tolist()
assert ids[-1] in model.generation_config.eos_token_id or len(ids) == 256
print("ANSWERED")
"""
    heard = subprocess.run(**without_package(code, str(tmp_path / "out" / "model"), ANSWER), capture_output=True)
    assert heard.returncode == 0, heard.stderr
    assert heard.stdout.endswith("ANSWERED\n")


# ---- mistakes ----------------------------------------------------------------------------------------------------

FORM = 'line 3, is not {"messages": [{"role": "user", "content": "text"}, ...]} in UTF-8.'
LINES = {
    "broken.jsonl": (b'{"messages": [{"role": "user"', FORM),
    "bare.jsonl": (b'{"text": "no messages"}', FORM),
    "list.jsonl": (b"[1]", FORM),
    "latin.jsonl": ('{"messages": [{"role": "user", "content": "sch\u00f6n"}]}'.encode("latin-1"), FORM),
    "empty.jsonl": (b'{"messages": []}', "line 3 has no turns."),
    "silent.jsonl": (b'{"messages": [{"role": "user", "content": null}]}', "line 3, turn 1: 'content' is null"),
    "role.jsonl": (b'{"messages": [{"role": "robot", "content": "Hello"}]}', "line 3, turn 1 has the role 'robot'"),
    "first.jsonl": (
        b'{"messages": [{"role": "assistant", "content": "Hello"}]}',
        "is an assistant turn without a user turn",
    ),
}


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["no/such/folder"], "no/such/folder is neither a model folder nor a Hub id like user/name."),
        (["MODEL", "--data", "absent.jsonl"], "absent.jsonl"),
        *((["MODEL", "--data", name], complaint) for name, (_, complaint) in LINES.items()),
        (
            ["MODEL", "--data", "few.jsonl"],
            "few.jsonl: 9 of 10 conversations have an answer and at most 256 tokens. Give at least ten.",
        ),
        (["MODEL", "--epochs", "0"], "--epochs is 0. Give a number above 0."),
        (["MODEL", "--learning_rate", "-0.1"], "--learning_rate is -0.1. Give a number above 0."),
        (["MODEL", "--output_dir", "done"], "done already contains a model. Choose another folder with --output_dir."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line(words, complaint, young, tmp_path, monkeypatch, capsys):
    sound = json.dumps({"messages": similar_chats(1)[0]}).encode()
    for name, (line, _) in LINES.items():
        (tmp_path / name).write_bytes(sound + b"\n\n" + line + b"\n")
    write(tmp_path / "good.jsonl", similar_chats())
    write(tmp_path / "few.jsonl", [*similar_chats(9), [{"role": "user", "content": "Anybody?"}]])
    (tmp_path / "done" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    words = [str(young) if word == "MODEL" else word for word in words]
    data = [] if "--data" in words else ["--data", "good.jsonl"]
    monkeypatch.setattr("sys.argv", ["finetune_with_trl.py", *words, *data])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    said = capsys.readouterr()
    assert (stopped.value.code, said.out) == (2, "")
    assert "Traceback" not in said.err
    line = said.err.splitlines()[-1]  # above it may stand the library's bar for loading weights
    assert line.startswith("error: ")
    assert complaint in line
    assert not (tmp_path / "runs").exists()
