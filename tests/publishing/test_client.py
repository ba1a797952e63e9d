"""Calls to the Hub have time-outs, are retried where that is safe, and fail with one line."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import httpx2
import pytest
from hub import CALLS, TOKEN, HubServer
from huggingface_hub import constants
from huggingface_hub.utils import close_session, get_session

from gpt2small_hf.errors import CommandError, UsageError
from gpt2small_hf.publishing import client
from gpt2small_hf.publishing.arguments import AuthError, parse_arguments, token_in_use
from gpt2small_hf.publishing.client import UploadError
from gpt2small_hf.publishing.commit import (
    check_card,
    check_tag,
    commit_folder,
    find_changes,
    find_other_model,
)
from gpt2small_hf.publishing.hub import Hub, RepositoryState, is_visible
from gpt2small_hf.publishing.license import License
from gpt2small_hf.publishing.publication import Publication
from gpt2small_hf.publishing.push import private_links
from gpt2small_hf.publishing.push_plan import PushPlan
from gpt2small_hf.publishing.source import PushSource
from gpt2small_hf.publishing.stage import list_files
from gpt2small_hf.runs.files import write_json
from gpt2small_hf.runs.layout import RunFolder

# huggingface_hub sends files as `data`, which its HTTP library warns of.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

REPO = "you/tiny"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """A Hub that this process talks to, with short waits."""
    with HubServer() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        )
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.5)
        monkeypatch.setattr(client, "SLOW_FACTOR", 1)
        monkeypatch.setattr(client, "RETRY_WAITS_SECONDS", (0.01, 0.02))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        client.install_client.cache_clear()
        yield server
        close_session()


@pytest.fixture
def staged(tmp_path: Path) -> Path:
    """A folder to push, with one file that goes to LFS."""
    folder = tmp_path / "staged"
    folder.mkdir()
    write_json(folder / "config.json", {"model_type": "gpt2small"})
    (folder / "model.safetensors").write_bytes(b"weights\0" * 100)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Tiny\n", encoding="utf-8")
    return folder


def push_once(staged: Path) -> None:
    """Make every call that a push makes, in its order."""
    is_visible("you/data", "dataset", token=False)
    hub = Hub()
    remote = hub.repository_state(REPO, "next", pull_request_title="Propose")
    remote.other_model = find_other_model(hub, remote, [])
    check_tag(hub, remote, "v1", staged)
    check_card(hub, remote, staged, License("mit"), replace=False)
    files = list_files(staged)
    find_changes(hub, remote, staged, files)
    hub.create_missing(remote)
    if remote.other_model and remote.is_overwritten:
        hub.create_tag(remote, remote.backup_tag, remote.head)
    commit, _ = commit_folder(hub, remote, staged, files, "Publish tiny")
    hub.verify_checksums(staged, REPO, commit)
    with TemporaryDirectory() as cache:
        hub.download(REPO, commit, Path(cache))
    hub.create_tag(remote, "v1", commit, "Publish tiny")
    hub.set_visibility(REPO, public=True)


def assert_pushed_once(server: HubServer, staged: Path) -> None:
    """One commit with all files, tagged and public."""
    repo = server.repos[REPO]
    assert [commit.title for commit in server.landed].count("Publish tiny") == 1
    assert {path.name: path.read_bytes() for path in staged.iterdir()}.items() <= server.files(REPO, "next").items()
    assert repo.tags == {"v1": repo.branches["next"]}
    assert not repo.private


def test_an_origin_that_the_token_cannot_see_is_refused(server):
    source = PushSource("mine", Path("mine"), Path("mine"), RunFolder(Path("runs/mine")))
    server.create("you/first", private=True)
    for origin in ("you/first", "you/frist", "max/theirs"):
        args = parse_arguments(["mine", REPO, "--origin", origin])
        plan = PushPlan(source, Path("staged"), Publication(REPO, origin=origin))
        if origin == "you/first":
            assert private_links(args, plan) == {origin}
            continue
        with pytest.raises(UsageError, match=f"--origin {origin}: the Hub has no such model, or the token may not see"):
            private_links(args, plan)


def existing(server: HubServer) -> None:
    """Make the repository, with an earlier model in it."""
    server.create(REPO)
    server.commit(REPO, {"config.json": b'{"model_type": "gpt2small", "x": 1}'})


XET = ("xet-token", "cas", "xorb", "shard")
CALLED = [name for name in CALLS if name not in (*XET, "complete", "commits", "paths")]
"""Calls of `push_once`. It makes "commits" only when the answer to a commit was lost."""
READ = [name for name in CALLED if name not in ("auth", "branch", "put", "verify", "resolve", "cdn", "tag", "settings")]
"""Those whose answer is read."""


@pytest.mark.slow
@pytest.mark.parametrize("is_new", [True, False], ids=["new", "existing"])
@pytest.mark.parametrize("kind", ["500", "429", "dropped", "lost"])
def test_a_push_survives_one_fault_at_every_call(server, staged, capfd, kind, is_new):
    if not is_new:
        existing(server)
    for call in CALLED:
        if call != "cdn":  # read as a stream, after its head
            server.inject(call, kind)
    push_once(staged)
    assert_pushed_once(server, staged)
    told = capfd.readouterr().err
    assert "GET /api/whoami-v2: " in told
    assert all(line.endswith("; retrying in 0.01 s") for line in told.splitlines())


@pytest.mark.slow
def test_a_push_survives_silence_before_and_after_the_work(server, staged, capfd):
    for call, kind in {"whoami": "silent", "create": "done-silent", "put": "silent", "commit": "done-silent"}.items():
        server.inject(call, kind)
    push_once(staged)
    assert_pushed_once(server, staged)
    told = capfd.readouterr().err
    assert f"GET /api/whoami-v2: no answer from {server.url} within 0.5 s; retrying in 0.01 s\n" in told


@pytest.mark.slow
@pytest.mark.parametrize("call", ["whoami", "tree", "put", "commit", "tag"])
def test_server_without_answer_is_named_with_its_call(server, staged, call):
    existing(server)
    server.inject(call, "silent", times=-1)
    started = time.monotonic()
    with pytest.raises(UploadError) as error:
        push_once(staged)
    assert time.monotonic() - started < 10
    assert "within 0.5 s" in str(error.value)
    method, address = CALLS[call]
    asked = [request for request in server.requests if request.method == method and re.search(address, request.path)]
    assert len(asked) == 3
    assert call == "commit" or asked[0].path[:50] in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "said"), [("silent", "within 0.5 s"), ("html", "web page"), ("403", "fault 403")])
def test_xet_token_request_has_a_timeout_and_a_message(server, staged, monkeypatch, kind, said):
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    server.inject("xet-token", kind, times=-1)
    started = time.monotonic()
    with pytest.raises(UploadError, match=said):
        push_once(staged)
    assert time.monotonic() - started < 10
    assert [commit.title for commit in server.landed] == ["initial commit"]


def test_every_request_of_a_push_has_a_time_out(server, staged):
    existing(server)
    seen = {}
    client.install_client()
    get_session().event_hooks["request"].append(
        lambda request: seen.setdefault(f"{request.method} {request.url.path}", request.extensions["timeout"])
    )
    push_once(staged)
    assert len(seen) >= len(CALLED) - 2
    assert [call for call, limits in seen.items() if None in limits.values() or not limits] == []


@pytest.mark.parametrize("call", CALLED)
def test_web_page_in_place_of_a_response_is_one_line(server, staged, call):
    if call != "create":
        existing(server)
    server.inject(call, "html", times=-1)
    with pytest.raises(CommandError) as error:
        push_once(staged)
    assert error.value.status in (3, 4)
    assert "web page" in str(error.value)
    assert "template" not in str(error.value)
    assert "\n" not in str(error.value)
    if REPO in server.repos:
        assert server.repos[REPO].tags == {} or call == "settings"


@pytest.mark.parametrize("kind", ["list", "empty"])
@pytest.mark.parametrize("call", [name for name in READ if name != "validate"])  # where `{}` means no errors
def test_an_answer_of_another_form_is_one_line(server, staged, call, kind):
    if call != "create":
        existing(server)
    server.inject(call, kind, times=-1)
    with pytest.raises(CommandError) as error:
        push_once(staged)
    assert error.value.status == 4
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, 0),
        ({"Retry-After": "7"}, 7),
        ({"retry-after": format_datetime(datetime.now(timezone.utc) + timedelta(days=1), usegmt=True)}, 86_400),
        ({"Retry-After": "soon"}, 0),
        ({"Retry-After": "9" * 400}, client.MAX_ASKED_SECONDS),
        ({"RateLimit": f'"api";r=0;t={"9" * 400}'}, client.MAX_ASKED_SECONDS),
        ({"RateLimit": '"api";r=0;t=55', "RateLimit-Policy": '"fixed window";"api";q=500;w=300'}, 55),
        ({"RateLimit": '"api";r=12;t=55'}, 0),
        ({"RateLimit": '"api";r=0;t=5', "Retry-After": "9"}, 9),
    ],
)
def test_seconds_asked_reads_every_form(headers, seconds):
    assert client.requested_wait_seconds(httpx2.Headers(headers)) == pytest.approx(
        seconds, abs=3600 if seconds == 86_400 else 0
    )


@pytest.mark.slow
@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.default_int_handler])
def test_time_limit_interrupts_even_where_signals_are_ignored(handler):
    before = signal.signal(signal.SIGINT, handler)
    try:
        with pytest.raises(TimeoutError, match="did not end within 0 s"), client.time_limit(0.05):
            threading.Event().wait(5)
        assert signal.getsignal(signal.SIGINT) is handler
        with pytest.raises(KeyboardInterrupt), client.time_limit(5):
            raise KeyboardInterrupt
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("headers", [{"Retry-After": "40"}, {"RateLimit": '"api";r=0;t=40'}])
def test_a_call_waits_as_long_as_the_hub_asks_and_announces_it(server, staged, capfd, monkeypatch, headers):
    waits = []
    monkeypatch.setattr(client, "time", SimpleNamespace(sleep=waits.append))
    server.inject("whoami", "429", headers=headers)
    Hub()
    assert waits == [40]
    said = "GET /api/whoami-v2: the Hub answered 429 and asks to wait 40 s; retrying in 40 s\n"
    assert capfd.readouterr().err == said


@pytest.mark.parametrize("call", ["whoami", "commit"])
def test_a_busy_server_is_quoted_in_the_message(server, staged, capfd, call):
    existing(server)
    server.inject(call, "503", times=-1, headers={"X-Error-Message": "Maintenance until 10:00 UTC."})
    with pytest.raises(UploadError, match=r"the Hub answered 503 \(Maintenance until 10:00 UTC\)"):
        push_once(staged)
    assert ": the Hub answered 503 (Maintenance until 10:00 UTC); retrying in 0.01 s\n" in capfd.readouterr().err


@pytest.mark.slow
def test_commit_is_not_repeated_if_its_outcome_is_unknown(server, staged):
    existing(server)
    server.inject("commit", "silent", times=-1)
    server.inject("commits", "silent", times=-1)
    with pytest.raises(UploadError, match=r"was not answered: .* It may have been made: run the same command"):
        push_once(staged)
    assert len([request for request in server.requests if "/commit/" in request.path]) == 1


@pytest.mark.parametrize(
    ("endpoint", "path", "is_commit", "seconds"),
    [
        ("https://hub", "/api/models/you/tiny/commit/main", True, 60),
        ("https://hub", "/api/models/you/commit/preupload/main", False, 10),
        ("https://hub", "/api/models/commit/tiny/preupload/main", False, 10),
        ("https://hub", "/you/tiny/resolve/main/config.json", False, 60),
        ("https://proxy/hf", "/hf/api/whoami-v2", False, 10),
        ("https://proxy/hf/", "/hf/api/models/you/tiny/commit/main", True, 60),
    ],
)
def test_a_commit_and_its_time_out_are_known_by_the_path(monkeypatch, endpoint, path, is_commit, seconds):
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 10)
    request = client.Client().build_request("POST", httpx2.URL(endpoint).join(path))
    assert client.is_commit(request) == is_commit
    assert request.extensions["timeout"]["read"] == seconds


def test_call_is_not_retried_when_the_hub_asks_for_hours(server, monkeypatch):
    monkeypatch.setattr(client, "time", SimpleNamespace(sleep=pytest.fail))
    server.inject("whoami", "429", headers={"Retry-After": "7200"})
    with pytest.raises(UploadError, match="the Hub answered 429 and asks to wait 7200 s"):
        Hub()


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("ALL_PROXY", "socks5://127.0.0.1:1", "socksio"),
        ("HTTPS_PROXY", "ftp://127.0.0.1:1", "ftp"),
        ("SSL_CERT_FILE", "/nowhere/ca.pem", "No such file"),
        ("HTTPS_PROXY", "http://ada:s3cret/x@127.0.0.1:1", "invalid address"),
    ],
)
def test_an_unusable_proxy_or_certificate_is_one_line(server, monkeypatch, variable, value, said):
    monkeypatch.setenv(variable, value)
    with pytest.raises(UsageError) as error:
        is_visible(REPO)
    assert variable in str(error.value)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert "s3cret" not in str(error.value)


@pytest.mark.parametrize(
    ("endpoint", "kind"),
    [("http://127.0.0.1:port", UsageError), ("127.0.0.1:1", UploadError), ("http://127.0.0.1:1", UploadError)],
)
def test_an_address_without_a_hub_is_one_line_at_once(server, monkeypatch, endpoint, kind):
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(client, "time", SimpleNamespace(sleep=pytest.fail))
    with pytest.raises(kind, match="checking the token"):
        Hub()


@pytest.mark.parametrize("kind", ["401", "403", "500", "html", "list", None])
def test_a_password_in_the_address_of_the_hub_is_not_printed(server, monkeypatch, capfd, kind):
    address = server.url.replace("//", "//ada:s3cret@")
    monkeypatch.setattr(constants, "ENDPOINT", address if kind else "http://ada:s3cret/s3cret@127.0.0.1:1")
    if kind:
        server.inject("whoami", kind, times=-1)
    with pytest.raises(CommandError) as error:
        Hub()
    assert "s3cret" not in f"{error.value}{capfd.readouterr()}{RepositoryState(REPO, 'main', exists=True).url()}"


def test_a_token_that_cannot_be_sent_or_read_is_one_line(server, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "hf_täst")
    with pytest.raises(AuthError, match="characters"):
        token_in_use()
    monkeypatch.delenv("HF_TOKEN")
    (tmp_path / "token").write_bytes(b"\xff\xfe")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    with pytest.raises(AuthError, match="cannot be read"):
        token_in_use()


@pytest.mark.parametrize("call", ["create", "settings", "tag", "preupload"])
def test_refusal_shows_only_the_message_of_the_hub(server, staged, call):
    words = "Storage limit of your plan reached"
    server.fail(CALLS[call][1], status=403, times=-1, body={"error": words}, headers={"X-Error-Message": words})
    with pytest.raises(CommandError) as error:
        push_once(staged)
    assert str(error.value).endswith(f": the Hub refused it: {words}")


@pytest.mark.parametrize("auto_map", ["modeling_x.X", ["modeling_x.X"], {"AutoModel": ["modeling_x.X", None]}, 3])
def test_a_remote_config_of_any_form_is_read(server, staged, auto_map):
    server.create(REPO)
    config = {"model_type": ["gpt2small"], "auto_map": auto_map}
    server.commit(REPO, {"config.json": json.dumps(config).encode(), "modeling_gpt2small.py": b""})
    hub = Hub()
    remote = hub.repository_state(REPO)
    assert find_other_model(hub, remote, []) == "a model of type ['gpt2small']"
    assert find_changes(hub, remote, staged, list_files(staged)).describe()[0] == "replaces config.json"


@pytest.mark.parametrize(
    "name",
    [
        *("model.pkl", "saved_model.pb", "weights.npz", "m.nemo", "m.keras", "model.joblib", "model.mar"),
        *("m.onnx.data", "tekken.json", "tokenizer.model.v3", "preprocessor_config.json"),
    ],
)
def test_model_of_any_known_format_is_recognized_and_removed(server, staged, name):
    server.create(REPO)
    server.commit(REPO, {name: b"\0", "LICENSE.txt": b"terms", "USE_POLICY.md": b"policy", "fox.png": b"a picture"})
    hub = Hub()
    remote = hub.repository_state(REPO)
    remote.other_model = find_other_model(hub, remote, [])
    assert remote.other_model is not None
    assert name in remote.other_model
    told = find_changes(hub, remote, staged, list_files(staged)).describe()
    assert told == [f"removes LICENSE.txt, USE_POLICY.md, {name}", "keeps fox.png"]


def test_another_license_named_other_is_kept(server, staged):
    server.create(REPO)
    card = "---\nlicense: other\nlicense_name: llama3\nlicense_link: https://example.org/llama3\n---\n"
    server.commit(REPO, {"README.md": card.encode()})
    hub = Hub()
    remote = hub.repository_state(REPO)
    check_card(hub, remote, staged, License("other", "llama3", "https://example.org/llama3"), replace=False)
    for name, link, said in (
        ("mine", "https://example.org/llama3", "the license_name llama3. Add --license_name llama3 to keep it"),
        ("llama3", "https://example.org/mine", "the license_link https://example.org/llama3. Add --license_link"),
    ):
        with pytest.raises(UsageError, match=said):
            check_card(hub, remote, staged, License("other", name, link), replace=False)
    server.commit(REPO, {"README.md": card.replace("https://example.org/llama3", "LICENSE").encode()})
    remote = hub.repository_state(REPO)
    with pytest.raises(UsageError, match=r"the license_link LICENSE\. Add --license_file FILE"):
        check_card(hub, remote, staged, License("other", "llama3", "https://example.org/mine"), replace=False)


def test_a_tag_of_the_user_is_not_recorded_as_a_replaced_state():
    remote = RepositoryState(
        REPO, "main", exists=True, tags={"before-20240101": "0a" * 20, "before-1b1b1b1b": "1b" * 20}
    )
    assert remote.replaced == {"before-1b1b1b1b": "1b" * 20}


def test_a_new_repository_has_nothing_to_replace(server, staged):
    server.create(REPO)  # with its .gitattributes
    hub = Hub()
    assert find_changes(hub, hub.repository_state(REPO), staged, list_files(staged)).describe() == []


def test_a_tag_of_somebody_else_is_not_taken_for_ours(server, staged):
    server.create(REPO)
    hub = Hub()
    remote = hub.repository_state(REPO)
    other = server.commit(REPO, {"a.txt": b"a"}).oid
    server.repos[REPO].refs["refs/tags/v1"] = other
    with pytest.raises(UploadError, match=f"tag v1 of {REPO} was set meanwhile to commit {other}"):
        hub.create_tag(remote, "v1", remote.head, "Publish")
