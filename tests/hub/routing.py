"""Requests and answers of the test Hub, and the table of routes."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from email.message import Message
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hub.records import Repo, User

ROUTES: list[tuple[str, re.Pattern[str], Callable, str, bool]] = []
API = r"/api/(?P<kind>model|dataset|space)s/(?P<name>[^/]+/[^/]+)"
SITE = r"/(?:(?P<kind>dataset|space)s/)?(?P<name>[^/]+/[^/]+?)"
REV = r"/(?P<rev>[^/]+)"


def route(method: str, pattern: str, access: str = "", streams: bool = False) -> Callable:
    """Enter a function of a `HubServer` and a `Call` in the table of routes.

    A route that `streams` reads its body itself, without the lock.

    `access`: "" needs no token; "user" a known one; "read", "contribute" (read, and a token that is not read-only) and
    "write" concern the repository that the address names; "cas" wants a token made by the Xet token route.
    """

    def enter(function: Callable) -> Callable:
        ROUTES.append((method, re.compile(pattern), function, access, streams))
        return function

    return enter


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
