"""What the test Hub keeps: users, repositories, commits and the contents of files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from hub.routing import Refusal

TOKEN, READ_TOKEN, OTHER_TOKEN = "hf_writer", "hf_reader", "hf_other"


@dataclass
class User:
    """Who a token speaks for. A fine-grained token writes to `scopes` alone: namespaces or repositories."""

    name: str
    role: str = "write"  # or "read", "fineGrained"
    orgs: tuple[str, ...] = ()
    scopes: tuple[str, ...] = ()

    def sees(self, repo: Repo) -> bool:
        """Whether the repository is public, or the user's, or one of the user's organisations'."""
        return not repo.private or repo.name.split("/")[0] in (self.name, *self.orgs)

    def may_write(self, name: str) -> bool:
        """Whether the token may change the repository `namespace/name`, or make it."""
        namespace = name.split("/")[0]
        allowed = self.role == "write" or (self.role == "fineGrained" and {namespace, name} & set(self.scopes))
        return bool(allowed) and namespace in (self.name, *self.orgs)


@dataclass(frozen=True)
class Blob:
    """The content of a file, on disk. `oid` is git's name for it, or for its pointer where it is an LFS file."""

    oid: str
    size: int
    sha256: str | None  # None: not an LFS file
    path: Path

    @property
    def etag(self) -> str:
        """By what the client knows the content."""
        return self.sha256 or self.oid

    @property
    def lfs(self) -> dict | None:
        """As the Hub's answers describe an LFS file."""
        pointer = len(lfs_pointer(self.sha256 or "", self.size))
        return self.sha256 and {"oid": self.sha256, "sha256": self.sha256, "size": self.size, "pointerSize": pointer}


@dataclass(frozen=True)
class Commit:
    """All files at one moment, and who made it so, where."""

    oid: str
    parent: str | None
    repo: str
    ref: str
    title: str
    description: str
    author: str
    date: str
    files: dict[str, Blob]


@dataclass
class Discussion:
    """A discussion or a pull request."""

    num: int
    title: str
    description: str
    author: str
    is_pull_request: bool
    date: str
    status: str = "open"  # or "draft", "closed"


@dataclass
class Repo:
    """A repository: `refs` are full names (refs/heads/main, refs/tags/v1, refs/pr/1), `commits` in order of landing."""

    name: str
    kind: str = "model"  # or "dataset", "space"
    private: bool = False
    refs: dict[str, str] = field(default_factory=dict)
    commits: dict[str, Commit] = field(default_factory=dict)
    discussions: dict[int, Discussion] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Its path in the Hub's addresses, and its key in `HubServer.repos`."""
        return self.name if self.kind == "model" else f"{self.kind}s/{self.name}"

    @property
    def branches(self) -> dict[str, str]:
        """Branch → commit."""
        return self.refs_below("refs/heads/")

    @property
    def tags(self) -> dict[str, str]:
        """Tag → commit."""
        return self.refs_below("refs/tags/")

    def refs_below(self, prefix: str) -> dict[str, str]:
        """The references that begin so, without that beginning."""
        return {ref.removeprefix(prefix): oid for ref, oid in self.refs.items() if ref.startswith(prefix)}

    def ref(self, revision: str, kinds: tuple[str, ...] = ("refs/heads/", "refs/tags/", "")) -> str | None:
        """The full name of a branch, a tag or a pull request's reference."""
        return next((kind + revision for kind in kinds if kind + revision in self.refs), None)

    def at(self, revision: str) -> Commit:
        """The commit that a branch, tag, reference or (abbreviated) id stands for."""
        ref = self.ref(revision)
        named = [oid for oid in self.commits if len(revision) >= 7 and oid.startswith(revision)]
        if ref is None and not named:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return self.commits[self.refs[ref] if ref else named[0]]


def git_hash(data: bytes) -> str:
    """Git's name for a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def lfs_pointer(sha256: str, size: int) -> bytes:
    """What git keeps in place of an LFS file."""
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()


def pieces_of(content: bytes | Path) -> Iterator[bytes]:
    """The bytes, or the file's, a piece at a time."""
    if isinstance(content, bytes):
        yield content
        return
    with content.open("rb") as file:
        while piece := file.read(2**20):
            yield piece


def now() -> str:
    """The time as the Hub writes it."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
