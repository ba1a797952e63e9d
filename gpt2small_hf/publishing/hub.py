"""One account on the Hub: what a repository has, and the calls that change it, but for commits (`commit.py`).

`client.Client` repeats these calls.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from huggingface_hub import Discussion, HfApi, ModelInfo, constants
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers, disable_progress_bars

from gpt2small_hf.errors import UsageError
from gpt2small_hf.publishing.arguments import AuthError, token_in_use
from gpt2small_hf.publishing.client import install_client, public_url
from gpt2small_hf.publishing.hub_errors import UploadError, VerifyError, command_errors, error_reason, http_status
from gpt2small_hf.publishing.repository import MAIN, RepositoryState

LOADED = ["*.json", "*.py", "*.safetensors", "*.jinja", "*.txt", "*.model"]
"""Patterns of the files that transformers may load, whoever added them."""


class Hub:
    """An account on the Hub, and the calls of a push."""

    def __init__(self) -> None:
        """Read the token and ask the Hub for its account.

        Raises: as `token_in_use`; AuthError for a token that the Hub does not know, UploadError if the Hub cannot be
            reached.
        """
        if not sys.stderr.isatty():
            disable_progress_bars()
        install_client()
        self.token = token_in_use()
        self.api = HfApi(token=self.token, library_name="gpt2small_hf")
        self.headers = build_hf_headers(token=self.token, library_name="gpt2small_hf")
        self._contents: dict[tuple[str, str | None, str], bytes] = {}
        with command_errors("checking the token"):
            try:
                account = self.api.whoami()
            except HfHubHTTPError as error:
                if http_status(error) == 401:
                    raise AuthError(
                        f"{public_url(constants.ENDPOINT)} does not know the token in use. Create one with write "
                        f"access at {public_url(constants.ENDPOINT)}/settings/tokens and log in again: hf auth login"
                    ) from None
                raise
            self.user: str = account["name"]
            self.organisations = [found["name"] for found in account.get("orgs", [])]
            self.role = account.get("auth", {}).get("accessToken", {}).get("role")

    def repository_state(
        self,
        repo_id: str,
        revision: str = MAIN,
        *,
        pull_request_title: str | None = None,
        needs_write_access: bool = True,
    ) -> RepositoryState:
        """Read the state of a repository, if it exists, and check that it may be written.

        Args:
            repo_id: The repository.
            revision: Branch to push to.
            pull_request_title: Title of a pull request to open. An open one of this user with this title is reused.
            needs_write_access: Check for write access, which a pull request does not need.

        Raises: AuthError if it may not be written.
        """
        with command_errors(f"reading {repo_id}"):
            try:
                info = self.api.model_info(repo_id)
            except RepositoryNotFoundError:
                self._check_may_create(repo_id)
                return RepositoryState(repo_id, revision, exists=False)
            if needs_write_access:
                self.check_may_write(repo_id)
            refs = self.api.list_repo_refs(repo_id)
            branches = {ref.name: ref.target_commit for ref in refs.branches}
            head = branches.get(revision) or branches.get(MAIN) or info.sha
            is_there, pull = revision in branches, self.open_pull_request(repo_id, pull_request_title)
            if pull is not None:
                revision, is_there = f"refs/pr/{pull.num}", True
                head = self.api.repo_info(repo_id, revision=revision).sha
            return RepositoryState(
                repo_id,
                revision,
                exists=True,
                private=info.private,
                head=head,
                branch_exists=is_there,
                pull_request=None if pull is None else public_url(pull.url),
                files=self.files(repo_id, head, info),
                branches=branches,
                tags={ref.name: ref.target_commit for ref in refs.tags},
            )

    def files(self, repo_id: str, commit: str | None, info: ModelInfo | None = None) -> dict[str, RepoFile]:
        """Files of a commit. Raises: ValueError if there are none, while `info` of the same commit has some."""
        tree = self.api.list_repo_tree(repo_id, recursive=True, revision=commit)
        files = {file.path: file for file in tree if isinstance(file, RepoFile)}
        if not files and info is not None and info.sha == commit and info.siblings:
            raise ValueError(f"{len(info.siblings)} files in the repository, and none in its tree")
        return files

    def open_pull_request(self, repo_id: str, title: str | None) -> Discussion | None:
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
            raise AuthError(f"{repo_id} does not exist, and {self.user} may not create it. Use one of yours: {own}")

    def check_may_write(self, repo_id: str, *, create_pr: bool = False) -> None:
        if create_pr:  # anybody may, with a token that can write
            if self.role == "read":
                self._refuse_to_write(repo_id)
            return
        try:
            self.api.auth_check(repo_id, write=True)
        except HfHubHTTPError as error:
            if http_status(error) in (401, 403, 404):
                self._refuse_to_write(repo_id)
            raise

    @contextmanager
    def writing(self, what: str, repo_id: str, *, create_pr: bool = False) -> Iterator[None]:
        """As `command_errors`, for a call that changes a repository. A 403 may also mean a quota."""
        with command_errors(what):
            try:
                yield
            except HfHubHTTPError as error:
                if http_status(error) not in (401, 403):
                    raise
                self.check_may_write(repo_id, create_pr=create_pr)
                raise UploadError(f"{what}: the Hub refused it: {error_reason(error)}") from None

    def _refuse_to_write(self, repo_id: str) -> NoReturn:
        raise AuthError(
            f"the token in use ({self.user}'s) has read access to {repo_id} only. Create one with write access at "
            f"{public_url(constants.ENDPOINT)}/settings/tokens and log in again: hf auth login"
        )

    def tag_backup(self, remote: RepositoryState) -> bool:
        """Tag the state of a branch before another model replaces it. Returns: whether there was one to tag."""
        if not remote.other_model or not remote.is_overwritten:
            return False
        assert remote.head is not None
        if remote.tags.get(remote.backup_tag) != remote.head:
            self._set_tag(remote.repo_id, remote.backup_tag, remote.head)
            remote.tags[remote.backup_tag] = remote.head
        return True

    def json(self, remote: RepositoryState, name: str) -> dict[str, Any]:
        try:
            found = json.loads(self.read(remote, name))
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def read(self, remote: RepositoryState, name: str) -> bytes:
        key = (remote.repo_id, remote.head, name)
        if key not in self._contents:
            # A temporary cache: the user's should not keep these files.
            with (
                command_errors(f"reading {name} of {remote.repo_id}"),
                no_progress_bars(),
                tempfile.TemporaryDirectory() as cache,
            ):
                path = self.api.hf_hub_download(remote.repo_id, name, revision=remote.head, cache_dir=cache)
                self._contents[key] = Path(path).read_bytes()
        return self._contents[key]

    def card(self, remote: RepositoryState) -> str:
        """README.md of a repository, empty if there is none."""
        if "README.md" not in remote.files:
            return ""
        return self.read(remote, "README.md").decode(errors="replace")

    def create_missing(self, remote: RepositoryState) -> None:
        """Create repository and branch if they do not exist: the repository private, the branch from main."""
        if not remote.exists:
            with command_errors(f"creating {remote.repo_id}"):
                self.api.create_repo(remote.repo_id, private=True, exist_ok=True)
                try:
                    info = self.api.model_info(remote.repo_id)
                except RepositoryNotFoundError:
                    raise UsageError(f"{remote.repo_id} exists and is not a model repository. Use another.") from None
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
        with command_errors(f"comparing checksums with {repo_id}"):
            found = self.api.verify_repo_checksums(repo_id, revision=commit, local_dir=staged)
        if found.mismatches:
            raise VerifyError(
                f"{found.mismatches[0]['path']} of {repo_id} at {commit[:12]} differs from the staged file. "
                "Nothing was tagged; run the same command again."
            )
        local = {path.relative_to(staged).as_posix() for path in staged.rglob("*") if path.is_file()}
        if lacking := sorted(local & {*found.extra_paths}):
            raise VerifyError(f"{lacking[0]} is not in {repo_id} at {commit[:12]}. Run the same command again.")
        return found.checked_count

    def download(self, repo_id: str, commit: str, cache: Path) -> Path:
        """Download what transformers may load of a commit into a new Hub cache. Returns: its folder there."""
        with command_errors(f"downloading {repo_id} at {commit[:12]}"):
            return Path(
                self.api.snapshot_download(
                    repo_id, revision=commit, cache_dir=cache, allow_patterns=LOADED, ignore_patterns="*/*.safetensors"
                )
            )

    def create_tag(self, remote: RepositoryState, tag: str, commit: str, message: str) -> bool:
        """Tag a commit. An existing tag is kept: `check_tag` found that it marks the same model.

        Returns: whether the tag was created.
        """
        if tag in remote.tags:
            return False
        self._set_tag(remote.repo_id, tag, commit, message)
        return True

    def _set_tag(self, repo_id: str, tag: str, commit: str, message: str | None = None) -> None:
        with self.writing(f"tagging {repo_id}", repo_id):
            try:
                self.api.create_tag(repo_id, tag=tag, revision=commit, tag_message=message)
            except HfHubHTTPError as error:
                if http_status(error) != 409:
                    raise
                # It is this tag if the response to a first attempt was lost.
                tags = {ref.name: ref.target_commit for ref in self.api.list_repo_refs(repo_id).tags}
                if tags.get(tag) != commit:
                    raise UploadError(
                        f"tag {tag} of {repo_id} was set meanwhile to commit {tags.get(tag)}. Use another: --tag NAME"
                    ) from None

    def set_visibility(self, repo_id: str, public: bool) -> None:
        """Make a repository public or private."""
        with self.writing(f"changing the visibility of {repo_id}", repo_id):
            self.api.update_repo_settings(repo_id, private=not public)

    def check_collection(self, slug: str) -> None:
        """Raise: UsageError if a collection does not exist."""
        with command_errors(f"reading collection {slug}"):
            try:
                self.api.get_collection(slug)
            except HfHubHTTPError as error:
                if http_status(error) in (400, 404):
                    raise UsageError(
                        f"the collection {slug} does not exist. Its slug ends its address: user/title-0123456789"
                    ) from None
                raise

    def add_to_collection(self, slug: str, repo_id: str) -> None:
        """Add a repository to a collection, unless it is there."""
        with command_errors(f"adding {repo_id} to collection {slug}"):
            self.api.add_collection_item(slug, repo_id, "model", exists_ok=True)


def is_public(repo_id: str, kind: str = "model") -> bool:
    """Return whether a repository is public, by asking the Hub without a token."""
    install_client()
    with command_errors(f"checking whether {repo_id} is public"):
        try:
            return not HfApi(token=False).repo_info(repo_id, repo_type=kind).private
        except RepositoryNotFoundError:
            return False


def is_visible(repo_id: str) -> bool:
    """Return whether the token in use can see a model of that name."""
    install_client()
    with command_errors(f"looking up {repo_id}"):
        try:
            HfApi().model_info(repo_id)
        except RepositoryNotFoundError:
            return False
    return True


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Hide progress bars, for files of some kilobytes."""
    shown = sys.stderr.isatty()
    disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            from huggingface_hub.utils import enable_progress_bars

            enable_progress_bars()
