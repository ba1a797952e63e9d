"""What vLLM's and SGLang's Transformers backends ask of a model, replayed without them.

They load the base model named in the folder, put an attention function of their own in place, and call the model on one
long row without padding, mask or cache: their function keeps keys and values itself, per layer.
"""

import json

import torch
from transformers import AutoModel, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "engine"


class LayerState:
    """Stands for what an engine keeps for one layer: here, the calls it received."""

    def __init__(self):
        self.calls = []


def engine_attention(module, query, key, value, attention_mask, scaling=None, attention_instances=None, **kwargs):
    """An engine's function: finds its state by the layer's number and computes plain causal attention."""
    state = attention_instances[module.layer_idx]
    state.calls.append({"mask": attention_mask, "shape": tuple(query.shape), "kwargs": set(kwargs)})
    scores = (query @ key.transpose(-1, -2)) * scaling
    T = query.shape[2]
    scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register(NAME, engine_attention)


@torch.no_grad()
def test_an_engine_gets_its_state_in_every_layer_and_the_ordinary_result(published):
    ordinary = AutoModelForCausalLM.from_pretrained(published).eval()
    model = AutoModel.from_pretrained(published, attn_implementation=NAME).eval()
    ids = torch.arange(48)[None] * 5 % ordinary.config.vocab_size
    states = {layer: LayerState() for layer in range(ordinary.config.num_hidden_layers)}
    outputs = model(
        input_ids=ids,
        inputs_embeds=None,
        use_cache=False,
        position_ids=torch.arange(48)[None],
        attention_instances=states,
        return_dict=False,
    )
    assert isinstance(outputs, tuple)
    logits = ordinary.lm_head(outputs[0][0])
    assert (logits - ordinary(ids).logits[0]).abs().max() < 1e-5
    for state in states.values():
        (call,) = state.calls
        assert call["mask"] is None
        assert call["shape"] == (1, 4, 48, 8)  # batch, heads, positions, width of a head


@torch.no_grad()
def test_several_requests_in_one_row_reach_the_engine_without_a_mask(published):
    """Engines lay requests end to end; telling them apart is their function's work, by positions it was told."""
    model = AutoModel.from_pretrained(published, attn_implementation=NAME).eval()
    states = {layer: LayerState() for layer in range(2)}
    positions = torch.cat([torch.arange(7), torch.arange(5)])[None]
    model(input_ids=torch.arange(12)[None], position_ids=positions, use_cache=False, attention_instances=states)
    assert [call["mask"] for state in states.values() for call in state.calls] == [None, None]


def test_folder_has_the_settings_that_engines_read(published):
    config = json.loads((published / "config.json").read_text())
    assert config["auto_map"]["AutoModel"] == "modeling_gpt2small.GPT2SmallModel"
    model = AutoModelForCausalLM.from_pretrained(published)
    assert model.is_backend_compatible()
    assert model.get_decoder() is model.model
    assert model.get_input_embeddings() is model.model.embed_tokens
    lists = [name for name, module in model.named_modules() if isinstance(module, torch.nn.ModuleList)]
    assert lists == ["model.layers"]  # cut between pipeline stages
    for name in model.config.base_model_tp_plan:
        for layer in range(model.config.num_hidden_layers):
            part = model.model.get_submodule(name.replace("*", str(layer)))
            assert isinstance(part, torch.nn.Linear)  # replaced by the engine's own, and q, k, v joined
