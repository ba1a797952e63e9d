"""Counts are compared to real models, and to published figures of the reference series and the rules of thumb."""

from types import SimpleNamespace

import pytest
from accelerate.data_loader import BatchSamplerShard
from conftest import tiny_config
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler

from gpt2small_hf import GPT2SmallConfig, GPT2SmallForCausalLM
from gpt2small_hf.config.run import RunArguments
from gpt2small_hf.training.budget import (
    PEAK_TFLOPS,
    PRECISIONS,
    SERIES_FLOPS_A_TOKEN,
    SERIES_TOKENS,
    Sizes,
    cerebras_batch_rows,
    cerebras_timescale,
    cerebras_weight_decay,
    deepseek_batch_tokens,
    deepseek_flops,
    deepseek_learning_rate,
    find_device,
    flops_per_token,
    lora_parameters,
    measured_mfu,
    one_pass,
    peak_flops,
    precision_of,
    sizes,
    steps_for_tokens,
    suggest_device,
)


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
    assert counted.head == model.lm_head.weight.numel()


@pytest.mark.parametrize("seq_len", [2, 17, 32])
@pytest.mark.parametrize(
    "variant",
    [{}, {"tie_word_embeddings": True}, {"attention_bias": True}, {"intermediate_size": 24, "num_hidden_layers": 3}],
    ids=str,
)
def test_counts_equal_the_published_formulas_of_gpt2(variant, seq_len):
    """The formulas are PaLM's (Chowdhery et al. 2022, appendix B), and LoRA's matrices counted by hand."""
    config = tiny_config(**variant)
    C, L, inner = config.hidden_size, config.num_hidden_layers, config.intermediate_size
    multiplied = L * (4 * C * C + 2 * C * inner) + config.vocab_size * C
    biases = L * ((3 * C if config.attention_bias else 0) + C + inner + C)
    tables = (config.vocab_size + config.max_position_embeddings) * C
    total = multiplied + biases + (2 * L + 1) * 2 * C + tables
    total -= config.vocab_size * C if config.tie_word_embeddings else 0
    attention = 12 * L * C * seq_len
    adapter = L * 4 * (4 * (C + C) + 2 * (C + inner))
    assert sizes(config) == Sizes(total, tables, multiplied, config.vocab_size * C)
    assert flops_per_token(config, seq_len) == 6 * multiplied + attention
    assert lora_parameters(config, 4) == adapter
    assert flops_per_token(config, seq_len, 4) == 4 * multiplied + 6 * adapter + attention


@pytest.mark.parametrize(
    ("variant", "total"),
    [
        ({}, 163_009_536),
        ({"tie_word_embeddings": True}, 124_412_160),
        ({"tie_word_embeddings": True, "attention_bias": True}, 124_439_808),
    ],
)
def test_sizes_and_flops_equal_those_of_the_series(variant, total):
    config = GPT2SmallConfig(**variant)
    assert sizes(config).total == total
    assert flops_per_token(config, 1024) == 854_438_400  # tied or not, as tokens are multiplied with the head


def test_twenty_tokens_per_parameter_give_the_steps_of_the_series():
    by_all = RunArguments(tokens_per_parameter=20)
    assert steps_for_tokens(GPT2SmallConfig(), by_all, 1) == 3_260_190_720
    assert steps_for_tokens(GPT2SmallConfig(), by_all, 96 * 1024) == 33_165
    assert SERIES_TOKENS == 33_165 * 96 * 1024
    without_embeddings = RunArguments(tokens_per_parameter=20, parameters_counted="non_embedding")
    assert steps_for_tokens(GPT2SmallConfig(), without_embeddings, 1) == 20 * 123_625_728
    assert steps_for_tokens(GPT2SmallConfig(), RunArguments(), 1) is None


@given(st.integers(1, 10**12), st.integers(1, 10**7))
def test_steps_exceed_the_tokens_by_less_than_a_step(tokens, per_step):
    n_steps = steps_for_tokens(GPT2SmallConfig(), RunArguments(tokens=tokens), per_step)
    assert tokens <= (n_steps or 0) * per_step < tokens + per_step


@given(
    n_rows=st.integers(1, 200),
    size=st.integers(1, 9),
    accumulation=st.integers(1, 5),
    n_devices=st.integers(1, 4),
    drop_last=st.booleans(),
)
def test_epoch_has_the_steps_and_rows_of_accelerate(n_rows, size, accumulation, n_devices, drop_last):
    batches = BatchSampler(range(n_rows), size, drop_last)
    shards = [BatchSamplerShard(batches, n_devices, i) if n_devices > 1 else batches for i in range(n_devices)]
    args = SimpleNamespace(
        per_device_train_batch_size=size, gradient_accumulation_steps=accumulation, dataloader_drop_last=drop_last
    )
    counted = one_pass(n_rows, args, n_devices)
    assert counted.rows == sum(len(batch) for shard in shards for batch in shard)
    assert counted.steps == max(1, -(-len(shards[0]) // accumulation))
    assert counted.rows_in(3 * counted.steps) == 3 * counted.rows
    assert counted.rows_in(3 * counted.steps + 1) == 3 * counted.rows + min(counted.rows, counted.rows_per_step)


def test_rules_of_thumb_give_the_published_figures():
    config = GPT2SmallConfig()
    C = deepseek_flops(config, 1024, SERIES_TOKENS)
    assert C == (72 * 12 * 768**2 + 12 * 12 * 768 * 1024) * SERIES_TOKENS
    assert deepseek_flops(GPT2SmallConfig(tie_word_embeddings=True), 1024, SERIES_TOKENS) == C
    assert deepseek_learning_rate(C) == pytest.approx(1.605e-3, rel=1e-3)
    assert deepseek_batch_tokens(C) == pytest.approx(284_322, rel=1e-4)
    # The series uses C = 5e18.
    assert deepseek_learning_rate(5e18) == pytest.approx(1.434e-3, rel=1e-3)
    assert deepseek_batch_tokens(5e18) == pytest.approx(381_782, rel=1e-4)
    assert cerebras_batch_rows(SERIES_TOKENS) == pytest.approx(134.7, abs=0.05)
    assert cerebras_timescale(20) == pytest.approx(0.22356, abs=1e-5)
    # The series prints 0.33724 from a rounded tau.
    assert cerebras_weight_decay(96, 4e-4, 3_183_840, 20) == pytest.approx(0.33719, abs=1e-5)
    assert cerebras_weight_decay(96, 1.4e-3, 3_183_840, 20) == pytest.approx(0.0963, abs=1e-4)


def test_measured_mfu_is_the_speed_of_the_series_over_the_peak():
    assert flops_per_token(GPT2SmallConfig(), 1024) == SERIES_FLOPS_A_TOKEN
    assert measured_mfu("bfloat16") == measured_mfu("float16")
    # 266,285 tokens/s on eight A100: 266,285 x 854,438,400 / 8 / 312e12
    assert measured_mfu("float16") == pytest.approx({"A100": 0.0912, "RTX 3090": 0.2397}, abs=1e-4)
    assert measured_mfu("tf32") == pytest.approx({"RTX 3090": 0.3697}, abs=1e-4)
    assert measured_mfu("float32") == pytest.approx({"A100": 0.6124, "RTX 3090": 0.3024}, abs=1e-3)


@pytest.mark.parametrize(
    ("full_name", "device"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-PCIE-40GB", "A100 PCIe"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A10G", "A10G"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX 4070 Ti SUPER"),
        ("AMD Instinct MI300X", "MI300X"),
        ("RTX4090", "RTX 4090"),
        ("rtx-4090", "RTX 4090"),
        ("h100 pcie", "H100 PCIe"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("H1000", None),
        ("NVIDIA A100X", None),
        ("Abacus", None),
        ("NVIDIA", None),
    ],
)
def test_device_is_found_by_its_full_name(full_name, device):
    assert find_device(full_name) == device
    assert (peak_flops(full_name, "float32") is None) == (device is None)


def test_unknown_device_suggests_the_nearest_or_lists_all():
    assert suggest_device("H1000") == "Did you mean H100?"
    assert suggest_device("4090") == "Did you mean RTX 4090?"
    assert suggest_device("Abacus").startswith("Known: GB200, B200, ")


@pytest.mark.parametrize(
    ("device", "tflops"),
    [
        ("H100", (989, 989, 494.5, 67)),
        ("H100 NVL", (835.5, 835.5, 417.5, 60)),
        ("A100", (312, 312, 156, 19.5)),
        ("L4", (121, 121, 60, 30.3)),
        ("L40", (181, 181, 90.5, 90.5)),
        ("RTX 3090", (71, 71, 35.6, 35.6)),
        ("T4", (None, 65, None, 8.1)),
    ],
)
def test_peak_flops_are_the_dense_figures_of_the_data_sheets(device, tflops):
    found = [peak_flops(device, precision) for precision in PRECISIONS]
    assert found == [None if value is None else pytest.approx(value * 1e12) for value in tflops]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_peaks_do_not_rise_with_precision(precision):
    wider = PRECISIONS[PRECISIONS.index(precision) :]
    for device in PEAK_TFLOPS:
        peaks = [peak for name in wider if (peak := peak_flops(device, name)) is not None]
        assert peaks == sorted(peaks, reverse=True), device


@pytest.mark.parametrize(
    ("words", "precision"),
    [
        ({"bf16": True, "tf32": True}, "bfloat16"),
        ({"fp16": True}, "float16"),
        ({"tf32": True}, "tf32"),
        ({"torch_compile": True}, "tf32"),
        ({"torch_compile": True, "tf32": False}, "float32"),
        ({}, "float32"),
    ],
    ids=str,
)
def test_precision_follows_the_flags(words, precision):
    defaults = {"bf16": False, "fp16": False, "tf32": None, "torch_compile": False}
    assert precision_of(SimpleNamespace(**{**defaults, **words})) == precision
