"""Formats in which chats are published: a row of each → a list of messages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from gpt2small_hf.data.corpus.readers import names
from gpt2small_hf.errors import UsageError

Message: TypeAlias = dict[str, str]
"""`role` (system, user or assistant) and `content`; of Alpaca's rows also `input`."""

SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "assistant", "model"), "assistant"),
    "system": "system",
}
LLAMA2_TURN = re.compile(r"<s>\s*\[INST\](.*?)\[/INST\](.*?)(?:</s>|\Z)\s*", re.DOTALL)
LLAMA2_SYSTEM = re.compile(r"\s*<<SYS>>\n?(.*?)\n?<</SYS>>\s*", re.DOTALL)


@dataclass(frozen=True)
class ChatFormat:
    """A published format of conversations: its columns, a test for a row, and a reader."""

    columns: str
    fits: Callable[[dict[str, Any]], bool]
    read: Callable[[dict[str, Any], str], list[Message]]


def detect_format(row: Any, where: str) -> str:
    """Return the name of a row's format. Raises: UsageError if it matches none."""
    if not isinstance(row, dict):
        raise UsageError(f"{where} is a {type(row).__name__}, not an object with named fields. {KNOWN}")
    for name, shape in CHAT_FORMATS.items():
        if shape.fits(row):
            return name
    raise UsageError(f"{where} has the fields {names(row)}, which match no known format. {KNOWN}")


def _from_messages(row: dict[str, Any], where: str) -> list[Message]:
    return _turns(row["messages"], where, "role", "content")


def _from_sharegpt(row: dict[str, Any], where: str) -> list[Message]:
    turns = row["conversations"]
    if isinstance(turns, list) and turns and isinstance(turns[0], dict) and "role" in turns[0]:
        return _turns(turns, where, "role", "content")
    return _turns(turns, where, "from", "value", SHAREGPT_ROLES)


def _from_alpaca(row: dict[str, Any], where: str) -> list[Message]:
    user = {"role": "user", "content": read_text(row["instruction"], where, "instruction")}
    if row.get("input"):
        user["input"] = read_text(row["input"], where, "input")
    return [user, {"role": "assistant", "content": read_text(row["output"], where, "output")}]


def _from_prompt(row: dict[str, Any], where: str) -> list[Message]:
    messages: list[Message] = []
    for column, role in (("prompt", "user"), ("completion", "assistant")):
        if isinstance(row[column], list):
            messages += _turns(row[column], where, "role", "content")
        else:
            messages.append({"role": role, "content": read_text(row[column], where, column)})
    return messages


def _from_llama2(row: dict[str, Any], where: str) -> list[Message]:
    text, at, messages = row["text"].strip(), 0, []
    while at < len(text):
        turn = LLAMA2_TURN.match(text, at)
        if not turn:
            raise UsageError(
                f"{where}: at character {at:,} of the text no turn begins. "
                "Rendered Llama-2 text is <s>[INST] … [/INST] … </s>, once a turn."
            )
        user, answer = turn.groups()
        if not messages and (system := LLAMA2_SYSTEM.match(user)):
            messages.append({"role": "system", "content": system[1]})
            user = user[system.end() :]
        messages.append({"role": "user", "content": user.strip(" ")})
        at = turn.end()
        if answer.strip() or at < len(text) or turn[0].rstrip().endswith("</s>"):
            messages.append({"role": "assistant", "content": answer.strip(" ")})
    return messages


CHAT_FORMATS = {
    "messages": ChatFormat("role, content", lambda row: "messages" in row, _from_messages),
    "ShareGPT": ChatFormat("conversations: from, value", lambda row: "conversations" in row, _from_sharegpt),
    "Alpaca": ChatFormat(
        "instruction, input, output", lambda row: {"instruction", "output"} <= row.keys(), _from_alpaca
    ),
    "prompt and completion": ChatFormat(
        "prompt, completion", lambda row: {"prompt", "completion"} <= row.keys(), _from_prompt
    ),
    "rendered Llama-2": ChatFormat(
        "text: <s>[INST] … [/INST] … </s>",
        lambda row: isinstance(row.get("text"), str) and row["text"].lstrip().startswith("<s>"),
        _from_llama2,
    ),
}
KNOWN = f"Known are {'; '.join(f'{name} ({shape.columns})' for name, shape in CHAT_FORMATS.items())}."


def _turns(
    turns: Any, where: str, role_key: str, content_key: str, roles: dict[str, str] | None = None
) -> list[Message]:
    if isinstance(turns, str):
        raise UsageError(f"{where}: the turns are a string, not a list. Write them as a list.")
    if not isinstance(turns, list) or not turns:
        raise UsageError(f"{where} has no turns. Remove the row, or add turns.")
    messages = []
    for number, turn in enumerate(turns, start=1):
        here = f"{where}, turn {number}"
        if not isinstance(turn, dict) or not {role_key, content_key} <= turn.keys():
            has = names(turn) if isinstance(turn, dict) else type(turn).__name__
            raise UsageError(f"{here} needs {role_key!r} and {content_key!r}; it has {has}. Correct the row.")
        role = turn[role_key]
        if role in ("tool", "function", "observation", "function_call", "ipython") or turn.get("tool_calls"):
            raise UsageError(
                f"{here} is a tool call or result (role {role}), which is not supported. Remove such rows."
            )
        if turn.get("weight") == 0:
            raise UsageError(
                f"{here} has weight 0, but weights per turn are not supported. Remove it, or see --loss_on last."
            )
        role = (roles or {}).get(str(role), role)
        messages.append({"role": role, "content": read_text(turn[content_key], here, content_key)})
    return messages


def read_text(value: Any, where: str, column: str) -> str:
    if isinstance(value, list) and value and all(_is_text_part(part) for part in value):
        value = "".join(part["text"] for part in value)
    if not isinstance(value, str):
        kind = "null" if value is None else f"of type {type(value).__name__}"
        raise UsageError(f"{where}: {column!r} is {kind}, not a string. Correct or remove the row.")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair, UTF-8 cannot
        raise UsageError(
            f"{where}: character {error.start:,} of {column!r} is half of a surrogate pair. Correct or remove the row."
        ) from None
    return value


def _is_text_part(part: Any) -> bool:
    """Return whether a content part is text; other parts are images, for example."""
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def validate_messages(messages: Iterable[Message], where: str) -> None:
    """Check that roles are valid: an optional system turn, then alternating user and assistant turns.

    Raises: UsageError naming the first invalid turn.
    """
    before = None
    for number, message in enumerate(messages, start=1):
        role, here = message["role"], f"{where}, turn {number}"
        if role not in ("system", "user", "assistant"):
            raise UsageError(f"{here} has the role {role!r}; allowed are system, user and assistant. Rename it.")
        if role == "system" and number > 1:
            raise UsageError(f"{here} is a system turn, which can only be the first. Move or remove it.")
        if role == "assistant" and before in (None, "system"):
            raise UsageError(f"{here} is an assistant turn without a user turn before it. Remove the turn, or the row.")
        if role == before:
            raise UsageError(f"{here}: two consecutive {role} turns. Join them, or remove the row.")
        before = role
    if before == "system":
        raise UsageError(f"{where} has only a system turn. Remove the row.")
