"""Token ids of `data/corpus/encoder.py` equal those of the tokenizer, for either engine and any cut."""

import json
import re
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from gpt2small_hf.data.corpus.encoder import (
    NOT_SPACE,
    SPACE,
    Encoder,
    byte_alphabet,
    cut,
    has_long_stretch,
    tiktoken_engine,
)
from gpt2small_hf.data.tokenizer import train_tokenizer

ODD = " \n\t\r\v\f\x1c\x1f\x85\xa0\u180e\u200b\u2028\u3000'sdltreve1²٣９aßéǺ中🙂\u0378<|endoftext|>.,_-"
texts = st.text(st.one_of(st.sampled_from(ODD), st.characters(codec="utf-8")), max_size=60)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE whose vocabulary joins across everything that the pattern must keep apart, were it to fail."""
    words = ["it's we'll they've 12 1234 ... !!! \n\n  \t\t   x\u3000\u3000 中中 éé 🙂🙂 endoftext <|endoftext|> "]
    return train_tokenizer(words * 3 + [a + b for a in ODD for b in ODD for _ in range(3)], 2000)


@pytest.fixture(scope="module")
def encoder(tokenizer: PreTrainedTokenizerFast) -> Encoder:
    encoder = Encoder(tokenizer)
    assert encoder.fast is not None
    return encoder


def ids_by_tokenizers(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """What the reference implementation says, special tokens read as text."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.encode_special_tokens = True
    return backend.encode(text, add_special_tokens=False).ids


@given(text=texts)
def test_tiktoken_gives_the_ids_of_tokenizers(tokenizer: PreTrainedTokenizerFast, encoder: Encoder, text: str):
    assert encoder.encode([text])[0].tolist() == ids_by_tokenizers(tokenizer, text)


@given(text=texts, size=st.integers(1, 12), block=st.integers(1, 12))
def test_ids_of_the_pieces_are_the_ids_of_the_whole(
    tokenizer: PreTrainedTokenizerFast, encoder: Encoder, text: str, size: int, block: int
):
    pieces = list(cut((text[at : at + block] for at in range(0, len(text), block)), size))
    assert "".join(pieces) == text
    pieced = [token for ids in encoder.encode(pieces) for token in ids.tolist()]
    assert pieced == ids_by_tokenizers(tokenizer, text)


def test_long_text_is_cut_into_pieces_of_about_the_size_asked_for():
    pieces = list(cut(["ten chars " * 1000], 100))
    assert max(map(len, pieces)) < 120
    assert min(map(len, pieces[:-1])) >= 100


def see_every_split() -> PreTrainedTokenizerFast:
    """A vocabulary that joins any byte to a letter, a digit, a mark or a space before it: classes become visible."""
    alphabet = list(byte_alphabet())
    merges = [(first, second) for first in "a1!Ġ" for second in alphabet]
    vocabulary = {token: n for n, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")


def check_classes(code_points: range) -> None:
    tokenizer = see_every_split()
    encoder = Encoder(tokenizer)
    assert encoder.fast is not None
    characters = [chr(code) for code in code_points if not 0xD800 <= code < 0xE000]
    for at in range(0, len(characters), 5000):
        text = "".join(f"a{c} {c}1{c}!{c} a" for c in characters[at : at + 5000])
        assert encoder.encode([text])[0].tolist() == ids_by_tokenizers(tokenizer, text)


@pytest.mark.slow
def test_both_engines_agree_on_the_class_of_every_character_of_the_first_two_planes():
    check_classes(range(0x20000))


@pytest.mark.slow
def test_both_engines_agree_on_the_class_of_characters_of_all_planes():
    check_classes(range(0x20000, 0x110000, 16))


def test_white_space_is_what_the_pattern_calls_white_space():
    split = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str
    for character in map(chr, range(0xD800)):
        # Letters, digits and marks are joined to their like; white space is joined to none of them.
        is_space = all(len(split(before + character)) == 2 for before in "a1!")
        assert bool(SPACE.fullmatch(character)) == is_space
        assert bool(NOT_SPACE.fullmatch(character)) != is_space


@pytest.mark.slow
@pytest.mark.parametrize(("unit", "count"), [(" ", 1_000_000), ("\n", 1_000_000), ("a", 300_000), ("^", 300_000)])
def test_endless_stretches_without_a_break_are_encoded_in_good_time(
    tokenizer: PreTrainedTokenizerFast, encoder: Encoder, unit: str, count: int
):
    text = f"x{unit * count}x"
    began = time.monotonic()
    ids = [token for part in encoder.encode(list(cut([text], 100_000))) for token in part.tolist()]
    assert time.monotonic() - began < 20
    assert ids == ids_by_tokenizers(tokenizer, text)


@given(before=st.integers(0, 20_000), run=st.integers(20_000, 30_000), unit=st.sampled_from(" a\x1c"))
@settings(max_examples=30)
def test_long_stretch_is_noticed_wherever_it_stands(before: int, run: int, unit: str):
    assert has_long_stretch("word " * (before // 5) + unit * run + " word" * 100)
    assert not has_long_stretch("word " * 10_000)


def test_end_of_text_in_a_text_is_plain_text(tokenizer: PreTrainedTokenizerFast, encoder: Encoder):
    ids = encoder.encode(["one<|endoftext|>two"])[0].tolist()
    assert tokenizer.eos_token_id not in ids
    assert tokenizer.decode(ids) == "one<|endoftext|>two"
    slow = Encoder(tokenizer)
    slow.fast = None
    assert slow.encode(["one<|endoftext|>two"])[0].tolist() == ids


def variant(tokenizer: PreTrainedTokenizerFast, **changes: object) -> PreTrainedTokenizerFast:
    """A copy of the tokenizer with parts of its tokenizer.json replaced; keys of the model are given as model__key."""
    description = json.loads(tokenizer.backend_tokenizer.to_str())
    for name, value in changes.items():
        part = description["model"] if name.startswith("model__") else description
        part[name.removeprefix("model__")] = value
    backend = Tokenizer.from_str(json.dumps(description))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "NFC"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"model__dropout": 0.5},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_tokenizer_that_treats_text_unlike_gpt2_is_neither_replaced_nor_cut(
    tokenizer: PreTrainedTokenizerFast, changes: dict[str, object]
):
    other = variant(tokenizer, **changes)
    encoder = Encoder(other)
    assert encoder.fast is None
    assert not encoder.cuttable
    if "model__dropout" not in changes:
        assert encoder.encode(["it's éa  b"])[0].tolist() == ids_by_tokenizers(other, "it's éa  b")


def test_merges_that_tiktoken_would_read_differently_stay_with_tokenizers():
    alphabet = list(byte_alphabet())
    # "abc" is made of ab + c, but b + c comes first: tokenizers gives a, bc and never abc; tiktoken joins a + bc.
    merges = [("b", "c"), ("a", "b"), ("ab", "c")]
    vocabulary = {token: n for n, token in enumerate([*alphabet, "bc", "ab", "abc"])}
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    encoder = Encoder(tokenizer)
    assert encoder.fast is None
    assert encoder.cuttable
    assert encoder.encode(["abc"])[0].tolist() == [vocabulary["a"], vocabulary["bc"]]
    naive = tiktoken_engine({bytes(byte_alphabet()[c] for c in token): n for token, n in vocabulary.items()})
    assert naive.encode_ordinary("abc") == [vocabulary["abc"]]


def test_added_word_is_still_found(tokenizer: PreTrainedTokenizerFast):
    other = variant(tokenizer)
    other.add_tokens(["<name>"])
    encoder = Encoder(other)
    assert encoder.fast is None
    assert len(other) - 1 in encoder.encode(["a <name> b"])[0]


def test_truncation_and_padding_of_the_tokenizer_do_not_reach_a_corpus(tokenizer: PreTrainedTokenizerFast):
    other = variant(tokenizer)
    other.backend_tokenizer.enable_truncation(2)
    other.backend_tokenizer.enable_padding(length=50)
    encoder = Encoder(other)
    encoder.fast = None
    texts = ["three 333 ...", "x"]
    assert [ids.tolist() for ids in encoder.encode(texts)] == [ids_by_tokenizers(tokenizer, text) for text in texts]


@given(text=texts)
def test_bytes_are_counted_back_from_ids(encoder: Encoder, text: str):
    assert encoder.n_bytes(encoder.encode([text])[0].astype(np.int64)) == len(text.encode())


def test_alphabet_is_that_of_tokenizers():
    alphabet = byte_alphabet()
    assert sorted(alphabet) == sorted(pre_tokenizers.ByteLevel.alphabet())
    text = "".join(map(chr, range(0x500)))
    spelled = "".join(piece for piece, _ in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text))
    assert bytes(alphabet[character] for character in spelled) == text.encode()
    assert re.fullmatch(r"[\x21-\u0143]+", "".join(alphabet))
