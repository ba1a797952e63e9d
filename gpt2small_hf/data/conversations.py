"""Files and data sets of chats, in the shapes people publish them in → conversations: lists of role and content.

What becomes of a conversation: `chat.py` (into ids and labels), `chat_dataset.py` (into rows).
"""

from __future__ import annotations

import glob
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from gpt2small_hf.data.documents import first_line, names
from gpt2small_hf.errors import UsageError
from gpt2small_hf.runs.files import parse_json, sha256

Message: TypeAlias = dict[str, str]
"""`role` (system, user or assistant) and `content`; of Alpaca's rows also `input`."""

SUFFIXES = (".jsonl", ".json", ".parquet")
SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "assistant", "model"), "assistant"),
    "system": "system",
}
LLAMA2_TURN = re.compile(r"<s>\s*\[INST\](.*?)\[/INST\](.*?)(?:</s>|\Z)\s*", re.DOTALL)
LLAMA2_SYSTEM = re.compile(r"\s*<<SYS>>\n?(.*?)\n?<</SYS>>\s*", re.DOTALL)


@dataclass(frozen=True)
class Conversation:
    """One chat, and where it stands."""

    messages: list[Message]
    where: str


@dataclass
class Conversations:
    """The chats of a split, and what they were read from."""

    chats: list[Conversation] = field(default_factory=list)
    sources: list[dict[str, Any]] = field(default_factory=list)
    """One a file or data set: `name`, `shape`, `conversations`, `unreadable` and what pins its content."""


def describe_source(source: dict[str, Any]) -> str:
    """What a file was recognised as, in a line."""
    bad = f", {counted(source['unreadable'], 'row')} left out that could not be read" if source["unreadable"] else ""
    return f"{source['name']}: {counted(source['conversations'], 'conversation')}, {source['shape']}{bad}"


def counted(n: int, word: str) -> str:
    """A number of things: 1 row, 2 rows."""
    return f"{n:,} {word}" if n == 1 else f"{n:,} {word}s"


# ---- what a user names → train and validation ------------------------------------------------------------------


def read_conversations(
    train: list[str], validation: list[str] | None, *, validation_fraction: float, skip_bad_rows: bool = False
) -> dict[str, Conversations]:
    """Read chats and hold some out.

    Args:
        train: files (.jsonl, .json, .parquet), folders or Hub ids. `[start:end]` behind a name takes these rows
            of it, as Python's slices do; `:name` behind a Hub id takes this split. Of a folder with files named
            `train` and `validation` these are used as such.
        validation: the same, to measure on (of a folder, its files named `validation` if it has such); unset, what the
            folders of `train` have, else a part of `train`.
        validation_fraction: that part, of the conversations; 0: none is held out. They are chosen by a hash of what is
            said, so that a conversation that stands twice is on one side.
        skip_bad_rows: leave out rows that cannot be read, and count them, instead of stopping at the first.

    Returns: `train`, and `validation` unless none is held out.

    Raises: UsageError, in one line, for what is missing, empty, of no known shape, or no conversation.
    """
    places = [place for name in train for place in find_places(name)]
    found = {"train": [place for place in places if place.split == "train"]}
    if not found["train"]:
        raise UsageError(
            f"{', '.join(train)}: only files named validation are there, so there is nothing to learn from. "
            "Name files of chats, or the folder with --validation_data."
        )
    if validation is not None:
        found["validation"] = [place for name in validation for place in _to_measure_on(find_places(name))]
    elif any(place.split == "validation" for place in places):
        found["validation"] = [place for place in places if place.split == "validation"]
    sets = {split: read_places(some, skip_bad_rows) for split, some in found.items()}
    if "validation" not in sets and validation_fraction:
        sets["train"], sets["validation"] = _hold_out(sets["train"], validation_fraction)
    return sets


@dataclass(frozen=True)
class Place:
    """A file, or a split of a data set, and which of its rows are wanted."""

    name: str
    split: str
    rows: slice

    @property
    def path(self) -> Path:
        return Path(self.name).expanduser()


def find_places(name: str) -> list[Place]:
    """The files that a name stands for, or the data set on the Hub. Raises: UsageError if there are none."""
    match = re.fullmatch(r"(.+)\[(-?\d*):(-?\d*)\]", name)
    base, start, end = match.groups() if match else (name, "", "")
    rows = slice(int(start) if start else None, int(end) if end else None)
    path = Path(base).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in SUFFIXES and file.is_file())
        if not files:
            raise UsageError(f"no .jsonl, .json or .parquet file in the folder {base}. Name the file of chats.")
        split_of = {file: _split_of(file) for file in files}
        if "train" in split_of.values():
            files = [file for file in files if split_of[file]]
        return [Place(str(file), split_of[file] or "train", rows) for file in files]
    if path.exists():
        if path.suffix.lower() not in SUFFIXES:
            raise UsageError(
                f"{base} is not .jsonl, .json or .parquet. Chats have one row each; plain text is trained on by --text."
            )
        if path.stat().st_size == 0:
            raise UsageError(f"{base} is empty. Leave it out or fill it.")
        return [Place(base, "train", rows)]
    if "*" in base or "?" in base:
        found = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207  # Path.glob takes no absolute pattern
        if not found:
            raise UsageError(f"{base} matches no file. Check the spelling; the working folder is {Path.cwd()}.")
        ends = name[len(base) :]
        return [place for file in found for place in find_places(file + ends)]
    if path.suffix.lower() in SUFFIXES or not re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", base):
        raise UsageError(f"{base} does not exist. Check the spelling; the working folder is {Path.cwd()}.")
    return [Place(base, "train", rows)]


def _to_measure_on(places: list[Place]) -> list[Place]:
    return [place for place in places if place.split == "validation"] or places


def _split_of(file: Path) -> str | None:
    word = re.split(r"[-_.]", file.stem.lower())[0]
    return {"train": "train", "validation": "validation", "valid": "validation", "val": "validation"}.get(word)


def _hold_out(whole: Conversations, fraction: float) -> tuple[Conversations, Conversations]:
    keys = [_hash_of(chat.messages) for chat in whole.chats]
    different = sorted(set(keys))
    n = round(fraction * len(different)) or 1
    if len(different) < 2:
        reason = "all conversations are the same" if len(keys) > 1 else "there is one conversation alone"
        raise UsageError(
            f"nothing is left to measure on: {reason}. Name some with --validation_data, or hold out none with "
            "--validation_fraction 0 --eval_strategy no."
        )
    chosen = set(different[: min(n, len(different) - 1)])
    sides = [
        [chat for chat, key in zip(whole.chats, keys, strict=True) if (key in chosen) == out] for out in (False, True)
    ]
    return Conversations(sides[0], whole.sources), Conversations(sides[1], [])


def _hash_of(messages: list[Message]) -> bytes:
    return hashlib.sha256(json.dumps(messages, sort_keys=True).encode()).digest()


# ---- reading ----------------------------------------------------------------------------------------------------


def read_places(places: list[Place], skip_bad_rows: bool) -> Conversations:
    """The conversations of some files, one after the other. Raises: UsageError as `read_conversations`."""
    found = Conversations()
    for place in places:
        chats, shape, bad, pinned = _read(place, skip_bad_rows)
        found.chats += chats
        name = place.name + (f"[{_bound(place.rows.start)}:{_bound(place.rows.stop)}]" if place.rows != ALL else "")
        found.sources.append({"name": name, "shape": shape, "conversations": len(chats), "unreadable": bad, **pinned})
    return found


ALL = slice(None, None)


def _bound(value: int | None) -> str:
    return "" if value is None else str(value)


def _read(place: Place, skip_bad_rows: bool) -> tuple[list[Conversation], str, int, dict[str, Any]]:
    rows, pinned = _rows_of(place)
    rows = rows[place.rows]
    if not rows:
        raise UsageError(f"{place.name} has no rows{' in that slice' if place.rows != ALL else ''}. Name other ones.")
    chats, shapes, first_error, n_bad = [], Counter[str](), None, 0
    for where, row in rows:
        try:
            if isinstance(row, UsageError):
                raise row
            shape = shape_of(row, where)
            messages = SHAPES[shape].read(row, where)
            if row.get("system") and messages[0]["role"] != "system":  # a column of its own in some sets
                messages.insert(0, {"role": "system", "content": _text(row["system"], where, "system")})
            check(messages, where)
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
    named = " and ".join(f"{shape} ({SHAPES[shape].columns})" for shape, _ in shapes.most_common())
    return chats, named, n_bad, pinned


def _rows_of(place: Place) -> tuple[list[tuple[str, Any]], dict[str, Any]]:
    """Every row with where it stands, and what pins the content: a SHA-256, or a revision.

    A row that could not be read is the error that says so: whether it is wanted is not known here.
    """
    if not place.path.exists():
        return _hub_rows(place.name)
    pinned = {"sha256": sha256(place.path)}
    kind = place.path.suffix.lower()
    if kind == ".jsonl":
        return list(_jsonl_rows(place.path)), pinned
    if kind == ".json":
        return list(_json_rows(place.path)), pinned
    return list(_parquet_rows(place.path)), pinned


def _text_of(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8: byte {error.start:,} cannot be decoded. Convert the file.") from None


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(_text_of(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number:,}"
        try:
            yield where, parse_json(line)
        except json.JSONDecodeError as error:
            yield where, UsageError(f"{where} is not JSON ({error.msg}). Correct or remove the line.")


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        rows = parse_json(_text_of(path))
    except json.JSONDecodeError as error:
        hint = " (one row a line is .jsonl)" if error.msg == "Extra data" else ""
        where = f"{path}, line {error.lineno:,}" if error.pos else path
        raise UsageError(f"{where} is not JSON ({error.msg}). Correct the file, or rename it{hint}.") from None
    if not isinstance(rows, list):
        raise UsageError(f"{path} holds a {type(rows).__name__}, not a list of rows. Save it as [row, row, …].")
    return ((f"{path}, item {number:,}", row) for number, row in enumerate(rows))


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:  # OSError: it ends as such a file does, but is broken before
        raise UsageError(f"{path} is not a Parquet file ({first_line(error)}). Make it again.") from None
    return ((f"{path}, row {number:,}", row) for number, row in enumerate(rows, start=1))


def _hub_rows(name: str) -> tuple[list[tuple[str, Any]], dict[str, Any]]:
    import datasets
    from huggingface_hub import HfApi

    dataset, _, split = name.partition(":")
    revision = None
    # Pinned before it is loaded, so that what is recorded is what is read; without a network a copy may be here.
    with suppress(Exception):
        revision = HfApi().dataset_info(dataset).sha
    try:
        rows = datasets.load_dataset(dataset, split=split or "train", revision=revision)
    except (ConnectionError, TimeoutError) as error:
        raise UsageError(
            f"{dataset} is no file here, and the Hub could not be reached for it ({first_line(error)}). "
            "Check the spelling, or name files: --chat_data chats.jsonl"
        ) from None
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"the data set {name} cannot be loaded: {first_line(error)}. Name the split as {dataset}:SPLIT."
        ) from None
    return [(f"{name}, row {number:,}", row) for number, row in enumerate(rows, start=1)], {"revision": revision}


# ---- shapes -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """How people write a conversation down."""

    columns: str
    fits: Callable[[dict[str, Any]], bool]
    read: Callable[[dict[str, Any], str], list[Message]]


def shape_of(row: Any, where: str) -> str:
    """The name of a row's shape. Raises: UsageError if it has none that is known."""
    if not isinstance(row, dict):
        raise UsageError(f"{where} is a {type(row).__name__}, not an object with named fields. {KNOWN}")
    for name, shape in SHAPES.items():
        if shape.fits(row):
            return name
    raise UsageError(f"{where} has the fields {names(row)}, which is no known shape. {KNOWN}")


def _from_messages(row: dict[str, Any], where: str) -> list[Message]:
    return _turns(row["messages"], where, "role", "content")


def _from_sharegpt(row: dict[str, Any], where: str) -> list[Message]:
    turns = row["conversations"]
    if isinstance(turns, list) and turns and isinstance(turns[0], dict) and "role" in turns[0]:
        return _turns(turns, where, "role", "content")
    return _turns(turns, where, "from", "value", SHAREGPT_ROLES)


def _from_alpaca(row: dict[str, Any], where: str) -> list[Message]:
    user = {"role": "user", "content": _text(row["instruction"], where, "instruction")}
    if row.get("input"):
        user["input"] = _text(row["input"], where, "input")
    return [user, {"role": "assistant", "content": _text(row["output"], where, "output")}]


def _from_prompt(row: dict[str, Any], where: str) -> list[Message]:
    messages: list[Message] = []
    for column, role in (("prompt", "user"), ("completion", "assistant")):
        if isinstance(row[column], list):
            messages += _turns(row[column], where, "role", "content")
        else:
            messages.append({"role": role, "content": _text(row[column], where, column)})
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


SHAPES = {
    "messages": Shape("role, content", lambda row: "messages" in row, _from_messages),
    "ShareGPT": Shape("conversations: from, value", lambda row: "conversations" in row, _from_sharegpt),
    "Alpaca": Shape("instruction, input, output", lambda row: {"instruction", "output"} <= row.keys(), _from_alpaca),
    "prompt and completion": Shape(
        "prompt, completion", lambda row: {"prompt", "completion"} <= row.keys(), _from_prompt
    ),
    "rendered Llama-2": Shape(
        "text: <s>[INST] … [/INST] … </s>",
        lambda row: isinstance(row.get("text"), str) and row["text"].lstrip().startswith("<s>"),
        _from_llama2,
    ),
}
KNOWN = f"Known are {'; '.join(f'{name} ({shape.columns})' for name, shape in SHAPES.items())}."


def _turns(
    turns: Any, where: str, role_key: str, content_key: str, roles: dict[str, str] | None = None
) -> list[Message]:
    if isinstance(turns, str):
        raise UsageError(f"{where}: the turns are a text, not a list of turns. Write them as a list.")
    if not isinstance(turns, list) or not turns:
        raise UsageError(f"{where} has no turns. Remove the row, or fill it.")
    messages = []
    for number, turn in enumerate(turns, start=1):
        here = f"{where}, turn {number}"
        if not isinstance(turn, dict) or not {role_key, content_key} <= turn.keys():
            has = names(turn) if isinstance(turn, dict) else type(turn).__name__
            raise UsageError(f"{here} needs {role_key!r} and {content_key!r}; it has {has}. Correct the row.")
        role = turn[role_key]
        if role in ("tool", "function", "observation", "function_call", "ipython") or turn.get("tool_calls"):
            raise UsageError(f"{here} is of a tool ({role}), and a model is taught no tools here. Remove such rows.")
        if turn.get("weight") == 0:
            raise UsageError(f"{here} has weight 0: turns are all learned alike. Remove it, or see --loss_on last.")
        role = (roles or {}).get(str(role), role)
        messages.append({"role": role, "content": _text(turn[content_key], here, content_key)})
    return messages


def _text(value: Any, where: str, column: str) -> str:
    if isinstance(value, list) and value and all(_is_text_part(part) for part in value):
        value = "".join(part["text"] for part in value)
    if not isinstance(value, str):
        kind = "null" if value is None else f"of type {type(value).__name__}"
        raise UsageError(f"{where}: {column!r} is {kind}, not text. Correct or remove the row.")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair, UTF-8 cannot
        raise UsageError(
            f"{where}: character {error.start:,} of {column!r} is half of a surrogate pair. Correct or remove the row."
        ) from None
    return value


def _is_text_part(part: Any) -> bool:
    """Some write a text as a list of parts, of which others may be pictures."""
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def check(messages: Iterable[Message], where: str) -> None:
    """See that a conversation is one: a system turn or none, then user and assistant in turn.

    Raises: UsageError naming the turn that is not.
    """
    before = None
    for number, message in enumerate(messages, start=1):
        role, here = message["role"], f"{where}, turn {number}"
        if role not in ("system", "user", "assistant"):
            raise UsageError(f"{here} has the role {role!r}; a turn is of system, user or assistant. Rename it.")
        if role == "system" and number > 1:
            raise UsageError(f"{here} is a system turn, which can only be the first. Move or remove it.")
        if role == "assistant" and before in (None, "system"):
            raise UsageError(f"{here}: the assistant speaks before the user. Remove its turn, or the row.")
        if role == before:
            raise UsageError(f"{here}: two {role} turns in a row. Join them, or remove the row.")
        before = role
    if before == "system":
        raise UsageError(f"{where} is a system turn alone. Remove the row.")
