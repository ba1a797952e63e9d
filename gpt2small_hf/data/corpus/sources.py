"""Flags → sources of documents: local files, a Hub data set, or the language reference inside Python.

To read another kind of file, add its suffix and a reader to `FILE_READERS`.
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import platform
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2small_hf.config.data import PrepareArguments
from gpt2small_hf.data.corpus.readers import (
    Document,
    FileReader,
    Meter,
    check_start,
    first_line,
    read_jsonl,
    read_parquet,
    read_rows,
    read_tokens,
    read_txt,
)
from gpt2small_hf.errors import UsageError
from gpt2small_hf.runs.files import sha256
from gpt2small_hf.runs.records import DataSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILE_READERS: dict[str, FileReader] = {
    ".txt": read_txt,
    ".jsonl": read_jsonl,
    ".parquet": read_parquet,
    ".safetensors": read_tokens,
}
"""Suffix → reader; other files are read as `.txt`. A folder stands for its files of these kinds, without token ids."""


@dataclass
class TextSource:
    """One place that documents come from. `documents()` starts over at each call."""

    origin: DataSource
    content: str  # equal for two sources exactly when they hold the same documents
    read: Callable[[Meter], Iterator[Document]]
    meter: Meter = field(default_factory=Meter)

    def documents(self) -> Iterator[Document]:
        self.meter.done = 0
        return self.read(self.meter)


def open_sources(args: PrepareArguments, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, list[TextSource]]:
    """Return the sources of the train text, and of a validation text if one was named."""
    if args.text:
        train = open_files(args.text, args, tokenizer)
    else:
        train = [open_dataset(args) if args.dataset else open_python_docs()]
    validation = args.validation_text
    return {"train": train} | ({"validation": open_files(validation, args, tokenizer)} if validation else {})


def _origin(values: dict[str, Any]) -> DataSource:
    return DataSource.from_json(values, "the source:")  # without the keys that it does not have


# ---- local files ------------------------------------------------------------------------------------------------


def find_files(patterns: list[str]) -> list[Path]:
    """Files, folders and globs → files, in the order given, sorted inside each folder or glob.

    Raises: UsageError naming what is missing, empty or matches nothing.
    """
    kinds = [suffix for suffix in FILE_READERS if suffix != ".safetensors"]
    files = []
    for pattern in patterns:
        path = Path(pattern).expanduser()
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.suffix.lower() in kinds and p.is_file())
            missing = f"no {', '.join(kinds[:-1])} or {kinds[-1]} file in the folder {pattern}"
        elif path.exists():
            found, missing = [path], ""
        else:
            # Not Path.glob: it takes no absolute pattern.
            found = sorted(p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file())  # noqa: PTH207
            missing = f"{pattern} matches no file" if glob.has_magic(pattern) else f"{pattern} does not exist"
        if not found:
            raise UsageError(f"{missing}. Check the spelling; the working folder is {Path.cwd()}.")
        files += found
    for path in files:
        if path.stat().st_size == 0:
            raise UsageError(f"{path} is empty. Leave it out.")
    return files


MAX_CHECKED_FILES = 1000


def check_text(args: PrepareArguments) -> None:
    """Check that the files of --text and --validation_text exist, and that the beginning of each is UTF-8.

    So most errors come before tokenizers and torch are imported. At most `MAX_CHECKED_FILES` files are opened.

    Raises: UsageError naming the first file that is missing or cannot be decoded.
    """
    files = find_files([*(args.text or []), *(args.validation_text or [])])
    if args.errors == "strict":
        for path in files[:MAX_CHECKED_FILES]:
            if FILE_READERS.get(path.suffix.lower(), read_txt) in (read_txt, read_jsonl):
                check_start(path)


def open_files(
    patterns: list[str], args: PrepareArguments, tokenizer: PreTrainedTokenizerBase | None
) -> list[TextSource]:
    """Local files → sources. Every file is read once here, for its SHA-256."""
    files = find_files(patterns)
    with ThreadPoolExecutor(args.n_workers) as pool:
        hashes = list(pool.map(sha256, files))
    sources = []
    for path, digest in zip(files, hashes, strict=True):
        kind = path.suffix.lower() if path.suffix.lower() in FILE_READERS else ".txt"
        origin = {"file": str(path), "bytes": path.stat().st_size, "sha256": digest}
        reader = partial(FILE_READERS[kind], path=path, args=args, tokenizer=tokenizer)
        sources.append(TextSource(_origin(origin), f"{kind}:{digest}", reader, Meter(origin["bytes"])))
    return sources


# ---- data sets --------------------------------------------------------------------------------------------------


def open_dataset(args: PrepareArguments) -> TextSource:
    """Open the data set that `args` names, by Hub id or folder, as a source with one document a row."""
    dataset, config = str(args.dataset), args.dataset_config
    name = f"--dataset {dataset}:{config}" if config else f"--dataset {dataset}"
    rows, revision = load_dataset(
        dataset,
        config,
        split=args.dataset_split,
        revision=args.dataset_revision,
        streaming=args.streaming,
        name=name,
        offline="--text FILES reads local files, and no source flag at all reads the Python documentation.",
        fix="Check --dataset, --dataset_config, --dataset_split and --dataset_revision.",
    )
    origin = {"dataset": dataset, "config": config, "split": args.dataset_split, "revision": revision}
    reader = partial(read_rows, rows=rows, name=name, args=args)
    size = 0 if args.streaming else rows.data.nbytes
    return TextSource(_origin(origin), f"dataset:{json.dumps(origin, sort_keys=True)}", reader, Meter(size))


def load_dataset(
    dataset: str,
    config: str | None = None,
    *,
    split: str,
    revision: str | None = None,
    streaming: bool = False,
    name: str,
    offline: str,
    fix: str,
) -> tuple[Any, str | None]:
    """Load a split of a data set, by Hub id or folder. Returns: its rows, and the revision or a hash of its files.

    Raises: UsageError about `name`, with the advice `offline` if the Hub cannot be reached, else `fix`.
    """
    import datasets
    from huggingface_hub import HfApi

    if Path(dataset).is_dir():
        files = sorted(path for path in Path(dataset).rglob("*") if path.is_file())
        resolved = hashlib.sha256("".join(map(sha256, files)).encode()).hexdigest()
    else:
        # Pinned before it is loaded, so that what is recorded is what is read. A failure is left to load_dataset, which
        # may still find a copy on this machine.
        with suppress(Exception):
            revision = HfApi().dataset_info(dataset, revision=revision).sha
        resolved = revision
    try:
        with _without_retry_lines():
            rows = datasets.load_dataset(dataset, config, split=split, revision=revision, streaming=streaming)
    except (ConnectionError, TimeoutError) as error:
        raise UsageError(f"the Hub could not be reached for {name} ({first_line(error)}). {offline}") from None
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(f"{name} (split {split!r}) cannot be loaded: {first_line(error)}. {fix}") from None
    return rows, resolved


@contextmanager
def _without_retry_lines() -> Iterator[None]:
    """Hide the two lines that the Hub's client logs for each repeated request: the last error has the cause."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def open_python_docs() -> TextSource:
    """The language reference that CPython carries for `help()`, one document a topic: about 0.46 MB of English."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UsageError(
            "this Python has no pydoc_data.topics, the default text. Give your own: --text FILES, or --dataset ID."
        ) from None
    texts = [topics[key] for key in sorted(topics)]

    def read(meter: Meter) -> Iterator[Document]:
        for text in texts:
            document = Document(len(text.encode()), iter([text]))
            meter.done += document.size
            yield document

    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    size = sum(len(text.encode()) for text in texts)
    origin = {"name": "python-docs", "revision": platform.python_version(), "bytes": size, "sha256": digest}
    return TextSource(_origin(origin), f"python-docs:{digest}", read, Meter(size))
