"""A model → where it comes from: developers, base model, training data, and weights of another code base."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpt2small_hf.publishing.privacy import hub_dataset, hub_ids, is_hub_id
from gpt2small_hf.publishing.publication import Publication, PublishedCommit, read_published
from gpt2small_hf.publishing.source import PushSource
from gpt2small_hf.runs.files import sha256
from gpt2small_hf.runs.layout import HUB_ID, RunFolder
from gpt2small_hf.runs.reader import Run
from gpt2small_hf.runs.records import DataSource, Resolved

MAX_SOURCES = 8
"""Sources of data that are listed one by one."""


@dataclass(frozen=True)
class Excerpt:
    """The first items of a list, and the number of all."""

    shown: list[Any]
    n_total: int


def linked_repositories(source: PushSource, publication: Publication) -> list[tuple[str, str]]:
    """List the repositories that the card names beside its own: type (`model` or `dataset`) and id."""
    base, origin, converted = base_facts(source.run, publication), origin_facts(publication), converted_facts(source)
    models = [source.run and baseline_repository(publication), publication.twin]
    models += [known["repo"] for known in (base, origin) if known]
    linked = {("model", name) for name in models if name}
    if converted and converted["dataset"]:
        linked.add(("dataset", converted["dataset"]))
    return sorted(linked | (hub_ids(source.run.resolved) if source.run else set()))


def data_facts(resolved: Resolved) -> dict[str, Any] | None:
    """Return the data of staged settings, where Hub ids are those of public data sets; None if not recorded.

    What was measured on are sources of the training data if a part of it was held out.
    """
    sources = resolved.data.sources
    if not sources:
        return None
    datasets = {name for one in sources["train"] if (name := hub_dataset(one))}
    measured_on = sources.get("validation") or sources["train"]
    return {
        "train": data_sources(sources["train"]),
        "measured_on": data_sources(measured_on),
        "datasets": sorted(datasets),
    }


def data_sources(sources: list[DataSource]) -> Excerpt:
    """Return the first sources, each with `name` as the card calls it and with `dataset` if that is on the Hub."""
    shown = [(hub_dataset(one), one) for one in sources[:MAX_SOURCES]]
    return Excerpt([replace(one, dataset=hub, name=hub or one.label) for hub, one in shown], len(sources))


def origin_facts(publication: Publication) -> dict[str, str | None] | None:
    """Return where weights that were not trained here come from, if known; a private repository has no `url`."""
    given = publication.origin
    if given is None:
        return None
    if given.startswith("http"):
        return {"name": given, "url": given, "repo": None}
    is_private = given in publication.private
    url, repo = (None, None) if is_private else (f"https://huggingface.co/{given}", given)
    return {"name": given, "url": url, "repo": repo}


def developers(source: PushSource, publication: Publication) -> list[str]:
    """Return who trained the model: as given, else the account of the run's or the origin's repository, else nobody."""
    if publication.developers or source.run:
        return publication.developers or [publication.namespace]
    origin = origin_facts(publication)
    return [origin["repo"].split("/")[0]] if origin and origin["repo"] else []


def copyright_holders(source: PushSource, publication: Publication) -> dict[str, Any]:
    """Return the copyright `holders` of the weights and its `year`, as far as they are known."""
    if source.run is None:
        return {"holders": publication.developers, "year": None}
    return {"holders": developers(source, publication), "year": source.run.resolved.made_by.date[:4]}


def base_facts(run: Run | None, publication: Publication) -> dict[str, Any] | None:
    """Return the model that a run started from, with its `repo` if public; None if it started from new weights."""
    if run is None or run.resolved.base is None:
        return None
    base = run.resolved.base
    path = Path(base.init_from)
    if record := published_base(path, base.sha256, publication):
        return {"name": record.repo_id, "repo": record.repo_id, "is_private": False}
    name = path.parent.name if path.name == "model" else path.name
    if not (base.of_hub and HUB_ID.fullmatch(base.init_from)):
        return {"name": name, "repo": None, "is_private": False}
    is_private = base.init_from in publication.private
    public = None if is_private else base.init_from
    return {"name": public or name, "repo": public, "is_private": is_private}


def published_base(path: Path, digest: str, publication: Publication) -> PublishedCommit | None:
    """Return the record of the repository with the weights of a base: from its run, or from `runs/NAME`."""
    places = (path, path.parent, Path("runs") / path.name)
    return next(filter(None, (_published_record(RunFolder(place), digest, publication) for place in places)), None)


def _published_record(run: RunFolder, digest: str, publication: Publication) -> PublishedCommit | None:
    """Return the record in `published.json` of the public, verified repository with the weights of this SHA-256."""
    for record in read_published(run.published):
        is_same = any(file["sha256"] == digest for file in record.files.values())
        is_usable = record.verified and not record.pull_request and not record.native
        if is_same and is_usable and record.repo_id not in (publication.repo_id, *publication.private):
            return record
    return None


def baseline_repository(publication: Publication) -> str | None:
    """Return the public repository of the baseline's model; None if there is none."""
    if publication.baseline is None:
        return None
    folder = publication.baseline.folder
    weights = folder.model.glob("*.safetensors") if folder.published.is_file() else ()
    records = [_published_record(folder, sha256(path), publication) for path in weights]
    return records[0].repo_id if records and all(records) and records[0] else None


def converted_facts(source: PushSource, private: frozenset[str] = frozenset()) -> dict[str, Any] | None:
    """Return what is known of weights of another code base; None of others."""
    if source.converted is None:
        return None
    settings = {n: v for n, v in source.converted["settings"].items() if isinstance(v, (int, float, str))}
    dataset = str(settings.get("dataset"))
    is_public = is_hub_id(dataset) and dataset not in private
    code_base = source.converted["what"]
    return {"code_base": code_base, "settings": settings, "dataset": dataset if is_public else None}
