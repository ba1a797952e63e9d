"""Writing text: every way `generate` decodes and caches gives what plain forwards give."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import tiny_config
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    CompileConfig,
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    PreTrainedTokenizerFast,
    QuantizedCache,
    StaticCache,
    TextIteratorStreamer,
    pipeline,
)
from transformers.utils import is_hqq_available, is_optimum_quanto_available

from gpt2small_hf import GPT2SmallForCausalLM, GPT2SmallForSequenceClassification
from gpt2small_hf.data.tokenizer import train_tokenizer

# Contrastive, group-beam, constrained and DoLa decoding have left the library for repositories on the Hub: not here.

GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 100}
SAMPLED: dict[str, Any] = {"do_sample": True, "eos_token_id": None, "pad_token_id": 100}


def strong(config: Any, seed: int = 1) -> GPT2SmallForCausalLM:
    """Weights far above those at init, where the next token hardly depends on any but the last."""
    torch.manual_seed(seed)
    model = GPT2SmallForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.eval()


@pytest.fixture
def model() -> GPT2SmallForCausalLM:
    return strong(tiny_config())


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def random_ids(*shape: int) -> Tensor:
    return torch.randint(0, 100, shape)


def by_hand(model: GPT2SmallForCausalLM, row: Tensor, new: int) -> Tensor:
    """The likeliest `new` tokens after a row (T), by forwards without a cache."""
    for _ in range(new):
        row = torch.cat([row, model(row[None], use_cache=False).logits[0, -1:].argmax(-1)])
    return row[-new:]


def left_padded(rows: list[Tensor]) -> dict[str, Tensor]:
    width = max(len(row) for row in rows)
    ids = torch.stack([F.pad(row, (width - len(row), 0), value=100) for row in rows])
    mask = torch.stack([F.pad(torch.ones_like(row), (width - len(row), 0)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def log_probability(model: GPT2SmallForCausalLM, text: Tensor, prompt: int) -> Tensor:
    """Sum of the log-probabilities of each token (B, T) from `prompt` on: (B)."""
    scores = model(text[:, :-1], use_cache=False).logits[:, prompt - 1 :].log_softmax(-1)
    return scores.gather(-1, text[:, prompt:, None]).sum((1, 2))


# Caches

needs_cuda = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="offloading needs CUDA")]
CACHES = [
    pytest.param({"use_cache": False}, id="none"),
    pytest.param({}, id="default"),
    *(pytest.param({"cache_implementation": name}, id=name) for name in ("dynamic", "static")),
    *(
        pytest.param({"cache_implementation": name}, id=name, marks=needs_cuda)
        for name in ("offloaded", "offloaded_static")
    ),
]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("cache", CACHES)
def test_greedy_text_is_the_same_with_every_cache(model, cache, padded):
    rows = [random_ids(n) for n in ((5, 2, 9) if padded else (5, 5, 5))]
    if "offloaded" in cache.get("cache_implementation", ""):
        model.cuda()
    prompts = {name: value.to(model.device) for name, value in left_padded(rows).items()}
    text = model.generate(**prompts, **GREEDY, **cache, max_new_tokens=12, disable_compile=True).cpu()
    model.cpu()
    for row, its_text in zip(rows, text, strict=True):
        assert torch.equal(its_text[-12:], by_hand(model, row, 12))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_prompt_read_in_chunks_changes_no_text(model, attention):
    model.set_attn_implementation(attention)
    rows = [random_ids(n) for n in (11, 4)]
    text = model.generate(**left_padded(rows), **GREEDY, max_new_tokens=6, prefill_chunk_size=3)
    for row, its_text in zip(rows, text, strict=True):
        assert torch.equal(its_text[-6:], by_hand(model, row, 6))


@pytest.mark.parametrize(
    ("backend", "options", "part"),
    [
        ("fp8", {}, 0.2),
        pytest.param(
            "quanto",
            {"nbits": 4, "q_group_size": 8, "residual_length": 4},
            0.3,
            marks=pytest.mark.skipif(not is_optimum_quanto_available(), reason="optimum-quanto is not installed"),
        ),
        pytest.param(
            "hqq",
            {"nbits": 8, "q_group_size": 8, "residual_length": 4, "axis_key": 1, "axis_value": 1},
            0.05,
            marks=pytest.mark.skipif(not is_hqq_available(), reason="hqq is not installed"),
        ),
    ],
)
def test_quantised_cache_stays_near_an_exact_one(model, backend, options, part):
    ids = random_ids(2, 14)
    cache = QuantizedCache(backend, model.config, **options)
    parts = [model(ids[:, a:b], past_key_values=cache).logits for a, b in ((0, 8), *((i, i + 1) for i in range(8, 14)))]
    exact = model(ids).logits
    error = (torch.cat(parts, 1) - exact).abs().max() / exact.abs().max()
    assert 0 < error < part  # at 0 nothing would have been quantised
    asked = {"cache_implementation": "quantized", "cache_config": {"backend": backend, **options}}
    text = model.generate(ids, **GREEDY, **asked, max_new_tokens=6)
    assert text.shape == (2, 20)
    assert torch.equal(text[:, 14], exact[:, -1].argmax(-1))


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_generate_continues_from_a_prefix_cache(model, kind):
    row = random_ids(1, 9)
    cache = DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, max_cache_len=24)
    model(row[:, :6], past_key_values=cache)
    text = model.generate(row, past_key_values=cache, **GREEDY, max_new_tokens=8, disable_compile=True)
    assert torch.equal(text[0, 9:], by_hand(model, row[0], 8))


def test_one_cache_of_a_shared_beginning_serves_many_copies(model):
    shared, ends = random_ids(1, 6), [random_ids(1, n) for n in (1, 4, 2)]
    cache = model(shared, use_cache=True).past_key_values
    for end in ends:
        row = torch.cat([shared, end], 1)
        text = model.generate(row, past_key_values=copy.deepcopy(cache), **GREEDY, max_new_tokens=6)
        assert torch.equal(text[0, row.shape[1] :], by_hand(model, row[0], 6))
    assert cache.get_seq_length() == 6


def test_conversation_continues_from_the_returned_cache(model):
    rows = [random_ids(n) for n in (5, 3)]
    prompts = left_padded(rows)
    first = model.generate(**prompts, **GREEDY, max_new_tokens=4, return_dict_in_generate=True)
    more = random_ids(2, 3)
    ids = torch.cat([first.sequences, more], 1)
    mask = F.pad(prompts["attention_mask"], (0, 7), value=1)
    text = model.generate(ids, attention_mask=mask, past_key_values=first.past_key_values, **GREEDY, max_new_tokens=5)
    for row, its_text, its_more in zip(rows, text, more, strict=True):
        whole = torch.cat([row, by_hand(model, row, 4), its_more])
        assert torch.equal(its_text[-5:], by_hand(model, whole, 5))


def test_static_cache_can_be_emptied_and_used_again(model):
    cache = StaticCache(model.config, max_cache_len=20)
    for row in (random_ids(1, 7), random_ids(1, 4)):
        text = model.generate(row, past_key_values=cache, **GREEDY, max_new_tokens=6, disable_compile=True)
        assert torch.equal(text[0, -6:], by_hand(model, row[0], 6))
        cache.reset()


def test_cache_can_be_cropped_and_repeated(model):
    row = random_ids(1, 8)
    cache = model(row, use_cache=True).past_key_values
    cache.crop(-3)
    cache.batch_repeat_interleave(2)
    ends = random_ids(2, 3)
    logits = model(ends, past_key_values=cache).logits
    rows = torch.cat([row[:, :5].expand(2, -1), ends], 1)
    torch.testing.assert_close(logits, model(rows).logits[:, 5:], atol=1e-5, rtol=0)


# Compiled


@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True])
def test_decoding_with_a_static_cache_is_one_graph_compiled_once(model, padded):
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()  # runs what it is given, and counts
    # `generate` copies its settings; a function, unlike the counter, is not copied.
    how = CompileConfig(fullgraph=True, backend=lambda graph, inputs: counter(graph, inputs), mode=None)
    how._compile_all_devices = True  # the library compiles by itself on accelerators only
    for lengths in ((5, 2 if padded else 5), (8, 4 if padded else 8)):
        rows = [random_ids(n) for n in lengths]
        text = model.generate(
            **left_padded(rows), **GREEDY, max_length=16, cache_implementation="static", compile_config=how
        )
        for row, its_text in zip(rows, text, strict=True):
            new = 16 - max(lengths)
            assert torch.equal(its_text[-new:], by_hand(model, row, new))
    assert counter.frame_count == 1
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch, of its own parts, when its compiler is imported
def test_decoding_compiled_to_machine_code_gives_the_same_text(model):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    how = CompileConfig(fullgraph=True)
    how._compile_all_devices = True
    row = random_ids(1, 5)
    text = model.generate(row, **GREEDY, max_new_tokens=10, cache_implementation="static", compile_config=how)
    assert torch.equal(text[0, 5:], by_hand(model, row[0], 10))
    assert counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


# Sampling


def test_seed_repeats_a_sampled_text(model):
    rows = [random_ids(n) for n in (5, 3)]
    texts = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        texts.append(model.generate(**left_padded(rows), **SAMPLED, max_new_tokens=10))
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])


def test_sampling_draws_from_the_models_probabilities(model):
    row = random_ids(1, 5)
    torch.manual_seed(0)
    text = model.generate(row, **SAMPLED, top_k=0, max_new_tokens=1, num_return_sequences=4000)
    assert text.shape == (4000, 6)
    drawn = torch.bincount(text[:, 5], minlength=101) / 4000
    torch.testing.assert_close(drawn, model(row).logits[0, -1].softmax(-1), atol=0.03, rtol=0)


@pytest.mark.parametrize("limits", [{"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-6}], ids=str)
def test_sampling_narrowed_to_one_choice_is_greedy(model, limits):
    row = random_ids(1, 5)
    assert torch.equal(model.generate(row, **SAMPLED, **limits, max_new_tokens=8)[0, 5:], by_hand(model, row[0], 8))


def test_repetition_penalty_weakens_what_was_said(model):
    row = random_ids(5)
    text = model.generate(row[None], **GREEDY, max_new_tokens=10, repetition_penalty=3.0)[0]
    for _ in range(10):
        scores = model(row[None]).logits[0, -1]
        said = scores[row]
        scores[row] = torch.where(said < 0, said * 3, said / 3)
        row = torch.cat([row, scores.argmax(-1, keepdim=True)])
    assert torch.equal(text, row)
    assert not torch.equal(text[5:], by_hand(model, text[:5], 10))


def test_guidance_moves_away_from_the_text_without_its_prompt(model):
    row, without = random_ids(1, 6), random_ids(1, 3)
    out = model.generate(
        row,
        **GREEDY,
        max_new_tokens=2,
        guidance_scale=2.5,
        negative_prompt_ids=without,
        return_dict_in_generate=True,
        output_scores=True,
    )
    for step, scores in enumerate(out.scores):
        said = out.sequences[:, 6 : 6 + step]
        to, away = (model(torch.cat([start, said], 1)).logits[:, -1].log_softmax(-1) for start in (row, without))
        torch.testing.assert_close(scores, away + 2.5 * (to - away), atol=1e-4, rtol=0)


# Beams


def test_beams_score_is_the_log_probability_of_its_text(model):
    row = random_ids(1, 5)
    out = model.generate(
        row,
        **GREEDY,
        max_new_tokens=7,
        num_beams=3,
        num_return_sequences=3,
        length_penalty=1.0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    torch.testing.assert_close(out.sequences_scores, log_probability(model, out.sequences, 5) / 7, atol=1e-5, rtol=0)
    assert (out.sequences_scores.diff() <= 0).all()
    assert len({tuple(text) for text in out.sequences.tolist()}) == 3
    greedy = log_probability(model, torch.cat([row, by_hand(model, row[0], 7)[None]], 1), 5) / 7
    assert out.sequences_scores[0] >= greedy - 1e-5


def test_beam_as_wide_as_the_vocabulary_finds_the_best_of_all_texts(model):
    row = random_ids(1, 4)
    text = model.generate(row, **GREEDY, max_new_tokens=2, num_beams=101)
    firsts = torch.cat([row.expand(101, -1), torch.arange(101)[:, None]], 1)
    first, second = model(row).logits[0, -1].log_softmax(-1), model(firsts).logits[:, -1].log_softmax(-1)
    best = (first[:, None] + second).argmax()
    assert text[0, 4:].tolist() == [int(best) // 101, int(best) % 101]


@pytest.mark.parametrize("cache", [{"use_cache": False}, {}, {"cache_implementation": "static"}], ids=str)
def test_beams_of_a_padded_batch_are_those_of_each_row(model, cache):
    rows = [random_ids(n) for n in (6, 2, 4)]
    how = {**GREEDY, "max_new_tokens": 8, "num_beams": 3}
    text = model.generate(**left_padded(rows), **how, **cache, disable_compile=True)
    for row, its_text in zip(rows, text, strict=True):
        assert torch.equal(its_text[-8:], model.generate(row[None], **how, use_cache=False)[0, -8:])


def test_beams_can_be_sampled_and_repeated(model):
    row, texts = random_ids(1, 5), []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        texts.append(model.generate(row, **SAMPLED, num_beams=3, num_return_sequences=2, max_new_tokens=6))
    assert texts[0].shape == (2, 11)
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])


# Drafts


@pytest.mark.slow
def test_smaller_assistant_changes_no_greedy_text(model):
    assistant = strong(tiny_config(hidden_size=8, num_hidden_layers=1), seed=2)
    row = random_ids(1, 5)
    text = model.generate(row, **GREEDY, max_new_tokens=27, assistant_model=assistant)  # to the context's last place
    assert torch.equal(text[0, 5:], by_hand(model, row[0], 27))


def test_perfect_assistant_is_called_rarely(model):
    calls, assistant, row = [], copy.deepcopy(model), random_ids(1, 5)
    handle = model.register_forward_hook(lambda *args: calls.append(1))
    text = model.generate(row, **GREEDY, max_new_tokens=20, assistant_model=assistant)
    handle.remove()
    assert len(calls) < 15  # without drafts: 20
    assert torch.equal(text[0, 5:], by_hand(model, row[0], 20))


def test_drafts_found_in_the_prompt_change_no_greedy_text(model):
    row = random_ids(1, 6).repeat(1, 2)
    text = model.generate(row, **GREEDY, max_new_tokens=16, prompt_lookup_num_tokens=3)
    assert torch.equal(text[0, 12:], by_hand(model, row[0], 16))


def test_assistant_with_a_tokenizer_of_its_own_changes_no_greedy_text(speaker):
    model, tokenizer = speaker
    other = train_tokenizer(["The lazy dog moves the fox. "] * 20, 270)
    end = other.eos_token_id
    ids = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    assistant = strong(tiny_config(vocab_size=len(other), max_position_embeddings=128, **ids), seed=2)
    prompt = tokenizer("The quick brown fox", return_tensors="pt")
    text = model.generate(
        **prompt,
        do_sample=False,
        max_new_tokens=12,
        assistant_model=assistant,
        tokenizer=tokenizer,
        assistant_tokenizer=other,
    )
    row = prompt["input_ids"][0]
    assert torch.equal(text[0, len(row) :], by_hand(model, row, 12))


def test_drafts_can_be_sampled_and_repeated(model):
    assistant = strong(tiny_config(hidden_size=8, num_hidden_layers=1), seed=2)
    row, texts = random_ids(1, 5), []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        texts.append(model.generate(row, **SAMPLED, max_new_tokens=12, assistant_model=assistant))
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])


def test_function_of_the_readers_can_decode(model):
    def second_best(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        while not stopping_criteria(input_ids, None).all():
            inputs = model.prepare_inputs_for_generation(input_ids, use_cache=False)
            token = model(**inputs).logits[:, -1].topk(2).indices[:, 1:]
            input_ids = torch.cat([input_ids, token], 1)
        return input_ids

    row = random_ids(1, 5)
    text = model.generate(row, **GREEDY, max_new_tokens=3, custom_generate=second_best)
    assert text.shape == (1, 8)
    assert torch.equal(text[:, 5], model(row).logits[:, -1].topk(2).indices[:, 1])


# What goes in and what comes out


@pytest.mark.parametrize("padded", [False, True])
def test_embeddings_in_place_of_ids_give_the_same_text(model, padded):
    rows = [random_ids(n) for n in ((6, 3) if padded else (6, 6))]
    prompts = left_padded(rows)
    embeddings = model.get_input_embeddings()(prompts["input_ids"])
    mask = prompts["attention_mask"]
    new = model.generate(inputs_embeds=embeddings, attention_mask=mask, **GREEDY, max_new_tokens=7)
    for row, its_new in zip(rows, new, strict=True):
        assert torch.equal(its_new, by_hand(model, row, 7))
    both = model.generate(**prompts, inputs_embeds=embeddings, **GREEDY, max_new_tokens=7)
    assert torch.equal(both, torch.cat([prompts["input_ids"], new], 1))


def test_generation_without_prompt_starts_with_bos(model):
    text = model.generate(do_sample=False, max_new_tokens=5)
    assert torch.equal(text[0], torch.cat([torch.tensor([100]), by_hand(model, torch.tensor([100]), 5)]))


def test_padding_other_than_eos_needs_no_mask(model):
    rows = [random_ids(n) % 99 for n in (6, 3)]
    ids = left_padded(rows)["input_ids"]
    text = model.generate(ids, do_sample=False, max_new_tokens=5, pad_token_id=100, eos_token_id=99)
    for row, its_text in zip(rows, text, strict=True):
        expected = by_hand(model, row, 5)
        assert 99 not in expected
        assert torch.equal(its_text[6:], expected)


def test_only_the_last_position_of_a_prompt_goes_through_the_head(model):
    shapes = []
    handle = model.lm_head.register_forward_pre_hook(lambda head, args: shapes.append(tuple(args[0].shape)))
    model.generate(random_ids(2, 9), attention_mask=torch.ones(2, 9).long(), **GREEDY, max_new_tokens=3)
    handle.remove()
    assert shapes == [(2, 1, 16)] * 3


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_scores_and_states_of_each_step_are_those_of_a_forward(model, attention):
    model.set_attn_implementation(attention)
    row = random_ids(1, 5)
    out = model.generate(
        row,
        **GREEDY,
        max_new_tokens=4,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        output_hidden_states=True,
        output_attentions=attention == "eager",
    )
    whole = model(out.sequences[:, :-1], output_hidden_states=True)
    expected = whole.logits[:, 4:]
    for given in (out.scores, out.logits):
        torch.testing.assert_close(torch.stack(given, 1), expected, atol=1e-5, rtol=0)
    last = torch.stack([states[-1][:, -1] for states in out.hidden_states], 1)
    torch.testing.assert_close(last, whole.hidden_states[-1][:, 4:], atol=1e-5, rtol=0)
    if attention == "eager":
        assert [tuple(step[0].shape) for step in out.attentions] == [(1, 2, 5, 5), *((1, 2, 1, n) for n in (6, 7, 8))]
    steps = model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
    torch.testing.assert_close(steps.sum(1), log_probability(model, out.sequences, 5), atol=1e-4, rtol=0)


@pytest.mark.parametrize("as_list", [False, True])
def test_row_stops_at_its_end_token_and_the_others_continue(model, as_list):
    rows = [random_ids(n) for n in (6, 3)]
    whole = [by_hand(model, row, 8) for row in rows]
    end = next(int(token) for token in whole[0][1:] if token not in whole[1])
    length = whole[0].tolist().index(end) + 1
    text = model.generate(
        **left_padded(rows),
        do_sample=False,
        max_new_tokens=8,
        eos_token_id=[100, end] if as_list else end,
        pad_token_id=100,
    )
    assert text[0, 6:].tolist() == whole[0][:length].tolist() + [100] * (8 - length)
    assert torch.equal(text[1, 6:], whole[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static"}], ids=str)
def test_half_precision_generates_the_highest_scores(model, dtype, cache):
    model.to(dtype)
    rows = [random_ids(n) for n in (6, 3)]
    out = model.generate(
        **left_padded(rows),
        **GREEDY,
        **cache,
        max_new_tokens=8,
        disable_compile=True,
        return_dict_in_generate=True,
        output_logits=True,
    )
    model.float()
    for i, row in enumerate(rows):
        text = torch.cat([row, out.sequences[i, 6:]])
        full = model(text[None, :-1]).logits[0, -8:]
        assert (torch.stack(out.logits, 1)[i] - full).abs().max() < 0.04 * full.abs().max()


# Many requests at once


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_continuous_batching_gives_each_request_the_greedy_text(model, attention):
    model.set_attn_implementation(attention)
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8, 9], [10], [1, 2, 3, 4]]
    answers = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=100),
        # Left to itself it takes most of the memory for its cache. Two blocks a request, and fewer than all need.
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=8, num_blocks=6, max_batch_tokens=8, use_cuda_graph=False, use_async_batching=False
        ),
    )
    assert model.config._attn_implementation == attention
    for prompt, answer in zip(prompts, answers.values(), strict=True):
        assert answer.generated_tokens == by_hand(model, torch.tensor(prompt), 8).tolist()


# Text


@pytest.fixture
def speaker(tiny_tokenizer: PreTrainedTokenizerFast) -> tuple[GPT2SmallForCausalLM, PreTrainedTokenizerFast]:
    """A model with a context of 128 and a tokenizer of its own with a chat template."""
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    end = tokenizer.eos_token_id
    ids = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    return strong(tiny_config(vocab_size=len(tokenizer), max_position_embeddings=128, **ids)), tokenizer


CHATS = [
    [{"role": "user", "content": "The quick fox"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Every effort"},
        {"role": "assistant", "content": "moves"},
        {"role": "user", "content": "whom?"},
    ],
]


def answer_by_hand(model, tokenizer, chat, new: int) -> str:
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    return tokenizer.decode(by_hand(model, torch.tensor(ids), new))


@pytest.mark.parametrize("batch_size", [1, 2])
def test_chats_of_different_lengths_are_answered_as_each_alone(speaker, batch_size):
    model, tokenizer = speaker
    pipe = pipeline("text-generation", model, tokenizer=tokenizer, batch_size=batch_size)
    new = 10
    answers = pipe(CHATS, max_new_tokens=new, do_sample=False)
    for chat, (answer,) in zip(CHATS, answers, strict=True):
        *before, said = answer["generated_text"]
        assert before == chat
        assert said == {"role": "assistant", "content": answer_by_hand(model, tokenizer, chat, new)}


def test_chat_ends_at_the_end_token(speaker):
    model, tokenizer = speaker
    ids = tokenizer.apply_chat_template(CHATS[0], add_generation_prompt=True, return_dict=False)
    whole = by_hand(model, torch.tensor(ids), 10).tolist()
    end = next(token for token in whole[2:] if token not in whole[:2])
    model.generation_config.eos_token_id = end
    pipe = pipeline("text-generation", model, tokenizer=tokenizer)
    (answer,) = pipe(CHATS[0], max_new_tokens=10, do_sample=False, return_tensors=True)
    assert answer["generated_token_ids"] == ids + whole[: whole.index(end) + 1]


def test_prompts_of_different_lengths_are_completed_as_each_alone(speaker):
    model, tokenizer = speaker
    prompts = ["The", "Every effort moves you forward. The quick", "dog"]
    pipe = pipeline("text-generation", model, tokenizer=tokenizer, batch_size=3)
    together = pipe(prompts, max_new_tokens=8, do_sample=False, return_full_text=False)
    for prompt, (answer,) in zip(prompts, together, strict=True):
        ids = torch.tensor(tokenizer(prompt)["input_ids"])
        assert answer["generated_text"] == tokenizer.decode(by_hand(model, ids, 8))


def test_streamer_gets_the_text_as_it_is_written(speaker):
    model, tokenizer = speaker
    prompt = tokenizer("The quick", return_tensors="pt")
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    text = model.generate(**prompt, max_new_tokens=12, do_sample=False, streamer=streamer)
    pieces = list(streamer)
    assert "".join(pieces) == tokenizer.decode(text[0, prompt["input_ids"].shape[1] :])
    assert len(pieces) > 1


def test_stop_string_ends_the_text(speaker):
    model, tokenizer = speaker
    prompt = tokenizer("The quick", return_tensors="pt")
    n = prompt["input_ids"].shape[1]
    whole = by_hand(model, prompt["input_ids"][0], 40)
    pieces = [tokenizer.decode(token) for token in whole]
    # A piece that is text by itself (others are parts of a character) and comes for the first time.
    end, stop = next((i, p) for i, p in enumerate(pieces) if i > 0 and p.isascii() and p not in "".join(pieces[:i]))
    text = model.generate(**prompt, max_new_tokens=40, do_sample=False, stop_strings=[stop], tokenizer=tokenizer)
    assert torch.equal(text[0, n:], whole[: end + 1])


# Another vocabulary


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def resizable(request: pytest.FixtureRequest) -> GPT2SmallForCausalLM:
    return strong(tiny_config(tie_word_embeddings=request.param))


@pytest.mark.parametrize("size", [120, 60])
def test_another_vocabulary_size_leaves_every_old_row_as_it_was(resizable, size, tmp_path):
    kept, ids = min(size, 101), random_ids(2, 9) % 60
    rows, head = (w.weight.clone() for w in (resizable.get_input_embeddings(), resizable.get_output_embeddings()))
    before = resizable(ids).logits
    resizable.resize_token_embeddings(size)
    assert resizable.config.vocab_size == size
    tied = resizable.config.tie_word_embeddings
    assert (resizable.lm_head.weight is resizable.model.embed_tokens.weight) is tied
    assert torch.equal(resizable.model.embed_tokens.weight[:kept], rows[:kept])
    assert torch.equal(resizable.lm_head.weight[:kept], head[:kept])
    out = resizable(ids, labels=torch.full_like(ids, size - 1))  # the last id can be read, scored and written
    assert out.loss.isfinite()
    assert out.logits.shape == (2, 9, size)
    torch.testing.assert_close(out.logits[..., :kept], before[..., :kept])
    text = resizable.generate(torch.full((1, 3), size - 1), **{**GREEDY, "pad_token_id": 0}, max_new_tokens=4)
    assert torch.equal(text[0, 3:], by_hand(resizable, text[0, :3], 4))
    resizable.save_pretrained(tmp_path)
    again = GPT2SmallForCausalLM.from_pretrained(tmp_path)
    assert again.config.vocab_size == size
    assert torch.equal(again(ids).logits, out.logits)


@pytest.mark.parametrize("size", [None, 120])
def test_vocabulary_can_be_padded_to_a_round_size(resizable, size):
    ids = random_ids(2, 9)
    before = resizable(ids).logits
    resizable.resize_token_embeddings(size, pad_to_multiple_of=64)
    assert resizable.config.vocab_size == 128
    assert resizable(ids).logits.shape == (2, 9, 128)
    torch.testing.assert_close(resizable(ids).logits[..., :101], before)


def test_new_rows_begin_at_the_mean_of_the_old_ones(resizable):
    means = [w.weight.mean(0) for w in (resizable.model.embed_tokens, resizable.lm_head)]
    resizable.resize_token_embeddings(120)
    for layer, mean in zip((resizable.model.embed_tokens, resizable.lm_head), means, strict=True):
        torch.testing.assert_close(layer.weight[101:], mean.expand(19, -1), atol=1e-3, rtol=0)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("scheme", "std"), [("gpt2", 0.02), ("small_init", 0.158)])
def test_new_rows_are_drawn_as_at_the_start_where_no_mean_is_wanted(tied, scheme, std):
    model = strong(tiny_config(init_scheme=scheme, tie_word_embeddings=tied))
    model.resize_token_embeddings(301, mean_resizing=False)
    for layer in (model.model.embed_tokens, model.lm_head):
        assert layer.weight[101:].std().item() == pytest.approx(std, rel=0.05)


def test_head_without_a_vocabulary_takes_new_tokens_too():
    model = GPT2SmallForSequenceClassification(tiny_config()).eval()
    ids = random_ids(2, 9)
    before = model(ids).logits
    model.resize_token_embeddings(120)
    torch.testing.assert_close(model(ids).logits, before)
    assert model(torch.full((1, 4), 119)).logits.shape == (1, 2)


# The end of the context


PAST_THE_CONTEXT = [
    pytest.param({"use_cache": False}, id="none"),
    pytest.param({}, id="dynamic"),
    pytest.param({"cache_implementation": "static", "disable_compile": True}, id="static"),
    pytest.param({"num_beams": 3}, id="beams"),
]


@pytest.mark.parametrize("how", PAST_THE_CONTEXT)
def test_text_may_fill_the_context_and_one_token_more(model, how):
    row = random_ids(1, 5)
    # The last token is written and never read, so that it needs no position.
    text = model.generate(row, **GREEDY, **how, max_new_tokens=28)
    assert text.shape == (1, 33)
    if "num_beams" not in how:
        assert torch.equal(text[0, 5:], by_hand(model, row[0], 28))


@pytest.mark.parametrize("how", PAST_THE_CONTEXT)
@pytest.mark.parametrize(("prompt", "new"), [(5, 29), (30, 10)])
def test_text_past_the_context_ends_in_an_error_with_both_lengths(model, how, prompt, new):
    with pytest.raises(ValueError, match="reaches position 33, the model takes 32"):
        model.generate(random_ids(1, prompt), **GREEDY, **how, max_new_tokens=new)


@pytest.mark.slow
def test_compiled_text_past_the_context_ends_in_the_same_error(model):
    torch._dynamo.reset()
    # A compiled step cannot look at its positions, and would read beside the table of positions.
    how = CompileConfig(fullgraph=True, backend="eager", mode=None)
    how._compile_all_devices = True
    with pytest.raises(ValueError, match="reaches position 33, the model takes 32"):
        model.generate(random_ids(1, 29), **GREEDY, max_new_tokens=9, cache_implementation="static", compile_config=how)
    torch._dynamo.reset()


@pytest.mark.parametrize("how", PAST_THE_CONTEXT)
def test_prompt_longer_than_the_context_is_an_error_with_both_lengths(model, how):
    with pytest.raises(ValueError, match="reaches position 40, the model takes 32"):
        model.generate(random_ids(1, 40), **GREEDY, **how, max_new_tokens=1)


def test_cached_step_past_the_context_is_an_error_with_both_lengths(model):
    cache = model(random_ids(2, 32), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="reaches position 33, the model takes 32"):
        model(random_ids(2, 1), past_key_values=cache)


def test_with_no_length_asked_for_text_ends_with_the_context(model):
    with pytest.warns(UserWarning, match="model-agnostic default `max_length`"):
        text = model.generate(random_ids(1, 25), **GREEDY)
    assert text.shape == (1, 32)


@pytest.mark.parametrize("cache", [{"use_cache": False}, {}, {"cache_implementation": "static"}], ids=str)
def test_padding_takes_no_place_in_the_context(model, cache):
    rows = [random_ids(n) for n in (4, 6)]
    prompts = {
        name: F.pad(ids, (30, 0), value=100 if name == "input_ids" else 0) for name, ids in left_padded(rows).items()
    }
    text = model.generate(**prompts, **GREEDY, **cache, max_new_tokens=8, disable_compile=True)
    for row, its_text in zip(rows, text, strict=True):
        assert torch.equal(its_text[36:], by_hand(model, row, 8))


def test_base_model_assists_its_chat_model_greedily(tiny_tokenizer):
    """The chat model has two more tokens. Sampling fails in the library, where no token has to be translated."""
    chat_tokenizer = copy.deepcopy(tiny_tokenizer)
    chat_tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    torch.manual_seed(0)
    base, chat = (
        GPT2SmallForCausalLM(tiny_config(vocab_size=len(words))).eval() for words in (tiny_tokenizer, chat_tokenizer)
    )
    ids = chat_tokenizer("Every effort", return_tensors="pt").input_ids
    asked = {"max_new_tokens": 8, "do_sample": False}
    assisted = chat.generate(
        ids, assistant_model=base, tokenizer=chat_tokenizer, assistant_tokenizer=tiny_tokenizer, **asked
    )
    assert torch.equal(assisted, chat.generate(ids, **asked))
