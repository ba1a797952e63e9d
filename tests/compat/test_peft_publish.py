"""`push.py RUN/adapter`: a LoRA adapter is published without its base, and loads from the Hub with peft."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from conftest import CHAT_CONTEXT, chat_words, run_train, tiny_config
from publishing.push_runner import published
from transformers import AutoTokenizer

from gpt2small_hf import GPT2SmallForCausalLM
from gpt2small_hf.errors import UsageError
from gpt2small_hf.publishing.publication import Publication
from gpt2small_hf.publishing.source import find_source
from gpt2small_hf.publishing.stage import check_adapter, find_base
from gpt2small_hf.runs.files import read_json, sha256, write_json
from gpt2small_hf.runs.layout import RunFolder

pytest.importorskip("peft")
pytest_plugins = ["publishing.push_runner"]
pytestmark = [
    pytest.mark.slow,
    # PEFT 0.21 reads a property that transformers 5.23 has renamed.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


@pytest.fixture(scope="module")
def made(chat_place, tmp_path_factory) -> Path:
    """A folder with a base model, `base`, and a run that trained an adapter and two new tokens on it, `runs/talk`."""
    place = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(chat_place / "base" / "model")
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.eos_token_id)
    config = tiny_config(vocab_size=len(tokenizer), max_position_embeddings=CHAT_CONTEXT, **ids)
    GPT2SmallForCausalLM(config).save_pretrained(place / "base")
    tokenizer.save_pretrained(place / "base")
    more = ("--lora_rank", "4", "--add_special_tokens", "--learning_rate", "0.03", "--init_from", "base")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        run_train(chat_words(chat_place, Path("runs/talk"), *more, "--prompts", "What did the fox see?"))
    return place


@pytest.fixture
def run(made, tmp_path) -> RunFolder:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return RunFolder(tmp_path / "runs" / "talk")


def test_adapter_is_published_with_a_link_to_its_base_and_loads(hub, push, run):
    done = push("runs/talk/adapter", "you/talk-adapter")
    assert done.status == 2
    assert done.refusal.startswith("the adapter's base base is not public on the Hub. Publish it (")
    assert push("base", "you/base", "--public", "--license", "apache-2.0").status == 0
    done = push("runs/talk/adapter", "you/talk-adapter", "--license", "apache-2.0", "--public")
    assert done.status == 0, done.err
    assert "works with torch, transformers and peft alone: logits equal" in done.out
    there = published(hub, "you/talk-adapter")
    assert there.keys() - {name for name in there if name.startswith(("charts/", "evaluation/"))} == {
        *("README.md", "LICENSE", "adapter_config.json", "adapter_model.safetensors", "resolved.json"),
        *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"),
    }
    assert there["adapter_model.safetensors"] == (run.adapter / "adapter_model.safetensors").read_bytes()
    settings, base = json.loads(there["adapter_config.json"]), hub.repos["you/base"]
    assert (settings["base_model_name_or_path"], settings["revision"]) == ("you/base", base.branches["main"])
    _, header, card = there["README.md"].decode().split("---\n", 2)
    metadata = yaml.safe_load(header)
    named = {name: metadata[name] for name in ("library_name", "base_model", "base_model_relation")}
    assert named == {"library_name": "peft", "base_model": "you/base", "base_model_relation": "adapter"}
    assert "lora" in metadata["tags"]
    assert "(`LICENSE`)." in card
    assert "LICENSE-CODE" not in card
    assert card.count("```python") == 1
    record = read_json(run.published)
    assert record["verified"]["logit_difference"] < 1e-4


def test_adapter_is_refused_without_its_public_base_or_what_carries_it(run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    source, publication = find_source(Path("runs/talk/adapter")), Publication("you/talk-adapter")
    assert (source.name, source.model, source.adapter) == (
        "talk-adapter",
        Path("runs/talk/model"),
        Path("runs/talk/adapter"),
    )
    check_adapter(source)
    told = {"repo_id": "you/base", "commit": "0" * 40, "pull_request": None, "verified": {"checksums": 1}}
    files = {"model.safetensors": {"size": 1, "sha256": sha256(Path("base/model.safetensors"))}}
    write_json(Path("base/published.json"), {**told, "files": files})
    assert find_base(source, publication).repo == "you/base"
    with pytest.raises(UsageError, match=r"^the adapter's base base is not public"):
        find_base(source, Publication("you/talk-adapter", private=frozenset({"you/base"})))
    Path("base/model.safetensors").write_bytes(b"another")
    with pytest.raises(UsageError, match="is not the base that the adapter was trained on"):
        find_base(source, publication)
    settings = run.adapter / "adapter_config.json"
    write_json(settings, {**read_json(settings), "trainable_token_indices": {"embed_positions": [128]}})
    with pytest.raises(UsageError, match=r"adds positions \(--max_position_embeddings\), which peft cannot"):
        check_adapter(source)
    (run.adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"has no adapter_model\.safetensors"):
        find_source(Path("runs/talk/adapter"))
