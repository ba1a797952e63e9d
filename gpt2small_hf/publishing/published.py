"""`published.json` of a run: where it was published, one record for each repository and branch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpt2small_hf.errors import UsageError
from gpt2small_hf.runs.files import read_json


def read_published(path: Path) -> dict[str, Any]:
    """Return the record of a run's publications, empty if there is none. Raises: UsageError for a broken record."""
    try:
        found = read_json(path) if path.is_file() else {}
    except UsageError:
        found = None
    if not isinstance(found, dict):
        raise UsageError(f"{path} is broken. Delete it: it only remembers where this run was published.")
    return found


def all_records(published: dict[str, Any]) -> list[dict[str, Any]]:
    """List all records of `published.json`."""
    return [published, *published.get("others", [])] if published else []


def find_record(published: dict[str, Any], repo_id: str, revision: str = "main") -> dict[str, Any]:
    """Return the record of one repository and branch, empty if there is none."""
    for record in all_records(published):
        if (record.get("repo_id"), record.get("revision")) == (repo_id, revision) and not record.get("pull_request"):
            return record
    return {}


def merge_records(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Keep the newest record of each repository and branch, the model itself first, the rest as its `others`."""
    latest: dict[tuple[Any, ...], dict[str, Any]] = {}
    for record in filter(None, records):
        key = (record["repo_id"], record["revision"], record["pull_request"])
        latest.setdefault(key, {name: value for name, value in record.items() if name != "others"})
    found = list(latest.values())
    first = next((record for record in found if is_main_model(record)), found[0])
    return {**first, "others": [record for record in found if record is not first]}


def is_main_model(record: dict[str, Any]) -> bool:
    """Whether the record is of what users load who name the repository alone, and not of a native twin."""
    return record["revision"] == "main" and not record["native"] and not record["pull_request"]
