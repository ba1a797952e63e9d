"""Stage a run's LoRA adapter without its base model."""

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
from gpt2small_hf.publishing.checks import WEIGHTS, check_finite, read_model_config
from gpt2small_hf.publishing.lineage_facts import published_base
from gpt2small_hf.publishing.publication import Publication
from gpt2small_hf.publishing.source import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PushSource
from gpt2small_hf.publishing.stage import stage
from gpt2small_hf.runs.files import read_json, sha256, write_json


@dataclass(frozen=True)
class Base:
    """The base model of an adapter on the Hub, and its files on this machine."""

    repo: str
    commit: str
    folder: Path


def find_base(source: PushSource, publication: Publication) -> Base:
    """Find the base of a run's adapter. Raises: UsageError if it is not public, or not on this machine."""
    assert source.run is not None
    base = source.run.resolved.base
    assert base is not None
    path = Path(base.init_from)
    if record := published_base(path, base.sha256, publication):
        return Base(record.repo_id, record.commit, _checked(path, base.sha256))
    if base.of_hub and base.init_from not in publication.private:
        try:
            found = Path(snapshot_download(base.init_from, local_files_only=True))
        except OSError:
            raise UsageError(
                f"the adapter's base is not in the Hub's cache. Download it: hf download {base.init_from}"
            ) from None
        return Base(base.init_from, found.name, _checked(found, base.sha256))
    push = command("push", str(path), "USER/REPO", "--public")
    raise UsageError(f"the adapter's base {path.name} is not public on the Hub. Publish it ({push}), or the whole run.")


def _checked(folder: Path, digest: str) -> Path:
    weights = folder / WEIGHTS
    if not weights.is_file() or sha256(weights) != digest:
        raise UsageError(f"{weights} is not the base that the adapter was trained on. Restore it.")
    return folder


def stage_adapter(source: PushSource, folder: Path, base: Base, **how: Any) -> None:
    """Stage the adapter with the run's tokenizer and results. Raises: UsageError as `stage` and `check_adapter`."""
    assert source.adapter is not None
    check_adapter(source)
    with TemporaryDirectory(prefix="merged-") as place:
        merged = Path(place, "merged")
        stage(source, merged, **how)
        of_base = shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json", "*.py", "config.json")
        shutil.copytree(merged, folder, ignore=of_base)
    shutil.copyfile(source.adapter / ADAPTER_WEIGHTS, folder / ADAPTER_WEIGHTS)
    settings = read_json(source.adapter / ADAPTER_CONFIG)
    settings |= {"base_model_name_or_path": base.repo, "revision": base.commit, "inference_mode": True}
    write_json(folder / ADAPTER_CONFIG, settings)
    check_finite(folder)


def check_adapter(source: PushSource) -> None:
    """Raise: UsageError if peft is missing or could not load the adapter, or if a link points out of the run."""
    assert source.adapter is not None
    if find_spec("peft") is None:
        raise UsageError("peft is not installed, which checks the adapter: pip install peft")
    for path in (source.adapter / ADAPTER_CONFIG, source.adapter / ADAPTER_WEIGHTS):
        if not path.resolve().is_relative_to(source.root.resolve()):
            raise UsageError(f"{path} is a link out of {source.root}. Replace it by the file itself.")
    added = read_json(source.adapter / ADAPTER_CONFIG).get("trainable_token_indices")
    if isinstance(added, dict) and read_model_config(source.model).position_embedding in added:
        raise UsageError(
            f"{source.adapter} adds positions (--max_position_embeddings), which peft cannot. "
            f"Publish {source.run_folder.root}, whose model has them."
        )


def fill_cache(cache: Path, base: Base) -> None:
    """Create a Hub cache that contains the commit of the base, from its local files."""
    snapshot = cache / f"models--{base.repo.replace('/', '--')}" / "snapshots" / base.commit
    shutil.copytree(base.folder, snapshot, ignore=shutil.ignore_patterns("published.json", "staged*"))
