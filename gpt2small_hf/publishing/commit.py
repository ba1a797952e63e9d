"""A staged folder → one commit on the Hub, or nothing: what it changes, what it must not overwrite, and the commit.

A commit is retried here and not by `client.Client`: if the response is lost, the Hub is first asked whether the commit
was made. A commit that somebody else made meanwhile is an error.
"""

from __future__ import annotations

import base64
import re
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NoReturn
from urllib.parse import quote

import httpx2
from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, constants
from huggingface_hub.utils import get_session, hf_raise_for_status

from gpt2small_hf.errors import UsageError
from gpt2small_hf.publishing import client, stage
from gpt2small_hf.publishing.arguments import ADDRESS
from gpt2small_hf.publishing.card import is_marked, is_unedited, only_metadata
from gpt2small_hf.publishing.checks import module_names
from gpt2small_hf.publishing.hub import MAIN, Hub, RepositoryState, is_same
from gpt2small_hf.publishing.license import APACHE, License

OUR_TYPES = {"gpt2small", "gpt2", "gpjtgpt2"}
"""Model types that this command publishes, or published under another name."""


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


def find_changes(
    hub: Hub, remote: RepositoryState, staged: Path, files: stage.Files, names: list[str] | None = None
) -> Changes:
    """Find the files that a push would send and remove. If `names` of files to send are given, none is removed."""
    wanted = sorted(files if names is None else names)
    changed = [name for name in wanted if not is_same(remote.files.get(name), staged / name)]
    gone: list[str] = []
    if names is None and remote.files:
        named = hub.json(remote, "config.json").get("auto_map") if "config.json" in remote.files else None
        code = module_names(named) if isinstance(named, dict) else set()
        of_other = (stage.is_model_file, stage.is_license_file) if remote.other_model else ()
        gone = [
            name
            for name in remote.files
            if name not in files and (stage.is_pushed_file(name, code) or any(is_of(name) for is_of in of_other))
        ]
        if "LICENSE" not in {*files, *gone} and is_same(remote.files.get("LICENSE"), APACHE):
            gone.append("LICENSE")  # of an earlier push, which licensed the weights so
    replaced = [name for name in changed if name in remote.files and stage.is_loaded(name)]
    kept = sorted(remote.files.keys() - {*files, *gone, ".gitattributes"}) if remote.other_model else []
    return Changes(changed, gone, replaced, kept)


# ---- what must not be overwritten -----------------------------------------------------------------------------------


def find_other_model(hub: Hub, remote: RepositoryState, published: list[stage.Files]) -> str | None:
    """Describe a model on a branch that was not pushed by this command. None for a pushed model, or if there is none.

    A pushed model is recognized by the mark in its card, edited or not, or by weights that are in one of `published`.
    """
    parts = sorted(name for name in remote.files if stage.is_model_file(name))
    if not parts:
        return None
    has_config = "config.json" in parts
    kind = hub.json(remote, "config.json").get("model_type") if has_config else None
    has_adapter = "adapter_config.json" in parts  # which transformers would load on top of a model
    may_be_ours = not has_config if has_adapter else str(kind) in OUR_TYPES
    if may_be_ours and is_made_by_push(hub, remote, published):
        return None
    if has_adapter:
        return "an adapter"
    if has_config:
        return f"a model of type {kind}" if kind else "a config.json that names no model type"
    weights = [name for name in parts if stage.is_weights(name)]
    return f"weights ({weights[0]})" if weights else f"files of a model ({parts[0]})"


def is_made_by_push(hub: Hub, remote: RepositoryState, published: list[stage.Files]) -> bool:
    """Return whether the model on a branch was pushed by this command."""
    if is_marked(hub.card(remote)):
        return True
    weights = {name: file.lfs.sha256 for name, file in remote.files.items() if stage.is_weights(name) and file.lfs}
    known = [{name: file["sha256"] for name, file in files.items() if stage.is_weights(name)} for files in published]
    return bool(weights) and weights in known


def check_replace(hub: Hub, remote: RepositoryState, *, replace: bool) -> None:
    """Raise: UsageError if a commit would replace a model that was not pushed by this command, without --replace."""
    if remote.other_model and remote.is_overwritten and not replace:
        raise UsageError(
            f"{remote.repo_id} has {remote.other_model} that was not published by this command. Use another "
            f"repository, or --create_pr; --replace replaces it and keeps its state as tag {remote.backup_tag}."
        )


def check_card(hub: Hub, remote: RepositoryState, staged: Path, license: License | None, *, replace: bool) -> None:
    """Raise: UsageError if a README.md or LICENSE written by hand on the Hub would be overwritten."""
    if replace:
        return
    there, ours = remote.files.get("LICENSE"), staged / "LICENSE"
    if there and ours.is_file() and not is_same(there, ours):
        text = hub.read(remote, "LICENSE").decode(errors="replace")
        if _terms(text) != _terms(ours.read_text(encoding="utf-8")):
            raise UsageError(f"{remote.repo_id} has another LICENSE. Name it with --license, or add --replace_card.")
    there, text = remote.files.get("README.md"), hub.card(remote)
    if there is None or is_same(there, staged / "README.md") or is_unedited(text):
        return
    metadata = only_metadata(text)  # a repository created on the website has nothing else
    if metadata is None:
        raise UsageError(
            f"README.md of {remote.repo_id} was edited on the Hub, or not pushed by this command. Copy its text "
            "into model_card.j2 and add --replace_card to overwrite it, or --create_pr to propose the new card."
        )
    stated = {"license": license.id if license else None}
    if license is not None and license.id == "other":
        stated |= {"license_name": license.name, "license_link": license.metadata_link}
    for key, value in stated.items():
        if metadata.get(key) not in (None, value):
            flag = f"--{key} {metadata[key]}"
            if key == "license_link" and not ADDRESS.fullmatch(str(metadata[key])):
                flag = "--license_file FILE (the license text, in place of --license_link)"
            raise UsageError(
                f"README.md of {remote.repo_id} states the {key} {metadata[key]}. Add {flag} to keep it, or "
                "--replace_card to overwrite it."
            )


def _terms(license: str) -> list[str]:
    """List the words of a license, without addresses and what follows its terms, such as Apache's appendix."""
    return re.sub(r"https?://\S+", "", license).lower().split("end of terms and conditions")[0].split()


def check_tag(hub: Hub, remote: RepositoryState, tag: str | None, staged: Path) -> None:
    """Raise: UsageError if a tag marks another model, or has the name of a branch: `revision=` would be ambiguous."""
    if tag in remote.branches:
        raise UsageError(f"tag {tag}: {remote.repo_id} has a branch of this name. Choose another: --tag NAME")
    if remote.revision in remote.tags:
        raise UsageError(
            f"branch {remote.revision}: {remote.repo_id} has a tag of this name. Delete that tag on the Hub."
        )
    if tag not in remote.tags:
        return
    with client.command_errors(f"reading tag {tag} of {remote.repo_id}"):
        there = hub.files(remote.repo_id, remote.tags[tag])
    if not all(is_same(there.get(name), staged / name) for name in stage.list_files(staged) if stage.is_loaded(name)):
        raise UsageError(f"tag {tag} of {remote.repo_id} marks another model. Choose another: --tag NAME")


def check_same_weights(hub: Hub, remote: RepositoryState, staged: Path) -> None:
    """Raise: UsageError if the Hub does not have a staged folder's weights, settings and tokenizer."""
    if not remote.exists:
        raise UsageError(f"--code_only updates a published model, and {remote.repo_id} does not exist. Leave it out.")
    for path in sorted(staged.iterdir()):
        if stage.is_loaded(path.name) and path.suffix != ".py" and not is_same(remote.files.get(path.name), path):
            raise UsageError(
                f"{path.name} of {remote.repo_id} differs from this run's, and --code_only does not update it. "
                "Name the run that was published there, or leave --code_only out."
            )


def check_ignored(
    hub: Hub, remote: RepositoryState, staged: Path, names: list[str], *, create_pr: bool = False
) -> None:
    """Raise: UsageError if a `.gitignore` in the repository excludes a file to be sent.

    The client omits such a file from the commit without an error, which publishes the others alone.
    """
    files = []
    for name in names:
        with (staged / name).open("rb") as file:
            sample = base64.b64encode(file.read(512)).decode("ascii")
        files.append({"path": name, "size": (staged / name).stat().st_size, "sample": sample})
    revision = quote(remote.revision if remote.branch_exists else MAIN, safe="")
    with hub.writing(f"asking which files {remote.repo_id} accepts", remote.repo_id, create_pr=create_pr):
        response = get_session().post(
            f"{constants.ENDPOINT}/api/models/{remote.repo_id}/preupload/{revision}",
            json={"files": files},
            headers=hub.headers,
            params={"create_pr": "1"} if create_pr and remote.pull_request is None else None,
        )
        hf_raise_for_status(response)
        ignored = sorted(file["path"] for file in response.json()["files"] if file.get("shouldIgnore"))
    if ignored:
        named = ignored[0] + (f" and {len(ignored) - 1} more files" if len(ignored) > 1 else "")
        rules = sorted(path for path in remote.files if PurePosixPath(path).name == ".gitignore")
        raise UsageError(
            f"{' or '.join(rules) or 'a .gitignore'} of {remote.repo_id} excludes {named}, so the commit would be "
            "incomplete. Remove the rule on the Hub, or use another repository."
        )


# ---- the commit -----------------------------------------------------------------------------------------------------


def commit_folder(
    hub: Hub,
    remote: RepositoryState,
    staged: Path,
    files: stage.Files,
    message: str,
    *,
    names: list[str] | None = None,
    create_pr: bool = False,
) -> tuple[str, str]:
    """Send a staged folder as one commit, which also removes files of an earlier push that are no longer staged.

    With `names`, only these files are sent and none is removed.

    Returns: the commit, and a summary for the user. `remote` gets the address of a pull request that was opened.
    Raises: UploadError, AuthError, UsageError. The branch is then unchanged.
    """
    changes = find_changes(hub, remote, staged, files, names)
    assert remote.head is not None
    if not changes.sent and not changes.removed:
        return remote.head, "nothing to send: the files there are the same"
    summary = f"{len(changes.sent)} files sent, {len(changes.removed)} removed"
    retries = client.Retries()
    while True:
        opens = create_pr and remote.pull_request is None
        try:
            commit = send_commit(hub, remote, staged, files, changes, message, opens=opens)
            remote.pull_request = commit.pr_url or remote.pull_request
            return commit.oid, summary
        except (httpx2.HTTPError, OSError, RuntimeError, *client.MALFORMED) as error:
            opens = opens and not find_pull_request(hub, remote, message)
            if not opens:
                try:
                    landed = find_landed_commit(hub, remote, staged, changes)
                except (httpx2.HTTPError, OSError, *client.MALFORMED):  # it may exist: another would be a conflict
                    raise_push_error(hub, remote, error, create_pr=create_pr)
                if landed is not None:
                    return landed, summary
            elif client.is_unanswered_commit(error):  # it may still be opened, and a second attempt would duplicate it
                raise client.UploadError(
                    "the Hub's answer was lost, so the pull request may exist. Run the same command again in a "
                    f"minute: it adds to it. {remote.url()}/discussions lists it."
                ) from None
            is_temporary = client.http_status(error) in client.TRANSIENT or isinstance(error, httpx2.TransportError)
            if not (is_temporary and client.is_commit_error(error) and client.wait_before_retry(retries, error)):
                raise_push_error(hub, remote, error, create_pr=create_pr)


def send_commit(
    hub: Hub, remote: RepositoryState, staged: Path, files: stage.Files, changes: Changes, message: str, *, opens: bool
) -> CommitInfo:
    """Upload files and commit them, with `opens` as a new pull request.

    Raises: UploadError if a staged file differs from `files`; whatever the client raises.
    """
    # New ones for each attempt: they cannot be reused.
    operations = [CommitOperationAdd(name, staged / name) for name in changes.sent]
    for operation in operations:
        if operation.upload_info.sha256.hex() != files[operation.path_in_repo]["sha256"]:
            raise client.UploadError(
                f"{staged / operation.path_in_repo} has changed since it was checked. Nothing was published."
            )
    xet, n_bytes = not constants.HF_HUB_DISABLE_XET, sum(files[name]["size"] for name in changes.sent)
    if xet:
        check_xet_access(hub, remote, opens=opens)
    max_seconds = 10 * client.SLOW_FACTOR * constants.HF_HUB_DOWNLOAD_TIMEOUT + n_bytes / client.MIN_UPLOAD_RATE
    with client.time_limit(max_seconds) if xet else nullcontext():
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
    except (httpx2.HTTPError, OSError, *client.MALFORMED):
        return False
    if pull is not None:
        remote.pull_request, remote.revision = client.public_url(pull.url), f"refs/pr/{pull.num}"
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
    status, reason = client.http_status(error), client.error_reason(error)
    if status in (401, 403):
        with client.command_errors(f"asking whether {remote.repo_id} may be written"):
            hub.check_may_write(remote.repo_id, create_pr=create_pr)
    if status in (409, 412):
        raise client.UploadError(
            f"{remote.repo_id} was changed by somebody else meanwhile, so nothing was published. See what changed "
            f"({remote.url()}/commits/{remote.revision}), then run the same command again."
        ) from None
    if status in (400, 401, 403):
        raise client.UploadError(f"committing to {remote.repo_id}: the Hub refused it: {reason}") from None
    if isinstance(error, ValueError) and "Invalid metadata in README.md" in str(error):
        raise UsageError(f"the Hub rejects the card: {reason}. Correct model_card.j2.") from None
    if client.is_unanswered_commit(error):
        raise client.UploadError(
            f"the commit to {remote.repo_id} was not answered: {reason}. It may have been made: run the same command "
            "to find out and to continue."
        ) from None
    hint = " If this Hub does not support Xet, set HF_HUB_DISABLE_XET=1." if "xet" in reason.lower() else ""
    raise client.UploadError(
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
