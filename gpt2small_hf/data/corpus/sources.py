"""Flags → sources of documents: local files, a Hub data set, or the language reference inside Python.

`readers.py` reads them.
"""

from __future__ import annotations

import glob
import hashlib
import json
import platform
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2small_hf.config.data import PrepareArguments
from gpt2small_hf.data.corpus.readers import (
    Document,
    Meter,
    first_line,
    read_dataset,
    read_jsonl,
    read_parquet,
    read_texts,
    read_tokens,
    read_txt,
)
from gpt2small_hf.errors import UsageError
from gpt2small_hf.runs.files import sha256

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

FOLDER_SUFFIXES = {".txt", ".jsonl", ".parquet"}


@dataclass
class TextSource:
    """One place that documents come from. `documents()` starts over at each call."""

    origin: dict[str, Any]  # what meta.json records of it
    content: str  # equal for two sources exactly when they hold the same documents
    read: Callable[[Meter], Iterator[Document]]
    meter: Meter = field(default_factory=Meter)

    @property
    def name(self) -> str:
        """The name that the user gave."""
        return source_name(self.origin)

    def documents(self) -> Iterator[Document]:
        self.meter.done = 0
        return self.read(self.meter)


def open_sources(args: PrepareArguments, tokenizer: PreTrainedTokenizerFast | None) -> dict[str, list[TextSource]]:
    """Sources of the train text, and of a validation text if one was named."""

    def files(patterns: list[str]) -> list[TextSource]:
        return open_files(
            patterns,
            text_column=args.text_column,
            errors=args.errors,
            tokenizer=tokenizer,
            n_workers=args.n_workers,
        )

    if args.text:
        train = files(args.text)
    elif args.dataset:
        train = [
            open_dataset(
                args.dataset,
                config=args.dataset_config,
                split=args.dataset_split,
                revision=args.dataset_revision,
                streaming=args.streaming,
                text_column=args.text_column,
                errors=args.errors,
            )
        ]
    else:
        train = [open_python_docs()]
    return {"train": train} | ({"validation": files(args.validation_text)} if args.validation_text else {})


def source_name(origin: dict[str, Any]) -> str:
    return origin.get("file") or origin.get("dataset") or origin["name"]


# ---- local files ------------------------------------------------------------------------------------------------


def find_files(patterns: list[str]) -> list[Path]:
    """Files, folders and globs → files, in the order given, sorted inside each folder or glob.

    Raises: UsageError naming what is missing, empty or matches nothing.
    """
    files = []
    for pattern in patterns:
        path = Path(pattern).expanduser()
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.suffix.lower() in FOLDER_SUFFIXES and p.is_file())
            missing = f"no .txt, .jsonl or .parquet file in the folder {pattern}"
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


def open_files(
    patterns: list[str],
    *,
    text_column: str,
    errors: str,
    tokenizer: PreTrainedTokenizerBase | None,
    n_workers: int,
) -> list[TextSource]:
    """Local files → sources. Every file is read once here, for its SHA-256.

    `tokenizer` is needed for files of ids: the one that made them.
    """
    files = find_files(patterns)
    with ThreadPoolExecutor(n_workers) as pool:
        hashes = list(pool.map(sha256, files))
    sources = []
    for path, digest in zip(files, hashes, strict=True):
        kind = path.suffix.lower()
        if kind == ".jsonl":
            reader = partial(read_jsonl, path=path, column=text_column, errors=errors)
        elif kind == ".parquet":
            reader = partial(read_parquet, path=path, column=text_column, errors=errors)
        elif kind == ".safetensors":
            if tokenizer is None:
                raise UsageError(f"{path} contains token ids: name the tokenizer that made them with --tokenizer.")
            reader = partial(read_tokens, path=path, tokenizer=tokenizer)
        else:
            kind, reader = ".txt", partial(read_txt, path=path, errors=errors)
        size = path.stat().st_size
        origin = {"file": str(path), "bytes": size, "sha256": digest}
        sources.append(TextSource(origin, f"{kind}:{digest}", reader, Meter(size)))
    return sources


def open_dataset(
    dataset: str,
    *,
    config: str | None,
    split: str,
    revision: str | None,
    streaming: bool,
    text_column: str,
    errors: str,
) -> TextSource:
    """A data set by its Hub id (or a folder that `datasets` understands) → a source, one document a row."""
    import datasets
    from huggingface_hub import HfApi

    name = f"{dataset}:{config}" if config else dataset
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
        rows = datasets.load_dataset(dataset, config, split=split, revision=revision, streaming=streaming)
    except (ConnectionError, TimeoutError) as error:
        raise UsageError(
            f"the Hub could not be reached for --dataset {name} ({first_line(error)}). "
            "Without it: --text FILES reads local files, and no source flag at all reads the Python documentation."
        ) from None
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"--dataset {name} (split {split!r}) cannot be loaded: {first_line(error)}. "
            "Check --dataset, --dataset_config, --dataset_split and --dataset_revision."
        ) from None
    origin = {"dataset": dataset, "config": config, "split": split, "revision": resolved}
    reader = partial(read_dataset, rows=rows, name=name, column=text_column, errors=errors)
    content = f"dataset:{json.dumps(origin, sort_keys=True)}"
    return TextSource(origin, content, reader, Meter(rows.data.nbytes if isinstance(rows, datasets.Dataset) else 0))


def open_python_docs() -> TextSource:
    """The language reference that CPython carries for `help()`, one document a topic: about 0.46 MB of English."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UsageError(
            "this Python has no pydoc_data.topics, the default text. Give your own: --text FILES, or --dataset ID."
        ) from None
    texts = [topics[key] for key in sorted(topics)]
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    size = sum(len(text.encode()) for text in texts)
    origin = {"name": "python-docs", "revision": platform.python_version(), "bytes": size, "sha256": digest}
    reader = partial(read_texts, texts=texts, where="python-docs", errors="strict")
    return TextSource(origin, f"python-docs:{digest}", reader, Meter(size))
