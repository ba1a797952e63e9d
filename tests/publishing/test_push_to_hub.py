"""What our classes publish without `upload/push.py`: `push_to_hub` of model and tokenizer, and HF's own Trainer."""

import os
import subprocess
import sys
import textwrap

import pytest
from conftest import REPOSITORY
from hub import TOKEN, HubServer

from gpt2small_hf.publishing.verify import check

pytestmark = pytest.mark.slow

DOWNLOAD = """
import pathlib, sys
from gpt2small_hf.publishing.hub import Hub
Hub().download(*sys.argv[1:3], pathlib.Path(sys.argv[3]))
"""
OWNER = textwrap.dedent("""
    import sys

    import gpt2small_hf
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

    folder, place = sys.argv[1:]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    model.push_to_hub("you/by-hand", private=True)
    tokenizer.push_to_hub("you/by-hand")

    ids = tokenizer("Once the fox saw the river", return_tensors="pt")["input_ids"][0]
    args = TrainingArguments(
        place, max_steps=2, save_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
        push_to_hub=True, hub_model_id="you/by-trainer", hub_private_repo=True, hub_strategy="every_save",
    )
    rows = [{"input_ids": ids, "labels": ids}] * 4
    trainer = Trainer(model, args, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    trainer.push_to_hub()
    # What it ended with, for comparison.
    trainer.model.save_pretrained(f"{place}/end")
    tokenizer.save_pretrained(f"{place}/end")
""")


@pytest.fixture(scope="module")
def hub(tiny_run, tmp_path_factory):
    """A server to which an owner, who has this package, has pushed by hand and by the Trainer, and where it ended."""
    place = tmp_path_factory.mktemp("by-trainer")
    with HubServer() as server:
        asked = {"HF_ENDPOINT": server.url, "HF_TOKEN": TOKEN, "HF_HOME": str(place / "home")}
        done = subprocess.run(
            [sys.executable, "-c", OWNER, str(tiny_run.model), str(place / "run")],
            env={"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", **asked},
            cwd=place,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        yield server, place / "run" / "end"
        assert not server.unknown_routes
        assert not server.leaks


@pytest.mark.parametrize("repo_id", ["you/by-hand", "you/by-trainer"])
def test_pushed_classes_load_without_the_package(repo_id, hub, tiny_run, tmp_path):
    server, end = hub
    head, cache = server.repos[repo_id].branches["main"], tmp_path / "cache"
    told = {"HF_ENDPOINT": server.url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    told |= {"PYTHONPATH": str(REPOSITORY), "https_proxy": ""}
    subprocess.run([sys.executable, "-c", DOWNLOAD, repo_id, head, str(cache)], check=True, env={**os.environ, **told})
    reference = tiny_run.model if repo_id == "you/by-hand" else end
    found = check(repo_id, reference=reference, card="", repo_id=repo_id, tag=None, revision=head, cache=cache)
    assert found.logit_difference == 0
    assert found.text


@pytest.mark.parametrize("repo_id", ["you/by-hand", "you/by-trainer"])
def test_what_our_classes_pushed_has_code_and_no_token(repo_id, hub):
    files = hub[0].files(repo_id)
    code = {"configuration_gpt2small.py", "cpu_linear.py", "gpt.py", "modeling_gpt2small.py"}
    assert code | {"config.json", "tokenizer.json"} <= set(files)
    assert not [name for name, content in files.items() if TOKEN.encode() in content]
