"""Settings and weights of other code bases to ours, and ours to those of transformers' GPT-2, bit for bit."""

import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import GPT2Config

from gpt2small_hf.model.configuration_gpt2small import GPT2SmallConfig
from gpt2small_hf.model.gpt import GPT

# Spellings that transformers knows → ours, which are equal in effect.
ACTIVATIONS = {
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu_pytorch_tanh"),
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    **dict.fromkeys(("silu", "swish"), "silu"),
    "relu": "relu",
}
# What changes the arithmetic of transformers' GPT-2, with the only value that ours can follow. (Its
# reorder_and_upcast_attn is not among them: the same sums in another order.)
FIXED = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
DROPOUTS = ("embd_pdrop", "attn_pdrop", "resid_pdrop")
GPT2_NAMES = (
    *("vocab_size", "n_positions", "n_embd", "n_head", "n_layer", "layer_norm_epsilon", "initializer_range"),
    *("embd_pdrop", "attn_pdrop", "resid_pdrop", "tie_word_embeddings", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)
"""Settings of transformers' GPT-2 that ours takes and returns by the same names (its `attribute_map`)."""


# ---- settings -------------------------------------------------------------------------------------------------------


def config_from_reference(settings: Any) -> GPT2SmallConfig:
    """Read the reference series' model.json. Raises: ValueError if a size is missing or impossible."""
    sizes = {"n_positions": "context_length", "n_embd": "emb_dim", "n_head": "n_heads", "n_layer": "n_layers"}
    return config_from_dict(
        GPT2SmallConfig,
        {name: required(settings, theirs) for name, theirs in {"vocab_size": "vocab_size", **sizes}.items()}
        | {"attention_bias": settings.get("qkv_bias", False), "tie_word_embeddings": settings.get("tie_weights", False)}
        | dict.fromkeys(DROPOUTS, settings.get("drop_rate", 0.0)),
    )


def config_from_nanogpt(settings: Any, *, tied: bool) -> GPT2SmallConfig:
    """Read nanoGPT's `model_args`. Raises: ValueError if a size is missing or impossible."""
    return config_from_dict(
        GPT2SmallConfig,
        {name: required(settings, name) for name in ("vocab_size", "n_embd", "n_head", "n_layer")}
        | {"n_positions": required(settings, "block_size"), "attention_bias": required(settings, "bias")}
        | {"hidden_act": "gelu", "tie_word_embeddings": tied}  # the exact GELU, unlike OpenAI's
        | dict.fromkeys(DROPOUTS, settings.get("dropout", 0.0)),
    )


def config_from_gpt2(config: GPT2Config) -> GPT2SmallConfig:
    """Read the configuration of transformers' GPT-2. Raises: ValueError for a variant that ours cannot follow."""
    for name, value in FIXED.items():
        if getattr(config, name) != value:
            raise ValueError(f"{name} is {getattr(config, name)}; only {value} can be converted")
    if config.activation_function not in ACTIVATIONS:
        raise ValueError(f"activation_function is {config.activation_function}; known: {', '.join(ACTIVATIONS)}")
    settings = {name: getattr(config, name) for name in ("n_inner", *GPT2_NAMES)}
    settings |= {"hidden_act": ACTIVATIONS[config.activation_function], "attention_bias": True}
    return config_from_dict(GPT2SmallConfig, settings)


def gpt2_config(config: GPT2SmallConfig) -> GPT2Config:
    """Our configuration as transformers' GPT-2 has it."""
    # transformers ignores both. n_ctx is looked up by converters to GGUF; the other, for which GPT-2 has no word, tells
    # `read` to drop the zeros that stand for absent biases.
    extra: dict[str, Any] = {"n_ctx": config.max_position_embeddings}
    if not config.attention_bias:
        extra["attention_bias"] = False
    return GPT2Config(
        n_inner=None if config.intermediate_size == 4 * config.hidden_size else config.intermediate_size,
        activation_function="gelu_new" if config.hidden_act == "gelu_pytorch_tanh" else config.hidden_act,
        **{name: getattr(config, name) for name in GPT2_NAMES},
        **extra,
    )


def config_from_dict(kind: type[Any], settings: dict[str, Any]) -> Any:
    try:
        return kind.from_dict(settings)
    except StrictDataclassError as error:
        raise ValueError(" ".join(str(error).split())) from None


def required(settings: Any, name: str) -> Any:
    if not isinstance(settings, dict) or name not in settings:
        raise ValueError(f"the settings lack {name}")
    return settings[name]


# ---- weights --------------------------------------------------------------------------------------------------------


Weights = dict[str, Tensor]


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
class TensorPiece:
    """One of their tensors, and our tensors of which it is made."""

    name: str
    ours: tuple[str, ...]
    shape: tuple[int, ...]
    transposed: bool


EMBED, _POSITIONS, _NORM, HEAD = "model.embed_tokens", "model.embed_positions", "model.norm", "lm_head"
_NORM_1, _NORM_2 = "model.layers.*.input_layernorm", "model.layers.*.post_attention_layernorm"
_Q, _K, _V, _O = (f"model.layers.*.self_attn.{name}_proj" for name in "qkvo")
_UP, _DOWN = "model.layers.*.mlp.up_proj", "model.layers.*.mlp.down_proj"

REFERENCE = Layout(
    {
        "tok_emb": (EMBED,),
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
        "out_head": (HEAD,),
    },
    norm_leaves=("scale", "shift"),
    buffers=r"\.att\.mask$",
)
NANOGPT = Layout(
    {
        "transformer.wte": (EMBED,),
        "transformer.wpe": (_POSITIONS,),
        "transformer.h.*.ln_1": (_NORM_1,),
        "transformer.h.*.attn.c_attn": (_Q, _K, _V),
        "transformer.h.*.attn.c_proj": (_O,),
        "transformer.h.*.ln_2": (_NORM_2,),
        "transformer.h.*.mlp.c_fc": (_UP,),
        "transformer.h.*.mlp.c_proj": (_DOWN,),
        "transformer.ln_f": (_NORM,),
        "lm_head": (HEAD,),
    },
    buffers=r"\.attn\.(masked_)?bias$",
)
TRANSFORMERS = replace(NANOGPT, transposed=("c_attn", "c_proj", "c_fc"))


def shapes(config: GPT2SmallConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of each of our weights; a tied head is none of its own."""
    with torch.device("meta"):
        ours = {name: tuple(weight.shape) for name, weight in GPT(config).state_dict().items()}
    if config.tie_word_embeddings:
        del ours[f"{HEAD}.weight"]
    return ours


def own_layout(config: GPT2SmallConfig) -> Layout:
    """Return our own names: those of the model that this configuration describes."""
    modules = [name.rpartition(".")[0] for name in (*shapes(config), f"{HEAD}.weight")]
    return Layout({module: (module,) for module in modules})


def pieces(config: GPT2SmallConfig, layout: Layout) -> list[TensorPiece]:
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
                found.append(TensorPiece(name, ours, shape[::-1] if transposed else shape, transposed))
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
    like = weights[f"{EMBED}.weight"]
    absent = {name: shape for name, shape in shapes(config).items() if name.endswith("bias") and name not in weights}
    return weights | {name: like.new_zeros(shape) for name, shape in absent.items()}


def _drop_tied_head(weights: Weights, layout: Layout) -> None:
    # Which of the two names a file keeps for shared weights differs between writers; some keep both.
    theirs = {ours: f"{name}.weight" for name, (ours, *_) in layout.modules.items()}
    embedding, head = theirs[EMBED], theirs[HEAD]
    if head in weights and not torch.equal(weights.setdefault(embedding, weights[head]), weights[head]):
        raise ValueError(f"the settings say that the head is tied, but {head} differs from {embedding}")
    weights.pop(head, None)


def _compare(weights: Weights, plan: list[TensorPiece]) -> None:
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
