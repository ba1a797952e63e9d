"""The configuration: GPT-2's sizes, clear refusals, and files that name every class."""

import json

import pytest
import torch
import transformers
from conftest import tiny_config
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from gpt2small_hf import GPT, GPT2SmallConfig, GPT2SmallForCausalLM, GPT2SmallModel


@pytest.mark.parametrize(
    ("variant", "parameters"),
    [
        ({}, 163_009_536),
        ({"tie_word_embeddings": True}, 124_412_160),
        ({"attention_bias": True}, 163_009_536 + 27_648),
        ({"tie_word_embeddings": True, "attention_bias": True}, 124_439_808),  # OpenAI's GPT-2 small
    ],
    ids=str,
)
def test_default_sizes_are_those_of_gpt2_small(variant, parameters):
    with torch.device("meta"):
        assert GPT2SmallForCausalLM(GPT2SmallConfig(**variant)).num_parameters() == parameters
        assert sum(p.numel() for p in GPT(GPT2SmallConfig(**variant)).parameters()) == parameters


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"hidden_size": 33}, "hidden_size 33 is not a multiple of num_attention_heads 2"),
        ({"vocab_size": "99"}, "'vocab_size' expected int, got str"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"resid_pdrop": 1.0}, "resid_pdrop is 1.0"),
        ({"layer_norm_eps": 0}, "layer_norm_eps is 0"),
        ({"hidden_act": "swish"}, "expected one of .*gelu_pytorch_tanh.* got swish"),
        ({"init_scheme": "gpt3"}, "expected one of .*small_init.* got gpt3"),
    ],
    ids=str,
)
def test_wrong_value_is_named(wrong, words):
    with pytest.raises(StrictDataclassError, match=words):
        tiny_config(**wrong)


def test_gpt2s_own_names_are_understood():
    config = GPT2SmallConfig(n_embd=24, n_layer=3, n_head=4, n_positions=48)
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (24, 3, 4)
    assert (config.max_position_embeddings, config.intermediate_size, config.head_dim) == (48, 96, 6)


def test_what_follows_from_other_fields_follows_later_changes_too(tmp_path):
    tiny_config().save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, num_attention_heads=4)
    assert (config.head_dim, config.num_key_value_heads) == (4, 4)
    config.hidden_size = 64
    assert config.head_dim == 16
    # Older files, and other people's, carry both names as fields: they are not taken for settings.
    assert tiny_config(head_dim=99, num_key_value_heads=1).num_attention_heads == 2


def test_saved_config_names_the_code_of_every_class_and_comes_back_equal(tmp_path):
    config = tiny_config(attention_bias=True, init_scheme="small_init")
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert {"AutoConfig", "AutoModel", "AutoModelForCausalLM"} <= set(saved["auto_map"])
    assert GPT2SmallConfig.from_pretrained(tmp_path).to_dict() == config.to_dict() | {"architectures": None}


def test_every_field_has_a_help_text():
    own = GPT2SmallConfig.__annotations__
    texts = {name: GPT2SmallConfig.__dataclass_fields__[name].metadata.get("help", "") for name in own}
    assert len(texts) >= 19
    assert [name for name, text in texts.items() if not text.endswith(".") and not text.endswith(").")] == []


def test_auto_classes_know_the_model_type():
    config = AutoConfig.for_model(
        "gpt2small", **{k: v for k, v in tiny_config().to_dict().items() if k != "model_type"}
    )
    assert type(config) is GPT2SmallConfig
    assert type(AutoModel.from_config(config)) is GPT2SmallModel
    assert type(AutoModelForCausalLM.from_config(config)) is GPT2SmallForCausalLM


def test_smaller_vocabulary_has_no_default_special_tokens():
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    small = GPT2SmallConfig(vocab_size=256, eos_token_id=7)
    assert [getattr(small, name) for name in names] == [None, 7, None]
    assert {getattr(GPT2SmallConfig(), name) for name in names} == {50256}


def test_model_type_and_class_names_are_not_those_of_transformers():
    # Serving engines look a class up in transformers before they ask the folder for its own.
    assert GPT2SmallConfig.model_type not in CONFIG_MAPPING_NAMES
    for entry in GPT2SmallConfig().auto_map.values():
        assert not hasattr(transformers, entry.split(".")[1])


def test_evaluation_gathers_no_cache(tmp_path):
    model = GPT2SmallForCausalLM(tiny_config())
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(3)]
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, per_device_eval_batch_size=2)
    predictions = Trainer(model, args).predict(rows).predictions
    assert predictions.shape == (3, 8, 101)
