"""The inputs of a prepared set, and how they differ from those of an existing one."""

from __future__ import annotations

import hashlib
from typing import Any

from transformers import PreTrainedTokenizerFast

from gpt2small_hf.config.data import PrepareArguments
from gpt2small_hf.data.corpus.metadata import check_complete, read_meta
from gpt2small_hf.data.corpus.sources import TextSource, source_name
from gpt2small_hf.errors import UsageError
from gpt2small_hf.runs.layout import DataFolder

FORMAT = 1  # goes up when the same inputs would give other files


def describe_inputs(
    args: PrepareArguments, sources: dict[str, list[TextSource]], tokenizer: PreTrainedTokenizerFast | None
) -> dict[str, Any]:
    """Return everything that determines the token ids: sets with equal inputs are equal."""
    return {
        "format": FORMAT,
        "text": [source.content for source in sources["train"]],
        "validation_text": [source.content for source in sources.get("validation", [])],
        "validation_fraction": args.held_out,
        "tokenizer": hash_of(tokenizer) if tokenizer else f"trained here with {args.new_vocab_size} entries",
        "text_column": args.text_column,
        "errors": args.errors,
    }


def hash_of(tokenizer: PreTrainedTokenizerFast) -> str:
    return hashlib.sha256(f"{tokenizer.backend_tokenizer.to_str()}{tokenizer.eos_token_id}".encode()).hexdigest()


def already_made(
    folder: DataFolder, inputs: dict[str, Any], sources: dict[str, list[TextSource]], *, overwrite: bool
) -> bool:
    """Return whether `folder` contains the set of these inputs; False if it may be replaced.

    Raises: UsageError listing the differences if it contains another set, or something else.
    """
    if not folder.meta.exists():
        unfinished = folder.unfinished().root
        if folder.root.is_dir() and (unfinished.parent == folder.root and unfinished.exists()):
            return False  # moved to its place in part, perhaps
        if folder.root.is_dir() and not any(path != folder.lock for path in folder.root.iterdir()):
            return False
        raise UsageError(f"{folder.root} exists and is not a prepared set. Choose another with --output_dir.")
    meta = read_meta(folder.root)
    if overwrite:
        return False
    made = meta.get("inputs", {})
    changes = []
    for key in inputs:
        if inputs[key] == made.get(key):
            continue
        if isinstance(inputs[key], list):
            split = "train" if key == "text" else "validation"
            now = {source.content: source.name for source in sources.get(split, [])}
            then = dict(zip(made.get(key, []), map(source_name, meta["sources"].get(split, [])), strict=True))
            changed = dict.fromkeys([*(now[c] for c in now if c not in then), *(then[c] for c in then if c not in now)])
            changes.append(f"{key} ({', '.join(changed) or 'in its order'})")
        elif key == "tokenizer":
            changes.append(f"{key} (there {meta['tokenizer']['name']})")
        else:
            changes.append(f"{key} (there {made.get(key)}, now {inputs[key]})")
    if changes:
        raise UsageError(
            f"{folder.root} was prepared from other inputs. They differ in {', '.join(changes)}. "
            "Choose another --output_dir, or pass --overwrite to replace it."
        )
    check_complete(folder.root, meta)
    return True
