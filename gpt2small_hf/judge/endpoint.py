# pyright: strict
"""Calls to an OpenAI-compatible endpoint, repeated after temporary failures.

Two requests of the API are used, so httpx2, which huggingface_hub needs anyway, is enough.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any, NoReturn

import httpx2

from gpt2small_hf.errors import CommandError, UsageError
from gpt2small_hf.formatting import one_line
from gpt2small_hf.judge.arguments import KEY_VARIABLE, JudgeArguments
from gpt2small_hf.runs.files import parse_json

MAX_ATTEMPTS = 6
"""Of a call. With the default --backoff the waits between them are 1, 2, 4, 8 and 16 seconds."""
MAX_WAIT_SECONDS = 600.0
"""Longest wait that an endpoint may ask for."""
TRANSIENT = {408, 409, 425, 429, 500, 502, 503, 504, 529}
KEY_IS_WRONG = {401, 403}
UNSUPPORTED = {400, 422}
"""How endpoints answer a request with a field that they do not have."""
SHORTEST_SECRET = 16
"""Characters; shorter keys, such as `none` for a local server, are words that replies may contain."""


class EndpointError(CommandError):
    """The endpoint failed, or refuses every call. Calls that it answered are stored."""

    status = 1


class RefusedError(Exception):
    """The endpoint refused one call."""


@dataclass(frozen=True)
class Reply:
    """What the endpoint answered, and what it took."""

    text: str
    finish_reason: str | None
    model: str | None
    system_fingerprint: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    attempts: int
    seconds: float


class Endpoint:
    """An OpenAI-compatible endpoint with one model.

    Args:
        settings: address, model, temperature, time-out and first wait.
        api_key: sent in the Authorization header, and removed from all that the endpoint returns.
    """

    def __init__(self, settings: JudgeArguments, api_key: str | None) -> None:
        self.settings = settings
        self._key = api_key
        self._http = httpx2.Client(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx2.Timeout(settings.timeout, connect=min(10.0, settings.timeout)),
            limits=httpx2.Limits(max_connections=settings.concurrency),
        )
        self.optional = ["response_format", "seed"]
        """Fields that some endpoints do not have; the first call finds out."""

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def check(self) -> None:
        """Raise: UsageError if the endpoint cannot be reached, or refuses the key. Costs nothing."""
        try:
            response = self._http.get(self._address("models"))
        except httpx2.TransportError as error:
            raise UsageError(
                f"--base_url {self.settings.base_url} cannot be reached ({self._reason(error)}). Start the server, or "
                "check the address."
            ) from None
        if response.status_code in KEY_IS_WRONG:
            self._refuse_key(response)

    def ask(self, prompt: str, response_format: Mapping[str, Any], seed: int, *, is_first: bool = False) -> Reply:
        """Send one prompt.

        Args:
            prompt: the user's message.
            response_format: schema of the reply.
            seed: of the endpoint's sampling.
            is_first: whether fields that the endpoint does not have may be left out, from then on.

        Raises: EndpointError after the last attempt, or if the first call is refused; RefusedError if a later one is.
        """
        body: dict[str, Any] = {
            "model": self.settings.judge_model,
            "messages": [{"role": "user", "content": prompt}],
            "response_format": response_format,
            "seed": seed,
        }
        if self.settings.temperature is not None:
            body["temperature"] = self.settings.temperature
        while True:
            dropped = {"response_format", "seed"} - set(self.optional)
            reply = self._post({key: value for key, value in body.items() if key not in dropped})
            if isinstance(reply, Reply):
                return reply
            if reply.status_code in KEY_IS_WRONG:
                self._refuse_key(reply)
            if not is_first:
                raise RefusedError(self._status(reply))
            if reply.status_code not in UNSUPPORTED or not self.optional:
                raise EndpointError(
                    f"{self.settings.base_url} refuses the first call to {self.settings.judge_model}: "
                    f"{self._status(reply)}. Check --judge_model and --base_url."
                )
            self.optional.pop(0)

    def _post(self, body: Mapping[str, Any]) -> Reply | httpx2.Response:
        """Return the reply, or the response that refuses the call. Raises: EndpointError after the last attempt."""
        why, attempt = "", 0
        for attempt in range(1, MAX_ATTEMPTS + 1):
            wait = self.settings.backoff * 2 ** (attempt - 1)
            started = time.monotonic()
            try:
                response = self._http.post(self._address("chat/completions"), json=body)
            except httpx2.TransportError as error:
                why = self._reason(error)
            else:
                if response.is_success:
                    with suppress(ValueError, LookupError, TypeError, AttributeError):
                        return self._read(response, attempt, time.monotonic() - started)
                    why = f"the response is not a chat completion: {self._text(response)}"
                elif response.status_code not in TRANSIENT:
                    return response
                else:
                    why = self._status(response)
                    wait = retry_after_seconds(response.headers, wait)
            if attempt < MAX_ATTEMPTS and wait <= MAX_WAIT_SECONDS:
                time.sleep(wait)
            else:
                break
        raise EndpointError(
            f"{self.settings.base_url} failed {attempt} times: {why}. Run the same command to resume after the last "
            "call that it answered."
        )

    def _read(self, response: httpx2.Response, attempts: int, seconds: float) -> Reply:
        """Read a chat completion. Raises: ValueError, LookupError, TypeError, AttributeError if it is not one."""
        found: dict[str, Any] = parse_json(self._redacted(response.text))
        choice: dict[str, Any] = found["choices"][0]
        usage: dict[str, Any] = found.get("usage") or {}
        return Reply(
            text=str(choice["message"]["content"] or ""),
            finish_reason=choice.get("finish_reason"),
            model=found.get("model"),
            system_fingerprint=found.get("system_fingerprint"),
            prompt_tokens=usage.get("prompt_tokens"),
            completion_tokens=usage.get("completion_tokens"),
            attempts=attempts,
            seconds=seconds,
        )

    def _address(self, path: str) -> str:
        return f"{self.settings.base_url.rstrip('/')}/{path}"

    def _refuse_key(self, response: httpx2.Response) -> NoReturn:
        raise UsageError(f"{self.settings.base_url} refuses the key of {KEY_VARIABLE}: {self._status(response)}.")

    def _redacted(self, text: str) -> str:
        """Remove the key, which some endpoints repeat in errors."""
        return text.replace(self._key, "[API key]") if self._key and len(self._key) >= SHORTEST_SECRET else text

    def _text(self, response: httpx2.Response) -> str:
        return one_line(self._redacted(response.text).strip(), 300)

    def _status(self, response: httpx2.Response) -> str:
        try:
            message = response.json()["error"]["message"]
        except (ValueError, LookupError, TypeError):
            message = response.text
        return f"HTTP {response.status_code}, {one_line(self._redacted(str(message)).strip(), 300)}"

    def _reason(self, error: httpx2.TransportError) -> str:
        if isinstance(error, httpx2.TimeoutException):
            return f"no reply in {self.settings.timeout:g} s"
        return self._redacted(" ".join(str(error).split())) or type(error).__name__


def retry_after_seconds(headers: Mapping[str, str], otherwise: float) -> float:
    """Return the seconds of a Retry-After header, which are a number or a date; `otherwise` without a valid one."""
    value = headers.get("retry-after", "")
    with suppress(ValueError):
        return max(0.0, float(value))
    with suppress(ValueError, TypeError):
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(timezone.utc)).total_seconds())
    return otherwise
