"""Benchmarks: local files as tasks of the harness, models whose score is known, items that do not fit."""

import json

import numpy as np
import pytest
import torch
from conftest import tiny_config

from gpt2small_hf import GPT2SmallForCausalLM
from gpt2small_hf.errors import UsageError
from gpt2small_hf.evaluation.benchmarks import (
    ContextTooShortError,
    load_benchmarks,
    local_names,
    run_benchmark,
    wrap_model,
    write_tasks,
)
from gpt2small_hf.evaluation.comparison import score_of
from gpt2small_hf.evaluation.items import Header, TaskItems

ANIMALS = ("fox", "dog", "hare", "crow")


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    """A folder with a file of each form; the gold answers follow a rule that can be learned."""
    folder = tmp_path_factory.mktemp("questions")
    asked = [
        {"query": f"Question: Which letter has the {noun} number {n}?", "choices": list("ABCD"), "gold": gold}
        for n in range(6)
        for gold, noun in enumerate(ANIMALS)
    ]
    write_lines(folder / "animals_test.jsonl", asked)
    write_lines(folder / "lambada.jsonl", [{"context": "The fox saw the", "continuation": one} for one in ANIMALS])
    for name in ("agreement", "island"):
        pairs = [
            {"sentence_good": f"The {one} sees {name}.", "sentence_bad": f"The {one} see {name}s."} for one in ANIMALS
        ]
        write_lines(folder / "pairs" / f"{name}.jsonl", pairs)
    write_lines(
        folder / "arithmetic.jsonl", [{"question": "1 + 1 =", "answer": "2"}, {"question": "2 =", "answer": "2"}]
    )
    write_lines(folder / "prose.jsonl", [{"text": "The fox saw the crow. " * 30}, {"text": "The hare ran."}])
    write_lines(folder / "other.jsonl", [{"title": "not a task"}])
    return folder


@pytest.fixture(scope="module")
def benchmarks(questions, tmp_path_factory):
    pytest.importorskip("lm_eval")
    folder = tmp_path_factory.mktemp("tasks")
    names = local_names(questions)
    write_tasks(names, folder)
    return load_benchmarks(list(names), folder, None)


def measure(task, model, tokenizer, batch_size=4, **settings):
    wrapped = wrap_model(model, tokenizer, batch_size, lambda total: None, lambda rows: None)
    items, digest = run_benchmark(task, wrapped, **settings)
    name = task.config.task
    header = Header(task=name, model="m", weights_sha256="", items_sha256=digest, n_items=len(items), settings={})
    return TaskItems(header, items)


@pytest.fixture
def model(tiny_tokenizer):
    torch.manual_seed(0)
    return GPT2SmallForCausalLM(
        tiny_config(vocab_size=len(tiny_tokenizer), max_position_embeddings=64, hidden_size=64)
    ).eval()


def test_each_file_is_a_task_and_each_folder_a_group(questions):
    assert list(local_names(questions)) == ["animals", "arithmetic", "lambada", "prose", "pairs"]


def test_a_folder_without_tasks_lists_the_known_forms(tmp_path):
    write_lines(tmp_path / "other.jsonl", [{"title": "x"}])
    with pytest.raises(UsageError, match=r"no \.jsonl file with the keys of a task.*sentence_good, sentence_bad"):
        local_names(tmp_path)


@pytest.mark.parametrize(
    "line", ["", "not JSON", "3", '{"query": "x"}', '{"query": "x", "choices": ["a", "b"], "gold": 2}']
)
def test_a_line_that_is_not_an_item_is_named(tmp_path, line):
    good = '{"query": "x", "choices": ["a", "b"], "gold": 1}'
    (tmp_path / "mine.jsonl").write_text(f"{good}\n{line}\n{good}\n")
    with pytest.raises(UsageError, match=r"mine\.jsonl, line 2 is not an item like those before it: (it has|gold)"):
        write_tasks(local_names(tmp_path), tmp_path / "tasks")


@pytest.mark.slow
def test_a_model_without_knowledge_scores_chance(benchmarks, model, tiny_tokenizer):
    """All logits are 0: answers of one length tie, and a tie counts as its share."""
    with torch.no_grad():
        model.get_input_embeddings().weight.zero_()
        model.get_output_embeddings().weight.zero_()
    assert len({len(tiny_tokenizer(f" {letter}").input_ids) for letter in "ABCD"}) == 1
    found = score_of("animals", "m", measure(benchmarks.tasks["animals"], model, tiny_tokenizer))
    assert found.scores["accuracy"].value == pytest.approx(0.25)
    assert not found.has_signal


@pytest.mark.slow
def test_a_model_trained_on_the_answers_scores_them_and_not_shuffled_ones(
    questions, benchmarks, model, tiny_tokenizer, tmp_path
):
    rows = [json.loads(line) for line in (questions / "animals_test.jsonl").read_text().splitlines()]
    texts = [f"{row['query']}\nAnswer: {row['choices'][row['gold']]}" for row in rows]
    tiny_tokenizer.padding_side = "right"
    batch = tiny_tokenizer(texts, padding=True, return_tensors="pt")
    ends = batch.attention_mask.sum(1, keepdim=True)
    place = torch.arange(batch.input_ids.shape[1])
    labels = batch.input_ids.masked_fill((place >= ends) | (place < ends - 2), -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    for _ in range(120):
        optimizer.zero_grad()
        model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=labels).loss.backward()
        optimizer.step()
    model.eval()
    assert measure(benchmarks.tasks["animals"], model, tiny_tokenizer).measures()["accuracy"].values.mean() > 0.95
    shuffled = np.random.default_rng(1).permutation([row["gold"] for row in rows]).tolist()
    write_lines(
        tmp_path / "q" / "animals.jsonl", [{**row, "gold": gold} for row, gold in zip(rows, shuffled, strict=True)]
    )
    names = local_names(tmp_path / "q")
    write_tasks(names, tmp_path / "tasks")
    task = load_benchmarks(list(names), tmp_path / "tasks", None).tasks["animals"]
    found = score_of("animals", "m", measure(task, model, tiny_tokenizer))
    assert not found.has_signal


@pytest.mark.slow
def test_results_do_not_depend_on_the_batch_size(benchmarks, model, tiny_tokenizer):
    for name in ("animals", "lambada", "prose", "pairs_island"):
        one, other = (measure(benchmarks.tasks[name], model, tiny_tokenizer, size) for size in (1, 5))
        assert one.header.items_sha256 == other.header.items_sha256
        for (values, _), (again, _) in zip(one.measures().values(), other.measures().values(), strict=True):
            np.testing.assert_allclose(values, again, atol=1e-5)


@pytest.mark.slow
def test_generated_answers_stay_within_a_short_context(benchmarks, model, tiny_tokenizer):
    """The model's own limit of new tokens does not apply, and the harness's 256 would not fit."""
    model.generation_config.max_new_tokens = 1000
    found = measure(benchmarks.tasks["arithmetic"], model, tiny_tokenizer)
    assert [item.metrics.keys() for item in found.items] == [{"exact_match"}] * 2
    assert all(len(tiny_tokenizer(item.response).input_ids) <= 64 for item in found.items)


@pytest.mark.slow
def test_an_answer_longer_than_the_context_is_refused(tmp_path, model, tiny_tokenizer):
    pytest.importorskip("lm_eval")
    write_lines(tmp_path / "q" / "long.jsonl", [{"query": "x", "choices": ["fox " * 200, "a"], "gold": 0}])
    names = local_names(tmp_path / "q")
    write_tasks(names, tmp_path / "tasks")
    task = load_benchmarks(["long"], tmp_path / "tasks", None).tasks["long"]
    with pytest.raises(ContextTooShortError, match="more than the model's context of 64"):
        measure(task, model, tiny_tokenizer)


@pytest.mark.slow
def test_an_unknown_task_is_named():
    pytest.importorskip("lm_eval")
    with pytest.raises(UsageError, match="--tasks blimpp is not a task"):
        load_benchmarks(["blimpp"], None, None)


@pytest.mark.slow
def test_measuring_draws_no_global_random_number(benchmarks, model, tiny_tokenizer):
    import random

    before = (torch.random.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate())
    measure(benchmarks.tasks["animals"], model, tiny_tokenizer, limit=3)
    assert torch.equal(before[0], torch.random.get_rng_state())
    assert before[1] == np.random.get_state()[1].tolist()
    assert before[2] == random.getstate()
