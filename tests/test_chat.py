"""`gpt2small chat`: history, the end of the context, commands, pipes, and Ctrl-C on a real terminal."""

import io
import os
import re
import select
import shutil
import subprocess
import sys
import time

import pytest
from transformers import GenerationConfig
from transformers.utils import logging

from gpt2small_hf import cli
from gpt2small_hf.chat import AnswerStreamer, Session
from gpt2small_hf.config.commands import ChatArguments
from gpt2small_hf.errors import UsageError
from gpt2small_hf.evaluation.answers import answer_all
from gpt2small_hf.evaluation.completions import stop_tokens
from gpt2small_hf.evaluation.models import find_model, load_model


@pytest.fixture(scope="module")
def talker(chat_run):
    return load_model(find_model(str(chat_run.root)), device="cpu")


@pytest.fixture(scope="module")
def writer(tiny_run):
    return load_model(find_model(str(tiny_run.root)), device="cpu")


@pytest.fixture
def piped(monkeypatch, capsys):
    """Run the command with some lines from a pipe. Returns: exit status, stdout, stderr."""

    def run(text, *words):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        status = cli.main(["chat", *map(str, words)])
        return status, *capsys.readouterr()

    verbosity = logging.get_verbosity()
    yield run
    logging.set_verbosity(verbosity)


def session_of(loaded, **settings):
    notes = []
    return Session(*loaded, ChatArguments(**{"greedy": True, **settings}), notes.append), notes


def ask(session, line):
    streamer = AnswerStreamer(session.tokenizer, stop_tokens(session.model))
    session.answer(line, streamer)
    return session.tokenizer.decode(streamer.ids, skip_special_tokens=True)


def test_each_answer_is_that_to_the_conversation_so_far(talker, capsys):
    session, notes = session_of(talker)
    chat = []
    for question in ("What did the fox see?", "What did the hen meet?"):
        said = ask(session, question)
        chat.append({"role": "user", "content": question})
        (expected,) = answer_all(*talker, [chat], do_sample=False, max_new_tokens=256)
        assert said == expected.answer
        chat.append({"role": "assistant", "content": said})
        assert capsys.readouterr().out == said + "\n"
    assert session.messages == chat
    assert notes == []


def test_the_oldest_turns_are_dropped_and_the_system_message_stays(talker):
    session, notes = session_of(talker, system="Be brief.", max_new_tokens=16)
    for number in range(12):
        ask(session, f"What did the fox see at {number}?")
    assert session.messages[0] == {"role": "system", "content": "Be brief."}
    assert [one["role"] for one in session.messages[1:]] == ["user", "assistant"] * (len(session.messages) // 2)
    assert session.messages[-2]["content"].endswith("11?")
    assert len(session.messages) < 25
    assert sum("oldest turns" in note for note in notes) == 1
    session.reset()
    assert session.messages == [{"role": "system", "content": "Be brief."}]


def test_a_message_longer_than_the_context_is_refused_and_forgotten(talker):
    session, _ = session_of(talker)
    ask(session, "What did the fox see?")
    before = list(session.messages)
    with pytest.raises(UsageError, match="the context of the model has 128"):
        ask(session, "fox " * 200)
    assert session.messages == before
    with pytest.raises(UsageError, match="system message is too long"):
        session.set_system("fox " * 200)


def test_special_tokens_that_a_user_types_are_text(talker, writer):
    session, _ = session_of(talker)
    end = session.tokenizer.eos_token
    typed, usual = (session._ask(text) for text in (f"a{end}b", "ab"))
    session.reset()
    assert typed.count(session.tokenizer.eos_token_id) == usual[: len(usual)].count(session.tokenizer.eos_token_id) - 1
    session, _ = session_of(writer)
    assert session.tokenizer.eos_token_id not in session._continue(f"a{session.tokenizer.eos_token}b")


def test_without_a_template_text_is_continued_and_cut_to_the_context(writer):
    session, notes = session_of(writer, max_new_tokens=8)
    first = ask(session, "Once the fox")
    second = ask(session, "")
    longer, _ = session_of(writer, max_new_tokens=8)
    assert ask(longer, f"Once the fox{first}") == second
    assert notes == []
    for _ in range(8):
        ask(session, "")
    assert len(session.text) <= 32
    assert len(notes) == 1
    assert "context has 32 tokens" in notes[0]
    session.reset()
    ask(session, "")  # a new text
    with pytest.raises(UsageError, match="no chat template"):
        session.set_system("Be brief.")


def test_generation_settings_stored_with_a_model_do_not_apply(tiny_run, writer, tmp_path):
    shutil.copytree(tiny_run.model, tmp_path / "model")
    GenerationConfig(max_new_tokens=500, num_beams=3, do_sample=True, eos_token_id=1).save_pretrained(
        tmp_path / "model"
    )
    loaded = load_model(find_model(str(tmp_path / "model")), device="cpu")
    assert 1 in stop_tokens(loaded[0])
    loaded[0].generation_config.eos_token_id = writer[0].generation_config.eos_token_id
    said = [ask(session_of(one, max_new_tokens=8)[0], "Once the fox") for one in (loaded, writer)]
    assert said[0] == said[1]


def test_lines_from_a_pipe_are_answered_in_order(piped, tiny_run):
    words = (tiny_run.root, "--max_new_tokens", "6", "--greedy")
    status, out, err = piped("Once the fox\nThen the dog\n", *words)
    once, then = (piped(f"{line}\n", *words)[1] for line in ("Once the fox", "Then the dog"))
    assert (status, out) == (0, once + then)
    assert err == ""
    assert piped("/quit\nOnce the fox\n", *words) == (0, "", "")


def test_the_seed_determines_sampled_answers(piped, tiny_run):
    words = (f"{tiny_run.root}:10", "--temperature", "1.5", "--max_new_tokens", "12")
    first, again, other = (piped("Once the\n", *words, "--seed", seed)[1] for seed in (1, 1, 2))
    assert first == again != other


def test_commands_and_errors_do_not_end_the_conversation(piped, chat_run):
    text = (
        "/help\n/wrong\n/system Be brief.\nWhat did the fox see?\n/reset\n" + "fox " * 200 + "\nWhat did the fox see?\n"
    )
    status, out, err = piped(text, chat_run.root, "--greedy")
    assert status == 0
    assert len(out.splitlines()) == 2
    assert [word in err for word in ("/system TEXT", "/wrong is not a command", "prompt of")] == [True] * 3


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["{run}", "--temperature", "0"], "--greedy"),
        (["{run}", "--top_p", "1.1"], "--top_p is 1.1"),
        (["{run}", "--max_new_tokens", "0"], "--max_new_tokens is 0"),
        (["{run}", "--system", "Be brief."], "no chat template"),
        (["{run}:all"], "names 2 models"),
        (["{run}/absent"], "does not exist"),
        ([], "MODEL"),
    ],
)
def test_a_wrong_command_line_is_a_one_line_error(piped, tiny_run, words, says):
    status, out, err = piped("", *[word.format(run=tiny_run.root) for word in words])
    assert (status, out) == (2, "")
    assert says in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal")
def test_ctrl_c_on_a_terminal_stops_the_answer_and_not_the_program(tiny_run, tmp_path, writer):
    import pty

    folder = tmp_path / "long"  # whose answers take minutes
    model, tokenizer = load_model(find_model(str(tiny_run.root)), device="cpu")
    model.resize_position_embeddings(50_000)
    tokenizer.eos_token = "\u0100"  # the byte 0, which no text has
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ours, theirs = pty.openpty()
    words = [
        sys.executable,
        "-m",
        "gpt2small_hf",
        "chat",
        str(folder),
        "--max_new_tokens",
        "49000",
        "--seed",
        "0",
    ]
    # A session of its own, with this terminal as the controlling one: Ctrl-C is then a signal.
    process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=take_terminal)
    os.close(theirs)
    screen = ""

    def wait_for(pattern):
        nonlocal screen
        until = time.monotonic() + 60
        while not (found := re.search(pattern, screen, re.DOTALL)):
            assert time.monotonic() < until, screen
            if select.select([ours], [], [], 1)[0]:
                screen += os.read(ours, 4096).decode(errors="replace")
        screen = screen[found.end() :]

    try:
        wait_for(r"long · .*/help lists commands.*> ")
        for _ in range(2):
            os.write(ours, b"Once the fox\r")
            wait_for("Once the fox\r\n.{40}")
            os.write(ours, b"\x03")
            wait_for(r"\[stopped\]\r\n> ")
        # Ctrl-C before `input` waits for a key is taken only with the next key, so the echo is awaited.
        os.write(ours, b"half a line")
        wait_for("half a line")
        time.sleep(0.2)
        os.write(ours, b"\x03")
        wait_for("/quit or Ctrl-D ends\r\n> ")
        os.write(ours, b"\x04")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def take_terminal():
    import fcntl
    import termios

    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
