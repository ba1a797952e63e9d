"""A staged folder → one commit on the Hub, or nothing. Also what must be known of the repository before.

`client.Client` repeats all other calls. A commit is repeated here: when its answer is lost, the Hub is first asked
whether it was made. It is refused when somebody else has committed meanwhile.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn
from urllib.parse import quote

import httpx2
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, Discussion, HfApi, ModelInfo, constants
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import (
    build_hf_headers,
    disable_progress_bars,
    get_session,
    hf_raise_for_status,
)

from gpt2small_hf.errors import CommandError, UsageError
from gpt2small_hf.publishing.arguments import ADDRESS, AuthError, token_in_use
from gpt2small_hf.publishing.card import is_marked, is_unedited, only_metadata
from gpt2small_hf.publishing.checks import git_blob
from gpt2small_hf.publishing.client import (
    SLOW,
    SLOWEST,
    TRANSIENT,
    Retries,
    call_name,
    connect,
    is_commit,
    limited,
    shown,
    silence,
    status_reason,
)
from gpt2small_hf.publishing.license import APACHE, License
from gpt2small_hf.publishing.stage import Files, is_license_file, is_loaded, is_model_file, is_pushed_file, is_weights
from gpt2small_hf.runs.files import sha256

MAIN = "main"
LOADED = ["*.json", "*.py", "*.safetensors", "*.jinja", "*.txt", "*.model"]
"""Of a repository: what transformers may load, whoever put it there."""
MALFORMED = (ValueError, KeyError, TypeError, AttributeError)
"""What reading an answer raises that is JSON of another form than the Hub's, or not JSON."""
OUR_TYPES = {"gpt2small", "gpt2", "gpjtgpt2"}
"""Model types that a push publishes, or published under another name."""


class UploadError(CommandError):
    """The push failed. Running the same command again continues it."""

    status = 4


class VerifyError(CommandError):
    """What is on the Hub is not what was staged, or a stranger cannot use it. Nothing was tagged or made public."""

    status = 5


@dataclass
class Remote:
    """A repository as it was found."""

    repo_id: str
    revision: str
    exists: bool
    private: bool | None = None
    head: str | None = None
    """Commit of the branch to push to; of main, where that branch is still to be made."""
    branch_exists: bool = False
    pull_request: str | None = None
    """Address of our open pull request, if the push adds to it; `revision` is then its reference."""
    files: dict[str, RepoFile] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    other_model: str | None = None
    """A description of the model on the branch, if no push made it."""

    @property
    def is_overwritten(self) -> bool:
        """Whether a commit would take the place of the branch's head. A new branch has the head of another one."""
        others = [head for name, head in self.branches.items() if name != self.revision]
        return self.branch_exists and (self.revision == MAIN or self.head not in others)

    @property
    def former_tag(self) -> str:
        """Name of the tag that keeps the branch's state before `--replace`."""
        return former_tag(self.head or "")

    @property
    def replaced(self) -> dict[str, str]:
        """The tags that `--replace` has set so far → their commits. A user's own may be named likewise."""
        return {tag: commit for tag, commit in self.tags.items() if tag == former_tag(commit)}

    def url(self) -> str:
        """For people."""
        return f"{shown(constants.ENDPOINT)}/{self.repo_id}"


def former_tag(commit: str) -> str:
    """Return the tag that keeps a commit which `--replace` replaces."""
    return f"before-{commit[:8]}"


class Hub:
    """One account on the Hub, and what a push does there."""

    def __init__(self) -> None:
        """Find the token and ask the Hub whose it is.

        Raises: as `token_in_use`; AuthError for a token that the Hub does not know, UploadError if the Hub cannot be
            reached.
        """
        if not sys.stderr.isatty():
            disable_progress_bars()
        connect()
        self.token = token_in_use()
        self.api = HfApi(token=self.token, library_name="gpt2small_hf")
        self._headers = build_hf_headers(token=self.token, library_name="gpt2small_hf")
        self._contents: dict[tuple[str, str | None, str], bytes] = {}
        with answers("asking whose the token is"):
            try:
                account = self.api.whoami()
            except HfHubHTTPError as error:
                if _status(error) == 401:
                    raise AuthError(
                        f"{shown(constants.ENDPOINT)} does not know the token in use. Make one with write access at "
                        f"{shown(constants.ENDPOINT)}/settings/tokens and log in again: hf auth login"
                    ) from None
                raise
            self.user: str = account["name"]
            self.organisations = [found["name"] for found in account.get("orgs", [])]
            self.role = account.get("auth", {}).get("accessToken", {}).get("role")

    # ---- before the push -------------------------------------------------------------------------------------------

    def look(self, repo_id: str, revision: str = MAIN, *, proposal: str | None = None, writes: bool = True) -> Remote:
        """What is in a repository, if it exists, and whether it may be written.

        Args:
            repo_id: The repository.
            revision: Branch to push to.
            proposal: Title of a pull request to open. An open one of this user with this title is used again.
            writes: Check for write access, which a pull request does not need.

        Raises: AuthError if it may not be written.
        """
        with answers(f"looking at {repo_id}"):
            try:
                info = self.api.model_info(repo_id)
            except RepositoryNotFoundError:
                self._check_may_create(repo_id)
                return Remote(repo_id, revision, exists=False)
            if writes:
                self._check_may_write(repo_id)
            refs = self.api.list_repo_refs(repo_id)
            branches = {ref.name: ref.target_commit for ref in refs.branches}
            head = branches.get(revision) or branches.get(MAIN) or info.sha
            is_there, pull = revision in branches, self._open_pull_request(repo_id, proposal)
            if pull is not None:
                revision, is_there = f"refs/pr/{pull.num}", True
                head = self.api.repo_info(repo_id, revision=revision).sha
            return Remote(
                repo_id,
                revision,
                exists=True,
                private=info.private,
                head=head,
                branch_exists=is_there,
                pull_request=None if pull is None else shown(pull.url),
                files=self._files(repo_id, head, info),
                branches=branches,
                tags={ref.name: ref.target_commit for ref in refs.tags},
            )

    def _files(self, repo_id: str, commit: str | None, info: ModelInfo | None = None) -> dict[str, RepoFile]:
        """Files of a commit. Raises: ValueError if there are none, while `info` of the same commit has some."""
        tree = self.api.list_repo_tree(repo_id, recursive=True, revision=commit)
        files = {file.path: file for file in tree if isinstance(file, RepoFile)}
        if not files and info is not None and info.sha == commit and info.siblings:
            raise ValueError(f"{len(info.siblings)} files in the repository, and none in its tree")
        return files

    def _open_pull_request(self, repo_id: str, title: str | None) -> Discussion | None:
        """The newest open pull request of this user with this title."""
        if title is None:
            return None
        found = self.api.get_repo_discussions(repo_id, author=self.user, discussion_type="pull_request")
        ours = [
            pull
            for pull in found
            if (pull.title, pull.author) == (title.strip(), self.user)
            and pull.is_pull_request
            and pull.status in ("open", "draft")
        ]
        return max(ours, key=lambda pull: pull.num, default=None)

    def _check_may_create(self, repo_id: str) -> None:
        owner = repo_id.split("/")[0]
        if self.role == "read":
            self._refuse_to_write(repo_id)
        if self.role == "write" and owner.lower() not in {name.lower() for name in (self.user, *self.organisations)}:
            own = ", ".join(f"{name}/…" for name in (self.user, *self.organisations))
            raise AuthError(f"{repo_id} is not there, and {self.user} cannot make it. Name one of your own: {own}")

    def _check_may_write(self, repo_id: str, *, create_pr: bool = False) -> None:
        if create_pr:  # everybody may, with a token that writes
            if self.role == "read":
                self._refuse_to_write(repo_id)
            return
        try:
            self.api.auth_check(repo_id, write=True)
        except HfHubHTTPError as error:
            if _status(error) in (401, 403, 404):
                self._refuse_to_write(repo_id)
            raise

    @contextmanager
    def _writing(self, what: str, repo_id: str, *, create_pr: bool = False) -> Iterator[None]:
        """As `answers`, for a call that changes a repository. A 403 may be about storage or a plan: the Hub says."""
        with answers(what):
            try:
                yield
            except HfHubHTTPError as error:
                if _status(error) not in (401, 403):
                    raise
                self._check_may_write(repo_id, create_pr=create_pr)
                raise UploadError(f"{what}: the Hub refused it: {_reason(error)}") from None

    def _refuse_to_write(self, repo_id: str) -> NoReturn:
        raise AuthError(
            f"the token in use ({self.user}'s) may read {repo_id} and not write it. Make one with write access at "
            f"{shown(constants.ENDPOINT)}/settings/tokens and log in again: hf auth login"
        )

    def other_model(self, remote: Remote, published: list[Files]) -> str | None:
        """Describe the model on a branch that no push made. None for a branch without one, or if a push made it.

        A push is known by the mark in its card, edited or not, or by weights that are in one of `published`.
        """
        parts = sorted(name for name in remote.files if is_model_file(name))
        if not parts:
            return None
        if "adapter_config.json" in parts:  # beside a model, transformers would load it on top
            is_ours_alone = "config.json" not in parts and self._was_pushed(remote, published)
            return None if is_ours_alone else "an adapter"
        if "config.json" in parts:
            kind = self._json(remote, "config.json").get("model_type")
            if str(kind) in OUR_TYPES and self._was_pushed(remote, published):
                return None
            return f"a model of type {kind}" if kind else "a config.json that names no model type"
        weights = [name for name in parts if is_weights(name)]
        return f"weights ({weights[0]})" if weights else f"files of a model ({parts[0]})"

    def _was_pushed(self, remote: Remote, published: list[Files]) -> bool:
        """Whether a push made what is on a branch."""
        if is_marked(self._card(remote)):
            return True
        weights = {name: file.lfs.sha256 for name, file in remote.files.items() if is_weights(name) and file.lfs}
        known = [{name: file["sha256"] for name, file in files.items() if is_weights(name)} for files in published]
        return bool(weights) and weights in known

    def check_replace(self, remote: Remote, *, replace: bool) -> None:
        """Raise: UsageError if a commit would replace a model that no push made, unless that was asked for."""
        if remote.other_model and remote.is_overwritten and not replace:
            raise UsageError(
                f"{remote.repo_id} has {remote.other_model} that was not published by this command. Use another "
                f"repository, or --create_pr; --replace replaces it, and keeps its state as tag {remote.former_tag}."
            )

    def tag_former(self, remote: Remote) -> bool:
        """Tag the state of a branch before another model replaces it. Returns: whether there was one to tag."""
        if not remote.other_model or not remote.is_overwritten:
            return False
        assert remote.head is not None
        if remote.tags.get(remote.former_tag) != remote.head:
            self._set_tag(remote.repo_id, remote.former_tag, remote.head)
            remote.tags[remote.former_tag] = remote.head
        return True

    def _json(self, remote: Remote, name: str) -> dict[str, Any]:
        try:
            found = json.loads(self._read(remote, name))
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def _read(self, remote: Remote, name: str) -> bytes:
        key = (remote.repo_id, remote.head, name)
        if key not in self._contents:
            # A cache of its own: the user's should not keep these files.
            with answers(f"reading {name} of {remote.repo_id}"), _quiet(), tempfile.TemporaryDirectory() as cache:
                path = self.api.hf_hub_download(remote.repo_id, name, revision=remote.head, cache_dir=cache)
                self._contents[key] = Path(path).read_bytes()
        return self._contents[key]

    def _card(self, remote: Remote) -> str:
        """README.md of a repository, empty if there is none."""
        if "README.md" not in remote.files:
            return ""
        return self._read(remote, "README.md").decode(errors="replace")

    def check_card(self, remote: Remote, staged: Path, license: License | None, *, replace: bool) -> None:
        """Raise: UsageError if README.md or LICENSE on the Hub was written or edited by hand, and would be lost."""
        if replace:
            return
        there, ours = remote.files.get("LICENSE"), staged / "LICENSE"
        if there and ours.is_file() and not is_same(there, ours):
            text = self._read(remote, "LICENSE").decode(errors="replace")
            if _terms(text) != _terms(ours.read_text(encoding="utf-8")):
                raise UsageError(
                    f"{remote.repo_id} has a LICENSE of its own. Name that one with --license, or add "
                    "--replace_card to write over it."
                )
        there, text = remote.files.get("README.md"), self._card(remote)
        if there is None or is_same(there, staged / "README.md") or is_unedited(text):
            return
        metadata = only_metadata(text)  # all that a repository made on the website has
        if metadata is None:
            raise UsageError(
                f"README.md of {remote.repo_id} was edited on the Hub, or not made by a push. Carry its words over "
                "into model_card.j2 and add --replace_card to write over it, or --create_pr to propose this one."
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
                    f"README.md of {remote.repo_id} states the {key} {metadata[key]}. Add {flag} to "
                    "keep it, or --replace_card to write over it."
                )

    def check_tag(self, remote: Remote, tag: str | None, staged: Path) -> None:
        """Raise: UsageError if a tag has the name of a branch, or marks another model already.

        `revision=` is ambiguous where a branch and a tag have the same name.
        """
        if tag in remote.branches:
            raise UsageError(f"tag {tag}: {remote.repo_id} has a branch of this name. Use another: --tag NAME")
        if remote.revision in remote.tags:
            raise UsageError(
                f"branch {remote.revision}: {remote.repo_id} has a tag of this name. Delete the tag on the Hub, or use "
                "another repository."
            )
        commit = remote.tags.get(tag or "")
        if commit is None:
            return
        with answers(f"looking at tag {tag} of {remote.repo_id}"):
            there = self._files(remote.repo_id, commit)
        ours = [path.relative_to(staged).as_posix() for path in staged.rglob("*") if path.is_file()]
        loaded = [name for name in ours if is_loaded(name)]
        if not all(is_same(there.get(name), staged / name) for name in loaded):
            raise UsageError(f"tag {tag} of {remote.repo_id} marks another model. Name another: --tag NAME")

    def check_same_weights(self, remote: Remote, staged: Path) -> None:
        """Raise: UsageError if the Hub does not have a staged folder's weights, settings and tokenizer."""
        if not remote.exists:
            raise UsageError(f"{remote.repo_id} is not on the Hub yet: --code_only updates what is. Leave it out.")
        kept = [path for path in sorted(staged.iterdir()) if is_loaded(path.name) and path.suffix != ".py"]
        for path in kept:
            if not is_same(remote.files.get(path.name), path):
                raise UsageError(
                    f"{path.name} of {remote.repo_id} is not the one of this run, and --code_only leaves it as it is. "
                    "Name the run that was published there, or leave --code_only out."
                )

    def check_ignored(self, remote: Remote, staged: Path, names: list[str], *, create_pr: bool = False) -> None:
        """Raise: UsageError if a `.gitignore` in the repository excludes a file to be sent.

        The client omits such a file from the commit without an error, which publishes the others alone.
        """
        if not names:
            return
        files = []
        for name in names:
            with (staged / name).open("rb") as file:
                sample = base64.b64encode(file.read(512)).decode("ascii")
            files.append({"path": name, "size": (staged / name).stat().st_size, "sample": sample})
        revision = quote(remote.revision if remote.branch_exists else MAIN, safe="")
        with self._writing(f"asking which files {remote.repo_id} takes", remote.repo_id, create_pr=create_pr):
            response = get_session().post(
                f"{constants.ENDPOINT}/api/models/{remote.repo_id}/preupload/{revision}",
                json={"files": files},
                headers=self._headers,
                params={"create_pr": "1"} if create_pr and remote.pull_request is None else None,
            )
            hf_raise_for_status(response)
            ignored = sorted(file["path"] for file in response.json()["files"] if file.get("shouldIgnore"))
        if not ignored:
            return
        named = ignored[0] + (f" and {len(ignored) - 1} more files" if len(ignored) > 1 else "")
        paths = [path for path in remote.files if PurePosixPath(path).name == ".gitignore"]
        where, line = "a .gitignore rule", ""
        if rule := ignoring_rule({path: self._read(remote, path) for path in paths}, ignored[0]):
            where, line = rule[0], f" (line {rule[1]}: `{rule[2]}`)"
        raise UsageError(
            f"{where} of {remote.repo_id} excludes {named}{line}, so the commit would be incomplete. Remove the rule "
            "on the Hub, or name another repository."
        )

    # ---- the push ---------------------------------------------------------------------------------------------------

    def prepare(self, remote: Remote) -> None:
        """Make repository and branch where they do not exist: a repository private, a branch as main is."""
        if not remote.exists:
            with answers(f"making {remote.repo_id}"):
                self.api.create_repo(remote.repo_id, private=True, exist_ok=True)
                try:
                    info = self.api.model_info(remote.repo_id)
                except RepositoryNotFoundError:
                    raise UsageError(f"{remote.repo_id} exists and is no model repository. Name another one.") from None
                remote.head, remote.private = info.sha, info.private
                remote.files = self._files(remote.repo_id, info.sha, info)
                remote.exists, remote.branch_exists = True, remote.revision == MAIN
        if not remote.branch_exists:
            with self._writing(f"making branch {remote.revision} of {remote.repo_id}", remote.repo_id):
                self.api.create_branch(remote.repo_id, branch=remote.revision, revision=remote.head, exist_ok=True)
                remote.branch_exists = True

    def changes(self, remote: Remote, staged: Path, files: Files, names: list[str] | None = None) -> Changes:
        """What a push would send and remove. `names` are the files to send, if not all; then none is removed."""
        wanted = sorted(files if names is None else names)
        changed = [name for name in wanted if not is_same(remote.files.get(name), staged / name)]
        gone: list[str] = []
        if names is None and remote.files:
            named = self._json(remote, "config.json").get("auto_map") if "config.json" in remote.files else None
            classes = named.values() if isinstance(named, dict) else []
            code = {str(value).split("--")[-1].split(".")[0] for value in classes}
            gone = [
                name
                for name in remote.files
                if name not in files
                and (
                    is_pushed_file(name, code)
                    or (remote.other_model and (is_model_file(name) or is_license_file(name)))
                )
            ]
            if "LICENSE" not in {*files, *gone} and is_same(remote.files.get("LICENSE"), APACHE):
                gone.append("LICENSE")  # of an earlier push, which named it that of the weights
        replaced = [name for name in changed if name in remote.files and is_loaded(name)]
        kept = sorted(remote.files.keys() - {*files, *gone, ".gitattributes"}) if remote.other_model else []
        return Changes(changed, gone, replaced, kept)

    def push(
        self,
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
        found = self.changes(remote, staged, files, names)
        changed, gone = found.sent, found.gone
        assert remote.head is not None
        if not changed and not gone:
            return Pushed(remote.head, remote.pull_request, "nothing to send: all files are there already")
        self.check_ignored(remote, staged, changed, create_pr=create_pr)
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
                    self._check_xet(remote, opens=opens)
                with limited(most_seconds) if xet else nullcontext():
                    commit = self.api.create_commit(
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
                    opens = not self._find_opened(remote, message)
                landed = None
                if not opens:
                    try:
                        landed = self._landed(remote, staged, changed, gone)
                    except (httpx2.HTTPError, OSError, *MALFORMED):  # it may be there: another would be a conflict
                        self._refuse_push(remote, error, create_pr=create_pr)
                if landed is not None:
                    return Pushed(landed, remote.pull_request, f"{len(changed)} files sent, {len(gone)} removed")
                if opens and _is_unanswered(error):  # it may yet be opened, and would be there twice
                    raise UploadError(
                        "the Hub's answer was lost, so the pull request may be there. Give the same command again in "
                        f"a minute: it adds to it. {remote.url()}/discussions lists it."
                    ) from None
                if not self._worth_another(error) or not _wait(retries, error):
                    self._refuse_push(remote, error, create_pr=create_pr)

    def _find_opened(self, remote: Remote, title: str) -> bool:
        """Whether a pull request was opened although the answer was lost. The push then adds to it."""
        try:
            pull = self._open_pull_request(remote.repo_id, title)
        except (httpx2.HTTPError, OSError, *MALFORMED):
            return False
        if pull is not None:
            remote.pull_request, remote.revision = shown(pull.url), f"refs/pr/{pull.num}"
        return pull is not None

    def _worth_another(self, error: Exception) -> bool:
        """Whether it was the commit itself that failed, for a reason that may pass."""
        may_pass = _status(error) in TRANSIENT or isinstance(error, httpx2.TransportError)
        return may_pass and _is_of_commit(error)

    def _landed(self, remote: Remote, staged: Path, changed: list[str], gone: list[str]) -> str | None:
        """The commit on top of the one we know, if it is ours: what was to be sent is there, what was to go is not."""
        commits = [commit.commit_id for commit in self.api.list_repo_commits(remote.repo_id, revision=remote.revision)]
        if remote.head not in commits[1:]:
            return None
        ours = commits[commits.index(remote.head) - 1]  # newest first; somebody may have gone on from it
        there = self._files(remote.repo_id, ours)
        sent = all(is_same(there.get(name), staged / name) for name in changed)
        return ours if sent and not any(name in there for name in gone) else None

    def _refuse_push(self, remote: Remote, error: Exception, *, create_pr: bool) -> NoReturn:
        status, same = _status(error), "Run the same command to continue; files that are there are not sent again."
        if status in (401, 403):
            with answers(f"asking whether {remote.repo_id} may be written"):
                self._check_may_write(remote.repo_id, create_pr=create_pr)
        if status in (409, 412):
            raise UploadError(
                f"{remote.repo_id} was changed by somebody else meanwhile, so nothing was published. Look at what "
                f"changed ({remote.url()}/commits/{remote.revision}), then give the same command again."
            ) from None
        if status in (400, 401, 403):
            raise UploadError(f"the Hub refused the commit to {remote.repo_id}: {_reason(error)}") from None
        if isinstance(error, ValueError) and "Invalid metadata in README.md" in str(error):
            raise UsageError(f"the Hub does not take the card: {_reason(error)}. Correct model_card.j2.") from None
        reason = _reason(error)
        if _is_unanswered(error):
            raise UploadError(
                f"the commit to {remote.repo_id} was not answered: {reason}. It may have been made: run the same "
                "command to find out and to continue."
            ) from None
        if "xet" in reason.lower():
            same += " If this Hub knows no Xet, set HF_HUB_DISABLE_XET=1."
        raise UploadError(f"nothing was published to {remote.repo_id}: {reason}. {same}") from None

    def _check_xet(self, remote: Remote, *, opens: bool) -> None:
        """Ask for the token of Xet's storage, as hf_xet will.

        hf_xet waits over nine minutes for a silent server here, and of a refusal it keeps the status without the words.
        """
        revision = MAIN if opens else remote.revision
        address = f"{constants.ENDPOINT}/api/models/{remote.repo_id}/xet-write-token/{quote(revision, safe='')}"
        asked = get_session().get(address, headers=self._headers, params={"create_pr": "1"} if opens else None)
        if asked.status_code in (401, 403):  # all else hf_xet reports, such as a Hub without Xet
            hf_raise_for_status(asked)

    # ---- after the push ---------------------------------------------------------------------------------------------

    def verify(self, remote: Remote, staged: Path, commit: str) -> int:
        """Compare the checksums of all files of a commit with a staged folder. Returns: how many.

        Raises: VerifyError that names the first file which differs.
        """
        with answers(f"comparing checksums with {remote.repo_id}"):
            found = self.api.verify_repo_checksums(remote.repo_id, revision=commit, local_dir=staged)
        if found.mismatches:
            raise VerifyError(
                f"{found.mismatches[0]['path']} of {remote.repo_id} at {commit[:12]} is not what was staged. "
                "Nothing was tagged; give the same command again."
            )
        local = {path.relative_to(staged).as_posix() for path in staged.rglob("*") if path.is_file()}
        if lacking := sorted(local & {*found.extra_paths}):
            raise VerifyError(f"{lacking[0]} is not in {remote.repo_id} at {commit[:12]}. Give the same command again.")
        return found.checked_count

    def download(self, repo_id: str, commit: str, cache: Path) -> Path:
        """Download what transformers may load of a commit into a new Hub cache. Returns: its folder there."""
        with answers(f"downloading {repo_id} at {commit[:12]}"):
            return Path(
                self.api.snapshot_download(
                    repo_id, revision=commit, cache_dir=cache, allow_patterns=LOADED, ignore_patterns="*/*.safetensors"
                )
            )

    def tag(self, remote: Remote, tag: str, commit: str, message: str) -> bool:
        """Mark a commit. A tag that is there stays: `check_tag` has seen that it marks the same model.

        Returns: whether it was made.
        """
        if tag in remote.tags:
            return False
        self._set_tag(remote.repo_id, tag, commit, message)
        return True

    def _set_tag(self, repo_id: str, tag: str, commit: str, message: str | None = None) -> None:
        with self._writing(f"tagging {repo_id}", repo_id):
            try:
                self.api.create_tag(repo_id, tag=tag, revision=commit, tag_message=message)
            except HfHubHTTPError as error:
                if _status(error) != 409:
                    raise
                # It is this one if the answer to a first attempt was lost.
                tags = {ref.name: ref.target_commit for ref in self.api.list_repo_refs(repo_id).tags}
                if tags.get(tag) != commit:
                    raise UploadError(
                        f"tag {tag} of {repo_id} was set meanwhile, to commit {tags.get(tag)}. Use another: --tag NAME"
                    ) from None

    def make_public(self, repo_id: str, public: bool) -> None:
        """Show a repository to everybody, or hide it."""
        with self._writing(f"changing who sees {repo_id}", repo_id):
            self.api.update_repo_settings(repo_id, private=not public)

    def check_collection(self, slug: str) -> None:
        """Raise: UsageError if a collection is not there."""
        with answers(f"looking at collection {slug}"):
            try:
                self.api.get_collection(slug)
            except HfHubHTTPError as error:
                if _status(error) in (400, 404):
                    raise UsageError(
                        f"the collection {slug} is not there. Its slug is the end of its address: user/title-0123456789"
                    ) from None
                raise

    def collect(self, slug: str, repo_id: str) -> None:
        """Add a repository to a collection, once."""
        with answers(f"adding {repo_id} to collection {slug}"):
            self.api.add_collection_item(slug, repo_id, "model", exists_ok=True)


def is_public(repo_id: str, kind: str = "model") -> bool:
    """Return whether everybody may see a repository: the Hub is asked without a token."""
    connect()
    with answers(f"looking whether {repo_id} is public"):
        try:
            return not HfApi(token=False).repo_info(repo_id, repo_type=kind).private
        except RepositoryNotFoundError:
            return False


def is_visible(repo_id: str) -> bool:
    """Return whether there is a model of that name which the token in use may see."""
    connect()
    with answers(f"looking for {repo_id}"):
        try:
            HfApi().model_info(repo_id)
        except RepositoryNotFoundError:
            return False
    return True


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


def is_same(there: RepoFile | None, here: Path) -> bool:
    """Whether a file on the Hub has the bytes of one here, by its hash."""
    if there is None or not here.is_file() or there.size != here.stat().st_size:
        return False
    if there.lfs is not None:
        return there.lfs.sha256 == sha256(here)
    return there.blob_id == git_blob(here.read_bytes())


def _terms(license: str) -> list[str]:
    """The words of a license, without addresses and what follows its terms, such as Apache's appendix."""
    return re.sub(r"https?://\S+", "", license).lower().split("end of terms and conditions")[0].split()


def ignoring_rule(rules: dict[str, bytes], name: str) -> tuple[str, str, str] | None:
    """Find the rule by which git ignores a file: path of the `.gitignore`, line and pattern.

    `rules` has each `.gitignore` of the repository, by its path. None without git, or if git does not ignore the file.
    """
    with tempfile.TemporaryDirectory(prefix="gitignore-") as place:
        for path, content in rules.items():
            Path(place, path).parent.mkdir(parents=True, exist_ok=True)
            Path(place, path).write_bytes(content)
        settings = {variable: value for variable, value in os.environ.items() if not variable.startswith("GIT_")}
        git = ["git", "-C", place, "-c", f"core.excludesFile={os.devnull}"]
        try:
            for words in ("init", "--quiet"), ("check-ignore", "--verbose", "--no-index", "-z", "--stdin"):
                done = subprocess.run(
                    [*git, *words], input=name.encode(), capture_output=True, check=True, env=settings
                )
        except (OSError, subprocess.CalledProcessError):
            return None
    path, line, pattern, _ = done.stdout.decode(errors="replace").split("\0", 3)
    return None if pattern.startswith("!") else (path, line, pattern)


@contextmanager
def answers(what: str) -> Iterator[None]:
    """Turn what the Hub answers while we are at `what` into one line. Raises: AuthError, UploadError, UsageError."""
    try:
        yield
    except OfflineModeIsEnabled:
        raise UsageError("HF_HUB_OFFLINE is set, so nothing can be pushed. Unset it, or add --dry_run.") from None
    except RevisionNotFoundError as error:
        raise UploadError(f"{what}: {_reason(error)}. Somebody has changed it; give the same command again.") from None
    except HfHubHTTPError as error:
        status = _status(error)
        if status == 403 and error.server_message:
            raise AuthError(f"{what}: the Hub refused it: {_reason(error)}") from None
        if status in (401, 403, 404):
            raise AuthError(
                f"{what}: the Hub does not allow it ({_reason(error)}). Check the name, and that the token has write "
                f"access: {shown(constants.ENDPOINT)}/settings/tokens"
            ) from None
        raise UploadError(f"{what}: {_reason(error)}") from None
    except httpx2.InvalidURL:  # whose message may quote a password
        raise UsageError(f"{what}: {shown(constants.ENDPOINT)} is not an address. Check HF_ENDPOINT.") from None
    except (httpx2.HTTPError, OSError, *MALFORMED) as error:
        raise UploadError(f"{what}: {_reason(error)}. Run the same command to continue.") from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Without a progress bar for a file of some kilobytes."""
    shown = sys.stderr.isatty()
    disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            from huggingface_hub.utils import enable_progress_bars

            enable_progress_bars()


def _status(error: Exception) -> int | None:
    response = getattr(error, "response", None)
    return None if response is None else response.status_code


def _request(error: Exception) -> httpx2.Request | None:
    return getattr(error, "_request", None) or getattr(getattr(error, "response", None), "request", None)


def _is_of_commit(error: Exception) -> bool:
    request = _request(error)
    return request is not None and is_commit(request)


def _is_unanswered(error: Exception) -> bool:
    """Whether a commit was asked for, and nobody knows what came of it."""
    lost = isinstance(error, httpx2.TransportError) and not isinstance(error, httpx2.ConnectError)
    return lost and _is_of_commit(error)


def _wait(retries: Retries, error: Exception) -> bool:
    """Wait before another attempt at what failed. Returns: False if there is none left."""
    request, response = _request(error), getattr(error, "response", None)
    assert request is not None
    return retries.wait(call_name(request), _reason(error), {} if response is None else response.headers)


def _reason(error: BaseException) -> str:
    """Why, on one line, without what might be secret: addresses to upload to carry signatures."""
    cause, response = error.__cause__, getattr(error, "response", None)
    if isinstance(error, LocalEntryNotFoundError) and cause is not None:  # the client's word for any download
        return _reason(cause)
    if isinstance(error, RuntimeError) and isinstance(cause, Exception):  # the client's word for any upload
        return f"{str(error).rstrip('. ')} ({_reason(cause)})"
    message = getattr(error, "server_message", None) or str(error)
    if response is not None and response.status_code in TRANSIENT:
        message = status_reason(response)
    elif response is not None and response.status_code == 403 and not getattr(error, "server_message", None):
        message = "the Hub answered 403"
    elif isinstance(error, (httpx2.TimeoutException, httpx2.NetworkError, httpx2.RemoteProtocolError)):
        message = silence(error)
    elif type(error) is ConnectionError:  # hf_xet's
        message = f"storage (Xet): {message}"
    elif isinstance(error, (json.JSONDecodeError, *MALFORMED[1:])):
        message = f"{shown(constants.ENDPOINT)} did not answer as the Hub does ({type(error).__name__}: {message})"
    line = re.sub(r"https?://\S+", lambda match: shown(match[0]), " ".join(message.split()))
    return line[:300].rstrip(". ")
