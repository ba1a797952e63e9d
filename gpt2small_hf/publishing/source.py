"""A path given to `push` → the model to publish, and its run.

The path is a run, one of its checkpoints, its adapter, a saved model, or weights of another code base.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpt2small_hf.conversion.convert import convert, origin_of
from gpt2small_hf.errors import UsageError
from gpt2small_hf.publishing.arguments import check_source
from gpt2small_hf.runs.files import read_json
from gpt2small_hf.runs.layout import RunFolder
from gpt2small_hf.runs.reader import Run
from gpt2small_hf.training.checkpoint_files import complete_checkpoints, step_of

MODEL_TYPE = "gpt2small"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@dataclass(frozen=True)
class PushSource:
    """A model to publish."""

    name: str
    """Of the run or the folder."""
    model: Path
    """Weights, config, code and tokenizer."""
    root: Path
    """Nothing outside this folder is published, whatever a link points to."""
    run_folder: RunFolder
    """Contains `staged/` and `published.json`; without a run `runs/NAME`."""
    run: Run | None = None
    step: int | None = None
    """Of the weights."""
    is_checkpoint: bool = False
    """Whether the run's results are not those of these weights: of an earlier step, or of an unfinished run."""
    adapter: Path | None = None
    """The run's adapter, if it is published without its base; it is merged in `model`."""
    converted: dict[str, Any] | None = None
    """`what` weights of another code base were, and the `settings` stored with them."""
    origin: str | None = None
    """The Hub id of the repository that the weights were downloaded from, if it is known."""

    @property
    def label(self) -> str:
        """Name and step, for a commit message."""
        return self.name if self.step is None else f"{self.name} step {self.step:,}"


def find_source(name: Path, tokenizer: str | None = None) -> PushSource:
    """Find the model that a path names; `tokenizer` is a folder or Hub id, for weights that are stored without one.

    Raises: UsageError if there is no model, or none that can be published.
    """
    check_source(name)
    path = name.expanduser()
    parent = path.resolve().parent
    run = None
    if RunFolder(path).resolved.is_file() and not (path / "config.json").is_file():  # a published model has both
        run = RunFolder(path)
    elif path.name in ("model", "adapter") and RunFolder(parent).resolved.is_file():
        run = RunFolder(path.parent if path.parent.name else parent)
    of_run = run or (RunFolder(parent.parent) if parent.name == "checkpoints" else None)
    if of_run is not None and of_run.resolved.is_file():
        if tokenizer is not None:
            raise UsageError(f"{of_run.root} is a run and has its own tokenizer. Omit --tokenizer.")
        source = _run_source(run) if run else checkpoint_source(path, of_run)
        return _adapter_source(source, path) if run and path.resolve() == run.adapter.resolve() else source
    run_folder = RunFolder(Path("runs") / path.resolve().name)
    if run_folder.resolved.is_file():
        raise UsageError(f"{run_folder.root} is a run of the same name. Rename {name}, or publish the run.")
    model = path if _model_type(path) == MODEL_TYPE else _convert(path, run_folder.root / "converted", tokenizer)
    record = model / "converted.json"
    found = read_json(record) if record.is_file() else {}
    converted = found if found.get("what", MODEL_TYPE) != MODEL_TYPE else None
    origin = found.get("origin") or origin_of(path)
    return PushSource(path.resolve().name, model, model, run_folder, converted=converted, origin=origin)


def checkpoints(run: RunFolder) -> list[PushSource]:
    """List the complete checkpoints of a run by step."""
    return sorted((checkpoint_source(path, run) for path in complete_checkpoints(run)), key=lambda one: one.step or 0)


def checkpoint_source(path: Path, run: RunFolder) -> PushSource:
    """Return a checkpoint of a run as a source. Raises: UsageError if it cannot be loaded without the run."""
    if (path / ADAPTER_WEIGHTS).is_file():
        raise UsageError(f"{path} has only adapters. Publish the finished run, whose model has them merged.")
    if not (path / "trainer_state.json").is_file():
        raise UsageError(f"{path} is not a complete checkpoint: it has no trainer_state.json. Name another one.")
    read = _read_run(run)
    return PushSource(read.name, path, run.root, run, read, step_of(path), is_checkpoint=True)


def _read_run(folder: RunFolder) -> Run:
    """Read a run. Raises: UsageError if losses or log lines that its card needs are missing."""
    run = Run(folder)
    steps, results = run.resolved.trainer.logging_steps, run.heldout
    if results and results.rows.rows and not (results.before and results.unigram and results.after):
        raise UsageError(f"{folder.heldout} has no losses. Train again with the run's command and --overwrite.")
    if not run.metrics:
        raise UsageError(f"{folder.metrics} is missing or empty. Restore it: the card needs it.")
    if not any(row.has("loss", "train_loss") for row in run.metrics):  # the latter when training ended
        raise UsageError(f"{folder.metrics} has no training loss. Restore it, or train for at least {steps:g} steps.")
    return run


def _run_source(folder: RunFolder) -> PushSource:
    run = _read_run(folder)
    if run.heldout is not None:
        if not folder.model.is_dir():
            raise UsageError(f"{folder.model} does not exist. Restore it, or publish a checkpoint of the run.")
        return PushSource(run.name, folder.model, folder.root, folder, run, run.heldout.step)
    newest = next(complete_checkpoints(folder), None)
    if newest is None:
        raise UsageError(f"{folder.root} is not finished and has no checkpoint. Resume it with its command.")
    return checkpoint_source(newest, folder)


def _adapter_source(source: PushSource, path: Path) -> PushSource:
    if source.is_checkpoint:
        raise UsageError(f"{source.run_folder.root} is not finished. Resume it with its command.")
    if not (path / ADAPTER_WEIGHTS).is_file():
        raise UsageError(f"{path} has no {ADAPTER_WEIGHTS}. Train the run again, or publish its model.")
    return replace(source, name=f"{source.name}-adapter", adapter=path)


def _convert(path: Path, model: Path, tokenizer: str | None) -> Path:
    """Convert weights of another code base into the folder `model`, and return it."""
    convert(str(path), model, MODEL_TYPE, tokenizer=tokenizer, overwrite=True)
    if not (model / "tokenizer.json").is_file():
        shutil.rmtree(model)
        raise UsageError(f"{path} has no tokenizer. Name the one it was trained with: --tokenizer FOLDER_OR_ID")
    return model


def _model_type(path: Path) -> str | None:
    try:
        return read_json(path / "config.json").get("model_type")
    except (UsageError, AttributeError):
        return None
