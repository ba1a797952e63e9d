"""What must be true of a model before it is published: its files are all there, and belong together.

`stage.py` asks these of what it takes and of what it has staged; that it loads, `verify.py` finds out.
"""

from __future__ import annotations

import ast
import hashlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from huggingface_hub.utils.sha import git_hash
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save

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
"""What the Trainer keeps beside a checkpoint's weights. training_args.bin can hold a token."""
PICKLED = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib"}
CODE = Path(gpt2small_hf.model.__file__).parent
"""The package's own code of the model."""
STRANGERS_HAVE = {"torch", "transformers", "huggingface_hub"} | sys.stdlib_module_names


# ---- what is there, and may be taken ------------------------------------------------------------------------------


def check_links(source: PushSource) -> None:
    """Raise: UsageError if a link leads out of the folder that is published."""
    root, run = source.root.resolve(), RunFolder(source.root)
    read = (run.resolved, run.metrics, run.samples, run.published)  # the last three for the card
    for folder in (source.model, run.root / "charts", run.root / "evaluation", *read):
        for path in [folder, *(sorted(folder.rglob("*")) if folder.is_dir() else [])]:
            if not path.resolve().is_relative_to(root):  # it, or a folder above it, is a link
                raise UsageError(
                    f"{path} is a link out of {source.root}, so what would be published is not what lies there. "
                    "Put the file itself in its place."
                )


def check_nothing_pickled(source: PushSource) -> None:
    """Raise: UsageError for a pickled file that is not one of a checkpoint's own."""
    for path in sorted(source.model.iterdir()):
        known = source.is_checkpoint and OF_CHECKPOINTS.fullmatch(path.name)
        if path.suffix.lower() in PICKLED and not known:
            raise UsageError(
                f"{path} is a pickled file: opening one runs whatever code is in it, and it may hold a token. "
                "Take it away; weights are published as safetensors."
            )


def check_nothing_empty(source: PushSource, folder: Path) -> None:
    """Raise: UsageError for a staged file without a byte: whatever wrote it did not come to its end."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.stat().st_size:
            raise UsageError(
                f"{path.relative_to(folder)} of {source.root} is empty. Make it again with what wrote it, "
                "or take it away."
            )


def weight_files(model: Path) -> list[Path]:
    """The file of weights, or the index and the shards it names. Raises: UsageError if one is missing or not whole."""
    index, files = model / INDEX, [model / WEIGHTS]
    if index.is_file() and not files[0].is_file():  # of both, transformers loads the one file
        try:
            shards = sorted({Path(name) for name in read_json(index)["weight_map"].values()})
        except (AttributeError, KeyError, TypeError):
            shards = []
        if not shards or any(shard.name != str(shard) or shard.suffix != ".safetensors" for shard in shards):
            raise UsageError(f"{index} does not name safetensors files beside it. Save the model again.")
        files = [index, *(model / shard for shard in shards)]
    for path in files:
        if not path.is_file():
            raise UsageError(f"{path} does not exist. Save the model again, with save_pretrained.")
        if path.suffix == ".safetensors":
            try:
                with safe_open(path, framework="pt"):  # compares the file's length to its header
                    pass
            except (SafetensorError, OSError) as error:
                raise UsageError(f"{path} is not a whole safetensors file ({error}). Save the model again.") from None
    return files


def module_names(auto_map: dict[str, Any]) -> set[str]:
    """Return the modules that an `auto_map` names."""
    return {str(value).split("--")[-1].split(".")[0] for value in auto_map.values()}


def code_files(folder: Path, settings: dict[str, Any]) -> list[Path]:
    """The files that `auto_map` names and those that they import, none twice.

    Raises: UsageError if one is not there, or is imported in a way that transformers does not follow.
    """
    named = module_names(settings.get("auto_map", {}))
    found: dict[str, Path] = {}
    while missing := sorted(named - found.keys()):
        path = folder / f"{missing[0]}.py"
        if not path.is_file():
            raise UsageError(
                f"{folder} has no {path.name}, without which nobody can load the model. Save the model again, or take "
                "the code of this checkout: --code_only, once the weights are published."
            )
        found[missing[0]] = path
        for name in imports(path):
            if not name.startswith("."):
                continue
            if not name[1:].isidentifier():  # `.`, `..gpt` or `.parts.gpt`
                raise UsageError(
                    f"{path} imports from {name}, and transformers fetches only what is imported from a file "
                    "beside it. Import siblings as `from .gpt import GPT`."
                )
            named.add(name[1:])
    return sorted(found.values())


def imports(path: Path) -> list[str]:
    """Names of all modules that a file imports, wherever in it; relative ones begin with a dot.

    Raises: UsageError if it is not Python.
    """
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{path} is not Python ({error}).") from None
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append("." * node.level + (node.module or ""))
    return names


def check_code(folder: Path) -> None:
    """Raise: UsageError if code in a staged folder imports what a stranger does not have."""
    for path in sorted(folder.glob("*.py")):
        for name in imports(path):
            if not name.startswith(".") and name.split(".")[0] not in STRANGERS_HAVE:
                raise UsageError(
                    f"{path.name} imports {name}, which strangers do not have: only torch, transformers and what comes "
                    "with them. Import siblings as `from .gpt import GPT`."
                )


def modified_code(source: PushSource, folder: Path) -> list[str]:
    """List the files of code in a staged folder that are neither the package's nor those that the run recorded.

    The package's are those of any version in the history of this checkout: a model saved by an earlier version brings
    the code of that time, and runs did not always record it.
    """
    known = [model_code()]
    if source.run is not None:
        known += [one.made_by.model_code for one in (source.run.resolved, source.run.heldout) if one]
    return [
        path.name
        for path in sorted(folder.glob("*.py"))
        if sha256(path) not in [files.get(path.name) for files in known]
        and git_hash(path.read_bytes()) not in _committed(path.name)
    ]


def _committed(name: str) -> set[str]:
    """Git's hashes of all versions of a file of the model's code; none outside a checkout."""
    command = ["git", "-C", str(CODE), "log", "--format=", "--raw", "--no-abbrev", "--", name]
    try:
        log = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return set()
    return {line.split()[3] for line in log.splitlines()}


def check_code_is_known(source: PushSource, folder: Path) -> None:
    """Raise: UsageError if code in a staged folder was changed: loading the model would run it."""
    if changed := modified_code(source, folder):
        raise UsageError(
            f"{source.model / changed[0]} differs from the package's {CODE / changed[0]}, and from what was recorded "
            "in training. Restore that file, or publish this one: --allow_modified_code (the card states it)."
        )


# ---- what must fit together ----------------------------------------------------------------------------------------


def check_results_are_theirs(source: PushSource, folder: Path) -> None:
    """Raise: UsageError if weights or tokenizer of a finished run are not those its results were measured with."""
    if source.run is None or source.run.heldout is None:
        return
    for path, digest in source.run.heldout.made_by.inputs.items():
        name = Path(path).name
        if Path(path).parent.name != source.run_folder.model.name:  # of the data
            continue
        if name == WEIGHTS and not source.is_checkpoint:
            found = _sha256_of_weights(folder)
        else:
            found = sha256(folder / name) if name == "tokenizer.json" and (folder / name).is_file() else digest
        if found != digest:
            what = "weights" if name == WEIGHTS else "tokenizer"
            raise UsageError(
                f"{source.model / name} is not the file that the run ended with: what it was measured with had another "
                f"SHA-256. Published so, its {what} would be out of step with the rest. Put the run's own back."
            )


def _sha256_of_weights(folder: Path) -> str:
    """Of the one file, or of that which shards would make."""
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
    entries = settings["vocab_size"]
    largest = max(tokenizer.get_vocab().values())
    if largest >= entries:
        raise UsageError(
            f"the tokenizer in {source.model} has ids up to {largest:,}, the model {entries:,} entries. "
            "It is another model's: put back the one it was trained with."
        )
    ends: set[Any] = set()
    for told in (settings, read_json(folder / "generation_config.json")):
        value = told.get("eos_token_id")
        ends |= set(value) if isinstance(value, list) else {value}
    if ends - {None} and tokenizer.eos_token_id not in ends:
        raise UsageError(
            f"the tokenizer in {source.model} ends texts with id {tokenizer.eos_token_id} ({tokenizer.eos_token}), the "
            f"model with {', '.join(map(str, sorted(ends - {None})))}: they are out of step. Put back the one it was "
            "trained with."
        )


def check_finite(folder: Path) -> None:
    """Raise: UsageError that names the first tensor with a value that is not finite."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # not a dictionary
                if not tensors.get_tensor(name).isfinite().all():
                    raise UsageError(
                        f"{path.name}: {name} has values that are not finite, so the model is broken. "
                        "Publish an earlier checkpoint."
                    )


def check_sizes(folder: Path) -> GPT2SmallConfig:
    """The configuration of a staged folder. Raises: UsageError if it is not one of ours."""
    try:
        return GPT2SmallConfig.from_dict(read_json(folder / "config.json"))
    except Exception as error:
        raise UsageError(f"{folder / 'config.json'}: {' '.join(str(error).split())}") from None
