"""How much a run takes, and what rules of thumb say of it: parameters, tokens, steps, FLOPs, hours, disk.

Pure arithmetic on a model's sizes; `plan.py` reads a recipe and prints it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from gpt2small_hf.model.configuration_gpt2small import GPT2SmallConfig

# Dense FLOPs a second in bfloat16 with float32 sums, from the vendors' data sheets. Where a name is part of another,
# the longer one comes first.
PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "A10G": 70e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 5090": 209.5e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
}


@dataclass(frozen=True)
class Sizes:
    """Parameters of a model, counted in the three ways that rules of thumb mean."""

    total: int
    """All, a tied head once."""
    embeddings: int
    """Token and position embeddings."""
    multiplied: int
    """Those that every token is multiplied with: the matrices of the blocks, and the head, tied or not."""

    @property
    def non_embedding(self) -> int:
        """All but the embeddings (an untied head is not one)."""
        return self.total - self.embeddings


def sizes(config: GPT2SmallConfig) -> Sizes:
    """Count parameters without making any."""
    C, L, V = config.hidden_size, config.num_hidden_layers, config.vocab_size
    inner = config.intermediate_size or 4 * C
    matrices = L * (4 * C * C + 2 * C * inner)
    biases = L * ((3 * C if config.attention_bias else 0) + C + inner + C)
    norms = (2 * L + 1) * 2 * C
    embeddings = (V + config.max_position_embeddings) * C
    head = 0 if config.tie_word_embeddings else V * C
    return Sizes(matrices + biases + norms + embeddings + head, embeddings, matrices + V * C)


def flops_per_token(config: GPT2SmallConfig, seq_len: int) -> int:
    """FLOPs of training on one token, forward and backward: 6 a multiplied parameter, and attention's 12·L·C·T.

    (Chowdhery et al. 2022, PaLM, appendix B; the causal half of the scores is counted too, as is the custom.)
    """
    attention = 12 * config.num_hidden_layers * config.hidden_size * seq_len
    return 6 * sizes(config).multiplied + attention


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 FLOPs a second of a device, found by its name; None for one that is not known."""
    return next((flops for name, flops in PEAK_FLOPS.items() if name.lower() in device_name.lower()), None)


def steps_of_epochs(n_rows: int, args: Any, n_devices: int) -> int:
    """Optimizer steps of passes over some rows, counted as the Trainer counts: the last step of a pass may be small.

    `args`: the Trainer's, with its batch size, accumulation and epochs.
    """
    batches = math.ceil(n_rows / (args.per_device_train_batch_size * n_devices))
    return max(1, math.ceil(args.num_train_epochs * math.ceil(batches / args.gradient_accumulation_steps)))


def steps_for(tokens: float, tokens_per_step: int) -> int:
    """Whole steps that see at least so many tokens."""
    return max(1, math.ceil(tokens / tokens_per_step))


def wanted_tokens(
    config: GPT2SmallConfig, tokens: int | None, tokens_per_parameter: float | None, counted: str
) -> float | None:
    """Tokens to train on, as asked for outright or as a multiple of `all` or `non_embedding` parameters; else None."""
    if tokens_per_parameter is None:
        return tokens
    n = sizes(config)
    return tokens_per_parameter * {"all": n.total, "non_embedding": n.non_embedding}[counted]


# ---- rules of thumb: advice, never applied by itself ----------------------------------------------------------------


def deepseek_learning_rate(flops: float) -> float:
    """Peak learning rate for a budget of training FLOPs: 0.3118·C^-0.1250 (Bi et al. 2024, DeepSeek LLM)."""
    return 0.3118 * flops**-0.125


def deepseek_batch_tokens(flops: float) -> float:
    """Tokens a step for a budget of training FLOPs: 0.2920·C^0.3271 (Bi et al. 2024, DeepSeek LLM)."""
    return 0.2920 * flops**0.3271


def cerebras_batch_rows(tokens: float) -> float:
    """Rows of 2,048 tokens a step for so many training tokens: 0.0306·D^0.383 (Bergsma et al. 2025, Power Lines)."""
    return 0.0306 * tokens**0.383


def cerebras_timescale(tokens_per_parameter: float) -> float:
    """AdamW's memory, as a share of training, at its best: 1.084·TPP^-0.527 (Bergsma et al. 2025, Power Lines)."""
    return 1.084 * tokens_per_parameter**-0.527


def cerebras_weight_decay(
    batch_tokens: float, learning_rate: float, tokens: float, tokens_per_parameter: float
) -> float:
    """Weight decay that gives AdamW that memory: B / (lr·D·tau), B and D in tokens."""
    return batch_tokens / (learning_rate * tokens * cerebras_timescale(tokens_per_parameter))
