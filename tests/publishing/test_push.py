"""Results of `push` on the Hub, and errors before the network is used."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from conftest import REPOSITORY
from conversion import test_conversion
from conversion.test_conversion import write_reference
from hub import OTHER_TOKEN, READ_TOKEN, TOKEN, HubServer
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from gpt2small_hf import GPT2SmallForCausalLM
from gpt2small_hf.errors import UsageError
from gpt2small_hf.publishing.arguments import parse_arguments
from gpt2small_hf.publishing.push import publish
from gpt2small_hf.publishing.secret_scan import fingerprint
from gpt2small_hf.publishing.verify import code_blocks
from gpt2small_hf.runs.files import exclusive_writer, read_json, sha256, write_json
from gpt2small_hf.runs.layout import RunFolder
from gpt2small_hf.runs.provenance import versions
from gpt2small_hf.training.checkpoint_files import write_manifest
from publishing.push_runner import REPO, DryRun, asked, contents, published, sent_bytes, sha256_of

pytest_plugins = ["publishing.push_runner"]
slow = pytest.mark.slow

THIS = ("runs/short", REPO)
QUICK = (*THIS, "--no_verify")
SECRET = "hf_" + "Abcd1234" * 5  # no token of anybody's

OF_A_RUN = {
    *("README.md", "LICENSE-CODE", "config.json", "generation_config.json", "model.safetensors"),
    *("configuration_gpt2small.py", "cpu_linear.py", "gpt.py", "modeling_gpt2small.py"),
    *("tokenizer.json", "tokenizer_config.json"),
    *("resolved.json", "evaluation/heldout.json", "evaluation/completions.json"),
    *("charts/loss.png", "charts/grad_norm.png", "charts/learning_rate.png", "charts/throughput.png"),
}


# ---- a finished run -------------------------------------------------------------------------------------------------


@slow
def test_dry_run_lists_the_files_without_network_and_token(dry_run: DryRun):
    done, run = dry_run.done, RunFolder(dry_run.place / "runs" / "short")
    assert done.status == 0, done.err
    assert dry_run.requests == []
    assert contents(run.staged).keys() == OF_A_RUN
    for name, content in contents(run.staged).items():
        assert f"{name} {len(content):,} {sha256_of(content)[:12]}" in [
            " ".join(row.split()) for row in done.out.splitlines()
        ]
    tag = read_tag(run)
    loss = read_json(run.heldout)["after"]["loss"]
    assert f"would create {REPO}, private, if it does not exist\n" in done.out
    assert (
        f"would commit the files that differ to main: 'Publish short step 20 (held-out loss {loss:.3f})'\n" in done.out
    )
    assert f"would compare checksums and load it from the Hub in an isolated process, then tag it {tag}\n" in done.out
    assert "wrote runs/short/staged; nothing was sent\nnext: " in done.out
    assert done.out.endswith(" push runs/short you/tiny\n")
    assert not run.published.exists()
    card = (run.root / "staged.html").read_text(encoding="utf-8")
    assert card.startswith("<!doctype html>")
    assert 'src="staged/charts/loss.png"' in card


def read_tag(run: RunFolder) -> str:
    """The revision that the staged card's code names."""
    card = (run.staged / "README.md").read_text(encoding="utf-8")
    (tag,) = {line.split('revision="')[1].split('"')[0] for line in card.splitlines() if 'revision="' in line}
    return tag


LOGITS = """
import json, torch
for block in {blocks!r}:
    exec(block)
    print("----")
model = AutoModelForCausalLM.from_pretrained({repo!r}, revision={revision!r}, trust_remote_code={trust})
with torch.no_grad():
    print(json.dumps([model(torch.arange(32)[None]).logits.tolist(), type(model).__module__]))
"""


def assert_same_logits(printed: str, model: Path) -> str:
    """Check that the last printed logits are those of a model folder. Returns: the module of the printed class."""
    found, module = json.loads(printed.splitlines()[-1])
    ours = GPT2SmallForCausalLM.from_pretrained(model)
    with torch.no_grad():
        assert torch.equal(torch.tensor(found), ours(torch.arange(32)[None]).logits)
    return module


@slow
def test_run_is_published_private_tagged_and_loads_as_its_card_says(hub, push, run, from_hub):
    done = push(*THIS, cold=True)
    assert done.status == 0, done.err
    repo, there = hub.repos[REPO], published(hub)
    assert there == contents(run.staged)
    assert there.keys() == OF_A_RUN
    assert [commit.title for commit in hub.landed[1:]] == [done_title(run)]
    assert (repo.private, repo.tags, list(repo.branches)) == (True, {read_tag(run): hub.landed[-1].oid}, ["main"])
    assert f"published {hub.url}/{REPO} at commit {hub.landed[-1].oid[:12]}\n" in done.out

    record = read_json(run.published)
    assert (record["repo_id"], record["commit"], record["tag"]) == (REPO, hub.landed[-1].oid, read_tag(run))
    assert {name: file["sha256"] for name, file in record["files"].items()} == {
        name: sha256_of(content) for name, content in there.items()
    }
    assert record["logit_difference"] == record["verified"]["logit_difference"] == 0.0
    assert record["verified"]["checksums"] == len(OF_A_RUN)
    used = {name: version for name, version in versions().items() if name in ("python", "torch", "transformers")}
    assert record["checked_with"] == record["verified"]["with"] == used
    assert record["made_by"]["command"] == f"python push.py short {REPO}"
    told = [path.read_bytes() for path in (run.published, run.root / "staged.json")]
    assert not any(TOKEN.encode() in content for content in (*there.values(), *told))
    assert not any(str(run.root.parents[2]).encode() in content for content in (*there.values(), *told))

    tag = read_tag(run)
    blocks = code_blocks(hub.files(REPO, tag)["README.md"].decode())
    assert len(blocks) == 2
    printed = from_hub(LOGITS.format(blocks=blocks, repo=REPO, revision=tag, trust=True))
    assert [block.strip().startswith("Once the fox") for block in printed.split("----\n")[:2]] == [True, True]
    assert assert_same_logits(printed, run.model).startswith(f"transformers_modules.you.tiny.{hub.landed[-1].oid}.")


def done_title(run: RunFolder) -> str:
    """What a push of the run calls its commit."""
    return f"Publish short step 20 (held-out loss {read_json(run.heldout)['after']['loss']:.3f})"


@slow
def test_second_push_of_the_same_run_makes_no_commit(hub, push, run):
    first, second = push(*QUICK), push(*QUICK)
    assert (first.status, second.status) == (0, 0)
    assert "18 files sent, 0 removed" in first.out
    assert "nothing to send: the files there are the same" in second.out
    assert len(hub.landed) == 2
    assert len(asked(hub, "/commit/")) == len(asked(hub, "/tag/")) == 1
    assert [*hub.repos[REPO].tags] == [read_tag(run)]
    assert read_json(run.published)["commit"] == hub.landed[-1].oid


@slow
def test_push_over_xet_with_json_prints_only_the_record(hub, push, run):
    done = push(*QUICK, "--json", xet=True)
    assert done.status == 0, done.err
    assert asked(hub, "/v1/xorbs/")
    assert published(hub) == contents(run.staged)
    assert len(hub.landed) == 2
    record = json.loads(done.out)
    assert record == read_json(run.published)
    assert record["verified"] == {"checksums": len(OF_A_RUN)}
    assert f"\npublished {hub.url}/{REPO} at commit " in done.err


# ---- visibility -----------------------------------------------------------------------------------------------------


@slow
def test_model_becomes_public_after_it_is_verified_and_tagged(hub, push, run):
    pause = hub.pause("/settings")
    command = push.start(*QUICK, "--public")
    command.reach(pause)
    repo, commit = hub.repos[REPO], hub.landed[-1].oid
    assert (repo.private, repo.tags) == (True, {read_tag(run): commit})
    pause.release()
    assert command.wait().status == 0
    assert not repo.private
    steps = [f"POST /api/models/{REPO}/commit/main", f"GET /api/models/{REPO}/tree/{commit}"]
    steps += [f"POST /api/models/{REPO}/tag/{commit}", f"PUT /api/models/{REPO}/settings"]
    assert [step for step in asked(hub, REPO) if step in steps] == steps


@slow
def test_private_flag_hides_a_public_repository_before_the_commit(hub, push, run):
    hub.create(REPO)
    pause = hub.pause("/preupload/", after=1)  # the first one asks which files are ignored
    command = push.start(*QUICK, "--private")
    command.reach(pause)
    assert hub.repos[REPO].private
    pause.release()
    assert command.wait().status == 0
    assert hub.repos[REPO].private
    assert published(hub) == contents(run.staged)


@slow
def test_a_private_base_model_is_not_linked(hub, push, run):
    hub.create("you/base", private=True)
    write_json(
        run.resolved,
        {**read_json(run.resolved), "base": {"init_from": "you/base", "of_hub": True, "sha256": "0" * 64}},
    )
    done = push(*QUICK, "--public")
    assert done.status == 0, done.err
    assert "private   you/base: not linked, and its account is not published\n" in done.out
    assert "huggingface.co/you/base" not in published(hub)["README.md"].decode()
    assert b"you/base" not in published(hub)["resolved.json"]


@slow
def test_public_repository_stays_public_by_default(hub, push, run):
    hub.create(REPO)
    assert push(*QUICK).status == 0
    assert not hub.repos[REPO].private
    assert asked(hub, "/settings") == []


# ---- refused before the network -------------------------------------------------------------------------------------


def add_line(path: Path, line: str) -> None:
    """Write a line at the end of a file."""
    path.write_text(path.read_text(encoding="utf-8") + line + "\n", encoding="utf-8")


def link_out(run: RunFolder) -> None:
    picture = run.chart("loss")
    picture.rename(run.root.parents[1] / "elsewhere.png")
    picture.symlink_to(run.root.parents[1] / "elsewhere.png")


def leave_a_pickle(run: RunFolder) -> None:
    torch.save({}, run.model / "extra.pt")


def change_the_tokenizer(run: RunFolder) -> None:
    words = run.model / "tokenizer.json"
    words.write_text(
        words.read_text(encoding="utf-8").replace('"version": "1.0"', '"version":  "1.0"'), encoding="utf-8"
    )


def break_the_weights(run: RunFolder) -> None:
    weights = load_file(run.model / "model.safetensors")
    weights["model.norm.weight"][0] = torch.nan
    save_file(weights, run.model / "model.safetensors", metadata={"format": "pt"})
    told = read_json(run.heldout)  # so was it measured, too
    inputs = told["made_by"]["inputs"]
    (name,) = (name for name in inputs if name.endswith("model/model.safetensors"))
    inputs[name] = sha256(run.model / "model.safetensors")
    write_json(run.heldout, told)


def import_ours(run: RunFolder) -> None:
    add_line(run.model / "gpt.py", "import gpt2small_hf.errors")


def plant_a_token(run: RunFolder) -> None:
    told = read_json(run.completions)
    told["completions"][0]["greedy"] += SECRET
    write_json(run.completions, told)


def test_two_processes_do_not_stage_in_one_folder(tiny_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_run.root, tmp_path / "runs" / "short")
    staged = RunFolder(tmp_path / "runs" / "short").staged
    with exclusive_writer(staged), pytest.raises(UsageError, match="another process writes"):
        publish(parse_arguments(["runs/short", REPO, "--dry_run"]))
    assert not staged.exists()


@slow
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            link_out,
            "runs/short/charts/loss.png is a link out of runs/short. Replace it by the file.",
        ),
        (leave_a_pickle, "runs/short/model/extra.pt is a pickled file, which can run code or contain a token"),
        (change_the_tokenizer, "runs/short/model/tokenizer.json is not the file that the run evaluated"),
        (
            break_the_weights,
            "model.safetensors: model.norm.weight has values that are not finite",
        ),
        (import_ours, "runs/short/model/gpt.py differs from the package's "),
        (plant_a_token, "found what looks like a Hugging Face token in runs/short/evaluation/completions.json ("),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_invalid_model_is_refused_before_the_network_is_used(hub, push, run, spoil, said):
    before = contents(run.staged)
    spoil(run)
    done = push(*QUICK, "--json")
    assert done.status == 2
    assert done.refusal.startswith(said)
    assert SECRET not in done.err
    assert done.out == ""
    assert hub.requests == []
    assert contents(run.staged) == before  # of the last time that all was well
    assert list(run.root.glob(".*")) == [run.lock]


def in_json(name: str) -> Callable[[Path], None]:
    """Plant a secret in a value of a JSON file."""

    def plant(root: Path) -> None:
        write_json(root / name, {**read_json(root / name), "note": f"do not lose {SECRET}"})

    return plant


def in_code(root: Path) -> None:
    add_line(root / "model" / "gpt.py", f"# {SECRET}")


def in_a_picture(root: Path) -> None:
    path = root / "charts" / "loss.png"
    path.write_bytes(path.read_bytes() + SECRET.encode())


def in_the_weights_own_header(root: Path) -> None:
    path = root / "model" / "model.safetensors"
    save_file(load_file(path), path, metadata={"format": "pt", "command": SECRET})
    (root / "evaluation" / "heldout.json").unlink()  # it knows other weights
    shutil.rmtree(root / "checkpoints" / "checkpoint-20")
    shutil.copyfile(path, root / "checkpoints" / "checkpoint-10" / "model.safetensors")
    write_manifest(root / "checkpoints" / "checkpoint-10", scheduled=True)  # or the checkpoint counts as damaged


def in_what_it_wrote_on_the_way(root: Path) -> None:
    path = root / "samples.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    path.write_text("".join(json.dumps({**row, "greedy": SECRET, "sampled": SECRET}) + "\n" for row in rows))


@slow
@pytest.mark.parametrize(
    ("plant", "where"),
    [
        (in_json("model/config.json"), "model/config.json"),
        (in_json("model/generation_config.json"), "model/generation_config.json"),
        (in_json("model/tokenizer_config.json"), "model/tokenizer_config.json"),
        (in_json("resolved.json"), "resolved.json"),
        (in_json("evaluation/heldout.json"), "evaluation/heldout.json"),
        (in_code, "model/gpt.py"),
        (in_a_picture, "charts/loss.png"),
        (in_the_weights_own_header, "checkpoints/checkpoint-10/model.safetensors"),
        (in_what_it_wrote_on_the_way, "samples.jsonl"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_token_in_any_staged_file_is_found_and_not_printed(plant, where, tiny_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_run.root, "runs/short")
    Path("token").write_bytes(b"\xff")  # unreadable, which a dry run ignores
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "token")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    plant(Path("runs/short"))
    with pytest.raises(UsageError) as refusal:
        publish(parse_arguments(["runs/short", REPO, "--dry_run", "--allow_modified_code"]))
    said = str(refusal.value)
    assert said.startswith(f"found what looks like a Hugging Face token in runs/short/{where} (")
    assert "Remove it there, revoke it, and push again." in said
    assert SECRET not in said
    assert not Path("runs/short/staged").exists()


@slow
def test_token_in_use_is_found_in_model_code(hub, push, run):
    add_line(run.model / "gpt.py", f"# {TOKEN}")
    done = push(*QUICK, "--allow_modified_code")
    assert done.status == 2
    assert done.refusal.startswith("found what looks like the Hugging Face token in use in runs/short/model/gpt.py (")
    assert hub.requests == []


# ---- destination ----------------------------------------------------------------------------------------------------


@slow
def test_flags_of_branch_tag_and_card_take_effect(hub, push, run):
    completions = read_json(run.completions)
    completions["completions"][0]["greedy"] += "\npassword: hunter22\n"
    write_json(run.completions, completions)
    allowed = fingerprint("hunter22")
    shutil.copytree(run.root, run.root.with_name("baseline"))
    baseline = RunFolder(run.root.with_name("baseline"))
    told, measured = read_json(baseline.resolved), read_json(baseline.heldout)
    told["trainer"]["learning_rate"] = 0.5
    measured["after"]["loss"] += 0.25
    write_json(baseline.resolved, told)
    write_json(baseline.heldout, measured)
    hub.create(REPO)
    hub.commit(REPO, {"fox.png": b"a picture\0"})
    before = contents(run.staged)

    done = push(
        *QUICK,
        *("--revision", "next", "--tag", "v1", "--message", "A first try", "--license", "apache-2.0"),
        *("--language", "en", "de", "--baseline", "runs/baseline", "--output_dir", "out/here"),
        *("--allow_secret", allowed, "0" * 12),
    )
    assert done.status == 0, done.err
    assert f"unused    --allow_secret {'0' * 12}: no file contains such a value\n" in done.out
    repo, there = hub.repos[REPO], published(hub, revision="next")
    assert there == {**contents(run.root.parents[1] / "out" / "here"), "fox.png": b"a picture\0"}
    assert (there.keys() - OF_A_RUN, OF_A_RUN - there.keys()) == ({"LICENSE", "fox.png"}, {"LICENSE-CODE"})
    assert there["LICENSE"] == (REPOSITORY / "LICENSE").read_bytes()
    assert published(hub) == {"fox.png": b"a picture\0"}
    assert (hub.landed[-1].title, hub.landed[-1].ref) == ("A first try", "refs/heads/next")
    assert (repo.branches["next"], repo.tags) == (hub.landed[-1].oid, {"v1": hub.landed[-1].oid})
    assert contents(run.staged) == before
    _, header, card = there["README.md"].decode().split("---\n", 2)
    metadata = yaml.safe_load(header)
    assert (metadata["license"], metadata["language"]) == ("apache-2.0", ["en", "de"])
    assert card.count('revision="v1"') == 3
    assert "### Compared with the baseline baseline" in card
    assert "| learning\\_rate | 0.5 | 0.01 |" in " ".join(card.split())
    assert "These are single runs. How much of the difference is due to the seeds is not known." in card
    assert "Apache-2.0, weights and code (`LICENSE`)" in card
    assert b"password: hunter22" in there["evaluation/completions.json"]
    assert read_json(run.published)["allowed_secrets"] == [allowed]


@slow
def test_pull_request_leaves_main_and_an_edited_card_unchanged(hub, push, run):
    assert push(*QUICK).status == 0
    record = read_json(run.published)
    hub.commit(REPO, {"README.md": b"# My own words\n"})
    before = hub.files(REPO)
    done = push(*QUICK, "--create_pr", "--message", "A proposal")
    assert done.status == 0, done.err
    repo = hub.repos[REPO]
    assert hub.files(REPO) == before
    assert published(hub, revision="refs/pr/1") == contents(run.staged)
    assert b"revision=" not in hub.files(REPO, "refs/pr/1")["README.md"]
    assert (repo.discussions[1].title, repo.discussions[1].is_pull_request) == ("A proposal", True)
    assert [*repo.tags.values()] == [record["commit"]]
    assert done.out.endswith(f"next: review and merge {hub.url}/{REPO}/discussions/1\n")
    told = read_json(run.published)  # what is on main first, as before
    assert (told["commit"], told["tag"], told["pull_request"]) == (record["commit"], record["tag"], None)
    assert [other["pull_request"] for other in told["others"]] == [f"{hub.url}/{REPO}/discussions/1"]

    hub.drop_answer("/commit/")  # the pull request is found by its title, and not opened twice
    for said in ("1 files sent", "nothing to send"):
        done = push(*QUICK, "--create_pr")
        assert done.status == 0, done.err
        assert said in done.out
        assert len(repo.discussions) == 2
    assert published(hub, revision="refs/pr/2") == contents(run.staged)


@slow
def test_pull_request_needs_no_write_access_and_is_reused(hub, push, run):
    hub.create(REPO)
    repo, how = hub.repos[REPO], {"token": OTHER_TOKEN, "xet": True}  # LFS differs only in how files are sent
    refused = push(*QUICK, "--create_pr", "--public", token=OTHER_TOKEN)
    assert (refused.status, repo.discussions) == (3, {})
    assert "has read access to you/tiny only" in refused.refusal
    refused = push(*QUICK, "--create_pr", token=READ_TOKEN)
    assert (refused.status, repo.discussions, sent_bytes(hub)) == (3, {}, 0)

    done = push(*QUICK, "--create_pr", **how)
    assert done.status == 0, done.err
    pull = repo.discussions[1]
    assert (pull.author, pull.title, pull.is_pull_request) == ("other", done_title(run), True)
    assert published(hub, revision="refs/pr/1") == contents(run.staged)
    hub.commit(REPO, {"gpt.py": b"", "model.safetensors": b"other weights\0"}, revision="refs/pr/1")
    done = push(*QUICK, "--create_pr", **how)
    assert done.status == 0, done.err
    assert f"adds to   {hub.url}/{REPO}/discussions/1, your open pull request of this title\n" in done.out
    assert published(hub, revision="refs/pr/1") == contents(run.staged)
    assert [commit.ref for commit in hub.landed] == ["refs/heads/main", *["refs/pr/1"] * 3]
    assert [*repo.discussions] == [1]

    pull.status = "closed"
    done = push(*QUICK, "--create_pr", token=OTHER_TOKEN)
    assert done.status == 0, done.err
    assert [*repo.discussions] == [1, 2]
    assert repo.branches == {"main": hub.landed[0].oid}
    assert (repo.private, repo.tags) == (False, {})


# ---- --code_only ----------------------------------------------------------------------------------------------------


@slow
def test_code_only_sends_code_and_card_without_weights(hub, push, run):
    assert push(*QUICK).status == 0
    newer = published(hub)
    older = {"gpt.py": newer["gpt.py"] + b"# as it was before\n", "resolved.json": b"{}\n", "fox.png": b"a picture\0"}
    hub.commit(REPO, older)
    so_far, sent = len(hub.requests), sent_bytes(hub)
    add_line(run.model / "gpt.py", "# as it was before")  # beside the weights; the checkout's is newer
    done = push(*QUICK, "--code_only")
    assert done.status == 0, done.err
    assert "2 files sent, 0 removed" in done.out
    assert published(hub) == {**newer, "fox.png": b"a picture\0"}
    assert hub.landed[-1].title == done_title(run).replace("Publish", "Update code and card of")
    assert (sent_bytes(hub), asked_since(hub, so_far, "/info/lfs/")) == (sent, [])


def asked_since(hub: HubServer, start: int, path: str) -> list[str]:
    """The addresses of requests from the `start`-th on that contain this."""
    return [request.path for request in hub.requests[start:] if path in request.path]


@slow
def test_code_only_is_refused_without_the_same_published_model(hub, push, run):
    done = push(*QUICK, "--code_only")
    assert done.status == 2
    assert done.refusal == f"--code_only updates a published model, and {REPO} does not exist. Leave it out."
    assert hub.repos == {}
    assert push(*QUICK).status == 0
    weights = load_file(run.model / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, run.root / "other.safetensors", metadata={"format": "pt"})
    hub.commit(REPO, {"model.safetensors": run.root / "other.safetensors"})
    before = hub.files(REPO)
    done = push(*QUICK, "--code_only")
    assert done.status == 2
    assert done.refusal.startswith(f"model.safetensors of {REPO} differs from this run's, and --code_only does not")
    assert hub.files(REPO) == before


# ---- checkpoints, twins, shards, other code bases -------------------------------------------------------------------


EACH = """
import json, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
for repo, revision, trust in {which!r}:
    given = dict(revision=revision, trust_remote_code=trust)
    model = AutoModelForCausalLM.from_pretrained(repo, **given)
    AutoTokenizer.from_pretrained(repo, **given)
    with torch.no_grad():
        print(json.dumps([model(torch.arange(32)[None]).logits.tolist(), type(model).__module__]))
"""


@slow
def test_checkpoints_become_branches_and_the_native_twin_needs_no_remote_code(hub, push, run, from_hub):
    shutil.rmtree(run.checkpoints / "checkpoint-20")  # loading each in an isolated process takes seconds
    done = push(*QUICK, "--all_checkpoints", "--also_native")
    assert done.status == 0, done.err
    repo, twin = hub.repos[REPO], hub.repos[f"{REPO}-native"]
    assert repo.branches.keys() == {"main", "step-10"}
    assert (repo.private, twin.private, twin.branches.keys()) == (True, True, {"main"})
    there, native = published(hub), published(hub, twin.name)
    assert there.keys() == OF_A_RUN
    assert native.keys() == {name for name in OF_A_RUN if not name.endswith(".py") and name != "LICENSE-CODE"}
    assert "auto_map" not in json.loads(native["config.json"])
    card, of_twin = there["README.md"].decode(), native["README.md"].decode()
    branch, checkpoint = published(hub, revision="step-10"), run.checkpoints / "checkpoint-10"
    assert branch["model.safetensors"] == (checkpoint / "model.safetensors").read_bytes()
    assert branch.keys() == {name for name in OF_A_RUN if not name.startswith(("evaluation/", "charts/"))}
    assert 'revision="step-10"' in branch["README.md"].decode()
    assert "| `step-10` | 10 | 1,280 |" in " ".join(card.split())
    assert f"[{twin.name}](https://huggingface.co/{twin.name})" in card
    assert f"[{REPO}](https://huggingface.co/{REPO})" in of_twin
    assert "trust_remote_code" not in "".join(code_blocks(of_twin))
    assert [other["revision"] for other in read_json(run.published)["others"]] == ["step-10", "main"]

    (tag,) = twin.tags
    of_branch, of_twin = from_hub(EACH.format(which=[(REPO, "step-10", True), (twin.name, tag, False)])).splitlines()
    assert_same_logits(of_branch, checkpoint)
    found, module = json.loads(of_twin)
    assert module == "transformers.models.gpt2.modeling_gpt2"
    with torch.no_grad():
        ours = GPT2SmallForCausalLM.from_pretrained(run.model)(torch.arange(32)[None]).logits
    torch.testing.assert_close(torch.tensor(found), ours)

    done = push(*QUICK)  # the card still knows of both
    assert done.status == 0
    assert "nothing to send" in done.out
    assert published(hub)["README.md"].decode() == card


@slow
def test_former_shards_are_removed_and_files_of_others_kept(hub, push, run):
    weights, loaded_before = run.model / "model.safetensors", (run.root / "staged.json").read_bytes()
    GPT2SmallForCausalLM.from_pretrained(run.model).save_pretrained(run.root / "shards", max_shard_size="40KB")
    kept = weights.rename(run.root / weights.name)
    for path in (run.root / "shards").glob("model*"):
        path.rename(run.model / path.name)
    assert push(*QUICK).status == 0
    shards = {name for name in published(hub) if name.startswith("model.safetensors") or name.endswith(".safetensors")}
    assert len(shards) > 2
    assert "model.safetensors" not in shards
    theirs = {"fox.png": b"a picture\0", "notes/why.md": b"because\n", "examples.py.txt": b"print()\n"}
    hub.commit(REPO, theirs)

    for name in shards:
        (run.model / name).unlink()
    kept.rename(weights)
    shutil.rmtree(run.staged)
    (run.root / "staged.json").write_bytes(loaded_before)
    done = push(*QUICK)
    assert done.status == 0, done.err
    assert f"{len(shards)} removed" in done.out
    assert f"removes {', '.join(sorted(shards))}" in done.out
    assert len(hub.landed) == 4
    assert published(hub) == {**contents(run.staged), **theirs}


@slow
def test_reference_model_is_converted_and_published(hub, push, tiny_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(test_conversion, "V", len(tiny_tokenizer))
    write_reference(tmp_path / "theirs")
    write_json(tmp_path / "theirs" / "train.json", {"dataset": "somebody/some-text", "microbatch_size": 12})
    tiny_tokenizer.save_pretrained(tmp_path / "words")
    done = push("theirs", REPO, "--no_verify")
    assert done.status == 2
    assert done.refusal == "theirs has no tokenizer. Name the one it was trained with: --tokenizer FOLDER_OR_ID"
    assert hub.requests == []
    done = push("theirs", REPO, "--no_verify", "--tokenizer", "words")
    assert done.status == 0, done.err
    there = published(hub)
    assert there.keys() == {name for name in OF_A_RUN if "/" not in name and name != "resolved.json"}
    assert there == contents(tmp_path / "runs" / "theirs" / "staged")
    card = there["README.md"].decode()
    assert (
        "private   somebody/some-text: not linked, and its account is not published" in done.out
    )  # no such data set is on this Hub
    assert "datasets:" not in card
    assert "Its weights were trained by other code" in card
    record = read_json(tmp_path / "runs" / "theirs" / "published.json")
    assert (record["logit_difference"], record["commit"]) == (0.0, hub.landed[-1].oid)


@slow
def test_unfinished_run_publishes_its_newest_checkpoint(hub, push, run):
    run.heldout.unlink()
    done = push(*QUICK)
    assert done.status == 0, done.err
    newest = "runs/short/checkpoints/checkpoint-20"
    assert done.out.startswith(f"found     runs/short is not finished: its newest checkpoint, {newest}\n")
    there = published(hub)
    assert there["model.safetensors"] == (run.checkpoints / "checkpoint-20" / "model.safetensors").read_bytes()
    assert there.keys() == {n for n in OF_A_RUN if not n.startswith(("evaluation/", "charts/"))}
    assert "These are its weights at step 20, before the end of training" in there["README.md"].decode()
    assert json.loads(there["config.json"])["use_cache"] is True


# ---- files of the user ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("taken", ["out", "out-native", "out.html", "out.json", "out-native.json"])
def test_staging_replaces_only_what_this_command_staged(push, run, taken):
    """A dry run must not cost anybody a folder, whatever stands beside --output_dir."""
    place = run.root.parent / "of-others"
    theirs = place / taken if "." in taken else place / taken / "work" / "precious.txt"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("precious", encoding="utf-8")
    done = push("runs/short", REPO, "--dry_run", "--also_native", "--output_dir", "runs/of-others/out")
    assert done.status == 2
    assert f"runs/of-others/{taken}" in done.refusal
    assert theirs.read_text(encoding="utf-8") == "precious"
    assert [path for path in place.rglob("*") if path.is_file()] == [theirs]


@pytest.mark.parametrize("theirs", [".git/HEAD", "notes.txt", "charts/mine.png"])
def test_file_added_to_the_staged_folder_is_not_removed(push, run, theirs):
    (run.staged / theirs).parent.mkdir(exist_ok=True)
    (run.staged / theirs).write_text("mine", encoding="utf-8")
    done = push(*QUICK, "--dry_run")
    assert done.status == 2
    assert done.refusal.startswith(f"runs/short/staged/{theirs} was not staged by this command")
    assert (run.staged / theirs).read_text(encoding="utf-8") == "mine"


def test_edited_staged_card_is_not_overwritten(push, run):
    add_line(run.staged / "README.md", "my words")
    done = push(*QUICK, "--dry_run")
    assert done.status == 2
    assert "README.md was edited and would be overwritten. Edit model_card.j2 instead" in done.refusal


def test_staged_weights_are_a_copy(run):
    """Who writes into the staged folder spoils no run."""
    assert not (run.staged / "model.safetensors").samefile(run.model / "model.safetensors")


@slow
def test_license_written_on_the_hub_is_not_overwritten(hub, push, run):
    assert push(*QUICK).status == 0
    hub.commit(REPO, {"LICENSE": b"my own\n"})
    done = push(*QUICK, "--license", "apache-2.0")
    assert (done.status, hub.files(REPO)["LICENSE"]) == (2, b"my own\n")
    assert "has another LICENSE" in done.refusal


@pytest.mark.parametrize("flag", ["--message", "--contact", "--developers"])
@pytest.mark.parametrize("secret", [SECRET, "my.own+token"])
def test_flag_with_a_secret_or_the_token_in_use_is_refused(flag, secret, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "my.own+token")
    with pytest.raises(UsageError, match=f"^{flag} contains what looks like (a|the) Hugging Face token") as refusal:
        publish(parse_arguments(["runs/short", REPO, "--dry_run", flag, f"with {secret}"]))
    assert secret not in str(refusal.value)
