"""The repositories of the test Hub and the contents of their files, on disk."""

from __future__ import annotations

import fnmatch
import hashlib
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path

from hub.records import Blob, Commit, Repo, git_hash, lfs_pointer, now, pieces_of
from hub.routing import Refusal

LFS_SUFFIXES = ("7z", "bin", "gz", "npy", "npz", "onnx", "parquet", "pickle", "pkl", "pt", "pth", "safetensors", "zip")
GITATTRIBUTES = "".join(f"*.{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LFS_SUFFIXES).encode()


class Storage:
    """Repositories and contents; `landed` has all commits in order."""

    folder: Path

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.landed: list[Commit] = []
        self._lock = threading.RLock()

    def create(self, name: str, kind: str = "model", private: bool = False) -> Repo:
        """Make a repository with its `.gitattributes`, as the Hub does."""
        with self._lock:
            repo = Repo(name, kind, private)
            self.repos[repo.key] = repo
            self.land(repo, "refs/heads/main", {".gitattributes": self.keep(GITATTRIBUTES)}, "initial commit")
            return repo

    def commit(
        self,
        repo: str,
        files: dict[str, bytes | Path],
        delete: Iterable[str] = (),
        revision: str = "main",
        title: str = "An edit in the browser",
        author: str = "somebody",
    ) -> Commit:
        """Change a repository from the side, while a client may be at work."""
        with self._lock:
            target = self.repos[repo]
            changes: dict[str, Blob | None] = dict.fromkeys(delete)
            for path, content in files.items():
                size = len(content) if isinstance(content, bytes) else content.stat().st_size
                sample = next(iter(pieces_of(content)), b"")[:512]
                changes[path] = self.keep(content, self.goes_to_lfs(target.at(revision), path, size, sample))
            ref = target.ref(revision, ("refs/heads/", ""))
            assert ref, f"no branch {revision}"
            return self.land(target, ref, changes, title, author=author)

    def blobs(self, repo: str, revision: str = "main") -> dict[str, Blob]:
        """Path → size, hash and place on disk of all files at a revision."""
        with self._lock:
            return self.repos[repo].at(revision).files

    def files(self, repo: str, revision: str = "main") -> dict[str, bytes]:
        """Path → content of all files at a revision."""
        return {path: blob.path.read_bytes() for path, blob in self.blobs(repo, revision).items()}

    def keep(self, content: bytes | Path, lfs: bool = False) -> Blob:
        """Store a content."""
        if lfs:
            return self.lfs_blob(self.receive(pieces_of(content)).name)
        data = b"".join(pieces_of(content))
        oid = git_hash(data)
        self.object_path(oid).write_bytes(data)
        return Blob(oid, len(data), None, self.object_path(oid))

    def object_path(self, name: str) -> Path:
        return self.folder / name

    def receive(self, pieces: Iterable[bytes], sha256: str | None = None) -> Path:
        """Write a stream to disk, whole or not at all; under its SHA-256, which may be prescribed."""
        digest = hashlib.sha256()
        with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as file:
            for piece in pieces:
                digest.update(piece)
                file.write(piece)
        if sha256 not in (None, digest.hexdigest()):
            raise Refusal(400, f"the content's SHA-256 is {digest.hexdigest()}, not {sha256}")
        return Path(file.name).replace(self.object_path(digest.hexdigest()))

    def lfs_blob(self, sha256: str) -> Blob:
        path = self.object_path(sha256)
        if not path.exists():
            raise Refusal(400, f"LFS pointer pointed to a file that does not exist: {sha256}")
        size = path.stat().st_size
        return Blob(git_hash(lfs_pointer(sha256, size)), size, sha256, path)

    def goes_to_lfs(self, commit: Commit, path: str, size: int, sample: bytes) -> bool:
        attributes = commit.files[".gitattributes"].path.read_text() if ".gitattributes" in commit.files else ""
        patterns = [line.split()[0] for line in attributes.splitlines() if "filter=lfs" in line]
        named = any(fnmatch.fnmatch(Path(path).name, pattern) for pattern in patterns)
        return size > 0 and (named or b"\0" in sample or size > 10_000_000)

    def land(
        self,
        repo: Repo,
        ref: str,
        changes: dict[str, Blob | None],
        title: str,
        description: str = "",
        author: str = "you",
        parent: str | None = None,
    ) -> Commit:
        """Put a commit on top of `ref`, or of `parent` where the reference is new; None deletes a file."""
        parent = repo.refs.get(ref, parent)
        files = {**(repo.commits[parent].files if parent else {}), **changes}
        kept = {path: blob for path, blob in sorted(files.items()) if blob is not None}
        tree = [(path, blob.etag) for path, blob in kept.items()]
        oid = hashlib.sha1(repr((repo.key, parent, title, tree, len(self.landed))).encode()).hexdigest()
        commit = Commit(oid, parent, repo.key, ref, title, description, author, now(), kept)
        repo.commits[oid] = commit
        repo.refs[ref] = oid
        self.landed.append(commit)
        return commit
