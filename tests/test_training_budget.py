"""Counts against real models, and the published figures of the reference series and of the rules of thumb."""

import pytest
from conftest import tiny_config
from hypothesis import given
from hypothesis import strategies as st

from gpt2small_hf import GPT2SmallConfig, GPT2SmallForCausalLM
from gpt2small_hf.training.budget import (
    cerebras_batch_rows,
    cerebras_timescale,
    cerebras_weight_decay,
    deepseek_batch_tokens,
    deepseek_learning_rate,
    flops_per_token,
    peak_flops,
    sizes,
    steps_for,
    wanted_tokens,
)

SERIES_TOKENS = 3_260_252_160


@pytest.mark.parametrize(
    "variant",
    [{}, {"tie_word_embeddings": True}, {"attention_bias": True}, {"intermediate_size": 24, "num_hidden_layers": 3}],
    ids=str,
)
def test_counted_parameters_are_those_of_a_real_model(variant):
    model = GPT2SmallForCausalLM(tiny_config(**variant))
    counted = sizes(model.config)
    embeddings = sum(module.weight.numel() for module in (model.model.embed_tokens, model.model.embed_positions))
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name)
    head = model.lm_head.weight.numel() if model.config.tie_word_embeddings else 0
    assert counted.total == model.num_parameters()
    assert (counted.embeddings, counted.multiplied) == (embeddings, matrices + head)
    assert counted.non_embedding == counted.total - embeddings


@pytest.mark.parametrize(
    ("variant", "total"),
    [
        ({}, 163_009_536),
        ({"tie_word_embeddings": True}, 124_412_160),
        ({"tie_word_embeddings": True, "attention_bias": True}, 124_439_808),
    ],
)
def test_the_series_own_sizes_and_paper_flops_come_out(variant, total):
    config = GPT2SmallConfig(**variant)
    assert sizes(config).total == total
    assert flops_per_token(config, 1024) == 854_438_400  # tied or not: the head is multiplied with either way


def test_twenty_tokens_a_parameter_are_the_series_steps_and_tokens():
    tokens = wanted_tokens(GPT2SmallConfig(), None, 20, "all")
    assert tokens == 3_260_190_720
    assert steps_for(tokens, 96 * 1024) == 33_165
    assert SERIES_TOKENS == 33_165 * 96 * 1024
    assert wanted_tokens(GPT2SmallConfig(), None, 20, "non_embedding") == 20 * 123_625_728
    assert wanted_tokens(GPT2SmallConfig(), 1000, None, "all") == 1000
    assert wanted_tokens(GPT2SmallConfig(), None, None, "all") is None


@given(st.integers(1, 10**12), st.integers(1, 10**7))
def test_steps_see_at_least_the_tokens_and_not_a_whole_step_more(tokens, per_step):
    assert tokens <= steps_for(tokens, per_step) * per_step < tokens + per_step


def test_rules_of_thumb_give_the_figures_that_were_published():
    C = 6 * 163_009_536 * SERIES_TOKENS
    assert deepseek_learning_rate(C) == pytest.approx(1.517e-3, rel=1e-3)
    assert deepseek_batch_tokens(C) == pytest.approx(329_500, rel=1e-3)
    assert cerebras_batch_rows(SERIES_TOKENS) == pytest.approx(134.7, abs=0.05)
    assert cerebras_timescale(20) == pytest.approx(0.22356, abs=1e-5)
    # The series prints 0.33724 from a rounded tau.
    assert cerebras_weight_decay(96, 4e-4, 3_183_840, 20) == pytest.approx(0.33719, abs=1e-5)


def test_a_device_is_found_by_its_full_name_and_others_are_unknown():
    assert peak_flops("NVIDIA H200") == peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA L40S") == 362e12
    assert peak_flops("Abacus") is None
