"""A run's LoRA adapter, to be published without its base: which base it needs, where that is, and the files to push."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import snapshot_download

from gpt2small_hf.errors import UsageError
from gpt2small_hf.invocation import command
from gpt2small_hf.publishing.checks import WEIGHTS, check_finite, check_sizes
from gpt2small_hf.publishing.lineage_facts import published_base
from gpt2small_hf.publishing.publication import Publication
from gpt2small_hf.publishing.source import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PushSource
from gpt2small_hf.publishing.stage import stage
from gpt2small_hf.runs.files import read_json, sha256, write_json


@dataclass(frozen=True)
class Base:
    """The base model of an adapter: on the Hub, and the same files here."""

    repo: str
    commit: str
    folder: Path


def find_base(source: PushSource, publication: Publication) -> Base:
    """Find the published base of a run's adapter, and its files on this machine.

    Raises: UsageError if it is not on the Hub for everybody, or not here.
    """
    assert source.run is not None
    told = source.run.resolved.base
    assert told is not None  # adapters have one
    path = Path(told.init_from)
    if record := published_base(path, told.sha256, publication):
        return Base(record.repo_id, record.commit, _same(path, told.sha256))
    if told.of_hub and told.init_from not in publication.private:
        try:
            found = Path(snapshot_download(told.init_from, local_files_only=True))
        except OSError:
            raise UsageError(
                f"the adapter's base {told.init_from} is not in the cache of the Hub, so the adapter cannot be "
                f"checked. Download it: hf download {told.init_from}"
            ) from None
        return Base(told.init_from, found.name, _same(found, told.sha256))
    first = command("push", str(path), "USER/REPO", "--public")
    raise UsageError(
        f"an adapter needs its base, and {path.name} is not public on the Hub as it was trained on. Publish the base "
        f"first ({first}), or publish the run, whose model has the adapter merged."
    )


def _same(folder: Path, digest: str) -> Path:
    weights = folder / WEIGHTS
    if not weights.is_file() or sha256(weights) != digest:
        raise UsageError(f"{weights} is not the base that the adapter was trained on. Put it back.")
    return folder


def stage_adapter(source: PushSource, folder: Path, base: Base, **how: Any) -> None:
    """Stage the adapter with the run's tokenizer and results, after the checks of the run's merged model.

    Raises: UsageError as `stage`, and for an adapter that another base cannot carry.
    """
    assert source.adapter is not None
    check_adapter(source)
    with TemporaryDirectory(prefix="merged-") as place:
        merged = Path(place, "merged")
        stage(source, merged, **how)
        left_out = shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json", "*.py", "config.json")
        shutil.copytree(merged, folder, ignore=left_out)
    shutil.copyfile(source.adapter / ADAPTER_WEIGHTS, folder / ADAPTER_WEIGHTS)
    settings = read_json(source.adapter / ADAPTER_CONFIG)
    settings |= {"base_model_name_or_path": base.repo, "revision": base.commit, "inference_mode": True}
    write_json(folder / ADAPTER_CONFIG, settings)
    check_finite(folder)


def check_adapter(source: PushSource) -> None:
    """Raise: UsageError if a link leads out of the run, or if peft is missing or could not load it on the base."""
    assert source.adapter is not None
    if find_spec("peft") is None:
        raise UsageError("an adapter is checked with peft, which is not installed: pip install peft")
    for path in (source.adapter / ADAPTER_CONFIG, source.adapter / ADAPTER_WEIGHTS):
        if not path.resolve().is_relative_to(source.root.resolve()):
            raise UsageError(f"{path} is a link out of {source.root}. Put the file itself in its place.")
    added = read_json(source.adapter / ADAPTER_CONFIG).get("trainable_token_indices")
    if isinstance(added, dict) and check_sizes(source.model).position_embedding in added:
        raise UsageError(
            f"{source.adapter} has positions that its base does not have (--max_position_embeddings), which peft "
            f"cannot add. Publish {source.run_folder.root}, whose model has them."
        )


def fill_cache(cache: Path, base: Base) -> None:
    """Make a Hub cache with the base, from its files here, as a download of its commit would leave it."""
    snapshot = cache / f"models--{base.repo.replace('/', '--')}" / "snapshots" / base.commit
    shutil.copytree(base.folder, snapshot, ignore=shutil.ignore_patterns("published.json", "staged*"))
