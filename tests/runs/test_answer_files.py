"""Files of answers: a killed writer resumes, and files of other models, questions or settings are refused."""

import dataclasses

import pytest

from gpt2small_hf.errors import UsageError
from gpt2small_hf.runs.answer_files import (
    AnswersFile,
    AnswersHeader,
    FineTuneEpochs,
    ModelAnswer,
    append_answers,
    questions_sha256,
    resume_answers,
)

ANSWERS = [
    ModelAnswer(
        id=str(n), question=f"What is {n}?", reference=f"{n}", answer=f"It is\n{n}\u2028.", ended=True, n_tokens=4
    )
    for n in range(3)
]
HEADER = AnswersHeader(
    label="tiny",
    model="runs/tiny",
    test_loss=3.5,
    epochs=FineTuneEpochs(trained=5, kept=4, validation_losses=[2.0, 1.5, 1.25, 1.0, 1.125]),
    questions_sha256=questions_sha256(ANSWERS),
    n_questions=3,
    generation={"max_new_tokens": 256, "do_sample": False},
    versions={"torch": "2.13"},
    date="2026-11-22T00:00:00+00:00",
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new" / "answers.jsonl"


def test_answers_are_read_as_written(path):
    assert resume_answers(path, HEADER) == []
    append_answers(path, ANSWERS)
    file = AnswersFile.load(path)
    file.check_complete(path)
    assert (dataclasses.replace(file.header, schema_version=0), file.answers) == (HEADER, ANSWERS)


def test_killed_writer_resumes_after_the_last_complete_line(path):
    """At any byte after the header, which is written at once."""
    resume_answers(path, HEADER)
    header = path.stat().st_size
    append_answers(path, ANSWERS)
    complete = path.read_bytes()
    for length in range(header, len(complete)):
        path.write_bytes(complete[:length])
        kept = resume_answers(path, dataclasses.replace(HEADER, date="later"))
        assert kept == ANSWERS[: len(kept)]
        append_answers(path, ANSWERS[len(kept) :])
        assert path.read_bytes() == complete


@pytest.mark.parametrize("change", [{"model": "runs/other"}, {"generation": {}}, {"n_questions": 4}, {"epochs": None}])
def test_file_of_another_model_or_settings_is_refused(path, change):
    resume_answers(path, HEADER)
    with pytest.raises(UsageError, match=next(iter(change))):
        resume_answers(path, dataclasses.replace(HEADER, **change))


def test_incomplete_and_edited_files_are_refused(path):
    resume_answers(path, HEADER)
    for answers, found in (([], "no answers"), (ANSWERS[:2], "2 of 3"), ([ANSWERS[1], *ANSWERS[1:]], "edited")):
        file = AnswersFile(HEADER, answers)
        with pytest.raises(UsageError, match=found):
            file.check_complete(path)


@pytest.mark.parametrize("content", ["", "{}\n", "[1]\n", '{"question": "a"}\n'])
def test_files_without_header_are_refused(path, content):
    path.parent.mkdir()
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match="header"):
        AnswersFile.load(path)


def test_hash_depends_on_ids_questions_references_and_order():
    changes = [{"id": "x"}, {"question": "x"}, {"reference": None}]
    changed = [[dataclasses.replace(ANSWERS[0], **change), *ANSWERS[1:]] for change in changes]
    hashes = {questions_sha256(one) for one in (ANSWERS, ANSWERS[::-1], *changed)}
    assert len(hashes) == 5
    assert questions_sha256([dataclasses.replace(ANSWERS[0], answer="other")]) == questions_sha256(ANSWERS[:1])
