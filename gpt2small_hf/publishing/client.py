"""The HTTP client under `huggingface_hub`: each call has a time-out and is retried after a temporary failure.

`huggingface_hub` sets no time-out for most calls and retries only some of them. `install_client` gives it this client,
which does both for all calls. Two exceptions: hf_xet has its own client (XET), and a commit is never retried here,
because `commit.commit_folder` must first find out whether it was made. `command_errors` turns what still fails into an
error of one line.
"""

from __future__ import annotations

import _thread
import json
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from functools import cache, partial
from typing import Any
from urllib.parse import urlsplit

import httpx2
from huggingface_hub import constants, set_client_factory
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import get_session, parse_ratelimit_headers

from gpt2small_hf.errors import CommandError, UsageError
from gpt2small_hf.publishing.arguments import AuthError

RETRY_WAITS_SECONDS = (1, 2, 4, 8)
"""Seconds before each retry, or longer if the Hub asks for it: at most five attempts."""
MAX_WAIT_SECONDS = 300
"""Maximum seconds that one call waits in total: the Hub's rate limits are per five minutes."""
SLOW_FACTOR = 6
"""Multiple of HF_HUB_DOWNLOAD_TIMEOUT (10 s) after which a commit or a storage call times out."""
MIN_UPLOAD_RATE = 100_000
"""Bytes per second that an upload by hf_xet must reach, after ten such time-outs."""
TRANSIENT = {408, 429, 500, 502, 503, 504}
COMMIT = re.compile(r"/api/\w+/[^/]+/[^/]+/commit/")
"""Path of a commit. An account or a repository may also be named `commit`."""
MAX_ASKED_SECONDS = 1e9
"""Upper bound, in seconds, on the wait that a server asks for."""
XET = {"HF_XET_CLIENT_RETRY_BASE_DELAY": "1s"}
"""Environment of hf_xet. It waits 30 s for an answer and repeats a call, by default with pauses of up to 90 s."""


class RetriesExhaustedError(httpx2.TransportError):
    """All attempts of a call failed. `huggingface_hub` does not retry this error."""

    def __init__(self, why: str, request: httpx2.Request, attempts: int) -> None:
        super().__init__(f"{why} ({call_name(request)}, {attempts} attempts)", request=request)


class WebPageError(httpx2.DecodingError):
    """The response is a web page: a proxy or login page answered instead of the Hub."""


class Retries:
    """The attempts of one call."""

    def __init__(self) -> None:
        self.failed, self.waited = 0, 0.0

    def wait(self, call: str, why: str, headers: Mapping[str, str]) -> bool:
        """Wait before another attempt, and announce it. Returns: False at once if there is none left."""
        if self.failed == len(RETRY_WAITS_SECONDS):
            return False
        seconds = max(RETRY_WAITS_SECONDS[self.failed], requested_wait_seconds(headers))
        if self.waited + seconds > MAX_WAIT_SECONDS:
            return False
        self.failed, self.waited = self.failed + 1, self.waited + seconds
        print(f"{call}: {why}; retrying in {seconds:g} s", file=sys.stderr, flush=True)
        time.sleep(seconds)
        return True


class Client(httpx2.Client):
    """Sets a time-out for each call and retries it. Raises: RetriesExhaustedError, WebPageError."""

    has_connected = False
    """Whether any server has answered. Until then a refused connection is an error of the address or the network."""

    def build_request(self, method: str, url: httpx2.URL | str, **given: Any) -> httpx2.Request:
        """Set a time-out where the caller sets none, and record the position in a file to be sent."""
        if not isinstance(given.get("timeout"), (int, float, httpx2.Timeout)):
            given["timeout"] = timeout_for(httpx2.URL(url))
        request = super().build_request(method, url, **given)
        file: Any = given.get("data")
        if hasattr(file, "seek"):
            request.extensions["file"] = (file, file.tell())
        return request

    def send(self, request: httpx2.Request, **how: Any) -> httpx2.Response:
        """Send a request, and retry it after temporary failures."""
        if is_commit(request):
            response = super().send(request, **how)
            check_not_web_page(response)
            return response
        retries = Retries()
        while True:
            try:
                response = super().send(request, **how)
                self.has_connected = True
                check_not_web_page(response)
                if response.status_code not in TRANSIENT:
                    return response
                response.close()
                if not retries.wait(call_name(request), status_reason(response), response.headers):
                    raise RetriesExhaustedError(status_reason(response), request, retries.failed + 1)
            except (httpx2.TimeoutException, httpx2.NetworkError, httpx2.RemoteProtocolError) as error:
                if isinstance(error, httpx2.ConnectError) and not self.has_connected:
                    raise
                if not retries.wait(call_name(request), connection_reason(error), {}):
                    raise RetriesExhaustedError(connection_reason(error), request, retries.failed + 1) from error
            if file := request.extensions.get("file"):
                file[0].seek(file[1])


@cache
def install_client() -> None:
    """Give huggingface_hub this client.

    Raises: UsageError if the environment names an unusable proxy or certificate file; so does each new client.
    """
    for variable, limit in XET.items():
        os.environ.setdefault(variable, limit)
    with connection_errors():
        hooks = get_session().event_hooks  # those of huggingface_hub's own client: offline mode and request ids
    set_client_factory(partial(new_client, hooks))
    get_session()


def new_client(hooks: dict[str, list[Callable[..., Any]]]) -> Client:
    """Return a client for `huggingface_hub`. Raises: as `install_client`."""
    with connection_errors():
        return Client(event_hooks=hooks, follow_redirects=True, timeout=None)


@contextmanager
def connection_errors() -> Iterator[None]:
    """Raise: UsageError if no client can be made because of the environment's proxies or certificates."""
    try:
        yield
    except (ImportError, OSError, ValueError, httpx2.InvalidURL) as error:
        proxies = [name for name in os.environ if name.lower() in ("all_proxy", "http_proxy", "https_proxy")]
        certificates = [name for name in os.environ if name in ("SSL_CERT_FILE", "SSL_CERT_DIR")]
        # The text of an invalid address may have a part of the password in it.
        why = "invalid address" if isinstance(error, httpx2.InvalidURL) else " ".join(str(error).split())
        raise UsageError(
            f"no connection to the Hub can be made ({why}). Check "
            f"{', '.join([*proxies, *certificates]) or 'the certificates of this Python'}."
        ) from None


def timeout_for(url: httpx2.URL) -> httpx2.Timeout:
    """Return the time-out between two received bytes. A transfer as a whole has no limit."""
    seconds = constants.HF_HUB_DOWNLOAD_TIMEOUT
    path = path_on_hub(url)
    is_slow = COMMIT.match(path) or not path.startswith("/api/")
    return httpx2.Timeout(seconds * SLOW_FACTOR if is_slow else seconds, connect=seconds)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Interrupt a block that runs too long. For hf_xet, which waits forever for the response to a shard.

    In the main thread only. Raises: TimeoutError.
    """
    is_late = threading.Event()

    def interrupt() -> None:
        is_late.set()
        _thread.interrupt_main()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    except KeyboardInterrupt:
        if not is_late.is_set():
            raise
        raise TimeoutError(f"hf_xet did not end within {seconds:,.0f} s") from None
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, before)


def is_commit(request: httpx2.Request) -> bool:
    """Return whether a request makes a commit."""
    return request.method == "POST" and COMMIT.match(path_on_hub(request.url)) is not None


def path_on_hub(url: httpx2.URL) -> str:
    """Return the path of a call without that of HF_ENDPOINT."""
    return url.path.removeprefix(urlsplit(constants.ENDPOINT).path.rstrip("/"))


def public_url(address: str) -> str:
    """Return an address that may be printed: without user, password and query (a signature)."""
    return re.sub(r"^(\w+://)?.*@", r"\1", address.split("?")[0])


def call_name(request: httpx2.Request) -> str:
    """Return method, host and path of a request, without its query, which may contain a signature."""
    host = "" if str(request.url).startswith(constants.ENDPOINT) else request.url.host
    return f"{request.method} {host}{request.url.path}"[:100]


def connection_reason(error: httpx2.TransportError) -> str:
    """Return in one line why there is no response."""
    host = f"{error.request.url.scheme}://{error.request.url.netloc.decode()}"
    if isinstance(error, httpx2.TimeoutException):
        limits = error.request.extensions["timeout"]
        seconds = limits["connect" if isinstance(error, httpx2.ConnectTimeout) else "read"]
        return f"no answer from {host} within {seconds:g} s"
    return f"no connection to {host} ({' '.join(str(error).split()) or type(error).__name__})"


def status_reason(response: httpx2.Response) -> str:
    """Return the status of a temporary failure, the Hub's message and the wait it asks for, in one line."""
    seconds = requested_wait_seconds(response.headers)
    message = " ".join(response.headers.get("X-Error-Message", "").split())[:200]
    words = f" ({message.rstrip('. ')})" if message else ""
    return f"the Hub answered {response.status_code}{words}" + (f" and asks to wait {seconds:g} s" if seconds else "")


def requested_wait_seconds(headers: Mapping[str, str]) -> float:
    """Return the seconds a server asks to wait: `Retry-After` in seconds or as a date, or an exhausted `RateLimit`."""
    asked = [0.0]
    after = headers.get("Retry-After", "").strip()
    if after.isdecimal():
        asked.append(float(after))
    elif after:
        with suppress(TypeError, ValueError):  # not a date either
            asked.append((parsedate_to_datetime(after) - datetime.now(timezone.utc)).total_seconds())
    limit = parse_ratelimit_headers(headers)
    if limit is not None and limit.remaining == 0:
        asked.append(limit.reset_in_seconds)
    return math.ceil(min(max(asked), MAX_ASKED_SECONDS))


def check_not_web_page(response: httpx2.Response) -> None:
    """Raise: WebPageError for a web page with a status of success, which neither the Hub nor its storage sends."""
    if response.is_success and "html" in response.headers.get("Content-Type", ""):
        response.close()
        raise WebPageError(
            f"the answer is a web page ({call_name(response.request)}), perhaps the login page of a network or proxy. "
            f"Open {public_url(constants.ENDPOINT)} in a browser, and check HF_ENDPOINT",
            request=response.request,
        )


MALFORMED = (ValueError, KeyError, TypeError, AttributeError)
"""Errors from parsing a response that is not JSON, or JSON of another form than the Hub's."""


class UploadError(CommandError):
    """The push failed. Running the same command again resumes it."""

    status = 4


class VerifyError(CommandError):
    """The published files differ from the staged ones or do not load. Nothing was tagged or made public."""

    status = 5


@contextmanager
def command_errors(what: str) -> Iterator[None]:
    """Turn errors of the Hub during `what` into one line. Raises: AuthError, UploadError, UsageError."""
    try:
        yield
    except RevisionNotFoundError as error:
        raise UploadError(
            f"{what}: {error_reason(error)}. The repository has changed; run the same command again."
        ) from None
    except HfHubHTTPError as error:
        status = http_status(error)
        if status == 403 and error.server_message:
            raise AuthError(f"{what}: the Hub refused it: {error_reason(error)}") from None
        if status in (401, 403, 404):
            raise AuthError(
                f"{what}: the Hub does not allow it ({error_reason(error)}). Check the name, and that the token has "
                f"write access: {public_url(constants.ENDPOINT)}/settings/tokens"
            ) from None
        raise UploadError(f"{what}: {error_reason(error)}") from None
    except httpx2.InvalidURL:  # whose message may quote a password
        raise UsageError(f"{what}: {public_url(constants.ENDPOINT)} is not an address. Check HF_ENDPOINT.") from None
    except (httpx2.HTTPError, OSError, *MALFORMED) as error:
        raise UploadError(f"{what}: {error_reason(error)}. Run the same command to continue.") from None


def http_status(error: Exception) -> int | None:
    response = getattr(error, "response", None)
    return None if response is None else response.status_code


def failed_request(error: Exception) -> httpx2.Request | None:
    return getattr(error, "_request", None) or getattr(getattr(error, "response", None), "request", None)


def is_commit_error(error: Exception) -> bool:
    request = failed_request(error)
    return request is not None and is_commit(request)


def is_unanswered_commit(error: Exception) -> bool:
    """Return whether a commit was requested and its outcome is unknown."""
    lost = isinstance(error, httpx2.TransportError) and not isinstance(error, httpx2.ConnectError)
    return lost and is_commit_error(error)


def wait_before_retry(retries: Retries, error: Exception) -> bool:
    """Wait before a retry. Returns: False if there are no attempts left."""
    request, response = failed_request(error), getattr(error, "response", None)
    assert request is not None
    return retries.wait(call_name(request), error_reason(error), {} if response is None else response.headers)


def error_reason(error: BaseException) -> str:
    """Return the reason of an error in one line, without secrets: upload addresses contain signatures."""
    cause, response = error.__cause__, getattr(error, "response", None)
    if isinstance(error, LocalEntryNotFoundError) and cause is not None:  # raised for any failed download
        return error_reason(cause)
    if isinstance(error, RuntimeError) and isinstance(cause, Exception):  # raised for any failed upload
        return f"{str(error).rstrip('. ')} ({error_reason(cause)})"
    message = getattr(error, "server_message", None) or str(error)
    if response is not None and response.status_code in TRANSIENT:
        message = status_reason(response)
    elif response is not None and response.status_code == 403 and not getattr(error, "server_message", None):
        message = "the Hub answered 403"
    elif isinstance(error, (httpx2.TimeoutException, httpx2.NetworkError, httpx2.RemoteProtocolError)):
        message = connection_reason(error)
    elif type(error) is ConnectionError:  # hf_xet's
        message = f"storage (Xet): {message}"
    elif isinstance(error, (json.JSONDecodeError, *MALFORMED[1:])):
        message = f"{public_url(constants.ENDPOINT)} did not answer as the Hub does ({type(error).__name__}: {message})"
    line = re.sub(r"https?://\S+", lambda match: public_url(match[0]), " ".join(message.split()))
    return line[:300].rstrip(". ")
