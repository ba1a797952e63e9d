# Copyright 2026 the authors of gpt2small_hf. Licensed under the Apache License, Version 2.0.
"""Sizes and switches of the model, with all defaults. They live here once: flags and recipes read them here."""

from dataclasses import field
from typing import Any, Literal

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

CODE = {
    "AutoConfig": "configuration_gpt2small.GPT2SmallConfig",
    "AutoModel": "modeling_gpt2small.GPT2SmallModel",
    "AutoModelForCausalLM": "modeling_gpt2small.GPT2SmallForCausalLM",
    "AutoModelForSequenceClassification": "modeling_gpt2small.GPT2SmallForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_gpt2small.GPT2SmallForTokenClassification",
    "AutoModelForQuestionAnswering": "modeling_gpt2small.GPT2SmallForQuestionAnswering",
    # `transformers serve` asks for remote code under this name alone, and else only for the library's own classes.
    "AutoModelForDecision": "modeling_gpt2small.GPT2SmallForCausalLM",
}

GPT2_END_OF_TEXT = 50256


def _setting(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@strict
class GPT2SmallConfig(PreTrainedConfig):
    """Configuration of a GPT-2-style decoder; the defaults are GPT-2 small with its head untied and no qkv bias.

    `dataclasses.fields(GPT2SmallConfig)` has the description of each field as `metadata["help"]`. GPT-2's own names
    (`n_embd`, `n_layer`, `n_head`, `n_positions`, `n_inner`) are accepted too.

    Raises: huggingface_hub's strict-dataclass errors, naming field and value, for a wrong type, a size below 1, a
    hidden size that the heads do not divide, or a dropout probability outside [0, 1).
    """

    model_type = "gpt2small"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings",
        "n_inner": "intermediate_size",
        "activation_function": "hidden_act",
        "layer_norm_epsilon": "layer_norm_eps",
        "num_key_value_heads": "num_attention_heads",  # grouped keys are not offered; cache classes ask for the name
    }
    base_model_tp_plan = {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    base_model_pp_plan = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "embed_positions": (["position_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }
    base_model_fsdp_plan = {
        "embed_tokens": "free_full_weight",
        "embed_positions": "free_full_weight",
        "layers.*": "free_full_weight",
        "norm": "keep_full_weight",
    }

    vocab_size: int = _setting(50257, "Number of token ids: rows of the embedding and of the head.")
    max_position_embeddings: int = _setting(1024, "Context: maximum number of tokens in a row.")
    hidden_size: int = _setting(768, "Width of the residual stream; a multiple of num_attention_heads.")
    num_hidden_layers: int = _setting(12, "Number of blocks.")
    num_attention_heads: int = _setting(12, "Attention heads in each block.")
    intermediate_size: int | None = _setting(None, "Width inside the MLP; unset means 4 x hidden_size.")
    hidden_act: Literal["gelu_pytorch_tanh", "gelu", "relu", "silu"] = _setting(
        "gelu_pytorch_tanh", "Activation inside the MLP; GPT-2's is the tanh form of GELU."
    )
    attention_bias: bool = _setting(False, "Give the query, key and value projections a bias, as OpenAI's GPT-2 has.")
    embd_pdrop: float | int = _setting(0.0, "Dropout on the embeddings while training.")
    attn_pdrop: float | int = _setting(0.0, "Dropout on the attention weights while training.")
    resid_pdrop: float | int = _setting(0.0, "Dropout on the outputs of attention and MLP while training.")
    layer_norm_eps: float | int = _setting(1e-5, "Added to the variance in each LayerNorm.")
    initializer_range: float | int = _setting(0.02, "Standard deviation of the initial weights under init_scheme gpt2.")
    init_scheme: Literal["gpt2", "torch", "small_init", "torch_normal"] = _setting(
        "gpt2",
        "Initial weights. gpt2: normal, initializer_range, residual projections scaled by 1/sqrt(2 x layers). "
        "small_init, torch_normal: the same with sqrt(2/(5 x width)), sqrt(1/(3 x width)). "
        "torch: PyTorch's own initialisation (a tied head then starts at a loss in the hundreds).",
    )
    tie_word_embeddings: bool = _setting(False, "Let the head share the token embedding's weights: fewer parameters.")
    bos_token_id: int | None = _setting(GPT2_END_OF_TEXT, "Id of the beginning-of-text token.")
    eos_token_id: int | list[int] | None = _setting(GPT2_END_OF_TEXT, "Id, or ids, of the end-of-text token.")
    pad_token_id: int | None = _setting(GPT2_END_OF_TEXT, "Id of the padding token.")
    use_cache: bool = _setting(True, "Keep keys and values while generating, so that each step costs one token.")

    def __post_init__(self, **kwargs: Any) -> None:
        """Accept GPT-2's names, set the width of the MLP and name the code of every class."""
        for derived in ("num_key_value_heads", "head_dim"):
            kwargs.pop(derived, None)
        for alias, name in self.attribute_map.items():  # before anything is derived from them
            if alias in kwargs:
                setattr(self, name, kwargs.pop(alias))
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if getattr(self, name) == GPT2_END_OF_TEXT >= self.vocab_size:
                setattr(self, name, None)  # the default, of another vocabulary
        # transformers itself writes only two of these into a saved config; the other classes could not be loaded.
        kwargs["auto_map"] = {**CODE, **(kwargs.get("auto_map") or {})}
        super().__post_init__(**kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Return all values to save; classes that fully_shard derived have the names in the saved code."""
        values = super().to_dict()
        if values.get("auto_map"):
            values["auto_map"] = {
                auto: name.replace(".FSDP", ".") if isinstance(name, str) else name
                for auto, name in values["auto_map"].items()
            }
        return values

    @property
    def head_dim(self) -> int:
        """Width of one attention head. Not a field, because sizes may be changed later."""
        return self.hidden_size // self.num_attention_heads

    @property
    def position_embedding(self) -> str | None:
        """Name of the decoder's module with one trained row for each position; None if the encoding has no weights."""
        return "embed_positions"

    def least_parameters(self) -> int:
        """Return a lower bound of the number of parameters: the embeddings and the matrices of the blocks.

        It needs no PyTorch, so a model that cannot fit in memory is refused at once. Exact counts need the model.
        """
        width = self.hidden_size
        of_block = 4 * width**2 + 2 * width * (self.intermediate_size or 4 * width)
        n_rows = self.vocab_size + (self.max_position_embeddings if self.position_embedding else 0)
        return n_rows * width + self.num_hidden_layers * of_block

    def validate_architecture(self) -> None:
        """Check values and combinations of fields; `@strict` calls it after it checked the types."""
        sizes = ("vocab_size", "max_position_embeddings", "hidden_size", "num_hidden_layers", "num_attention_heads")
        for name in (*sizes, "intermediate_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more.")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}."
            )
        for name in ("embd_pdrop", "attn_pdrop", "resid_pdrop"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give a dropout probability from 0 to below 1.")
        for name in ("layer_norm_eps", "initializer_range"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}; it must be a number above 0.")


GPT2SmallConfig.register_for_auto_class()
