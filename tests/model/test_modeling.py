"""The Transformers face: equal to GPT-2, right under padding, packing, caching, accumulation and reloading."""

import inspect
from typing import get_args

import pytest
import torch
from conftest import tiny_config
from torch.nn import functional as F
from transformers import StaticCache

from gpt2small_hf import GPT2SmallForCausalLM
from gpt2small_hf.conversion.readers import as_gpt2


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "variant", [{}, {"tie_word_embeddings": True}, {"attention_bias": True}, {"hidden_act": "relu"}], ids=str
)
def test_logits_equal_gpt2_with_the_same_weights_at_every_position(variant, attention):
    torch.manual_seed(1)
    model = GPT2SmallForCausalLM(tiny_config(hidden_size=32, **variant)).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # larger than at init, biases included: differences would show
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.set_attn_implementation(attention)
    ids = torch.randint(0, 101, (4, 32))
    theirs = as_gpt2(model.config, model.state_dict())
    torch.testing.assert_close(model(ids).logits, theirs(ids).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("use_cache", [False, True])
def test_padded_row_equals_the_row_alone(tiny_model, side, use_cache):
    rows = [torch.randint(0, 100, (n,)) for n in (5, 11, 8)]
    ids, mask = torch.full((3, 11), 100), torch.zeros(3, 11, dtype=torch.long)
    places = []
    for i, row in enumerate(rows):
        place = slice(11 - len(row), 11) if side == "left" else slice(0, len(row))
        ids[i, place], mask[i, place] = row, 1
        places.append(place)
    batched = tiny_model(ids, attention_mask=mask, use_cache=use_cache).logits
    for i, row in enumerate(rows):
        alone = tiny_model(row[None], use_cache=use_cache).logits[0]
        torch.testing.assert_close(batched[i, places[i]], alone, atol=1e-5, rtol=0)


def test_hand_written_cached_loop_on_a_left_padded_batch_equals_no_cache(tiny_model):
    rows = [torch.randint(0, 100, (n,)) for n in (4, 7)]
    ids = torch.stack([F.pad(row, (7 - len(row), 0), value=100) for row in rows])
    mask = torch.stack([F.pad(torch.ones_like(row), (7 - len(row), 0)) for row in rows])
    step, cache, seen = ids, None, [row.clone() for row in rows]
    for _ in range(6):
        out = tiny_model(step, attention_mask=mask, past_key_values=cache, use_cache=True)
        cache, step = out.past_key_values, out.logits[:, -1:].argmax(-1)
        for i, row in enumerate(seen):
            torch.testing.assert_close(out.logits[i, -1], tiny_model(row[None]).logits[0, -1], atol=1e-5, rtol=0)
            seen[i] = torch.cat([row, step[i]])
        mask = F.pad(mask, (0, 1), value=1)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_packed_documents_do_not_see_each_other_with_the_cache_at_its_default(tiny_model, attention):
    tiny_model.set_attn_implementation(attention)
    documents = [torch.randint(0, 100, (n,)) for n in (6, 9, 4)]
    packed = torch.cat(documents)[None]
    position_ids = torch.cat([torch.arange(len(d)) for d in documents])[None]
    logits = tiny_model(packed, position_ids=position_ids).logits[0].split([6, 9, 4])
    for document, its_logits in zip(documents, logits, strict=True):
        torch.testing.assert_close(its_logits, tiny_model(document[None]).logits[0], atol=1e-5, rtol=0)


def test_greedy_text_is_the_same_with_dynamic_static_and_no_cache(tiny_model):
    ids = torch.randint(0, 100, (2, 5))
    kinds = [{"use_cache": False}, {"use_cache": True}, {"cache_implementation": "static"}]
    texts = [
        tiny_model.generate(ids, max_new_tokens=20, do_sample=False, **kind, disable_compile=True) for kind in kinds
    ]
    assert torch.equal(texts[0], texts[1])
    assert torch.equal(texts[0], texts[2])


def test_left_padded_row_beside_a_cache_of_fixed_size_equals_the_row_alone(tiny_model):
    row = torch.randint(0, 100, (1, 6))
    padded, mask = F.pad(row, (3, 0), value=100), F.pad(torch.ones_like(row), (3, 0))
    cache = StaticCache(config=tiny_model.config, max_cache_len=20)
    first = tiny_model(padded, attention_mask=mask, past_key_values=cache).logits
    torch.testing.assert_close(first[0, 3:], tiny_model(row).logits[0], atol=1e-5, rtol=0)
    step, mask = torch.tensor([[7]]), F.pad(mask, (0, 1), value=1)
    then = tiny_model(step, attention_mask=mask, past_key_values=cache).logits
    torch.testing.assert_close(then[0, 0], tiny_model(torch.cat([row, step], 1)).logits[0, -1], atol=1e-5, rtol=0)


def test_drafting_with_the_first_layers_gives_the_greedy_text(tiny_model):
    ids = torch.randint(0, 100, (1, 5))
    greedy = tiny_model.generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(tiny_model.generate(ids, max_new_tokens=12, do_sample=False, assistant_early_exit=1), greedy)


def test_configuration_that_asks_for_tuples_gets_them(tiny_model):
    ids = torch.randint(0, 100, (1, 5))
    logits = tiny_model(ids).logits
    tiny_model.config.return_dict = False
    assert torch.equal(tiny_model(ids)[0], logits)


def test_past_the_context_one_error_names_both_lengths(tiny_model):
    with pytest.raises(ValueError, match="reaches position 33, the model takes 32"):
        tiny_model(torch.zeros(1, 33, dtype=torch.long))
    with pytest.raises(ValueError, match="reaches position 33, the model takes 32"):
        tiny_model.generate(torch.zeros(1, 30, dtype=torch.long), max_new_tokens=10, do_sample=False, eos_token_id=None)


def test_sliding_window_equals_generate_within_the_context_and_continues_past_it(tiny_model):
    prompt = torch.tensor([[100, 100, 5, 6], [7, 8, 9, 10]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    asked = {"attention_mask": mask, "do_sample": False, "eos_token_id": None}
    sliding = {**asked, "custom_generate": tiny_model.sliding_window}
    ordinary = tiny_model.generate(prompt, max_new_tokens=28, **asked)
    longer = tiny_model.generate(prompt, max_new_tokens=50, **sliding)
    assert torch.equal(tiny_model.generate(prompt, max_new_tokens=28, **sliding), ordinary)
    assert longer.shape == (2, 54)
    assert torch.equal(longer[:, :33], tiny_model.generate(prompt, max_new_tokens=29, **asked))
    # When the context of 32 was full, the model read the last 16 tokens again.
    again = tiny_model(longer[1:, 17:33]).logits[0, -1].argmax()
    assert longer[1, 33] == again


def test_sliding_window_takes_a_prompt_longer_than_the_context_and_ends_rows_that_end(tiny_model):
    prompt = torch.arange(80).reshape(2, 40)
    free = tiny_model.generate(
        prompt, max_new_tokens=6, do_sample=False, eos_token_id=None, custom_generate=tiny_model.sliding_window
    )
    end = int(free[0, 41])
    ended = tiny_model.generate(
        prompt,
        max_new_tokens=6,
        do_sample=False,
        eos_token_id=end,
        pad_token_id=99,
        custom_generate=tiny_model.sliding_window,
    )
    last = (free[0, 40:] == end).nonzero()[0, 0]
    assert (ended[0, 40 + last + 1 :] == 99).all()
    torch.manual_seed(0)
    sampled = tiny_model.generate(
        prompt, max_new_tokens=6, do_sample=True, eos_token_id=None, custom_generate=tiny_model.sliding_window
    )
    assert sampled.shape == (2, 46)
    assert not torch.equal(sampled, free)


@pytest.mark.parametrize(
    "asked",
    [
        {"num_beams": 2},
        {"return_dict_in_generate": True},
        {"guidance_scale": 1.5},
        {"inputs_embeds": torch.ones(1, 3, 16)},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_sliding_window_refuses_what_it_cannot_do(tiny_model, asked):
    prompt = {} if "inputs_embeds" in asked else {"input_ids": torch.ones(1, 3, dtype=torch.long)}
    with pytest.raises(ValueError, match="A sliding window generates greedily or by sampling"):
        tiny_model.generate(**prompt, **asked, max_new_tokens=3, custom_generate=tiny_model.sliding_window)


@pytest.mark.slow
@pytest.mark.parametrize("length", [0, -1, 64.0, None])
def test_context_of_no_length_is_refused(tiny_model, length):
    with pytest.raises(ValueError, match="The context cannot be"):
        tiny_model.resize_position_embeddings(length)
    assert tiny_model.config.max_position_embeddings == 32


def test_shapes_can_be_followed_without_memory(tiny_model):
    ids = torch.zeros(2, 9, dtype=torch.long, device="meta")
    model = tiny_model.to("meta")
    assert model(ids).logits.shape == (2, 9, 101)
    assert model(ids, labels=ids, skip_logits=True).loss.shape == ()


def test_labels_of_another_length_are_named(tiny_model):
    ids = torch.zeros(2, 9, dtype=torch.long)
    with pytest.raises(ValueError, match=r"labels are \(2, 5\), the input is \(2, 9\)"):
        tiny_model(ids, labels=ids[:, :5], skip_logits=True)


@pytest.mark.parametrize("length", [48, 20])
def test_context_can_be_made_longer_or_shorter(tiny_model, length, tmp_path):
    ids = torch.randint(0, 100, (2, 20))
    logits = tiny_model(ids).logits
    tiny_model.resize_position_embeddings(length)
    assert torch.equal(tiny_model(ids).logits, logits)
    assert tiny_model(torch.zeros(1, length, dtype=torch.long)).logits.isfinite().all()
    with pytest.raises(ValueError, match=f"the model takes {length}"):
        tiny_model(torch.zeros(1, length + 1, dtype=torch.long))
    tiny_model.save_pretrained(tmp_path)
    again = GPT2SmallForCausalLM.from_pretrained(tmp_path)
    assert again.get_position_embeddings().num_embeddings == again.config.max_position_embeddings == length


def test_packed_row_may_be_longer_than_the_context(tiny_model):
    position_ids = torch.arange(24).repeat(2)[None]
    assert tiny_model(torch.zeros(1, 48, dtype=torch.long), position_ids=position_ids).logits.shape == (1, 48, 101)


@pytest.mark.parametrize("both", [{}, {"input_ids": torch.ones(1, 2).long(), "inputs_embeds": torch.ones(1, 2, 16)}])
def test_ids_and_embeddings_exclude_each_other(tiny_model, both):
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        tiny_model(**both)


def test_loss_is_the_mean_over_shifted_labels_and_honours_the_number_of_items(tiny_model):
    ids = torch.randint(0, 100, (3, 12))
    labels = ids.clone()
    labels[:, :4] = -100
    out = tiny_model(ids, labels=labels)
    by_hand = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    torch.testing.assert_close(out.loss, by_hand / 24)
    torch.testing.assert_close(tiny_model(ids, labels=labels, num_items_in_batch=100).loss, by_hand / 100)


def test_logits_to_keep_gives_the_last_ones(tiny_model):
    ids = torch.randint(0, 100, (2, 9))
    full = tiny_model(ids).logits
    torch.testing.assert_close(tiny_model(ids, logits_to_keep=3).logits, full[:, -3:])
    torch.testing.assert_close(tiny_model(ids, logits_to_keep=torch.tensor([0, 4])).logits, full[:, [0, 4]])


def test_hidden_states_and_attention_weights_come_on_request(tiny_model):
    tiny_model.set_attn_implementation("eager")
    out = tiny_model(torch.randint(0, 100, (2, 9)), output_hidden_states=True, output_attentions=True)
    assert [tuple(h.shape) for h in out.hidden_states] == [(2, 9, 16)] * 3
    assert [tuple(a.shape) for a in out.attentions] == [(2, 2, 9, 9)] * 2
    for part in (tiny_model, tiny_model.model):  # the library's test suite reads there what it may ask for
        (named,) = get_args(inspect.signature(part.forward).parameters["kwargs"].annotation)
        assert {"output_hidden_states", "output_attentions"} <= set(named.__annotations__)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_no_gradient(tiny_model, reentrant):
    tiny_model.train()
    ids = torch.randint(0, 100, (2, 9))
    tiny_model(ids, labels=ids, use_cache=False).loss.backward()
    plain = {name: p.grad.clone() for name, p in tiny_model.named_parameters()}
    tiny_model.zero_grad()
    tiny_model.activation_checkpointing_enable({"use_reentrant": reentrant})
    tiny_model(ids, labels=ids, use_cache=False).loss.backward()
    for name, parameter in tiny_model.named_parameters():
        torch.testing.assert_close(parameter.grad, plain[name], msg=name)


@pytest.mark.parametrize("tied", [False, True])
def test_saved_model_comes_back_equal_and_tied_weights_are_stored_once(tmp_path, tied):
    from safetensors import safe_open

    model = GPT2SmallForCausalLM(tiny_config(tie_word_embeddings=tied)).eval()
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
    assert ("lm_head.weight" in names) is not tied
    assert "model.layers.1.self_attn.q_proj.weight" in names
    again, info = GPT2SmallForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert (again.lm_head.weight is again.model.embed_tokens.weight) is tied
    ids = torch.randint(0, 100, (2, 9))
    assert torch.equal(model(ids).logits, again(ids).logits)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_initialisation_never_touches_a_loaded_weight(tmp_path):
    model = GPT2SmallForCausalLM(tiny_config())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    model.save_pretrained(tmp_path)
    # One more bias than the file holds: its module is initialised, the weight beside it was loaded.
    again = GPT2SmallForCausalLM.from_pretrained(tmp_path, attention_bias=True)
    for name, parameter in again.named_parameters():
        new = name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias"))
        assert parameter.unique().tolist() == [0.0 if new else 0.5], name


@pytest.mark.slow
def test_saved_folder_loads_every_class_without_the_package(tmp_path, run_isolated):
    torch.manual_seed(0)
    model = GPT2SmallForCausalLM(tiny_config()).eval()
    model.save_pretrained(tmp_path / "model")
    ids = torch.arange(10)[None]
    expected = model(ids).logits.double().sum().item()
    printed = run_isolated(
        f"""
import torch, importlib.util
assert importlib.util.find_spec("gpt2small_hf") is None and importlib.util.find_spec("accelerate") is None
from transformers import StaticCache, AutoConfig, AutoModel, AutoModelForCausalLM
folder = {str(tmp_path / "model")!r}
config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
base, base_info = AutoModel.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
model, info = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
assert type(config).__module__.startswith("transformers_modules"), type(config)
assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
assert not base_info["missing_keys"], base_info
assert set(base_info["unexpected_keys"]) <= {{"lm_head.weight"}}, base_info
model.save_pretrained({str(tmp_path / "again")!r})
print(model(torch.arange(10)[None]).logits.double().sum().item())
"""
    )
    assert float(printed) == expected
    assert sorted(p.name for p in (tmp_path / "again").iterdir() if p.suffix == ".py") == [
        "configuration_gpt2small.py",
        "cpu_linear.py",
        "gpt.py",
        "modeling_gpt2small.py",
    ]


def test_labels_and_not_the_mask_decide_what_the_loss_counts(tiny_model):
    ids = torch.randint(0, 100, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    ids[1, 7:] = tiny_model.config.pad_token_id
    alone = [tiny_model(row, labels=row).loss * (row.shape[1] - 1) for row in (ids[:1], ids[1:, :7])]
    masked = tiny_model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
    torch.testing.assert_close(masked, sum(alone) / (11 + 6))
    padding_too = tiny_model(ids, attention_mask=mask, labels=ids)
    every = torch.nn.functional.cross_entropy(padding_too.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(padding_too.loss, every)
    assert not torch.allclose(padding_too.loss, masked)
    assert "not `attention_mask`" in type(tiny_model).forward.__doc__
