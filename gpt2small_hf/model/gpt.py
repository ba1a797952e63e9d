# Copyright 2026 the authors of gpt2small_hf. Licensed under the Apache License, Version 2.0.
"""GPT-2 in plain PyTorch: token ids → logits. All arithmetic of the model is here, without Hugging Face's libraries.

`GPT(config)(input_ids)` is a complete model; `config` is any object with the fields of `GPT2SmallConfig`.
`modeling_gpt2small.py` adds loss, cache, masks and generation to the same modules.
"""

# Shapes, throughout:
#   B batch · T positions · S positions attended to (S = T without a cache) · C hidden_size
#   H heads · D per head (C = H·D) · I intermediate_size · V vocab_size

import math
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# ---- activation, norm, position encoding -------------------------------------------------------------------------
# Each is chosen here only. Another one is a field or value of the config, and a branch here.

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {  # by config.hidden_act
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),  # GPT-2's own
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
}


def make_norm(config: Any) -> nn.Module:
    """Create a norm, of which a block has two and the decoder one at its end: GPT-2's LayerNorm."""
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)


def make_position_embedding(config: Any) -> nn.Embedding:
    """Create what adds positions to the token embeddings: GPT-2's learned vectors, one for each position.

    An encoding inside attention (rotary, ALiBi) belongs into `Attention.forward`, which has the `position_ids`.
    """
    return nn.Embedding(config.max_position_embeddings, config.hidden_size)


# ---- attention and loss -------------------------------------------------------------------------------------------


# Positions whose logits the chunked loss has in memory at once. PyTorch's default for a vocabulary of 50,000 is 16 on a
# CPU, which makes it slower than the ordinary loss.
ROWS_AT_A_TIME = 512


def fused_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention in PyTorch's fused kernel, which never has all T x S weights in memory.

    Args:
        module: unused; part of the signature that attention functions share.
        query: (B, H, T, D).
        key: (B, H, S, D).
        value: (B, H, S, D).
        attention_mask: (B, 1, T, S), true or 0 where attention is allowed; None means causal, with S = T.
        scaling: factor on the scores.
        dropout: probability of dropping an attention weight.
        kwargs: unused.

    Returns: the attended values, (B, T, H, D), and None in place of the weights.
    """
    is_causal = bool(attention_mask is None and query.shape[2] > 1)  # a Python bool, also for a tracer
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling, is_causal=is_causal
    )
    return out.transpose(1, 2), None


def explicit_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Causal attention step by step, which returns the attention weights.

    Takes what `fused_attention` takes, except that a mask is additive: 0 where attention is allowed, very negative
    elsewhere. Returns: the attended values, (B, T, H, D), and the weights, (B, H, T, S).
    """
    scores = query @ key.transpose(-1, -2) * scaling  # (B, H, T, S)
    if attention_mask is not None:
        scores = scores + attention_mask
    elif kwargs.get("is_causal") is not False:
        T, S = scores.shape[-2:]
        future = torch.ones(T, S, dtype=torch.bool, device=scores.device).triu(S - T + 1)
        scores = scores.masked_fill(future, -torch.inf)
    # In half precision a sum over a thousand exponentials loses digits: softmax is taken in float32.
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = F.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2), weights


def loss_without_logits(
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor | None = None,
    num_items_in_batch: Tensor | int | None = None,
    shift_labels: Tensor | None = None,
    ignore_index: int = -100,
    **kwargs: Any,
) -> Tensor:
    """Mean cross-entropy of a head without bias, in nats per token, with the logits of few positions at a time.

    Equal in value and gradient to `cross_entropy(hidden_states @ weight.T, …)`, whose logits take more memory than all
    the rest of a small model. Follows autocast. Has no second derivative.

    Args:
        hidden_states: (B, T, C).
        weight: (V, C), the head's.
        labels: (B, T), not shifted: the token at t + 1 is the target of position t.
        num_items_in_batch: divides the sum; unset, the number of targets does.
        shift_labels: (B, T), the targets themselves, in place of `labels`.
        ignore_index: label of tokens without a loss.
        kwargs: unused.

    Raises: ValueError if the labels do not have the shape of the input.
    """
    if shift_labels is None:
        assert labels is not None
        if labels.shape != hidden_states.shape[:-1]:
            raise ValueError(f"labels are {tuple(labels.shape)}, the input is {tuple(hidden_states.shape[:-1])}.")
        shift_labels = F.pad(labels[:, 1:], (0, 1), value=ignore_index)
    targets = shift_labels.reshape(-1).to(hidden_states.device)
    device_type = hidden_states.device.type
    if torch.is_autocast_enabled(device_type):  # which does not cover this operation
        dtype = torch.get_autocast_dtype(device_type)
        hidden_states, weight = hidden_states.to(dtype), weight.to(dtype)
    full = hidden_states.dtype == torch.float32
    losses = F.linear_cross_entropy(
        hidden_states.reshape(-1, hidden_states.shape[-1]),
        weight,
        targets,
        # The result has the dtype of the input: the sum of thousands of losses would keep two digits in half precision.
        reduction="sum" if full else "none",
        ignore_index=ignore_index,
        options=nn.LinearCrossEntropyOptions(batch_chunk_size=ROWS_AT_A_TIME, chunking_method=None),
    )
    count = (targets != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
    count = torch.as_tensor(count, device=losses.device)
    # Without targets the ordinary loss is nan too, but its gradient is 0.
    loss = losses.float().sum() / count.masked_fill(count == 0, 1)
    return loss.masked_fill(count == 0, torch.nan)


class Attention(nn.Module):
    """Multi-head self-attention with separate query, key, value and output projections."""

    def __init__(self, config: Any, layer_idx: int, linear: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        C = config.hidden_size
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = C // config.num_attention_heads
        # Read by other attention functions (flash, flex, serving engines):
        self.num_key_value_groups = 1
        self.scaling = self.head_dim**-0.5
        self.is_causal = True

        self.q_proj = linear(C, C, bias=config.attention_bias)
        self.k_proj = linear(C, C, bias=config.attention_bias)
        self.v_proj = linear(C, C, bias=config.attention_bias)
        self.o_proj = residual_writer(linear(C, C))
        self.attn_pdrop = config.attn_pdrop
        self.resid_dropout = nn.Dropout(config.resid_pdrop)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        past_key_values: Any = None,
        attend: Callable[..., tuple[Tensor, Tensor | None]] = fused_attention,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Mix positions.

        Args:
            hidden_states: (B, T, C).
            attention_mask: passed to `attend`.
            past_key_values: an object whose `update(key, value, layer_idx)` returns all keys and values seen so far.
            attend: attention function with the signature of `fused_attention`.
            kwargs: passed to `attend`; they include `position_ids`, (B or 1, T).

        Returns: (B, T, C), and the attention weights or None.
        """
        B, T = hidden_states.shape[:2]
        # The number of heads is -1, because under tensor parallelism a process has only some of them.
        query = self.q_proj(hidden_states).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, H, T, D)
        key = self.k_proj(hidden_states).view(B, T, -1, self.head_dim).transpose(1, 2)
        value = self.v_proj(hidden_states).view(B, T, -1, self.head_dim).transpose(1, 2)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)  # (B, H, S, D)

        dropout = self.attn_pdrop if self.training else 0.0
        mixed, weights = attend(
            self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )
        mixed = self.o_proj(mixed.reshape(B, T, -1))
        return self.resid_dropout(mixed), weights


class MLP(nn.Module):
    """Two linear layers with an activation between them, for each position separately."""

    def __init__(self, config: Any, linear: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.up_proj = linear(config.hidden_size, config.intermediate_size)
        self.down_proj = residual_writer(linear(config.intermediate_size, config.hidden_size))
        self.activation = ACTIVATIONS[config.hidden_act]
        self.resid_dropout = nn.Dropout(config.resid_pdrop)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(B, T, C) → (B, T, C)."""
        return self.resid_dropout(self.down_proj(self.activation(self.up_proj(hidden_states))))


class Block(nn.Module):
    """One layer: attention, then MLP, each of which adds to the residual stream (pre-LayerNorm)."""

    linear: type[nn.Linear] = nn.Linear
    """Class of the linear layers. A subclass may compute the same with other kernels."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.input_layernorm = make_norm(config)
        self.self_attn = Attention(config, layer_idx, self.linear)
        self.post_attention_layernorm = make_norm(config)
        self.mlp = MLP(config, self.linear)

    def forward(self, hidden_states: Tensor, **context: Any) -> Tensor:
        """(B, T, C) → (B, T, C). `context` is passed to the attention."""
        mixed, _ = self.self_attn(self.input_layernorm(hidden_states), **context)
        hidden_states = hidden_states + mixed
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class Decoder(nn.Module):
    """Embeddings, blocks and the final norm: token ids → hidden states."""

    block: type[Block] = Block

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.build(config)

    def build(self, config: Any) -> None:
        """Create the layers; separate from `__init__` for classes with another parent."""
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = make_position_embedding(config)
        self.embed_dropout = nn.Dropout(config.embd_pdrop)
        self.layers = nn.ModuleList([self.block(config, layer_idx) for layer_idx in range(config.num_hidden_layers)])
        self.norm = make_norm(config)

    def add_positions(self, hidden_states: Tensor, position_ids: Tensor) -> Tensor:
        """Add position embeddings: (B, T, C) and (B or 1, T) → (B, T, C)."""
        return self.embed_dropout(hidden_states + self.embed_positions(position_ids))

    def resize_positions(self) -> None:
        """Apply a change of `config.max_position_embeddings`: old rows stay, new ones are initialised."""
        old = self.embed_positions
        new = make_position_embedding(self.config).to(old.weight)
        init_weights(new, self.config)
        kept = min(old.num_embeddings, new.num_embeddings)
        new.weight.data[:kept] = old.weight.data[:kept]
        self.embed_positions = new.requires_grad_(old.weight.requires_grad)

    def run_layers(self, hidden_states: Tensor, depth: int | None = None, **context: Any) -> Tensor:
        """All blocks, or the first `depth`, and the final norm: (B, T, C) → (B, T, C).

        `context` is passed to each block.
        """
        for layer in islice(self.layers, depth):
            hidden_states = layer(hidden_states, **context)
        return self.norm(hidden_states)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Token ids (B, T) → hidden states (B, T, C). Raises: ValueError for rows longer than the context."""
        T, limit = input_ids.shape[1], self.config.max_position_embeddings
        if limit < T:
            raise ValueError(f"The input has {T} positions, the model takes {limit} (max_position_embeddings).")
        position_ids = torch.arange(T, device=input_ids.device).unsqueeze(0)  # (1, T)
        hidden_states = self.add_positions(self.embed_tokens(input_ids), position_ids)
        return self.run_layers(hidden_states, position_ids=position_ids)


class GPT(nn.Module):
    """The language model: token ids → logits over the next token."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.apply(partial(init_weights, config=config))
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        """Token ids (B, T) → logits (B, T, V); position t scores the token at t + 1."""
        return self.lm_head(self.model(input_ids))


def residual_writer(linear: nn.Linear) -> nn.Linear:
    """Mark a Linear whose output is added to the residual stream, for `init_weights`."""
    linear.writes_to_residual = True  # type: ignore[assignment]  # a plain attribute, not a parameter
    return linear


def init_std(config: Any) -> float:
    """Standard deviation of the normal draws of `config.init_scheme`.

    gpt2: `initializer_range` (Radford et al. 2019). small_init: sqrt(2 / 5C) (Nguyen and Salazar 2019).
    torch_normal: sqrt(1 / 3C), the standard deviation that `nn.Linear`'s own uniform draw has at width C.
    """
    return {
        "gpt2": config.initializer_range,
        "small_init": math.sqrt(2 / (5 * config.hidden_size)),
        "torch_normal": math.sqrt(1 / (3 * config.hidden_size)),
    }[config.init_scheme]


def init_weights(module: nn.Module, config: Any) -> None:
    """Initialise the weights of one module, without its children: use it with `Module.apply`.

    Scheme `torch` is PyTorch's own initialisation, with N(0, 1) embeddings. The others are normal with standard
    deviation `init_std`; biases start at 0 and norms at the identity.
    """
    if config.init_scheme == "torch":
        if isinstance(module, (nn.Linear, nn.Embedding, nn.LayerNorm)):
            module.reset_parameters()
        return
    if isinstance(module, nn.Linear):
        std = init_std(config)
        if getattr(module, "writes_to_residual", False):
            # Two per block: without this the stream's variance grows with depth (GPT-2 paper, section 2.3).
            std /= math.sqrt(2 * config.num_hidden_layers)
        nn.init.normal_(module.weight, std=std)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=init_std(config))
    elif isinstance(module, nn.LayerNorm):
        nn.init.ones_(module.weight)
        nn.init.zeros_(module.bias)
