# pyright: strict
"""An id of the Hub → whether its files can be had, in one request, before a download that repeats for half a minute."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gpt2small_hf.errors import UsageError

TIMEOUT_SECONDS = 10


def check_on_hub(name: str, files: Sequence[str], *, where: str = "") -> None:
    """Check that the cache has one of `files` of a model, or that the Hub has the model.

    Raises: UsageError that starts with `where`, in one line: the id, the reason, and the fix.
    """
    from httpx2 import HTTPError
    from huggingface_hub import HfApi, try_to_load_from_cache

    if any(isinstance(try_to_load_from_cache(name, file), str) for file in files):
        return
    try:
        HfApi().model_info(name, timeout=TIMEOUT_SECONDS)
    except (OSError, ValueError, HTTPError) as error:
        raise UsageError(f"{where}{name} does not exist in {Path.cwd()}, and {why_not(error)}") from None


def why_not(error: Exception) -> str:
    """Return why a request to the Hub failed, and what to do."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError

    if isinstance(error, OfflineModeIsEnabled):
        return "the Hub is not asked because HF_HUB_OFFLINE is set. Unset it, or name a folder."
    first = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(". ")
    if isinstance(error, RepositoryNotFoundError):
        return "the Hub has no such model, or it is private. Check the id, or log in: hf auth login"
    if isinstance(error, (HfHubHTTPError, ValueError)):
        return f"the Hub gave no model ({first}). Check the id."
    return f"the Hub cannot be reached ({first}). Check the network, or name a folder."
