"""`evaluate` on models of this package and of transformers, and a user-defined task."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from gpt2small_hf.evaluation.tasks import evaluate, notes, tables
from gpt2small_hf.runs.results import HeldOut


@pytest.fixture(scope="module")
def model(tiny_run):
    return AutoModelForCausalLM.from_pretrained(tiny_run.model)


def test_evaluate_measures_what_the_run_recorded(model, tiny_run, splits):
    train, heldout = splits
    tokenizer = AutoTokenizer.from_pretrained(tiny_run.model)
    recorded = HeldOut.load(tiny_run.heldout)
    results = evaluate(model, tokenizer=tokenizer, heldout=heldout, train=train, prompts=["The"])
    assert list(results) == ["heldout", "overlap", "completions"]
    assert results["heldout"].after.loss_nats == pytest.approx(recorded.after.loss_nats, abs=1e-5)
    assert results["heldout"].unigram == recorded.unigram
    assert results["overlap"].share == pytest.approx(recorded.new_text.share)
    assert notes(results)[-1].startswith("sample: The")
    assert [row[0] for row in tables(results)[0]][1:3] == ["unigram (no context)", "after training"]


def test_evaluate_takes_models_of_transformers_and_refuses_unknown_tasks(splits):
    _, heldout = splits
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=300, n_positions=32, n_embd=16, n_layer=1, n_head=2))
    found = evaluate(model, ["heldout"], heldout=heldout)["heldout"]
    assert found.after.loss_nats == pytest.approx(math.log(300), abs=0.1)
    assert found.after.bits_per_byte is None
    with pytest.raises(ValueError, match="heldot is not a task"):
        evaluate(model, ["heldot"], heldout=heldout)
    with pytest.raises(ValueError, match="answers cannot be measured"):
        evaluate(model, ["answers"], heldout=heldout)
