"""Model files of any known form to a configuration and our weights. Nothing that is opened can run code."""

import json
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from gpt2small_hf.conversion import layouts
from gpt2small_hf.model.configuration_gpt2small import GPT2SmallConfig
from gpt2small_hf.model.gpt import GPT
from gpt2small_hf.model.modeling_gpt2small import GPT2SmallForCausalLM


def as_gpt2(config: GPT2SmallConfig, weights: layouts.Weights) -> GPT2LMHeadModel:
    """Our state dict as transformers' own GPT-2, in evaluation mode; zeros replace biases that ours lacks."""
    biased = deepcopy(config)
    biased.attention_bias = True
    theirs = layouts.from_ours(layouts.with_zero_biases(weights, biased), biased, layouts.TRANSFORMERS)
    return with_weights(GPT2LMHeadModel, layouts.gpt2_config(config), theirs)


def with_weights(kind: type[Any], config: Any, weights: layouts.Weights) -> Any:
    """Return a model in evaluation mode with this state dict, in its dtype."""
    return kind.from_pretrained(None, config=config, state_dict=weights, dtype=dtype_of(weights))


def _core(config: GPT2SmallConfig, weights: layouts.Weights) -> GPT:
    with torch.device("meta"):
        core = GPT(config).eval()
    head = {f"{layouts.HEAD}.weight": weights[f"{layouts.EMBED}.weight"]} if config.tie_word_embeddings else {}
    core.load_state_dict(weights | head, assign=True)
    return core


def dtype_of(weights: layouts.Weights) -> torch.dtype:
    """The smallest dtype that holds every weight without loss. Raises: ValueError for weights that are not floats."""
    for name, weight in weights.items():
        if not weight.is_floating_point():
            raise ValueError(f"{name} is of {weight.dtype}: quantised weights cannot be converted")
    return reduce(torch.promote_types, {weight.dtype for weight in weights.values()})


# ---- reading ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SourceModel:
    """A model read from disk."""

    what: str
    """Name of the recognised format, to print."""
    config: GPT2SmallConfig
    weights: layouts.Weights
    """Our state dict, in one dtype."""
    folder: Path
    """Folder that may contain a tokenizer and generation settings."""
    original: Callable[[], nn.Module]
    """Makes the model for comparison: by transformers' own code where it has any, else by the plain core."""
    names_special_tokens: bool = True
    """False if the ids of special tokens are a guess from the size of the vocabulary."""

    def build(self, to: str) -> PreTrainedModel:
        """Return the model as `gpt2small` or `gpt2`, with the generation settings in the weights' folder if any."""
        model: PreTrainedModel = (
            as_gpt2(self.config, self.weights)
            if to == "gpt2"
            else with_weights(GPT2SmallForCausalLM, self.config, self.weights)
        )
        if (self.folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(self.folder)
        return model


def fetch(name: str) -> Path:
    """Download a model of the Hub, without any code in it, or find it in the cache.

    Returns: the folder. Raises: ValueError if the Hub gives none.
    """
    try:
        # `*` also matches slashes: subfolders contain the same model for other tools.
        wanted = ["*.json", "*.safetensors", "*.txt", "*.jinja"]
        return Path(snapshot_download(name, allow_patterns=wanted, ignore_patterns="*/*"))
    except (OSError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"it is not a local file or folder, and the Hub returned no model of that name ({reason})"
        ) from None


def read(path: Path, settings_path: Path | None = None) -> SourceModel:
    """Recognise a file or folder and read it.

    `settings_path` is the reference series' model.json if it is in another folder than the weights.

    Raises: ValueError naming the missing file or the part that does not match.
    """
    folder = path if path.is_dir() else path.parent
    if settings_path is not None and path.suffix == ".pt":
        raise ValueError("a ckpt.pt contains its own settings; leave --config out")
    candidates = (folder / "config.json", folder / "model.json")
    settings_path = settings_path or next((file for file in candidates if file.is_file()), None)
    if settings_path is None and (folder / "ckpt.pt").is_file() and path.is_dir():
        path = folder / "ckpt.pt"
    if path.suffix == ".pt" and path.is_file():
        return _read_nanogpt(path)
    if settings_path is None and path.suffix == ".safetensors":
        raise ValueError("its folder has no config.json or model.json; name its settings: --config model.json")
    if settings_path is None:
        raise ValueError(
            "it is not a model: expected config.json or model.json next to *.safetensors, or nanoGPT's ckpt.pt"
        )
    return _read_described(folder, read_safetensors(path), settings_path)


def _read_described(folder: Path, weights: layouts.Weights, settings_path: Path) -> SourceModel:
    settings = _read_json(settings_path)
    kind = settings.get("model_type")
    if kind == GPT2SmallConfig.model_type:
        config = layouts.config_from_dict(GPT2SmallConfig, settings)
        return _source(folder, "gpt2small", config, layouts.to_ours(weights, config, layouts.own_layout(config)))
    if kind == "gpt2":
        return _read_gpt2(folder, weights, settings)
    if kind == "gpjtgpt2" or "emb_dim" in settings:
        what = "reference series" + (", published" if kind else "")
        config = layouts.config_from_reference(layouts.required(settings, "cfg") if kind else settings)
        weights = {name.removeprefix("_orig_mod.").removeprefix("model."): weight for name, weight in weights.items()}
        ours = layouts.to_ours(weights, config, layouts.REFERENCE)
        return _source(folder, what, config, ours, names_special_tokens=False)
    raise ValueError(
        f"{settings_path.name} describes a model of type {kind or 'unknown'}; known are gpt2small, gpt2, gpjtgpt2 and "
        "the reference series' model.json, which has emb_dim"
    )


def _read_gpt2(folder: Path, weights: layouts.Weights, settings: dict[str, Any]) -> SourceModel:
    theirs = layouts.config_from_dict(GPT2Config, settings)
    config = layouts.config_from_gpt2(theirs)
    weights = {  # a model saved without its head has no prefix
        name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}": weight
        for name, weight in weights.items()
    }
    ours = layouts.to_ours(weights, config, layouts.TRANSFORMERS)
    qkv_biases = {name for name in ours if re.search(r"[qkv]_proj\.bias$", name)}
    if settings.get("attention_bias") is False and not any(ours[name].any() for name in qkv_biases):
        config.attention_bias = False
        ours = {name: weight for name, weight in ours.items() if name not in qkv_biases}
    source = _source(folder, "transformers GPT-2", config, ours)
    return replace(source, original=partial(with_weights, GPT2LMHeadModel, theirs, weights))


def _read_nanogpt(path: Path) -> SourceModel:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the error below covers unknown files
            # Mapped, not read: two thirds of the file are the optimizer's.
            saved = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        code = re.search(r"GLOBAL (\S+)", str(error))  # PyTorch's own message tells how to run it all the same
        raise ValueError(
            f"it is not a file of plain tensors{f' but contains {code[1]}' if code else ''}. If it is a checkpoint "
            'you trust, keep only its weights: torch.save({k: saved[k] for k in ("model", "model_args")}, "ckpt.pt")'
        ) from None
    weights, settings = (saved.get(name) if isinstance(saved, dict) else None for name in ("model", "model_args"))
    if not isinstance(weights, dict) or not all(isinstance(weight, Tensor) for weight in weights.values()):
        raise ValueError("it is not nanoGPT's: that has the entries model and model_args")
    weights = {name.removeprefix("_orig_mod."): weight for name, weight in weights.items()}
    embedding, head = (weights.get(name) for name in ("transformer.wte.weight", "lm_head.weight"))
    tied = embedding is None or head is None or torch.equal(embedding, head)
    config = layouts.config_from_nanogpt(settings, tied=tied)
    ours = layouts.to_ours(weights, config, replace(layouts.NANOGPT, biases=config.attention_bias))
    return _source(path.parent, "nanoGPT", config, ours, names_special_tokens=False)


def _source(folder: Path, what: str, config: GPT2SmallConfig, weights: layouts.Weights, **more: Any) -> SourceModel:
    dtype = dtype_of(weights)
    weights = {name: weight.to(dtype) for name, weight in weights.items()}
    return SourceModel(what, config, weights, folder, original=partial(_core, config, weights), **more)


def read_safetensors(path: Path) -> layouts.Weights:
    """All tensors of a file, or of a folder's model.safetensors or the shards its index names.

    Raises: ValueError that names the file that is missing or broken.
    """
    index = path / "model.safetensors.index.json"
    if path.is_file():
        files = [path]
    elif index.is_file():
        files = sorted({path / name for name in layouts.required(_read_json(index), "weight_map").values()})
    else:
        files = [path / "model.safetensors"]
    weights = {}
    for file in files:
        try:
            weights |= load_file(file)
        except FileNotFoundError:
            raise ValueError(f"it has no {file.name}; pickled weights (*.bin, *.pth) are not opened") from None
        except SafetensorError as error:
            raise ValueError(f"{file.name} is not a complete safetensors file ({error})") from None
    return weights


def _read_json(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path.name} cannot be read as JSON ({error})") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{path.name} is not a JSON object")
    return settings
