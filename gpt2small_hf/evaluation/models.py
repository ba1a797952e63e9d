"""The words on a command line that name models → where each model is, without torch; then the model and its tokenizer.

A word is a run folder, `RUN:STEP`, `RUN:all`, a checkpoint, any folder of a causal language model, or an id on the Hub.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gpt2small_hf.config.declared import declared, imported_alone
from gpt2small_hf.errors import UsageError
from gpt2small_hf.runs.files import parse_json, sha256
from gpt2small_hf.runs.hub import check_on_hub, why_not
from gpt2small_hf.runs.layout import HUB_ID, RunFolder, checkpoints_in, number_of
from gpt2small_hf.runs.reader import Run

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""Files that transformers reads weights from; the first that exists."""
UNSPECIFIC_NAMES = ("model", "staged", "converted")
"""Folders whose name says nothing about the model: labels include the folder above."""


@dataclass(frozen=True)
class ModelSource:
    """A model that a word names."""

    label: str
    """Unique among the models of a command, and short: `tiny`, `tiny:200`, `gpt2`."""
    kind: Literal["run", "checkpoint", "folder", "hub"]
    """A finished run, a checkpoint, another folder, or an id on the Hub."""
    path_or_id: str
    """What `from_pretrained` takes: the folder of the model, or its id."""
    model_type: str
    """Of its config.json."""
    run: RunFolder | None = None
    """The run that trained it, if that is a run of this package."""
    step: int | None = None
    """Of the weights; None if it is not recorded."""
    needs_remote_code: bool = False
    """Whether transformers can only load it by running Python code that is stored with it."""

    @property
    def folder(self) -> Path | None:
        """The folder of the model; None on the Hub."""
        return None if self.kind == "hub" else Path(self.path_or_id)

    @property
    def is_own(self) -> bool:
        """Whether it is a model of this package, which needs no remote code."""
        return self.model_type == _own_type()


def find_models(words: Sequence[str], *, trust_remote_code: bool | None = None) -> list[ModelSource]:
    """Find the models that words name. `RUN:all` names each kept checkpoint and the final model, by step.

    Args:
        words: from the command line.
        trust_remote_code: False refuses models that need remote code here, before any long work; `load_model` refuses
            them in any case.

    Raises: UsageError for a word that names no model, an unfinished run, a model named twice, and remote code that is
        not trusted.
    """
    found = [source for word in words for source in _find(word)]
    counts = Counter(source.path_or_id if source.folder is None else str(source.folder.resolve()) for source in found)
    for name, count in counts.items():
        if count > 1:
            raise UsageError(f"{name} is named {count} times. Name each model once.")
    if trust_remote_code is False:
        for source in found:
            _check_remote_code(source)
    return _with_unique_labels(found)


def find_model(word: str, *, trust_remote_code: bool | None = None) -> ModelSource:
    """Find the one model that a word names. Raises: UsageError as `find_models`, and for several."""
    found = find_models([word], trust_remote_code=trust_remote_code)
    if len(found) != 1:
        steps = ", ".join(f"{source.step:,}" for source in found if source.step is not None)
        raise UsageError(f"{word} names {len(found)} models (steps {steps}). Name one of them: RUN:STEP.")
    return found[0]


def load_model(
    source: ModelSource, *, dtype: str = "float32", trust_remote_code: bool = False, device: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Load a model for evaluation, without dropout, and its tokenizer, which can pad.

    Of the model's own generation settings only the token ids remain, so that the same settings apply to every model.

    Args:
        source: of `find_models`.
        dtype: of the weights: a name such as `bfloat16`, or `auto` for the stored one.
        trust_remote_code: whether Python code stored with the model may run.
        device: default: a GPU if there is one.

    Raises: UsageError if the weights or the tokenizer cannot be read, and for remote code that is not trusted.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, GenerationConfig

    from gpt2small_hf.data.tokenizer import load_tokenizer
    from gpt2small_hf.model.modeling_gpt2small import GPT2SmallForCausalLM

    if not trust_remote_code:
        _check_remote_code(source)
    name, trusted = source.path_or_id, trust_remote_code and source.needs_remote_code
    options: dict[str, Any] = {"dtype": dtype if dtype == "auto" else getattr(torch, dtype)}
    try:
        if source.is_own:
            model = GPT2SmallForCausalLM.from_pretrained(name, **options)
        else:
            model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=trusted, **options)
    except (OSError, RuntimeError, SafetensorError, ValueError) as error:
        first = (str(error).splitlines() or ["?"])[0].rstrip(". ")
        raise UsageError(f"{name} cannot be loaded: {first}. Name another model, or copy this one again.") from None
    fix = "Copy the tokenizer's files (tokenizer.json, tokenizer_config.json) into the folder of the model."
    tokenizer = load_tokenizer(name, trust_remote_code=trusted, fix=fix)
    ends: list[Any] = [model.generation_config.eos_token_id, tokenizer.eos_token_id]
    stops: set[int] = {id for one in ends for id in (one if isinstance(one, list) else [one]) if id is not None}
    ids: dict[str, Any] = {"bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model.generation_config = GenerationConfig(eos_token_id=sorted(stops), **ids)
    return model.eval().to(device or _best_device()), tokenizer  # pyright: ignore[reportReturnType, reportArgumentType]


def context_length(model: PreTrainedModel) -> int:
    """Return the largest number of tokens that a model takes; 2,048 if its configuration has no limit."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2048


def weights_sha256(source: ModelSource) -> str:
    """Return the SHA-256 of a model's weights; of several files, that of their names and hashes.

    Raises: UsageError if the Hub cannot be reached and has not been before.
    """
    file = next((one for name in WEIGHTS if (one := find_file(source.path_or_id, name)) is not None), None)
    if file is None:
        raise UsageError(f"{source.path_or_id} has no file of weights ({WEIGHTS[0]}). Name another model.")
    if file.suffix != ".json":
        return sha256(file)
    parts = sorted(set(parse_json(file.read_text(encoding="utf-8"))["weight_map"].values()))
    hashes = {part: sha256(find_file(source.path_or_id, part) or file.parent / part) for part in parts}
    return hashlib.sha256("".join(f"{value}  {part}\n" for part, value in hashes.items()).encode()).hexdigest()


def find_file(path_or_id: str, name: str) -> Path | None:
    """Return a file of a model folder or of a model on the Hub, which is downloaded; None if it has none.

    Raises: UsageError if the Hub cannot be reached.
    """
    if (folder := Path(path_or_id)).is_dir():
        return folder / name if (folder / name).is_file() else None
    from transformers.utils.hub import cached_file

    try:
        found = cached_file(path_or_id, name, _raise_exceptions_for_missing_entries=False)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path_or_id}: {str(error).splitlines()[0].rstrip('. ')}. Check the network.") from None
    return Path(found) if found else None


# ---- a word → models ---------------------------------------------------------------------------------------------


def _find(word: str) -> list[ModelSource]:
    path = Path(word or "?").expanduser()
    if path.is_dir():
        is_run = RunFolder(path).resolved.is_file() and not (path / "config.json").is_file()  # published: has both
        return [_final_model(RunFolder(path)) if is_run else _of_folder(path)]
    name, _, which = word.rpartition(":")
    run = RunFolder(Path(name).expanduser())
    if name and run.resolved.is_file():
        return _of_steps(run, which)
    if path.exists():
        raise UsageError(f"{word} is a file. Name a run, a checkpoint, a model folder or a Hub id.")
    if not HUB_ID.fullmatch(word):
        raise UsageError(f"{word} does not exist in {Path.cwd()}. Check the name: a Hub id is user/name.")
    return [_of_hub(word)]


def _of_folder(path: Path) -> ModelSource:
    """Return the model of a folder that is not a run. Raises: UsageError if it has none."""
    above = path.resolve().parent
    if path.name == "model" and RunFolder(above).resolved.is_file():
        return _final_model(RunFolder(path.parent if path.parent.name else above))
    run = RunFolder(above.parent)
    is_checkpoint = path.resolve() in checkpoints_in(above)
    if is_checkpoint and run.resolved.is_file():
        return _checkpoint(run, path)
    source = ModelSource("", "checkpoint" if is_checkpoint else "folder", str(path), _type_of(path))
    step = number_of(path.resolve()) if is_checkpoint else None
    return replace(source, step=step, needs_remote_code=_needs_remote_code(path / "config.json"))


def _final_model(run: RunFolder) -> ModelSource:
    """Return the model of a finished run. Raises: UsageError if the run has none yet."""
    if not (run.model / "config.json").is_file():
        kept = _loadable(run)
        fix = f"name a checkpoint, {run.root}:{number_of(kept[-1])}" if kept else "train it first"
        raise UsageError(f"{run.root} is a run that has no model yet. Resume it with its command, or {fix}.")
    heldout = Run(run).heldout
    return ModelSource("", "run", str(run.model), _type_of(run.model), run, heldout and heldout.step)


def _of_steps(run: RunFolder, which: str) -> list[ModelSource]:
    """Return what `RUN:which` names: one step, or `all`, sorted by step."""
    final = _final_model(run) if (run.model / "config.json").is_file() else None
    found = {number_of(path): path for path in _loadable(run)}
    kept = [_checkpoint(run, path) for step, path in found.items() if final is None or step != final.step]
    if which == "all":
        kept += [final] if final else []
        if not kept:
            raise UsageError(f"{run.root} has no model and no checkpoint with weights. Train it with its command.")
        return sorted(kept, key=lambda source: float("inf") if source.step is None else source.step)
    if which.isdecimal() and int(which) in found:
        return [_checkpoint(run, found[int(which)])]
    if final and which == str(final.step):
        return [final]
    steps = ", ".join(map(str, sorted({*found, *([final.step] if final and final.step is not None else [])})))
    raise UsageError(f"{run.root} has no checkpoint {which!r}, but these steps: {steps or 'none'}. Name one, or all.")


def _loadable(run: RunFolder) -> list[Path]:
    """Return the checkpoints of a run with a complete model, by step: not those of LoRA, which are adapters."""
    return [path for path in reversed(checkpoints_in(run.checkpoints)) if (path / "config.json").is_file()]


def _checkpoint(run: RunFolder, path: Path) -> ModelSource:
    return ModelSource("", "checkpoint", str(path), _type_of(path), run, number_of(path.resolve()))


def _of_hub(name: str) -> ModelSource:
    check_on_hub(name, ["config.json"])
    from httpx2 import HTTPError
    from transformers.utils.hub import cached_file  # which imports no torch

    try:
        config = Path(cached_file(name, "config.json") or "")
    except (OSError, ValueError, HTTPError) as error:
        raise UsageError(f"{name} does not exist in {Path.cwd()}, and {why_not(error)}") from None
    return ModelSource("", "hub", name, _read_config(config)["model_type"], None, None, _needs_remote_code(config))


def _type_of(folder: Path) -> str:
    """Return the model type of a folder. Raises: UsageError if the folder has no model with weights."""
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            raise UsageError(f"{folder} is an adapter. Name the folder of the merged model.")
        inside = min(folder.glob("*/config.json"), default=None)
        such_as = f", such as {inside.parent}" if inside else ""
        raise UsageError(
            f"{folder} is a folder without a model (config.json, model.safetensors). Name a run, a model folder or a "
            f"checkpoint{such_as}."
        )
    found = _read_config(folder / "config.json")["model_type"]
    if not any((folder / name).is_file() for name in WEIGHTS):
        raise UsageError(f"{folder} has a config.json, but no weights ({WEIGHTS[0]}). Copy the model again.")
    return found


def _read_config(path: Path) -> dict[str, Any]:
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
        return {**found, "model_type": str(found["model_type"])}
    except (ValueError, LookupError, TypeError):
        raise UsageError(f"{path} is not a model's config.json: it has no model_type. Make the folder again.") from None


# ---- remote code, labels, device ---------------------------------------------------------------------------------


def _own_type() -> str:
    return declared("gpt2small_hf.model.configuration_gpt2small", "GPT2SmallConfig").model_type


def _needs_remote_code(config: Path) -> bool:
    """Whether config.json names Python code, and neither transformers nor this package has the model type."""
    found = _read_config(config)
    known = imported_alone("transformers.models.auto.auto_mappings").CONFIG_MAPPING_NAMES
    return bool(found.get("auto_map")) and found["model_type"] not in {*known, _own_type()}


def _check_remote_code(source: ModelSource) -> None:
    if source.needs_remote_code:
        raise UsageError(
            f"{source.path_or_id} runs Python code that is stored with it (model type {source.model_type}). Read the "
            "code, then give --trust_remote_code if you trust it."
        )


def _with_unique_labels(found: list[ModelSource]) -> list[ModelSource]:
    """Label each model with the last parts of its path, as many as make the labels unique."""
    labels: list[str] = []
    for depth in range(1, 100):
        labels = [_label(source, depth) for source in found]
        if len(set(labels)) == len(labels):
            break
    return [replace(source, label=label) for source, label in zip(found, labels, strict=True)]


def _label(source: ModelSource, depth: int) -> str:
    if source.folder is None:
        parts = tuple(source.path_or_id.split("/"))
    else:
        parts = (source.run.root if source.run else source.folder).resolve().parts
    depth += parts[-1] in UNSPECIFIC_NAMES and source.folder is not None
    step = f":{source.step}" if source.run and source.kind == "checkpoint" else ""
    return "/".join(parts[-depth:]) + step


def _best_device() -> str:
    import torch

    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"
