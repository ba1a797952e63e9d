"""Convert a model folder and check the result: `gpt2small convert SRC DST --to gpt2small|gpt2`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from gpt2small_hf.errors import UsageError
from gpt2small_hf.formatting import byte_size
from gpt2small_hf.resources import example_command
from gpt2small_hf.runs.files import (
    atomic_write,
    exclusive_writer,
    is_leftover,
    read_json,
    set_default_permissions,
    write_json,
)
from gpt2small_hf.runs.layout import RunFolder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from gpt2small_hf.conversion.readers import SourceModel

TOLERANCE = 1e-5
DESCRIBED_BY = ("config.json", "model.json", "ckpt.pt")
"""Files of which a folder that can be converted has one."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json")


def convert(
    src: str,
    dst: Path,
    to: str,
    *,
    settings: Path | None = None,
    tokenizer: str | None = None,
    overwrite: bool = False,
) -> SourceModel:
    """Write `src` as a folder of form `to`, with its tokenizer, atomically.

    Returns: what was read.
    Raises: UsageError for a source that cannot be read, a destination that may not be written, a tokenizer that does
        not fit, and a result that does not compute what the source does.
    """
    from transformers.utils import logging

    from gpt2small_hf.conversion.readers import fetch, read

    logging.disable_progress_bar()
    where = locate(src)
    check_destination(dst, where, overwrite=overwrite)
    try:
        source = read(where or fetch(src), settings)
    except ValueError as error:
        raise UsageError(f"{src} cannot be converted: {error}.") from None
    print(f"source   {describe(source)}")
    words, told = load_words(source, tokenizer), provenance(source, src if where is None else origin_of(where))
    try:
        with exclusive_writer(dst.resolve()), atomic_write(dst.resolve()) as unfinished:
            check_destination(dst, where, overwrite=overwrite)  # another process may have written it by now
            source.build(to).save_pretrained(unfinished)
            if told is not None and to == "gpt2small":
                write_json(unfinished / "converted.json", told)
            if words is not None:
                words.save_pretrained(unfinished)
                settings_path = unfinished / "tokenizer_config.json"
                saved = read_json(settings_path)
                if to == "gpt2" and saved["tokenizer_class"] == "TokenizersBackend":  # unknown to transformers 4
                    write_json(settings_path, {**saved, "tokenizer_class": "PreTrainedTokenizerFast"})
            set_default_permissions(unfinished)
            difference = check(source, unfinished)
    except OSError as error:
        raise UsageError(f"{dst} cannot be written ({error.strerror or error}). Name another folder.") from None
    print(f"checked  weights equal bit for bit, logits of random ids to {difference:.1e}")
    size = sum(file.stat().st_size for file in dst.iterdir())
    print(f"wrote    {dst} as {to}, {byte_size(size)}" + ("" if words else ", without a tokenizer"))
    return source


def locate(src: str) -> Path | None:
    """The file or folder to read; of a run, its model. None if nothing here has that name, so it may be on the Hub.

    Raises: UsageError for a path that cannot be a Hub id, and for a run that has no model yet.
    """
    path = Path(src).expanduser()
    if not path.exists():
        if path.is_absolute() or src.count("/") > 1 or path.suffix in (".pt", ".safetensors", ".json"):
            raise UsageError(f"{src} does not exist. Check the name.")
        return None
    run = RunFolder(path)
    if run.model.is_dir():
        return run.model
    if run.checkpoints.is_dir():
        raise UsageError(f"{src} is a run without a final model. Name one of its checkpoints: {run.checkpoints}/…")
    return path


def check_model(path: Path) -> None:
    """Raise: UsageError if a folder has none of the files that describe a model of a known format."""
    if path.is_dir() and not any((path / name).is_file() for name in DESCRIBED_BY):
        raise UsageError(
            f"{path} is not a model: expected config.json or model.json next to *.safetensors, or nanoGPT's ckpt.pt. "
            "Name the folder of a model."
        )


def origin_of(path: Path) -> str | None:
    """Return the id of the repository from which the Hub's client downloaded a path; None outside its cache."""
    found = re.search(r"[/\\]models--([^/\\]+)[/\\]snapshots[/\\]", str(path.expanduser().absolute()))
    return found[1].replace("--", "/", 1) if found else None


def provenance(source: SourceModel, origin: str | None) -> dict[str, Any] | None:
    """Return what `converted.json` records of weights, so that a publisher does not claim to have trained them.

    Returns: the format (`what`), the settings in the reference series' train.json and the Hub id (`origin`); None for
        weights in this package's format that were not downloaded.
    Raises: UsageError for another train.json.
    """
    if (recorded := source.folder / "converted.json").is_file():
        return read_json(recorded)
    if source.what == "gpt2small" and origin is None:
        return None
    file = source.folder / "train.json"
    settings = read_json(file) if file.is_file() else {}
    if not isinstance(settings, dict):
        raise UsageError(f"{file} is not a JSON object with settings. Correct or remove it.")
    return {"what": source.what, "settings": settings, "origin": origin}


def check_destination(dst: Path, src: Path | None, *, overwrite: bool) -> None:
    """Raise: UsageError if `dst` exists and may not be replaced."""
    if not dst.exists():
        return
    found = [path for path in dst.iterdir() if path.name != ".lock"] if dst.is_dir() else [dst]
    if not found or any(is_leftover(path, of=dst.resolve()) for path in found):  # empty or incomplete
        return
    if src is not None and src.resolve().is_relative_to(dst.resolve()):
        raise UsageError(f"{dst} contains the model to convert. Name another folder.")
    if not overwrite:
        raise UsageError(f"{dst} exists. Name another folder, or replace it with --overwrite.")
    if not (dst / "config.json").is_file():  # a typo must not delete a home folder
        raise UsageError(f"{dst} is not a model folder, so --overwrite does not replace it. Name another folder.")


def describe(source: SourceModel) -> str:
    """Return the format and sizes of a source in one line."""
    c = source.config
    parameters = sum(weight.numel() for weight in source.weights.values())
    dtype = str(next(iter(source.weights.values())).dtype).removeprefix("torch.")
    return (
        f"{source.what}: {c.num_hidden_layers} layers, {c.hidden_size} wide, {c.num_attention_heads} heads, "
        f"context {c.max_position_embeddings:,}, vocabulary {c.vocab_size:,}, "
        f"head {'tied' if c.tie_word_embeddings else 'untied'}, {'with' if c.attention_bias else 'no'} qkv bias, "
        f"{parameters:,} parameters, {dtype}"
    )


def load_words(source: SourceModel, name: str | None) -> PreTrainedTokenizerFast | None:
    """Load the tokenizer by name, else the one in the weights' folder, else None; align it and the configuration.

    Raises: UsageError for one that cannot be loaded or has more entries than the model.
    """
    from gpt2small_hf.data.tokenizer import load_tokenizer

    if name is None and not any((source.folder / file).is_file() for file in TOKENIZER_FILES):
        return None
    name = name or str(source.folder)
    tokenizer, config = load_tokenizer(name), source.config
    if len(tokenizer) > config.vocab_size:
        raise UsageError(
            f"the tokenizer {name} has {len(tokenizer):,} entries, the model's vocabulary {config.vocab_size:,}. "
            "Name the tokenizer the model was trained with: --tokenizer FOLDER_OR_HUB_ID"
        )
    tokenizer.model_max_length = config.max_position_embeddings
    if not source.names_special_tokens:
        for id_name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(config, id_name, getattr(tokenizer, id_name))
    return tokenizer


def check(source: SourceModel, folder: Path) -> float:
    """Compare what was written with the source: weights bit for bit, and logits in float32.

    Returns: the largest difference of logits. It may be 1e-5, times the largest logit where that is above 1.
    Raises:  UsageError if it is more.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from gpt2small_hf.conversion.readers import read

    again = read(folder).weights

    def is_changed(name: str) -> bool:
        if name not in source.weights or name not in again or source.weights[name].dtype != again[name].dtype:
            return True
        # As bytes: NaN equals itself, and -0 is not 0.
        return not torch.equal(*(some[name].contiguous().view(torch.uint8) for some in (source.weights, again)))

    if changed := list(filter(is_changed, source.weights | again)):
        raise UsageError(f"the result is not the source: {changed[0]} came out different. Nothing was written.")
    shape = (2, min(64, source.config.max_position_embeddings))
    ids = torch.randint(source.config.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = source.original().float()(ids)
        expected = expected if isinstance(expected, torch.Tensor) else expected.logits
        found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
    difference = (found - expected).abs().max().item()
    if not difference <= TOLERANCE * max(1.0, expected.abs().max().item()):
        raise UsageError(f"the result is not the source: logits differ by {difference:.1e}. Nothing was written.")
    return difference


def next_command(dst: Path, to: str) -> str:
    """Return a command that uses what was written."""
    has_tokenizer, name = (dst / "tokenizer.json").is_file(), json.dumps(str(dst))
    if has_tokenizer and to == "gpt2small":
        return example_command("use_from_hub.py", str(dst))
    if has_tokenizer:
        line = f'from transformers import pipeline; print(pipeline("text-generation", {name})("The"))'
    else:
        what, trust = "AutoModelForCausalLM", ", trust_remote_code=True" if to == "gpt2small" else ""
        line = f"from transformers import {what}; print({what}.from_pretrained({name}{trust}))"
    return f"python -c {quote(line)}"
