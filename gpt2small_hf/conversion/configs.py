"""Configurations of other code bases to ours, and ours to that of transformers' GPT-2."""

from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import GPT2Config

from gpt2small_hf.model.configuration_gpt2small import GPT2SmallConfig

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

SAME_NAMES = (
    *("vocab_size", "embd_pdrop", "attn_pdrop", "resid_pdrop", "initializer_range", "tie_word_embeddings"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache"),
)


def config_from_reference(settings: Any) -> GPT2SmallConfig:
    """Read the reference series' model.json. Raises: ValueError if a size is missing or impossible."""
    return _with_gpt2_special_tokens(
        vocab_size=required(settings, "vocab_size"),
        max_position_embeddings=required(settings, "context_length"),
        hidden_size=required(settings, "emb_dim"),
        num_attention_heads=required(settings, "n_heads"),
        num_hidden_layers=required(settings, "n_layers"),
        attention_bias=settings.get("qkv_bias", False),
        tie_word_embeddings=settings.get("tie_weights", False),
        dropout=settings.get("drop_rate", 0.0),
    )


def config_from_nanogpt(settings: Any, *, tied: bool) -> GPT2SmallConfig:
    """Read nanoGPT's `model_args`. Raises: ValueError if a size is missing or impossible."""
    return _with_gpt2_special_tokens(
        vocab_size=required(settings, "vocab_size"),
        max_position_embeddings=required(settings, "block_size"),
        hidden_size=required(settings, "n_embd"),
        num_attention_heads=required(settings, "n_head"),
        num_hidden_layers=required(settings, "n_layer"),
        hidden_act="gelu",  # the exact one, unlike OpenAI's
        attention_bias=required(settings, "bias"),
        tie_word_embeddings=tied,
        dropout=settings.get("dropout", 0.0),
    )


def config_from_gpt2(config: GPT2Config) -> GPT2SmallConfig:
    """Read the configuration of transformers' GPT-2. Raises: ValueError for a variant that ours cannot follow."""
    for name, value in FIXED.items():
        if getattr(config, name) != value:
            raise ValueError(f"{name} is {getattr(config, name)}; only {value} can be converted")
    if config.activation_function not in ACTIVATIONS:
        raise ValueError(f"activation_function is {config.activation_function}; known: {', '.join(ACTIVATIONS)}")
    settings = dict(
        max_position_embeddings=config.n_positions,
        hidden_size=config.n_embd,
        intermediate_size=config.n_inner,
        num_attention_heads=config.n_head,
        num_hidden_layers=config.n_layer,
        hidden_act=ACTIVATIONS[config.activation_function],
        attention_bias=True,
        layer_norm_eps=config.layer_norm_epsilon,
        **{name: getattr(config, name) for name in SAME_NAMES},
    )
    return config_from_dict(GPT2SmallConfig, settings)


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
        **{name: getattr(config, name) for name in SAME_NAMES},
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


def _with_gpt2_special_tokens(*, dropout: float, **settings: Any) -> GPT2SmallConfig:
    # Neither code base writes them down. A vocabulary of GPT-2's size, padded or not, is GPT-2's; of another, no token
    # is known to end a text.
    settings |= dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), dropout)
    config = config_from_dict(GPT2SmallConfig, settings)
    if config.vocab_size <= 50256:
        config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    return config
