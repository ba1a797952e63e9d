"""`transformers serve` on the folder that a run on chats left: answers are those of `generate`, and come to an end."""

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import CHAT_CONTEXT
from transformers import AutoModelForCausalLM, AutoTokenizer

from compat.test_serve import openai, serving, talk
from gpt2small_hf.runs.files import read_jsonl

pytestmark = pytest.mark.slow

QUESTION, ANOTHER = "What did the fox see?", "What did the fox meet?"
CHATS = {
    "a question": [{"role": "user", "content": QUESTION}],
    "a system turn": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}],
    "several turns": [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "The fox saw the river."},
        {"role": "user", "content": ANOTHER},
    ],
}
ENOUGH = 50  # more than an answer takes, and less than the longest of these leaves of the context


@pytest.fixture(scope="module")
def server(chat_run, without_package, tmp_path_factory) -> Iterator[str]:
    """The address of a running server."""
    with serving(chat_run.model, without_package, tmp_path_factory.mktemp("serve_chat") / "output.txt") as address:
        yield address


@pytest.fixture(scope="module")
def ask(chat_run, server):
    """Ask the server: a chat → what OpenAI's client returns."""
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield lambda chat, **how: client.chat.completions.create(model=str(chat_run.model), messages=chat, **how)


@pytest.fixture(scope="module")
def tokenizer(chat_run):
    return AutoTokenizer.from_pretrained(chat_run.model)


def generated(folder, chat, **how) -> tuple[list[int], list[int]]:
    """The ids of a chat's prompt, and those that the folder itself writes after it, with the end token."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    whole = model.eval().generate(**prompt, do_sample=False, **how)[0].tolist()
    length = prompt["input_ids"].shape[1]
    return whole[:length], whole[length:]


@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
def test_an_answer_ends_at_the_templates_end_token_at_once_and_word_by_word(ask, chat_run, tokenizer, chat):
    prompt, written = generated(chat_run.model, chat)
    *said, end = written
    assert tokenizer.convert_ids_to_tokens(end) == "<|im_end|>"
    answer = ask(chat, max_tokens=ENOUGH)
    assert answer.choices[0].message.content == tokenizer.decode(said)
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), len(written))
    assert "<|" not in answer.choices[0].message.content
    chunks = [chunk.choices[0] for chunk in ask(chat, max_tokens=ENOUGH, stream=True)]
    pieces = [chunk.delta.content or "" for chunk in chunks]
    assert "".join(pieces) == tokenizer.decode(said)
    assert sum(map(bool, pieces)) > 1
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["stop"]


def test_answer_equals_the_one_in_samples_jsonl(ask, chat_run):
    last = read_jsonl(chat_run.samples)[-1]
    assert last["prompt"] == QUESTION
    answer = ask(CHATS["a question"], max_tokens=ENOUGH)
    assert answer.choices[0].message.content == last["greedy"] != ""


def test_truncated_answer_has_finish_reason_length(ask, chat_run, tokenizer):
    answer = ask(CHATS["a question"], max_tokens=3)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.content == tokenizer.decode(generated(chat_run.model, CHATS["a question"])[1][:3])


def test_answer_without_a_limit_ends(ask):
    """The server then allows 1,024 tokens, which the context could not hold."""
    limited, free = ask(CHATS["a question"], max_tokens=ENOUGH), ask(CHATS["a question"])
    assert free.choices[0].message.content == limited.choices[0].message.content
    assert free.choices[0].finish_reason == "stop"
    assert free.usage.total_tokens < CHAT_CONTEXT


def test_eight_requests_at_a_time_each_get_the_answer_to_their_own(ask, chat_run, tokenizer):
    asked = [f"What did the {who} {verb}?" for who in ("fox", "hare") for verb in ("see", "meet", "leave", "like")]
    chats = [[{"role": "user", "content": question}] for question in asked]
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda chat: ask(chat, max_tokens=ENOUGH).choices[0].message.content, chats))
    assert answers == [tokenizer.decode(generated(chat_run.model, chat)[1][:-1]) for chat in chats]
    assert len(set(answers)) > 1


def test_transformers_chat_gets_one_ended_answer_after_another(server, chat_run, tokenizer, without_package, tmp_path):
    """It allows 256 tokens, which the context could not hold, and asks whether to continue a truncated answer."""
    typed = f"{QUESTION}\n{ANOTHER}\n!exit\n"
    done = talk(server, str(chat_run.model), without_package, typed, "--save-folder", str(tmp_path))
    assert done.returncode == 0, done.stderr
    first = tokenizer.decode(generated(chat_run.model, CHATS["a question"])[1][:-1])
    chat = [*CHATS["a question"], {"role": "assistant", "content": first}, {"role": "user", "content": ANOTHER}]
    second = tokenizer.decode(generated(chat_run.model, chat)[1][:-1])
    answers = done.stdout.split(f"<{chat_run.model}>:\n")[1:]
    assert [answer.splitlines()[0].strip() for answer in answers] == [first, second]
    assert "Continue generating?" not in done.stdout


def test_answer_continues_without_the_end_token_among_the_stop_tokens(chat_run, tokenizer, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(chat_run.model, folder)
    settings = json.loads((folder / "generation_config.json").read_text())
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    settings["eos_token_id"].remove(end)
    (folder / "generation_config.json").write_text(json.dumps(settings))
    _, written = generated(folder, CHATS["a question"], max_new_tokens=ENOUGH)
    assert len(written) == ENOUGH
    ended = written.index(end) + 1
    assert written[:ended] == generated(chat_run.model, CHATS["a question"])[1]
