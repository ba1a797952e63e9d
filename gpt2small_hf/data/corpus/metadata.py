"""Read `meta.json` of a prepared folder, and check that the files it lists are complete."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from gpt2small_hf.errors import UsageError
from gpt2small_hf.invocation import command
from gpt2small_hf.runs.files import read_json
from gpt2small_hf.runs.layout import DataFolder

DAMAGED = "The set was damaged or copied in part: copy it again, or prepare it again with --overwrite."


def read_meta(folder: Path) -> dict[str, Any]:
    """Return what `prepare` recorded about a folder: counts, tokenizer, sources.

    Raises: UsageError if the folder is not a complete prepared set.
    """
    data = DataFolder(Path(folder))
    if data.meta.exists():
        meta = read_json(data.meta)
        if not isinstance(meta, dict) or not {"fingerprint", "splits", "tokenizer", "dtype"} <= meta.keys():
            raise UsageError(f"{data.meta} was not written by prepare. Name another folder.")
        return meta
    if data.unfinished().root.exists():
        raise UsageError(
            f"{folder} is not finished: its preparation was stopped. Run the same command again to finish it."
        )
    what = "is not a prepared set (it has no meta.json)" if data.root.exists() else "does not exist"
    raise UsageError(f"{folder} {what}. Make one: {command('prepare', '--text', 'FILES', '--output_dir', str(folder))}")


def check_complete(folder: Path, meta: dict[str, Any]) -> None:
    """Check that every file `meta` lists exists at its full size.

    Raises: UsageError naming the first that does not.
    """
    width = np.dtype(meta["dtype"]).itemsize
    for split, counts in meta["splits"].items():
        paths = [Path(folder) / name for name in counts["files"]]
        missing = [path for path in paths if not path.is_file()]
        if missing:
            raise UsageError(f"{missing[0]} is missing. {DAMAGED}")
        found = sum(path.stat().st_size for path in paths) // width
        if found != counts["tokens"]:
            raise UsageError(
                f"{split} files of {folder} have {found:,} tokens, meta.json records {counts['tokens']:,}. {DAMAGED}"
            )
    tokenizer = DataFolder(Path(folder)).tokenizer
    if not (tokenizer / "tokenizer.json").is_file():
        raise UsageError(f"{tokenizer} has no tokenizer.json. {DAMAGED}")
