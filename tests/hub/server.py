"""A small Hub on loopback → the unmodified huggingface_hub and transformers talk to it, and tests look inside.

Run the client in a process of its own: huggingface_hub reads `HF_ENDPOINT` once, at import.

    with HubServer() as hub:
        subprocess.run([...], env={"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HOME": an_empty_folder, ...})
        assert "config.json" in hub.files("you/tiny") and not hub.unknown_routes and not hub.leaks

Faults: `hub.inject(call, kind)` makes a call of CALLS ("whoami", "commit", …) go wrong in a way of FAULTS, once or more
often. `fail`, `drop`, `drop_answer`, `hang` and `pause` do the same for any address.

    hub.inject("commit", "lost")  # the commit lands, and the connection is closed before the answer
    hub.inject("info", "429", times=2, headers={"Retry-After": "1"})
    hub.inject("whoami", "silent", times=-1)  # accepts each request and never answers

Contents go up over LFS (single PUT or multipart) or Xet (the uploaded chunks are unpacked, and must give the SHA-256
that the shard names), and come down over plain HTTP, LFS files by a redirect to another host, as from the Hub's CDN.
Written from the client's source and observed requests, never compared with the real Hub. Its limits:

- A card is only checked for a header that is opened and not closed, and its metadata is shown nowhere.
- `.gitignore`: without `**`, and only the one at the root.
- LFS or regular is decided by `.gitattributes`, a NUL byte in the first 512, or more than 10 MB.
- No rate limits, scans, quotas, gating, Xet downloads, moved or deleted repositories, merged pull requests, pages of
  discussions, or copies between repositories. Xet's hashes of xorbs and chunks (BLAKE3) are not checked.
- LZ4 is unpacked in plain Python, some 25 to 60 MB/s of weights. `HF_XET_XORB_COMPRESSION_POLICY=none` in a client's
  environment spares it.
- hf_xet remembers in HF_HOME, by address and port, what a server has: clients of different servers must not share one.
"""

import base64
import contextlib
import fnmatch
import hashlib
import json
import re
import shutil
import socket
import struct
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

TOKEN, READ_TOKEN, STRANGER_TOKEN = "hf_writer", "hf_reader", "hf_stranger"
LFS_SUFFIXES = ("7z", "bin", "gz", "npy", "npz", "onnx", "parquet", "pickle", "pkl", "pt", "pth", "safetensors", "zip")
GITATTRIBUTES = "".join(f"*.{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LFS_SUFFIXES).encode()

API_OF_A_MODEL = "^/api/models/[^/]+/[^/]+"
CALLS = {
    "whoami": ("GET", "^/api/whoami-v2$"),
    "info": ("GET", f"{API_OF_A_MODEL}(/revision/.+)?$"),
    "auth": ("GET", f"{API_OF_A_MODEL}/auth-check"),
    "refs": ("GET", f"{API_OF_A_MODEL}/refs$"),
    "tree": ("GET", f"{API_OF_A_MODEL}/tree/"),
    "discussions": ("GET", f"{API_OF_A_MODEL}/discussions$"),
    "create": ("POST", "^/api/repos/create$"),
    "branch": ("POST", f"{API_OF_A_MODEL}/branch/"),
    "validate": ("POST", "^/api/validate-yaml$"),
    "preupload": ("POST", f"{API_OF_A_MODEL}/preupload/"),
    "batch": ("POST", "/info/lfs/objects/batch$"),
    "put": ("PUT", "^/lfs/(whole|part)/"),
    "complete": ("POST", "^/lfs/complete/"),  # of a file sent in parts
    "verify": ("POST", "/info/lfs/objects/verify$"),
    "xet-token": ("GET", f"{API_OF_A_MODEL}/xet-write-token/"),
    "cas": (None, "^/v1/(xorbs|shards)"),  # both of the next two
    "xorb": ("POST", "^/v1/xorbs/"),
    "shard": ("POST", "^/v1/shards"),
    "commit": ("POST", f"{API_OF_A_MODEL}/commit/"),
    "commits": ("GET", f"{API_OF_A_MODEL}/commits/"),
    "paths": ("POST", f"{API_OF_A_MODEL}/paths-info/"),
    "resolve": (None, "/resolve/"),  # HEAD and GET
    "cdn": (None, "^/cdn/"),
    "tag": ("POST", f"{API_OF_A_MODEL}/tag/"),
    "settings": ("PUT", f"{API_OF_A_MODEL}/settings$"),
    "collection": ("GET", "^/api/collections/"),
    "collect": ("POST", "^/api/collections/.+/items$"),
}
"""Name of a call → method and address. Only LFS makes batch, put, complete and verify; only Xet makes xet-token, cas,
xorb and shard."""
LOGIN_PAGE = b"<!DOCTYPE html><html><head><title>Log in to the network</title></head><body></body></html>"
FAULTS = {
    "500": "status 500, nothing is done; any other number likewise",
    "html": "status 200 with the login page of a proxy, nothing is done",
    "list": "status 200 with the JSON `[]`, nothing is done",
    "null": "status 200 with the JSON `null`, nothing is done",
    "empty": "status 200 with the JSON `{}`, nothing is done",
    "dropped": "the connection is closed before anything is done",
    "lost": "the work is done, then the connection is closed without an answer",
    "silent": "nothing is done and nothing is answered; the connection stays open",
    "done-silent": "the work is done and nothing is answered; the connection stays open",
}
"""Kind of a fault → what happens."""


@dataclass
class User:
    """Who a token speaks for. A fine-grained token writes to `scopes` alone: namespaces or repositories."""

    name: str
    role: str = "write"  # or "read", "fineGrained"
    orgs: tuple[str, ...] = ()
    scopes: tuple[str, ...] = ()

    def sees(self, repo: "Repo") -> bool:
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
        """Its path in the Hub's addresses, hence its name in `HubServer.repos`."""
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


@dataclass
class Request:
    """What was asked. `status` is None as long as no answer was sent; `received` counts the body's bytes."""

    method: str
    path: str
    query: dict[str, str]
    host: str
    token: str | None
    status: int | None = None
    received: int = 0
    at_seconds: float = field(default_factory=time.monotonic)


@dataclass
class Answer:
    """What is sent back: JSON, bytes, or a file's bytes from `start` to its end."""

    body: dict | list | bytes | Path = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    start: int = 0


class Refusal(Exception):  # noqa: N818 - a refusal is an answer, not an error of the server
    """Ends a request with a status and the Hub's error headers."""

    def __init__(
        self, status: int, message: str, code: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        plain = message.encode("ascii", "replace").decode()  # headers know no other letters
        named = {"X-Error-Message": plain, **({"X-Error-Code": code} if code else {}), **(headers or {})}
        self.answer = Answer({"error": message}, status, named)


class Hangup(Exception):  # noqa: N818
    """The line is dead: the client's doing, or ours because a test asked for it."""


@dataclass
class Fault:
    """Something that goes wrong `times` times (-1: always), after `after` matching requests went well."""

    method: str | None
    path: str
    times: int
    after: int
    act: Callable[["Handler"], Answer | None] | None = None  # in place of the work
    act_after: Callable[[], None] | None = None  # when the work is done, before the answer is sent

    def strikes(self, request: Request) -> bool:
        """Whether this request is hit; counts it."""
        if self.method not in (None, request.method) or not re.search(self.path, request.path) or self.times == 0:
            return False
        self.after -= 1
        self.times -= self.after < 0
        return self.after < 0


class Pause:
    """A request that stands still: wait for `reached`, then call `go_on()`, or `hang_up()` to close the line."""

    def __init__(self) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        self._hang_up = False

    def go_on(self) -> None:
        """Let the request go its way."""
        self.go.set()

    def hang_up(self) -> None:
        """Close the line without an answer; what was not done yet stays undone."""
        self._hang_up = True
        self.go.set()

    def hold(self) -> None:
        """Stand still; called by the server."""
        self.reached.set()
        self.go.wait()
        if self._hang_up:
            raise Hangup


@dataclass
class Call:
    """A request as a route sees it."""

    path: str
    args: dict[str, str]
    query: dict[str, str]
    user: User | None
    repo: Repo
    pieces: Iterator[bytes]
    headers: Message
    body: bytes = b""

    def __getitem__(self, name: str) -> str:
        return self.args[name]

    def json(self) -> dict:
        """The body, which must be a JSON object."""
        return json.loads(self.body or b"{}")


# --- Xet's formats, from its public specification ---------------------------------------------------------------------


def unpack_lz4_block(block: bytes, out: bytearray) -> None:
    """Append what a block of LZ4 stands for; it may refer to what `out` holds already."""
    at = 0

    def length(nibble: int) -> int:
        nonlocal at
        more = 255 if nibble == 15 else 0
        while more == 255:
            more = block[at]
            at += 1
            nibble += more
        return nibble

    while at < len(block):
        token = block[at]
        at += 1
        n = token >> 4
        if n == 15:
            n = length(n)
        out += block[at : at + n]
        at += n
        if at >= len(block):  # the last sequence has no match
            return
        back = block[at] | block[at + 1] << 8
        at += 2
        n = token & 15
        n = (length(n) if n == 15 else n) + 4
        start = len(out) - back
        out += out[start : start + n] if n <= back else (out[start:] * (n // back + 1))[:n]


def unpack_lz4(frame: bytes) -> bytes:
    """The content of an LZ4 frame; its checksums are not checked."""
    flags = frame[4]
    at = 7 + 8 * bool(flags & 8) + 4 * bool(flags & 1)  # magic, flags, sizes, [content size], [dictionary], checksum
    out = bytearray()
    while size := int.from_bytes(frame[at : at + 4], "little"):
        block = frame[at + 4 : at + 4 + (size & 0x7FFFFFFF)]
        if size >> 31:
            out += block
        else:
            unpack_lz4_block(block, out)
        at += 4 + len(block) + 4 * bool(flags & 16)
    return bytes(out)


def unpack_chunk(scheme: int, packed: bytes) -> bytes:
    """A chunk of a xorb: 0 as it is, 1 LZ4, 2 LZ4 of all first bytes of four, then all second ones, and so on."""
    plain = packed if scheme == 0 else unpack_lz4(packed)
    if scheme != 2:
        return plain
    out, at = bytearray(len(plain)), 0
    for place in range(4):
        n = (len(plain) + 3 - place) // 4
        out[place::4] = plain[at : at + n]
        at += n
    return bytes(out)


def chunks_of_xorb(path: Path, first: int, end: int) -> Iterator[bytes]:
    """Chunks `first` to `end` (not included) of a stored xorb, unpacked."""
    with path.open("rb") as file:
        for index in range(end):
            head = file.read(8)
            size = int.from_bytes(head[1:4], "little")
            if index < first:
                file.seek(size, 1)
            else:
                yield unpack_chunk(head[4], file.read(size))


def files_of_shard(shard: bytes) -> Iterator[tuple[str, list[tuple[str, int, int]]]]:
    """For each file a shard describes, its SHA-256 and where its chunks are: (xorb, first, end)."""
    at = 48
    while shard[at : at + 32] != b"\xff" * 32:
        flags, n = struct.unpack_from("<II", shard, at + 32)
        rows = [shard[at + 48 * row : at + 48 * (row + 1)] for row in range(1, n + 1)]
        at += 48 * (1 + n + n * (flags >> 31))
        if not flags & 1 << 30:
            raise Refusal(400, "a file without its SHA-256")
        yield as_hash(shard[at : at + 32]), [(as_hash(row[:32]), *struct.unpack_from("<II", row, 40)) for row in rows]
        at += 48


def as_hash(raw: bytes) -> str:
    """Xet writes a hash as four little-endian 64-bit numbers."""
    return "".join(f"{number:016x}" for number in struct.unpack("<4Q", raw))


# --- the server -------------------------------------------------------------------------------------------------------

ROUTES: list[tuple[str, re.Pattern[str], str, str, bool]] = []
API = r"/api/(?P<kind>model|dataset|space)s/(?P<name>[^/]+/[^/]+)"
SITE = r"/(?:(?P<kind>dataset|space)s/)?(?P<name>[^/]+/[^/]+?)"
REV = r"/(?P<rev>[^/]+)"


def route(method: str, pattern: str, access: str = "", streams: bool = False) -> Callable:
    """Enter a method of HubServer in the table. A route that `streams` reads its body itself, without the lock.

    `access`: "" needs no token; "user" a known one; "read", "contribute" (read, and a token that is not read-only) and
    "write" concern the repository that the address names; "cas" wants a token made by the Xet token route.
    """

    def enter(function: Callable) -> Callable:
        ROUTES.append((method, re.compile(pattern), function.__name__, access, streams))
        return function

    return enter


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


class HubServer:
    """See the module. State may be read at any time; change it by the public methods, or before a client starts.

    `requests` is the log in order of arrival, `landed` all commits in order.
    """

    part_bytes = 20 * 2**20  # LFS files above this go up in parts of this size
    page_size = 1000  # entries of a tree or history per page

    def __init__(self) -> None:
        self.users = {TOKEN: User("you"), READ_TOKEN: User("you", "read"), STRANGER_TOKEN: User("stranger")}
        self.repos: dict[str, Repo] = {}
        self.collections: dict[str, dict] = {}
        self.requests: list[Request] = []
        self.landed: list[Commit] = []
        self.unknown_routes: list[str] = []
        self._crashes: list[str] = []
        self._faults: list[Fault] = []
        self._pauses: list[Pause] = []
        self._busy = 0
        self._lock = threading.RLock()
        self._idle = threading.Condition()

    def __enter__(self) -> "HubServer":
        self._folder = tempfile.TemporaryDirectory(prefix="hub-")
        self._store = Path(self._folder.name)
        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.hub = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, *rest: object) -> None:
        for pause in self._pauses:
            pause.hang_up()
        self._server.shutdown()
        self._server.hang_up()
        self._server.server_close()  # waits for the threads of all requests
        self._thread.join()
        self._folder.cleanup()
        if self._crashes and kind is None:
            raise RuntimeError("the hub server itself failed:\n" + "\n".join(self._crashes))

    @property
    def url(self) -> str:
        """What HF_ENDPOINT must say."""
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def elsewhere(self) -> str:
        """The same server under another host's name: storage and CDN, where no user's token may go."""
        return f"http://localhost:{self._server.server_port}"

    @property
    def leaks(self) -> list[Request]:
        """Requests that brought a user's token to storage or CDN."""
        return [asked for asked in self.requests if asked.host == "localhost" and asked.token in self.users]

    # --- for tests: look and edit

    def create(self, name: str, kind: str = "model", private: bool = False) -> Repo:
        """Make a repository with its `.gitattributes`, as the Hub does."""
        with self._lock:
            repo = Repo(name, kind, private)
            self.repos[repo.key] = repo
            self._land(repo, "refs/heads/main", {".gitattributes": self._keep(GITATTRIBUTES)}, "initial commit")
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
                changes[path] = self._keep(content, self._goes_to_lfs(target.at(revision), path, size, sample))
            ref = target.ref(revision, ("refs/heads/", ""))
            assert ref, f"no branch {revision}"
            return self._land(target, ref, changes, title, author=author)

    def blobs(self, repo: str, revision: str = "main") -> dict[str, Blob]:
        """Path → size, hash and place on disk of all files at a revision."""
        with self._lock:
            return self.repos[repo].at(revision).files

    def files(self, repo: str, revision: str = "main") -> dict[str, bytes]:
        """Path → content of all files at a revision."""
        return {path: blob.path.read_bytes() for path, blob in self.blobs(repo, revision).items()}

    # --- for tests: what shall go wrong. `path` is a regular expression, searched for in the unquoted path.

    def fail(
        self,
        path: str,
        method: str | None = None,
        status: int = 503,
        times: int = 1,
        after: int = 0,
        headers: dict[str, str] | None = None,
        body: dict | list | bytes | None = None,
    ) -> None:
        """Answer so, and do nothing."""
        answer = Answer({"error": f"fault {status}"} if body is None else body, status, headers or {})
        self._faults.append(Fault(method, path, times, after, lambda handler: handler.drain() or answer))

    def stop_faults(self) -> None:
        """Let further requests go well, and do what stands still: late, when nobody waits for an answer any more."""
        with self._lock:
            self._faults.clear()
        for pause in self._pauses:
            pause.go_on()
        self.settle()

    def drop(self, path: str, method: str | None = None, after_bytes: int = 0, times: int = 1, after: int = 0) -> None:
        """Read so many bytes of the request's body, do nothing, and close the line."""
        self._faults.append(Fault(method, path, times, after, lambda handler: handler.drain(after_bytes, hang_up=True)))

    def drop_answer(self, path: str, method: str | None = None, times: int = 1, after: int = 0) -> None:
        """Do what was asked and close the line: the client cannot know that it was done."""

        def hang_up() -> None:
            raise Hangup

        self._faults.append(Fault(method, path, times, after, act_after=hang_up))

    def hang(
        self, path: str, method: str | None = None, times: int = 1, after: int = 0, when_done: bool = False
    ) -> None:
        """Keep the line open and say nothing; `when_done`: after the work. Such a request ends with the server."""
        pause = Pause()
        self._pauses.append(pause)
        act = {"act_after": pause.hold} if when_done else {"act": lambda handler: pause.hold()}
        self._faults.append(Fault(method, path, times, after, **act))

    def inject(
        self, call: str, kind: str, times: int = 1, after: int = 0, headers: dict[str, str] | None = None
    ) -> None:
        """Make a call of CALLS go wrong in a way of FAULTS.

        Args:
            call: Which call.
            kind: In which way.
            times: How often, -1: always.
            after: Matching requests that go well before.
            headers: Of an answer, in addition.

        Raises: KeyError for an unknown call, ValueError for an unknown kind.
        """
        method, path = CALLS[call]
        when: dict[str, Any] = {"method": method, "times": times, "after": after}
        bodies = {"html": LOGIN_PAGE, "list": [], "null": b"null", "empty": {}}
        if kind in bodies:
            sort = {"Content-Type": "text/html" if kind == "html" else "application/json"}
            self.fail(path, status=200, body=bodies[kind], headers={**sort, **(headers or {})}, **when)
        elif kind == "dropped":
            self.drop(path, **when)
        elif kind == "lost":
            self.drop_answer(path, **when)
        elif kind in ("silent", "done-silent"):
            self.hang(path, when_done=kind == "done-silent", **when)
        else:
            self.fail(path, status=int(kind), headers=headers, **when)

    def pause(self, path: str, method: str | None = None, after: int = 0, when_done: bool = False) -> Pause:
        """Stop one request before its body is read, or (`when_done`) after the work and before the answer."""
        pause = Pause()
        self._pauses.append(pause)
        if when_done:
            self._faults.append(Fault(method, path, 1, after, act_after=pause.hold))
        else:
            self._faults.append(Fault(method, path, 1, after, act=lambda handler: pause.hold()))
        return pause

    # --- from a request to an answer

    def settle(self, timeout_seconds: float = 30) -> None:
        """Wait until no request is in work, say of a client that was killed.

        Raises: TimeoutError.
        """
        with self._idle:
            if not self._idle.wait_for(lambda: self._busy == 0, timeout_seconds):
                raise TimeoutError(f"{self._busy} requests are still in work")

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """A request is in work."""
        with self._idle:
            self._busy += 1
        try:
            yield
        finally:
            with self._idle:
                self._busy -= 1
                self._idle.notify_all()

    def answer(self, handler: "Handler", request: Request) -> Answer:
        """Log a request, find its route, check the token and do the work."""
        with self._lock:
            self.requests.append(request)
            faults = [fault for fault in self._faults if fault.strikes(request)]
        for fault in faults:
            if fault.act and (answer := fault.act(handler)):
                return answer
        try:
            answer = self._work(handler, request)
        except Refusal as refusal:
            handler.drain()
            answer = refusal.answer
        for fault in faults:
            if fault.act_after:
                fault.act_after()
        return answer

    def _work(self, handler: "Handler", request: Request) -> Answer:
        raw, method = urlsplit(handler.path).path, "GET" if request.method == "HEAD" else request.method
        matches = ((entry, entry[1].fullmatch(raw)) for entry in ROUTES if entry[0] == method)
        entry, match = next((pair for pair in matches if pair[1]), (None, None))
        if entry is None or match is None:
            self.unknown_routes.append(f"{request.method} {request.path}")
            raise Refusal(404, "Sorry, we can't find the page you are looking for.")
        args = {name: unquote(value or "") for name, value in match.groupdict().items()}
        user, repo = self._admit(entry[3], args, request)
        call = Call(raw, args, request.query, user, repo, handler.pieces(), handler.headers)
        if entry[4]:
            return getattr(self, entry[2])(call)
        call.body = b"".join(call.pieces)
        with self._lock:
            return getattr(self, entry[2])(call)

    def _admit(self, access: str, args: dict[str, str], request: Request) -> tuple[User | None, Repo]:
        """Who asks, and about which repository; refuses whom the Hub would refuse."""
        nothing = Repo("")
        if access == "cas":
            if (request.token or "").removeprefix("xet-") not in self.users:
                raise Refusal(401, "not a Xet token")
            return None, nothing
        if not access:
            return None, nothing
        user = self.users.get(request.token or "")
        if request.token and user is None:
            raise Refusal(401, "Invalid credentials in Authorization header")
        if access == "user" and user is None:
            raise Refusal(401, "Invalid username or password.")
        if "name" not in args:
            return user, nothing
        repo = self.repos.get(Repo(args["name"], args["kind"] or "model").key)
        if repo is None or not (user or User("")).sees(repo):
            raise Refusal(404 if user else 401, "Repository not found", "RepoNotFound")
        if access != "read" and user is None:
            raise Refusal(401, "Invalid username or password.")
        if access != "read" and (user.role == "read" or (access == "write" and not user.may_write(repo.name))):
            raise Refusal(403, "You don't have the rights to write to this repository")
        return user, repo

    # --- contents

    def _keep(self, content: bytes | Path, lfs: bool = False) -> Blob:
        """Store a content."""
        if lfs:
            return self._lfs_blob(self._receive(pieces_of(content)).name)
        data = b"".join(pieces_of(content))
        oid = git_hash(data)
        self._object(oid).write_bytes(data)
        return Blob(oid, len(data), None, self._object(oid))

    def _object(self, name: str) -> Path:
        return self._store / name

    def _receive(self, pieces: Iterable[bytes], sha256: str | None = None) -> Path:
        """Write a stream to disk, whole or not at all; under its SHA-256, which may be prescribed."""
        digest = hashlib.sha256()
        with tempfile.NamedTemporaryFile(dir=self._store, delete=False) as file:
            for piece in pieces:
                digest.update(piece)
                file.write(piece)
        if sha256 not in (None, digest.hexdigest()):
            raise Refusal(400, f"the content's SHA-256 is {digest.hexdigest()}, not {sha256}")
        return Path(file.name).replace(self._object(digest.hexdigest()))

    def _lfs_blob(self, sha256: str) -> Blob:
        path = self._object(sha256)
        if not path.exists():
            raise Refusal(400, f"LFS pointer pointed to a file that does not exist: {sha256}")
        size = path.stat().st_size
        return Blob(git_hash(lfs_pointer(sha256, size)), size, sha256, path)

    def _goes_to_lfs(self, commit: Commit, path: str, size: int, sample: bytes) -> bool:
        attributes = commit.files[".gitattributes"].path.read_text() if ".gitattributes" in commit.files else ""
        patterns = [line.split()[0] for line in attributes.splitlines() if "filter=lfs" in line]
        named = any(fnmatch.fnmatch(Path(path).name, pattern) for pattern in patterns)
        return size > 0 and (named or b"\0" in sample or size > 10_000_000)

    def _land(
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

    # --- routes: people and repositories

    @route("GET", "/api/agent-harnesses")
    @route("GET", API + "/auth-check", "read")
    @route("GET", API + "/auth-check/write", "write")
    @route("POST", "/v1/telemetry", "cas")
    def _nothing_to_add(self, call: Call) -> Answer:
        return Answer({})

    @route("GET", "/api/whoami-v2", "user")
    def _whoami(self, call: Call) -> Answer:
        user = call.user
        token = {"displayName": "test", "role": user.role, "createdAt": now()}
        if user.role == "fineGrained":
            scoped = [{"entity": {"name": name}, "permissions": ["repo.write"]} for name in user.scopes]
            token["fineGrained"] = {"scoped": scoped, "global": []}
        orgs = [{"type": "org", "name": name, "roleInOrg": "write"} for name in user.orgs]
        auth = {"type": "access_token", "accessToken": token}
        return Answer({"type": "user", "name": user.name, "fullname": user.name, "orgs": orgs, "auth": auth})

    @route("POST", "/api/validate-yaml", "read")
    def _validate(self, call: Call) -> Answer:
        content = call.json()["content"].replace("\r\n", "\n")
        if content.startswith("---\n") and "\n---" not in content[3:]:
            return Answer({"errors": [{"message": "the metadata has no end"}], "warnings": []}, 400)
        return Answer({"errors": [], "warnings": []})

    @route("POST", "/api/repos/create", "user")
    def _create(self, call: Call) -> Answer:
        asked, user = call.json(), call.user
        name = f"{asked.get('organization') or user.name}/{asked['name']}"
        repo = Repo(name, asked.get("type") or "model", asked.get("visibility") == "private")
        if not user.may_write(name):
            raise Refusal(403, f"You don't have the rights to create a {repo.kind} under this namespace")
        found = {"url": f"{self.url}/{repo.key}", "name": name}
        if repo.key in self.repos:
            return Answer({**found, "error": f"You already created this {repo.kind} repo"}, 409)
        self.create(name, repo.kind, repo.private)
        return Answer(found)

    @route("PUT", API + "/settings", "write")
    def _settings(self, call: Call) -> Answer:
        call.repo.private = call.json().get("visibility", "private" if call.repo.private else "public") == "private"
        return Answer({"private": call.repo.private})

    @route("GET", API + f"(?:/revision{REV})?", "read")
    def _info(self, call: Call) -> Answer:
        repo, commit = call.repo, call.repo.at(call["rev"] or "main")
        siblings: list[dict] = [{"rfilename": path} for path in commit.files]
        if "blobs" in call.query:
            for sibling, blob in zip(siblings, commit.files.values(), strict=True):
                sibling.update(size=blob.size, blobId=blob.oid, lfs=blob.lfs)
        dates = {"createdAt": next(iter(repo.commits.values())).date, "lastModified": commit.date}
        about = {
            "id": repo.name,
            "author": repo.name.split("/")[0],
            "sha": commit.oid,
            "private": repo.private,
            **dates,
        }
        return Answer({**about, "gated": False, "disabled": False, "tags": [], "siblings": siblings, "downloads": 0})

    # --- routes: files going up

    @route("POST", API + f"/preupload{REV}", "contribute")
    def _preupload(self, call: Call) -> Answer:
        self._may_commit(call)
        commit, files = call.repo.at(call["rev"]), []
        rules = call.json().get("gitIgnore")
        if rules is None and ".gitignore" in commit.files:
            rules = commit.files[".gitignore"].path.read_text()
        for asked in call.json()["files"]:
            sample, there = base64.b64decode(asked["sample"]), commit.files.get(asked["path"])
            lfs = self._goes_to_lfs(commit, asked["path"], asked["size"], sample)
            known = {"shouldIgnore": is_ignored(asked["path"], rules or ""), **({"oid": there.etag} if there else {})}
            files.append({"path": asked["path"], "uploadMode": "lfs" if lfs else "regular", **known})
        return Answer({"files": files})

    @route("POST", SITE + r"\.git/info/lfs/objects/batch", "contribute")
    def _lfs_batch(self, call: Call) -> Answer:
        return Answer({"transfer": "basic", "objects": [self._lfs_object(call, o) for o in call.json()["objects"]]})

    def _lfs_object(self, call: Call, wanted: dict) -> dict:
        oid, size = wanted["oid"], wanted["size"]
        if self._object(oid).exists():
            return {"oid": oid, "size": size}
        upload: dict = {"href": f"{self.elsewhere}/lfs/whole/{oid}"}
        if size > self.part_bytes:
            parts = range(1, -(-size // self.part_bytes) + 1)
            urls = {f"{part:05d}": f"{self.elsewhere}/lfs/part/{oid}/{part}" for part in parts}
            upload = {"href": f"{self.url}/lfs/complete/{oid}", "header": {"chunk_size": str(self.part_bytes), **urls}}
        verify = {"href": f"{self.url}/{call.repo.key}.git/info/lfs/objects/verify"}
        return {"oid": oid, "size": size, "actions": {"upload": upload, "verify": verify}}

    @route("PUT", r"/lfs/whole/(?P<oid>\w+)", streams=True)
    def _lfs_put(self, call: Call) -> Answer:
        self._receive(call.pieces, call["oid"])
        return Answer()

    @route("PUT", r"/lfs/part/(?P<oid>\w+)/(?P<part>\d+)", streams=True)
    def _lfs_part(self, call: Call) -> Answer:
        part = self._receive(call.pieces)
        return Answer(headers={"ETag": f'"{part.name}"'})

    @route("POST", r"/lfs/complete/(?P<oid>\w+)", streams=True)
    def _lfs_complete(self, call: Call) -> Answer:
        parts = sorted(json.loads(b"".join(call.pieces))["parts"], key=lambda part: part["partNumber"])
        paths = [self._object(part["etag"].strip('"')) for part in parts]
        self._receive((piece for path in paths for piece in pieces_of(path)), call["oid"])
        return Answer({})

    @route("POST", SITE + r"\.git/info/lfs/objects/verify", "contribute")
    def _lfs_verify(self, call: Call) -> Answer:
        asked = call.json()
        if self._lfs_blob(asked["oid"]).size != asked["size"]:
            raise Refusal(400, "the file has another size")
        return Answer({})

    @route("GET", API + f"/xet-write-token{REV}", "contribute")
    def _xet_token(self, call: Call) -> Answer:
        token = next(token for token, user in self.users.items() if user is call.user)
        given = {"casUrl": self.elsewhere, "accessToken": f"xet-{token}", "exp": int(time.time()) + 3600}
        names = ("X-Xet-Cas-Url", "X-Xet-Access-Token", "X-Xet-Token-Expiration")
        return Answer(given, headers=dict(zip(names, map(str, given.values()), strict=True)))

    @route("GET", "/v1/chunks/.*", "cas")
    @route("POST", "/v1/xorb-grants/.*", "cas")
    @route("POST", "/v2/shards", "cas")
    def _xet_without(self, call: Call) -> Answer:
        return Answer({"error": "not here"}, 404)  # hf_xet then takes the first version's route

    @route("POST", r"/v1/xorbs/\w+/(?P<xorb>\w+)", "cas", streams=True)
    def _xet_xorb(self, call: Call) -> Answer:
        place = self._store / f"{call['xorb']}.xorb"
        new = not place.exists()
        self._receive(call.pieces).replace(place)
        return Answer({"was_inserted": new})

    @route("POST", "/v1/shards", "cas", streams=True)
    def _xet_shard(self, call: Call) -> Answer:
        for sha256, places in files_of_shard(b"".join(call.pieces)):
            stored = [(self._store / f"{xorb}.xorb", first, end) for xorb, first, end in places]
            if missing := [path.stem for path, _, _ in stored if not path.exists()]:
                raise Refusal(400, f"the shard names xorbs that are not here: {missing}")
            if not self._object(sha256).exists():
                self._receive((chunk for place in stored for chunk in chunks_of_xorb(*place)), sha256)
        return Answer({"result": 1})

    def _may_commit(self, call: Call) -> None:
        """Commits to a branch need write access; a new pull request, or one's own, does not."""
        pulls = {f"refs/pr/{pull.num}": pull.author for pull in call.repo.discussions.values()}
        own = "create_pr" in call.query or pulls.get(call["rev"]) == call.user.name
        if not own and not call.user.may_write(call.repo.name):
            raise Refusal(403, "You don't have the rights to write to this repository")

    @route("POST", API + f"/commit{REV}", "contribute")
    def _commit(self, call: Call) -> Answer:
        self._may_commit(call)
        repo, lines = call.repo, [json.loads(line) for line in call.body.splitlines()]
        header = next(line["value"] for line in lines if line["key"] == "header")
        ref, base = repo.ref(call["rev"], ("refs/heads/", "")), repo.at(call["rev"])
        if ref is None:
            raise Refusal(400, f"{call['rev']} is not a branch")
        if header.get("parentCommit", base.oid) != base.oid:
            raise Refusal(412, "A commit has happened since. Please refresh and try again.")
        changes = {path: blob for line in lines for path, blob in self._changes(base, line["key"], line["value"])}
        answer = {}
        if "create_pr" in call.query:
            pull = self._discuss(call, header["summary"], header.get("description", ""), True)
            ref = f"refs/pr/{pull.num}"
            answer = {"pullRequestUrl": f"{self.url}/{repo.key}/discussions/{pull.num}"}
        words = header["summary"], header.get("description", ""), call.user.name
        commit = self._land(repo, ref, changes, *words, parent=base.oid)
        return Answer({"commitUrl": f"{self.url}/{repo.key}/commit/{commit.oid}", "commitOid": commit.oid, **answer})

    def _changes(self, base: Commit, key: str, value: dict) -> list[tuple[str, Blob | None]]:
        """What one line of a commit does to which paths."""
        if key == "header":
            return []
        path = value["path"]
        if key == "file":
            return [(path, self._keep(base64.b64decode(value["content"])))]
        if key == "lfsFile":
            return [(path, self._lfs_blob(value["oid"]))]
        inside = path.rstrip("/") + "/" if key == "deletedFolder" else None
        gone = [name for name in base.files if name == path or (inside and name.startswith(inside))]
        if not gone:
            raise Refusal(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
        return [(name, None) for name in gone]

    # --- routes: files coming down

    @route("GET", SITE + f"/resolve{REV}/(?P<path>.+)", "read")
    def _resolve(self, call: Call) -> Answer:
        commit = call.repo.at(call["rev"])
        named = {"X-Repo-Commit": commit.oid}
        blob = commit.files.get(call["path"])
        if blob is None:
            raise Refusal(404, "Entry not found", "EntryNotFound", named)
        if blob.sha256:
            named |= {"X-Linked-Etag": f'"{blob.sha256}"', "X-Linked-Size": str(blob.size)}
            return Answer(b"", 302, {**named, "Location": f"{self.elsewhere}/cdn/{blob.sha256}"})
        return self._from_disk(call, blob.path, {**named, "ETag": f'"{blob.oid}"'})

    @route("GET", r"/cdn/(?P<oid>\w+)")
    def _cdn(self, call: Call) -> Answer:
        return self._from_disk(call, self._lfs_blob(call["oid"]).path, {"ETag": f'"{call["oid"]}"'})

    def _from_disk(self, call: Call, path: Path, headers: dict[str, str]) -> Answer:
        size, wanted = path.stat().st_size, re.fullmatch(r"bytes=(\d+)-", call.headers.get("Range", ""))
        if not wanted:
            return Answer(path, 200, {**headers, "Accept-Ranges": "bytes"})
        start = int(wanted[1])
        if start >= size:
            raise Refusal(416, "Requested range not satisfiable", headers={"Content-Range": f"bytes */{size}"})
        return Answer(path, 206, {**headers, "Content-Range": f"bytes {start}-{size - 1}/{size}"}, start)

    @route("GET", API + f"/tree{REV}(?:/(?P<path>.+))?", "read")
    def _tree(self, call: Call) -> Answer:
        inside = call["path"].strip("/") + "/" if call["path"] else ""
        entries: dict[str, dict] = {}
        for path, blob in call.repo.at(call["rev"]).files.items():
            if path.startswith(inside):
                above = list(Path(path.removeprefix(inside)).parents)[-2::-1]
                for folder in (f"{inside}{parent.as_posix()}" for parent in above):
                    entries.setdefault(folder, describe_folder(folder))
                entries[path] = describe(path, blob)
        if inside and not entries:
            raise Refusal(404, f"{call['path']} does not exist", "EntryNotFound")
        deep = call.query.get("recursive", "").lower() in ("true", "1")
        return self._page(call, [e for path, e in entries.items() if deep or "/" not in path.removeprefix(inside)])

    def _page(self, call: Call, entries: list[dict]) -> Answer:
        """Some of the entries, and the address of the next page."""
        start = int(call.query.get("cursor", 0))
        end = start + self.page_size
        if end >= len(entries):
            return Answer(entries[start:])
        query = "&".join(f"{name}={quote(value)}" for name, value in {**call.query, "cursor": str(end)}.items())
        return Answer(entries[start:end], headers={"Link": f'<{self.url}{call.path}?{query}>; rel="next"'})

    @route("POST", API + f"/paths-info{REV}", "read")
    def _paths_info(self, call: Call) -> Answer:
        files, found = call.repo.at(call["rev"]).files, []
        for path in parse_qs(call.body.decode()).get("paths", []):
            if path in files:
                found.append(describe(path, files[path]))
            elif any(name.startswith(path.rstrip("/") + "/") for name in files):
                found.append(describe_folder(path))
        return Answer(found)

    # --- routes: branches, tags, history

    @route("GET", API + "/refs", "read")
    def _refs(self, call: Call) -> Answer:
        answer: dict[str, list] = {"converts": []}
        for name, prefix in (("branches", "refs/heads/"), ("tags", "refs/tags/"), ("pullRequests", "refs/pr/")):
            below = call.repo.refs_below(prefix).items()
            answer[name] = [{"name": ref, "ref": prefix + ref, "targetCommit": oid} for ref, oid in below]
        return Answer(answer)

    @route("GET", API + f"/commits{REV}", "read")
    def _history(self, call: Call) -> Answer:
        commit, entries = call.repo.at(call["rev"]), []
        while True:
            words = {"title": commit.title, "message": commit.description}
            entries.append({"id": commit.oid, "authors": [{"user": commit.author}], "date": commit.date, **words})
            if commit.parent is None:
                return self._page(call, entries)
            commit = call.repo.commits[commit.parent]

    @route("POST", API + f"/branch{REV}", "write")
    def _branch(self, call: Call) -> Answer:
        return self._new_ref(call.repo, f"refs/heads/{call['rev']}", call.json().get("startingPoint") or "main")

    @route("POST", API + f"/tag{REV}", "write")
    def _tag(self, call: Call) -> Answer:
        return self._new_ref(call.repo, f"refs/tags/{call.json()['tag']}", call["rev"])

    def _new_ref(self, repo: Repo, ref: str, revision: str) -> Answer:
        if ref in repo.refs:
            raise Refusal(409, f"Reference already exists: {ref}")
        repo.refs[ref] = repo.at(revision).oid
        return Answer({})

    @route("DELETE", API + f"/(?P<what>branch|tag){REV}", "write")
    def _delete_ref(self, call: Call) -> Answer:
        ref = f"refs/{'heads' if call['what'] == 'branch' else 'tags'}/{call['rev']}"
        if ref == "refs/heads/main":
            raise Refusal(403, "The main branch cannot be deleted")
        if call.repo.refs.pop(ref, None) is None:
            raise Refusal(404, f"No such reference: {ref}", "RevisionNotFound")
        return Answer({})

    # --- routes: pull requests, collections

    def _discuss(
        self, call: Call, title: str, description: str, is_pull_request: bool, status: str = "open"
    ) -> Discussion:
        num, user = len(call.repo.discussions) + 1, call.user
        discussion = Discussion(num, title, description, user.name, is_pull_request, now(), status)
        call.repo.discussions[num] = discussion
        return discussion

    @route("POST", API + "/discussions", "contribute")
    def _new_discussion(self, call: Call) -> Answer:
        asked = call.json()
        pull = bool(asked.get("pullRequest"))
        made = self._discuss(call, asked["title"], asked["description"], pull, "draft" if pull else "open")
        if pull:
            call.repo.refs[f"refs/pr/{made.num}"] = call.repo.at("main").oid
        return Answer({"num": made.num, "url": f"{self.url}/{call.repo.key}/discussions/{made.num}"})

    @route("GET", API + "/discussions", "read")
    def _discussions(self, call: Call) -> Answer:
        kinds = {"pull_request": (True,), "discussion": (False,)}.get(call.query.get("type", "all"), (True, False))
        asked_for = [
            discussion
            for discussion in call.repo.discussions.values()
            if discussion.is_pull_request in kinds and call.query.get("author") in (None, discussion.author)
        ]
        found = [self._discussion_as_json(call.repo, discussion) for discussion in asked_for]
        return Answer({"count": len(found), "start": 0, "discussions": found})

    @route("GET", API + r"/discussions/(?P<num>\d+)", "read")
    def _discussion(self, call: Call) -> Answer:
        return Answer(self._discussion_as_json(call.repo, self._found(call)))

    @route("POST", API + r"/discussions/(?P<num>\d+)/status", "write")
    def _discussion_status(self, call: Call) -> Answer:
        discussion = self._found(call)
        discussion.status = call.json()["status"]
        event = {"id": "0", "type": "status-change", "createdAt": now(), "author": {"name": call.user.name}}
        return Answer({"newStatus": {**event, "data": {"status": discussion.status}}})

    def _found(self, call: Call) -> Discussion:
        if int(call["num"]) not in call.repo.discussions:
            raise Refusal(404, "no such discussion", "EntryNotFound")
        return call.repo.discussions[int(call["num"])]

    def _discussion_as_json(self, repo: Repo, about: Discussion) -> dict:
        more = {"repo": {"name": repo.name, "type": repo.kind}, "author": {"name": about.author}, "events": []}
        if about.is_pull_request:
            more |= {"changes": {"base": "refs/heads/main"}, "filesWithConflicts": []}
        known = {"num": about.num, "title": about.title, "status": about.status, "createdAt": about.date}
        return {**known, "isPullRequest": about.is_pull_request, **more}

    @route("POST", "/api/collections", "user")
    def _new_collection(self, call: Call) -> Answer:
        asked = call.json()
        slug = f"{asked['namespace']}/{re.sub('[^a-z0-9]+', '-', asked['title'].lower())}-{len(self.collections):024x}"
        owner = {"type": "user", "name": asked["namespace"]}
        about = {"slug": slug, "title": asked["title"], "owner": owner, "private": bool(asked.get("private"))}
        self.collections[slug] = {
            **about,
            **{"description": asked.get("description"), "items": [], "lastUpdated": now()},
            **{"position": 0, "theme": "blue", "upvotes": 0},
        }
        return Answer(self.collections[slug])

    @route("GET", r"/api/collections/(?P<slug>[^/]+/[^/]+)", "read")
    def _collection(self, call: Call) -> Answer:
        if call["slug"] not in self.collections:
            raise Refusal(404, "Collection not found")
        return Answer(self.collections[call["slug"]])

    @route("POST", r"/api/collections/(?P<slug>[^/]+/[^/]+)/items", "user")
    def _collection_item(self, call: Call) -> Answer:
        self._collection(call)
        collection, asked = self.collections[call["slug"]], call.json()
        if not call.user.may_write(call["slug"]):
            raise Refusal(403, "You don't have the rights to change this collection")
        if asked["item"]["id"] in [item["id"] for item in collection["items"]]:
            raise Refusal(409, "Item already in collection")
        place = len(collection["items"])
        note = {"text": asked["note"]} if "note" in asked else None
        collection["items"].append({**asked["item"], "_id": f"{place:024x}", "position": place, "note": note})
        return Answer(collection)


def is_ignored(path: str, rules: str) -> bool:
    """Whether the lines of a `.gitignore` exclude a file; the last line that matches decides."""
    ignored, file = False, PurePosixPath(path)
    for line in rules.splitlines():
        pattern = line.strip().removeprefix("!")
        if not pattern or pattern.startswith("#"):
            continue
        folders = list(file.parents)[:-1]
        parts = pattern.strip("/").split("/")
        for there in folders if pattern.endswith("/") else [file, *folders]:
            found = there.parts if "/" in pattern.rstrip("/") else (there.name,)
            if len(found) == len(parts) and all(map(fnmatch.fnmatchcase, found, parts)):
                ignored = not line.startswith("!")
    return ignored


def describe(path: str, blob: Blob) -> dict:
    """A file as trees list it."""
    entry = {"type": "file", "path": path, "size": blob.size, "oid": blob.oid}
    return {**entry, "lfs": blob.lfs} if blob.lfs else entry


def describe_folder(path: str) -> dict:
    """A folder as trees list it; its id is made up."""
    return {"type": "directory", "path": path, "size": 0, "oid": hashlib.sha1(path.encode()).hexdigest()}


class Server(ThreadingHTTPServer):
    """Knows its open lines, so that it can end with all threads ended and all sockets closed."""

    daemon_threads = False
    request_queue_size = 64
    hub: HubServer

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.lines: set[socket.socket] = set()

    def get_request(self) -> tuple[socket.socket, tuple]:
        """Accept a line and remember it."""
        line, address = super().get_request()
        self.lines.add(line)
        return line, address

    def shutdown_request(self, request: socket.socket) -> None:
        """Close a line and forget it."""
        super().shutdown_request(request)
        self.lines.discard(request)

    def hang_up(self) -> None:
        """End all lines, also those that clients keep open for later."""
        for line in list(self.lines):
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is no failure of ours."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            self.hub._crashes.append(traceback.format_exc())


class Handler(BaseHTTPRequestHandler):
    """One line: HTTP in, `HubServer.answer`, HTTP out."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or each answer waits 40 ms for the client to confirm its headers
    server: Server
    asked: Request

    def serve(self) -> None:
        """Answer one request."""
        address = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(address.query, keep_blank_values=True).items()}
        token = self.headers.get("Authorization", "").removeprefix("Bearer ") or None
        host = self.headers.get("Host", "").split(":")[0]
        self.asked = Request(self.command, unquote(address.path), query, host, token)
        self._body = self._read_body()
        try:
            with self.server.hub.busy():
                self._send(self.server.hub.answer(self, self.asked))
        except (Hangup, ConnectionError):
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
        except Exception:
            self.close_connection = True
            self.server.hub._crashes.append(f"{self.command} {self.path}\n{traceback.format_exc()}")
            self._send(Answer({"error": "the hub server itself failed"}, 500))

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = serve  # noqa: N815

    def pieces(self) -> Iterator[bytes]:
        """The body, as it comes; raises Hangup where it ends early."""
        return self._body

    def drain(self, limit: int | None = None, hang_up: bool = False) -> None:
        """Read the body, or about `limit` bytes of it, and forget it."""
        while limit is None or self.asked.received < limit:
            if next(self._body, None) is None:
                break
        if hang_up:
            raise Hangup

    def _read_body(self) -> Iterator[bytes]:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            while size := int(self.rfile.readline() or b"-1", 16):
                yield from self._read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            yield from self._read(int(self.headers.get("Content-Length") or 0))

    def _read(self, size: int) -> Iterator[bytes]:
        while size:
            piece = self.rfile.read1(min(size, 2**16)) if size > 0 else b""
            if not piece:
                raise Hangup
            size -= len(piece)
            self.asked.received += len(piece)
            yield piece

    def _send(self, answer: Answer) -> None:
        body = answer.body
        if isinstance(body, dict | list):
            body = json.dumps(body).encode()
        size = len(body) if isinstance(body, bytes) else body.stat().st_size - answer.start
        self.send_response(answer.status)
        kind = "application/json" if isinstance(answer.body, dict | list) else "application/octet-stream"
        for name, value in {"Content-Type": kind, "Content-Length": str(size), **answer.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.asked.status = answer.status
        if self.command == "HEAD":
            return
        if isinstance(body, bytes):
            self.wfile.write(body)
        else:
            with body.open("rb") as file:
                file.seek(answer.start)
                shutil.copyfileobj(file, self.wfile, 2**20)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: `HubServer.requests` is the log."""
