"""Other GPT-2s ↔ ours: the reference series, transformers' GPT-2, nanoGPT. Not published: only `convert` needs it.

A `Layout` says how another code base names and stores what we have. `to_ours` and `from_ours` apply one to a state dict
and undo each other bit for bit. `read` recognises what lies on disk; nothing it opens can run code.
"""

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
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from .configuration_gpt2small import GPT2SmallConfig
from .gpt import GPT
from .modeling_gpt2small import GPT2SmallForCausalLM

Weights = dict[str, Tensor]

# ---- layouts ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """How a code base names and stores the weights of a GPT-2."""

    modules: dict[str, tuple[str, ...]]
    """Their module → ours; several of ours where theirs stacks them by rows. `*` stands for a layer's number."""
    transposed: tuple[str, ...] = ()
    """Ends of the names of modules that keep their matrix as (in, out), as transformers' Conv1D does."""
    norm_leaves: tuple[str, str] = ("weight", "bias")
    """What the two tensors of a LayerNorm are called."""
    biases: bool = True
    """False if neither matrices nor norms have any."""
    buffers: str = "$^"
    """Pattern of names that hold no weights: causal masks, which older files carry along."""


@dataclass(frozen=True)
class Piece:
    """One of their tensors, and our tensors of which it is made."""

    name: str
    ours: tuple[str, ...]
    shape: tuple[int, ...]
    transposed: bool


_EMBED, _POSITIONS, _NORM, _HEAD = "model.embed_tokens", "model.embed_positions", "model.norm", "lm_head"
_NORM_1, _NORM_2 = "model.layers.*.input_layernorm", "model.layers.*.post_attention_layernorm"
_Q, _K, _V, _O = (f"model.layers.*.self_attn.{name}_proj" for name in "qkvo")
_UP, _DOWN = "model.layers.*.mlp.up_proj", "model.layers.*.mlp.down_proj"

REFERENCE = Layout(
    {
        "tok_emb": (_EMBED,),
        "pos_emb": (_POSITIONS,),
        "trf_blocks.*.norm1": (_NORM_1,),
        "trf_blocks.*.att.W_query": (_Q,),
        "trf_blocks.*.att.W_key": (_K,),
        "trf_blocks.*.att.W_value": (_V,),
        "trf_blocks.*.att.out_proj": (_O,),
        "trf_blocks.*.norm2": (_NORM_2,),
        "trf_blocks.*.ff.layers.0": (_UP,),
        "trf_blocks.*.ff.layers.2": (_DOWN,),
        "final_norm": (_NORM,),
        "out_head": (_HEAD,),
    },
    norm_leaves=("scale", "shift"),
    buffers=r"\.att\.mask$",
)
NANOGPT = Layout(
    {
        "transformer.wte": (_EMBED,),
        "transformer.wpe": (_POSITIONS,),
        "transformer.h.*.ln_1": (_NORM_1,),
        "transformer.h.*.attn.c_attn": (_Q, _K, _V),
        "transformer.h.*.attn.c_proj": (_O,),
        "transformer.h.*.ln_2": (_NORM_2,),
        "transformer.h.*.mlp.c_fc": (_UP,),
        "transformer.h.*.mlp.c_proj": (_DOWN,),
        "transformer.ln_f": (_NORM,),
        "lm_head": (_HEAD,),
    },
    buffers=r"\.attn\.(masked_)?bias$",
)
TRANSFORMERS = replace(NANOGPT, transposed=("c_attn", "c_proj", "c_fc"))


def shapes(config: GPT2SmallConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of each of our weights; a tied head is none of its own."""
    with torch.device("meta"):
        ours = {name: tuple(weight.shape) for name, weight in GPT(config).state_dict().items()}
    if config.tie_word_embeddings:
        del ours[f"{_HEAD}.weight"]
    return ours


def own_layout(config: GPT2SmallConfig) -> Layout:
    """Return our own names: those of the model that this configuration describes."""
    modules = [name.rpartition(".")[0] for name in (*shapes(config), f"{_HEAD}.weight")]
    return Layout({module: (module,) for module in modules})


def pieces(config: GPT2SmallConfig, layout: Layout) -> list[Piece]:
    """Every tensor a model of this size has in `layout`."""
    known, found = shapes(config), []
    for module, our_modules in layout.modules.items():
        is_norm = our_modules[0] in (_NORM_1, _NORM_2, _NORM)
        leaves = layout.norm_leaves if is_norm else ("weight", "bias")
        for layer in range(config.num_hidden_layers if "*" in module else 1):
            for kind, leaf in zip(("weight", "bias"), leaves, strict=True):
                ours = tuple(f"{name}.{kind}".replace("*", str(layer)) for name in our_modules)
                if ours[0] not in known or (kind == "bias" and not layout.biases):
                    continue
                rows = sum(known[name][0] for name in ours)
                shape = (rows, *known[ours[0]][1:])
                transposed = kind == "weight" and module.endswith(layout.transposed)
                name = f"{module}.{leaf}".replace("*", str(layer))
                found.append(Piece(name, ours, shape[::-1] if transposed else shape, transposed))
    return found


def to_ours(weights: Weights, config: GPT2SmallConfig, layout: Layout) -> Weights:
    """Their state dict → ours, without the head if it is tied. Biases that `layout` never has become zeros.

    Raises: ValueError that names every missing, unexpected and wrongly shaped tensor.
    """
    weights = {name: weight for name, weight in weights.items() if not re.search(layout.buffers, name)}
    if config.tie_word_embeddings:
        _drop_tied_head(weights, layout)
    plan = pieces(config, layout)
    _compare(weights, plan)
    ours = {}
    for piece in plan:
        weight = weights[piece.name]
        parts = (weight.t() if piece.transposed else weight).chunk(len(piece.ours))
        ours |= {name: part.contiguous() for name, part in zip(piece.ours, parts, strict=True)}
    return ours if layout.biases else with_zero_biases(ours, config)


def from_ours(weights: Weights, config: GPT2SmallConfig, layout: Layout) -> Weights:
    """Our state dict → theirs: what `to_ours` undoes."""
    theirs = {}
    for piece in pieces(config, layout):
        weight = torch.cat([weights[name] for name in piece.ours])
        theirs[piece.name] = weight.t().contiguous() if piece.transposed else weight
    return theirs


def with_zero_biases(weights: Weights, config: GPT2SmallConfig) -> Weights:
    """Our state dict with a zero bias wherever `config` has one and the state dict has none."""
    like = weights[f"{_EMBED}.weight"]
    absent = {name: shape for name, shape in shapes(config).items() if name.endswith("bias") and name not in weights}
    return weights | {name: like.new_zeros(shape) for name, shape in absent.items()}


def _drop_tied_head(weights: Weights, layout: Layout) -> None:
    # Which of the two names a file keeps for shared weights differs between writers; some keep both.
    theirs = {ours: f"{name}.weight" for name, (ours, *_) in layout.modules.items()}
    embedding, head = theirs[_EMBED], theirs[_HEAD]
    if head in weights and not torch.equal(weights.setdefault(embedding, weights[head]), weights[head]):
        raise ValueError(f"the settings say that the head is tied, but {head} differs from {embedding}")
    weights.pop(head, None)


def _compare(weights: Weights, plan: list[Piece]) -> None:
    def names(words: list[str]) -> str:
        return ", ".join(words[:4]) + (f" and {len(words) - 4} more" if len(words) > 4 else "")

    planned = {piece.name for piece in plan}
    problems = []
    if missing := [piece.name for piece in plan if piece.name not in weights]:
        problems.append(f"missing {names(missing)}")
    if unexpected := [name for name in weights if name not in planned]:
        problems.append(f"unexpected {names(unexpected)}")
    found = {name: tuple(weight.shape) for name, weight in weights.items()}
    for piece in plan:
        if piece.name in found and found[piece.name] != piece.shape:
            problems.append(f"{piece.name} has shape {found[piece.name]}, expected {piece.shape}")
    if problems:
        raise ValueError("the weights do not fit the settings: " + names(problems))


# ---- settings ---------------------------------------------------------------------------------------------------

# Spellings that transformers knows → ours, which are equal in effect.
ACTIVATIONS = {
    "gelu_new": "gelu_pytorch_tanh",
    "gelu_fast": "gelu_pytorch_tanh",
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
# What changes the arithmetic of transformers' GPT-2, with the only value that ours can follow. (Its
# reorder_and_upcast_attn is not among them: the same sums in another order.)
FIXED = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}

CALLED_ALIKE = (
    *("vocab_size", "embd_pdrop", "attn_pdrop", "resid_pdrop", "initializer_range", "tie_word_embeddings"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache"),
)


def config_from_reference(settings: Any) -> GPT2SmallConfig:
    """Read the reference series' model.json. Raises: ValueError if a size is missing or impossible."""
    return _with_gpt2_special_tokens(
        vocab_size=_get(settings, "vocab_size"),
        max_position_embeddings=_get(settings, "context_length"),
        hidden_size=_get(settings, "emb_dim"),
        num_attention_heads=_get(settings, "n_heads"),
        num_hidden_layers=_get(settings, "n_layers"),
        attention_bias=settings.get("qkv_bias", False),
        tie_word_embeddings=settings.get("tie_weights", False),
        **_dropout(settings.get("drop_rate", 0.0)),
    )


def config_from_nanogpt(settings: Any, *, tied: bool) -> GPT2SmallConfig:
    """Read nanoGPT's `model_args`. Raises: ValueError if a size is missing or impossible."""
    return _with_gpt2_special_tokens(
        vocab_size=_get(settings, "vocab_size"),
        max_position_embeddings=_get(settings, "block_size"),
        hidden_size=_get(settings, "n_embd"),
        num_attention_heads=_get(settings, "n_head"),
        num_hidden_layers=_get(settings, "n_layer"),
        hidden_act="gelu",  # the exact one, unlike OpenAI's
        attention_bias=_get(settings, "bias"),
        tie_word_embeddings=tied,
        **_dropout(settings.get("dropout", 0.0)),
    )


def config_from_gpt2(config: GPT2Config) -> GPT2SmallConfig:
    """Read the configuration of transformers' GPT-2. Raises: ValueError for a variant that ours cannot follow."""
    for name, value in FIXED.items():
        if getattr(config, name) != value:
            raise ValueError(f"{name} is {getattr(config, name)}; only {value} can be converted")
    if config.activation_function not in ACTIVATIONS:
        raise ValueError(f"activation_function is {config.activation_function}; known: {', '.join(ACTIVATIONS)}")
    return _config(
        max_position_embeddings=config.n_positions,
        hidden_size=config.n_embd,
        intermediate_size=config.n_inner,
        num_attention_heads=config.n_head,
        num_hidden_layers=config.n_layer,
        hidden_act=ACTIVATIONS[config.activation_function],
        attention_bias=True,
        layer_norm_eps=config.layer_norm_epsilon,
        **{name: getattr(config, name) for name in CALLED_ALIKE},
    )


def gpt2_config(config: GPT2SmallConfig) -> GPT2Config:
    """Our configuration as transformers' GPT-2 has it."""
    # transformers ignores both. n_ctx is looked up by converters to GGUF; the other, for which GPT-2 has no word, tells
    # `read` to drop the zeros that stand for absent biases.
    extra: dict[str, Any] = {"n_ctx": config.max_position_embeddings}
    if not config.attention_bias:
        extra["attention_bias"] = False
    return GPT2Config(
        n_positions=config.max_position_embeddings,
        n_embd=config.hidden_size,
        n_inner=None if config.intermediate_size == 4 * config.hidden_size else config.intermediate_size,
        n_head=config.num_attention_heads,
        n_layer=config.num_hidden_layers,
        activation_function="gelu_new" if config.hidden_act == "gelu_pytorch_tanh" else config.hidden_act,
        layer_norm_epsilon=config.layer_norm_eps,
        **{name: getattr(config, name) for name in CALLED_ALIKE},
        **extra,
    )


def _config(**settings: Any) -> GPT2SmallConfig:
    return _from_dict(GPT2SmallConfig, settings)


def _from_dict(kind: type[Any], settings: dict[str, Any]) -> Any:
    try:
        return kind.from_dict(settings)
    except StrictDataclassError as error:
        raise ValueError(" ".join(str(error).split())) from None


def _get(settings: Any, name: str) -> Any:
    if not isinstance(settings, dict) or name not in settings:
        raise ValueError(f"the settings lack {name}")
    return settings[name]


def _dropout(probability: float) -> dict[str, float]:
    return {"embd_pdrop": probability, "attn_pdrop": probability, "resid_pdrop": probability}


def _with_gpt2_special_tokens(**settings: Any) -> GPT2SmallConfig:
    # Neither code base writes them down. A vocabulary of GPT-2's size, padded or not, is GPT-2's; of another, no token
    # is known to end a text.
    config = _config(**settings)
    if config.vocab_size <= 50256:
        config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    return config


# ---- models -----------------------------------------------------------------------------------------------------


def as_gpt2small(config: GPT2SmallConfig, weights: Weights) -> GPT2SmallForCausalLM:
    """Our model in evaluation mode, filled with our state dict, in its dtype."""
    return _filled(GPT2SmallForCausalLM, config, weights)


def as_gpt2(config: GPT2SmallConfig, weights: Weights) -> GPT2LMHeadModel:
    """Our state dict as transformers' own GPT-2, in evaluation mode; zeros stand for biases that ours has not."""
    biased = deepcopy(config)
    biased.attention_bias = True
    theirs = from_ours(with_zero_biases(weights, biased), biased, TRANSFORMERS)
    return _filled(GPT2LMHeadModel, gpt2_config(config), theirs)


def _filled(kind: type[Any], config: Any, weights: Weights) -> Any:
    return kind.from_pretrained(None, config=config, state_dict=weights, dtype=dtype_of(weights))


def _core(config: GPT2SmallConfig, weights: Weights) -> GPT:
    with torch.device("meta"):
        core = GPT(config).eval()
    head = {f"{_HEAD}.weight": weights[f"{_EMBED}.weight"]} if config.tie_word_embeddings else {}
    core.load_state_dict(weights | head, assign=True)
    return core


def dtype_of(weights: Weights) -> torch.dtype:
    """The smallest dtype that holds every weight without loss. Raises: ValueError for weights that are not floats."""
    for name, weight in weights.items():
        if not weight.is_floating_point():
            raise ValueError(f"{name} is of {weight.dtype}: quantised weights cannot be converted")
    return reduce(torch.promote_types, {weight.dtype for weight in weights.values()})


# ---- reading ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A model read from disk."""

    what: str
    """What it was recognised as, for people."""
    config: GPT2SmallConfig
    weights: Weights
    """Our state dict, in one dtype."""
    folder: Path
    """Where tokenizer and generation settings may lie."""
    original: Callable[[], nn.Module]
    """Makes the model for comparison: by transformers' own code where it has any, else by the plain core."""
    names_special_tokens: bool = True
    """False if the ids of special tokens are a guess from the size of the vocabulary."""

    @property
    def generation_config(self) -> GenerationConfig | None:
        """What lies beside the weights, if anything does."""
        beside = (self.folder / "generation_config.json").is_file()
        return GenerationConfig.from_pretrained(self.folder) if beside else None

    def build(self, to: str) -> PreTrainedModel:
        """The model as `gpt2small` or `gpt2`, ready to be saved."""
        model = {"gpt2small": as_gpt2small, "gpt2": as_gpt2}[to](self.config, self.weights)
        if (generation := self.generation_config) is not None:
            model.generation_config = generation
        return model


def fetch(name: str) -> Path:
    """Download a model of the Hub, without any code in it, or find it in the cache.

    Returns: the folder. Raises: ValueError if the Hub gives none.
    """
    try:
        # The patterns' star also stands for slashes: folders hold the same model for other tools.
        wanted = ["*.json", "*.safetensors", "*.txt", "*.jinja"]
        return Path(snapshot_download(name, allow_patterns=wanted, ignore_patterns="*/*"))
    except (OSError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"it is no file or folder here, and the Hub gave no model of that name ({reason})") from None


def read(path: Path, settings_path: Path | None = None) -> Source:
    """Recognise a file or folder and read it.

    `settings_path` is the reference series' model.json where it does not lie beside the weights.

    Raises: ValueError that says what was looked for or which part does not fit.
    """
    folder = path if path.is_dir() else path.parent
    if settings_path is not None and path.suffix == ".pt":
        raise ValueError("a ckpt.pt carries its own settings; leave --config out")
    beside = (folder / "config.json", folder / "model.json")
    settings_path = settings_path or next((file for file in beside if file.is_file()), None)
    if settings_path is None and (folder / "ckpt.pt").is_file() and path.is_dir():
        path = folder / "ckpt.pt"
    if path.suffix == ".pt" and path.is_file():
        return _read_nanogpt(path)
    if settings_path is None and path.suffix == ".safetensors":
        raise ValueError("no config.json or model.json lies beside it; name its settings: --config model.json")
    if settings_path is None:
        raise ValueError(
            "it is no model: expected config.json or model.json beside *.safetensors, or nanoGPT's ckpt.pt"
        )
    return _read_described(folder, read_safetensors(path), settings_path)


def _read_described(folder: Path, weights: Weights, settings_path: Path) -> Source:
    settings = _read_json(settings_path)
    kind = settings.get("model_type")
    if kind == GPT2SmallConfig.model_type:
        config = _from_dict(GPT2SmallConfig, settings)
        return _source(folder, "gpt2small", config, to_ours(weights, config, own_layout(config)))
    if kind == "gpt2":
        return _read_gpt2(folder, weights, settings)
    if kind == "gpjtgpt2" or "emb_dim" in settings:
        what = "reference series" + (", published" if kind else "")
        config = config_from_reference(_get(settings, "cfg") if kind else settings)
        weights = {name.removeprefix("_orig_mod.").removeprefix("model."): weight for name, weight in weights.items()}
        ours = to_ours(weights, config, REFERENCE)
        return _source(folder, what, config, ours, names_special_tokens=False)
    raise ValueError(
        f"{settings_path.name} describes a model of type {kind or 'unknown'}; known are gpt2small, gpt2, gpjtgpt2 and "
        "the reference series' model.json, which has emb_dim"
    )


def _read_gpt2(folder: Path, weights: Weights, settings: dict[str, Any]) -> Source:
    theirs = _from_dict(GPT2Config, settings)
    config = config_from_gpt2(theirs)
    weights = {  # a model saved without its head has no prefix
        name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}": weight
        for name, weight in weights.items()
    }
    ours = to_ours(weights, config, TRANSFORMERS)
    qkv_biases = {name for name in ours if re.search(r"[qkv]_proj\.bias$", name)}
    if settings.get("attention_bias") is False and not any(ours[name].any() for name in qkv_biases):
        config.attention_bias = False
        ours = {name: weight for name, weight in ours.items() if name not in qkv_biases}
    source = _source(folder, "transformers GPT-2", config, ours)
    return replace(source, original=partial(_filled, GPT2LMHeadModel, theirs, weights))


def _read_nanogpt(path: Path) -> Source:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what there is to say about a strange file, the error below says
            # Mapped, not read: two thirds of the file are the optimizer's.
            saved = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        code = re.search(r"GLOBAL (\S+)", str(error))  # PyTorch's own message tells how to run it all the same
        raise ValueError(
            f"it is not a file of plain tensors{f' but also holds {code[1]}' if code else ''}. If it is a checkpoint "
            'you trust, keep only its weights: torch.save({k: saved[k] for k in ("model", "model_args")}, "ckpt.pt")'
        ) from None
    weights, settings = (saved.get(name) if isinstance(saved, dict) else None for name in ("model", "model_args"))
    if not isinstance(weights, dict) or not all(isinstance(weight, Tensor) for weight in weights.values()):
        raise ValueError("it is not nanoGPT's: that has the entries model and model_args")
    weights = {name.removeprefix("_orig_mod."): weight for name, weight in weights.items()}
    embedding, head = (weights.get(name) for name in ("transformer.wte.weight", "lm_head.weight"))
    tied = embedding is None or head is None or torch.equal(embedding, head)
    config = config_from_nanogpt(settings, tied=tied)
    ours = to_ours(weights, config, replace(NANOGPT, biases=config.attention_bias))
    return _source(path.parent, "nanoGPT", config, ours, names_special_tokens=False)


def _source(folder: Path, what: str, config: GPT2SmallConfig, weights: Weights, **more: Any) -> Source:
    dtype = dtype_of(weights)
    weights = {name: weight.to(dtype) for name, weight in weights.items()}
    return Source(what, config, weights, folder, original=partial(_core, config, weights), **more)


def read_safetensors(path: Path) -> Weights:
    """All tensors of a file, or of a folder's model.safetensors or the shards its index names.

    Raises: ValueError that names the file that is missing or broken.
    """
    index = path / "model.safetensors.index.json"
    if path.is_file():
        files = [path]
    elif index.is_file():
        files = sorted({path / name for name in _get(_read_json(index), "weight_map").values()})
    else:
        files = [path / "model.safetensors"]
    weights = {}
    for file in files:
        try:
            weights |= load_file(file)
        except FileNotFoundError:
            raise ValueError(f"it has no {file.name}; pickled weights (*.bin, *.pth) are not opened") from None
        except SafetensorError as error:
            raise ValueError(f"{file.name} is not a whole safetensors file ({error})") from None
    return weights


def _read_json(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path.name} cannot be read as JSON ({error})") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{path.name} holds no JSON object")
    return settings
