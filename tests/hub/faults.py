"""What can go wrong at the test Hub: statuses, closed connections, silence and pauses."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hub.routing import Answer, Hangup, Request

if TYPE_CHECKING:
    from hub.server import Handler

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
class Fault:
    """Something that goes wrong `times` times (-1: always), after `after` matching requests went well."""

    method: str | None
    path: str
    times: int
    after: int
    act: Callable[[Handler], Answer | None] | None = None  # in place of the work
    act_after: Callable[[], None] | None = None  # when the work is done, before the answer is sent

    def strikes(self, request: Request) -> bool:
        """Whether this request is hit; counts it."""
        if self.method not in (None, request.method) or not re.search(self.path, request.path) or self.times == 0:
            return False
        self.after -= 1
        self.times -= self.after < 0
        return self.after < 0


class Pause:
    """A paused request: wait for `reached`, then call `release()`, or `hang_up()` to close the line."""

    def __init__(self) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        self._hang_up = False

    def release(self) -> None:
        """Let the request continue."""
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


class Faults:
    """The faults that tests inject. `path` is a regular expression, searched for in the unquoted path."""

    def __init__(self) -> None:
        self._faults: list[Fault] = []
        self._pauses: list[Pause] = []

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

    def drop(self, path: str, method: str | None = None, after_bytes: int = 0, times: int = 1, after: int = 0) -> None:
        """Read this number of bytes of the request's body, do nothing, and close the line."""
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
