"""Chats that the user names → conversations for training and validation."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from gpt2small_hf.data.chat.files import Place, find_places, jsonl_rows, read_rows
from gpt2small_hf.data.chat.formats import CHAT_FORMATS, Message, detect_format, read_text, validate_messages
from gpt2small_hf.errors import UsageError
from gpt2small_hf.formatting import counted


@dataclass(frozen=True)
class Conversation:
    """One chat, and its file and line."""

    messages: list[Message]
    where: str


@dataclass
class Conversations:
    """The chats of a split, and their sources."""

    chats: list[Conversation] = field(default_factory=list)
    sources: list[dict[str, Any]] = field(default_factory=list)
    """One per file or dataset: `name`, `shape`, `conversations`, `unreadable`, and `sha256` or `revision`."""


def describe_source(source: dict[str, Any]) -> str:
    """Return one line with the format and the counts of a source."""
    bad = f", {counted(source['unreadable'], 'row')} left out that could not be read" if source["unreadable"] else ""
    return f"{source['name']}: {counted(source['conversations'], 'conversation')}, {source['shape']}{bad}"


def read_conversations(
    train: list[str], validation: list[str] | None, *, validation_fraction: float, skip_bad_rows: bool = False
) -> dict[str, Conversations]:
    """Read chats and split them into train and validation.

    Args:
        train: files (.jsonl, .json, .parquet), folders or Hub ids. `[start:end]` after a name selects rows
            like a Python slice; `:name` after a Hub id selects a split. In a folder, files named `train` and
            `validation` are used as these splits.
        validation: the same, for validation (in a folder, only its files named `validation` if there are any); unset,
            the validation files in the folders of `train`, else a part of `train`.
        validation_fraction: share of the conversations to hold out; 0 holds out none. A hash of the messages selects
            them, so copies of a conversation are in the same split.
        skip_bad_rows: skip and count rows that cannot be read instead of raising an error at the first.

    Returns: `train`, and `validation` unless none is held out.

    Raises: UsageError for input that is missing, empty, in an unknown format, or not a conversation.
    """
    places = [place for name in train for place in find_places(name)]
    found = {"train": [place for place in places if place.split == "train"]}
    if not found["train"]:
        raise UsageError(
            f"{', '.join(train)}: only files named validation were found, so there is nothing to train on. "
            "Name files of chats, or the folder with --validation_data."
        )
    if validation is not None:
        named = [find_places(name) for name in validation]
        found["validation"] = [place for some in named for place in only_validation(some) or some]
    elif only_validation(places):
        found["validation"] = only_validation(places)
    sets = {split: read_places(some, skip_bad_rows) for split, some in found.items()}
    if "validation" not in sets and validation_fraction:
        sets["train"], sets["validation"] = _hold_out(sets["train"], validation_fraction)
    return sets


def only_validation(places: list[Place]) -> list[Place]:
    return [place for place in places if place.split == "validation"]


def _hold_out(whole: Conversations, fraction: float) -> tuple[Conversations, Conversations]:
    keys = [hashlib.sha256(json.dumps(chat.messages, sort_keys=True).encode()).digest() for chat in whole.chats]
    different = sorted(set(keys))
    n = round(fraction * len(different)) or 1
    if len(different) < 2:
        reason = "all conversations are the same" if len(keys) > 1 else "there is only one conversation"
        raise UsageError(
            f"no validation split can be made: {reason}. Name files with --validation_data, or disable it with "
            "--validation_fraction 0 --eval_strategy no."
        )
    chosen = set(different[: min(n, len(different) - 1)])
    sides = [
        [chat for chat, key in zip(whole.chats, keys, strict=True) if (key in chosen) == out] for out in (False, True)
    ]
    return Conversations(sides[0], whole.sources), Conversations(sides[1], [])


def read_places(places: list[Place], skip_bad_rows: bool) -> Conversations:
    """Read the conversations of files, in order. Raises: UsageError as in `read_conversations`."""
    found = Conversations()
    for place in places:
        chats, shape, bad, pinned = _read(place, skip_bad_rows)
        found.chats += chats
        counts = {"shape": shape, "conversations": len(chats), "unreadable": bad}
        found.sources.append({"name": place.name + place.suffix, **counts, **pinned})
    return found


def check_first_row(place: Place) -> None:
    """Read the first row of a local .jsonl file, without torch. Raises: UsageError as `read_conversations`."""
    if place.path.suffix.lower() == ".jsonl" and place.path.is_file() and (place.rows.start or 0) >= 0:
        for where, row in islice(jsonl_rows(place.path), place.rows.start, (place.rows.start or 0) + 1):
            _to_messages(row, where)


def _to_messages(row: Any, where: str) -> tuple[str, list[Message]]:
    """Return the format and the messages of a row. Raises: UsageError if it is not a conversation."""
    if isinstance(row, UsageError):
        raise row
    shape = detect_format(row, where)
    messages = CHAT_FORMATS[shape].read(row, where)
    if row.get("system") and messages[0]["role"] != "system":  # a column of its own in some sets
        messages.insert(0, {"role": "system", "content": read_text(row["system"], where, "system")})
    validate_messages(messages, where)
    return shape, messages


def _read(place: Place, skip_bad_rows: bool) -> tuple[list[Conversation], str, int, dict[str, Any]]:
    rows, pinned = read_rows(place)
    rows = rows[place.rows]
    if not rows:
        raise UsageError(f"{place.name}{place.suffix} has no rows. Name other rows or another file.")
    chats, shapes, first_error, n_bad = [], Counter[str](), None, 0
    for where, row in rows:
        try:
            shape, messages = _to_messages(row, where)
        except UsageError as error:
            if not skip_bad_rows:
                raise
            first_error = first_error or str(error)
            n_bad += 1
            continue
        shapes[shape] += 1
        chats.append(Conversation(messages, where))
    if not chats:
        raise UsageError(f"none of the {len(rows):,} rows of {place.name} is a conversation; the first: {first_error}")
    named = " and ".join(f"{shape} ({CHAT_FORMATS[shape].columns})" for shape, _ in shapes.most_common())
    return chats, named, n_bad, pinned
