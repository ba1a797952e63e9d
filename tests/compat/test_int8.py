"""Weights in eight bits on a CPU, through the library's own option; saved, and loaded again."""

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, TorchAoConfig

from compat.published import conversations

quantization = pytest.importorskip("torchao.quantization")


@torch.no_grad()
def loss(model, folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = tokenizer(tokenizer.apply_chat_template(conversations(), tokenize=False), padding=True, return_tensors="pt")
    labels = rows["input_ids"].masked_fill(rows["attention_mask"] == 0, -100)
    return model.eval()(**rows, labels=labels).loss.item()


def test_int8_weights_change_the_loss_little_and_survive_saving(published, tmp_path):
    full = AutoModelForCausalLM.from_pretrained(published)
    option = TorchAoConfig(quantization.Int8WeightOnlyConfig())
    small = AutoModelForCausalLM.from_pretrained(published, quantization_config=option)
    for layer in small.model.layers:
        assert layer.self_attn.q_proj.weight.qdata.dtype == torch.int8
        assert layer.mlp.down_proj.weight.qdata.dtype == torch.int8
    assert small.lm_head.weight is small.model.embed_tokens.weight  # still tied, and in full precision

    before, after = loss(full, published), loss(small, published)
    print(f"loss {before:.6f}, with int8 weights {after:.6f}: {after - before:+.6f}")
    assert before != after
    assert abs(after - before) < 0.005

    small.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        stored = [file.get_tensor(name).dtype for name in file.keys() if "layers.0.mlp.up_proj" in name]  # noqa: SIM118
    assert torch.int8 in stored
    assert len(list(tmp_path.glob("*.py"))) == 4
    assert loss(AutoModelForCausalLM.from_pretrained(tmp_path), published) == after
