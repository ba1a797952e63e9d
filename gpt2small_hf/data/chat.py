"""Conversation → token ids, and which of them the assistant says: by the template that the tokenizer carries.

So a model is trained on what it is asked with later: `pipeline`, servers and TRL render with the same template.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jinja2
import numpy as np
from tokenizers import Encoding
from transformers import AddedToken, PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from gpt2small_hf.data.conversations import Message
from gpt2small_hf.errors import UsageError

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + eos_token }}{% endgeneration %}"
    "{% else %}{{ message.content + eos_token }}{% endif %}"
    "{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The space before an answer is the model's to write: in a prompt it would be a token of its own, where " Yes" is one.
LLAMA2 = (
    "{{ bos_token }}"
    "{% set turn = namespace(system='') %}"
    "{% for message in messages %}"
    "{% if message.role == 'system' %}"
    "{% set turn.system = '<<SYS>>\n' + message.content + '\n<</SYS>>\n\n' %}"
    "{% elif message.role == 'user' %}"
    "{{ '[INST] ' + turn.system + message.content + ' [/INST]' }}{% set turn.system = '' %}"
    "{% else %}"
    "{% generation %}{{ ' ' + message.content + eos_token }}{% endgeneration %}"
    "{% endif %}"
    "{% endfor %}"
)
# Taori et al. 2023, as the reference series has it: no colon after "Input".
ALPACA = (
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}"
    "{% else %}{{ 'Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.' }}{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'user' %}"
    "{{ '\n\n### Instruction:\n' + message.content }}"
    "{% if message.input %}{{ '\n\n### Input\n' + message.input }}{% endif %}"
    "{% elif message.role == 'assistant' %}"
    "{{ '\n\n### Response:\n' }}{% generation %}{{ message.content + eos_token }}{% endgeneration %}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n\n### Response:\n' }}{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "llama2": LLAMA2, "alpaca": ALPACA}
# What the tokenizer's own tokens are called in these formats, once they have tokens of their own.
ENDS = {"chatml": {"eos_token": "<|im_end|>"}, "llama2": {"bos_token": "<s>", "eos_token": "</s>"}}

# What templates mark turns with: <|im_start|>, [INST], <<SYS>>, </s>, <start_of_turn>, ### Response:
MARKER = re.compile(r"<\|[^|<>{}'\"\s]+\|>|\[/?[A-Z][A-Z_]*\]|<</?[A-Z]+>>|</?s>|</?\w+_of_\w+>|### \w+:?")
GENERATION = re.compile(r"{%-?\s*generation\s*-?%}")
KNOWS_INPUT = re.compile(r"\w\.input\b|\[\s*(['\"])input\1\s*\]|\bget\(\s*(['\"])input\2")
BATCH = 1000
RENDER_SECONDS = 10
T = TypeVar("T")


# ---- the template -----------------------------------------------------------------------------------------------


def find_template(template: str | None, tokenizer: PreTrainedTokenizerFast) -> str:
    """The Jinja text of a template: by name, from a file, as it stands, or (None) the tokenizer's own, else ChatML's.

    Raises: UsageError if there is none of that name, it is no Jinja, or it does not mark what the assistant says.
    """
    if template is None:
        own = tokenizer.chat_template
        source = own if isinstance(own, str) else CHATML
    elif template in TEMPLATES:
        source = TEMPLATES[template]
    elif "{%" in template or "{{" in template:
        source = template
    elif Path(template).expanduser().is_file():
        try:
            source = Path(template).expanduser().read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(
                f"the template {template} is not UTF-8: byte {error.start:,} cannot be decoded. Convert the file."
            ) from None
    else:
        raise UsageError(
            f"--template {template} is neither a name ({', '.join(TEMPLATES)}) nor a file nor Jinja. Give one of these."
        )
    try:
        within(RENDER_SECONDS, lambda: render_jinja_template([[{"role": "user", "content": ""}]], chat_template=source))
    except jinja2.TemplateSyntaxError as error:
        raise UsageError(f"the chat template is no Jinja: {' '.join(str(error).split())}. Correct it.") from None
    except TimeoutError:
        raise UsageError(f"the chat template takes more than {RENDER_SECONDS} s for a chat. Correct it.") from None
    except Exception:  # any that the template's own code raises
        pass  # it may well want another chat or the tokenizer's tokens; `stop_tokens` tries that
    if not GENERATION.search(source):
        raise UsageError(
            "the chat template does not mark what the assistant says, so it is not known what to learn. Put "
            "{% generation %} before an answer and {% endgeneration %} after its end token, or take --template chatml."
        )
    return source


def set_template(
    tokenizer: PreTrainedTokenizerFast, template: str | None, *, add_special_tokens: bool = False
) -> list[str]:
    """Give a tokenizer its chat template, and the template's markers as single tokens if so wanted.

    With tokens of their own, markers that a user types stay text: nobody can forge a turn. Without, a turn ends with
    the tokenizer's end-of-text token, which cannot be typed either; the markers before it are words like others.

    Returns: the tokens that are new. Raises: UsageError as `find_template` and `stop_tokens`.
    """
    source = find_template(template, tokenizer)
    tokenizer.chat_template = source
    new = []
    if add_special_tokens:
        name = next((name for name, text in TEMPLATES.items() if text == source), "")
        ends = ENDS.get(name, {})
        before = len(tokenizer)
        wanted = dict.fromkeys([*MARKER.findall(source), *ends.values()])
        markers = [AddedToken(marker, special=True, normalized=False) for marker in wanted]
        tokenizer.add_special_tokens({"extra_special_tokens": markers}, replace_extra_special_tokens=False)
        if ends:
            tokenizer.add_special_tokens({**ends})
        new = [str(tokenizer.convert_ids_to_tokens(id)) for id in range(before, len(tokenizer))]
    stops = stop_tokens(tokenizer)
    if add_special_tokens and "eos_token" not in source and len(stops) == 1:
        tokenizer.eos_token = stops[0]  # what other tools take for the end of an answer
    return new


def stop_tokens(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """The tokens that end an answer in the tokenizer's template, and a look at whether a model can learn from it.

    Raises: UsageError if the marked text is not the answer and its end token, if an answer is not asked for by what
        stands before it in training, or if a conversation has two beginnings (BOS tokens), or lacks the one that the
        template speaks of.
    """
    chat = [
        {"role": "user", "content": "Question"},
        {"role": "assistant", "content": "Answer"},
        {"role": "user", "content": "Another"},
        {"role": "assistant", "content": "Reply"},
    ]
    source = str(tokenizer.chat_template)
    text, spans = render(tokenizer, [chat])[0]
    prompt, _ = render(tokenizer, [chat[:1]], add_generation_prompt=True)[0]
    said = [text[start:end] for start, end in spans]
    if len(said) != 2 or "Answer" not in said[0] or "Reply" not in said[1]:
        raise UsageError(
            "the chat template's {% generation %} marks do not hold each answer of the assistant. "
            "Put them around its content and end token, inside the loop over messages."
        )
    encoded = encode(tokenizer, [chat])[0]
    found = []
    for start, end in encoded.turns:
        ids = encoded.input_ids[start:end].tolist()
        while len(ids) > 1 and not str(tokenizer.decode(ids[-1:])).strip():
            ids.pop()
        found.append(ids[-1])
    special = special_tokens(tokenizer)
    stops = [str(tokenizer.convert_ids_to_tokens(id)) for id in dict.fromkeys(found)]
    if not set(stops) <= set(special):
        marker = said[0].partition("Answer")[2].strip() or "nothing"
        raise UsageError(
            f"in the chat template an answer ends with {marker}, which is no token of its own, so a model cannot learn "
            "to stop. Pass --add_special_tokens, or end answers with {{ eos_token }} inside {% generation %}."
        )
    rest = said[0].replace("Answer", "", 1).strip()
    if rest not in stops:
        raise UsageError(
            f"the chat template marks more than an answer and its end token: {said[0]!r}. "
            "Move the rest out of {% generation %}."
        )
    if not text[: spans[0][1]].startswith(prompt) or text[len(prompt) : spans[0][0]].strip():
        raise UsageError(
            f"the chat template asks for an answer with {prompt[-24:]!r}, but in training "
            f"{text[: spans[0][0]][-24:]!r} stands before it. Make add_generation_prompt write the same."
        )
    asked = encode(tokenizer, [chat[:1]], add_generation_prompt=True)[0].input_ids.tolist()
    if encoded.input_ids[: len(asked)].tolist() != asked:
        raise UsageError(
            f"the chat template asks for an answer with {prompt[-24:]!r}, whose end is another token in training, "
            "joined to the answer. Let the prompt end before that space, and {% generation %} begin with it."
        )
    _check_beginning(tokenizer, source, encoded.input_ids)
    return stops


def _check_beginning(tokenizer: PreTrainedTokenizerFast, source: str, ids: np.ndarray) -> None:
    bos = tokenizer.bos_token_id
    wanted = "bos_token" in source
    if wanted and (bos is None or ids[0] != bos):
        raise UsageError(
            "the chat template begins with bos_token, but a conversation does not begin with it: "
            + ("the tokenizer has none. " if bos is None else "something stands before it. ")
            + "Write {{ bos_token }} first, and give the tokenizer one, or leave it out of the template."
        )
    if bos is None:
        return
    doubled = bool(((ids[1:] == bos) & (ids[:-1] == bos)).any())
    if doubled or (bos != tokenizer.eos_token_id and int((ids == bos).sum()) > 1):
        raise UsageError(
            f"the chat template writes {tokenizer.bos_token} more than once in a conversation. "
            "Write {{ bos_token }} once, at its beginning, or not at all."
        )


def special_tokens(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """The texts that the tokenizer takes for one token each and that mark something, longest first.

    These are its special tokens, and others it was given, if the template writes them: some tokenizers have their
    markers as such.
    """
    control = tokenizer._get_control_tokens(str(tokenizer.chat_template or ""))  # the library has no public name for it
    return sorted(set(control), key=len, reverse=True)


# ---- text and ids -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Encoded:
    """A conversation as ids."""

    input_ids: np.ndarray
    """int64, shape (T,)."""
    turns: list[tuple[int, int]]
    """Where each of the assistant's turns begins and ends: every token that overlaps it, and its end token."""

    def supervised(self, loss_on: str) -> np.ndarray:
        """Which ids are learned from: of the `assistant`'s turns, of its `last` one, or `all`. bool, shape (T,).

        The first is never: nothing stands before it.
        """
        mask = np.full(len(self.input_ids), loss_on == "all")
        for start, end in self.turns[-1 if loss_on == "last" else 0 :]:
            mask[start:end] = True
        mask[:1] = False
        return mask


def render(
    tokenizer: PreTrainedTokenizerFast, chats: Sequence[Sequence[Message]], *, add_generation_prompt: bool = False
) -> list[tuple[str, list[tuple[int, int]]]]:
    """The text of each conversation, and where in it the assistant speaks: pairs of characters, end excluded.

    Raises: UsageError if the template raises an error, gives text that UTF-8 cannot spell, or does not end.
    """
    source = str(tokenizer.chat_template)
    # Alpaca's rows have an input beside the instruction; few templates know of it.
    if not KNOWS_INPUT.search(source):
        chats = [[_joined(message) for message in chat] for chat in chats]

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
    """The result of `work`, which may not take longer: a template can loop for ever.

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


def _joined(message: Message) -> Message:
    if "input" not in message:
        return message
    return {"role": message["role"], "content": f"{message['content']}\n\n{message['input']}"}


def encode(
    tokenizer: PreTrainedTokenizerFast, chats: Sequence[Sequence[Message]], *, add_generation_prompt: bool = False
) -> list[Encoded]:
    """Conversations → ids, as the tokenizer's `apply_chat_template` gives them, and where the assistant speaks.

    A special token that stands in what somebody says is encoded as the text it is; `apply_chat_template` does that
    only with `sanitize_control_tokens=True`, which gives no mask of the assistant's tokens.
    """
    special = re.compile("|".join(map(re.escape, special_tokens(tokenizer))) or "(?!)")
    forged = [any(special.search(text) for message in chat for text in message.values()) for chat in chats]
    encoded: list[Encoded | None] = [None] * len(chats)
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
) -> Encoded:
    """Mark special tokens in what is said by characters that stand nowhere in it, render, and encode piece by piece."""
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
    # A mark alone is left where a template has split what is said; it goes, and what it parted stays apart.
    for piece in re.split(f"({left}(?:{special.pattern}){right}|[{left}{right}])", text):
        if piece.startswith(left) and len(piece) > 1:
            part = tokenizer._encode_without_added_tokens(piece[1:-1])
            ids += part
            offsets += [(at + 1, at + len(piece) - 1)] * len(part)  # all of it is what somebody says
        elif piece not in (left, right):
            part = tokenizer(piece, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            ids += part["input_ids"]
            offsets += [(at + start, at + end) for start, end in part["offset_mapping"]]
        at += len(piece)
    return _located(ids, offsets, spans)


def _found(encoding: Encoding, spans: Sequence[tuple[int, int]]) -> Encoded:
    """As `_located`, without a list of all offsets, which takes longer to make than all the rest."""
    turns = []
    for start, end in spans:
        first, last = encoding.char_to_token(start), encoding.char_to_token(end - 1)
        if first is None or last is None or start == end:  # a space that the tokenizer leaves out of its offsets, say
            return _located(encoding.ids, encoding.offsets, spans)
        # The last character may have more tokens than this one: of its further bytes.
        while (chars := encoding.token_to_chars(last + 1)) is not None and chars[0] < end:
            last += 1
        turns.append((first, last + 1))
    return Encoded(np.array(encoding.ids, np.int64), turns)


def _located(ids: Sequence[int], offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> Encoded:
    """Which tokens overlap the spans of characters."""
    starts, ends = np.array(offsets, np.int64).reshape(-1, 2).T
    turns = [
        (int(np.searchsorted(ends, start, side="right")), int(np.searchsorted(starts, end, side="left")))
        for start, end in spans
    ]
    return Encoded(np.array(ids, np.int64), turns)
