"""Checks of a model before it is published: its files are complete and belong together.

`stage.py` runs them on the source and on the staged folder; `verify.py` finds out whether it loads.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from transformers.dynamic_module_utils import get_relative_imports

import gpt2small_hf.model
from gpt2small_hf.data.tokenizer import load_tokenizer
from gpt2small_hf.errors import UsageError
from gpt2small_hf.model.configuration_gpt2small import GPT2SmallConfig
from gpt2small_hf.publishing.source import PushSource
from gpt2small_hf.runs.files import read_json, sha256
from gpt2small_hf.runs.layout import RunFolder
from gpt2small_hf.runs.provenance import model_code

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
OF_CHECKPOINTS = re.compile(
    r"(optimizer|scheduler|scaler|guard_\d+|rng_state\w*|trainer_state|training_args|checkpoint)\.(pt|pth|bin|json)"
)
"""Files of a Trainer checkpoint that are not published; training_args.bin can contain a token."""
PICKLED = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib"}
CODE = Path(gpt2small_hf.model.__file__).parent
"""The package's own code of the model."""


def check_links(source: PushSource) -> None:
    """Raise: UsageError if a link leads out of the folder that is published."""
    root, run = source.root.resolve(), RunFolder(source.root)
    read = (run.resolved, run.metrics, run.samples, run.published)  # the last three for the card
    for folder in (source.model, run.root / "charts", run.root / "evaluation", *read):
        for path in [folder, *(sorted(folder.rglob("*")) if folder.is_dir() else [])]:
            if not path.resolve().is_relative_to(root):  # it, or a folder above it, is a link
                raise UsageError(f"{path} is a link out of {source.root}. Replace it by the file.")


def check_nothing_pickled(source: PushSource) -> None:
    """Raise: UsageError for a pickled file that is not one of a checkpoint's own."""
    for path in sorted(source.model.iterdir()):
        known = source.is_checkpoint and OF_CHECKPOINTS.fullmatch(path.name)
        if path.suffix.lower() in PICKLED and not known:
            raise UsageError(f"{path} is a pickled file, which can run code or contain a token. Remove it.")


def check_nothing_empty(source: PushSource, folder: Path) -> None:
    """Raise: UsageError for an empty staged file, which an interrupted command may leave."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.stat().st_size:
            raise UsageError(f"{path.relative_to(folder)} of {source.root} is empty. Write it again, or remove it.")


def weight_files(model: Path) -> list[Path]:
    """List the file of weights, or the index and its shards. Raises: UsageError if one is missing or incomplete."""
    index, files = model / INDEX, [model / WEIGHTS]
    if index.is_file() and not files[0].is_file():  # of both, transformers loads the one file
        try:
            shards = sorted({Path(name) for name in read_json(index)["weight_map"].values()})
        except (AttributeError, KeyError, TypeError):
            shards = []
        if not shards or any(shard.name != str(shard) or shard.suffix != ".safetensors" for shard in shards):
            raise UsageError(f"{index} does not name safetensors files of its folder. Save the model again.")
        files = [index, *(model / shard for shard in shards)]
    for path in files:
        if not path.is_file():
            raise UsageError(f"{path} does not exist. Save the model again, with save_pretrained.")
        if path.suffix == ".safetensors":
            try:
                with safe_open(path, framework="pt"):  # compares the file's length to its header
                    pass
            except (SafetensorError, OSError) as error:
                raise UsageError(
                    f"{path} is not a complete safetensors file ({error}). Save the model again."
                ) from None
    return files


def module_names(auto_map: dict[str, Any]) -> set[str]:
    """Return the modules that an `auto_map` names."""
    return {str(value).split("--")[-1].split(".")[0] for value in auto_map.values()}


def code_files(folder: Path, settings: dict[str, Any]) -> list[Path]:
    """List the files that `auto_map` names and those that transformers finds among their imports.

    Raises: UsageError if one does not exist. The isolated process finds what transformers does not fetch.
    """
    pending, found = module_names(settings.get("auto_map", {})), set[Path]()
    while pending:
        path = folder / f"{pending.pop()}.py"
        if not path.is_file():
            raise UsageError(
                f"{folder} has no {path.name}, which the model needs to load. Save the model again, or use --code_only."
            )
        found.add(path)
        pending |= {*get_relative_imports(path)} - {one.stem for one in found}
    return sorted(found)


def modified_code(source: PushSource, folder: Path) -> list[str]:
    """List the code files in a staged folder that are neither the package's nor recorded by the run."""
    known = [model_code()]
    if source.run is not None:
        known += [one.made_by.model_code for one in (source.run.resolved, source.run.heldout) if one]
    return [
        path.name
        for path in sorted(folder.glob("*.py"))
        if sha256(path) not in [files.get(path.name) for files in known]
    ]


def check_code_is_known(source: PushSource, folder: Path) -> None:
    """Raise: UsageError if code in a staged folder was changed: loading the model would run it."""
    if changed := modified_code(source, folder):
        raise UsageError(
            f"{source.model / changed[0]} differs from the package's {CODE / changed[0]}, and from what the run "
            "recorded. Restore it, or add --allow_modified_code (the card states it)."
        )


def check_results_are_theirs(source: PushSource, folder: Path) -> None:
    """Raise: UsageError if weights or tokenizer of a finished run are not those that were evaluated."""
    if source.run is None or source.run.heldout is None:
        return
    for path, digest in source.run.heldout.made_by.inputs.items():
        name = Path(path).name
        if Path(path).parent.name != source.run_folder.model.name:  # a file of the data
            continue
        if name == WEIGHTS and not source.is_checkpoint:
            found = _sha256_of_weights(folder)
        else:
            found = sha256(folder / name) if name == "tokenizer.json" and (folder / name).is_file() else digest
        if found != digest:
            raise UsageError(
                f"{source.model / name} is not the file that the run evaluated: its SHA-256 differs. Restore it."
            )


def _sha256_of_weights(folder: Path) -> str:
    """Return the SHA-256 of the weights, as one file if they are shards."""
    if (folder / WEIGHTS).is_file():
        return sha256(folder / WEIGHTS)
    joined: dict[str, Any] = {}
    for path in folder.glob("*.safetensors"):
        joined |= load_file(path)
    return hashlib.sha256(save(joined, metadata={"format": "pt"})).hexdigest()


def check_tokenizer(source: PushSource, folder: Path) -> None:
    """Raise: UsageError if there is no tokenizer, or it cannot be this model's."""
    if not (folder / "tokenizer.json").is_file():
        raise UsageError(f"{source.model} has no tokenizer.json. Name the tokenizer it was trained with: --tokenizer")
    try:
        tokenizer = load_tokenizer(str(folder))
    except Exception as error:  # tokenizers has no narrower one
        reason = " ".join(str(error).split()).replace(str(folder), str(source.model))
        raise UsageError(f"the tokenizer in {source.model} cannot be loaded: {reason}") from None
    settings = read_json(folder / "config.json")
    entries, largest = settings["vocab_size"], max(tokenizer.get_vocab().values())
    if largest >= entries:
        raise UsageError(
            f"the tokenizer in {source.model} has ids up to {largest:,}, the model {entries:,} entries. Restore "
            "the one of the training."
        )
    ends: set[Any] = set()
    for values in (settings, read_json(folder / "generation_config.json")):
        value = values.get("eos_token_id")
        ends |= set(value) if isinstance(value, list) else {value}
    if ends - {None} and tokenizer.eos_token_id not in ends:
        raise UsageError(
            f"the tokenizer in {source.model} ends texts with id {tokenizer.eos_token_id} ({tokenizer.eos_token}), the "
            f"model with {', '.join(map(str, sorted(ends - {None})))}. Restore the one of the training."
        )


def check_finite(folder: Path) -> None:
    """Raise: UsageError that names the first tensor with a value that is not finite."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # not a dictionary
                if not tensors.get_tensor(name).isfinite().all():
                    raise UsageError(
                        f"{path.name}: {name} has values that are not finite. Publish an earlier checkpoint."
                    )


def read_model_config(folder: Path) -> GPT2SmallConfig:
    """Return the configuration of a staged folder. Raises: UsageError for that of another model."""
    try:
        return GPT2SmallConfig.from_dict(read_json(folder / "config.json"))
    except Exception as error:
        raise UsageError(f"{folder / 'config.json'}: {' '.join(str(error).split())}") from None
