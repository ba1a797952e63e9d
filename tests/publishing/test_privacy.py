"""What of a run is removed before it is published: folders, hosts, accounts and credentials."""

import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt2small_hf.publishing.card import render
from gpt2small_hf.publishing.lineage_facts import linked_repositories
from gpt2small_hf.publishing.privacy import scrub, scrub_command
from gpt2small_hf.publishing.publication import Publication
from gpt2small_hf.publishing.secret_scan import is_secret
from gpt2small_hf.publishing.source import find_source
from gpt2small_hf.runs.files import read_json, sha256, write_json
from gpt2small_hf.runs.provenance import made_by
from publishing.staging import RESULTS, staged

HOME, USER = "/home/ada lovelace", "ada"


@pytest.fixture
def ada(monkeypatch) -> None:
    """Somebody whose home folder has a space in its name."""
    monkeypatch.setenv("HOME", HOME)
    monkeypatch.setenv("LOGNAME", USER)


@pytest.mark.usefixtures("ada")
@pytest.mark.parametrize(
    ("told", "published"),
    [
        # absolute paths
        ("/data/texts/a.jsonl", "a.jsonl"),
        ("/data/texts/", "texts"),
        ("//data/texts/a.jsonl", "a.jsonl"),
        ("--text=/data/texts/a.jsonl", "--text=a.jsonl"),
        ("python train.py '/data/texts/a.jsonl' --seed 1", "python train.py 'a.jsonl' --seed 1"),
        ("a:/data/texts", "texts"),
        ("file:///data/texts/a.jsonl", "a.jsonl"),
        ("/data/texts/*.parquet", "*.parquet"),
        ("x.jsonl[/data/y/z]", "x.jsonl[z]"),
        ("/data/ünïcode/köln.txt", "köln.txt"),
        # home folders
        (HOME, "~"),
        (f"{HOME}/texts/a.jsonl", "a.jsonl"),
        (f"{HOME}/my texts/a b.jsonl", "a b.jsonl"),
        (f"--text '{HOME}/x y.txt' --seed 1", "--text 'x y.txt' --seed 1"),
        ("~/texts/a.jsonl", "a.jsonl"),
        ("~ada/texts", "texts"),
        ("/home/eve", "user"),
        ("/Users/eve/", "user"),
        ("/mnt/home/a.jsonl", "a.jsonl"),
        # Windows
        (r"C:\Users\ada\texts\a.jsonl", "a.jsonl"),
        (r"--text D:\texts\a.jsonl --seed 1", "--text a.jsonl --seed 1"),
        ("C:/Users/eve/a.jsonl", "a.jsonl"),
        (r"\\server\texts\ada\a.jsonl", "a.jsonl"),
        # users' names in paths
        ("/scratch/ada", "user"),
        ("runs/ada/tiny", "tiny"),
        ("runs/ada", "user"),
        ("../ada/texts", "texts"),
        ("../../texts", "texts"),
        ("runs/adamant/ada.yaml", "ada.yaml"),
        ("runs/tiny/model/model.safetensors", "model.safetensors"),
        # spaces
        ("/srv/Acme Corp/Project Falcon/x.txt", "x.txt"),
        ("'/srv/Acme Corp/Project Falcon/x.txt'", "'x.txt'"),
        ("see /srv/Acme Corp/Project Falcon/x.txt there", "see x.txt there"),
        ("file:///srv/Acme Corp/x y.txt", "x y.txt"),
        (r"C:\Users\Ada L\My Docs\x y.txt", "x y.txt"),
        (r"\\server\my share\x y.txt", "x y.txt"),
        # addresses: neither host nor bucket, name, password or query
        ("https://user:p@ss@host", "…"),
        ("https://user:p@ss@host/a/x.txt", "x.txt"),
        ("https://user:p/ss@host", "…"),
        ("https://ada:secret@example.com/x?key=secret&a=b", "x"),
        ("https://example.org", "…"),
        ("see https://example.com/home/ada/x, and /data/texts/a", "see x, and a"),
        ("s3://acme-falcon/texts/a.parquet", "a.parquet"),
        ("gs://acme-falcon/texts/*.parquet", "*.parquet"),
        ("abfss://falcon@acme.dfs.core.windows.net/a.parquet", "a.parquet"),
        ("s3://acme-falcon", "…"),
        ("user@gpu7.internal:/srv/x", "x"),
        ("user@gpu7:x.txt", "x.txt"),
        ("gpu7:/srv/my texts/x.txt", "x.txt"),
        # hosts and accounts
        ("gpu7:29500", "…"),
        ("gpu7:22", "…"),
        ("host:29500", "…"),
        ("model:12", "model:12"),
        ("tokens/s", "tokens/s"),
        ("mailto:ada@example.com", "…"),
        ("a=1,b=/srv/x/y", "a=1,b=y"),
        ("--rdzv_endpoint=gpu7:29500", "--rdzv_endpoint=…"),
        ("10.0.0.1:29500", "…"),
        ("10.0.0.1, fe80::1 and [2001:db8::1]:80", "…, … and …"),
        ("on gpu7.acme.internal now", "on … now"),
        ("ada@example.com", "…"),
        # Hub ids that are not known to be public
        ("ada/tiny-texts", "tiny-texts"),
        ("ada/tiny-texts:part[0:100]", "tiny-texts:part[0:100]"),
        ("https://huggingface.co/datasets/ada/tiny-texts", "tiny-texts"),
        ("hf://datasets/ada/tiny-texts/a.parquet", "a.parquet"),
        # what is none of it
        ("examples/tiny.yaml", "examples/tiny.yaml"),
        ("train --hub_token secret --seed 1", "train --hub_token … --seed 1"),
        ("train --api_key=secret --seed 1", "train --api_key=… --seed 1"),
        ("{{ 'Q:\n\n' + message.content + '\n\n' }}", "{{ 'Q:\n\n' + message.content + '\n\n' }}"),
        (r"{{ 'Q:\n\n' + message.content + '\n\n' }}", r"{{ 'Q:\n\n' + message.content + '\n\n' }}"),
        ("12:34:56, 2026-11-22T01:11:32+00:00 and 2.13.0+cpu", "12:34:56, 2026-11-22T01:11:32+00:00 and 2.13.0+cpu"),
        ("and/or, 1/2, 2026/01/02, /a, a / b", "and/or, 1/2, 2026/01/02, /a, a / b"),
        ("adamw_torch_fused", "adamw_torch_fused"),
        ("ada", "ada"),
        ("", ""),
    ],
)
def test_of_a_path_its_last_part_is_kept_and_of_a_user_nothing(told, published):
    assert scrub(told) == published
    assert scrub({"a": [told, {told: 1}]}) == {"a": [published, {published: 1}]}


@pytest.mark.parametrize(
    "address",
    [
        *("{}", "{}:part", "{}[0:100]", "{}:part[-100:]"),
        *("https://huggingface.co/{}", "https://huggingface.co/datasets/{}/a/b.parquet", "https://hf.co/{}"),
        *("hf://datasets/{}", "hf://datasets/{}@main/a.parquet", "hf://{}/model.safetensors"),
    ],
)
def test_hub_ids_are_published_in_full_only_if_everybody_may_see_them(address):
    assert scrub(address.format("ada/texts"), {"ada/texts"}) == address.format("ada/texts")
    assert "acme" not in scrub(address.format("acme/texts"), {"ada/texts"})


def test_local_tokenizer_that_is_gone_is_not_taken_for_a_model_of_the_hub(short_run):
    resolved = read_json(short_run.resolved)
    command = "python train.py a.yaml --tokenizer acme/words"
    made = {**resolved["made_by"], "command": command}
    for of_hub in (False, True):
        data = {
            **resolved["data"],
            "tokenizer": {**resolved["data"]["tokenizer"], "name": "acme/words", "of_hub": of_hub},
        }
        write_json(short_run.resolved, {**resolved, "data": data, "made_by": made})
        source = find_source(short_run.root)
        linked = linked_repositories(source, Publication("you/short"))
        assert linked == ([("model", "acme/words")] if of_hub else [])
        folder = staged(short_run.root)
        for text in (render(source, folder, Publication("you/short")), (folder / "resolved.json").read_text()):
            assert ("acme" in text) == of_hub


@pytest.mark.parametrize("private", [[], ["acme/base"], ["acme/base", "acme/falcon", "acme/words"]])
def test_account_of_a_private_repository_is_in_no_staged_file(private, short_run):
    resolved = read_json(short_run.resolved)
    train = [{"dataset": "acme/falcon", "config": None, "split": "train", "revision": "0" * 40}]
    data = {**resolved["data"], "sources": {"train": train}}
    data["tokenizer"] = {**data["tokenizer"], "name": "acme/words", "of_hub": True}
    command = "python train.py a.yaml --init_from acme/base --dataset=acme/falcon --tokenizer acme/words"
    base = {"init_from": "acme/base", "of_hub": True, "sha256": "0" * 64}
    given = {**resolved["run"], "init_from": "acme/base"}
    made = {**resolved["made_by"], "command": command}
    write_json(short_run.resolved, {**resolved, "run": given, "base": base, "data": data, "made_by": made})
    source, hidden = find_source(short_run.root), frozenset(private)
    assert linked_repositories(source, Publication("you/short")) == [
        *(("dataset", "acme/falcon"), ("model", "acme/base"), ("model", "acme/words"))
    ]
    folder = staged(short_run.root, private=hidden)
    card = render(source, folder, Publication("you/short", private=hidden))
    for name in ("acme/base", "acme/falcon", "acme/words"):
        for text in (card, (folder / "resolved.json").read_text()):
            assert (name in text) == (name not in hidden), name
    for text in (card, (folder / "resolved.json").read_text()):
        assert ("acme" in text) == (len(hidden) < 3)


@pytest.mark.usefixtures("ada")
def test_command_line_is_published_word_by_word():
    words = {
        "--text '/srv/Acme Corp/a b.txt' s3://acme/x.txt 'Project Falcon/y.txt'": "--text 'a b.txt' x.txt y.txt",
        "--output_dir=/srv/acme/tiny": "--output_dir=tiny",
        "--rdzv_endpoint=gpu7:29500 --master_addr gpu7": "'--rdzv_endpoint=…' --master_addr '…'",
        "--hub_token abc --wandb-key=abc": "--hub_token '…' '--wandb-key=…'",
        "MASTER_ADDR=gpu7 WANDB_ENTITY=acme": "'MASTER_ADDR=…' 'WANDB_ENTITY=…'",
        "http_proxy=http://a:b@proxy:3128": "'http_proxy=…'",
        "--init_from ada/base --dataset acme/falcon": "--init_from ada/base --dataset falcon",
        "--prompts 'What is in /etc/hosts?' and/or": "--prompts 'What is in /etc/hosts?' and/or",
        """--optim_args '{"a": 0.1, "b": "/x/y"}'""": """--optim_args '{"a": 0.1, "b": "y"}'""",
        "--learning_rate -1e-3 examples/tiny.yaml": "--learning_rate -1e-3 examples/tiny.yaml",
        # what a flag means ends with its value
        "--prompts='The x' '/srv/Acme Corp/Project Falcon/r.yaml'": "'--prompts=The x' r.yaml",
        "--device=cuda /srv/secret/r.yaml --device /srv/secret": "--device=cuda r.yaml --device secret",
        "--rdzv_endpoint=gpu7:29500 r.yaml": "'--rdzv_endpoint=…' r.yaml",
        "--master_addr gpu7 r.yaml --seed 1": "--master_addr '…' r.yaml --seed 1",
        "--push_to_hub_token=abc r.yaml": "'--push_to_hub_token=…' r.yaml",
        "--prompts a=/etc/x b/c --hub_token abc r.yaml": "--prompts a=/etc/x b/c --hub_token '…' r.yaml",
        "--optim_args 'a=1,b=/srv/x/y'": "--optim_args a=1,b=y",
    }
    for told, published in words.items():
        assert scrub_command(f"python train.py {told}", {"ada/base"}) == f"python train.py {published}"
    assert scrub_command("python train.py 'a /srv/acme/b") == "python train.py 'a b"


def test_settings_are_published_by_what_they_are():
    told = {
        "output_dir": "Project Falcon/tiny",
        "chat_data": ["Project Falcon/a.jsonl", "/srv/b c/d.jsonl[0:100]"],
        "device": {"name": "AMD Radeon RX 7900 XT/7900 XTX"},
        "versions": {"cudnn": "9.1.0.70"},
        "master_addr": "gpu7",
        "entity": "acme",
        "proxy": None,
        "inputs": {"Project Falcon/a.jsonl": "sha"},
    }
    assert scrub(told) == {
        "output_dir": "tiny",
        "chat_data": ["a.jsonl", "d.jsonl[0:100]"],
        "device": {"name": "AMD Radeon RX 7900 XT/7900 XTX"},
        "versions": {"cudnn": "9.1.0.70"},
        "master_addr": "…",
        "entity": "…",
        "proxy": None,
        "inputs": {"a.jsonl": "sha"},
    }


def test_name_of_this_machine_is_not_published(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "gpu7")
    assert scrub(["runs/gpu7", "on gpu7, with gpu70", "runs/gpu7-b"]) == ["…", "on …, with gpu70", "gpu7-b"]
    monkeypatch.setattr("socket.gethostname", lambda: "tiny")  # may be any word
    assert scrub("runs/tiny") == "tiny"


def test_secret_in_a_setting_is_not_cut_up_so_that_it_is_refused():
    key = "aB3/" * 10
    hook = f"https://hooks.slack.com/services/T{'A1' * 5}/B{'A1' * 5}/{'aB3' * 8}"
    for told in (f"AWS_SECRET_ACCESS_KEY={key}", f"aws_secret_access_key = {key}", hook):
        assert scrub(told) == told
        assert is_secret(told)


@pytest.mark.usefixtures("ada")
@pytest.mark.parametrize(
    ("home", "told", "published"),
    [
        ("/root", "/rootfs/texts/a", "a"),
        ("/root", "/root", "~"),
        ("/data/", "/data/texts/a.jsonl", "a.jsonl"),
        ("/", "a / b, /data/texts/a.jsonl", "a / b, a.jsonl"),
        ("", "a / b . c, /data/texts/a.jsonl", "a / b . c, a.jsonl"),
    ],
)
def test_home_folders_of_any_name_are_known_and_not_mistaken(home, told, published, monkeypatch):
    monkeypatch.setenv("HOME", home)
    assert scrub(told) == published


def test_what_is_neither_text_nor_a_container_stays_and_tokens_go():
    told = {"seed": 1, "lr": 0.5, "on": True, "none": None, 3: [1.5], "hub_token": "x", "push_to_hub_token": "y"}
    assert scrub(told) == {"seed": 1, "lr": 0.5, "on": True, "none": None, 3: [1.5]}
    assert scrub({"eos_token_id": 0, "add_special_tokens": True}) == {"eos_token_id": 0, "add_special_tokens": True}


def test_two_files_of_one_name_keep_a_hash_each():
    told = scrub({"/a/b/texts.jsonl": "1", "/a/c/texts.jsonl": "2", "/a/d/texts.jsonl": "3"})
    assert sorted(told.values()) == ["1", "2", "3"]
    assert all(name.startswith("texts.jsonl") for name in told)


def test_what_a_model_or_user_wrote_is_published_as_it_was_written(short_run):
    program = "#!/usr/bin/env python\nopen('/etc/ssl/x.pem')\n{{ 'Q:\\nA' }}"
    completions = read_json(short_run.completions)
    completions["completions"][0]["greedy"] = program
    write_json(short_run.completions, completions)
    resolved = read_json(short_run.resolved)
    resolved["run"]["prompts"] = [program]
    write_json(short_run.resolved, resolved | {"data": resolved["data"] | {"template": program}})
    folder = staged(short_run.root)
    assert read_json(folder / "evaluation" / "completions.json")["completions"][0]["greedy"] == program
    told = read_json(folder / "resolved.json")
    assert told["run"]["prompts"] == [program]
    assert told["data"]["template"] == program


PART = st.text("abcdefgh0123.-_ünλ", min_size=1, max_size=6).filter(lambda part: part.strip("."))


@given(st.lists(PART, min_size=2, max_size=5), st.sampled_from(["", "--text=", "'", "(", "see ", "a:", "file://"]))
def test_no_folder_above_a_path_is_published(parts, before):
    published = scrub(f"{before}/{'/'.join(parts)}")
    assert "/" not in published.removeprefix("file://")
    assert published.endswith(parts[-1]) or published.endswith("user")


@given(st.text(st.characters(exclude_characters="/\\~@:.=", exclude_categories=["Cs"])))
def test_text_without_a_path_stays_as_it_is(text):
    assert scrub(text) == text


@given(st.lists(PART, max_size=3), st.lists(PART, max_size=2), st.sampled_from(["", " ", "x=", '"', "\n", ":", "('"]))
@pytest.mark.usefixtures("ada")
def test_the_home_folder_is_never_published(parts, more, before):
    published = scrub(f"{before}{'/'.join([HOME, *parts])} {'/'.join([HOME, *more])}")
    assert "lovelace" not in published


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(
    st.text(), x), max_leaves=8))  # fmt: skip
def test_whatever_the_settings_are_they_stay_as_many_and_can_be_written_down(settings):
    published = scrub(settings)
    assert json.loads(json.dumps(published)) == published
    if isinstance(settings, dict):
        assert len(published) == sum(not key.endswith("_token") for key in settings)


def test_the_published_settings_hold_neither_the_home_folder_nor_the_users_name(short_run, tmp_path, monkeypatch):
    home = tmp_path / "homes" / "Ada L"
    (home / "my recipes").mkdir(parents=True)
    recipe = home / "my recipes" / "short run.yaml"
    recipe.write_text("# nothing but defaults\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("LOGNAME", "Ada L")
    words = [
        str(recipe),
        "--text",
        f"{home}/texts/a.jsonl",
        f"--output_dir={home}/runs/x",
        "--data_dir",
        "/scratch/Ada L",
    ]
    monkeypatch.setattr(sys, "argv", [f"{home}/checkout/train.py", *words])
    resolved = read_json(short_run.resolved)
    resolved["run"] |= {"output_dir": f"{home}/runs/x", "data_dir": "../Ada L/data"}
    resolved["trainer"] |= {"hub_token": "a secret", "output_dir": f"{home}/runs/x/checkpoints"}
    resolved["data"]["sources"]["train"][0]["file"] = f"{home}/texts/a.jsonl"
    write_json(short_run.resolved, {**resolved, "made_by": made_by([recipe]).to_json()})
    heldout = read_json(short_run.heldout)
    inputs = {
        f"{home}/runs/x/{name}": sha256(short_run.root / name)
        for name in ("model/model.safetensors", "model/tokenizer.json")
    }
    write_json(short_run.heldout, {**heldout, "made_by": {**made_by().to_json(), "inputs": inputs}})
    folder = staged(short_run.root)
    published = "".join((folder / name).read_text(encoding="utf-8") for name in sorted(RESULTS))
    assert str(home) not in published
    assert "Ada" not in published
    assert "a secret" not in published
    assert str(tmp_path) not in published
    told = read_json(folder / "resolved.json")
    assert told["made_by"]["command"] == (
        "python train.py 'short run.yaml' --text a.jsonl --output_dir=x --data_dir user"
    )
    assert told["data"]["sources"]["train"][0]["file"] == "a.jsonl"
    assert told["model"] == read_json(short_run.resolved)["model"]
