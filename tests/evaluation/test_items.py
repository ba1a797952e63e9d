"""Items files: measures, ties, values that are not finite, and reading back."""

import json
import math

import numpy as np
import pytest

from gpt2small_hf.errors import UsageError
from gpt2small_hf.evaluation.items import Choices, Header, Metrics, TaskItems, Text, hash_items


def task_items(*items, task="arc"):
    header = Header(
        task=task, model="m", weights_sha256="0", items_sha256=hash_items([task]), n_items=len(items), settings={}
    )
    return TaskItems(header, items)


def question(*log_likelihoods, gold=0, sizes=None, **more):
    sizes = sizes or [4] * len(log_likelihoods)
    return Choices(id=0, log_likelihoods=list(log_likelihoods), n_bytes=sizes, n_characters=sizes, gold=gold, **more)


@pytest.mark.parametrize(
    ("found", "accuracy"),
    [
        (question(-1.0, -2.0), 1),
        (question(-1.0, -2.0, gold=1), 0),
        (question(-1.0, -1.0, gold=1), 1 / 2),
        (question(-1.0, -1.0, -1.0, -9.0), 1 / 3),
        (question(None, -5.0), 0),
        (question(None, None, None, None), 1 / 4),
    ],
)
def test_accuracy_shares_ties_so_that_no_knowledge_scores_chance(found, accuracy):
    measured = task_items(found).measures()
    assert measured["accuracy"].values == pytest.approx([accuracy])


def test_accuracy_per_character_and_bits_per_byte_of_the_gold_answer():
    measured = task_items(question(-6.0, -4.0, sizes=[12, 4])).measures()
    assert measured["accuracy"].values == [0]
    assert measured["accuracy_norm"].values == [1]  # -0.5 against -1 per character
    assert measured["bits_per_byte"].values == pytest.approx([6 / math.log(2) / 12])


def test_a_single_answer_is_right_if_greedy_decoding_gives_it():
    found = task_items(question(-1.0, is_greedy=True), question(-2.0, is_greedy=False))
    assert found.measures()["accuracy"].values.tolist() == [1, 0]
    assert found.chance is None


def test_chance_is_the_mean_over_numbers_of_answers():
    assert task_items(question(-1.0, -2.0), question(-1.0, -2.0, -3.0, -4.0)).chance == pytest.approx(3 / 8)


def test_a_diverged_model_has_no_bits_per_byte():
    assert math.isnan(task_items(question(None, -1.0)).measures()["bits_per_byte"].values[0])


def test_loss_of_rows_is_the_ratio_of_sums():
    rows = task_items(Text(id=0, nats=6.0, n_tokens=2, n_bytes=8.0), Text(id=1, nats=2.0, n_tokens=2, n_bytes=4.0))
    loss, bits = rows.measures()["loss_nats"], rows.measures()["bits_per_byte"]
    assert np.sum(loss.values) / np.sum(loss.weights) == 2
    assert np.sum(bits.values) / np.sum(bits.weights) == pytest.approx(8 / math.log(2) / 12)


@pytest.mark.parametrize(
    "items",
    [
        [question(-1.0, None), question(-3.0, -2.0, gold=1)],
        [Text(id=0, nats=None, n_tokens=3, n_bytes=1.5)],
        [Metrics(id=0, metrics={"exact_match": 1.0}, response="a")],
    ],
)
def test_file_is_read_back(tmp_path, items):
    written = task_items(*items)
    written.save(tmp_path / "inner" / "arc.jsonl")
    assert TaskItems.load(tmp_path / "inner" / "arc.jsonl").items == items
    assert TaskItems.load(tmp_path / "inner" / "arc.jsonl").header == written.header


def test_file_of_another_form_names_its_line(tmp_path):
    path = tmp_path / "arc.jsonl"
    task_items(question(-1.0, -2.0), question(-1.0, -2.0)).save(path)
    lines = path.read_text().splitlines()
    lines[2] = json.dumps({"id": 1, "log_likelihoods": "none"})
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(UsageError, match=r"arc\.jsonl, line 3: log_likelihoods is 'none', expected list"):
        TaskItems.load(path)
