"""Refuse a staged folder with a secret: in a text, in what JSON, PNG and safetensors encode, or in weights.

Two sets of rules in one engine: ours (`secrets.yml`), and those of Kingfisher (kingfisher-secret-scanner, by MongoDB,
Apache-2.0), which knows several hundred services, is released every few weeks and uses no network (detect-secrets had
its last release in May 2024 and knows about 20). Both sets match formats; none uses entropy alone, which would match
hashes. Where a format is not enough (`password=…`), `secret_values.py` decides.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from html import unescape
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from PIL import Image

from gpt2small_hf.errors import UsageError
from gpt2small_hf.publishing.secret_values import is_secret_value

if TYPE_CHECKING:
    from kingfisher_sdk import Scanner

RULES = Path(__file__).with_name("secrets.yml")
BINARY = {".safetensors", ".png"}
TOKEN_IN_USE = "the Hugging Face token in use"
MIN_TOKEN_LENGTH = 8
"""A shorter token may be part of any text."""
SEPARATOR = "\n" * 9
"""Between two strings that are scanned as one text: more than any rule of `secrets.yml` skips."""
REPLACED_RULE = "betterleaks.generic-credential-uri"
"""A rule of Kingfisher that matches `https://user:password@host` in manuals; ours does not."""
CONTEXT = 200
"""Bytes before and after a value that decide whether it is a secret."""
OFFER = "[--allow_secret"
"""In the description of a value that the flag can allow."""
MAX_PLACES = 5
"""Listed in a message."""

_ALLOWED: ContextVar[dict[str, bool]] = ContextVar("_ALLOWED")
"""Fingerprints of allowed values, and whether one was found. A context variable because `privacy.py` scans too."""

Found = tuple[str, str]
"""Kind and place of a secret."""


@contextmanager
def allow_secrets(fingerprints: Collection[str]) -> Iterator[None]:
    """Ignore values with these fingerprints in this context, unless only secrets have their format."""
    before = _ALLOWED.set(dict.fromkeys(fingerprints, False))
    try:
        yield
    finally:
        _ALLOWED.reset(before)


def allowed_secrets() -> list[str]:
    """Return the fingerprints of the values that were found and ignored."""
    return sorted(name for name, is_found in _ALLOWED.get({}).items() if is_found)


def fingerprint(value: str) -> str:
    """Return the first digits of a value's SHA-256, the argument of `--allow_secret`."""
    return hashlib.sha256(value.encode(errors="replace")).hexdigest()[:12]


def check_secrets(
    folder: Path, token: str | None = None, quoted: Collection[Path] = (), origin: Callable[[str], object] = str
) -> None:
    """Refuse a staged folder with a secret in it.

    Args:
        folder: the staged folder.
        token: the token in use, which is found whatever its format.
        quoted: files elsewhere that the card quotes in part.
        origin: maps the name of a staged file to the file that it was made from, for the message.

    Raises: UsageError that names files, kinds and places, never a secret.
    """
    found: dict[str, list[str]] = {}
    paths = [path for path in (*sorted(folder.rglob("*")), *quoted) if path.is_file()]
    for path in sorted(paths, key=lambda path: path.name == "README.md"):  # last: it repeats parts of the others
        name = origin(path.relative_to(folder).as_posix()) if path.is_relative_to(folder) else path
        known = {*found} if path.name == "README.md" else ()
        for kind, where in secrets_in(path, token):
            if kind not in known:
                found.setdefault(kind, []).append(f"{name} ({where})")
    if found:
        listed, rest = [], MAX_PLACES
        for kind, places in found.items():
            if rest > 0:
                listed.append(f"{kind} in {', '.join(places[:rest])}")
            rest -= len(places)
        listed += [f"and {-rest:,} more"] if rest < 0 else []
        raise UsageError(f"found what looks like {'; '.join(listed)}. Remove it there, revoke it, and push again.")


def check_flag_value(flag: str, words: str, token: str | None = None) -> None:
    """Raise: UsageError if the value of a flag that is published contains the token in use or another secret."""
    if found := _in_texts([("", words)], token):
        raise UsageError(f"{flag} contains what looks like {found[0][0]}. Remove it, and revoke it.")


def has_secret(text: str, token: str | None = None) -> bool:
    """Whether a text contains the token in use or a secret of any known format."""
    return bool(_in_texts([("", text)], token))


def is_secret(text: str) -> bool:
    """Whether a text contains a secret by the rules of `secrets.yml`."""
    return any(_findings(_our_rules(), text.encode(errors="replace")))


def secrets_in(path: Path, token: str | None = None) -> list[Found]:
    """Find the secrets in what a file encodes or, if there are none, in its bytes; one for each place."""
    if not path.stat().st_size:
        return []
    if found := _in_texts([*texts(path)], token):
        return [(kind, "in a name" if has_secret(where, token) else where) for kind, where in found]
    if path.suffix not in BINARY:
        content = path.read_bytes()
        if is_token(token) and (start := content.find(token.encode())) >= 0:
            return [(TOKEN_IN_USE, f"line {content[:start].count(10) + 1:,}")]
        return [(kind, f"line {line:,}") for kind, line in _scan(content)]
    # Hundreds of megabytes of weights are not read into memory.
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        if is_token(token) and (start := mapped.find(token.encode())) >= 0:
            return [(TOKEN_IN_USE, f"byte {start:,}")]
    return [(kind, f"byte {place['start_offset']:,}") for kind, place in _findings(_our_rules(), path)]


def is_token(token: str | None) -> TypeGuard[str]:
    """Whether a token is long enough not to be part of any text."""
    return token is not None and len(token) >= MIN_TOKEN_LENGTH


# ---- rules ----------------------------------------------------------------------------------------------------------


@cache
def _our_rules() -> Scanner:
    from kingfisher_sdk import Rules, Scanner

    return Scanner(Rules([RULES], builtins=False, cache=False), base64=False)


@cache
def _kingfisher_rules() -> Scanner:
    from kingfisher_sdk import Rules, Scanner

    return Scanner(Rules())


def _findings(scanner: Scanner, content: bytes | Path) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield the kind and place of each secret, without parts of a pair that are not secret by themselves."""
    is_text = isinstance(content, bytes)
    allowed = _ALLOWED.get({})
    matches = scanner.scan(content) if is_text else scanner.scan_file(content)
    for one in sorted(matches, key=lambda one: one.confidence != "high"):  # first those that no flag allows
        if not one.visible or one.rule_id == REPLACED_RULE:
            continue
        start, end = one.location["start_offset"], one.location["end_offset"]
        around = (content[max(0, start - CONTEXT) : start], content[end : end + CONTEXT]) if is_text else (b"", b"")
        if not is_secret_value(one.rule_id, one.secret, *(text.decode(errors="replace") for text in around)):
            continue
        is_ours = one.rule_id.startswith("ours.")
        kind = one.rule_name if is_ours else f"a secret ({re.split('[./]', one.rule_id)[-1]})"
        mark = fingerprint(one.secret)
        if one.confidence == "high":
            yield kind, one.location
        elif mark in allowed:
            allowed[mark] = True
        else:
            yield f"{kind} {OFFER} {mark} if it is not one]", one.location


def _scan(text: bytes) -> list[tuple[str, int]]:
    """Find the lines of a text with a secret: its kind, and the line's number."""
    # Most of Kingfisher's rules need a quote or space after a token, which Markdown and sentences may not have.
    bare = re.sub(rb"[^\w\s./+=:@%&?~#\"'`-]", b" ", text)
    found: dict[int, str] = {}
    scans = ((_our_rules(), text), (_kingfisher_rules(), text), (_kingfisher_rules(), bare))
    hits = [hit for scanner, content in scans for hit in _findings(scanner, content)]
    for kind, place in sorted(hits, key=lambda hit: OFFER in hit[0]):  # prefer rules that no flag allows
        found.setdefault(place["line"], kind)
    return [(kind, line) for line, kind in sorted(found.items())]


def _in_texts(named: list[tuple[str, str]], token: str | None) -> list[Found]:
    """Find the secrets in texts with names: kind and name, one for each text."""
    found = {where: TOKEN_IN_USE for where, text in named if is_token(token) and token in text}
    ends = [*accumulate(text.count("\n") + len(SEPARATOR) for _, text in named)]
    for kind, line in _scan(SEPARATOR.join(text for _, text in named).encode(errors="replace")):
        found.setdefault(named[bisect_right(ends, line - 1)][0], kind)
    return [(kind, where) for where, kind in found.items()]


# ---- what files encode ----------------------------------------------------------------------------------------------


def texts(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the texts that a file encodes, with their places."""
    if path.suffix == ".png":
        yield from _in_png(path)
    elif path.suffix == ".safetensors":
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            yield from _in_json(file.read(min(length, path.stat().st_size)), "header")
    elif path.suffix == ".json":
        yield from _in_json(path.read_bytes())
    elif path.suffix == ".jsonl":
        for i, line in enumerate(path.read_bytes().splitlines(), start=1):
            yield from _in_json(line, f"line {i}")
    elif path.suffix == ".md":
        for i, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n"), start=1):
            plain = unescape(re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", line))
            yield f"line {i}", plain.replace("⏎", "\n")  # `tables.one_line` writes ⏎ for the end of a line


def _in_json(content: bytes, where: str = "") -> Iterator[tuple[str, str]]:
    try:
        yield from _strings(json.loads(content), where)
    except (ValueError, RecursionError):  # not JSON: its bytes are scanned
        return


def _strings(value: Any, where: str) -> Iterator[tuple[str, str]]:
    """Yield all strings in a value, keys included, and the value of a key as `key=value`."""
    if isinstance(value, dict):
        for name, item in value.items():
            here = f"{where}.{name}" if where else name
            if isinstance(item, str):
                yield here, f"{name}={item}"
            else:
                yield here, name
                yield from _strings(item, here)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _strings(item, f"{where}[{i}]")
    elif isinstance(value, str):
        yield where, value


def _in_png(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the text chunks of a picture, compressed ones too."""
    try:
        with Image.open(path) as image:
            image.load()
            yield from ((f"text chunk {name}", str(text)) for name, text in image.info.items())
    except (OSError, SyntaxError, ValueError):  # not a PNG: its bytes are scanned
        return
