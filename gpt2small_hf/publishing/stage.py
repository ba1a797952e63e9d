"""A model to publish → a folder with exactly the files to push, chosen by an allow-list.

`card.py` writes README.md into the folder, `verify.py` loads it, `commit.py` sends it.
"""

from __future__ import annotations

import io
import re
import shutil
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import snapshot_download

from gpt2small_hf.conversion.convert import convert
from gpt2small_hf.errors import UsageError
from gpt2small_hf.evaluation.tasks import TASKS
from gpt2small_hf.invocation import command
from gpt2small_hf.publishing import checks
from gpt2small_hf.publishing.license import TEXT
from gpt2small_hf.publishing.lineage_facts import published_base
from gpt2small_hf.publishing.privacy import chat_questions, public_ids, remove_prompts, scrub
from gpt2small_hf.publishing.publication import Publication
from gpt2small_hf.publishing.source import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PushSource
from gpt2small_hf.runs.files import is_leftover, read_json, sha256, write_json

MODEL_MODULES = {"configuration_gpt2small", "modeling_gpt2small", "gpt", "cpu_linear"}
"""The model's code in this and earlier versions: a push removes the files that it does not send."""

TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja"),
)
SETTINGS = ("config.json", "generation_config.json")
RESULTS = ("resolved.json", *dict.fromkeys(name for task in TASKS for name in task.published))
CHARTS = ("loss", "grad_norm", "learning_rate", "throughput", "benchmarks")
WEIGHT_SUFFIXES = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".ot", ".gguf", ".ggml", ".onnx"),
    *(".onnx_data", ".onnx.data", ".tflite", ".mlmodel", ".pb", ".keras", ".pkl", ".pickle", ".joblib", ".npz"),
    *(".nemo", ".mar", ".pte", ".engine", ".llamafile", ".pdparams", ".ftz", ".dduf"),
)
WEIGHT_INDEXES = (".safetensors.index.json", ".bin.index.json", ".h5.index.json", ".msgpack.index.json")
OTHER_MODEL_FILES = (
    *("adapter_config.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.txt"),
    *("chat_template.json", "custom_generate/generate.py", "tekken.json", "params.json"),
    *("preprocessor_config.json", "processor_config.json"),
)
"""Files of other models that are loaded, besides weights, settings and tokenizer."""
LICENSE_NAMES = re.compile(r"(licen[cs]es?|copying|notices?|use_policy)(?![a-z])[^/]*", re.IGNORECASE)
"""Terms of use of another model."""
SHORT_CONTEXT = 512
"""Below it, the pipeline's default of 256 new tokens leaves too few for a prompt."""

STAGED_BY = "upload/push.py"

Files = dict[str, dict[str, Any]]
"""Path in the repository → `size` in bytes and `sha256`."""


def stage(
    source: PushSource,
    folder: Path,
    *,
    new_code: bool = False,
    allow_modified_code: bool = False,
    questions: bool = False,
    private: frozenset[str] = frozenset(),
) -> None:
    """Copy the model and the results of its run into a new `folder`; README.md is written later.

    Args:
        source: the model.
        folder: where to stage it.
        new_code: take the model's code from this package, not from the model's folder.
        allow_modified_code: accept code that is neither the package's nor the run's.
        questions: keep the prompts that the run took from its chats.
        private: repositories of whose id only the last part is published.

    Raises: UsageError for links out of the run, pickled or missing files, code that was modified, weights that are
        not finite or not those that were measured, and a tokenizer of another model.
    """
    folder.mkdir(parents=True)
    checks.check_links(source)
    checks.check_nothing_pickled(source)
    weights = checks.weight_files(source.model)
    settings = read_json(source.model / "config.json")
    for path in weights:
        shutil.copyfile(path, folder / path.name)
    for name in TOKENIZER:
        if (source.model / name).is_file():
            shutil.copyfile(source.model / name, folder / name)
    for path in checks.code_files(checks.CODE if new_code else source.model, settings):
        shutil.copyfile(path, folder / path.name)
    settings.pop("_name_or_path", None)  # a local path
    settings["use_cache"] = True  # the Trainer turns it off in checkpoints
    write_json(folder / "config.json", settings)
    write_json(folder / "generation_config.json", generation(source.model, settings))
    _stage_results(source, folder, [] if questions else chat_questions(source.run), private)
    checks.check_nothing_empty(source, folder)
    if not allow_modified_code:
        checks.check_code_is_known(source, folder)
    checks.check_results_are_theirs(source, folder)
    checks.check_tokenizer(source, folder)
    remove_local_paths(folder / "tokenizer_config.json")
    checks.check_finite(folder)


def _stage_results(source: PushSource, folder: Path, questions: list[str], private: frozenset[str]) -> None:
    if source.run is None:
        return
    public = public_ids(source.run.resolved, private)
    for name in RESULTS[:1] if source.is_checkpoint else RESULTS:
        path = source.root / name
        if path.is_file():
            write_json(folder / name, scrub(remove_prompts(read_json(path), questions), public))
    for name in [] if source.is_checkpoint else CHARTS:
        path = source.run_folder.chart(name)
        if path.is_file():
            (folder / "charts").mkdir(exist_ok=True)
            shutil.copyfile(path, folder / "charts" / path.name)


def staged_from(source: PushSource, name: str, *, license_file: Path | None = None) -> Path | str:
    """Return the file that a staged file was made from; for the card, a description."""
    if name == "README.md":
        return "README.md rendered from model_card.j2 and the flags"
    if name == TEXT and license_file is not None:
        return license_file
    folders = (source.root, *filter(None, (source.adapter,)), source.model)
    return next((folder / name for folder in folders if (folder / name).is_file()), name)


def list_files(folder: Path) -> Files:
    """Return size and SHA-256 of every file in a staged folder, sorted by name."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {p.relative_to(folder).as_posix(): {"size": p.stat().st_size, "sha256": sha256(p)} for p in paths}


def is_loaded(name: str) -> bool:
    """Whether a file of the repository affects what the model computes: weights, settings, code, tokenizer."""
    return name in (*SETTINGS, *TOKENIZER, checks.INDEX, ADAPTER_CONFIG) or (
        "/" not in name and name.endswith((".safetensors", ".py"))
    )


def record_path(folder: Path) -> Path:
    """Return the path of the record of a staged folder: its files, and the result of the isolated check."""
    return folder.with_name(f"{folder.name}.json")


def page_path(folder: Path) -> Path:
    """Return the path of the card as HTML."""
    return folder.with_name(f"{folder.name}.html")


def read_record(folder: Path) -> dict[str, Any]:
    """Read the record of a staged folder, empty if there is none. Raises: UsageError for another file of this name."""
    path = record_path(folder)
    try:
        found = read_json(path) if path.is_file() else {}
    except UsageError:
        found = None
    if not isinstance(found, dict) or (found and found.get("staged_by") != STAGED_BY):
        raise UsageError(f"{path} was not written by this command. Move it, or name another --output_dir.")
    return found


def check_stage_folder(folder: Path) -> None:
    """Raise: UsageError if staging would overwrite files that an earlier push did not write."""
    known = read_record(folder)
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise UsageError(f"{folder} is a file or link. Name another --output_dir.")
    paths = [path for path in folder.rglob("*") if not path.is_dir() or not any(path.iterdir())]
    names = {path.relative_to(folder).as_posix() for path in paths}
    names = {name for name in names if name != ".lock" and not is_leftover(folder / name.split("/")[0], of=folder)}
    if not known and (names or page_path(folder).exists()):
        existing = folder if names else page_path(folder)
        raise UsageError(f"{existing} was not staged by this command. Name another --output_dir.")
    if unknown := sorted(names - set(known.get("names", []))):
        raise UsageError(f"{folder / unknown[0]} was not staged by this command, which would remove it. Move it.")
    card = folder / "README.md"
    if card.is_file() and known["files"].get("README.md", {}).get("sha256") not in (None, sha256(card)):
        raise UsageError(f"{card} was edited and would be overwritten. Edit model_card.j2 instead, then delete it.")


def write_record(folder: Path, files: Files, known: dict[str, Any], **checked: Any) -> None:
    """Write the record of a staged folder with these files."""
    names = sorted({*files, *known.get("names", [])})
    write_json(record_path(folder), {"staged_by": STAGED_BY, "names": names, "files": files, **checked})


def is_pushed_file(name: str, code: set[str]) -> bool:
    """Whether a push writes files of this name and removes those no longer staged.

    `code` are the modules that the repository's config.json names.
    """
    weights = re.fullmatch(r"model(-\d+-of-\d+)?\.safetensors|pytorch_model(-\d+-of-\d+)?\.bin", name)
    charts = [f"charts/{chart}.png" for chart in CHARTS]
    known = (*SETTINGS, *TOKENIZER, checks.INDEX, *RESULTS, *charts, "LICENSE-CODE", ADAPTER_CONFIG, ADAPTER_WEIGHTS)
    return bool(weights) or name in known or (name.endswith(".py") and name[:-3] in code | MODEL_MODULES)


def is_weights(name: str) -> bool:
    """Whether a file on the Hub contains weights, in any folder, by the suffix of its name."""
    return name.endswith(WEIGHT_SUFFIXES) and name != "training_args.bin"


def is_model_file(name: str) -> bool:
    """Whether a file on the Hub is part of any model: it must not be loaded with other weights."""
    if re.fullmatch(r"tokenizer\.model\.v\w+", name):
        return True
    return is_weights(name) or name in (*SETTINGS, *TOKENIZER, *OTHER_MODEL_FILES) or name.endswith(WEIGHT_INDEXES)


def is_license_file(name: str) -> bool:
    """Whether a file on the Hub states the terms of a model: license, notice, policy."""
    return LICENSE_NAMES.fullmatch(name) is not None


def remove_local_paths(path: Path) -> None:
    """Remove local paths from a tokenizer's settings."""
    try:
        settings = read_json(path)
    except UsageError:  # reported by `check_tokenizer`
        return
    if isinstance(settings, dict):
        kept = {name: value for name, value in settings.items() if not name.endswith(("name_or_path", "_file"))}
        if kept != settings:
            write_json(path, kept)


def generation(model: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Return generation settings with which a pipeline stays within the context."""
    path = model / "generation_config.json"
    found = read_json(path) if path.is_file() else {}
    found.pop("_name_or_path", None)
    context = settings.get("max_position_embeddings", settings.get("n_positions", SHORT_CONTEXT))
    if context < SHORT_CONTEXT and found.get("max_new_tokens") is None and found.get("max_length") is None:
        found["max_length"] = context
    return found


def stage_native(ours: Path, folder: Path) -> None:
    """Stage the model of a staged folder as transformers' own GPT-2, which needs no code. Raises: as `convert`."""
    with redirect_stdout(io.StringIO()):
        convert(str(ours), folder, "gpt2")
    for name in ("resolved.json", "evaluation", "charts"):
        if (ours / name).is_dir():
            shutil.copytree(ours / name, folder / name)
        elif (ours / name).is_file():
            shutil.copyfile(ours / name, folder / name)


# ---- a LoRA adapter without its base model -------------------------------------------------------------------------


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
    weights = folder / checks.WEIGHTS
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
    checks.check_finite(folder)


def check_adapter(source: PushSource) -> None:
    """Raise: UsageError if peft is missing or could not load the adapter, or if a link points out of the run."""
    assert source.adapter is not None
    if find_spec("peft") is None:
        raise UsageError("peft is not installed, which checks the adapter: pip install peft")
    for path in (source.adapter / ADAPTER_CONFIG, source.adapter / ADAPTER_WEIGHTS):
        if not path.resolve().is_relative_to(source.root.resolve()):
            raise UsageError(f"{path} is a link out of {source.root}. Replace it by the file itself.")
    added = read_json(source.adapter / ADAPTER_CONFIG).get("trainable_token_indices")
    if isinstance(added, dict) and checks.read_model_config(source.model).position_embedding in added:
        raise UsageError(
            f"{source.adapter} adds positions (--max_position_embeddings), which peft cannot. "
            f"Publish {source.run_folder.root}, whose model has them."
        )


def fill_cache(cache: Path, base: Base) -> None:
    """Create a Hub cache that contains the commit of the base, from its local files."""
    snapshot = cache / f"models--{base.repo.replace('/', '--')}" / "snapshots" / base.commit
    shutil.copytree(base.folder, snapshot, ignore=shutil.ignore_patterns("published.json", "staged*"))
