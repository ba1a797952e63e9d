"""Give a tokenizer a chat template, and check that a model can be trained with it."""

from __future__ import annotations

import re

import numpy as np
from transformers import AddedToken, PreTrainedTokenizerFast

from gpt2small_hf.data.chat.encoding import encode, render, special_tokens
from gpt2small_hf.data.chat.templates import ENDS, TEMPLATES, find_template
from gpt2small_hf.errors import UsageError

# What templates mark turns with: <|im_start|>, [INST], <<SYS>>, </s>, <start_of_turn>, ### Response:
MARKER = re.compile(r"<\|[^|<>{}'\"\s]+\|>|\[/?[A-Z][A-Z_]*\]|<</?[A-Z]+>>|</?s>|</?\w+_of_\w+>|### \w+:?")


def set_template(
    tokenizer: PreTrainedTokenizerFast, template: str | None, *, add_special_tokens: bool = False
) -> list[str]:
    """Set the chat template of a tokenizer, and optionally add the template's markers as single tokens.

    As single tokens, markers typed by a user stay text, so turns cannot be forged. Otherwise a turn ends with the
    tokenizer's end-of-text token, which cannot be typed either; the other markers are ordinary text.

    Returns: the added tokens. Raises: UsageError as `find_template` and `stop_tokens`.
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
    """Check the tokenizer's template, and return the tokens that end an answer in it.

    Raises: UsageError if the marked text is not the answer and its end token, if the generation prompt
        differs from the text before an answer in training, or if a conversation has two BOS tokens, or lacks the one
        that the template names.
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
            "the chat template's {% generation %} marks do not enclose each answer of the assistant. "
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
            f"in the chat template an answer ends with {marker}, which is not a single token, so a model cannot learn "
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
            f"{text[: spans[0][0]][-24:]!r} precedes it. Make add_generation_prompt write the same."
        )
    asked = encode(tokenizer, [chat[:1]], add_generation_prompt=True)[0].input_ids.tolist()
    if encoded.input_ids[: len(asked)].tolist() != asked:
        raise UsageError(
            f"the chat template asks for an answer with {prompt[-24:]!r}, whose end is another token in training, "
            "joined to the answer. End the prompt before that space, and begin {% generation %} with it."
        )
    _check_beginning(tokenizer, source, encoded.input_ids)
    return stops


def _check_beginning(tokenizer: PreTrainedTokenizerFast, source: str, ids: np.ndarray) -> None:
    bos = tokenizer.bos_token_id
    wanted = "bos_token" in source
    if wanted and (bos is None or ids[0] != bos):
        raise UsageError(
            "the chat template begins with bos_token, but a conversation does not begin with it: "
            + ("the tokenizer has none. " if bos is None else "it is preceded by other text. ")
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
