"""Which documents `data/corpus/holdout.py` holds out."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt2small_hf.data.corpus.holdout import Holdout
from gpt2small_hf.data.corpus.readers import Block, Document
from gpt2small_hf.errors import UsageError

MANY = [f"document {n} " * (n % 7 + 1) for n in range(200)]


def documents(texts: list[str], block: int = 10_000):
    for text in texts:
        yield Document(len(text.encode()), iter([text[at : at + block] for at in range(0, len(text), block)]))


def deal(texts: list[str], fraction: float, block: int = 10_000) -> dict[str, list[str]]:
    holdout = Holdout(documents(texts, block), fraction)
    sides: dict[str, list[str]] = {"train": [], "validation": []}
    for split, blocks in holdout.split(documents(texts, block)):
        sides[split].append("".join(str(block) for block in blocks))
    return sides


def test_whole_documents_of_about_the_fraction_of_the_bytes_are_held_out():
    sides = deal(MANY, 0.05)
    assert sorted(sides["train"] + sides["validation"]) == sorted(MANY)
    assert 0.045 < sum(map(len, sides["validation"])) / sum(map(len, MANY)) <= 0.05


def test_choice_does_not_depend_on_the_order():
    assert set(deal(MANY, 0.05)["validation"]) == set(deal(MANY[::-1], 0.05)["validation"])


@pytest.mark.parametrize("texts", [MANY, [f"{n}" for n in range(1000)]], ids=["few enough to count", "many"])
def test_copies_of_a_document_are_in_the_same_split(texts: list[str]):
    sides = deal(texts + texts[::3], 0.05)
    assert sides["validation"]
    assert not set(sides["train"]) & set(sides["validation"])


def test_of_many_documents_the_fraction_is_held_out_without_reading_them_all_first():
    texts = [f"{n}" for n in range(20_000)]
    unread = documents(texts)
    holdout = Holdout(unread, 0.05)
    assert next(iter(next(unread).blocks)) == "400"
    held_out = sum(split == "validation" for split, _ in holdout.split(documents(texts)))
    assert 800 < held_out < 1200


def test_of_few_documents_the_tail_of_each_is_held_out_from_a_line_start():
    texts = ["".join(f"line {n} of {name}\n" for n in range(100)) for name in ("one", "another")]
    sides = deal(texts, 0.1, block=500)
    for text, head, tail in zip(texts, sides["train"], sides["validation"], strict=True):
        assert head + tail == text
        assert head.endswith("\n")
        assert 0.08 < len(tail) / len(text) <= 0.1


@given(
    texts=st.lists(st.text(st.sampled_from("ab \né中"), min_size=1), min_size=1, max_size=19),
    fraction=st.floats(0.01, 0.99),
    block=st.integers(1, 9),
)
def test_tails_lose_nothing(texts: list[str], fraction: float, block: int):
    sides = deal(texts, fraction, block)
    assert [head + tail for head, tail in zip(sides["train"], sides["validation"], strict=True)] == texts


def test_tails_of_token_ids_are_cut_to_the_token():
    def document() -> Document:
        blocks: list[Block] = [np.arange(0, 40), np.arange(40, 100)]
        return Document(100, iter(blocks))

    holdout = Holdout(iter([document()]), 0.1)
    sides = {split: np.concatenate(list(blocks)).tolist() for split, blocks in holdout.split([document()])}
    assert sides == {"train": list(range(90)), "validation": list(range(90, 100))}


def test_fraction_of_zero_holds_nothing_out():
    assert deal(["one\ntwo\nthree"], 0) == {"train": ["one\ntwo\nthree"], "validation": []}
    assert deal(MANY, 0)["validation"] == []


def test_identical_documents_cannot_be_split():
    with pytest.raises(UsageError, match=r"all 30 documents have the same beginning.*--validation_text"):
        deal(["the same"] * 30, 0.1)
