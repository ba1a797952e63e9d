"""`transformers serve`, as it comes, on a published folder: OpenAI's client asks, and gets what `generate` writes."""

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from compat.published import CONTEXT, QUESTION

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytestmark = pytest.mark.slow

# What the installed command `transformers` does, in a process that cannot import our package.
COMMAND = "sys.argv[0] = 'transformers'\nfrom transformers.cli.transformers import main\nsys.exit(main())"
CHAT = [{"role": "user", "content": QUESTION}]


@contextmanager
def serving(folder: Path, without_package: Callable[..., dict], said: Path) -> Iterator[str]:
    """The address of a running server of that folder. What it says goes to a file, and is printed when it ends."""
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ("serve", str(folder), "--host", "127.0.0.1", "--port", str(port), "--device", "cpu")
    with said.open("w") as output:
        process = subprocess.Popen(
            **without_package(COMMAND, *words, "--trust-remote-code"), stdout=output, stderr=subprocess.STDOUT
        )
    try:
        wait_until_healthy(f"http://127.0.0.1:{port}/health", process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=30)
        print(said.read_text()[-4000:])


def wait_until_healthy(address, process):
    for _ in range(600):
        assert process.poll() is None, "the server stopped"
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    raise AssertionError("the server did not come up")


@pytest.fixture(scope="module")
def server(published, without_package, tmp_path_factory) -> Iterator[str]:
    """The address of a running server."""
    with serving(published, without_package, tmp_path_factory.mktemp("serve") / "output.txt") as address:
        yield address


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def name(published):
    return str(published)  # the server is pinned to the name it was given


@pytest.fixture(scope="module")
def written(published):
    """What the folder itself writes after a prompt: text → text."""
    tokenizer = AutoTokenizer.from_pretrained(published)
    model = AutoModelForCausalLM.from_pretrained(published).eval()

    def continue_(prompt):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
        return tokenizer.decode(out, skip_special_tokens=True)

    chat = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    return {"chat": continue_(chat), "text": continue_("The fox")}


def test_a_chat_is_answered_at_once_and_word_by_word(client, name, written):
    answer = client.chat.completions.create(model=name, messages=CHAT, max_tokens=12)
    assert answer.choices[0].message.content == written["chat"]
    assert written["chat"].strip()
    stream = client.chat.completions.create(model=name, messages=CHAT, max_tokens=12, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(pieces) == written["chat"]
    assert sum(map(bool, pieces)) > 1


def test_a_text_is_continued_at_once_and_word_by_word(client, name, written):
    answer = client.completions.create(model=name, prompt="The fox", max_tokens=12)
    assert answer.choices[0].text == written["text"]
    assert answer.usage.prompt_tokens > 0
    stream = client.completions.create(model=name, prompt="The fox", max_tokens=12, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == written["text"]


def test_eight_requests_at_a_time_get_the_same_answer(client, name, written):
    def ask(_):
        return client.chat.completions.create(model=name, messages=CHAT, max_tokens=12).choices[0].message.content

    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(ask, range(8))) == {written["chat"]}


@pytest.mark.parametrize("stream", [False, True], ids=["at once", "streaming"])
@pytest.mark.parametrize("excess", ["prompt", "answer"])
def test_a_request_past_the_context_fails_alone(client, name, written, excess, stream):
    if excess == "prompt":
        request = {"prompt": "The fox saw. " * CONTEXT, "max_tokens": 4}
    else:
        endless = {"min_new_tokens": 2 * CONTEXT, "max_new_tokens": 2 * CONTEXT}
        request = {"prompt": "The fox", "extra_body": {"generation_config": json.dumps(endless)}}
    with pytest.raises(openai.APIError):
        list(client.completions.create(model=name, stream=stream, **request))
    # The server drops the connection of a failed request; a client that retries, as OpenAI's does unless told not to,
    # opens another.
    again = client.with_options(max_retries=2).completions.create(model=name, prompt="The fox", max_tokens=12)
    assert again.choices[0].text == written["text"]


def test_transformers_chat_talks_to_it(server, name, written, without_package, tmp_path):
    # The n answers "Continue generating?", which it asks when a limit cut the answer off.
    typed = f"{QUESTION}\nn\n!exit\n"
    done = talk(server, name, without_package, typed, "max_new_tokens=12", "--save-folder", str(tmp_path))
    assert written["chat"] in done.stdout, done.stderr


def talk(
    server: str, name: str, without_package: Callable[..., dict], typed: str, *words: str
) -> CompletedProcess[str]:
    """`transformers chat`, answering greedily what is typed."""
    process = without_package(COMMAND, "chat", name, server, "do_sample=False", *words)
    del process["env"]["HF_HUB_OFFLINE"]  # its client for the server is the Hub's, and would take this literally
    process["env"] |= {"TERM": "dumb", "COLUMNS": "200", "HF_HUB_DISABLE_TELEMETRY": "1"}
    return subprocess.run(**process, input=typed, capture_output=True, timeout=120)
