"""A run → what its card states about the data: sources, sizes, what was held out."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from gpt2small_hf.publishing.privacy import hub_dataset, public_ids, scrub
from gpt2small_hf.runs.reader import Run
from gpt2small_hf.runs.records import ChatCounts, DataSource, RunData

MAX_SOURCES = 8
"""Sources of data that are listed one by one."""


@dataclass(frozen=True)
class SourceFacts:
    """A source of training data."""

    name: str
    hub: str | None
    """Its id on the Hub, if it is public."""
    config: str | None
    split: str | None
    revision: str | None
    bytes: int | None
    sha256: str | None
    conversations: int | None


@dataclass(frozen=True)
class SourceList:
    """The first sources of some data, and the number of the others."""

    sources: list[SourceFacts]
    n_more: int


@dataclass(frozen=True)
class HeldOutData:
    """What was held out: conversations, or documents and tokens of text."""

    kind: str | None
    """`tails`, `documents` or `files`; earlier versions did not record it."""
    documents: int | None = None
    tokens: int | None = None
    conversations: int | None = None


@dataclass(frozen=True)
class DataFacts:
    """The data of a run."""

    train: SourceList
    datasets: list[str]
    """Ids of public data sets on the Hub."""
    measured_on: SourceList
    """Sources of what was held out: those of the training data if a part of it was."""
    has_validation_sources: bool
    train_tokens: int
    documents: int | None
    chats: ChatCounts | None
    loss_on: str | None
    held_out: HeldOutData | None
    tokenizer: str | None
    packing: str | None
    new_tokens: list[str]
    seq_len: int


def data_facts(run: Run | None, private: Collection[str]) -> DataFacts | None:
    """Collect what a run recorded of its data; None if it recorded no sources."""
    if run is None or not run.resolved.data.sources:
        return None
    data = run.resolved.data
    origins, tokenizer, chats = data.sources["train"], data.tokenizer, data.train
    return DataFacts(
        train=source_list(origins, private),
        datasets=sorted({name for origin in origins if (name := _public_dataset(origin, private))}),
        measured_on=source_list(data.sources.get("validation") or origins, private),
        has_validation_sources=bool(data.sources.get("validation")),
        train_tokens=(chats or data.splits["train"]).tokens,
        documents=None if chats else data.splits["train"].documents,
        chats=chats,
        loss_on=run.resolved.chat.loss_on if run.resolved.chat else None,
        held_out=_held_out(data),
        tokenizer=scrub(tokenizer.name, public_ids(run.resolved, private)) if tokenizer else None,
        packing=run.resolved.run.packing,
        new_tokens=data.new_tokens,
        seq_len=run.resolved.seq_len,
    )


def source_list(origins: list[DataSource], private: Collection[str]) -> SourceList:
    """Return the first sources, without what is not to be published, and the number of the others."""
    return SourceList([_source(one, private) for one in origins[:MAX_SOURCES]], max(0, len(origins) - MAX_SOURCES))


def _source(origin: DataSource, private: Collection[str]) -> SourceFacts:
    hub = _public_dataset(origin, private)
    return SourceFacts(
        name=hub or scrub(origin.label),
        hub=hub,
        config=origin.config,
        split=origin.split,
        revision=origin.revision,
        bytes=origin.bytes,
        sha256=origin.sha256,
        conversations=origin.conversations,
    )


def _public_dataset(origin: DataSource, private: Collection[str]) -> str | None:
    name = hub_dataset(origin)
    return None if name in private else name


def _held_out(data: RunData) -> HeldOutData | None:
    kind = "files" if data.sources.get("validation") else data.held_out
    if data.train:
        return HeldOutData(kind, conversations=data.validation.conversations) if data.validation else None
    if "validation" not in data.splits:
        return None
    counts = data.splits["validation"]
    return HeldOutData(data.held_out, documents=counts.documents, tokens=counts.tokens)
