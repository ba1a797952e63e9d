"""Metadata of the model card: what the Hub reads."""

import re
import shutil
from pathlib import Path

import pytest
from conftest import REPOSITORY
from huggingface_hub import ModelCard

from gpt2small_hf.publishing.card import page
from gpt2small_hf.publishing.lineage_facts import linked_repositories
from gpt2small_hf.runs.files import read_json, sha256, write_json
from gpt2small_hf.runs.layout import RunFolder
from gpt2small_hf.training.base_model import sources_of
from publishing.cards import VARIANTS, card_of, change, copied, publish

pytest_plugins = ["publishing.cards"]
pytestmark = pytest.mark.usefixtures("in_checkout")


# ---- metadata ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_hub_is_told_how_to_load_it_and_what_it_does(variant, cards):
    told = cards[variant].metadata
    assert told["library_name"] == "transformers"
    assert told["pipeline_tag"] == "text-generation"
    chats = variant in ("chat", "adapters", "nothing held out")
    assert told["tags"] == ["gpt2small_hf", "gpt2", *(["conversational"] if chats else [])]
    assert told.get("language") == (["en"] if variant == "run" else None)
    assert told.get("license") == {"run": "apache-2.0", "chat": "cc-by-4.0"}.get(variant)


@pytest.mark.parametrize("variant", ["run", "chat", "native", "data of the Hub"])
def test_the_hub_is_told_the_loss_that_was_measured(variant, cards):
    card = cards[variant]
    after = read_json(card.source.run_folder.heldout)["after"]
    told = {result.metric_type: result for result in ModelCard(card.text).data.eval_results}
    assert {kind: result.metric_value for kind, result in told.items()} == {
        kind: pytest.approx(after[kind], abs=1e-6) for kind in ("loss", "perplexity", "bits_per_byte")
    }
    assert card.metadata["model-index"][0]["name"] == card.publication.repo_id.split("/")[1]
    of = {"chat": "chats.jsonl", "data of the Hub": "somebody/some-text"}.get(variant, "corpus.jsonl")
    assert told["loss"].dataset_name.startswith(f"held-out part of {of}")
    assert (told["loss"].dataset_type == of) == (variant == "data of the Hub")


@pytest.mark.parametrize("variant", ["checkpoint", "unfinished", "bare", "converted", "older run", "nothing held out"])
def test_nothing_is_claimed_where_nothing_was_measured_or_nobody_knows_on_what(variant, cards):
    assert "model-index" not in cards[variant].metadata


def test_data_sets_are_named_only_where_they_are_the_hubs(cards, chat_run):
    named = {variant: card.metadata.get("datasets") for variant, card in cards.items()}
    expected = dict.fromkeys(VARIANTS)
    assert named == expected | {"converted": ["somebody/some-text"], "data of the Hub": ["somebody/some-text"]}
    assert "[somebody/some-text](https://huggingface.co/datasets/somebody/some-text), configuration plain" in (
        cards["data of the Hub"].prose
    )


@pytest.mark.parametrize("name", ["data/chats.jsonl", "gone/chats.parquet", "data/chats"])
def test_a_file_that_is_no_longer_there_is_not_taken_for_a_data_set_of_the_hub(name, chat_run):
    run = copied(chat_run, f"moved-{name.replace('/', '-')}")
    origin = read_json(run.resolved)["data"]["sources"]["train"][0]
    assert "sha256" in origin
    change(run.resolved, data={"sources": {"train": [{**origin, "name": name}], "validation": []}})
    assert card_of(run.root).metadata.get("datasets") is None


@pytest.mark.slow
def test_chats_of_the_hub_are_named_with_their_revision(chat_run):
    run = copied(chat_run, "chats-of-hub")
    origin = {"name": "somebody/chats:test", "shape": "x", "conversations": 32, "unreadable": 0, "revision": "abc123"}
    change(run.resolved, data={"sources": {"train": [origin], "validation": []}})
    card = card_of(run.root)
    assert card.metadata["datasets"] == ["somebody/chats"]
    assert "[somebody/chats](https://huggingface.co/datasets/somebody/chats), 32 conversations, revision abc123" in (
        card.prose.replace("`", "")
    )


def test_names_from_a_runs_files_are_no_markup(tiny_run):
    run = copied(tiny_run, "marked-up")
    mark = "` ](http://evil/x) ![x](http://evil/x.png) <img src=http://evil/x> `"
    origin = {"dataset": "somebody/text", "config": mark, "split": mark, "revision": mark}
    change(run.resolved, data={"sources": {"train": [origin]}})
    base = {"init_from": f"acme/base{mark}", "of_hub": True, "sha256": "0" * 64}
    write_json(run.resolved, {**read_json(run.resolved), "base": base})
    branch = {"revision": mark, "step": 10, "tokens": 1280, "loss": 4.273}
    shown = page(card_of(run.root, branches=[branch]).text, "staged")
    assert "evil" in shown
    found = re.search(r"<[^>]*evil", shown)
    assert not found, shown[found.start() - 300 : found.end()]


@pytest.fixture
def with_base(tiny_run, chat_run, tmp_path, monkeypatch) -> RunFolder:
    """A chat run whose base lies beside it."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_run.root, "runs/MyBase")
    run = copied(chat_run, "talk")
    change(run.resolved, base={"init_from": "runs/MyBase/model"})
    return run


@pytest.mark.slow
def test_a_base_is_named_to_the_hub_only_if_these_weights_were_published(with_base):
    card = card_of(with_base.root)
    assert card.metadata.get("base_model") is None
    assert card.metadata.get("base_model_relation") is None
    assert "The model of the run MyBase was fine-tuned on" in card.prose
    weights = sha256(Path("runs/MyBase/model/model.safetensors"))
    assert weights == read_json(with_base.resolved)["base"]["sha256"]
    for not_there in ({"digest": "0" * 64}, {"verified": None}, {"pull_request": "https://example.com/1"}):
        publish(Path("runs/MyBase"), **{"digest": weights, **not_there})
        assert card_of(with_base.root).text == card.text
    publish(Path("runs/MyBase"), weights)
    card = card_of(with_base.root)
    assert (card.metadata["base_model"], card.metadata["base_model_relation"]) == ("you/base-model", "finetune")
    assert "[you/base-model](https://huggingface.co/you/base-model) was fine-tuned on" in card.prose


@pytest.mark.slow
def test_the_card_of_a_fine_tune_names_the_training_data_of_its_base(with_base):
    base = read_json(with_base.resolved)["base"]
    assert [Path(origin["file"]).name for origin in base["trained_on"]] == ["corpus.jsonl"]
    card = card_of(with_base.root)
    assert "The base model was trained on corpus.jsonl." in card.prose
    assert "/" not in read_json(card.folder / "resolved.json")["base"]["trained_on"][0]["file"]
    origins = [{"dataset": "somebody/some-text", "revision": "0" * 40}, *base["trained_on"]]
    change(with_base.resolved, base={"trained_on": origins})
    card = card_of(with_base.root)
    link = "[somebody/some-text](https://huggingface.co/datasets/somebody/some-text)"
    assert f"The base model was trained on {link}, corpus.jsonl." in card.prose
    assert linked_repositories(card.source, card.publication) == [("dataset", "somebody/some-text")]
    assert "somebody/some-text](" not in card_of(with_base.root, private=frozenset({"somebody/some-text"})).prose
    change(with_base.resolved, base={"trained_on": None})  # as of a run of an earlier version
    assert "The training data of the base model was not recorded." in card_of(with_base.root).prose
    change(with_base.resolved, base={"init_from": "somebody/their-base", "of_hub": True})
    assert "For the training data of the base model see [somebody/their-base]" in card_of(with_base.root).prose


@pytest.mark.parametrize("inside", ["model", "checkpoints/checkpoint-10", "."])
def test_the_training_data_of_a_base_are_found_beside_its_weights(inside, tmp_path):
    run = RunFolder(tmp_path / "run")
    run.root.mkdir()
    first, second = {"file": "first.txt"}, {"file": "second.txt"}
    told = read_json(REPOSITORY / "tests" / "runs" / "old_run" / "text" / "resolved.json")
    told["data"]["sources"] = {"train": [second]}
    told["base"] = {"init_from": "base", "sha256": "0" * 64, "trained_on": [first]}
    assert sources_of(run.root / inside) is None
    write_json(run.resolved, told)
    assert sources_of(run.root / inside) == [second, first]
    assert sources_of(run.root / "elsewhere") is None


@pytest.mark.slow
def test_a_base_from_the_hub_is_named_to_it_and_one_that_is_gone_is_not(with_base):
    change(with_base.resolved, base={"init_from": "somebody/their-base", "of_hub": True})
    card = card_of(with_base.root)
    assert card.metadata["base_model"] == "somebody/their-base"
    assert linked_repositories(card.source, card.publication) == [("model", "somebody/their-base")]
    card = card_of(with_base.root, private=frozenset({"somebody/their-base"}))
    assert card.metadata.get("base_model") is None
    assert "The private model their-base was fine-tuned" in card.prose
    assert "somebody/their-base" not in card.prose
    for gone in ("runs/gone/model", "/data/runs/gone/model", "out/checkpoints/checkpoint-10", "out/mine"):
        change(with_base.resolved, base={"init_from": gone, "of_hub": False})
        assert card_of(with_base.root).metadata.get("base_model") is None
