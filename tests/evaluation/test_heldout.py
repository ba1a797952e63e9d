"""Losses against hand computation, and the overlap of held-out and training text."""

import math

import numpy as np
import pytest
import torch
from conftest import chats, tiny_config
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from gpt2small_hf import GPT2SmallForCausalLM
from gpt2small_hf.data.chat.conversations import Conversation
from gpt2small_hf.data.chat_dataset import ChatDataset
from gpt2small_hf.data.corpus.encoder import byte_alphabet, token_bytes
from gpt2small_hf.data.text_dataset import TextDataset
from gpt2small_hf.evaluation.heldout import (
    heldout_losses,
    measures,
    seen_in_training,
    standard_error,
    unigram_losses,
)
from gpt2small_hf.runs.files import read_json


def test_losses_do_not_depend_on_the_batch_size(splits):
    _, heldout = splits
    torch.manual_seed(0)
    model = GPT2SmallForCausalLM(tiny_config(vocab_size=300, resid_pdrop=0.5)).train()
    flat = heldout_losses(model, heldout, batch_size=3)
    losses = flat.reshape(len(heldout), 31)
    assert model.training  # the mode is restored; the losses were computed without dropout:
    model.eval()
    for i in (0, len(heldout) - 1):
        ids = torch.from_numpy(heldout[i]["input_ids"])[None]
        alone = F.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")
        np.testing.assert_allclose(losses[i], alone.detach().double().numpy(), atol=1e-5)
    np.testing.assert_allclose(flat, heldout_losses(model, heldout, batch_size=1), atol=1e-5)


def test_the_standard_error_is_that_of_the_mean_over_rows(splits):
    _, heldout = splits
    losses = np.random.default_rng(0).normal(size=(len(heldout), 31))
    rows = losses.mean(axis=1)
    expected = rows.std(ddof=1) / math.sqrt(len(rows))  # rows of one length: the ratio estimator is the usual one
    assert standard_error(losses.reshape(-1), heldout) == pytest.approx(expected)


def test_standard_error_of_chats_weighs_rows_by_supervised_tokens(chat_run):
    """Compare it with the standard deviation of the mean over resampled rows (bootstrap)."""
    tokenizer = AutoTokenizer.from_pretrained(chat_run.model)
    talks = [Conversation(row["messages"], f"chat {n}") for n, row in enumerate(chats())]
    heldout = ChatDataset(talks, tokenizer, seq_len=128, packing="padding")
    sizes = np.array([(row["labels"][1:] != -100).sum() for row in (heldout[i] for i in range(len(heldout)))])
    assert len(set(sizes)) > 1
    generator = np.random.default_rng(0)
    parts = [generator.normal(loc=generator.normal(), size=size) for size in sizes]
    sums = np.array([part.sum() for part in parts])
    drawn = generator.integers(len(sizes), size=(4000, len(sizes)))
    scatter = (sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)).std()
    assert standard_error(np.concatenate(parts), heldout) == pytest.approx(scatter, rel=0.1)


def test_the_unigram_loss_is_that_of_the_training_frequencies(splits):
    train, heldout = splits
    stream = train.tokens(0, train.n_tokens)
    losses = unigram_losses(train, heldout, vocab_size=300).reshape(len(heldout), 31)
    token = int(heldout[0]["input_ids"][5])
    by_hand = -math.log(((stream == token).sum() + 1) / (len(stream) + 300))
    assert losses[0, 4] == pytest.approx(by_hand)


def test_bits_per_byte_are_of_the_bytes_of_the_measured_tokens(tiny_run):
    """They are neither those of the split, whose last tokens are in no row, nor, for new text, those of overlaps."""
    found, tokenizer = read_json(tiny_run.heldout), AutoTokenizer.from_pretrained(tiny_run.model)
    folder = tiny_run.root.parents[1] / read_json(tiny_run.resolved)["data"]["folder"]
    train, heldout = (TextDataset(folder, split, found["rows"]["seq_len"]) for split in ("train", "validation"))
    alphabet = set(byte_alphabet())
    of_row = [tokenizer.convert_ids_to_tokens(heldout[i]["input_ids"][1:]) for i in range(len(heldout))]
    sizes = np.array(
        [[len(t) if t != tokenizer.eos_token and set(t) <= alphabet else 0 for t in row] for row in of_row]
    )
    assert (np.array(of_row) == tokenizer.eos_token).any()  # which has no bytes
    losses = heldout_losses(AutoModelForCausalLM.from_pretrained(tiny_run.model), heldout)
    by_hand = losses.sum() / math.log(2) / sizes.sum()
    assert found["after"]["bits_per_byte"] == pytest.approx(by_hand, rel=1e-5)
    new = ~seen_in_training(train, heldout)
    assert 0 < new.mean() < 1
    by_hand = losses[new.reshape(-1)].sum() / math.log(2) / sizes[new].sum()
    assert found["new_text"]["bits_per_byte"] == pytest.approx(by_hand, rel=1e-5)


def test_bytes_of_tokens_add_up_to_the_text_of_any_kind_of_tokenizer():
    text = "Straße, naïve 東京 and “quotes” moving moved on."
    for model, before, decoder in (
        (models.WordPiece(unk_token="?"), pre_tokenizers.Whitespace(), decoders.WordPiece(cleanup=False)),
        (models.BPE(), pre_tokenizers.Metaspace(), decoders.Metaspace()),
        (models.BPE(), pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()),
    ):
        backend = Tokenizer(model)
        backend.pre_tokenizer, backend.decoder = before, decoder
        kind = trainers.WordPieceTrainer if isinstance(model, models.WordPiece) else trainers.BpeTrainer
        backend.train_from_iterator([text], kind(vocab_size=90, special_tokens=["<|endoftext|>", "?"]))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
        ids = np.array([*backend.encode(text).ids, tokenizer.eos_token_id, *backend.encode(text).ids])
        found = token_bytes(tokenizer, ids)
        end = list(ids).index(tokenizer.eos_token_id)
        assert found[end] == 0
        assert found[:end].sum() == len(backend.decode(ids[:end].tolist()).encode())
        assert found[:end].tolist() == found[end + 1 :].tolist()


def test_measures_are_three_units_of_one_mean():
    found = measures(np.array([[1.0, 3.0]]), bytes_per_token=4.0)
    assert found.loss_nats == 2.0
    assert found.perplexity == pytest.approx(math.e**2)
    assert found.bits_per_byte == pytest.approx(2 / math.log(2) / 4)


class Stream:
    """Rows over a list of tokens, as `TextDataset` gives them."""

    training_tokens = TextDataset.training_tokens

    def __init__(self, tokens: list[int], seq_len: int) -> None:
        self.stream, self.seq_len, self.n_tokens = np.array(tokens, np.int64), seq_len, len(tokens)

    def __len__(self) -> int:
        return self.n_tokens // self.seq_len

    def tokens(self, start: int, end: int) -> np.ndarray:
        return self.stream[start:end]


@given(
    train=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    heldout=st.lists(st.integers(0, 2), min_size=4, max_size=24),
    length=st.integers(1, 5),
)
def test_token_is_seen_if_the_sequence_that_it_ends_is_in_the_training_text(train, heldout, length):
    rows = Stream(heldout, 4)
    seen = seen_in_training(Stream(train, 4), rows, length=length)  # pyright: ignore[reportArgumentType]
    runs = {tuple(train[i : i + length]) for i in range(len(train) - length + 1)}
    for row in range(len(rows)):
        for t in range(1, 4):
            end = row * 4 + t + 1
            assert seen[row, t - 1] == (end >= length and tuple(heldout[end - length : end]) in runs)


def test_training_text_is_seen_in_itself(splits):
    train, heldout = splits
    assert seen_in_training(train, train)[:, 12:].all()
    assert 0 < seen_in_training(train, heldout).mean() < 1
