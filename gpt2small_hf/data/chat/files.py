"""Names of files, folders and data sets of chats → their rows."""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2small_hf.data.corpus.readers import first_line
from gpt2small_hf.data.corpus.sources import load_dataset
from gpt2small_hf.errors import UsageError
from gpt2small_hf.runs.files import parse_json, sha256

SUFFIXES = (".jsonl", ".json", ".parquet")
SPLITS = {"train": "train", "validation": "validation", "valid": "validation", "val": "validation"}


@dataclass(frozen=True)
class Place:
    """A file, or a split of a dataset, and the rows to read."""

    name: str
    split: str
    suffix: str
    """`[start:end]` as it was given, or empty."""
    rows: slice

    @property
    def path(self) -> Path:
        return Path(self.name).expanduser()


def find_places(name: str) -> list[Place]:
    """Resolve a name to files, or to a dataset on the Hub. Raises: UsageError if nothing matches."""
    match = re.fullmatch(r"(.+)\[(-?\d*):(-?\d*)\]", name)
    base, start, end = match.groups() if match else (name, "", "")
    rows = name[len(base) :], slice(int(start) if start else None, int(end) if end else None)
    path = Path(base).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in SUFFIXES and file.is_file())
        if not files:
            raise UsageError(f"no .jsonl, .json or .parquet file in the folder {base}. Name the file of chats.")
        split_of = {file: SPLITS.get(re.split(r"[-_.]", file.stem.lower())[0]) for file in files}
        if "train" in split_of.values():
            files = [file for file in files if split_of[file]]
        return [Place(str(file), split_of[file] or "train", *rows) for file in files]
    if path.exists():
        if path.suffix.lower() not in SUFFIXES:
            raise UsageError(
                f"{base} is not .jsonl, .json or .parquet. Chats need one row each; for plain text use --text."
            )
        if path.stat().st_size == 0:
            raise UsageError(f"{base} is empty. Leave it out.")
        return [Place(base, "train", *rows)]
    if "*" in base or "?" in base:
        found = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207  # Path.glob takes no absolute pattern
        if not found:
            raise UsageError(f"{base} matches no file. Check the spelling; the working folder is {Path.cwd()}.")
        return [place for file in found for place in find_places(file + rows[0])]
    if path.suffix.lower() in SUFFIXES or not re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", base):
        raise UsageError(f"{base} does not exist. Check the spelling; the working folder is {Path.cwd()}.")
    return [Place(base, "train", *rows)]


def read_rows(place: Place) -> tuple[list[tuple[str, Any]], dict[str, Any]]:
    """Return every row with its location, and the SHA-256 or revision of the content.

    An unreadable row is returned as its UsageError, because a slice may exclude it later.
    """
    if not place.path.exists():
        return _hub_rows(place.name)
    read = {".jsonl": jsonl_rows, ".json": _json_rows, ".parquet": _parquet_rows}[place.path.suffix.lower()]
    return list(read(place.path)), {"sha256": sha256(place.path)}


def read_utf8(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8: byte {error.start:,} cannot be decoded. Convert the file.") from None


def jsonl_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a .jsonl file with their location; an unreadable one is its UsageError."""
    for number, line in enumerate(read_utf8(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number:,}"
        try:
            yield where, parse_json(line)
        except json.JSONDecodeError as error:
            yield where, UsageError(f"{where} is not JSON ({error.msg}). Correct or remove the line.")


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        rows = parse_json(read_utf8(path))
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
        raise UsageError(f"{path} is not a Parquet file ({first_line(error)}). Create it again.") from None
    return ((f"{path}, row {number:,}", row) for number, row in enumerate(rows, start=1))


def _hub_rows(name: str) -> tuple[list[tuple[str, Any]], dict[str, Any]]:
    dataset, _, split = name.partition(":")
    rows, revision = load_dataset(
        dataset,
        split=split or "train",
        name=dataset,
        offline="If it is a local file, check its spelling: --chat_data chats.jsonl",
        fix=f"Name the split as {dataset}:SPLIT.",
    )
    return [(f"{name}, row {number:,}", row) for number, row in enumerate(rows, start=1)], {"revision": revision}
