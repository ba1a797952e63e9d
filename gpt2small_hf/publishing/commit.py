"""A staged folder → one commit on the Hub, or nothing.

A commit is not repeated by `client.Client` but here: when its answer is lost, the Hub is first asked whether it was
made. It is refused when somebody else has committed meanwhile.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn
from urllib.parse import quote

import httpx2
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, constants
from huggingface_hub.utils import get_session, hf_raise_for_status

from gpt2small_hf.errors import UsageError
from gpt2small_hf.publishing.client import SLOW, SLOWEST, TRANSIENT, Retries, limited, shown
from gpt2small_hf.publishing.hub import Hub
from gpt2small_hf.publishing.hub_errors import (
    MALFORMED,
    UploadError,
    answers,
    error_reason,
    http_status,
    is_commit_error,
    is_unanswered_commit,
    wait_before_retry,
)
from gpt2small_hf.publishing.license import APACHE
from gpt2small_hf.publishing.repository import MAIN, Remote, is_same
from gpt2small_hf.publishing.repository_checks import check_ignored
from gpt2small_hf.publishing.stage import Files, is_license_file, is_loaded, is_model_file, is_pushed_file


@dataclass(frozen=True)
class Changes:
    """What a push does to a branch."""

    sent: list[str]
    gone: list[str]
    replaced: list[str]
    """Those of `sent` that are there with other bytes, and that transformers loads."""
    kept: list[str]
    """Files of another model's repository that are neither replaced nor removed."""

    def told(self) -> list[str]:
        """In words, where there was something before."""
        lines = [f"replaces {', '.join(self.replaced)}"] if self.replaced else []
        lines += [f"removes {', '.join(self.gone)}"] if self.gone else []
        return [*lines, *([f"keeps {', '.join(self.kept)}"] if self.kept else [])]


@dataclass(frozen=True)
class Pushed:
    """What a push came to."""

    commit: str
    pull_request: str | None
    said: str


def find_changes(hub: Hub, remote: Remote, staged: Path, files: Files, names: list[str] | None = None) -> Changes:
    """What a push would send and remove. `names` are the files to send, if not all; then none is removed."""
    wanted = sorted(files if names is None else names)
    changed = [name for name in wanted if not is_same(remote.files.get(name), staged / name)]
    gone: list[str] = []
    if names is None and remote.files:
        named = hub.json(remote, "config.json").get("auto_map") if "config.json" in remote.files else None
        classes = named.values() if isinstance(named, dict) else []
        code = {str(value).split("--")[-1].split(".")[0] for value in classes}
        gone = [
            name
            for name in remote.files
            if name not in files
            and (is_pushed_file(name, code) or (remote.other_model and (is_model_file(name) or is_license_file(name))))
        ]
        if "LICENSE" not in {*files, *gone} and is_same(remote.files.get("LICENSE"), APACHE):
            gone.append("LICENSE")  # of an earlier push, which named it that of the weights
    replaced = [name for name in changed if name in remote.files and is_loaded(name)]
    kept = sorted(remote.files.keys() - {*files, *gone, ".gitattributes"}) if remote.other_model else []
    return Changes(changed, gone, replaced, kept)


def commit_folder(
    hub: Hub,
    remote: Remote,
    staged: Path,
    files: Files,
    message: str,
    *,
    names: list[str] | None = None,
    create_pr: bool = False,
) -> Pushed:
    """Send a staged folder as one commit, in which files of an earlier push that are no longer there go.

    `names` are the files to send, all unless said, in which case no other file is touched.

    Raises: UploadError, AuthError, UsageError. Then the branch is as it was.
    """
    found = find_changes(hub, remote, staged, files, names)
    changed, gone = found.sent, found.gone
    assert remote.head is not None
    if not changed and not gone:
        return Pushed(remote.head, remote.pull_request, "nothing to send: all files are there already")
    check_ignored(hub, remote, staged, changed, create_pr=create_pr)
    xet, n_bytes = not constants.HF_HUB_DISABLE_XET, sum(files[name]["size"] for name in changed)
    most_seconds = 10 * SLOW * constants.HF_HUB_DOWNLOAD_TIMEOUT + n_bytes / SLOWEST
    retries = Retries()
    while True:
        opens = create_pr and remote.pull_request is None
        # Anew each time: they cannot be reused.
        operations = [CommitOperationAdd(name, staged / name) for name in changed]
        for operation in operations:
            if operation.upload_info.sha256.hex() != files[operation.path_in_repo]["sha256"]:
                raise UploadError(
                    f"{staged / operation.path_in_repo} has changed since it was checked. Nothing was published; "
                    "give the same command again."
                )
        try:
            if xet:
                check_xet_access(hub, remote, opens=opens)
            with limited(most_seconds) if xet else nullcontext():
                commit = hub.api.create_commit(
                    remote.repo_id,
                    [*operations, *(CommitOperationDelete(name) for name in gone)],
                    commit_message=message,
                    revision=None if opens else remote.revision,
                    parent_commit=remote.head,
                    create_pr=opens,
                )
            return Pushed(
                commit.oid, commit.pr_url or remote.pull_request, f"{len(changed)} files sent, {len(gone)} removed"
            )
        except (httpx2.HTTPError, OSError, RuntimeError, *MALFORMED) as error:
            if opens:
                opens = not find_pull_request(hub, remote, message)
            landed = None
            if not opens:
                try:
                    landed = find_landed_commit(hub, remote, staged, changed, gone)
                except (httpx2.HTTPError, OSError, *MALFORMED):  # it may be there: another would be a conflict
                    raise_push_error(hub, remote, error, create_pr=create_pr)
            if landed is not None:
                return Pushed(landed, remote.pull_request, f"{len(changed)} files sent, {len(gone)} removed")
            if opens and is_unanswered_commit(error):  # it may yet be opened, and would be there twice
                raise UploadError(
                    "the Hub's answer was lost, so the pull request may be there. Give the same command again in "
                    f"a minute: it adds to it. {remote.url()}/discussions lists it."
                ) from None
            if not is_worth_retrying(hub, error) or not wait_before_retry(retries, error):
                raise_push_error(hub, remote, error, create_pr=create_pr)


def find_pull_request(hub: Hub, remote: Remote, title: str) -> bool:
    """Whether a pull request was opened although the answer was lost. The push then adds to it."""
    try:
        pull = hub.open_pull_request(remote.repo_id, title)
    except (httpx2.HTTPError, OSError, *MALFORMED):
        return False
    if pull is not None:
        remote.pull_request, remote.revision = shown(pull.url), f"refs/pr/{pull.num}"
    return pull is not None


def is_worth_retrying(hub: Hub, error: Exception) -> bool:
    """Whether it was the commit itself that failed, for a reason that may pass."""
    may_pass = http_status(error) in TRANSIENT or isinstance(error, httpx2.TransportError)
    return may_pass and is_commit_error(error)


def find_landed_commit(hub: Hub, remote: Remote, staged: Path, changed: list[str], gone: list[str]) -> str | None:
    """The commit on top of the one we know, if it is ours: what was to be sent is there, what was to go is not."""
    commits = [commit.commit_id for commit in hub.api.list_repo_commits(remote.repo_id, revision=remote.revision)]
    if remote.head not in commits[1:]:
        return None
    ours = commits[commits.index(remote.head) - 1]  # newest first; somebody may have gone on from it
    there = hub.files(remote.repo_id, ours)
    sent = all(is_same(there.get(name), staged / name) for name in changed)
    return ours if sent and not any(name in there for name in gone) else None


def raise_push_error(hub: Hub, remote: Remote, error: Exception, *, create_pr: bool) -> NoReturn:
    status, same = http_status(error), "Run the same command to continue; files that are there are not sent again."
    if status in (401, 403):
        with answers(f"asking whether {remote.repo_id} may be written"):
            hub.check_may_write(remote.repo_id, create_pr=create_pr)
    if status in (409, 412):
        raise UploadError(
            f"{remote.repo_id} was changed by somebody else meanwhile, so nothing was published. Look at what "
            f"changed ({remote.url()}/commits/{remote.revision}), then give the same command again."
        ) from None
    if status in (400, 401, 403):
        raise UploadError(f"the Hub refused the commit to {remote.repo_id}: {error_reason(error)}") from None
    if isinstance(error, ValueError) and "Invalid metadata in README.md" in str(error):
        raise UsageError(f"the Hub does not take the card: {error_reason(error)}. Correct model_card.j2.") from None
    reason = error_reason(error)
    if is_unanswered_commit(error):
        raise UploadError(
            f"the commit to {remote.repo_id} was not answered: {reason}. It may have been made: run the same "
            "command to find out and to continue."
        ) from None
    if "xet" in reason.lower():
        same += " If this Hub knows no Xet, set HF_HUB_DISABLE_XET=1."
    raise UploadError(f"nothing was published to {remote.repo_id}: {reason}. {same}") from None


def check_xet_access(hub: Hub, remote: Remote, *, opens: bool) -> None:
    """Ask for the token of Xet's storage, as hf_xet will.

    hf_xet waits over nine minutes for a silent server here, and of a refusal it keeps the status without the words.
    """
    revision = MAIN if opens else remote.revision
    address = f"{constants.ENDPOINT}/api/models/{remote.repo_id}/xet-write-token/{quote(revision, safe='')}"
    asked = get_session().get(address, headers=hub.headers, params={"create_pr": "1"} if opens else None)
    if asked.status_code in (401, 403):  # all else hf_xet reports, such as a Hub without Xet
        hf_raise_for_status(asked)
