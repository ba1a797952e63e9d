"""Files of questions, with a reference answer where there is one, without importing torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from gpt2small_hf.data.chat.files import find_places, read_rows
from gpt2small_hf.data.chat.formats import Message, read_text
from gpt2small_hf.errors import UsageError
from gpt2small_hf.runs.answer_files import Question


@dataclass(frozen=True)
class AskedQuestion:
    """A question as it is recorded, and the message that the model gets."""

    question: Question
    message: Message


def read_questions(name: str) -> list[AskedQuestion]:
    """Read questions from a file, a slice of it (`file.json[935:1045]`), or a split on the Hub.

    A row has `question` and perhaps `reference`; `instruction`, perhaps `input`, and `output` (Alpaca); or `messages`,
    whose last user turn is the question, and the turn after it the reference. `id` is optional: by default the number
    of the row, from 0.

    Raises: UsageError for a row without a question, an id that occurs twice, and if there are no rows.
    """
    asked: list[AskedQuestion] = []
    for place in find_places(name):
        for where, row in read_rows(place)[0][place.rows]:
            if isinstance(row, UsageError):
                raise row
            asked.append(_question(row, where, len(asked)))
    if not asked:
        raise UsageError(f"{name} has no questions. Name another file or other rows.")
    (id, count), *_ = Counter(one.question.id for one in asked).most_common(1)
    if count > 1:
        raise UsageError(f"{name} has the id {id!r} {count} times. Give each question its own, or none.")
    return asked


def _question(row: Any, where: str, number: int) -> AskedQuestion:
    message: Message = {"role": "user"}
    if not isinstance(row, dict):
        raise UsageError(f"{where} is a {type(row).__name__}, not an object with a question. Correct the row.")
    if "question" in row:
        message["content"] = read_text(row["question"], where, "question")
        reference = row.get("reference", row.get("answer"))
    elif "instruction" in row:
        message["content"] = read_text(row["instruction"], where, "instruction")
        if row.get("input"):
            message["input"] = read_text(row["input"], where, "input")
        reference = row.get("reference", row.get("output"))
    elif isinstance(turns := row.get("messages"), list) and all(isinstance(turn, dict) for turn in turns):
        last = max((i for i, turn in enumerate(turns) if turn.get("role") == "user"), default=None)
        if last is None:
            raise UsageError(f"{where} has no message of the role user. Add the question.")
        message["content"] = read_text(turns[last].get("content"), where, "content")
        reference = row.get("reference", turns[last + 1].get("content") if turns[last + 1 :] else None)
    else:
        raise UsageError(f"{where} has no question, instruction or messages. Name the column of the question so.")
    text = "\n\n".join(message[part] for part in ("content", "input") if part in message)
    reference = None if reference is None else read_text(reference, where, "reference")
    return AskedQuestion(Question(id=str(row.get("id", number)), question=text, reference=reference), message)
