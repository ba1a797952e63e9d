"""A staged folder → one commit on the Hub, or nothing.

A commit is retried here and not by `client.Client`: if the response is lost, the Hub is first asked whether the commit
was made. A commit that somebody else made meanwhile is an error.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn
from urllib.parse import quote

import httpx2
from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, constants
from huggingface_hub.utils import get_session, hf_raise_for_status

from gpt2small_hf.errors import UsageError
from gpt2small_hf.publishing.checks import module_names
from gpt2small_hf.publishing.client import (
    MALFORMED,
    MIN_UPLOAD_RATE,
    SLOW_FACTOR,
    TRANSIENT,
    Retries,
    UploadError,
    command_errors,
    error_reason,
    http_status,
    is_commit_error,
    is_unanswered_commit,
    public_url,
    time_limit,
    wait_before_retry,
)
from gpt2small_hf.publishing.hub import MAIN, Hub, RepositoryState, is_same
from gpt2small_hf.publishing.license import APACHE
from gpt2small_hf.publishing.stage import Files, is_license_file, is_loaded, is_model_file, is_pushed_file


@dataclass(frozen=True)
class Changes:
    """What a push does to a branch: the names of files."""

    sent: list[str]
    removed: list[str]
    replaced: list[str]
    """Those of `sent` that transformers loads and that exist with other contents."""
    kept: list[str]
    """In the repository of another model, those that are neither replaced nor removed."""

    def describe(self) -> list[str]:
        """Describe what happens to existing files, a line for each kind of change."""
        kinds = {"replaces": self.replaced, "removes": self.removed, "keeps": self.kept}
        return [f"{kind} {', '.join(names)}" for kind, names in kinds.items() if names]


@dataclass(frozen=True)
class Pushed:
    """The commit of a push."""

    commit: str
    pull_request: str | None
    summary: str


def find_changes(
    hub: Hub, remote: RepositoryState, staged: Path, files: Files, names: list[str] | None = None
) -> Changes:
    """Find the files that a push would send and remove. If `names` of files to send are given, none is removed."""
    wanted = sorted(files if names is None else names)
    changed = [name for name in wanted if not is_same(remote.files.get(name), staged / name)]
    gone: list[str] = []
    if names is None and remote.files:
        named = hub.json(remote, "config.json").get("auto_map") if "config.json" in remote.files else None
        code = module_names(named) if isinstance(named, dict) else set()
        gone = [
            name
            for name in remote.files
            if name not in files
            and (is_pushed_file(name, code) or (remote.other_model and (is_model_file(name) or is_license_file(name))))
        ]
        if "LICENSE" not in {*files, *gone} and is_same(remote.files.get("LICENSE"), APACHE):
            gone.append("LICENSE")  # of an earlier push, which licensed the weights so
    replaced = [name for name in changed if name in remote.files and is_loaded(name)]
    kept = sorted(remote.files.keys() - {*files, *gone, ".gitattributes"}) if remote.other_model else []
    return Changes(changed, gone, replaced, kept)


def commit_folder(
    hub: Hub,
    remote: RepositoryState,
    staged: Path,
    files: Files,
    message: str,
    *,
    names: list[str] | None = None,
    create_pr: bool = False,
) -> Pushed:
    """Send a staged folder as one commit, which also removes files of an earlier push that are no longer staged.

    With `names`, only these files are sent and none is removed.

    Raises: UploadError, AuthError, UsageError. The branch is then unchanged.
    """
    changes = find_changes(hub, remote, staged, files, names)
    assert remote.head is not None
    if not changes.sent and not changes.removed:
        return Pushed(remote.head, remote.pull_request, "nothing to send: the files there are the same")
    summary = f"{len(changes.sent)} files sent, {len(changes.removed)} removed"
    retries = Retries()
    while True:
        opens = create_pr and remote.pull_request is None
        try:
            commit = send_commit(hub, remote, staged, files, changes, message, opens=opens)
            return Pushed(commit.oid, commit.pr_url or remote.pull_request, summary)
        except (httpx2.HTTPError, OSError, RuntimeError, *MALFORMED) as error:
            opens = opens and not find_pull_request(hub, remote, message)
            if not opens:
                try:
                    landed = find_landed_commit(hub, remote, staged, changes)
                except (httpx2.HTTPError, OSError, *MALFORMED):  # it may exist: another would be a conflict
                    raise_push_error(hub, remote, error, create_pr=create_pr)
                if landed is not None:
                    return Pushed(landed, remote.pull_request, summary)
            elif is_unanswered_commit(error):  # it may still be opened, and a second attempt would duplicate it
                raise UploadError(
                    "the Hub's answer was lost, so the pull request may exist. Run the same command again in a "
                    f"minute: it adds to it. {remote.url()}/discussions lists it."
                ) from None
            is_temporary = http_status(error) in TRANSIENT or isinstance(error, httpx2.TransportError)
            if not (is_temporary and is_commit_error(error) and wait_before_retry(retries, error)):
                raise_push_error(hub, remote, error, create_pr=create_pr)


def send_commit(
    hub: Hub, remote: RepositoryState, staged: Path, files: Files, changes: Changes, message: str, *, opens: bool
) -> CommitInfo:
    """Upload files and commit them, with `opens` as a new pull request.

    Raises: UploadError if a staged file differs from `files`; whatever the client raises.
    """
    # New ones for each attempt: they cannot be reused.
    operations = [CommitOperationAdd(name, staged / name) for name in changes.sent]
    for operation in operations:
        if operation.upload_info.sha256.hex() != files[operation.path_in_repo]["sha256"]:
            raise UploadError(
                f"{staged / operation.path_in_repo} has changed since it was checked. Nothing was published."
            )
    xet, n_bytes = not constants.HF_HUB_DISABLE_XET, sum(files[name]["size"] for name in changes.sent)
    if xet:
        check_xet_access(hub, remote, opens=opens)
    max_seconds = 10 * SLOW_FACTOR * constants.HF_HUB_DOWNLOAD_TIMEOUT + n_bytes / MIN_UPLOAD_RATE
    with time_limit(max_seconds) if xet else nullcontext():
        return hub.api.create_commit(
            remote.repo_id,
            [*operations, *(CommitOperationDelete(name) for name in changes.removed)],
            commit_message=message,
            revision=None if opens else remote.revision,
            parent_commit=remote.head,
            create_pr=opens,
        )


def find_pull_request(hub: Hub, remote: RepositoryState, title: str) -> bool:
    """Return whether a pull request was opened although the response was lost. Later attempts then add to it."""
    try:
        pull = hub.open_pull_request(remote.repo_id, title)
    except (httpx2.HTTPError, OSError, *MALFORMED):
        return False
    if pull is not None:
        remote.pull_request, remote.revision = public_url(pull.url), f"refs/pr/{pull.num}"
    return pull is not None


def find_landed_commit(hub: Hub, remote: RepositoryState, staged: Path, changes: Changes) -> str | None:
    """Return the commit after the known head, if it has the files to send and none of those to remove."""
    commits = [commit.commit_id for commit in hub.api.list_repo_commits(remote.repo_id, revision=remote.revision)]
    if remote.head not in commits[1:]:
        return None
    ours = commits[commits.index(remote.head) - 1]  # newest first; others may have committed after it
    there = hub.files(remote.repo_id, ours)
    sent = all(is_same(there.get(name), staged / name) for name in changes.sent)
    return ours if sent and not any(name in there for name in changes.removed) else None


def raise_push_error(hub: Hub, remote: RepositoryState, error: Exception, *, create_pr: bool) -> NoReturn:
    """Raise: UploadError, AuthError or UsageError for a failed commit."""
    status, reason = http_status(error), error_reason(error)
    if status in (401, 403):
        with command_errors(f"asking whether {remote.repo_id} may be written"):
            hub.check_may_write(remote.repo_id, create_pr=create_pr)
    if status in (409, 412):
        raise UploadError(
            f"{remote.repo_id} was changed by somebody else meanwhile, so nothing was published. See what changed "
            f"({remote.url()}/commits/{remote.revision}), then run the same command again."
        ) from None
    if status in (400, 401, 403):
        raise UploadError(f"committing to {remote.repo_id}: the Hub refused it: {reason}") from None
    if isinstance(error, ValueError) and "Invalid metadata in README.md" in str(error):
        raise UsageError(f"the Hub rejects the card: {reason}. Correct model_card.j2.") from None
    if is_unanswered_commit(error):
        raise UploadError(
            f"the commit to {remote.repo_id} was not answered: {reason}. It may have been made: run the same command "
            "to find out and to continue."
        ) from None
    hint = " If this Hub does not support Xet, set HF_HUB_DISABLE_XET=1." if "xet" in reason.lower() else ""
    raise UploadError(
        f"nothing was published to {remote.repo_id}: {reason}. Run the same command to continue; uploaded files are "
        f"not sent again.{hint}"
    ) from None


def check_xet_access(hub: Hub, remote: RepositoryState, *, opens: bool) -> None:
    """Request the token of Xet's storage, as hf_xet will.

    hf_xet waits over nine minutes for a server that does not respond, and of an error it reports the status alone.
    """
    revision = MAIN if opens else remote.revision
    address = f"{constants.ENDPOINT}/api/models/{remote.repo_id}/xet-write-token/{quote(revision, safe='')}"
    asked = get_session().get(address, headers=hub.headers, params={"create_pr": "1"} if opens else None)
    if asked.status_code in (401, 403):  # hf_xet reports the rest, such as a Hub without Xet
        hf_raise_for_status(asked)
