"""The server: connections, access rights and dispatch to the routes."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from hub import api, discussions, files, lfs, xet  # noqa: F401  # enter their routes in ROUTES
from hub.faults import Faults
from hub.records import OTHER_TOKEN, READ_TOKEN, TOKEN, Repo, User
from hub.routing import ROUTES, Answer, Call, Hangup, Refusal, Request
from hub.storage import Storage


class HubServer(Storage, Faults):
    """See the package. State may be read at any time; change it by the public methods, or before a client starts.

    `requests` is the log in order of arrival, `landed` all commits in order.
    """

    part_bytes = 20 * 2**20  # LFS files above this go up in parts of this size
    page_size = 1000  # entries of a tree or history per page

    def __init__(self) -> None:
        Storage.__init__(self)
        Faults.__init__(self)
        self.users = {TOKEN: User("you"), READ_TOKEN: User("you", "read"), OTHER_TOKEN: User("other")}
        self.requests: list[Request] = []
        self.unknown_routes: list[str] = []
        self._crashes: list[str] = []
        self._n_busy = 0
        self._idle = threading.Condition()

    def __enter__(self) -> HubServer:
        self._temporary = tempfile.TemporaryDirectory(prefix="hub-")
        self.folder = Path(self._temporary.name)
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
        self._temporary.cleanup()
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

    def stop_faults(self) -> None:
        """Let further requests go well, and do what stands still: late, when nobody waits for an answer any more."""
        with self._lock:
            self._faults.clear()
        for pause in self._pauses:
            pause.release()
        self.settle()

    def settle(self, timeout_seconds: float = 30) -> None:
        """Wait until no request is in work, say of a client that was killed.

        Raises: TimeoutError.
        """
        with self._idle:
            if not self._idle.wait_for(lambda: self._n_busy == 0, timeout_seconds):
                raise TimeoutError(f"{self._n_busy} requests are still in work")

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """A request is in work."""
        with self._idle:
            self._n_busy += 1
        try:
            yield
        finally:
            with self._idle:
                self._n_busy -= 1
                self._idle.notify_all()

    def answer(self, handler: Handler, request: Request) -> Answer:
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

    def _work(self, handler: Handler, request: Request) -> Answer:
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
            return entry[2](self, call)
        call.body = b"".join(call.pieces)
        with self._lock:
            return entry[2](self, call)

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
