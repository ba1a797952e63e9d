"""`gpt2small answer`: questions of all formats, files of answers, resuming, batches."""

import json
import re
import shutil

import pytest

from gpt2small_hf import cli
from gpt2small_hf.answer import batches, generate, prompts
from gpt2small_hf.data.chat.questions import read_questions
from gpt2small_hf.errors import UsageError
from gpt2small_hf.evaluation.models import find_model, load_model
from gpt2small_hf.runs.answer_files import AnswersFile, ModelAnswer
from gpt2small_hf.runs.files import sha256

ROWS = [
    {"id": "fox", "question": "What did the fox see?", "reference": "The fox saw the river."},
    {"instruction": "What did the hen meet?", "input": "At the river.", "output": "The fox."},
    {
        "messages": [
            {"role": "user", "content": "What did the owl like?"},
            {"role": "assistant", "content": "The field."},
        ]
    },
    {"question": "What did the pig, the cat and the crow leave, and where did they see it before that?"},
    {"question": "Who?"},
]


@pytest.fixture
def questions(tmp_path):
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path / "questions.jsonl"


def test_questions_are_read_from_three_formats_and_slices(questions):
    asked = [one.question for one in read_questions(str(questions))]
    assert [one.id for one in asked] == ["fox", "1", "2", "3", "4"]
    assert asked[1].question == "What did the hen meet?\n\nAt the river."
    assert [one.reference for one in asked] == ["The fox saw the river.", "The fox.", "The field.", None, None]
    assert [one.question.id for one in read_questions(f"{questions}[:2]")] == ["fox", "1"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"text": "a"}', "no question, instruction or messages"),
        ('{"question": 3}', "question"),
        ('{"id": 1, "question": "a"}\n{"id": "1", "question": "b"}', "'1' 2 times"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "no message of the role user"),
        ("[1]", "is a list"),
        ('{"question": "a', "is not JSON"),
        ("\n", "has no questions"),
    ],
)
def test_a_wrong_row_is_a_one_line_error(tmp_path, text, says):
    (tmp_path / "bad.jsonl").write_text(text + "\n")
    with pytest.raises(UsageError, match=says) as error:
        read_questions(str(tmp_path / "bad.jsonl"))
    assert "\n" not in str(error.value)


def test_a_file_for_each_model_has_header_and_answers_in_order(chat_run, questions, tmp_path, capsys):
    words = ["answer", f"{chat_run.root}:all", "--questions", str(questions), "--output", str(tmp_path / "answers")]
    assert cli.main([*words, "--max_new_tokens", "20", "--batch_size", "2"]) == 0
    printed = capsys.readouterr().out
    path = tmp_path / "answers" / "chat.jsonl"
    assert re.search(r"^chat +5 +\d+\.0% +\d of 3 +\d+\.\d$", printed, re.MULTILINE)
    file = AnswersFile.load(path)
    file.check_complete(path)
    assert [one.id for one in file.answers] == ["fox", "1", "2", "3", "4"]
    header = file.header
    assert header.weights_sha256 == sha256(chat_run.model / "model.safetensors")
    assert header.epochs is not None
    assert (header.epochs.trained, len(header.epochs.validation_losses)) == (8, 8)
    assert header.epochs.validation_losses[round(header.epochs.kept) - 1] == min(header.epochs.validation_losses)
    assert header.test_loss is not None
    assert len(list((tmp_path / "answers").glob("chat-*.jsonl"))) == len(list(chat_run.checkpoints.iterdir())) - 1


@pytest.mark.parametrize(
    ("answer", "is_match"), [(" the fox SAW the river", True), ("The fox saw.", False), ("", False)]
)
def test_an_answer_matches_its_reference_without_case_and_punctuation(answer, is_match):
    words = {"id": "0", "question": "What?", "answer": answer, "ended": True, "n_tokens": 3}
    assert ModelAnswer(**words, reference="The fox saw the river.").is_match is is_match
    assert ModelAnswer(**words).is_match is None


def test_an_interrupted_command_answers_only_the_rest(chat_run, questions, tmp_path, capsys):
    words = ["answer", str(chat_run.root), "--questions", str(questions), "--output", str(tmp_path)]
    words += ["--max_new_tokens", "20"]
    assert cli.main(words) == 0
    path = tmp_path / "chat.jsonl"
    whole = path.read_text()
    header, first, second, third, *_ = whole.splitlines(keepends=True)
    changed = {**json.loads(third), "answer": "kept"}
    path.write_text(header + json.dumps(changed) + "\n" + first + second[:20])  # a killed process: cut off, other order
    assert cli.main(words) == 0
    lines = path.read_text().splitlines(keepends=True)
    assert json.loads(lines[3])["answer"] == "kept"
    assert [lines[1], lines[2], *lines[4:]] == [first, second, *whole.splitlines(keepends=True)[4:]]
    capsys.readouterr()
    assert cli.main([*words, "--max_new_tokens", "21"]) == 2
    assert "generation" in capsys.readouterr().err


def test_answers_do_not_depend_on_the_batch_and_respect_the_context(chat_run, questions, tmp_path):
    model, tokenizer = load_model(find_model(str(chat_run.root)), device="cpu")
    asked = read_questions(str(questions))
    ids = prompts(tokenizer, asked, None)
    for max_new_tokens in (20, 500):
        found = [{}, {}]
        for answers, size in zip(found, (1, 4), strict=True):
            for numbers, limit in batches(list(map(len, ids)), context=128, max_new_tokens=max_new_tokens, size=size):
                assert all(len(ids[n]) + limit <= 128 for n in numbers)
                answers |= dict(zip(numbers, generate(model, tokenizer, [ids[n] for n in numbers], limit), strict=True))
        assert found[0] == found[1]
        assert sorted(found[0]) == list(range(5))
    assert list(batches([200], context=128, max_new_tokens=5, size=2)) == []


def test_the_prompt_is_the_template_or_alpacas_or_plain(chat_run, tiny_run, questions):
    _, talker = load_model(find_model(str(chat_run.root)), device="cpu")
    _, writer = load_model(find_model(str(tiny_run.root)), device="cpu")
    asked = read_questions(str(questions))[:2]
    assert "<|im_start|>user" in talker.decode(prompts(talker, asked, None)[0])
    alpaca = str(writer.decode(prompts(writer, asked, None)[1]))
    assert alpaca.startswith("Below is an instruction that describes a task.")
    assert alpaca.endswith("### Instruction:\nWhat did the hen meet?\n\n### Input\nAt the river.\n\n### Response:\n")
    assert writer.chat_template is None
    assert writer.decode(prompts(writer, asked, "plain")[0]) == "What did the fox see?"
    with pytest.raises(UsageError, match="no chat template"):
        prompts(writer, asked, "template")


def test_questions_longer_than_the_context_have_empty_answers(tiny_run, tmp_path, capsys):
    (tmp_path / "questions.jsonl").write_text('{"question": "' + "fox " * 60 + '"}\n{"question": "Once"}\n')
    shutil.copytree(tiny_run.model, tmp_path / "base")
    words = ["answer", str(tmp_path / "base"), "--questions", str(tmp_path / "questions.jsonl")]
    assert cli.main([*words, "--output", str(tmp_path / "out"), "--prompt_format", "plain"]) == 0
    assert "1 questions fill the context" in capsys.readouterr().out
    long, short = AnswersFile.load(tmp_path / "out" / "base.jsonl").answers
    assert (long.answer, long.ended, long.n_tokens) == ("", False, 0)
    assert 0 < short.n_tokens < 32
