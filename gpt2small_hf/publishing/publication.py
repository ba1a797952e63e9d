"""How a model is published, and `published.json`: where a run was, one record for each repository and branch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpt2small_hf.errors import UsageError
from gpt2small_hf.publishing.license import License
from gpt2small_hf.runs.files import read_json
from gpt2small_hf.runs.reader import Run
from gpt2small_hf.runs.typed_json import SCHEMA_VERSION, Json, Part


@dataclass(frozen=True)
class Publication:
    """How a model is published, as far as its card depends on it."""

    repo_id: str
    pin: str | None = None
    """The tag or branch that the card's code names."""
    pin_moves: bool = False
    """Whether `pin` is a branch."""
    native: bool = False
    """Whether it is published as transformers' own GPT-2, which needs no remote code."""
    twin: str | None = None
    """The repository of the same weights in the other form."""
    license: License | None = None
    languages: list[str] = field(default_factory=list)
    baseline: Run | None = None
    branches: list[dict[str, Any]] = field(default_factory=list)
    """`revision`, `step`, `tokens` and `loss` of the checkpoints that are published too."""
    private: frozenset[str] = frozenset()
    """Repositories that are not public: the card does not link them."""
    developers: list[str] = field(default_factory=list)
    """Who trained the model, as given."""
    contact: str | None = None
    origin: str | None = None
    """Where weights that were not trained here come from: a Hub id or an address."""
    questions: bool = False
    """Whether the card has questions of the run's chats, with the model's answers."""

    @property
    def namespace(self) -> str:
        """The account that publishes."""
        return self.repo_id.split("/")[0]


@dataclass(frozen=True, kw_only=True)
class PublishedCommit(Part):
    """A commit of a staged folder, and how it was checked."""

    repo_id: str
    revision: str = "main"
    native: bool = False
    """Whether it is transformers' own GPT-2."""
    tag: str | None = None
    files: dict[str, Json] = field(default_factory=dict[str, Json])
    """Size and SHA-256 of each."""
    allowed_secrets: list[str] = field(default_factory=list[str])
    logit_difference: float | None = None
    """Of the staged model and the run's."""
    checked_with: dict[str, str] = field(default_factory=dict[str, str])
    twin: str | None = None
    """The repository of the same weights in the other form, and the branches of checkpoints, which its card names."""
    branches: list[Json] = field(default_factory=list[Json])
    url: str | None = None
    commit: str
    pull_request: str | None = None
    verified: Json | None = None
    """What was compared with the Hub; None before that."""
    replaced: dict[str, str] = field(default_factory=dict[str, str])
    """Tags of the former states that `--replace` kept → their commits."""
    made_by: Json | None = None

    @property
    def is_main_model(self) -> bool:
        """Whether it is what users load who name the repository alone, and not a native twin."""
        return self.revision == "main" and not self.native and not self.pull_request


def read_published(path: Path) -> list[PublishedCommit]:
    """Read the records of a run's publications; without the file, none. Raises: UsageError for a damaged file."""
    if not path.is_file():
        return []
    try:
        first = read_json(path)
        others = first.pop("others", []) if isinstance(first, dict) else []
        return [PublishedCommit.from_json(record, f"{path}:") for record in (first, *others)]
    except UsageError:
        raise UsageError(f"{path} is broken. Delete it: it only records where this run was published.") from None


def find_record(records: list[PublishedCommit], repo_id: str) -> PublishedCommit | None:
    """Return the record of a repository's main branch."""
    of_main = (one for one in records if (one.repo_id, one.revision) == (repo_id, "main") and not one.pull_request)
    return next(of_main, None)


def published_json(records: list[PublishedCommit]) -> Json:
    """Return `published.json` for records, newest first: the newest of each branch, the model itself first."""
    latest: dict[tuple[str, str, str | None], PublishedCommit] = {}
    for record in records:
        latest.setdefault((record.repo_id, record.revision, record.pull_request), record)
    found = list(latest.values())
    first = next((record for record in found if record.is_main_model), found[0])
    others = [record.to_json() for record in found if record is not first]
    return {**first.to_json(), "schema_version": SCHEMA_VERSION, "others": others}
