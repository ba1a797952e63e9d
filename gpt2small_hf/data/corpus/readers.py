"""A file or data set → its documents, one at a time, each in blocks of about a megabyte.

So a corpus of any size passes through little memory. Which files and data sets: `sources.py`. What becomes of the
documents: `holdout.py` (to which split) and `batches.py` (into ids).
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from gpt2small_hf.config.data import PrepareArguments
from gpt2small_hf.errors import UsageError
from gpt2small_hf.runs.files import parse_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BLOCK_BYTES = 1 << 20
BLOCK_TOKENS = 1 << 18

Block: TypeAlias = str | np.ndarray
"""A stretch of one document: text, or ids where the source was tokenized before."""


@dataclass
class Document:
    """One document on its way through; its blocks can be read once."""

    size: int  # UTF-8 bytes; for ids, tokens
    blocks: Iterator[Block]


@dataclass
class Meter:
    """How much of a source was read, in bytes."""

    size: int = 0  # what `done` comes near in the end; 0 where nobody knows beforehand
    done: int = 0


class FileReader(Protocol):
    """Reads the documents of a file. `tokenizer`: the one that the user named, if any."""

    def __call__(
        self, meter: Meter, *, path: Path, args: PrepareArguments, tokenizer: PreTrainedTokenizerBase | None
    ) -> Iterator[Document]: ...


# ---- readers ----------------------------------------------------------------------------------------------------


def read_txt(meter: Meter, *, path: Path, args: PrepareArguments, **_: Any) -> Iterator[Document]:
    """A plain text file is one document, its newlines as they are; a byte order mark is dropped."""

    def blocks() -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")(args.errors)
        with path.open("rb") as file:
            if file.read(3) != codecs.BOM_UTF8:
                file.seek(0)
            while True:
                held = len(decoder.getstate()[0])  # bytes of a character that the last block broke in two
                start = file.tell() - held
                data = file.read(BLOCK_BYTES)
                try:
                    text = decoder.decode(data, final=not data)
                except UnicodeDecodeError as error:
                    raise undecodable(path, start + error.start) from None
                meter.done = file.tell()
                if text:
                    yield text
                if not data:
                    return

    yield Document(path.stat().st_size, blocks())


def read_jsonl(meter: Meter, *, path: Path, args: PrepareArguments, **_: Any) -> Iterator[Document]:
    """Each line of a JSON Lines file is a document; blank lines are skipped."""
    column = args.text_column
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}, line {number:,}"
            start = meter.done
            meter.done += len(line)
            try:
                text = line.decode("utf-8", args.errors)
            except UnicodeDecodeError as error:
                raise undecodable(path, start + error.start) from None
            text = text.removeprefix("\ufeff")
            if not text.strip():
                continue
            try:
                row = parse_json(text)
            except json.JSONDecodeError as error:
                raise UsageError(f"{where} is not JSON ({error.msg}). Correct or remove the line.") from None
            if not isinstance(row, dict) or column not in row:
                there = f"its keys are {names(row)}" if isinstance(row, dict) else f"it is a {type(row).__name__}"
                raise UsageError(f"{where} has no field {column!r}: {there}. Name the text field with --text_column.")
            yield row_document(row[column], where, args.errors)


def read_parquet(meter: Meter, *, path: Path, args: PrepareArguments, **_: Any) -> Iterator[Document]:
    """Each row of a Parquet file is a document."""
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"{path} is not a Parquet file ({reason}). Give it another suffix or make it again.") from None
    with file:
        check_column(str(path), args.text_column, file.schema_arrow.names)
        n_read = 0
        for batch in file.iter_batches(batch_size=256, columns=[args.text_column]):
            for value in batch.column(0).to_pylist():
                n_read += 1
                meter.done = meter.size * n_read // file.metadata.num_rows
                yield row_document(value, f"{path}, row {n_read:,}", args.errors)


def read_tokens(meter: Meter, *, path: Path, tokenizer: PreTrainedTokenizerBase | None, **_: Any) -> Iterator[Document]:
    """Documents of a safetensors file with one integer tensor `tokens`, cut at the tokenizer's end-of-text token.

    This is how the reference series publishes its pre-tokenised sets.
    """
    import safetensors

    if tokenizer is None:
        raise UsageError(f"{path} contains token ids: name the tokenizer that made them with --tokenizer.")
    try:
        # As a torch tensor it stays a map of the file; as a numpy array it would be read into memory whole.
        with safetensors.safe_open(path, "pt") as file:
            keys = list(file.keys())
            ids = file.get_tensor("tokens").numpy() if "tokens" in keys else np.empty(0)
    except safetensors.SafetensorError as error:
        raise UsageError(f"{path} is not a safetensors file ({error}). Download it again.") from None
    if ids.ndim != 1 or ids.dtype.kind not in "ui":
        raise UsageError(f"{path} needs one flat integer tensor named 'tokens'; its tensors are {names(keys)}.")

    eos_id, vocab_size = tokenizer.eos_token_id, len(tokenizer)

    def ends() -> Iterator[int]:
        for start in range(0, len(ids), BLOCK_TOKENS):
            block = ids[start : start + BLOCK_TOKENS]
            if block.min() < 0 or block.max() >= vocab_size:
                raise UsageError(
                    f"{path} has token ids from {block.min():,} to {block.max():,}, the tokenizer {vocab_size:,} "
                    "entries. Name the tokenizer that made the file with --tokenizer."
                )
            yield from (start + np.flatnonzero(block == eos_id)).tolist()
        if len(ids) and ids[-1] != eos_id:
            yield len(ids)

    start = 0
    for end in ends():
        meter.done = meter.size * end // len(ids)
        yield Document(end - start, (ids[at : min(at + BLOCK_TOKENS, end)] for at in range(start, end, BLOCK_TOKENS)))
        start = end + 1


def read_rows(meter: Meter, *, rows: Any, name: str, args: PrepareArguments) -> Iterator[Document]:
    """Each row of a `datasets.Dataset` or `IterableDataset` is a document."""
    column = args.text_column
    if rows.column_names is not None:  # a streamed set may not know them before its first row
        check_column(name, column, rows.column_names)
        rows = rows.select_columns([column])
    n_read = 0
    try:
        for batch in rows.iter(batch_size=256):
            check_column(name, column, batch.keys())
            for value in batch[column]:
                n_read += 1
                document = row_document(value, f"{name}, row {n_read:,}", args.errors)
                meter.done += document.size
                yield document
    except (ConnectionError, TimeoutError) as error:
        raise UsageError(
            f"the connection to the Hub broke after row {n_read:,} of {name} ({first_line(error)}). "
            "Run the same command again to resume."
        ) from None


# ---- the checks they share --------------------------------------------------------------------------------------


def row_document(value: Any, where: str, errors: str) -> Document:
    """The text of one row → a document, if it is text."""
    if not isinstance(value, str):
        kind = "null" if value is None else f"of type {type(value).__name__}"
        raise UsageError(f"{where}: the text is {kind}, not a string. Correct the row or name another --text_column.")
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair, UTF-8 cannot
        if errors == "strict":
            raise UsageError(
                f"{where}: character {error.start:,} is half of a surrogate pair. "
                "Correct the row, or pass --errors replace to put U+FFFD there."
            ) from None
        value = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        size = len(value.encode())
    return Document(size, iter([value]))


def check_column(where: str, column: str, columns: Iterable[str]) -> None:
    if column not in columns:
        raise UsageError(f"{where} has no column {column!r}; its columns are {names(columns)}. Set --text_column.")


def undecodable(path: Path, offset: int) -> UsageError:
    """The error for a file that is not UTF-8. A zero byte near its start means that it is binary."""
    with path.open("rb") as file:
        start = file.read(8192)
    if b"\0" in start and not start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return UsageError(f"{path} is not a text file: byte {start.index(0):,} is zero. Leave it out of --text.")
    return UsageError(
        f"{path} is not UTF-8: byte {offset:,} cannot be decoded. "
        "Convert the file, or pass --errors replace to put U+FFFD there."
    )


def check_start(path: Path) -> None:
    """Raise: UsageError if the first megabyte of a text file is not UTF-8."""
    with path.open("rb") as file:
        start = file.read(BLOCK_BYTES)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start)
    except UnicodeDecodeError as error:
        raise undecodable(path, error.start) from None


def names(words: Iterable[str]) -> str:
    return ", ".join(map(repr, words)) or "none"


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(". ")
