"""A model → where it comes from: developers, base model, weights of another code base, and their repositories."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2small_hf.publishing.data_facts import SourceList, data_facts, source_list
from gpt2small_hf.publishing.privacy import hub_ids, is_hub_id, is_of_hub
from gpt2small_hf.publishing.publication import Publication
from gpt2small_hf.publishing.source import PushSource
from gpt2small_hf.runs.files import read_json, sha256
from gpt2small_hf.runs.layout import HUB_ID, RunFolder
from gpt2small_hf.runs.reader import Run


@dataclass(frozen=True)
class Origin:
    """Where weights that were not trained here come from."""

    name: str
    url: str | None
    """None if it is a private repository."""
    repo: str | None
    """Its id, if it is a public repository on the Hub."""


@dataclass(frozen=True)
class BaseFacts:
    """The model that a run started from."""

    name: str
    repo: str | None
    """Its repository, if it is public."""
    is_private: bool
    """Whether it is in a private repository."""
    data: SourceList


@dataclass(frozen=True)
class ConvertedFacts:
    """Weights of another code base."""

    code_base: str
    settings: dict[str, Any]
    """Numbers and texts among the settings that were stored with the weights."""
    dataset: str | None
    """The Hub id of the training data, if it is public."""


def linked_repositories(source: PushSource, publication: Publication) -> list[tuple[str, str]]:
    """List the repositories that the card names beside its own: type (`model` or `dataset`) and id."""
    base, origin = base_facts(source.run, publication), origin_facts(publication)
    data, converted = data_facts(source.run, ()), converted_facts(source)
    datasets = {*(data.datasets if data else ()), converted.dataset if converted else None}
    baseline = baseline_repository(publication) if source.run else None
    models = {base.repo if base else None, baseline, publication.twin, origin.repo if origin else None}
    linked = {(kind, name) for kind, names in (("model", models), ("dataset", datasets)) for name in names if name}
    return sorted(linked | (hub_ids(source.run.resolved) if source.run else set()))


def origin_facts(publication: Publication) -> Origin | None:
    """Return where weights that were not trained here come from, if it is known."""
    given = publication.origin
    if given is None:
        return None
    if given.startswith("http"):
        return Origin(given, given, None)
    if given in publication.private:
        return Origin(given, None, None)
    return Origin(given, f"https://huggingface.co/{given}", given)


def developers(source: PushSource, publication: Publication) -> list[str]:
    """Return who trained the model: as given, else the account of the run's or the origin's repository, else nobody."""
    if publication.developers:
        return publication.developers
    if source.run:
        return [publication.namespace]
    origin = origin_facts(publication)
    return [origin.repo.split("/")[0]] if origin and origin.repo else []


def copyright_holders(source: PushSource, publication: Publication) -> dict[str, Any]:
    """Return the copyright `holders` of the weights and its `year`, as far as they are known."""
    year = source.run.resolved.made_by.date[:4] if source.run else None
    owner = [publication.namespace] if source.run else []
    return {"holders": publication.developers or owner, "year": year}


def base_facts(run: Run | None, publication: Publication) -> BaseFacts | None:
    """Return the model that a run started from; None if it started from new weights."""
    if run is None or run.resolved.base is None:
        return None
    base = run.resolved.base
    data = source_list(base.trained_on or [], publication.private)  # earlier versions did not record it
    path = Path(base.init_from)
    if record := published_base(path, base.sha256, publication):
        return BaseFacts(record["repo_id"], record["repo_id"], False, data)
    name = path.parent.name if path.name == "model" else path.name
    if not (is_of_hub(base.init_from, base.of_hub) and HUB_ID.fullmatch(base.init_from)):
        return BaseFacts(name, None, False, data)
    if base.init_from in publication.private:
        return BaseFacts(name, None, True, data)
    return BaseFacts(base.init_from, base.init_from, False, data)


def published_base(path: Path, digest: str, publication: Publication) -> dict[str, Any] | None:
    """Return the record of the repository with the weights of a base: from its run, or from `runs/NAME`."""
    places = (path, path.parent, Path("runs") / path.name)
    return next(filter(None, (_published_record(RunFolder(place), digest, publication) for place in places)), None)


def _published_record(run: RunFolder, digest: str, publication: Publication) -> dict[str, Any] | None:
    """Return the record in `published.json` of the public, verified repository with the weights of this SHA-256."""
    if not run.published.is_file():
        return None
    for record in [found := read_json(run.published), *found.get("others", [])]:
        is_same = any(file["sha256"] == digest for file in record.get("files", {}).values())
        is_usable = record.get("verified") and not record.get("pull_request") and not record.get("native")
        if is_same and is_usable and record["repo_id"] not in (publication.repo_id, *publication.private):
            return record
    return None


def baseline_repository(publication: Publication) -> str | None:
    """Return the public repository of the baseline's model; None if there is none."""
    if publication.baseline is None:
        return None
    folder = publication.baseline.folder
    weights = folder.model.glob("*.safetensors") if folder.published.is_file() else ()
    records = [_published_record(folder, sha256(path), publication) for path in weights]
    return records[0]["repo_id"] if records and all(records) and records[0] else None


def converted_facts(source: PushSource, private: frozenset[str] = frozenset()) -> ConvertedFacts | None:
    """Return what is known of weights of another code base; None of others."""
    if source.converted is None:
        return None
    settings = {n: v for n, v in source.converted["settings"].items() if isinstance(v, (int, float, str))}
    dataset = str(settings.get("dataset"))
    is_public = is_hub_id(dataset) and dataset not in private
    return ConvertedFacts(source.converted["what"], settings, dataset if is_public else None)
