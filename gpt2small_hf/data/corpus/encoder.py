"""Text → token ids, fast, and where a long text may be cut without changing its ids. No files.

Special tokens are neither read nor added: in a corpus the characters `<|endoftext|>` are plain text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, cast

import numpy as np
import tiktoken
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from gpt2small_hf.errors import UsageError

# How GPT-2 cuts text into the stretches that BPE then works on (openai/gpt-2, encoder.py).
GPT2_PATTERN = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""

# `\s` of Python, less four control characters that Unicode (and so the pattern above) does not call white space.
SPACE = re.compile(r"[^\S\x1c-\x1f]")
NOT_SPACE = re.compile(r"[\S\x1c-\x1f]")

# No stretch of the pattern continues across these two: spaces are only at the start of one, or are all of it. None of
# the stretches before looks past this point either: only `\s+(?!\S)` looks ahead, by one character, from white space.
SAFE_CUT = re.compile(f"(?<={NOT_SPACE.pattern})(?={SPACE.pattern})")

WINDOW = 10_000


class Encoder:
    """The ids a tokenizer gives to texts. May be called from several threads."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.eos_id = cast(int, tokenizer.eos_token_id)
        saved = tokenizer.backend_tokenizer.to_str()
        description = json.loads(saved)
        self.backend = Tokenizer.from_str(saved)
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = True
        self.cuttable = splits_like_gpt2(description)
        ranks = merge_ranks(self.backend, description["model"]) if self.cuttable else None
        self.fast = tiktoken_engine(ranks) if ranks else None
        self.vocab_size = max(self.backend.get_vocab(with_added_tokens=True).values()) + 1
        self.byte_counts = byte_counts(self.backend, with_special=True)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of each text, without special tokens.

        Raises: UsageError if the tokenizer nevertheless gives the end-of-text id.
        """
        if self.fast and not any(map(has_long_stretch, texts)):
            # Not encode_ordinary: its list of Python integers is made under the interpreter's lock.
            return [self.fast.encode_to_numpy(text, disallowed_special=()) for text in texts]
        encoded = [encoding.ids for encoding in self.backend.encode_batch_fast(texts, add_special_tokens=False)]
        if any(self.eos_id in ids for ids in encoded):  # some models other than BPE know the special tokens themselves
            raise UsageError(
                f"the tokenizer gives {self.eos_id}, its end-of-text id, to something inside a document, whose end "
                "would not be known then. Take that out of the text, or choose another tokenizer."
            )
        return [np.array(ids, np.uint32) for ids in encoded]

    def n_bytes(self, ids: np.ndarray) -> int:
        """Return the number of UTF-8 bytes of the text of `ids`."""
        if self.byte_counts is not None:
            return int(self.byte_counts[ids].sum())
        return len(self.backend.decode(ids.tolist(), skip_special_tokens=False).encode())


def token_bytes(tokenizer: PreTrainedTokenizerFast, ids: np.ndarray) -> np.ndarray:
    """Count the UTF-8 bytes of text that each token of a stream adds; a special token adds none.

    Exact where a token's text depends only on the token before it, as with byte-level BPE, WordPiece and Metaspace.

    Returns: int64, the shape of `ids`, which is flat.
    """
    backend = tokenizer.backend_tokenizer
    if (counts := byte_counts(backend)) is not None:
        return counts[ids]
    pairs, which = np.unique(np.stack([np.append(ids[:1], ids[:-1]), ids], axis=1), axis=0, return_inverse=True)
    texts = [backend.decode_batch(part.tolist()) for part in (pairs, pairs[:, :1])]
    both, first = (np.array([len(text.encode()) for text in part], np.int64) for part in texts)
    found = (both - first)[which.reshape(-1)]
    found[:1] = len(backend.decode(ids[:1].tolist()).encode())
    return found


def byte_counts(backend: Tokenizer, *, with_special: bool = False) -> np.ndarray | None:
    """Return the number of bytes of text of each entry of a byte-level vocabulary; None for another vocabulary.

    Special tokens have none, except `with_special`.
    """
    if (json.loads(backend.to_str())["decoder"] or {}).get("type") != "ByteLevel":
        return None
    vocabulary = backend.get_vocab(with_added_tokens=True)
    counts = np.zeros(max(vocabulary.values()) + 1, np.int64)
    for token, token_id in vocabulary.items():
        counts[token_id] = len(token)  # a character stands for a byte
    for token_id, added in backend.get_added_tokens_decoder().items():
        counts[token_id] = len(added.content.encode()) if with_special or not added.special else 0
    return counts


def cut(blocks: Iterable[str], size: int) -> Iterator[str]:
    """Blocks of one text → pieces of about `size` characters that, one after another, have the ids of the whole.

    Only for tokenizers that split like GPT-2's (`Encoder.cuttable`). A stretch without spaces is never cut.
    """
    held, looked = "", size
    for block in blocks:
        held += block
        while found := SAFE_CUT.search(held, looked):
            yield held[: found.start()]
            held, looked = held[found.start() :], size
        looked = max(looked, len(held))
    yield held


def has_long_stretch(text: str) -> bool:
    """Whether a stretch of the pattern may be 2 * WINDOW characters or longer.

    tiktoken overflows its stack on a million spaces, and older ones need quadratic time for a long word; tokenizers
    does not. So long a stretch covers one of these windows, and a window of ordinary text is left at its second word.
    """
    return any(
        not (SPACE.search(text, at, at + WINDOW) and NOT_SPACE.search(text, at, at + WINDOW))
        for at in range(0, len(text) - WINDOW + 1, WINDOW)
    )


# ---- when tiktoken can replace tokenizers  ------------------------------------------------------------------


def splits_like_gpt2(description: dict[str, Any]) -> bool:
    """Whether a tokenizer (as `tokenizer.json` describes it) does to text what GPT-2's does before BPE, and no more."""
    before = description["pre_tokenizer"] or {}
    model = description["model"]
    return (
        description["normalizer"] is None
        and before.get("type") == "ByteLevel"
        and not before["add_prefix_space"]
        and before["use_regex"]
        and all(token["special"] for token in description["added_tokens"])
        and model["type"] == "BPE"
        and not model["dropout"]
    )


def merge_ranks(backend: Tokenizer, model: dict[str, Any]) -> dict[bytes, int] | None:
    """The byte-level vocabulary as tiktoken wants it, or None if tiktoken could give other ids.

    tokenizers joins the pairs in the merge list, in its order; tiktoken joins any pair whose concatenation is a token,
    lowest id first. The two are equal if (1) each merge makes a new token and ids grow in merge order, and (2) every
    merged token is encoded as itself. Suppose they agreed so far and x, y are now adjacent with xy a token. No
    merge crossed the ends of xy, so those inside it came in the order in which xy alone is encoded: [x, y] is a state
    on the way to xy, by (2) the next and last step is the merge (x, y), and by (1) no other merge makes xy. So every
    pair tiktoken may join is in the list, in the same order.
    """
    vocabulary, alphabet = model["vocab"], byte_alphabet()
    if model["continuing_subword_prefix"] or model["end_of_word_suffix"] or model["ignore_merges"]:
        return None
    if not all(character in vocabulary for character in alphabet):
        return None
    merged = ["".join(pair) for pair in model["merges"]]
    if not all(vocabulary[a] < vocabulary[b] for a, b in pairwise(merged)):
        return None
    if not all(len(backend.model.tokenize(token)) == 1 for token in merged):
        return None
    return {bytes(alphabet[c] for c in token): vocabulary[token] for token in (*alphabet, *merged)}


def byte_alphabet() -> dict[str, int]:
    """How byte-level vocabularies spell each byte: itself where it prints, else the next character from U+0100 on."""
    prints = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in prints]
    return {chr(byte): byte for byte in prints} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


def tiktoken_engine(ranks: dict[bytes, int]) -> tiktoken.Encoding:
    # Without any special token tiktoken's search for one matches everywhere, at a third of the speed. This one is never
    # found: it is not allowed in any call.
    never = {"<|endoftext|>": max(ranks.values()) + 1}
    return tiktoken.Encoding("byte-level BPE", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=never)
