"""A repository as it was found before a push."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.hf_api import RepoFile

from gpt2small_hf.publishing.checks import git_blob
from gpt2small_hf.publishing.client import public_url
from gpt2small_hf.runs.files import sha256

MAIN = "main"


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
        return backup_tag(self.head or "")

    @property
    def replaced(self) -> dict[str, str]:
        """The tags that `--replace` has set so far → their commits."""
        return {tag: commit for tag, commit in self.tags.items() if tag == backup_tag(commit)}

    def url(self) -> str:
        """Return its address, to be printed."""
        return f"{public_url(constants.ENDPOINT)}/{self.repo_id}"


def backup_tag(commit: str) -> str:
    """Return the tag that keeps a commit which `--replace` replaces."""
    return f"before-{commit[:8]}"


def is_same(there: RepoFile | None, here: Path) -> bool:
    """Whether a file on the Hub has the bytes of one here, by its hash."""
    if there is None or not here.is_file() or there.size != here.stat().st_size:
        return False
    if there.lfs is not None:
        return there.lfs.sha256 == sha256(here)
    return there.blob_id == git_blob(here.read_bytes())
