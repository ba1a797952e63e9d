"""Completions are reproducible, keep the random state and end with the context."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gpt2small_hf.evaluation.completions import complete
from gpt2small_hf.runs.files import read_json


def test_completions_are_reproducible_and_keep_the_random_state(tiny_run):
    model = AutoModelForCausalLM.from_pretrained(tiny_run.model).train()
    tokenizer = AutoTokenizer.from_pretrained(tiny_run.model)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = complete(model, tokenizer, ["Once the fox", "Then"])
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert first == complete(model, tokenizer, ["Once the fox", "Then"])
    assert first[0].sampled != complete(model, tokenizer, ["Once the fox"], seed=1)[0].sampled


def test_file_of_a_run_contains_prompt_and_both_continuations(tiny_run):
    (completion,) = read_json(tiny_run.completions)["completions"]
    assert completion["prompt"] == "Once the fox"
    assert completion["greedy"]
    assert completion["sampled"]
    assert completion["settings"]["temperature"] == 0.8


def test_prompt_longer_than_the_context_is_truncated_to_its_end(tiny_run):
    model = AutoModelForCausalLM.from_pretrained(tiny_run.model)
    tokenizer = AutoTokenizer.from_pretrained(tiny_run.model)
    (completion,) = complete(model, tokenizer, ["the fox saw the river " * 20])
    assert completion.greedy


def loaded(run):
    return AutoModelForCausalLM.from_pretrained(run.model), AutoTokenizer.from_pretrained(run.model)


def test_prompts_are_decoded_in_one_batch(tiny_run):
    """There is one forward pass for each new token, for any number of prompts, greedy and sampled."""
    model, tokenizer = loaded(tiny_run)
    lengths = []
    model.register_forward_pre_hook(lambda _, args, kwargs: lengths.append(kwargs["input_ids"].shape), with_kwargs=True)
    complete(model, tokenizer, ["Once the fox", "Then", "Later the dog saw the"], max_new_tokens=9)
    assert len(lengths) <= 9
    assert all(shape == (6, 1) for shape in lengths[1:])  # the rest is in the cache


def test_completions_of_a_batch_are_those_of_generate_alone(tiny_run):
    """Prompts of different lengths, one of which nearly fills the context, do not affect each other."""
    model, tokenizer = loaded(tiny_run)
    prompts = ["Once the fox", "Then", "Later the dog saw the stone, and the", "the fox saw the river " * 9]
    found = complete(model, tokenizer, prompts, max_new_tokens=20)
    assert len({one.settings.max_new_tokens for one in found}) > 1
    for prompt, one in zip(prompts, found, strict=True):
        assert one == complete(model, tokenizer, [prompt], max_new_tokens=20)[0]
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"][:, -16:]
        limit = one.settings.max_new_tokens
        torch.manual_seed(0)
        for name, how in (("sampled", {"do_sample": True, "temperature": 0.8, "top_k": 50}), ("greedy", {})):
            alone = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, **how)
            assert getattr(one, name) == tokenizer.decode(alone[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_completions_of_diverged_weights_are_text(tiny_run, broken):
    model, tokenizer = loaded(tiny_run)
    with torch.no_grad():
        model.lm_head.weight[5] = broken
    (found,) = complete(model, tokenizer, ["Once the fox"])
    assert isinstance(found.greedy, str)
    assert isinstance(found.sampled, str)
