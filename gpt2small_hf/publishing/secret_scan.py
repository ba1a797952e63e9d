"""A staged folder → a refusal if it has a secret: in a text, in what JSON, PNG and safetensors encode, or in weights.

Two sets of rules in one engine: ours (`secrets.yml`), and those of Kingfisher (kingfisher-secret-scanner, by MongoDB,
Apache-2.0), which knows several hundred services. It is released every few weeks, runs in this process and asks no
network; detect-secrets had its last release in May 2024 and knows about 20. Both sets look for forms, none for
entropy alone, which would take hashes for keys. Where a form is not enough (`password=…`), `secret_values.py` decides.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import re
import zlib
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from html import unescape
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from gpt2small_hf.errors import UsageError
from gpt2small_hf.publishing.secret_values import is_secret_value

if TYPE_CHECKING:
    from kingfisher_sdk import Scanner

RULES = Path(__file__).with_name("secrets.yml")
BINARY = {".safetensors", ".png"}
SHORTEST_TOKEN = 8
"""Characters: a shorter one is not a token, and may be part of any text."""
APART = "\n" * 9
"""Between two strings that are scanned as one text: more than any rule of `secrets.yml` skips."""
REPLACED = "betterleaks.generic-credential-uri"
"""A rule of Kingfisher that takes `https://user:password@host` of a manual for a secret; ours does not."""
CONTEXT = 200
"""Bytes before and after a value that decide whether it is a secret."""
OFFER = "[--allow_secret"
"""In what is said of a value that the flag can allow."""
MOST_PLACES = 5
"""Listed in a message."""
MOST_TEXT = 2**22
"""Bytes of a compressed text that are read."""

_ALLOWED: ContextVar[dict[str, bool]] = ContextVar("_ALLOWED")
"""Fingerprints of values that are published, and whether one was found. Not an argument: `privacy.py` asks too."""

Found = tuple[str, str]
"""What it looks like, and where."""


@contextmanager
def allow_secrets(fingerprints: Collection[str]) -> Iterator[None]:
    """Ignore the values that have these fingerprints, except forms that only secrets have, in this context."""
    before = _ALLOWED.set(dict.fromkeys(fingerprints, False))
    try:
        yield
    finally:
        _ALLOWED.reset(before)


def allowed_secrets() -> list[str]:
    """Return the fingerprints of the values that were found and ignored."""
    return sorted(name for name, is_found in _ALLOWED.get({}).items() if is_found)


def fingerprint(value: str) -> str:
    """Return the beginning of a value's SHA-256, which `--allow_secret` takes."""
    return hashlib.sha256(value.encode(errors="replace")).hexdigest()[:12]


def check_secrets(
    folder: Path, token: str | None = None, quoted: Collection[Path] = (), origin: Callable[[str], object] = str
) -> None:
    """Refuse a staged folder with a secret in it.

    Args:
        folder: what is published.
        token: the token in use, which is looked for whatever its form.
        quoted: files elsewhere of which the card shows parts, cut to length.
        origin: from the name of a staged file to the file that it was made from, which the message names.

    Raises: UsageError that names files, kinds and places, never a secret.
    """
    staged = sorted(path for path in folder.rglob("*") if path.is_file())
    found: dict[str, list[str]] = {}
    # The card last: what is in it is mostly from the other files.
    for path in sorted(
        [*staged, *(path for path in quoted if path.is_file())], key=lambda path: path.name == "README.md"
    ):
        name = origin(path.relative_to(folder).as_posix()) if path.is_relative_to(folder) else path
        places: dict[str, list[str]] = {}
        for what, where in secrets_in(path, token):
            places.setdefault(what, []).append(f"{name} ({where})")
        is_card = path.name == "README.md"
        for what in [what for what in places if not (is_card and what in found)]:
            found.setdefault(what, []).extend(places[what])
    if found:
        listed, rest = [], MOST_PLACES
        for what, named in found.items():
            if rest:
                listed.append(f"{what} in {', '.join(named[:rest])}")
            rest = max(0, rest - len(named))
        if (more := sum(map(len, found.values())) - MOST_PLACES) > 0:
            listed.append(f"and {more:,} more")
        raise UsageError(
            f"found what looks like {'; '.join(listed)}. Take it out there, revoke it where it was made, and push "
            "again."
        )


def check_flag_value(flag: str, words: str, token: str | None = None) -> None:
    """Raise: UsageError if the value of a flag, which is published, has the token in use or another secret."""
    if found := _in_texts([("", words)], token):
        raise UsageError(f"{flag} holds what looks like {found[0][0]}. Write another, and revoke it where it was made.")


def has_secret(text: str, token: str | None = None) -> bool:
    """Whether a text has the token in use or a secret of any known form, so that it must not be printed."""
    return bool(_in_texts([("", text)], token))


def is_secret(text: str) -> bool:
    """Whether a text has a secret of a form that `secrets.yml` describes."""
    return any(_findings(_ours(), text.encode(errors="replace")))


def secrets_in(path: Path, token: str | None = None) -> list[Found]:
    """Find the secrets in a file, as it is read or, if that shows none, as it is; one for each place."""
    if not path.stat().st_size:
        return []
    if found := _in_texts([*texts(path)], token):
        return [(what, "in a name" if has_secret(where, token) else where) for what, where in found]
    at = "byte" if path.suffix in BINARY else "line"
    if is_token(token) and (start := _find(path, token.encode())) is not None:
        line = path.read_bytes()[:start].count(b"\n") + 1 if at == "line" else 0
        return [("the Hugging Face token in use", f"byte {start:,}" if at == "byte" else f"line {line:,}")]
    if at == "byte":  # hundreds of megabytes of weights are not read into memory
        hits = [(what, place["start_offset"]) for what, place in _findings(_ours(), path)]
    else:
        hits = _scan(path.read_bytes())
    return [(what, f"{at} {start:,}") for what, start in hits]


def is_token(token: str | None) -> TypeGuard[str]:
    """Whether it is long enough not to be part of any text."""
    return token is not None and len(token) >= SHORTEST_TOKEN


def _find(path: Path, wanted: bytes) -> int | None:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        start = content.find(wanted)
    return None if start < 0 else start


# ---- the rules ------------------------------------------------------------------------------------------------------


@cache
def _ours() -> Scanner:
    from kingfisher_sdk import Rules, Scanner

    return Scanner(Rules([RULES], builtins=False, cache=False), base64=False)


@cache
def _theirs() -> Scanner:
    from kingfisher_sdk import Rules, Scanner

    return Scanner(Rules())


def _findings(scanner: Scanner, content: bytes | Path) -> Iterator[tuple[str, dict[str, int]]]:
    """What each looks like, and its place. Parts of a pair that are no secret by themselves are left out."""
    is_text = isinstance(content, bytes)
    allowed = _ALLOWED.get({})
    matches = scanner.scan(content) if is_text else scanner.scan_file(content)
    for one in sorted(matches, key=lambda one: one.confidence != "high"):  # those that no flag allows come first
        if not one.visible or one.rule_id == REPLACED:
            continue
        start, end = one.location["start_offset"], one.location["end_offset"]
        around = (content[max(0, start - CONTEXT) : start], content[end : end + CONTEXT]) if is_text else (b"", b"")
        if not is_secret_value(one.rule_id, one.secret, *(text.decode(errors="replace") for text in around)):
            continue
        known = one.rule_id.startswith("ours.")
        kind = one.rule_name if known else f"a secret ({re.split('[./]', one.rule_id)[-1]})"
        mark = fingerprint(one.secret)
        if one.confidence == "high":
            yield kind, one.location
        elif mark in allowed:
            allowed[mark] = True
        else:
            yield f"{kind} {OFFER} {mark} if it is not one]", one.location


def _scan(text: bytes) -> list[tuple[str, int]]:
    """Find the lines of a text that have a secret: what it looks like, and the line's number."""
    # Kingfisher's rules want a quote or space after most tokens, which Markdown and sentences do not give them.
    bare = re.sub(rb"[^\w\s./+=:@%&?~#\"'`-]", b" ", text)
    found: dict[int, str] = {}
    scans = ((_ours(), text), (_theirs(), text), (_theirs(), bare))
    hits = [hit for scanner, content in scans for hit in _findings(scanner, content)]
    for what, place in sorted(hits, key=lambda hit: OFFER in hit[0]):  # none is offered where another rule refuses
        found.setdefault(place["line"], what)
    return [(what, line) for line, what in sorted(found.items())]


def _in_texts(named: list[tuple[str, str]], token: str | None) -> list[Found]:
    """Find the secrets in texts with names: what each looks like, and the name; one for each text."""
    in_use = "the Hugging Face token in use"
    found = {where: in_use for where, text in named if is_token(token) and token in text}
    ends = [*accumulate(text.count("\n") + len(APART) for _, text in named)]
    for what, line in _scan(APART.join(text for _, text in named).encode(errors="replace")):
        found.setdefault(named[bisect_right(ends, line - 1)][0], what)
    return [(what, where) for where, what in found.items()]


# ---- what files encode ----------------------------------------------------------------------------------------------


def texts(path: Path) -> Iterator[tuple[str, str]]:
    """What a reader of a file gets that its bytes do not show: where it is, and the text."""
    if path.suffix == ".png":
        yield from _of_png(path.read_bytes())
    elif path.suffix == ".safetensors":
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            yield from _of_json(file.read(min(length, path.stat().st_size)), "header")
    elif path.suffix == ".json":
        yield from _of_json(path.read_bytes())
    elif path.suffix == ".jsonl":
        for i, line in enumerate(path.read_bytes().splitlines(), start=1):
            yield from _of_json(line, f"line {i}")
    elif path.suffix == ".md":
        for i, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n"), start=1):
            plain = unescape(re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", line))
            yield f"line {i}", plain.replace("⏎", "\n")  # as `tables.one_line` shows the end of a line


def _of_json(content: bytes, where: str = "") -> Iterator[tuple[str, str]]:
    try:
        yield from _strings(json.loads(content), where)
    except (ValueError, RecursionError):  # not JSON: its bytes were scanned
        return


def _strings(value: Any, where: str) -> Iterator[tuple[str, str]]:
    """All strings in a value, names included; what has a name has it before it: `password=…`."""
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


def _of_png(content: bytes) -> Iterator[tuple[str, str]]:
    """The text chunks of a picture, compressed ones too."""
    at = 8
    while at + 8 <= len(content):
        length, kind = int.from_bytes(content[at : at + 4], "big"), content[at + 4 : at + 8]
        name, _, text = content[at + 8 : at + 8 + length].partition(b"\0")
        at += 12 + length
        compressed = kind == b"zTXt"
        if kind == b"zTXt":
            text = text[1:]
        elif kind == b"iTXt":
            compressed = text[:1] == b"\1"
            text = text[2:].split(b"\0", 2)[-1]  # after method, language and translated name
        elif kind != b"tEXt":
            continue
        if compressed:
            try:
                text = zlib.decompressobj().decompress(text, MOST_TEXT)
            except zlib.error:
                continue
        yield f"text chunk {name.decode('latin-1')}", text.decode(errors="replace")
