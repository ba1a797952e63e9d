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
from gpt2small_hf.publishing.client import connect, shown
from gpt2small_hf.publishing.hub_errors import UploadError, VerifyError, answers, error_reason, http_status
from gpt2small_hf.publishing.repository import MAIN, Remote

LOADED = ["*.json", "*.py", "*.safetensors", "*.jinja", "*.txt", "*.model"]
"""Of a repository: what transformers may load, whoever put it there."""


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
        self.headers = build_hf_headers(token=self.token, library_name="gpt2small_hf")
        self._contents: dict[tuple[str, str | None, str], bytes] = {}
        with answers("asking whose the token is"):
            try:
                account = self.api.whoami()
            except HfHubHTTPError as error:
                if http_status(error) == 401:
                    raise AuthError(
                        f"{shown(constants.ENDPOINT)} does not know the token in use. Make one with write access at "
                        f"{shown(constants.ENDPOINT)}/settings/tokens and log in again: hf auth login"
                    ) from None
                raise
            self.user: str = account["name"]
            self.organisations = [found["name"] for found in account.get("orgs", [])]
            self.role = account.get("auth", {}).get("accessToken", {}).get("role")

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
                self.check_may_write(repo_id)
            refs = self.api.list_repo_refs(repo_id)
            branches = {ref.name: ref.target_commit for ref in refs.branches}
            head = branches.get(revision) or branches.get(MAIN) or info.sha
            is_there, pull = revision in branches, self.open_pull_request(repo_id, proposal)
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
            raise AuthError(f"{repo_id} is not there, and {self.user} cannot make it. Name one of your own: {own}")

    def check_may_write(self, repo_id: str, *, create_pr: bool = False) -> None:
        if create_pr:  # everybody may, with a token that writes
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
        """As `answers`, for a call that changes a repository. A 403 may be about storage or a plan: the Hub says."""
        with answers(what):
            try:
                yield
            except HfHubHTTPError as error:
                if http_status(error) not in (401, 403):
                    raise
                self.check_may_write(repo_id, create_pr=create_pr)
                raise UploadError(f"{what}: the Hub refused it: {error_reason(error)}") from None

    def _refuse_to_write(self, repo_id: str) -> NoReturn:
        raise AuthError(
            f"the token in use ({self.user}'s) may read {repo_id} and not write it. Make one with write access at "
            f"{shown(constants.ENDPOINT)}/settings/tokens and log in again: hf auth login"
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

    def json(self, remote: Remote, name: str) -> dict[str, Any]:
        try:
            found = json.loads(self.read(remote, name))
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def read(self, remote: Remote, name: str) -> bytes:
        key = (remote.repo_id, remote.head, name)
        if key not in self._contents:
            # A cache of its own: the user's should not keep these files.
            with answers(f"reading {name} of {remote.repo_id}"), _quiet(), tempfile.TemporaryDirectory() as cache:
                path = self.api.hf_hub_download(remote.repo_id, name, revision=remote.head, cache_dir=cache)
                self._contents[key] = Path(path).read_bytes()
        return self._contents[key]

    def card(self, remote: Remote) -> str:
        """README.md of a repository, empty if there is none."""
        if "README.md" not in remote.files:
            return ""
        return self.read(remote, "README.md").decode(errors="replace")

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
                remote.files = self.files(remote.repo_id, info.sha, info)
                remote.exists, remote.branch_exists = True, remote.revision == MAIN
        if not remote.branch_exists:
            with self.writing(f"making branch {remote.revision} of {remote.repo_id}", remote.repo_id):
                self.api.create_branch(remote.repo_id, branch=remote.revision, revision=remote.head, exist_ok=True)
                remote.branch_exists = True

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
        with self.writing(f"tagging {repo_id}", repo_id):
            try:
                self.api.create_tag(repo_id, tag=tag, revision=commit, tag_message=message)
            except HfHubHTTPError as error:
                if http_status(error) != 409:
                    raise
                # It is this one if the answer to a first attempt was lost.
                tags = {ref.name: ref.target_commit for ref in self.api.list_repo_refs(repo_id).tags}
                if tags.get(tag) != commit:
                    raise UploadError(
                        f"tag {tag} of {repo_id} was set meanwhile, to commit {tags.get(tag)}. Use another: --tag NAME"
                    ) from None

    def make_public(self, repo_id: str, public: bool) -> None:
        """Show a repository to everybody, or hide it."""
        with self.writing(f"changing who sees {repo_id}", repo_id):
            self.api.update_repo_settings(repo_id, private=not public)

    def check_collection(self, slug: str) -> None:
        """Raise: UsageError if a collection is not there."""
        with answers(f"looking at collection {slug}"):
            try:
                self.api.get_collection(slug)
            except HfHubHTTPError as error:
                if http_status(error) in (400, 404):
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
