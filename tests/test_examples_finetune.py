"""examples/finetune_from_hub.py: supervised tokens, the saved model, and error messages."""

import json
import re
import runpy
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import REPOSITORY
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

EXAMPLE = REPOSITORY / "examples" / "finetune_from_hub.py"
ANSWER = "The fox saw the river."
# What the example does not ask its reader to install.
UNNEEDED = ("gpt2small_hf", "datasets", "trl", "peft")


def chats(answers=(ANSWER,), n_chats=20):
    """Short conversations, some with words of the system, some with two questions."""
    found = []
    for n in range(n_chats):
        asked = {"role": "user", "content": f"What did number {n} see?"}
        chat = [asked, {"role": "assistant", "content": answers[n % len(answers)]}]
        if n % 3 == 0:
            chat.insert(0, {"role": "system", "content": "Say it in short words."})
        if n % 5 == 0:
            chat += [{"role": "user", "content": "Once more."}, {"role": "assistant", "content": answers[0]}]
        found.append(chat)
    return found


def write(path, conversations):
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in conversations), encoding="utf-8")
    return path


def finetune(model, data, place, *words):
    """What the example prints, in a process of its own that cannot import our package."""
    code = "import runpy, sys\n"
    code += f"sys.modules.update(dict.fromkeys({UNNEEDED}))\n"  # importing one of them then fails
    code += "runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    command = [sys.executable, "-c", code, str(EXAMPLE), str(model), "--data", str(data), *words]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(EXAMPLE))


@pytest.fixture(scope="module")
def tokenizer(tiny_run, example):
    tokenizer = AutoTokenizer.from_pretrained(tiny_run.model)
    tokenizer.chat_template = example["TEMPLATE"]
    return tokenizer


# ---- the rows ----------------------------------------------------------------------------------------------------


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "role": st.sampled_from(["system", "user", "assistant"]),
                "content": st.text() | st.text(alphabet=" \n\tA:s'é日"),
            }
        ),
        min_size=1,
        max_size=5,
    )
)
def test_only_answers_and_their_end_tokens_are_supervised(example, tokenizer, chat):
    row = example["labelled"](chat, tokenizer)
    learned = [id for id in row["labels"] if id != -100]
    answers = [turn["content"].strip() for turn in chat if turn["role"] == "assistant"]
    assert tokenizer.decode(learned) == "".join(answer + tokenizer.eos_token for answer in answers)
    assert all(label in (-100, id) for id, label in zip(row["input_ids"], row["labels"], strict=True))

    # An answer follows exactly the tokens of the generation prompt.
    for n, turn in enumerate(chat):
        if turn["role"] == "assistant" and n:
            prompt = tokenizer.apply_chat_template(chat[:n], add_generation_prompt=True)["input_ids"]
            assert row["input_ids"][: len(prompt)] == prompt
            assert row["labels"][len(prompt) - 1] == -100
            assert row["labels"][len(prompt)] == row["input_ids"][len(prompt)]


def test_loss_of_a_padded_batch_equals_its_rows_alone(tiny_run, example, tokenizer):
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    rows = [example["labelled"](chat, tokenizer) for chat in chats()[:4]]
    assert len({len(row["labels"]) for row in rows}) > 1
    model = AutoModelForCausalLM.from_pretrained(tiny_run.model)
    model.resize_position_embeddings(256)
    with torch.no_grad():
        together = model(**example["padded"](rows), num_items_in_batch=1).loss
        alone = sum(model(**example["padded"]([row]), num_items_in_batch=1).loss for row in rows)
    assert together.item() == pytest.approx(alone.item(), rel=1e-5)
    batch = example["padded"](rows)
    assert (batch["labels"] == tokenizer.eos_token_id).sum() == sum(
        turn["role"] == "assistant" for chat in chats()[:4] for turn in chat
    )


# ---- the whole ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_loss_falls_and_the_folder_alone_answers_a_question(tiny_run, tmp_path, run_isolated):
    shutil.copytree(tiny_run.model, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": 7}')  # not where a turn ends
    too_long = [{"role": "user", "content": "word " * 200}, {"role": "assistant", "content": "No."}]
    data = write(tmp_path / "chats.jsonl", [too_long, *chats(), [{"role": "user", "content": "Anybody?"}]])
    said = finetune("model", data, tmp_path, "--output_dir", "out", "--epochs", "20", "--learning_rate", "0.02")
    assert "20 conversations; left out: 1 longer than 256 tokens, 1 without an answer\n" in said
    before, after = map(float, re.findall(r"([\d.]+) (?:before|after)", said))
    assert after < before / 10
    # Number 9 and number 19 were held out.
    assert f"\nuser: What did number 9 see?\nassistant: {ANSWER}\n\nuser: What did number 19 see?\nassistant: " in said
    assert said.splitlines()[-2:] == [
        "wrote out/model",
        'next: pip install "transformers[serving]"; transformers serve out/model --trust-remote-code',
    ]

    assert len({path.stat().st_mode for path in (tmp_path / "out" / "model").iterdir()}) == 1  # others may read all
    shutil.rmtree(tmp_path / "model")
    heard = run_isolated(f"""
from transformers import pipeline
write = pipeline("text-generation", model={str(tmp_path / "out" / "model")!r}, trust_remote_code=True)
assert "transformers_modules" in type(write.model).__module__
assert write.model.config.max_position_embeddings == write.tokenizer.model_max_length == 256
assert write.model.config.use_cache
assert write.model.generation_config.max_length == 256
assert write.model.generation_config.eos_token_id == write.tokenizer.eos_token_id
chat = [dict(role="user", content="What did number 25 see?")]
print(write(chat, do_sample=False)[0]["generated_text"][-1]["content"])
""")
    assert heard == f"{ANSWER}\n"


@pytest.mark.slow
def test_training_ends_when_the_validation_loss_rises_and_the_best_epoch_is_kept(tiny_run, tmp_path):
    words = ["crow", "dog", "fox", "hare", "river", "stone", "field", "Once", "Then", "Later"]
    answers = ["".join(f"{words[(n * k) % 10]} " for k in (3, 7, 9)) for n in range(100)]
    data = write(tmp_path / "chats.jsonl", chats(answers, 100))
    said = finetune(tiny_run.model, data, tmp_path, "--output_dir", "out", "--epochs", "100", "--learning_rate", "0.03")
    # Measured before the first epoch, after each, and once more at the end.
    _, *epochs, last = map(float, re.findall(r"'eval_loss': '([\d.]+)'", said))
    assert len(epochs) < 100
    assert epochs[-1] > epochs[-2] == min(epochs)
    assert last == min(epochs) > 2.5  # seen: 3.3, and 1.3 with the held-out conversations among those trained on


@pytest.mark.slow
def test_few_conversations_make_small_batches_many_epochs_and_keep_the_last(tiny_run, tmp_path):
    """In batches of eight, thirty would be twelve steps in all, and three of them chose the epoch."""
    data = write(tmp_path / "chats.jsonl", chats(n_chats=30))
    said = finetune(tiny_run.model, data, tmp_path, "--output_dir", "out", "--learning_rate", "0.03")
    assert (
        "\n29 epochs of 14 steps, 2 conversations each; the last is kept: 3 held-out ones are too few to choose by\n"
        in said
    )
    _, *epochs, last = map(float, re.findall(r"'eval_loss': '([\d.]+)'", said))
    assert len(epochs) == 29
    assert last == epochs[-1]
    assert f"\nassistant: {ANSWER}\n" in said
    assert not [*tmp_path.glob("out/checkpoints/*")]


def test_every_included_conversation_has_a_supervised_token(example, tokenizer):
    conversations = example["read"](EXAMPLE.parent / "data" / "chats.jsonl")
    assert len(conversations) >= 100
    for chat in conversations:
        assert set(example["labelled"](chat, tokenizer)["labels"]) != {-100}


# ---- mistakes ----------------------------------------------------------------------------------------------------

FORM = (
    'is not {"messages": [{"role": "user", "content": "text"}, ...]} in UTF-8 with the roles system, user, assistant.'
)
LINES = {
    "broken.jsonl": b'{"messages": [{"role": "user"',
    "bare.jsonl": b'{"text": "no messages"}',
    "empty.jsonl": b'{"messages": []}',
    "role.jsonl": b'{"messages": [{"role": "robot", "content": "Hello"}]}',
    "silent.jsonl": b'{"messages": [{"role": "user", "content": null}]}',
    "words.jsonl": b'{"messages": ["Hello"]}',
    "latin.jsonl": '{"messages": [{"role": "user", "content": "sch\u00f6n"}]}'.encode("latin-1"),
}


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["no/such/folder"], "no/such/folder is neither a model folder nor a Hub id like user/name."),
        (["MODEL", "--data", "absent.jsonl"], "absent.jsonl"),
        *((["MODEL", "--data", name], f"{name}, line 3, {FORM}") for name in LINES),
        (
            ["MODEL", "--data", "few.jsonl"],
            "few.jsonl has 9 conversations; left out: 0 longer than 256 tokens, 0 without",
        ),
        (["MODEL", "--max_length", "4"], "good.jsonl has 0 conversations; left out: 20 longer than 4 tokens"),
        (
            ["MODEL", "--data", "mute.jsonl"],
            "mute.jsonl has 0 conversations; left out: 0 longer than 256 tokens, 12 with",
        ),
        (["MODEL", "--epochs", "0"], "--epochs is 0. Give a number above 0."),
        (["MODEL", "--learning_rate", "-0.1"], "--learning_rate is -0.1. Give a number above 0."),
        (["MODEL", "--max_length", "0"], "--max_length is 0. Give a number above 0."),
        (["MODEL", "--output_dir", "done"], "done already contains a model. Choose another folder with --output_dir."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line(words, complaint, tiny_run, tmp_path, monkeypatch, capsys):
    sound = json.dumps({"messages": chats()[0]}).encode()
    for name, line in LINES.items():
        (tmp_path / name).write_bytes(sound + b"\n\n" + line + b"\n")
    write(tmp_path / "good.jsonl", chats())
    write(tmp_path / "few.jsonl", chats()[:9])
    write(tmp_path / "mute.jsonl", [chat[:1] for chat in chats()[1:] if chat[0]["role"] == "user"][:12])
    (tmp_path / "done" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    words = [str(tiny_run.model) if word == "MODEL" else word for word in words]
    data = [] if "--data" in words else ["--data", "good.jsonl"]
    monkeypatch.setattr("sys.argv", ["finetune_from_hub.py", *words, *data])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    said = capsys.readouterr()
    assert (stopped.value.code, said.out) == (2, "")
    assert "Traceback" not in said.err
    line = said.err.splitlines()[-1]  # above it may stand the library's bar for loading weights
    assert line.startswith("error: ")
    assert complaint in line
    assert not (tmp_path / "runs").exists()
