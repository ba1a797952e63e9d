"""One account on the Hub: what a repository has, and the calls that change it, but for commits (`commit.py`).

`client.Client` repeats these calls.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import Discussion, HfApi, ModelInfo, constants, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers, disable_progress_bars, get_session, hf_raise_for_status
from huggingface_hub.utils.sha import git_hash

from gpt2small_hf.publishing import client
from gpt2small_hf.publishing.arguments import AuthError, token_in_use
from gpt2small_hf.runs.files import sha256

MAIN = "main"
LOADED = ["*.json", "*.py", "*.safetensors", "*.jinja", "*.txt", "*.model"]
"""Patterns of the files that transformers may load, pushed or not."""


@dataclass
class RepositoryState:
    """A repository as it was found."""

    repo_id: str
    revision: str
    exists: bool
    private: bool | None = None
    head: str | None = None
    """Commit of the branch to push to, or of main if that branch does not exist yet."""
    branch_exists: bool = False
    pull_request: str | None = None
    """Address of the user's open pull request, if the push adds to it; `revision` is then its reference."""
    files: dict[str, RepoFile] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    other_model: str | None = None
    """A description of the model on the branch, if it was not pushed by this command."""

    @property
    def is_overwritten(self) -> bool:
        """Whether a commit would replace the branch's own files. A new branch has the head of another one."""
        others = [head for name, head in self.branches.items() if name != self.revision]
        return self.branch_exists and (self.revision == MAIN or self.head not in others)

    @property
    def backup_tag(self) -> str:
        """Name of the tag that keeps the branch's state before `--replace`."""
        return f"before-{(self.head or '')[:8]}"

    @property
    def replaced(self) -> dict[str, str]:
        """The tags that `--replace` has set so far → their commits."""
        return {tag: commit for tag, commit in self.tags.items() if tag == f"before-{commit[:8]}"}

    def url(self) -> str:
        """Return its address, without a password."""
        return f"{client.public_url(constants.ENDPOINT)}/{self.repo_id}"


def is_same(there: RepoFile | None, here: Path) -> bool:
    """Whether a file on the Hub has the bytes of one here, by its hash."""
    if there is None or not here.is_file() or there.size != here.stat().st_size:
        return False
    if there.lfs is not None:
        return there.lfs.sha256 == sha256(here)
    return there.blob_id == git_hash(here.read_bytes())


def new_token_advice() -> str:
    page = f"{client.public_url(constants.ENDPOINT)}/settings/tokens"
    return f"Create one with write access at {page} and log in again: hf auth login"


class Hub:
    """An account on the Hub, and the calls of a push."""

    def __init__(self) -> None:
        """Read the token and ask the Hub for its account. Raises: UsageError, AuthError, UploadError."""
        if not sys.stderr.isatty():
            disable_progress_bars()
        client.install_client()
        self.token = token_in_use()
        self.api = HfApi(token=self.token, library_name="gpt2small_hf")
        self.headers = build_hf_headers(token=self.token, library_name="gpt2small_hf")
        with client.command_errors("checking the token"):
            try:
                account = self.api.whoami()
            except HfHubHTTPError as error:
                if client.http_status(error) == 401:
                    raise AuthError(
                        f"{client.public_url(constants.ENDPOINT)} does not know the token in use. {new_token_advice()}"
                    ) from None
                raise
            self.user: str = account["name"]
            self.role = account.get("auth", {}).get("accessToken", {}).get("role")

    def repository_state(
        self,
        repo_id: str,
        revision: str = MAIN,
        *,
        pull_request_title: str | None = None,
        needs_write_access: bool = True,
    ) -> RepositoryState:
        """Read the state of a repository, if it exists, and of a branch in it, or of the user's open pull request.

        Raises: AuthError if it may not be written and `needs_write_access`; a pull request does not.
        """
        with client.command_errors(f"reading {repo_id}"):
            try:
                info = self.api.model_info(repo_id)
            except RepositoryNotFoundError:
                return RepositoryState(repo_id, revision, exists=False)
            if needs_write_access:
                self.check_may_write(repo_id)
            refs = self.api.list_repo_refs(repo_id)
            branches = {ref.name: ref.target_commit for ref in refs.branches}
            head = branches.get(revision) or branches.get(MAIN) or info.sha
            branch_exists = revision in branches
            pull = self.open_pull_request(repo_id, pull_request_title) if pull_request_title else None
            if pull:
                revision, branch_exists = f"refs/pr/{pull.num}", True
                head = self.api.repo_info(repo_id, revision=revision).sha
            return RepositoryState(
                repo_id,
                revision,
                exists=True,
                private=info.private,
                head=head,
                branch_exists=branch_exists,
                pull_request=client.public_url(pull.url) if pull else None,
                files=self.files(repo_id, head, info),
                branches=branches,
                tags={ref.name: ref.target_commit for ref in refs.tags},
            )

    def files(self, repo_id: str, commit: str | None, info: ModelInfo | None = None) -> dict[str, RepoFile]:
        """List the files of a commit. Raises: ValueError if there are none, but `info` of the same commit has some."""
        tree = self.api.list_repo_tree(repo_id, recursive=True, revision=commit)
        files = {file.path: file for file in tree if isinstance(file, RepoFile)}
        if not files and info is not None and info.sha == commit and info.siblings:
            raise ValueError(f"{len(info.siblings)} files in the repository, and none in its tree")
        return files

    def open_pull_request(self, repo_id: str, title: str) -> Discussion | None:
        """Return the newest open pull request of this user with this title."""
        found = self.api.get_repo_discussions(repo_id, author=self.user, discussion_type="pull_request")
        ours = [pull for pull in found if pull.title == title.strip() and pull.status in ("open", "draft")]
        return max(ours, key=lambda pull: pull.num, default=None)

    def check_may_write(self, repo_id: str, *, create_pr: bool = False) -> None:
        """Raise: AuthError if the token may not write a repository, or open a pull request in it."""
        may_write = self.role != "read"  # enough for a pull request
        if not create_pr:
            try:
                self.api.auth_check(repo_id, write=True)
            except HfHubHTTPError as error:
                if client.http_status(error) not in (401, 403, 404):
                    raise
                may_write = False
        if not may_write:
            raise AuthError(f"the token in use ({self.user}'s) has read access to {repo_id} only. {new_token_advice()}")

    @contextmanager
    def writing(self, what: str, repo_id: str, *, create_pr: bool = False) -> Iterator[None]:
        """As `command_errors`, for a call that changes a repository. A 403 may also mean a quota."""
        with client.command_errors(what):
            try:
                yield
            except HfHubHTTPError as error:
                if client.http_status(error) not in (401, 403):
                    raise
                self.check_may_write(repo_id, create_pr=create_pr)
                raise client.UploadError(f"{what}: the Hub refused it: {client.error_reason(error)}") from None

    def json(self, remote: RepositoryState, name: str) -> dict[str, Any]:
        """Return a JSON file's object, empty for anything else."""
        try:
            found = json.loads(self.read(remote, name))
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def read(self, remote: RepositoryState, name: str) -> bytes:
        """Return a file's content."""
        with client.command_errors(f"reading {name} of {remote.repo_id}"):
            response = get_session().get(hf_hub_url(remote.repo_id, name, revision=remote.head), headers=self.headers)
            hf_raise_for_status(response)
            return response.content

    def card(self, remote: RepositoryState) -> str:
        """Return README.md of a repository, empty if there is none."""
        return self.read(remote, "README.md").decode(errors="replace") if "README.md" in remote.files else ""

    def create_missing(self, remote: RepositoryState) -> None:
        """Create a private repository, and its branch from main, unless they exist."""
        if not remote.exists:
            with client.command_errors(f"creating {remote.repo_id}"):
                self.api.create_repo(remote.repo_id, private=True, exist_ok=True)
                info = self.api.model_info(remote.repo_id)
                remote.head, remote.private = info.sha, info.private
                remote.files = self.files(remote.repo_id, info.sha, info)
                remote.exists, remote.branch_exists = True, remote.revision == MAIN
        if not remote.branch_exists:
            with self.writing(f"creating branch {remote.revision} of {remote.repo_id}", remote.repo_id):
                self.api.create_branch(remote.repo_id, branch=remote.revision, revision=remote.head, exist_ok=True)
                remote.branch_exists = True

    def verify_checksums(self, staged: Path, repo_id: str, commit: str) -> int:
        """Compare the checksums of all files of a commit with a staged folder. Returns: the number of files.

        Raises: VerifyError that names the first file which differs.
        """
        with client.command_errors(f"comparing checksums with {repo_id}"):
            found = self.api.verify_repo_checksums(repo_id, revision=commit, local_dir=staged)
        if found.mismatches:
            raise client.VerifyError(
                f"{found.mismatches[0]['path']} of {repo_id} at {commit[:12]} differs from the staged file. "
                "Nothing was tagged; run the same command again."
            )
        local = {path.relative_to(staged).as_posix() for path in staged.rglob("*") if path.is_file()}
        if lacking := sorted(local & {*found.extra_paths}):
            raise client.VerifyError(f"{lacking[0]} is not in {repo_id} at {commit[:12]}. Run the same command again.")
        return found.checked_count

    def download(self, repo_id: str, commit: str, cache: Path) -> Path:
        """Download the files of a commit that transformers may load into a new Hub cache. Returns: its folder there."""
        names = {"allow_patterns": LOADED, "ignore_patterns": "*/*.safetensors"}
        with client.command_errors(f"downloading {repo_id} at {commit[:12]}"):
            return Path(self.api.snapshot_download(repo_id, revision=commit, cache_dir=cache, **names))

    def create_tag(self, remote: RepositoryState, tag: str, commit: str | None, message: str | None = None) -> None:
        """Tag a commit. Raises: UploadError if the tag marks another one."""
        repo_id = remote.repo_id
        with self.writing(f"tagging {repo_id}", repo_id):
            try:
                self.api.create_tag(repo_id, tag=tag, revision=commit, tag_message=message)
            except HfHubHTTPError as error:
                if client.http_status(error) != 409:
                    raise
                # It is this tag if the response to a first attempt was lost.
                tags = {ref.name: ref.target_commit for ref in self.api.list_repo_refs(repo_id).tags}
                if tags.get(tag) != commit:
                    raise client.UploadError(
                        f"tag {tag} of {repo_id} was set meanwhile to commit {tags.get(tag)}. Use another: --tag NAME"
                    ) from None
            remote.tags[tag] = commit or ""

    def set_visibility(self, repo_id: str, public: bool) -> None:
        """Make a repository public or private."""
        with self.writing(f"changing the visibility of {repo_id}", repo_id):
            self.api.update_repo_settings(repo_id, private=not public)


def is_visible(repo_id: str, kind: str = "model", *, token: Literal[False] | None = None) -> bool:
    """Return whether a repository can be seen with the token in use, or with `token=False` by everybody."""
    client.install_client()
    with client.command_errors(f"looking up {repo_id}"):
        return HfApi(token=token).repo_exists(repo_id, repo_type=kind)
