"""Other GPT-2s ↔ ours: equal logits against code of their own shape, exact round trips, clear errors, whole folders."""

import json
import math
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from conftest import run_script, tiny_config
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, GPT2Model

from gpt2small_hf import GPT2SmallForCausalLM
from gpt2small_hf.commands.convert import main
from gpt2small_hf.conversion.convert import convert
from gpt2small_hf.conversion.layouts import (
    NANOGPT,
    REFERENCE,
    TRANSFORMERS,
    from_ours,
    own_layout,
    pieces,
    shapes,
    to_ours,
)
from gpt2small_hf.conversion.readers import as_gpt2, read, with_weights
from gpt2small_hf.errors import UsageError
from gpt2small_hf.runs.files import exclusive_writer

V, T, C, H, L = 101, 32, 16, 2, 2
IDS = torch.randint(V, (2, T), generator=torch.Generator().manual_seed(0))


# ---- other people's models, as their own code would compute them --------------------------------------------------


def tanh_gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


class ReferenceNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(C)), nn.Parameter(torch.zeros(C))

    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        return self.scale * centred / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5) + self.shift


class ReferenceAttention(nn.Module):
    def __init__(self, qkv_bias):
        super().__init__()
        self.W_query, self.W_key, self.W_value = (nn.Linear(C, C, bias=qkv_bias) for _ in range(3))
        self.out_proj = nn.Linear(C, C)
        self.register_buffer("mask", torch.triu(torch.ones(T, T), diagonal=1))

    def forward(self, x):
        mixed = []
        q, k, v = self.W_query(x), self.W_key(x), self.W_value(x)
        for head in range(H):
            part = slice(head * C // H, (head + 1) * C // H)
            scores = q[..., part] @ k[..., part].transpose(1, 2) / (C // H) ** 0.5
            scores = scores.masked_fill(self.mask.bool()[: x.shape[1], : x.shape[1]], -torch.inf)
            mixed.append(scores.softmax(-1) @ v[..., part])
        return self.out_proj(torch.cat(mixed, dim=-1))


class ReferenceBlock(nn.Module):
    def __init__(self, qkv_bias):
        super().__init__()
        self.att = ReferenceAttention(qkv_bias)
        self.ff = nn.Module()
        self.ff.layers = nn.ModuleList([nn.Linear(C, 4 * C), nn.Identity(), nn.Linear(4 * C, C)])
        self.norm1, self.norm2 = ReferenceNorm(), ReferenceNorm()

    def forward(self, x):
        x = x + self.att(self.norm1(x))
        return x + self.ff.layers[2](tanh_gelu(self.ff.layers[0](self.norm2(x))))


class ReferenceModel(nn.Module):
    def __init__(self, qkv_bias, tied):
        super().__init__()
        self.tok_emb, self.pos_emb = nn.Embedding(V, C), nn.Embedding(T, C)
        self.trf_blocks = nn.ModuleList([ReferenceBlock(qkv_bias) for _ in range(L)])
        self.final_norm = ReferenceNorm()
        self.out_head = None if tied else nn.Linear(C, V, bias=False)

    def forward(self, ids):
        x = self.tok_emb(ids) + self.pos_emb(torch.arange(ids.shape[1]))
        for block in self.trf_blocks:
            x = block(x)
        return self.final_norm(x) @ (self.tok_emb if self.out_head is None else self.out_head).weight.T


class NanoNorm(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(C)), nn.Parameter(torch.zeros(C)) if bias else None

    def forward(self, x):
        return F.layer_norm(x, (C,), self.weight, self.bias, 1e-5)


class NanoBlock(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.ln_1, self.ln_2, self.attn, self.mlp = NanoNorm(bias), NanoNorm(bias), nn.Module(), nn.Module()
        self.attn.c_attn, self.attn.c_proj = nn.Linear(C, 3 * C, bias=bias), nn.Linear(C, C, bias=bias)
        self.attn.register_buffer("bias", torch.tril(torch.ones(T, T))[None, None])
        self.mlp.c_fc, self.mlp.c_proj = nn.Linear(C, 4 * C, bias=bias), nn.Linear(4 * C, C, bias=bias)

    def forward(self, x):
        n = x.shape[1]
        q, k, v = (y.unflatten(2, (H, -1)).transpose(1, 2) for y in self.attn.c_attn(self.ln_1(x)).split(C, 2))
        scores = (q @ k.transpose(-2, -1)) * (C // H) ** -0.5
        scores = scores.masked_fill(self.attn.bias[:, :, :n, :n] == 0, -torch.inf)
        x = x + self.attn.c_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x + self.mlp.c_proj(nn.GELU()(self.mlp.c_fc(self.ln_2(x))))


class NanoModel(nn.Module):
    def __init__(self, bias, vocab=V):
        super().__init__()
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(vocab, C), "wpe": nn.Embedding(T, C)})
        self.transformer["h"] = nn.ModuleList([NanoBlock(bias) for _ in range(L)])
        self.transformer["ln_f"] = NanoNorm(bias)
        self.lm_head = nn.Linear(C, vocab, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, ids):
        x = self.transformer["wte"](ids) + self.transformer["wpe"](torch.arange(ids.shape[1]))
        for block in self.transformer["h"]:
            x = block(x)
        return self.lm_head(self.transformer["ln_f"](x))


def shaken(model):
    """Weights larger than at the start, norms and biases included: a mistake shows in the logits."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def write_reference(folder, *, qkv_bias=False, tied=False, published=False, **changes):
    """A model of the reference series in `folder`, as the series or as its Hub repositories lay it out."""
    model = shaken(ReferenceModel(qkv_bias, tied))
    settings = {
        **{"vocab_size": V, "context_length": T, "emb_dim": C, "n_heads": H, "n_layers": L},
        **{"drop_rate": 0.1, "qkv_bias": qkv_bias, **({"tie_weights": True} if tied else {}), **changes},
    }
    folder.mkdir(parents=True, exist_ok=True)
    prefix = "model." if published else ""
    save_file({prefix + name: weight for name, weight in model.state_dict().items()}, folder / "model.safetensors")
    if published:
        settings = {"model_type": "gpjtgpt2", "cfg": settings, "architectures": ["GPJTGPT2ModelForCausalLM"]}
    (folder / ("config.json" if published else "model.json")).write_text(json.dumps(settings))
    return model


def write_nanogpt(path, *, bias=True, vocab=V, prefix=""):
    """A checkpoint as nanoGPT's train.py leaves it, the optimizer's part included."""
    model = shaken(NanoModel(bias, vocab))
    torch.save(
        {
            "model": {prefix + name: weight for name, weight in model.state_dict().items()},
            "optimizer": {"state": {0: {"step": torch.tensor(5.0)}}, "param_groups": [{"lr": 1e-3, "params": [0]}]},
            "model_args": {
                **{"n_layer": L, "n_head": H, "n_embd": C, "block_size": T},
                **{"bias": bias, "vocab_size": vocab, "dropout": 0.0},
            },
            **{"iter_num": 5, "best_val_loss": torch.tensor(3.5), "config": {"dataset": "openwebtext"}},
        },
        path,
    )
    return model


def tiny_gpt2(**changes):
    sizes = {"vocab_size": V, "n_positions": T, "n_embd": C, "n_layer": L, "n_head": H}
    ids = {"bos_token_id": 100, "eos_token_id": 100}
    return shaken(GPT2LMHeadModel(GPT2Config(**{**sizes, **ids, **changes})))


def tiny_ours(**changes):
    return shaken(GPT2SmallForCausalLM(tiny_config(**changes)))


@torch.no_grad()
def assert_equal_logits(found, expected, ids=IDS):
    outputs = [model(ids) for model in (found, expected)]
    found, expected = (out if isinstance(out, torch.Tensor) else out.logits for out in outputs)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    for name in found:
        assert found[name].dtype == expected[name].dtype, name
        assert torch.equal(found[name], expected[name]), name


# ---- into ours --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["gpt2small", "gpt2"])
@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("qkv_bias", [False, True])
def test_reference_series_computes_the_same_in_either_form(tmp_path, qkv_bias, tied, published, to):
    expected = write_reference(tmp_path, qkv_bias=qkv_bias, tied=tied, published=published)
    source = read(tmp_path)
    assert source.what.startswith("reference series")
    assert (source.config.attention_bias, source.config.tie_word_embeddings) == (qkv_bias, tied)
    assert source.config.resid_pdrop == 0.1
    assert_equal_logits(source.build(to), expected)
    assert_equal_logits(source.original(), expected)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["gpt2small", "gpt2"])
@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
@pytest.mark.parametrize("bias", [False, True])
def test_nanogpt_checkpoint_computes_the_same_in_either_form(tmp_path, bias, prefix, to):
    expected = write_nanogpt(tmp_path / "ckpt.pt", bias=bias, prefix=prefix)
    for path in (tmp_path, tmp_path / "ckpt.pt"):
        source = read(path)
        assert (source.what, source.config.tie_word_embeddings) == ("nanoGPT", True)
        assert_equal_logits(source.build(to), expected)
        assert_equal_logits(source.original(), expected)


def test_nanogpts_padded_vocabulary_stays_and_ends_with_gpt2s_token(tmp_path):
    write_nanogpt(tmp_path / "ckpt.pt", vocab=50304)
    config = read(tmp_path).config
    assert (config.vocab_size, config.eos_token_id) == (50304, 50256)
    write_nanogpt(tmp_path / "ckpt.pt", vocab=65)  # single characters: none of them ends a text
    assert read(tmp_path).config.eos_token_id is None


@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"tie_word_embeddings": False},
        {"activation_function": "relu"},
        {"activation_function": "gelu"},
        {"activation_function": "gelu_fast"},
        {"activation_function": "swish"},
        {"n_inner": 24, "layer_norm_epsilon": 1e-3},
        {"reorder_and_upcast_attn": True, "attn_implementation": "eager"},
    ],
    ids=str,
)
def test_transformers_gpt2_computes_the_same_as_ours_and_comes_back(tmp_path, variant):
    theirs = tiny_gpt2(**variant)
    theirs.save_pretrained(tmp_path / "theirs")
    source = read(tmp_path / "theirs")
    ours = source.build("gpt2small")
    assert_equal_logits(ours, theirs)
    assert_equal_logits(source.original(), theirs)
    again = as_gpt2(ours.config, ours.state_dict())
    assert_same_bits(again.state_dict(), theirs.state_dict())
    assert_equal_logits(again, theirs)


def test_gpt2_is_read_without_a_head_without_a_prefix_and_with_old_mask_buffers(tmp_path):
    theirs = tiny_gpt2()
    base = GPT2Model(theirs.config).eval()
    base.load_state_dict(theirs.transformer.state_dict())
    base.save_pretrained(tmp_path)
    masks = {f"h.{i}.attn.{name}": torch.ones(1) for i in range(L) for name in ("bias", "masked_bias")}
    save_file(load_file(tmp_path / "model.safetensors") | masks, tmp_path / "model.safetensors")
    assert_equal_logits(read(tmp_path).build("gpt2small"), theirs)


def test_shards_are_read_as_one(tmp_path):
    theirs = tiny_gpt2()
    theirs.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_equal_logits(read(tmp_path).build("gpt2small"), theirs)
    sorted(tmp_path.glob("*.safetensors"))[1].unlink()
    with pytest.raises(ValueError, match=r"has no model-00002-of-\d+\.safetensors"):
        read(tmp_path)


@pytest.mark.parametrize("kept", ["tok_emb.weight", "out_head.weight", "both"])
def test_tied_weight_is_found_under_either_name(tmp_path, kept):
    expected = write_reference(tmp_path, tied=True)
    weights = load_file(tmp_path / "model.safetensors")
    embedding = weights.pop("tok_emb.weight")
    names = ("tok_emb.weight", "out_head.weight") if kept == "both" else (kept,)
    save_file(weights | {name: embedding.clone() for name in names}, tmp_path / "model.safetensors")
    assert_equal_logits(read(tmp_path).build("gpt2small"), expected)


def test_published_folder_of_a_foreign_type_runs_none_of_its_code(tmp_path):
    write_reference(tmp_path, published=True)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["auto_map"] = {"AutoConfig": "trap.Config", "AutoModelForCausalLM": "trap.Model"}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "trap.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\n")
    convert(str(tmp_path), tmp_path / "out", "gpt2")
    assert not (tmp_path / "sprung").exists()


# ---- round trips ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(
    layout=st.sampled_from([None, REFERENCE, NANOGPT, TRANSFORMERS]),
    sizes=st.tuples(*[st.integers(1, 3)] * 3),
    tied=st.booleans(),
    qkv_bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_every_layout_comes_back_bit_for_bit_in_its_dtype(layout, sizes, tied, qkv_bias, dtype):
    heads, width, layers = sizes
    config = tiny_config(
        **{"hidden_size": heads * width, "num_attention_heads": heads, "num_hidden_layers": layers},
        **{"tie_word_embeddings": tied, "attention_bias": qkv_bias},
    )
    layout = layout or own_layout(config)
    ours = {name: torch.randn(shape).to(dtype) for name, shape in shapes(config).items()}
    theirs = from_ours(ours, config, layout)
    assert {name: tuple(weight.shape) for name, weight in theirs.items()} == {
        piece.name: piece.shape for piece in pieces(config, layout)
    }
    assert sum(weight.numel() for weight in theirs.values()) == sum(weight.numel() for weight in ours.values())
    assert_same_bits(to_ours(theirs, config, layout), ours)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "variant",
    [{}, {"tie_word_embeddings": True}, {"attention_bias": True}, {"hidden_act": "gelu"}, {"hidden_act": "silu"}],
    ids=str,
)
def test_conversion_to_native_gpt2_and_back_is_exact(tmp_path, variant, dtype):
    ours = tiny_ours(**variant).to(dtype)
    ours.generation_config.update(do_sample=True, temperature=0.7)
    ours.save_pretrained(tmp_path / "ours")
    convert(str(tmp_path / "ours"), tmp_path / "gpt2", "gpt2")
    convert(str(tmp_path / "gpt2"), tmp_path / "again", "gpt2small")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert type(again) is GPT2SmallForCausalLM
    assert_same_bits(again.state_dict(), ours.state_dict())
    kept, given = ({k: v for k, v in m.config.to_dict().items() if k != "_name_or_path"} for m in (again, ours))
    assert kept == given
    assert again.generation_config.temperature == 0.7
    native = GPT2LMHeadModel.from_pretrained(tmp_path / "gpt2", dtype=torch.float32)
    assert_equal_logits(native, again.float())
    assert (native.lm_head.weight is native.transformer.wte.weight) is ours.config.tie_word_embeddings
    for folder in ("gpt2", "again"):  # others may read all of it
        assert len({path.stat().st_mode for path in (tmp_path / folder).iterdir()}) == 1


def test_native_folder_trained_further_keeps_the_biases_it_learned(tmp_path):
    ours = tiny_ours()
    native = as_gpt2(ours.config, ours.state_dict())
    with torch.no_grad():
        native.transformer.h[1].attn.c_attn.bias.add_(0.5)
    native.save_pretrained(tmp_path)
    source = read(tmp_path)
    assert source.config.attention_bias
    assert_equal_logits(source.build("gpt2small"), native)


def test_mixed_precision_is_widened_without_loss(tmp_path):
    ours = tiny_ours()
    weights = ours.state_dict()
    weights = {name: weight.bfloat16() if "mlp" in name else weight for name, weight in weights.items()}
    ours.config.save_pretrained(tmp_path)
    save_file(weights, tmp_path / "model.safetensors")
    source = read(tmp_path)
    assert {weight.dtype for weight in source.weights.values()} == {torch.float32}
    assert_same_bits(source.weights, {name: weight.float() for name, weight in weights.items()})


def test_model_of_ours_is_rebuilt_from_its_state_dict_alone(tiny_model):
    assert_equal_logits(with_weights(GPT2SmallForCausalLM, tiny_model.config, tiny_model.state_dict()), tiny_model)


# ---- errors -----------------------------------------------------------------------------------------------------


def test_missing_unexpected_and_misshapen_weights_are_all_named(tmp_path):
    write_reference(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["trf_blocks.1.norm2.shift"]
    weights["extra.weight"] = torch.zeros(3)
    weights["pos_emb.weight"] = torch.zeros(T + 1, C)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="do not fit") as error:
        read(tmp_path)
    for words in (
        "missing trf_blocks.1.norm2.shift",
        "unexpected extra.weight",
        "pos_emb.weight has shape (33, 16), expected (32, 16)",
    ):
        assert words in str(error.value)


def test_tied_head_that_differs_is_an_error_and_not_dropped(tmp_path):
    write_reference(tmp_path, tie_weights=True)
    with pytest.raises(ValueError, match=r"head is tied, but out_head\.weight differs from tok_emb\.weight"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("variant", "words"),
    [
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True; only False"),
        ({"scale_attn_weights": False}, "scale_attn_weights is False; only True"),
        ({"activation_function": "tanh"}, "activation_function is tanh; known: gelu_new"),
    ],
    ids=str,
)
def test_gpt2_variant_that_ours_cannot_follow_is_refused(tmp_path, variant, words):
    tiny_gpt2(**variant).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=re.escape(words)):
        read(tmp_path)


def a_broken_source(tmp_path, kind):
    """One bad input of each kind, and the words that name it."""
    src = tmp_path / "src"
    write_reference(src)
    settings = json.loads((src / "model.json").read_text())
    if kind == "absent":
        return tmp_path / "nowhere" / "model", "does not exist"
    if kind == "empty folder":
        (tmp_path / "empty").mkdir()
        return tmp_path / "empty", "expected config.json or model.json"
    if kind == "no settings":
        (src / "model.json").unlink()
        return src / "model.safetensors", "--config model.json"
    if kind == "no weights":
        (src / "model.safetensors").rename(src / "pytorch_model.bin")
        return src, "has no model.safetensors; pickled weights"
    if kind == "not safetensors":
        (src / "model.safetensors").write_bytes(b"PK\x03\x04 and so on")
        return src, "model.safetensors is not a complete safetensors file"
    if kind == "cut off":
        whole = (src / "model.safetensors").read_bytes()
        (src / "model.safetensors").write_bytes(whole[: len(whole) // 2])
        return src, "model.safetensors is not a complete safetensors file"
    if kind == "not JSON":
        (src / "model.json").write_text("{")
        return src, "model.json cannot be read as JSON"
    if kind == "a size is missing":
        del settings["emb_dim"]
        settings["model_type"] = "gpjtgpt2"
        (src / "model.json").write_text(json.dumps({"model_type": "gpjtgpt2", "cfg": settings}))
        return src, "the settings lack emb_dim"
    if kind == "impossible sizes":
        (src / "model.json").write_text(json.dumps({**settings, "n_heads": 3}))
        return src, "hidden_size 16 is not a multiple of num_attention_heads 3"
    if kind == "settings of another kind":
        (src / "model.json").rename(src / "config.json")
        (src / "config.json").write_text(json.dumps({"model_type": "gpjtgpt2", "cfg": ["vocab_size"]}))
        return src, "the settings lack vocab_size"
    if kind == "a size in words":
        (src / "model.json").write_text(json.dumps({**settings, "vocab_size": "many"}))
        return src, "vocab_size"
    if kind == "another architecture":
        (src / "config.json").write_text('{"model_type": "llama"}')
        return src, "type llama; known are gpt2small, gpt2, gpjtgpt2"
    if kind == "quantised":
        weights = load_file(src / "model.safetensors")
        save_file({name: weight.to(torch.int8) for name, weight in weights.items()}, src / "model.safetensors")
        return src, "torch.int8: quantised weights cannot be converted"
    if kind == "NaN":  # found after writing, by the comparison
        weights = load_file(src / "model.safetensors")
        weights["final_norm.scale"][0] = torch.nan
        save_file(weights, src / "model.safetensors")
        return src, "logits differ by nan"
    path = tmp_path / "ckpt.pt"
    if kind == "pickled code":
        torch.save({"model": {}, "model_args": {}, "config": timedelta(1)}, path)
        return path, "not a file of plain tensors but contains datetime.timedelta"
    if kind == "bare pickle":
        path.write_bytes(pickle.dumps({"model": subprocess.Popen}))
        return path, "not a file of plain tensors"
    if kind == "garbage":
        path.write_bytes(b"")
        return path, "not a file of plain tensors"
    if kind == "another checkpoint":
        torch.save({"state_dict": {}}, path)
        return path, "has the entries model and model_args"
    raise AssertionError(kind)


@pytest.mark.parametrize(
    "kind",
    [
        *("absent", "empty folder", "no settings", "no weights", "not safetensors", "cut off", "not JSON"),
        *("a size is missing", "settings of another kind", "a size in words", "impossible sizes"),
        *("another architecture", "quantised", "NaN"),
        *("pickled code", "bare pickle", "garbage", "another checkpoint"),
    ],
)
def test_bad_source_is_one_line_and_leaves_nothing_behind(tmp_path, kind):
    src, words = a_broken_source(tmp_path, kind)
    with pytest.raises(UsageError) as error:
        convert(str(src), tmp_path / "new" / "out", "gpt2small")
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "new").exists() or not any((tmp_path / "new").iterdir())


def test_unknown_name_is_refused(tmp_path):
    with pytest.raises(
        UsageError, match="no-such/model cannot be converted: it is not a local file or folder, and the Hub"
    ):
        convert("no-such/model", tmp_path / "out", "gpt2small")


def test_destination_is_replaced_only_when_asked_and_only_if_it_is_a_model(tmp_path):
    write_reference(tmp_path / "src")
    src, out = str(tmp_path / "src"), tmp_path / "out"
    convert(src, out, "gpt2")
    with pytest.raises(UsageError, match="out exists"):
        convert(src, out, "gpt2small")
    convert(src, out, "gpt2small", overwrite=True)
    assert json.loads((out / "config.json").read_text())["model_type"] == "gpt2small"
    for holder in (out, tmp_path):
        with pytest.raises(UsageError, match="contains the model to convert"):
            convert(str(out), holder, "gpt2", overwrite=True)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.jpg").touch()
    with pytest.raises(UsageError, match="photos is not a model folder"):
        convert(src, tmp_path / "photos", "gpt2", overwrite=True)


@pytest.mark.slow
def test_any_empty_folder_is_converted_into_and_replaced(fixed_folder, tmp_path):
    write_reference(tmp_path / "src")
    is_link, inode = fixed_folder.is_symlink(), fixed_folder.stat().st_ino
    for to in ("gpt2", "gpt2small"):
        convert(str(tmp_path / "src"), tmp_path / to, to)
        convert(str(tmp_path / "src"), fixed_folder, to, overwrite=to == "gpt2small")
        assert {path.name for path in fixed_folder.iterdir()} == {path.name for path in (tmp_path / to).iterdir()}
    assert fixed_folder.is_symlink() if is_link else fixed_folder.stat().st_ino == inode


def test_second_conversion_into_one_folder_is_refused(tmp_path):
    write_reference(tmp_path / "src")
    convert(str(tmp_path / "src"), tmp_path / "out", "gpt2")
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    with exclusive_writer(tmp_path / "out"), pytest.raises(UsageError, match=r"another process writes .*out"):
        convert(str(tmp_path / "src"), tmp_path / "out", "gpt2small", overwrite=True)
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before


def test_destination_that_cannot_be_written_is_the_users_to_fix(tmp_path):
    write_reference(tmp_path / "src")
    with pytest.raises(UsageError, match=r"model\.json.out cannot be written"):
        convert(str(tmp_path / "src"), tmp_path / "src" / "model.json" / "out", "gpt2")


def test_failure_leaves_the_old_folder_as_it_was(tmp_path):
    write_reference(tmp_path / "good")
    convert(str(tmp_path / "good"), tmp_path / "out", "gpt2")
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    broken, _ = a_broken_source(tmp_path, "NaN")
    with pytest.raises(UsageError, match="Nothing was written"):
        convert(str(broken), tmp_path / "out", "gpt2", overwrite=True)
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before


# ---- tokenizers -------------------------------------------------------------------------------------------------


def test_tokenizer_in_the_source_folder_is_copied_and_sets_special_tokens(tmp_path, tiny_tokenizer):
    write_nanogpt(tmp_path / "ckpt.pt", vocab=320)
    tiny_tokenizer.save_pretrained(tmp_path)
    convert(str(tmp_path), tmp_path / "out", "gpt2")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.get_vocab() == tiny_tokenizer.get_vocab()
    assert tokenizer.model_max_length == T
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tiny_tokenizer.eos_token_id
    text = tokenizer.decode(model.generate(**tokenizer("Every", return_tensors="pt"), max_new_tokens=4)[0])
    assert text.startswith("Every")


def test_tokenizer_larger_than_the_model_or_unknown_is_refused(tmp_path, tiny_tokenizer):
    write_reference(tmp_path / "src")
    tiny_tokenizer.save_pretrained(tmp_path / "words")
    with pytest.raises(UsageError, match="has 300 entries, the model's vocabulary 101"):
        convert(str(tmp_path / "src"), tmp_path / "out", "gpt2", tokenizer=str(tmp_path / "words"))
    with pytest.raises(UsageError, match="no tokenizer no-such"):
        convert(str(tmp_path / "src"), tmp_path / "out", "gpt2", tokenizer="no-such/words")
    assert not (tmp_path / "out").exists()


# ---- the command ------------------------------------------------------------------------------------------------


def command(*words):
    return run_script(["-m", "gpt2small_hf", "convert", *words], Path.cwd())


@pytest.mark.slow
def test_native_folder_of_a_run_loads_without_remote_code(tiny_run, tmp_path, run_isolated):
    convert(str(tiny_run.root), tmp_path / "native", "gpt2")
    printed = run_isolated(
        f"""
import torch
from transformers import pipeline
write = pipeline("text-generation", {str(tmp_path / "native")!r})
assert type(write.model).__name__ == "GPT2LMHeadModel"
assert write.tokenizer.model_max_length == 32
assert write("Once the fox", max_new_tokens=4)[0]["generated_text"].startswith("Once the fox")
print(write.model(torch.arange(10)[None]).logits.tolist())
"""
    )
    ours = AutoModelForCausalLM.from_pretrained(tiny_run.model)(torch.arange(10)[None]).logits
    torch.testing.assert_close(torch.tensor(json.loads(printed)), ours, atol=1e-5, rtol=1e-5)
    config = json.loads((tmp_path / "native" / "config.json").read_text())
    assert (config["model_type"], config["n_ctx"]) == ("gpt2", 32)
    assert "auto_map" not in config
    assert not list((tmp_path / "native").glob("*.py"))


@pytest.mark.slow
def test_command_says_what_it_read_checked_and_wrote_and_what_comes_next(tiny_run, tmp_path):
    done = command(tiny_run.root, tmp_path / "out", "--to", "gpt2small")
    assert (done.returncode, done.stderr) == (0, "")
    source, checked, wrote, following = done.stdout.splitlines()
    assert source.startswith("source   gpt2small: 2 layers, 16 wide, 2 heads, context 32, vocabulary 300, head untied")
    assert re.fullmatch(r"checked  weights equal bit for bit, logits of random ids to \d\.\de[+-]\d\d", checked)
    assert wrote.startswith(f"wrote    {tmp_path / 'out'} as gpt2small, ")
    assert following == f"next: python examples/use_from_hub.py {tmp_path / 'out'}"


def test_checkpoint_is_a_source_and_a_run_without_a_model_says_so(tiny_run, tmp_path):
    checkpoint = max(tiny_run.checkpoints.iterdir())
    convert(str(checkpoint), tmp_path / "out", "gpt2small")
    assert sorted(file.name for file in (tmp_path / "out").glob("*.py")) == [
        "configuration_gpt2small.py",
        "cpu_linear.py",
        "gpt.py",
        "modeling_gpt2small.py",
    ]
    (tmp_path / "stopped" / "checkpoints").mkdir(parents=True)
    with pytest.raises(UsageError, match="run without a final model"):
        convert(str(tmp_path / "stopped"), tmp_path / "other", "gpt2")


def test_config_flag_reads_settings_from_another_folder(tmp_path, capsys):
    """A checkpoint of the reference series has its own folder, and model.json is in the parent folder."""
    expected = write_reference(tmp_path / "run")
    weights, settings = tmp_path / "run" / "model.safetensors", tmp_path / "run" / "model.json"
    settings.rename(tmp_path / "run.json")
    main([str(weights), str(tmp_path / "it's new"), "--to", "gpt2small", "--config", str(tmp_path / "run.json")])
    assert_equal_logits(AutoModelForCausalLM.from_pretrained(tmp_path / "it's new"), expected)
    printed = capsys.readouterr().out
    assert "without a tokenizer" in printed
    following = printed.splitlines()[-1].removeprefix("next: ")
    assert following.startswith("python -c ")
    subprocess.run(["bash", "-n", "-c", following], check=True)


def test_config_flag_is_refused_for_a_ckpt_pt(tmp_path):
    write_nanogpt(tmp_path / "ckpt.pt")
    with pytest.raises(UsageError, match="contains its own settings; leave --config out"):
        convert(str(tmp_path / "ckpt.pt"), tmp_path / "out", "gpt2", settings=tmp_path / "model.json")


@pytest.mark.slow
def test_hub_id_is_found_in_the_cache(tmp_path):
    theirs = tiny_gpt2()
    repo = tmp_path / "hub" / "models--someone--tiny"
    theirs.save_pretrained(repo / "snapshots" / "0123abc")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0123abc")
    done = subprocess.run(
        [sys.executable, "-m", "gpt2small_hf", "convert", "someone/tiny", tmp_path / "out", "--to", "gpt2small"],
        env={**os.environ, "HF_HOME": str(tmp_path)},  # read when huggingface_hub is imported
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "transformers GPT-2" in done.stdout
    assert_equal_logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), theirs)
    assert json.loads((tmp_path / "out" / "converted.json").read_text())["origin"] == "someone/tiny"  # whom to credit


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["src"], "these are required: DST, --to gpt2small|gpt2. All flags: "),
        (["src", "out", "--to", "llama"], "--to: 'llama' is not one of gpt2small, gpt2."),
        (["src", "out", "--to", "gpt2", "--overwite"], "--overwite is not a flag. Did you mean --overwrite?"),
    ],
    ids=str,
)
def test_mistyped_command_is_one_line(words, line):
    with pytest.raises(UsageError, match=re.escape(line)):
        main(words)


def test_usage_error_exits_with_status_2(tmp_path):
    done = command(tmp_path / "nothing.pt", tmp_path / "out", "--to", "gpt2")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {tmp_path / 'nothing.pt'} does not exist. Check the name.\n"


@pytest.mark.slow
def test_killed_conversion_leaves_no_folder_of_the_name(tmp_path):
    model = GPT2LMHeadModel(GPT2Config(n_layer=6, n_embd=384, n_head=6))
    model.save_pretrained(tmp_path / "src")
    process = subprocess.Popen(
        [sys.executable, "-m", "gpt2small_hf", "convert", str(tmp_path / "src"), str(tmp_path / "out"), "--to", "gpt2"],
        stdout=subprocess.DEVNULL,
    )
    while not list(tmp_path.glob(".out.*.tmp/model.safetensors")):  # in the middle of writing
        assert process.poll() is None, "finished before it could be stopped"
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out").exists()
    assert command(tmp_path / "src", tmp_path / "out", "--to", "gpt2").returncode == 0
