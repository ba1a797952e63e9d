"""Failed calls to the Hub as errors of one line, and why they failed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
from huggingface_hub import constants
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RevisionNotFoundError,
)

from gpt2small_hf.errors import CommandError, UsageError
from gpt2small_hf.publishing.arguments import AuthError
from gpt2small_hf.publishing.client import (
    TRANSIENT,
    Retries,
    call_name,
    connection_reason,
    is_commit,
    public_url,
    status_reason,
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
    except OfflineModeIsEnabled:
        raise UsageError("HF_HUB_OFFLINE is set, so nothing can be pushed. Unset it, or add --dry_run.") from None
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
