"""Interrupted and refused pushes: all or nothing is published, and the same command continues."""

import shutil
from dataclasses import replace

import pytest
from conftest import REPOSITORY
from hub import OTHER_TOKEN, READ_TOKEN, TOKEN, HubServer, User

from gpt2small_hf import cli
from gpt2small_hf.errors import UsageError
from gpt2small_hf.publishing.arguments import parse_arguments
from gpt2small_hf.publishing.card import add_mark, content_hash
from gpt2small_hf.publishing.push import publish
from gpt2small_hf.runs.files import read_json, sha256
from gpt2small_hf.runs.layout import RunFolder
from publishing.push_runner import NOWHERE, REPO, Done, Push, asked, contents, published, sent_bytes

pytest_plugins = ["publishing.push_runner"]
pytestmark = pytest.mark.slow

# As others have it: other addresses and line breaks, and no appendix.
APACHE = (REPOSITORY / "LICENSE").read_text(encoding="utf-8").partition("APPENDIX")[0]
APACHE = APACHE.replace("http:", "https:").replace("\n", "\r\n").encode()
THIS = ("runs/short", REPO)
QUICK = (*THIS, "--no_verify")


def assert_untouched(hub: HubServer) -> None:
    """Nothing but what the Hub itself puts into a new repository, hidden and without a tag, if there is one at all."""
    assert [commit.title for commit in hub.landed] in ([], ["initial commit"])
    assert all(repo.private and not repo.tags for repo in hub.repos.values())


def assert_published(hub: HubServer, run: RunFolder, commits: int = 1) -> None:
    """All that was staged, in one commit, tagged; and nothing else."""
    assert published(hub) == contents(run.staged)
    assert len(hub.landed) == 1 + commits
    (add_mark,) = hub.repos[REPO].tags.values()
    assert add_mark == hub.landed[-1].oid == read_json(run.published)["commit"]


# ---- killed ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("xet", [False, True], ids=["lfs", "xet"])
def test_push_killed_during_the_upload_is_completed_by_the_same_command(hub, push, run, xet):
    pause = hub.pause("/v1/xorbs/" if xet else f"/lfs/whole/{sha256(run.model / 'model.safetensors')}")
    command = push.start(*QUICK, xet=xet)
    command.reach(pause)
    command.kill()
    pause.hang_up()
    hub.settle()
    assert_untouched(hub)
    assert not run.published.exists()
    assert push(*QUICK, xet=xet).status == 0
    assert_published(hub, run)


def test_push_killed_at_its_commit_leaves_all_or_nothing(hub, push, run):
    pause = hub.pause("/commit/")
    command = push.start(*QUICK)
    command.reach(pause)
    command.kill()
    pause.hang_up()
    hub.settle()
    assert_untouched(hub)
    pause = hub.pause("/commit/", when_done=True)
    command = push.start(*QUICK)
    command.reach(pause)
    command.kill()
    pause.release()
    hub.settle()
    assert published(hub) == contents(run.staged)
    assert hub.repos[REPO].tags == {}
    done = push(*QUICK)
    assert "nothing to send: the files there are the same" in done.out
    assert_published(hub, run)


# ---- faults of the Hub ----------------------------------------------------------------------------------------------


def test_push_survives_dropped_connections_and_busy_servers(hub, push, run):
    weights = sha256(run.model / "model.safetensors")
    hub.fail("/preupload/", status=429, headers={"Retry-After": "0"})
    hub.drop(f"/lfs/whole/{weights}", after_bytes=1)
    hub.fail("objects/verify", status=500)
    assert push(*QUICK).status == 0
    assert_published(hub, run)
    broken, whole = (request for request in hub.requests if weights in request.path)
    assert (broken.status, whole.status) == (None, 200)
    assert broken.received > 0


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lambda hub: hub.fail("/commit/", status=500), "the Hub answered 500"),
        (
            lambda hub: hub.fail("/commit/", status=503, headers={"Retry-After": "1"}),
            "the Hub answered 503 and asks to wait 1 s; retrying in 1 s",
        ),
        (lambda hub: hub.fail("/commit/", status=429), "the Hub answered 429"),
        (lambda hub: hub.drop("/commit/", after_bytes=1000), "no connection to http://127.0.0.1:"),
    ],
    ids=["500", "503", "429", "dropped"],
)
def test_failed_commit_is_retried(hub, push, run, fault, said):
    fault(hub)
    done = push(*QUICK)
    assert done.status == 0
    assert f"POST /api/models/{REPO}/commit/main: {said}" in done.err
    assert_published(hub, run)
    first, second = [request for request in hub.requests if "/commit/" in request.path]
    assert second.status == 200
    assert first.at_seconds < second.at_seconds


def test_commit_with_a_lost_response_is_not_repeated(hub, push, run):
    hub.drop_answer("/commit/")
    done = push(*QUICK)
    assert (done.status, "retrying" in done.err) == (0, False)
    assert len(asked(hub, "/commit/")) == 1
    assert_published(hub, run)


def test_commit_that_never_succeeds_is_completed_by_the_same_command(hub, push, run):
    hub.fail("/commit/", status=500, times=5)
    done = push(*QUICK, "--public")
    assert done.status == 4
    assert done.refusal == (
        f"nothing was published to {REPO}: the Hub answered 500. Run the same command to continue; uploaded files "
        "are not sent again."
    )
    assert len(asked(hub, "/commit/")) == 5
    assert_untouched(hub)
    assert not run.published.exists()
    before = sent_bytes(hub)
    assert push(*QUICK).status == 0
    assert_published(hub, run)
    assert sent_bytes(hub) == before


def test_failed_tag_is_set_by_the_same_command(hub, push, run):
    hub.fail("/tag/", status=503, times=5)
    done = push(*QUICK, "--public")
    assert done.status == 4
    assert done.refusal.startswith(f"tagging {REPO}: the Hub answered 503 (POST /api/models/{REPO}/tag/")
    assert done.refusal.endswith(", 5 attempts). Run the same command to continue.")
    assert (published(hub), hub.repos[REPO].private) == (contents(run.staged), True)
    assert push(*QUICK, "--public").status == 0
    assert_published(hub, run)
    assert not hub.repos[REPO].private


def test_refusal_of_the_storage_is_not_reported_as_one_of_the_token(hub, push, run):
    hub.fail("/lfs/whole/", status=403, times=-1, body={"error": "Request has expired"})
    done = push(*QUICK)
    assert done.status == 4
    assert done.refusal.startswith(f"nothing was published to {REPO}: Error while uploading '")
    assert "' to the Hub (Request has expired). Run the same command to continue; uploaded files are" in done.refusal
    assert_untouched(hub)


def test_refusal_of_the_lfs_batch_is_not_reported_as_a_card_error(hub, push, run):
    weights = sha256(run.model / "model.safetensors")
    full = {"oid": weights, "size": 1, "error": {"code": 422, "message": "File too large for this account"}}
    hub.fail("/objects/batch", status=200, body={"objects": [full]})
    done = push(*QUICK)
    assert done.status == 4
    assert done.refusal.startswith(f"nothing was published to {REPO}: LFS batch API returned errors:")
    assert "File too large for this account" in done.refusal
    assert_untouched(hub)


def test_xet_storage_without_answer_ends_the_push_in_one_line(hub, push, run):
    hub.inject("xorb", "silent", times=-1)
    done = push(*QUICK, xet=True, HF_XET_CLIENT_READ_TIMEOUT="1s", HF_XET_CLIENT_RETRY_MAX_ATTEMPTS="1")
    assert done.status == 4
    assert done.refusal.startswith(f"nothing was published to {REPO}: storage (Xet): ")
    assert done.seconds < 60
    assert_untouched(hub)


def test_unreachable_hub_is_reported_without_retries(waiting, run, tmp_path):
    done = Push(NOWHERE, waiting, tmp_path)(*QUICK)
    assert done.status == 4
    assert done.refusal.startswith(f"checking the token: no connection to {NOWHERE} (")
    assert done.refusal.endswith("Run the same command to continue.")
    assert done.seconds < 20


# ---- access ---------------------------------------------------------------------------------------------------------


def nothing_there(hub: HubServer) -> None:
    """A Hub without the repository."""


def there(hub: HubServer) -> None:
    """The repository is there, for everybody to see."""
    hub.create(REPO)


def hidden(hub: HubServer) -> None:
    """The repository is there, and hidden."""
    hub.create(REPO, private=True)


def refused_at_the_commit(hub: HubServer) -> None:
    """The repository is there, and the right to write to it is taken back before the commit."""
    hub.create(REPO, private=True)
    hub.fail("/commit/", status=403)
    hub.fail("/auth-check/write", status=403, after=1)


MAY_READ = f"has read access to {REPO} only. Create one with write access at http://127.0.0.1:"


@pytest.mark.parametrize(
    ("token", "state", "said"),
    [
        (None, nothing_there, "no token for the Hub. Log in once with `hf auth login`, or set HF_TOKEN."),
        ("hf_wrong", there, " does not know the token in use. Create one with write access at http://127.0.0.1:"),
        (READ_TOKEN, nothing_there, f"creating {REPO}: the Hub refused it: "),
        (READ_TOKEN, there, f"the token in use (you's) {MAY_READ}"),
        (READ_TOKEN, hidden, f"the token in use (you's) {MAY_READ}"),
        (OTHER_TOKEN, there, f"the token in use (other's) {MAY_READ}"),
        (OTHER_TOKEN, hidden, f"creating {REPO}: the Hub refused it: You don't have the rights to create"),
        (OTHER_TOKEN, nothing_there, f"creating {REPO}: the Hub refused it: You don't have the rights to create"),
        ("hf_fine", nothing_there, f"creating {REPO}: the Hub refused it: You don't have the rights to create"),
        ("hf_fine", hidden, f"the token in use (you's) {MAY_READ}"),
        (TOKEN, refused_at_the_commit, f"the token in use (you's) {MAY_READ}"),
    ],
    ids=lambda value: getattr(value, "__name__", None) or (value if str(value).startswith("hf_") else ""),
)
def test_missing_write_access_is_reported_and_nothing_changes(hub, push, run, token, state, said):
    hub.users["hf_fine"] = User("you", "fineGrained", scopes=("you/other",))
    state(hub)
    before = {name: repo.private for name, repo in hub.repos.items()}
    done = push(*QUICK, "--public", token=token)
    assert done.status == 3
    assert said in done.refusal
    assert {name: repo.private for name, repo in hub.repos.items()} == before
    assert [commit.title for commit in hub.landed] == ["initial commit"] * len(before)
    assert (sent_bytes(hub) > 0) == (state is refused_at_the_commit)
    assert not run.published.exists()


FULL = {"X-Error-Message": "Private repository storage limit reached"}


@pytest.mark.parametrize(
    ("path", "xet", "said"),
    [
        ("/preupload/", False, f"asking which files {REPO} accepts: the Hub refused it: "),
        ("/objects/batch", False, f"committing to {REPO}: the Hub refused it: "),
        ("/commit/", False, f"committing to {REPO}: the Hub refused it: "),
        ("/tag/", False, f"tagging {REPO}: the Hub refused it: "),
        ("/xet-write-token/", True, f"committing to {REPO}: the Hub refused it: "),
    ],
)
def test_refusal_for_lack_of_storage_shows_the_message_of_the_hub(hub, push, run, path, xet, said):
    hub.create(REPO, private=True)
    hub.fail(path, status=403, times=-1, headers=FULL, body={"error": FULL["X-Error-Message"]})
    done = push(*QUICK, xet=xet)
    assert (done.status, done.refusal) == (4, said + FULL["X-Error-Message"])
    assert len(hub.landed) == 1 + (path == "/tag/")


def test_offline_mode_is_refused_before_staging(tiny_run, capsys):
    assert cli.main(["push", str(tiny_run.root), "you/tiny"]) == 2  # it is, in tests
    assert (
        capsys.readouterr().err
        == "error: HF_HUB_OFFLINE is set, so nothing can be pushed. Unset it, or add --dry_run.\n"
    )


# ---- models and cards of others -------------------------------------------------------------------------------------


LLAMA = {"config.json": b'{"model_type": "llama"}', "model.safetensors": b"llama\0", "LICENSE": b"Llama's\n"}
GPT2 = {"config.json": b'{"model_type": "gpt2"}', "pytorch_model.bin": b"pickle\0", "README.md": b"# My GPT-2\n"}
SHARDS = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
OTHERS = {
    "llama": (LLAMA, "a model of type llama"),
    "gpt2": (GPT2, "a model of type gpt2"),
    "shards": (
        {"config.json": GPT2["config.json"], "model.safetensors.index.json": b"{}", **dict.fromkeys(SHARDS, b"\0")},
        "a model of type gpt2",
    ),
    "adapter": ({"adapter_config.json": b"{}", "adapter_model.safetensors": b"adapter\0"}, "an adapter"),
    "adapter beside": ({**GPT2, "adapter_config.json": b"{}"}, "an adapter"),
    "gguf": ({"README.md": b"# Mine", "tiny.Q4_K_M.gguf": b"GGUF\0"}, "weights (tiny.Q4_K_M.gguf)"),
    "onnx": ({"onnx/model.onnx": b"onnx\0"}, "weights (onnx/model.onnx)"),
    "keras": ({**GPT2, "tf_model.h5": b"\0", "flax_model.msgpack": b"\0"}, "a model of type gpt2"),
    "tokenizer": ({"tokenizer.model": b"words\0", "vocab.txt": b"words"}, "files of a model (tokenizer.model)"),
}


@pytest.mark.parametrize(("files", "what"), OTHERS.values(), ids=OTHERS)
def test_other_model_is_not_overwritten(hub, push, run, files, what):
    hub.create(REPO)
    hub.commit(REPO, {**files, "fox.png": b"a picture\0"})
    before, head = hub.files(REPO), hub.landed[-1].oid
    tag = f"before-{head[:8]}"
    done = push(*QUICK, "--replace_card", "--private")
    assert done.status == 2
    assert done.refusal == (
        f"{REPO} has {what} that was not published by this command. Use another repository, or --create_pr; --replace "
        f"replaces it and keeps its state as tag {tag}."
    )
    assert hub.files(REPO) == before
    assert (len(hub.landed), hub.repos[REPO].private, hub.repos[REPO].tags) == (2, False, {})


@pytest.mark.parametrize("name", ["llama", "shards", "gguf"])
def test_other_model_is_replaced_with_the_flag_and_tagged(hub, push, run, name):
    files, what = OTHERS[name]
    hub.create(REPO)
    hub.commit(REPO, {**files, "fox.png": b"a picture\0"})
    before, head = hub.files(REPO), hub.landed[-1].oid
    tag = f"before-{head[:8]}"
    hub.fail("/commit/", status=400)  # the tag is set before the commit, and once
    assert push(*QUICK, "--replace").status == 4
    assert hub.repos[REPO].tags == {tag: head}
    done = push(*QUICK, "--replace")
    assert done.status == 0, done.err
    assert f"replaces  {REPO}, main: {what}; its state stays as {tag}\n" in done.out
    gone = sorted(files.keys() - contents(run.staged).keys())
    assert not gone or f"changes   {REPO}, main: removes {', '.join(gone)}\n" in done.out
    assert f"changes   {REPO}, main: keeps fox.png\n" in done.out
    assert f"tagged    {tag}, the former state of {REPO}\n" in done.out
    assert published(hub) == {**contents(run.staged), "fox.png": b"a picture\0"}
    assert (hub.files(REPO, tag), len(hub.landed)) == (before, 3)
    assert read_json(run.published)["replaced"] == {tag: head}
    assert push(*QUICK).status == 0  # it is ours now
    assert len(hub.landed) == 3


def test_pushed_model_is_recognized_by_its_mark_or_weights(hub, push, run):
    assert push(*QUICK).status == 0
    hub.commit(REPO, {"README.md": hub.files(REPO)["README.md"] + b"\nMy own words\n", "gpt.py": b"# older\n"})
    assert push(*QUICK, "--replace_card").status == 0
    hub.commit(REPO, {"README.md": b"# My own words\n", "gpt.py": b"# older\n"})
    done = push(*QUICK)
    assert (done.status, "README.md of you/tiny was edited" in done.refusal) == (2, True)
    run.published.rename(run.root / "elsewhere.json")
    done = push(*QUICK, "--replace_card")
    assert (done.status, "a model of type gpt2small that was not published" in done.refusal) == (2, True)
    (run.root / "elsewhere.json").rename(run.published)
    assert push(*QUICK, "--replace_card").status == 0
    assert published(hub) == contents(run.staged)
    assert [*hub.repos[REPO].tags] == [read_json(run.published)["tag"]]
    hub.commit(REPO, {"adapter_config.json": b"{}"})  # which transformers would load with it
    done = push(*QUICK)
    assert (done.status, "has an adapter that was not published" in done.refusal) == (2, True)


def test_new_branch_and_pull_request_leave_main_unchanged(hub, push, run):
    hub.create(REPO)
    hub.commit(REPO, GPT2)
    before, head = hub.files(REPO), hub.landed[-1].oid
    pause = hub.pause("/commit/")
    command = push.start(*QUICK, "--revision", "next", "--replace_card")
    command.reach(pause)
    command.kill()
    pause.hang_up()
    hub.settle()
    assert hub.repos[REPO].branches == {"main": head, "next": head}
    done = push(*QUICK, "--revision", "next", "--replace_card")
    assert done.status == 0, done.err
    assert f"changes   {REPO}, next: removes pytorch_model.bin\n" in done.out
    done = push(*QUICK, "--create_pr", "--message", "A proposal")
    assert done.status == 0, done.err
    assert f"changes   {REPO}, a pull request: removes pytorch_model.bin\n" in done.out
    assert published(hub, revision="next").keys() == contents(run.staged).keys()
    assert published(hub, revision="refs/pr/1") == contents(run.staged)
    assert hub.files(REPO) == before
    assert not any(tag.startswith("before-") for tag in hub.repos[REPO].tags)


@pytest.mark.parametrize(
    ("files", "license", "said"),
    [
        ({"README.md": b"---\nlicense: apache-2.0\n---\n", "LICENSE": APACHE}, "apache-2.0", None),
        (
            {"README.md": b"---\r\nlicense: mit\r\n---"},
            None,
            "README.md of you/tiny states the license mit. Add --license",
        ),
        ({"README.md": b"---\nlicense: mit\n---\n"}, "apache-2.0", "README.md of you/tiny states the license mit."),
        ({"README.md": b"---\nlicense: mit\n---\n# My model\n"}, "mit", "README.md of you/tiny was edited on the Hub"),
        ({"LICENSE": APACHE.replace(b"Work", b"Play")}, "apache-2.0", "you/tiny has another LICENSE."),
    ],
    ids=["stub and same terms", "none named", "another license", "words", "other terms"],
)
def test_website_repository_is_written_unless_text_would_be_lost(hub, push, run, files, license, said):
    hub.create(REPO)
    hub.commit(REPO, files)
    done = push(*QUICK, *(["--license", license] if license else []))
    if said is None:
        assert done.status == 0, done.err
        assert published(hub) == contents(run.staged)
        assert "changes " not in done.out  # nothing that was there is loaded
    else:
        assert (done.status, len(hub.landed)) == (2, 2)
        assert done.refusal.startswith(said)


def while_weights_go_up(hub: HubServer, push: Push, run: RunFolder, files: dict[str, bytes]) -> Done:
    """A push, and a commit of these files that lands before its own."""
    pause = hub.pause(f"/lfs/whole/{sha256(run.model / 'model.safetensors')}")
    command = push.start(*QUICK)
    command.reach(pause)
    hub.commit(REPO, files)
    pause.release()
    return command.wait()


@pytest.mark.parametrize(
    ("rules", "said", "xet"),
    [
        (b"*.safetensors\n", "excludes model.safetensors", False),
        (b"*.safetensors\n", "excludes model.safetensors", True),
        (b"*.json\n!/config.json\n", "excludes evaluation/completions.json and 5 more files", False),
        (b"charts/\n*.txt\n", "excludes charts/grad_norm.png and 3 more files", False),
        (b"/README.md", "excludes README.md", False),
    ],
    ids=["weights-lfs", "weights-xet", "json", "folder", "card"],
)
def test_gitignore_that_excludes_a_file_is_refused_before_the_upload(hub, push, run, rules, said, xet):
    hub.create(REPO)
    hub.commit(REPO, {".gitignore": rules})
    done = push(*QUICK, xet=xet)
    assert done.status == 2
    assert done.refusal == (
        f".gitignore of {REPO} {said}, so the commit would be incomplete. Remove the rule on the Hub, or use another "
        "repository."
    )
    assert sent_bytes(hub) == 0
    assert asked(hub, "/commit/", "/branch/", "/settings", "xet-write-token") == []
    assert published(hub) == {".gitignore": rules}
    hub.commit(REPO, {".gitignore": b"checkpoint-*/\n*.pt\n"})  # rules that concern none of our files
    assert push(*QUICK, "--replace_card", xet=xet).status == 0
    assert published(hub) == {**contents(run.staged), ".gitignore": b"checkpoint-*/\n*.pt\n"}


def test_gitignore_is_read_from_the_branch_to_push_to(hub, push, run):
    hub.create(REPO)
    hub.repos[REPO].refs["refs/heads/next"] = hub.landed[-1].oid
    hub.commit(REPO, {".gitignore": b"gpt.py\n"}, revision="next")
    done = push(*QUICK, "--revision", "next")
    assert (done.status, len(hub.landed), sent_bytes(hub)) == (2, 2, 0)
    assert "excludes gpt.py" in done.refusal
    assert push(*QUICK).status == 0


SOMEBODY_ELSE = f"{REPO} was changed by somebody else meanwhile, so nothing was published. See what changed ("


def test_concurrent_commit_of_another_user_stays_the_head(hub, push, run):
    done = while_weights_go_up(hub, push, run, {"fox.png": b"a picture\0"})
    assert done.status == 4
    assert done.refusal.startswith(SOMEBODY_ELSE)
    assert done.refusal.endswith(f"/{REPO}/commits/main), then run the same command again.")
    assert hub.repos[REPO].branches == {"main": hub.landed[-1].oid}
    assert hub.landed[-1].title == "An edit in the browser"
    assert published(hub) == {"fox.png": b"a picture\0"}
    assert hub.repos[REPO].tags == {}
    assert push(*QUICK).status == 0
    assert published(hub) == {**contents(run.staged), "fox.png": b"a picture\0"}
    assert hub.landed[-1].parent == hub.landed[-2].oid


def test_card_written_during_the_push_is_not_overwritten(hub, push, run):
    mine = {"README.md": b"# My own words\n"}
    done = while_weights_go_up(hub, push, run, mine)
    assert (done.status, published(hub)) == (4, mine)
    assert done.refusal.startswith(SOMEBODY_ELSE)
    done = push(*QUICK)
    assert (done.status, published(hub)) == (2, mine)
    assert done.refusal.startswith(f"README.md of {REPO} was edited on the Hub, or not pushed by this command.")
    assert len(hub.landed) == 2
    assert push(*QUICK, "--replace_card").status == 0
    assert published(hub) == contents(run.staged)


@pytest.mark.parametrize("status", [409, 412])
def test_conflict_is_not_retried(hub, push, run, status):
    hub.fail("/commit/", status=status)
    done = push(*QUICK)
    assert done.status == 4
    assert done.refusal.startswith(SOMEBODY_ELSE)
    assert len(asked(hub, "/commit/")) == 1
    assert_untouched(hub)


def test_card_edited_on_the_hub_is_overwritten_only_with_the_flag(hub, push, run):
    assert push(*QUICK).status == 0
    edited = published(hub)["README.md"].replace(b"# tiny", b"# tiny, my first")
    hub.commit(REPO, {"README.md": edited})
    done = push(*QUICK)
    assert done.status == 2
    assert done.refusal == (
        f"README.md of {REPO} was edited on the Hub, or not pushed by this command. Copy its text into model_card.j2 "
        "and add --replace_card to overwrite it, or --create_pr to propose the new card."
    )
    assert (len(hub.landed), published(hub)["README.md"]) == (3, edited)
    assert push(*QUICK, "--replace_card").status == 0
    assert published(hub) == contents(run.staged)
    assert len(hub.landed) == 4


def test_card_of_an_earlier_push_is_replaced(hub, push, run):
    assert push(*QUICK).status == 0
    hub.commit(REPO, {"README.md": add_mark("---\nlicense: mit\n---\n\n# What was known then\n").encode()})
    done = push(*QUICK)
    assert done.status == 0
    assert "1 files sent" in done.out
    assert published(hub) == contents(run.staged)


def test_a_tag_that_marks_another_model_is_refused(hub, push, run):
    assert push(*QUICK).status == 0
    (tag,) = hub.repos[REPO].tags
    other = hub.commit(REPO, {"model.safetensors": b"other weights\0"})
    hub.repos[REPO].refs[f"refs/tags/{tag}"] = other.oid
    for _ in range(2):  # at the head of main, and further back
        done = push(*QUICK)
        assert done.status == 2
        assert done.refusal == f"tag {tag} of {REPO} marks another model. Choose another: --tag NAME"
        hub.commit(REPO, {"fox.png": b"a picture\0"})
    assert len(hub.landed) == 5


def test_tag_with_the_name_of_a_branch_is_refused_before_the_upload(hub, push, run):
    hub.create(REPO)
    head, tag = hub.landed[-1].oid, f"step-20-{content_hash(read_json(run.root / 'staged.json')['files'])}"
    refs = {"refs/heads/main": head, f"refs/heads/{tag}": head, "refs/tags/next": head}
    hub.repos[REPO].refs = dict(refs)
    done = push(*QUICK)
    assert done.status == 2
    assert done.refusal == f"tag {tag}: {REPO} has a branch of this name. Choose another: --tag NAME"
    del refs[f"refs/heads/{tag}"], hub.repos[REPO].refs[f"refs/heads/{tag}"]
    done = push(*QUICK, "--revision", "next")
    assert done.status == 2
    assert done.refusal.startswith(f"branch next: {REPO} has a tag of this name. Delete that tag on the Hub.")
    assert (len(hub.landed), sent_bytes(hub), hub.repos[REPO].refs) == (1, 0, refs)


def test_a_tag_that_names_a_planned_branch_is_refused_before_anything_is_staged(tiny_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_run.root, "runs/short")
    with pytest.raises(UsageError) as refusal:
        publish(parse_arguments([*THIS, "--dry_run", "--all_checkpoints", "--tag", "step-10"]))
    assert str(refusal.value) == "--tag step-10 is the name of a branch that --all_checkpoints makes. Use another."
    assert not RunFolder(tmp_path / "runs" / "short").staged.exists()


# ---- verification ---------------------------------------------------------------------------------------------------


def test_files_that_differ_on_the_hub_are_not_tagged_or_made_public(hub, push, run):
    pause = hub.pause("/commit/", when_done=True)
    command = push.start(*QUICK, "--public")
    command.reach(pause)
    landed, repo = hub.landed[-1], hub.repos[REPO]
    other = {**landed.files, "gpt.py": landed.files["configuration_gpt2small.py"]}
    repo.commits[landed.oid] = replace(landed, files=other)
    pause.release()
    done = command.wait()
    assert done.status == 5
    assert done.refusal == (
        f"gpt.py of {REPO} at {landed.oid[:12]} differs from the staged file. "
        "Nothing was tagged; run the same command again."
    )
    assert (repo.private, repo.tags) == (True, {})
    assert read_json(run.published)["verified"] is None
    assert push(*QUICK, "--public").status == 0
    assert_published(hub, run, commits=2)
    assert not repo.private


def test_corrupt_weights_on_the_hub_fail_the_isolated_check(hub, push, run):
    pause = hub.pause("/commit/", when_done=True)
    command = push.start(*THIS, "--public")
    command.reach(pause)
    kept = hub.blobs(REPO)["model.safetensors"].path
    content = kept.read_bytes()
    kept.write_bytes(content[:-4] + b"\0\0\0\0")
    pause.release()
    done = command.wait()
    assert done.status == 5
    commit = hub.landed[-1].oid
    assert done.refusal.startswith(f"{REPO} at {commit[:12]} does not load in an isolated process: {REPO} at ")
    assert "its weights are not those of the model it was staged from" in done.refusal
    assert done.refusal.endswith("It was not tagged or made public.")
    assert (hub.repos[REPO].private, hub.repos[REPO].tags) == (True, {})


def test_edit_after_the_commit_does_not_move_the_tag(hub, push, run):
    pause = hub.pause("/commit/", when_done=True)
    command = push.start(*QUICK)
    command.reach(pause)
    ours = hub.landed[-1]
    hub.commit(REPO, {"fox.png": b"a picture\0"})
    pause.release()
    assert command.wait().status == 0
    assert [*hub.repos[REPO].tags.values()] == [ours.oid]
    assert read_json(run.published)["commit"] == ours.oid
