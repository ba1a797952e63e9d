"""The Hub of the tests, driven by the unmodified client in processes of its own."""

import array
import hashlib
import http.client
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpt2small_hf import GPT2SmallForCausalLM
from hub import CALLS, LOGIN_PAGE, OTHER_TOKEN, READ_TOKEN, TOKEN, HubServer, User

pytest_plugins = ["hub.fixtures"]
both_transports = pytest.mark.parametrize("xet", [False, True], ids=["lfs", "xet"])

START = """
import json
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError
api = HfApi()

def refused(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except HfHubHTTPError as error:
        return [type(error).__name__, error.response.status_code]
"""


@pytest.fixture
def upload(tmp_path: Path) -> Path:
    """A small folder with one LFS file."""
    folder = tmp_path / "upload"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "gpt2"}', encoding="utf-8")
    (folder / "model.safetensors").write_bytes(random.Random(0).randbytes(3_000_000))
    return folder


@contextmanager
def client_process(
    hub: HubServer, home: Path, code: str, token: str | None = TOKEN, xet: bool = False, **more: str
) -> Iterator[subprocess.Popen]:
    """Run START and then `code` in a Python with an environment of its own; it is killed at the end."""
    home.mkdir(exist_ok=True)
    environment = {
        "PATH": os.environ["PATH"],
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_XET_CLIENT_RETRY_BASE_DELAY": "10ms",
        "OMP_NUM_THREADS": "1",
        **({"HF_TOKEN": token} if token else {}),
        **({} if xet else {"HF_HUB_DISABLE_XET": "1"}),
        **more,
    }
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-I", "-"], env=environment, cwd=home, text=True, **pipes) as process:
        process.stdin.write(START + code)
        process.stdin.close()
        process.stdin = None  # or communicate() would write to it
        try:
            yield process
        finally:
            process.kill()


def client(hub: HubServer, home: Path, code: str, **how: object) -> str:
    """Run a client to its end; get the last line that it printed."""
    with client_process(hub, home, code, **how) as process:
        out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out.strip().splitlines()[-1] if out.strip() else ""


def upload_code(folder: Path, **more: object) -> str:
    """Code that makes the repository, uploads the folder and prints the commit."""
    asked = {"repo_id": "you/tiny", "folder_path": str(folder), **more}
    return f'api.create_repo("you/tiny", exist_ok=True)\nprint(api.upload_folder(**{asked!r}).oid)\n'


def commit_code(folder: Path, **more: object) -> str:
    """Code that uploads the folder to a repository that is there, and prints by what it was refused."""
    asked = {"repo_id": "you/tiny", "folder_path": str(folder), **more}
    return f"print(json.dumps(refused(api.upload_folder, **{asked!r})))"


def asked(hub: HubServer, path: str) -> list[int | None]:
    """The statuses of the answers to requests whose path contains this."""
    return [request.status for request in hub.requests if path in request.path]


def contents(folder: Path) -> dict[str, bytes]:
    """Path → content of all files in a folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@both_transports
def test_a_folder_comes_back_as_it_went_up(hub: HubServer, tmp_path: Path, xet: bool) -> None:
    chance, folder = random.Random(1), tmp_path / "upload"
    (folder / "charts" / "more").mkdir(parents=True)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Größe\n", encoding="utf-8")
    (folder / "empty.txt").touch()
    (folder / "tokenizer.json").write_bytes(b"the quick brown fox " * 600_000)  # 12 MB of text
    (folder / "model.safetensors").write_bytes(array.array("f", [chance.gauss(0, 0.02) for _ in range(300_000)]))
    (folder / "noise.bin").write_bytes(chance.randbytes(9_000_001))
    (folder / "charts" / "more" / "loss.png").write_bytes(b"\x89PNG\0" + chance.randbytes(5000))
    (folder / "charts" / "a b&c+d%.md").write_text("odd name", encoding="utf-8")
    hub.part_bytes = 4_000_000

    oid = client(hub, tmp_path / "home", upload_code(folder, commit_message="All of it"), xet=xet)
    copy = Path(client(hub, tmp_path / "another_home", 'print(snapshot_download("you/tiny"))', xet=xet))

    there = hub.files("you/tiny")
    assert there.pop(".gitattributes").startswith(b"*.7z filter=lfs")
    assert there == contents(folder)
    assert contents(copy).keys() == {*there, ".gitattributes"}
    assert all((copy / path).read_bytes() == content for path, content in there.items())
    lfs = {path for path, blob in hub.blobs("you/tiny", oid).items() if blob.sha256}
    assert lfs == {"tokenizer.json", "model.safetensors", "noise.bin", "charts/more/loss.png"}
    assert [(commit.title, commit.ref, commit.author) for commit in hub.landed] == [
        ("initial commit", "refs/heads/main", "you"),
        ("All of it", "refs/heads/main", "you"),
    ]
    assert bool(asked(hub, "/v1/xorbs/")) == xet
    assert len(asked(hub, "/lfs/part/")) == (0 if xet else 6)  # three of each large file


@pytest.mark.parametrize("policy", ["none", "lz4", "bg4-lz4"])
def test_every_way_to_pack_a_chunk_is_unpacked(hub: HubServer, tmp_path: Path, policy: str) -> None:
    chance = random.Random(2)
    words = [chance.randbytes(chance.randint(1, 40)) for _ in range(50)]
    text = b"".join(chance.choice(words) for _ in range(100_000)) + b"a" * 200_000 + b"ab" * 70_001
    (tmp_path / "upload").mkdir()
    (tmp_path / "upload" / "text.bin").write_bytes(text)
    setting = {"HF_XET_XORB_COMPRESSION_POLICY": policy}
    client(hub, tmp_path / "home", upload_code(tmp_path / "upload"), xet=True, **setting)
    assert hub.files("you/tiny")["text.bin"] == text
    sent = next(request.received for request in hub.requests if "/v1/xorbs/" in request.path)
    assert (sent > len(text)) == (policy == "none")


@pytest.mark.slow
@both_transports
def test_what_is_there_is_not_sent_again(hub: HubServer, tmp_path: Path, upload: Path, xet: bool) -> None:
    first = client(hub, tmp_path / "home", upload_code(upload), xet=xet)
    before = len(hub.requests)
    assert client(hub, tmp_path / "home", upload_code(upload), xet=xet) == first
    assert len(hub.landed) == 2
    assert not [request for request in hub.requests[before:] if request.received > 100_000]


@pytest.mark.slow
@both_transports
def test_a_commit_on_a_stale_parent_is_refused(hub: HubServer, tmp_path: Path, upload: Path, xet: bool) -> None:
    stale = next(iter(hub.create("you/tiny").commits))
    edit = hub.commit("you/tiny", {"README.md": b"# Edited by hand\n"})
    code = commit_code(upload, parent_commit=stale)
    assert json.loads(client(hub, tmp_path / "home", code, xet=xet)) == ["HfHubHTTPError", 412]
    assert hub.landed[-1] == edit
    code = commit_code(upload, parent_commit=edit.oid)
    assert json.loads(client(hub, tmp_path / "home", code, xet=xet)) is None
    assert hub.files("you/tiny").keys() == {".gitattributes", "README.md", "config.json", "model.safetensors"}


@both_transports
def test_a_pull_request_leaves_main_alone(hub: HubServer, tmp_path: Path, upload: Path, xet: bool) -> None:
    code = f"""
info = api.upload_folder(repo_id="you/tiny", folder_path={str(upload)!r}, create_pr=True, commit_message="Look")
again = api.create_commit("you/tiny", [CommitOperationAdd("b.txt", b"b")], commit_message="And", create_pr=True)
refs = api.list_repo_refs("you/tiny", include_pull_requests=True).pull_requests
draft = [discussion.status for discussion in api.get_repo_discussions("you/tiny")][0]
api.change_discussion_status("you/tiny", 2, "closed")
print(json.dumps([info.pr_revision, info.oid, again.pr_num, [ref.ref for ref in refs], draft]))
"""
    repo = hub.create("you/tiny")
    revision, oid, number, refs, status = json.loads(client(hub, tmp_path / "home", code, xet=xet))
    assert (revision, number, refs) == ("refs/pr/1", 2, ["refs/pr/1", "refs/pr/2"])
    assert status == ("draft" if xet else "open")  # with Xet the client makes the pull request first, by itself
    assert repo.refs["refs/pr/1"] == oid
    assert repo.discussions[1].title == "Look"
    assert repo.discussions[2].status == "closed"
    assert hub.files("you/tiny").keys() == {".gitattributes"}
    assert hub.files("you/tiny", "refs/pr/1").keys() == {".gitattributes", "config.json", "model.safetensors"}


def test_token_without_write_access_may_only_open_a_pull_request(hub: HubServer, tmp_path: Path) -> None:
    hub.create("you/tiny")
    code = """
add = dict(repo_id="you/tiny", commit_message="x")
new = lambda: [CommitOperationAdd("a.txt", b"a")]
answers = [refused(api.create_commit, operations=new(), **add), refused(api.create_branch, "you/tiny", branch="b")]
print(json.dumps([*answers, api.create_commit(operations=new(), create_pr=True, **add).pr_num]))
"""
    answer = json.loads(client(hub, tmp_path / "home", code, token=OTHER_TOKEN))
    assert answer == [["HfHubHTTPError", 403], ["HfHubHTTPError", 403], 1]
    propose = "print(json.dumps(refused(api.create_pull_request, 'you/tiny', title='A word')))"
    assert json.loads(client(hub, tmp_path / "home", propose, token=READ_TOKEN)) == ["HfHubHTTPError", 403]
    assert hub.repos["you/tiny"].branches.keys() == {"main"}


def test_branches_tags_history_and_settings(hub: HubServer, tmp_path: Path) -> None:
    code = """
api.create_repo("you/tiny", private=True)
api.create_commit("you/tiny", [CommitOperationAdd("a/b.txt", b"1")], commit_message="one")
api.create_branch("you/tiny", branch="step-10")
api.create_commit("you/tiny", [CommitOperationAdd("c.txt", b"2")], commit_message="two", revision="step-10")
api.create_commit("you/tiny", [CommitOperationDelete("a/")], commit_message="three", revision="step-10")
api.create_tag("you/tiny", tag="v1", revision="step-10")
api.create_branch("you/tiny", branch="old/one", revision="v1")
assert api.repo_info("you/tiny", revision="old/one").sha == api.repo_info("you/tiny", revision="v1").sha
answers = [
    refused(api.create_branch, "you/tiny", branch="step-10"),
    refused(api.create_tag, "you/tiny", tag="v1"),
    refused(api.model_info, "you/tiny", revision="v2"),
    refused(api.delete_tag, "you/tiny", tag="v2"),
    refused(api.hf_hub_download, "you/tiny", "missing.txt"),
    refused(api.create_commit, "you/tiny", [CommitOperationDelete("no.txt")], commit_message="no"),
]
api.create_branch("you/tiny", branch="step-10", exist_ok=True)
api.create_tag("you/tiny", tag="v1", exist_ok=True)
refs = api.list_repo_refs("you/tiny")
tree = [[entry.path for entry in api.list_repo_tree("you/tiny", recursive=deep)] for deep in (False, True)]
history = [commit.title for commit in api.list_repo_commits("you/tiny", revision="step-10")]
private = api.repo_info("you/tiny").private
api.update_repo_settings("you/tiny", private=False)
inside = [entry.path for entry in api.list_repo_tree("you/tiny", "a")]
kinds = [type(entry).__name__ for entry in api.get_paths_info("you/tiny", ["a", "a/b.txt", "z"])]
api.delete_branch("you/tiny", branch="old/one")
siblings = [sibling.rfilename for sibling in api.model_info("you/tiny", files_metadata=True).siblings]
branches, tags = ([ref.name for ref in kind] for kind in (refs.branches, refs.tags))
print(json.dumps([answers, branches, tags, tree, history, private, inside, kinds, siblings]))
"""
    hub.page_size = 2
    answers, branches, tags, tree, history, *rest = json.loads(client(hub, tmp_path / "home", code))
    assert answers == [
        ["HfHubHTTPError", 409],
        ["HfHubHTTPError", 409],
        ["RevisionNotFoundError", 404],
        ["RevisionNotFoundError", 404],
        ["RemoteEntryNotFoundError", 404],
        ["RemoteEntryNotFoundError", 404],
    ]
    assert (branches, tags) == (["main", "step-10", "old/one"], ["v1"])
    assert tree == [[".gitattributes", "a"], [".gitattributes", "a", "a/b.txt"]]
    assert history == ["three", "two", "one", "initial commit"]
    assert len(asked(hub, "/commits/")) == 2  # pages
    assert rest == [True, ["a/b.txt"], ["RepoFolder", "RepoFile"], [".gitattributes", "a/b.txt"]]
    repo = hub.repos["you/tiny"]
    assert (repo.private, repo.branches.keys(), repo.tags.keys()) == (False, {"main", "step-10"}, {"v1"})
    assert repo.tags["v1"] == repo.branches["step-10"] == hub.landed[-1].oid
    assert hub.files("you/tiny", "step-10").keys() == {".gitattributes", "c.txt"}


def test_other_kinds_of_repositories(hub: HubServer, tmp_path: Path) -> None:
    code = """
for kind in ("model", "dataset"):
    url = api.create_repo("you/tiny", repo_type=kind)
    api.upload_file(repo_id="you/tiny", repo_type=kind, path_or_fileobj=b"x\\0", path_in_repo=f"{kind}.bin")
    api.hf_hub_download("you/tiny", f"{kind}.bin", repo_type=kind)
print(json.dumps(url.repo_type))
"""
    assert json.loads(client(hub, tmp_path / "home", code)) == "dataset"
    assert hub.files("datasets/you/tiny").keys() == {".gitattributes", "dataset.bin"}
    assert hub.files("you/tiny").keys() == {".gitattributes", "model.bin"}


@pytest.mark.slow
def test_each_token_may_do_what_it_may(hub: HubServer, tmp_path: Path) -> None:
    hub.create("you/secret", private=True)
    hub.create("you/open")
    hub.users["hf_fine"] = User("you", "fineGrained", scopes=("you/open",))
    code = """
print(json.dumps([
    refused(api.whoami),
    refused(api.repo_info, "you/secret"),
    refused(api.hf_hub_download, "you/open", ".gitattributes"),
    refused(api.auth_check, "you/secret", write=True),
    refused(api.auth_check, "you/open", write=True),
    refused(api.create_repo, "you/new"),
]))
"""
    missing, forbidden = ["RepositoryNotFoundError", 404], ["HfHubHTTPError", 403]
    unknown, nobody = ["HfHubHTTPError", 401], ["RepositoryNotFoundError", 401]
    answers = {
        READ_TOKEN: [None, None, None, forbidden, forbidden, forbidden],
        "hf_fine": [None, None, None, forbidden, None, forbidden],
        OTHER_TOKEN: [None, missing, None, missing, forbidden, forbidden],
        "hf_unknown": [unknown, unknown, unknown, unknown, unknown, unknown],
        TOKEN: [None, None, None, None, None, None],
    }
    for number, (token, expected) in enumerate(answers.items()):
        assert json.loads(client(hub, tmp_path / f"home{number}", code, token=token)) == expected, token
    without = 'print(json.dumps([refused(api.repo_info, "you/secret"), refused(api.repo_info, "you/open")]))'
    assert json.loads(client(hub, tmp_path / "home", without, token=None)) == [nobody, None]
    assert hub.repos.keys() == {"you/secret", "you/open", "you/new"}


def test_a_card_whose_header_never_ends_is_refused_before_a_byte_is_sent(hub: HubServer, tmp_path: Path) -> None:
    hub.create("you/tiny")
    (tmp_path / "upload").mkdir()
    (tmp_path / "upload" / "README.md").write_text("---\nlicense: mit\n# Title\n", encoding="utf-8")
    code = f"""
try:
    api.upload_folder(repo_id="you/tiny", folder_path={str(tmp_path / "upload")!r})
except ValueError as error:
    print(str(error).splitlines())
"""
    assert "Invalid metadata in README.md." in client(hub, tmp_path / "home", code)
    assert asked(hub, "/preupload/") == []


@pytest.mark.slow
def test_checksums_agree_until_somebody_edits(hub: HubServer, tmp_path: Path, upload: Path) -> None:
    code = f"""
found = api.verify_repo_checksums("you/tiny", local_dir={str(upload)!r})
print(json.dumps([found.checked_count, [mismatch["path"] for mismatch in found.mismatches], found.missing_paths]))
"""
    client(hub, tmp_path / "home", upload_code(upload))
    assert json.loads(client(hub, tmp_path / "home", code)) == [2, [], [".gitattributes"]]
    hub.commit("you/tiny", {"model.safetensors": b"other\0", "config.json": b"{}", "new": b"n"}, [".gitattributes"])
    assert json.loads(client(hub, tmp_path / "home", code)) == [2, ["config.json", "model.safetensors"], ["new"]]


@pytest.mark.slow
@both_transports
def test_the_client_gets_over_a_line_that_breaks_under_the_data(
    hub: HubServer, tmp_path: Path, upload: Path, xet: bool
) -> None:
    data = "/v1/xorbs/" if xet else "/lfs/whole/"
    hub.drop(data, after_bytes=100_000)
    client(hub, tmp_path / "home", upload_code(upload), xet=xet)
    broken, whole = (request for request in hub.requests if data in request.path)
    assert (broken.status, whole.status) == (None, 200)
    assert 100_000 <= broken.received < 3_000_000 <= whole.received
    assert hub.files("you/tiny")["model.safetensors"] == (upload / "model.safetensors").read_bytes()


def test_a_fault_comes_as_often_and_as_late_as_ordered(hub: HubServer, tmp_path: Path, upload: Path) -> None:
    hub.fail("/preupload/", status=429, headers={"Retry-After": "1"}, after=1)
    hub.fail("objects/verify", method="POST", status=500)
    code = f"import time\nwaits = []\ntime.sleep = waits.append\n{upload_code(upload)}\nprint(waits)"
    assert client(hub, tmp_path / "home", code).endswith("[1]")
    (upload / "more.bin").write_bytes(b"more\0")
    assert client(hub, tmp_path / "home", code).endswith("[2.0]")  # the seconds asked for, and one
    assert asked(hub, "/preupload/") == [200, 429, 200]
    assert asked(hub, "objects/verify") == [500, 200, 200]


def test_a_commit_whose_answer_is_lost_has_landed(hub: HubServer, tmp_path: Path, upload: Path) -> None:
    hub.drop_answer("/commit/")
    code = f"""
try:
    api.upload_folder(repo_id="you/tiny", folder_path={str(upload)!r}, commit_message="Lost")
except Exception as error:
    print(type(error).__name__)
"""
    hub.create("you/tiny")
    assert client(hub, tmp_path / "home", code) == "RemoteProtocolError"
    assert hub.landed[-1].title == "Lost"
    assert asked(hub, "/commit/") == [None]


@pytest.mark.slow
def test_over_xet_the_client_repeats_a_commit_whose_answer_is_lost(
    hub: HubServer, tmp_path: Path, upload: Path
) -> None:
    hub.drop_answer("/commit/")
    client(hub, tmp_path / "home", upload_code(upload, commit_message="Twice"), xet=True)
    assert [commit.title for commit in hub.landed[1:]] == ["Twice", "Twice"]
    assert hub.landed[1].files == hub.landed[2].files
    hub.drop_answer("/commit/")
    (upload / "config.json").write_text("{}", encoding="utf-8")
    code = commit_code(upload, parent_commit=hub.landed[-1].oid, commit_message="Once")
    assert json.loads(client(hub, tmp_path / "home", code, xet=True)) == ["HfHubHTTPError", 412]
    assert [commit.title for commit in hub.landed[3:]] == ["Once"]  # what the second attempt met was the first


@pytest.mark.slow
@both_transports
def test_a_client_killed_under_the_data_leaves_nothing_and_the_next_one_finishes(
    hub: HubServer, tmp_path: Path, upload: Path, xet: bool
) -> None:
    pause = hub.pause("/v1/xorbs/" if xet else "/lfs/whole/")
    with client_process(hub, tmp_path / "home", upload_code(upload), xet=xet) as process:
        assert pause.reached.wait(120)
        process.kill()
    pause.release()
    hub.settle()
    assert [commit.title for commit in hub.landed] == ["initial commit"]
    client(hub, tmp_path / "home", upload_code(upload), xet=xet)
    assert len(hub.landed) == 2
    assert hub.files("you/tiny")["model.safetensors"] == (upload / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_client_killed_at_its_commit_leaves_all_or_nothing(hub: HubServer, tmp_path: Path, upload: Path) -> None:
    pause = hub.pause("/commit/")
    with client_process(hub, tmp_path / "home", upload_code(upload)) as process:
        assert pause.reached.wait(120)
        process.kill()
    pause.hang_up()
    hub.settle()
    assert len(hub.landed) == 1
    pause = hub.pause("/commit/", when_done=True)
    with client_process(hub, tmp_path / "home", upload_code(upload)) as process:
        assert pause.reached.wait(120)
        assert len(hub.landed) == 2
        process.kill()
    pause.release()
    hub.settle()
    assert hub.files("you/tiny").keys() == {".gitattributes", "config.json", "model.safetensors"}


def test_an_edit_at_the_very_moment_of_a_commit_is_noticed(hub: HubServer, tmp_path: Path, upload: Path) -> None:
    head = next(iter(hub.create("you/tiny").commits))
    pause = hub.pause("/commit/")
    with client_process(hub, tmp_path / "home", commit_code(upload, parent_commit=head)) as process:
        assert pause.reached.wait(120)
        hub.commit("you/tiny", {"README.md": b"mine"}, title="First come")
        pause.release()
        out, err = process.communicate(timeout=120)
    assert json.loads(out) == ["HfHubHTTPError", 412], err
    assert hub.landed[-1].title == "First come"


@pytest.mark.slow
def test_a_model_with_its_own_code_loads_into_an_empty_cache(
    hub: HubServer, tmp_path: Path, tiny_model: GPT2SmallForCausalLM
) -> None:
    tiny_model.save_pretrained(tmp_path / "model")
    oid = client(hub, tmp_path / "home", upload_code(tmp_path / "model"))
    code = """
from transformers import AutoConfig, AutoModelForCausalLM
config = AutoConfig.from_pretrained("you/tiny", trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained("you/tiny", trust_remote_code=True)
print(json.dumps([type(config).__module__, config.hidden_size, model.lm_head.weight.double().sum().item()]))
"""
    module, hidden_size, total = json.loads(client(hub, tmp_path / "empty", code, xet=True))
    assert module == f"transformers_modules.you.tiny.{oid}.configuration_gpt2small"
    assert hidden_size == tiny_model.config.hidden_size
    assert total == tiny_model.lm_head.weight.double().sum().item()


def test_parts_of_files_unknown_addresses_and_tokens_in_the_wrong_place() -> None:
    with HubServer() as hub:
        hub.create("you/tiny")
        hub.commit("you/tiny", {"a.txt": b"0123456789"})
        line = http.client.HTTPConnection("127.0.0.1", int(hub.url.rsplit(":", 1)[1]), timeout=60)
        answers = []
        for path, wanted in (("a.txt", "bytes=4-"), ("a.txt", "bytes=10-"), ("a.txt", ""), ("b.txt", "")):
            line.request("GET", f"/you/tiny/resolve/main/{path}", headers={"Range": wanted} if wanted else {})
            answer = line.getresponse()
            answers.append((answer.status, answer.read() if answer.status < 300 else answer.read() and None))
        assert answers == [(206, b"456789"), (416, None), (200, b"0123456789"), (404, None)]
        line.request("GET", "/api/spaces/semantic-search?q=x")
        assert line.getresponse().status == 404
        line.close()
        assert hub.unknown_routes == ["GET /api/spaces/semantic-search"]
        assert hub.leaks == []
        line = http.client.HTTPConnection("localhost", int(hub.url.rsplit(":", 1)[1]), timeout=60)
        line.request("GET", "/cdn/0", headers={"Authorization": f"Bearer {TOKEN}"})
        assert line.getresponse().status == 400
        line.close()
        assert [(leak.path, leak.token) for leak in hub.leaks] == [("/cdn/0", TOKEN)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "answer", "is_done"),
    [
        ("503", (503, b'{"error": "fault 503"}'), False),
        ("html", (200, LOGIN_PAGE), False),
        ("list", (200, b"[]"), False),
        ("null", (200, b"null"), False),
        ("empty", (200, b"{}"), False),
        ("dropped", http.client.RemoteDisconnected, False),
        ("lost", http.client.RemoteDisconnected, True),
        ("silent", TimeoutError, False),
        ("done-silent", TimeoutError, True),
    ],
)
def test_an_injected_fault_hits_the_named_call_once(kind: str, answer: Any, is_done: bool) -> None:
    def create() -> tuple[int, bytes] | type[Exception]:
        line = http.client.HTTPConnection("127.0.0.1", int(hub.url.rsplit(":", 1)[1]), timeout=0.5)
        try:
            line.request("POST", "/api/repos/create", b'{"name": "tiny"}', {"Authorization": f"Bearer {TOKEN}"})
            got = line.getresponse()
            return got.status, got.read()
        except OSError as error:
            return type(error)
        finally:
            line.close()

    with HubServer() as hub:
        hub.inject("branch", kind)
        hub.inject("create", kind)
        assert create() == answer
        assert bool(hub.repos) == is_done
        again = create()
        assert again[0] == (409 if is_done else 200)
        assert hub.repos.keys() == {"you/tiny"}


@pytest.mark.slow
def test_every_call_that_faults_can_name_has_an_address(hub: HubServer, tmp_path: Path, upload: Path) -> None:
    seen: set[str] = set()
    code = (
        upload_code(upload)
        + """
api.whoami(), api.repo_info("you/tiny"), api.auth_check("you/tiny", write=True), api.list_repo_refs("you/tiny")
api.create_branch("you/tiny", branch="next"), api.create_tag("you/tiny", tag="v1")
api.update_repo_settings("you/tiny", private=True), list(api.get_repo_discussions("you/tiny"))
api.list_repo_commits("you/tiny"), api.get_paths_info("you/tiny", ["config.json"])
api.verify_repo_checksums("you/tiny", local_dir="."), api.hf_hub_download("you/tiny", "model.safetensors")
"""
    )
    (upload / "README.md").write_text("# Tiny\n", encoding="utf-8")
    hub.part_bytes = 2_000_000
    client(hub, tmp_path / "home", code)
    (upload / "model.safetensors").write_bytes(b"other weights\0")
    client(hub, tmp_path / "home", upload_code(upload), xet=True)
    for request in hub.requests:
        for name, (method, address) in CALLS.items():
            if method in (None, request.method) and re.search(address, request.path):
                seen.add(name)
    assert seen == CALLS.keys()


def test_what_arrives_broken_is_not_kept() -> None:
    sha256 = hashlib.sha256(b"right").hexdigest()
    with HubServer() as hub:
        line = http.client.HTTPConnection("127.0.0.1", int(hub.url.rsplit(":", 1)[1]), timeout=60)
        line.request("PUT", f"/lfs/whole/{sha256}", body=b"wrong")
        assert line.getresponse().read().startswith(b'{"error": "the content\'s SHA-256 is')
        line.close()
        hub.create("you/tiny")
        head = f"Host: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 1000"
        with socket.create_connection(("127.0.0.1", int(hub.url.rsplit(":", 1)[1])), timeout=60) as line:
            line.sendall(f'POST /api/models/you/tiny/commit/main HTTP/1.1\r\n{head}\r\n\r\n{{"key": "hea'.encode())
            line.shutdown(socket.SHUT_WR)
            assert line.recv(100) == b""
        hub.settle()
        assert [request.status for request in hub.requests] == [400, None]
        assert len(hub.landed) == 1
        hub.commit("you/tiny", {"a.bin": b"right"})
        assert hub.blobs("you/tiny")["a.bin"].sha256 == sha256


def test_the_server_leaves_nothing_open() -> None:
    before = threading.active_count()
    with HubServer() as hub:
        port = int(hub.url.rsplit(":", 1)[1])
        idle = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        idle.request("GET", "/api/agent-harnesses")
        idle.getresponse().read()
        held = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        pause = hub.pause("/api/agent-harnesses")
        held.request("GET", "/api/agent-harnesses")
        assert pause.reached.wait(60)
        started = time.monotonic()
    assert time.monotonic() - started < 30
    assert threading.active_count() == before
    idle.close()
    held.close()


def test_a_failure_of_the_server_itself_is_loud() -> None:
    def ask_with_a_broken_body() -> None:
        with HubServer() as hub:
            line = http.client.HTTPConnection("127.0.0.1", int(hub.url.rsplit(":", 1)[1]), timeout=60)
            line.request("POST", "/api/validate-yaml", body=b"no JSON")
            assert line.getresponse().status == 500
            line.close()

    with pytest.raises(RuntimeError, match="JSONDecodeError"):
        ask_with_a_broken_body()
