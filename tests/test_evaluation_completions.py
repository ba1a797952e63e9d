"""Continuations repeat, leave the random stream alone and end with the context."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gpt2small_hf.evaluation.completions import complete
from gpt2small_hf.runs import read_json


def test_completions_repeat_and_leave_no_trace(tiny_run):
    model = AutoModelForCausalLM.from_pretrained(tiny_run.model).train()
    tokenizer = AutoTokenizer.from_pretrained(tiny_run.model)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = complete(model, tokenizer, ["Once the fox", "Then"])
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert first == complete(model, tokenizer, ["Once the fox", "Then"])
    assert first[0]["sampled"] != complete(model, tokenizer, ["Once the fox"], seed=1)[0]["sampled"]


def test_the_file_of_a_run_holds_prompt_and_both_continuations(tiny_run):
    (completion,) = read_json(tiny_run.completions)["completions"]
    assert completion["prompt"] == "Once the fox"
    assert completion["greedy"]
    assert completion["sampled"]
    assert completion["settings"]["temperature"] == 0.8


def test_a_prompt_as_long_as_the_context_is_continued_from_its_end(tiny_run):
    model = AutoModelForCausalLM.from_pretrained(tiny_run.model)
    tokenizer = AutoTokenizer.from_pretrained(tiny_run.model)
    (completion,) = complete(model, tokenizer, ["the fox saw the river " * 20])
    assert completion["greedy"]
