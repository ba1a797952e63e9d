"""Another norm and position encoding, added to a copy of the model: only its configuration and gpt.py change."""

import importlib
import shutil
import sys
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY, tiny_config

FILES = ("configuration_gpt2small.py", "gpt.py", "cpu_linear.py", "modeling_gpt2small.py")
CHANGES = {
    "configuration_gpt2small.py": {'return "embed_positions"': "return None"},
    "gpt.py": {
        "return nn.LayerNorm(config.hidden_size,": "return nn.RMSNorm(config.hidden_size,",
        "return nn.Embedding(config.max_position_embeddings, config.hidden_size)": "return None",
        "self.embed_dropout(hidden_states + self.embed_positions(position_ids))": "self.embed_dropout(hidden_states)",
        "        old = self.embed_positions\n": "        return\n        old = self.embed_positions\n",
        "        if past_key_values is not None:\n": (
            "        query, key = (rotated(part, kwargs['position_ids']) for part in (query, key))\n"
            "        if past_key_values is not None:\n"
        ),
        "\nclass MLP(nn.Module):": """
def rotated(x, position_ids):
    D = x.shape[-1]
    angles = position_ids[:, None, :, None] / 10_000 ** (torch.arange(0, D, 2) / D)
    one, other = x.chunk(2, -1)
    return torch.cat([one * angles.cos() - other * angles.sin(), one * angles.sin() + other * angles.cos()], -1)


class MLP(nn.Module):""",
    },
}


@pytest.fixture
def other(tmp_path, monkeypatch):
    """The modules of a copy with RMSNorm and rotary positions, by name."""
    folder = tmp_path / "rotary_gpt"
    folder.mkdir()
    for name in FILES:
        shutil.copy(REPOSITORY / "gpt2small_hf" / "model" / name, folder)
    for name, changes in CHANGES.items():
        text = (folder / name).read_text(encoding="utf-8")
        for old, new in changes.items():
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (folder / name).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield {Path(name).stem: importlib.import_module(f"rotary_gpt.{Path(name).stem}") for name in FILES}
    for name in [name for name in sys.modules if name.startswith("rotary_gpt")]:
        del sys.modules[name]


def test_norm_and_position_encoding_are_added_in_two_files(other, tmp_path):
    torch.manual_seed(0)
    config = other["configuration_gpt2small"].GPT2SmallConfig(**tiny_config().to_dict())
    model = other["modeling_gpt2small"].GPT2SmallForCausalLM(config).eval()
    names = set(model.state_dict())
    assert not [name for name in names if "positions" in name or name.endswith("norm.bias")]
    ids = torch.randint(1, 100, (1, 20))
    logits = model(ids).logits
    core = other["gpt"].GPT(config).eval()
    core.load_state_dict(model.state_dict())
    torch.testing.assert_close(core(ids), logits)
    # Rotary positions are relative; padding and the cache follow them.
    torch.testing.assert_close(model(ids, position_ids=torch.arange(5, 25)[None]).logits, logits)
    assert not torch.allclose(model(ids, position_ids=3 * torch.arange(20)[None] % 32).logits, logits)
    padded = torch.cat([torch.full((1, 6), 100), ids], dim=1)
    mask = (torch.arange(26) >= 6).long()[None]
    torch.testing.assert_close(model(padded, attention_mask=mask).logits[:, 6:], logits)
    written = model.generate(ids, max_new_tokens=8, do_sample=False, use_cache=True)
    assert torch.equal(written, model.generate(ids, max_new_tokens=8, do_sample=False, use_cache=False))
    with pytest.raises(ValueError, match="the model takes 32"):
        model(torch.zeros(1, 33, dtype=torch.long))
    model.resize_position_embeddings(64)
    assert model(torch.zeros(1, 33, dtype=torch.long)).logits.shape == (1, 33, 101)
    model.save_pretrained(tmp_path / "saved")
    again = type(model).from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(again(ids).logits, logits)
