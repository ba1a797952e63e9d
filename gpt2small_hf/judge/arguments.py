# pyright: strict
"""Flags of `judge`, and where its files are."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from gpt2small_hf.config.parser import require_at_least, setting
from gpt2small_hf.errors import UsageError
from gpt2small_hf.runs.layout import File

KEY_VARIABLE = "OPENAI_API_KEY"
"""Environment variable with the API key. The key is never read from anywhere else, nor written."""


@dataclass(frozen=True)
class JudgeArguments:
    """The judge, the number of its calls, and the controls."""

    _argument_group_name = "judge"

    judge_model: str = field(metadata={"help": "Name of the judge at the endpoint."})
    base_url: str = setting(
        "https://api.openai.com/v1",
        "OpenAI-compatible endpoint, such as http://localhost:8000/v1 of `transformers serve`, vLLM or llama.cpp.",
    )
    runs: int = setting(3, "Number of times that each question is judged, each time in another order of the answers.")
    output: Path = setting(Path("judgement"), "Folder to write. The same command resumes there.")
    limit: int | None = setting(None, "Number of questions, the first of the files; unset: all.")
    seed: int = setting(0, "Seed of the orders and of the shuffled control.")
    baseline: str | None = setting(None, "Label of the model that others are compared with; unset: the first one.")
    no_controls: bool = setting(False, "Judge without control answers.")
    dry_run: bool = setting(False, "Print the number of calls, their cost and one prompt, without any call.")
    price_in: float | None = setting(None, "Price of a million prompt tokens.")
    price_out: float | None = setting(None, "Price of a million generated tokens.")
    concurrency: int = setting(4, "Number of calls at a time.")
    temperature: float | None = setting(None, "Sampling temperature; unset: the endpoint's default.")
    timeout: float = setting(300.0, "Seconds without a reply after which a call is repeated.")
    backoff: float = setting(1.0, "Seconds before the first retry of a failed call; doubled for each further one.")

    def __post_init__(self) -> None:
        require_at_least(self, dict.fromkeys(("runs", "limit", "concurrency"), 1))
        require_at_least(self, dict.fromkeys(("seed", "price_in", "price_out", "temperature", "timeout", "backoff"), 0))
        if (self.price_in is None) != (self.price_out is None):
            raise UsageError("--price_in and --price_out are given together: one is missing.")
        try:
            address = urlsplit(self.base_url)
            is_valid = address.scheme in ("http", "https") and address.hostname and (address.port or 1)
        except ValueError:
            is_valid = False
        else:
            if address.username or address.password or address.query or address.fragment:
                raise UsageError(
                    "--base_url contains a user, a password or a query, and is recorded in files. Give the address "
                    f"alone; the API key is read from {KEY_VARIABLE}."
                )
        if not is_valid:
            raise UsageError(f"--base_url {self.base_url!r} is not an address such as http://localhost:8000/v1.")

    def api_key(self) -> str | None:
        """Return the key of the environment. Raises: UsageError without one for https, which hosted endpoints use."""
        key = os.environ.get(KEY_VARIABLE, "").strip()
        if not key and self.base_url.startswith("https:"):
            raise UsageError(
                f"{KEY_VARIABLE} is not set, and {self.base_url} is a hosted endpoint. Set it to your API key, or "
                "to none if the endpoint needs no key; for a server on this machine give --base_url."
            )
        if not (key.isascii() and key.isprintable()):
            raise UsageError(f"{KEY_VARIABLE} contains characters that no API key has. Set it again.")
        return key or None


@dataclass(frozen=True)
class JudgementFolder:
    """The files of a judgement."""

    root: Path

    calls = File("calls.jsonl")
    """A header with all settings, then one line for each call: prompt, raw reply and what was measured."""
    scores = File("scores.json")
    """Scores, intervals, differences and controls, with questions and answers."""
    table = File("table.md")
    """The results as a page."""
