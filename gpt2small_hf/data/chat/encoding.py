"""Conversations → token ids and loss masks, by the tokenizer's chat template.

`pipeline`, servers and TRL render prompts with the same template.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from tokenizers import Encoding
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from gpt2small_hf.data.chat.formats import Message
from gpt2small_hf.errors import UsageError

KNOWS_INPUT = re.compile(r"\w\.input\b|\[\s*(['\"])input\1\s*\]|\bget\(\s*(['\"])input\2")
BATCH = 1000
RENDER_SECONDS = 10
T = TypeVar("T")


def special_tokens(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Return the control tokens of the tokenizer, longest first.

    These are its special tokens, and other added tokens that the template contains: some tokenizers add their
    markers without declaring them special.
    """
    control = tokenizer._get_control_tokens(str(tokenizer.chat_template or ""))  # the library has no public name for it
    return sorted(set(control), key=len, reverse=True)


@dataclass(frozen=True)
class EncodedChat:
    """A conversation as ids."""

    input_ids: np.ndarray
    """int64, shape (T,)."""
    turns: list[tuple[int, int]]
    """Start and end of each assistant turn: every token that overlaps it, and its end token."""

    def supervised(self, loss_on: str) -> np.ndarray:
        """Return the loss mask of `assistant` turns, the `last` assistant turn, or `all` tokens. bool, shape (T,).

        The first token is never supervised: nothing predicts it.
        """
        mask = np.full(len(self.input_ids), loss_on == "all")
        for start, end in self.turns[-1 if loss_on == "last" else 0 :]:
            mask[start:end] = True
        mask[:1] = False
        return mask


def render(
    tokenizer: PreTrainedTokenizerFast, chats: Sequence[Sequence[Message]], *, add_generation_prompt: bool = False
) -> list[tuple[str, list[tuple[int, int]]]]:
    """Return the text of each conversation, and the character spans (start, end) of the assistant's turns.

    Raises: UsageError if the template raises an error, returns text that UTF-8 cannot encode, or does not end.
    """
    source = str(tokenizer.chat_template)
    # Alpaca's rows have an input as well as the instruction; few templates use it.
    if not KNOWS_INPUT.search(source):
        parts = ("content", "input")
        chats = [
            [{"role": m["role"], "content": "\n\n".join(m[part] for part in parts if part in m)} for m in chat]
            for chat in chats
        ]

    def work() -> Any:
        return render_jinja_template(
            [list(chat) for chat in chats],
            chat_template=source,
            return_assistant_tokens_mask=True,
            add_generation_prompt=add_generation_prompt,
            **tokenizer.special_tokens_map,  # pyright: ignore[reportArgumentType]
        )

    try:
        texts, spans = within(RENDER_SECONDS + len(chats) / 10, work)
        "".join(texts).encode()
    except Exception as error:  # any that the template's own code raises: it is the user's
        if len(chats) > 1 and not isinstance(error, TimeoutError):  # find the chat
            return [render(tokenizer, [chat], add_generation_prompt=add_generation_prompt)[0] for chat in chats]
        reason, begin = " ".join(str(error).split()) or type(error).__name__, chats[0][0]["content"][:30]
        raise UsageError(
            f"the chat template cannot render a chat: {reason}. The chat begins with {begin!r}. Correct the template "
            "or remove the chat."
        ) from None
    return list(zip(texts, spans, strict=True))


def within(seconds: float, work: Callable[[], T]) -> T:
    """Return the result of `work`, with a time limit: a template can loop for ever.

    It runs in a thread, which cannot be stopped but ends with the process. Signals would need the main thread, and
    Windows has none that interrupt.

    Raises: TimeoutError, and what `work` raises.
    """
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"it takes more than {seconds:,.0f} s")
    if errors:
        raise errors[0]
    return results[0]


def encode(
    tokenizer: PreTrainedTokenizerFast, chats: Sequence[Sequence[Message]], *, add_generation_prompt: bool = False
) -> list[EncodedChat]:
    """Encode conversations as the tokenizer's `apply_chat_template` does, and locate the assistant's turns.

    A special token in a message's content is encoded as plain text; `apply_chat_template` does that
    only with `sanitize_control_tokens=True`, which gives no mask of the assistant's tokens.
    """
    special = re.compile("|".join(map(re.escape, special_tokens(tokenizer))) or "(?!)")
    forged = [any(special.search(text) for message in chat for text in message.values()) for chat in chats]
    encoded: list[EncodedChat | None] = [None] * len(chats)
    plain = [number for number, found in enumerate(forged) if not found]
    for start in range(0, len(plain), BATCH):
        numbers = plain[start : start + BATCH]
        rendered = render(tokenizer, [chats[n] for n in numbers], add_generation_prompt=add_generation_prompt)
        texts = [text for text, _ in rendered]
        batch = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        for number, encoding, (_, spans) in zip(numbers, batch.encodings or [], rendered, strict=True):
            encoded[number] = _found(encoding, spans)
    for number, found in enumerate(forged):
        if found:
            encoded[number] = _encode_forged(tokenizer, chats[number], special, add_generation_prompt)
    return [one for one in encoded if one is not None]


def _encode_forged(
    tokenizer: PreTrainedTokenizerFast,
    chat: Sequence[Message],
    special: re.Pattern[str],
    add_generation_prompt: bool,
) -> EncodedChat:
    """Mark special tokens in the contents with unused characters, render, and encode piece by piece."""
    said = (text for message in chat for text in message.values())
    everything = set().union(*said, special.pattern, str(tokenizer.chat_template))
    free = (mark for mark in map(chr, (*range(0xE000, 0xF900), *range(0xF0000, 0x110000))) if mark not in everything)
    left, right = next(free), next(free)
    marked = [
        {key: text if key == "role" else special.sub(f"{left}\\g<0>{right}", text) for key, text in message.items()}
        for message in chat
    ]
    text, spans = render(tokenizer, [marked], add_generation_prompt=add_generation_prompt)[0]
    ids: list[int] = []
    offsets: list[tuple[int, int]] = []
    at = 0
    # A single mark remains where a template split the content: drop it, and encode both sides separately.
    for piece in re.split(f"({left}(?:{special.pattern}){right}|[{left}{right}])", text):
        if piece.startswith(left) and len(piece) > 1:
            part = tokenizer._encode_without_added_tokens(piece[1:-1])
            ids += part
            offsets += [(at + 1, at + len(piece) - 1)] * len(part)  # all of it is message content
        elif piece not in (left, right):
            part = tokenizer(piece, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            ids += part["input_ids"]
            offsets += [(at + start, at + end) for start, end in part["offset_mapping"]]
        at += len(piece)
    return _located(ids, offsets, spans)


def _found(encoding: Encoding, spans: Sequence[tuple[int, int]]) -> EncodedChat:
    """Do as `_located`, without the list of all offsets, which takes most of the time to build."""
    turns = []
    for start, end in spans:
        first, last = encoding.char_to_token(start), encoding.char_to_token(end - 1)
        if first is None or last is None or start == end:  # a space that the tokenizer leaves out of its offsets, say
            return _located(encoding.ids, encoding.offsets, spans)
        # The last character may have more tokens, one for each further byte.
        while (chars := encoding.token_to_chars(last + 1)) is not None and chars[0] < end:
            last += 1
        turns.append((first, last + 1))
    return EncodedChat(np.array(encoding.ids, np.int64), turns)


def _located(ids: Sequence[int], offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> EncodedChat:
    """Find the tokens that overlap the character spans."""
    starts, ends = np.array(offsets, np.int64).reshape(-1, 2).T
    turns = [
        (int(np.searchsorted(ends, start, side="right")), int(np.searchsorted(starts, end, side="left")))
        for start, end in spans
    ]
    return EncodedChat(np.array(ids, np.int64), turns)
