# pyright: strict
"""JSON objects with typed fields: dataclasses that are read from JSON with their types checked, and written back.

A field has the name of its key, or the `key` of its metadata where a file's name for it has no unit. Keys that this
version does not know are kept and written back. A file without `schema_version` is of version 0: the development
versions of gpt2small_hf 0.1, which did not record all of what is optional in `records.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from gpt2small_hf.errors import UsageError
from gpt2small_hf.runs.files import read_json, read_jsonl, write_json, write_jsonl

SCHEMA_VERSION = 1
"""Of files written by this version."""

Json = dict[str, Any]
P = TypeVar("P", bound="Part")


@dataclass(frozen=True, kw_only=True)
class Part:
    """A JSON object with typed fields. Optional fields have an empty default: None, or a collection without items."""

    extra: Json = field(default_factory=dict[str, Any], repr=False, compare=False)
    """Keys that this version does not know, with their values."""
    absent: frozenset[str] = field(default=frozenset(), repr=False, compare=False)
    """Optional fields that the file did not have: they are not written back while they are empty."""

    @classmethod
    def from_json(cls: type[P], value: Any, where: str) -> P:
        """Check the types of all fields and build the object.

        Args:
            value: parsed JSON.
            where: the file and, within it, the key, for errors.

        Raises: UsageError naming the first field that is missing or has a value of another type.
        """
        if not isinstance(value, dict):
            raise _mistyped(where, value, "an object")
        known, given, extra = _fields(cls), cast(Json, value), cast(Json, {})
        values: Json = {}
        for key, item in given.items():
            if found := known.get(key):
                is_plain = type(item) in found.plain
                values[found.name] = item if is_plain else _parse(item, found.type, _inside(where, key))
            else:
                extra[key] = item
        absent: list[str] = []
        for key, found in known.items():
            if key not in given:
                if found.is_required:
                    raise UsageError(f"{_inside(where, key)} is missing, expected {_words(found.type)}. {RESTORE}")
                absent.append(found.name)
        return cls(**values, extra=extra, absent=frozenset(absent))

    @classmethod
    def load(cls: type[P], path: Path) -> P:
        """Read a file. Raises: UsageError naming the file, the key, the value found and the type expected."""
        return cls.from_json(read_json(path), f"{path}:")

    @classmethod
    def load_lines(cls: type[P], path: Path) -> list[P]:
        """Read a JSON Lines file; one that does not exist has no lines. Raises: UsageError as `from_json`."""
        lines = read_jsonl(path) if path.exists() else []
        return [cls.from_json(line, f"{path}, line {number}:") for number, line in enumerate(lines, 1)]

    def to_json(self) -> Json:
        """Return the object as it is written."""
        known = {found.name: (key, getattr(self, found.name)) for key, found in _fields(type(self)).items()}
        written = {key: _plain(value) for name, (key, value) in known.items() if value or name not in self.absent}
        return {**written, **self.extra}


@dataclass(frozen=True, kw_only=True)
class Record(Part):
    """The contents of a file of this package."""

    schema_version: int = 0

    def save(self, path: Path) -> None:
        """Write the file, complete or not at all, as one of this version."""
        write_json(path, {**self.to_json(), "schema_version": SCHEMA_VERSION})


@dataclass(frozen=True)
class _Field:
    name: str
    type: Any
    plain: frozenset[type]
    """Types of JSON values that are taken as they are."""
    is_required: bool


@cache
def _fields(cls: type[Part]) -> dict[str, _Field]:
    """The typed fields of a class, by JSON key."""
    types, found = get_type_hints(cls), dict[str, _Field]()
    for one in dataclasses.fields(cls):
        if one.name not in ("extra", "absent"):
            is_required = one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
            expected = types[one.name]
            found[one.metadata.get("key", one.name)] = _Field(one.name, expected, _plain_types(expected), is_required)
    return found


def _alternatives(expected: Any) -> tuple[Any, ...]:
    return get_args(expected) if get_origin(expected) in (Union, UnionType) else (expected,)


def _plain_types(expected: Any) -> frozenset[type]:
    found = {one for one in _alternatives(expected) if one in (str, int, float, bool, NoneType)}
    return frozenset(found | {int} if float in found else found)


def _parse(value: Any, expected: Any, where: str) -> Any:
    """Return a JSON value as the type expected. Raises: UsageError if it is of another one."""
    for one in _alternatives(expected):
        origin, inner = get_origin(one) or one, get_args(one)
        if one is Any or type(value) in _plain_types(one):
            return value
        if isinstance(origin, type) and issubclass(origin, Part) and value is not None:
            return origin.from_json(value, where)
        if origin is list and isinstance(value, list):
            items = cast(list[Any], value)
            return [_parse(item, inner[0], f"{where}[{at}]") for at, item in enumerate(items)]
        if origin is dict and isinstance(value, dict):
            return {key: _parse(item, inner[1], _inside(where, key)) for key, item in cast(Json, value).items()}
    raise _mistyped(where, value, _words(expected))


def save_lines(path: Path, lines: Iterable[Part]) -> None:
    """Write a JSON Lines file, complete or not at all."""
    write_jsonl(path, (line.to_json() for line in lines))


def _plain(value: Any) -> Any:
    if isinstance(value, Part):
        return value.to_json()
    if isinstance(value, list):
        return [_plain(item) for item in cast(list[Any], value)]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in cast(Json, value).items()}
    return value


def _inside(where: str, key: str) -> str:
    return f"{where} {key}" if where.endswith(":") else f"{where}.{key}"


RESTORE = "Restore the file, or make it again with the command that wrote it."


def _mistyped(where: str, value: Any, expected: str) -> UsageError:
    found = repr(value)
    found = found if len(found) <= 60 else f"{found[:59]}…"
    return UsageError(f"{where.removesuffix(':')} is {found}, expected {expected}. {RESTORE}")


def _words(expected: Any) -> str:
    """A type as an error names it: `int or null`, `list of str`, `object`."""
    names = {NoneType: "null", Any: "any value", dict: "object"}
    words: list[str] = []
    for one in _alternatives(expected):
        origin: Any = get_origin(one) or one
        word = names.get(origin) or str(getattr(origin, "__name__", origin))
        if origin is list:
            word = f"list of {_words(get_args(one)[0])}"
        elif isinstance(origin, type) and issubclass(origin, Part):
            word = "object"
        words.append(word)
    return " or ".join(words)
