"""Latin squares of orders, prompts, and the parser of replies."""

import json
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2small_hf.errors import UsageError
from gpt2small_hf.judge.prompt import build_prompt, check_number, order_of_call, parse_scores, reply_schema
from gpt2small_hf.runs.answer_files import Question
from judge.server import REPLIES, task_of


@pytest.mark.parametrize("n_entries", [2, 3, 7])
def test_each_block_of_orders_is_a_latin_square(n_entries):
    for block in range(5):
        rows = [order_of_call(n_entries, block * n_entries + row, seed=1) for row in range(n_entries)]
        for line in (*rows, *zip(*rows, strict=True)):
            assert sorted(line) == list(range(n_entries))


def test_orders_follow_each_other_without_pattern():
    """In one cyclic square an entry always follows the same one; over many blocks it follows all of them."""
    orders = [order_of_call(4, number, seed=2) for number in range(4 * 300)]
    pairs = Counter(pair for order in orders for pair in pairwise(order))
    assert len(pairs) == 12
    assert max(pairs.values()) < 1.5 * min(pairs.values())


def test_orders_depend_on_the_seed_and_not_on_the_number_of_calls():
    first = [order_of_call(6, number, seed=3) for number in range(50)]
    assert first == [order_of_call(6, number, seed=3) for number in range(50)]
    assert first != [order_of_call(6, number, seed=4) for number in range(50)]


@settings(max_examples=25)
@given(st.lists(st.text(), min_size=2, max_size=6), st.text(), st.none() | st.text())
def test_prompt_contains_all_texts_exactly(answers, question, reference):
    task = task_of(build_prompt(Question(id="1", question=question, reference=reference), answers))
    assert (task["question"], task.get("reference_answer")) == (question, reference)
    assert list(task["answers"]) == list("ABCDEF"[: len(answers)])
    assert list(task["answers"].values()) == answers


def test_more_answers_than_letters_are_refused():
    check_number(26)
    with pytest.raises(UsageError, match="27"):
        check_number(27)


def test_schema_requires_every_letter_and_nothing_else():
    schema = reply_schema(3)["json_schema"]["schema"]
    assert schema["required"] == list(schema["properties"]) == ["A", "B", "C"]
    assert schema["additionalProperties"] is False


RIGHT = json.dumps({"A": {"comment": "B is {better}", "score": 10}, "B": {"comment": '"', "score": 90}})


@pytest.mark.parametrize(
    ("reply", "scores"),
    [
        (RIGHT, {0: 10, 1: 90}),
        (REPLIES["prose"](RIGHT), {0: 10, 1: 90}),
        (REPLIES["strings"](RIGHT), {0: 10, 1: 90}),
        (REPLIES["half reply"](RIGHT), {}),
        (REPLIES["few"](RIGHT), {0: 10}),
        (REPLIES["duplicate"](RIGHT), {1: 90}),
        (REPLIES["no scores"](RIGHT), {}),
        ('{"A": 1, "B": 2.5}', {0: 1, 1: 2.5}),
        ('{"scores": {"answer_a": "70 %", "Answer B": "80/100"}}', {0: 70, 1: 80}),
        ('[{"answer": "B", "score": 3}, {"letter": "a", "score": "4"}]', {0: 4, 1: 3}),
        ('{"scores": [{"answer": "A", "score": 3}, {"answer": "A", "score": 5}]}', {}),
        ('draft {"A": 1, "B": 2} final {"A": 3, "B": 4}', {0: 3, 1: 4}),
        ('{"A": 3, "B": 4} as in {"A": 5}', {0: 3, 1: 4}),
        ('{"A": -1, "B": 101}', {}),
        ('{"A": true, "B": null}', {}),
        ('{"A": NaN, "B": Infinity}', {}),
        ('{"A": "high", "B": "٣"}', {}),
        ('{"A": [1], "B": {"score": 1, "Score": 2}}', {}),
        ('{"A": 0, "B": 100, "C": 50, "total": 3}', {0: 0, 1: 100}),
        ("[" * 5000, {}),
        ('{"A": ' + "9" * 5000 + "}", {}),
        ("", {}),
    ],
)
def test_valid_scores_are_read_and_no_others(reply, scores):
    assert parse_scores(reply, 2) == scores


@given(st.text(alphabet='{}[]":,AB019 scoretrue\\n', max_size=200))
def test_any_reply_is_read_without_an_error(reply):
    assert all(0 <= score <= 100 and place < 2 for place, score in parse_scores(reply, 2).items())
