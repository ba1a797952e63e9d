"""`meta.json` of a prepared folder: read it, check the files that it lists, and compare the inputs that it records."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpt2small_hf.config.data import PrepareArguments
from gpt2small_hf.errors import UsageError
from gpt2small_hf.invocation import command
from gpt2small_hf.runs.layout import DataFolder
from gpt2small_hf.runs.records import PreparedSet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from gpt2small_hf.data.corpus.sources import TextSource

FORMAT = 1  # goes up when the same inputs would give other files
DAMAGED = "The set was damaged or copied in part: copy it again, or prepare it again with --overwrite."


def read_meta(folder: Path) -> PreparedSet:
    """Return what `prepare` recorded about a folder: counts, tokenizer, sources.

    Raises: UsageError if the folder is not a complete prepared set.
    """
    data = DataFolder(Path(folder))
    if data.meta.exists():
        return PreparedSet.load(data.meta)
    if data.unfinished().root.exists():
        raise UsageError(
            f"{folder} is not finished: its preparation was stopped. Run the same command again to finish it."
        )
    what = "is not a prepared set (it has no meta.json)" if data.root.exists() else "does not exist"
    raise UsageError(f"{folder} {what}. Make one: {command('prepare', '--text', 'FILES', '--output_dir', str(folder))}")


def check_complete(folder: Path, meta: PreparedSet) -> None:
    """Check that every file `meta` lists exists at its full size. Raises: UsageError naming the first that does not."""
    for split, counts in meta.splits.items():
        paths = [folder / name for name in counts.files]
        if missing := [path for path in paths if not path.is_file()]:
            raise UsageError(f"{missing[0]} is missing. {DAMAGED}")
        found = sum(path.stat().st_size for path in paths) // np.dtype(meta.dtype).itemsize
        if found != counts.tokens:
            raise UsageError(
                f"{split} files of {folder} have {found:,} tokens, meta.json records {counts.tokens:,}. {DAMAGED}"
            )
    tokenizer = DataFolder(folder).tokenizer
    if not (tokenizer / "tokenizer.json").is_file():
        raise UsageError(f"{tokenizer} has no tokenizer.json. {DAMAGED}")


# ---- inputs -----------------------------------------------------------------------------------------------------


def describe_inputs(
    args: PrepareArguments, sources: dict[str, list[TextSource]], tokenizer: PreTrainedTokenizerFast | None
) -> dict[str, Any]:
    """Return everything that determines the token ids: sets with equal inputs are equal."""
    words = f"trained here with {args.new_vocab_size} entries"
    if tokenizer:
        known = f"{tokenizer.backend_tokenizer.to_str()}{tokenizer.eos_token_id}"
        words = hashlib.sha256(known.encode()).hexdigest()
    return {
        "format": FORMAT,
        "text": [source.content for source in sources["train"]],
        "validation_text": [source.content for source in sources.get("validation", [])],
        "validation_fraction": args.held_out,
        "tokenizer": words,
        "text_column": args.text_column,
        "errors": args.errors,
    }


def check_inputs(folder: Path, meta: PreparedSet, inputs: dict[str, Any], sources: dict[str, list[TextSource]]) -> None:
    """Check that the set of `meta` was prepared from `inputs`. Raises: UsageError listing the differences."""
    changes = []
    for key, now in inputs.items():
        then = meta.inputs.get(key)
        if now == then:
            continue
        if key in ("text", "validation_text"):
            split, then = "train" if key == "text" else "validation", then or []
            names = {source.content: source.origin.label for source in sources.get(split, [])}
            names |= {content: origin.label for content, origin in zip(then, meta.sources.get(split, []), strict=False)}
            changed = [names[content] for content in [*now, *then] if (content in now) != (content in then)]
            changes.append(f"{key} ({', '.join(dict.fromkeys(changed)) or 'in its order'})")
        elif key == "tokenizer":
            changes.append(f"{key} (there {meta.tokenizer.name})")
        else:
            changes.append(f"{key} (there {then}, now {now})")
    if changes:
        raise UsageError(
            f"{folder} was prepared from other inputs. They differ in {', '.join(changes)}. "
            "Choose another --output_dir, or pass --overwrite to replace it."
        )
