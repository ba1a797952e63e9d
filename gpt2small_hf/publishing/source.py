"""What was named on the command line → the model to publish, and what is known of how it came to be.

A run, one of its checkpoints, a model folder of ours, or weights of another code base, which are converted first.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpt2small_hf.conversion.convert import convert, origin_of
from gpt2small_hf.errors import UsageError
from gpt2small_hf.publishing.arguments import check_source
from gpt2small_hf.runs.files import read_json, write_json
from gpt2small_hf.runs.layout import RunFolder
from gpt2small_hf.runs.reader import Run, progress_of
from gpt2small_hf.training.checkpoint_files import complete_checkpoints, step_of

OURS = "gpt2small"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@dataclass(frozen=True)
class PushSource:
    """A model to publish."""

    name: str
    """For people: of the run, or of the folder."""
    model: Path
    """Weights, config, code and tokenizer."""
    root: Path
    """Nothing outside this folder is published, whatever a link says."""
    run_folder: RunFolder
    """Contains `staged/` and `published.json`; without a run `runs/NAME`."""
    run: Run | None = None
    step: int | None = None
    """Of the run, at which the weights are."""
    is_checkpoint: bool = False
    """Weights from the middle of a run, or of one that did not finish: its results are not theirs."""
    adapter: Path | None = None
    """The run's adapter, if it is published without its base; `model` has it merged."""
    converted: dict[str, Any] | None = None
    """Of weights of another code base: `what` they were, and the settings beside them."""
    origin: str | None = None
    """The Hub id of the repository that the weights were downloaded from, as far as that is known."""

    @property
    def label(self) -> str:
        """What it is, for a commit message."""
        return self.name if self.step is None else f"{self.name} step {self.step:,}"


def find_source(name: Path, tokenizer: str | None = None) -> PushSource:
    """Find the model that a path names, and say so where it is not plain.

    Args:
        name: a run, a checkpoint, a model folder, or a folder that `convert` understands.
        tokenizer: of weights that have none beside them: a folder or Hub id.

    Raises: UsageError if there is no model, or none that can be published.
    """
    check_source(name)
    path = name.expanduser()
    parent = path.resolve().parent
    run = None
    if RunFolder(path).resolved.is_file() and not (path / "config.json").is_file():  # which a published model has too
        run = RunFolder(path)
    elif path.name in ("model", "adapter") and RunFolder(parent).resolved.is_file():
        run = RunFolder(path.parent if path.parent.name else parent)
    of_run = run or (RunFolder(parent.parent) if parent.name == "checkpoints" else None)
    if of_run is not None and of_run.resolved.is_file():
        if tokenizer is not None:
            raise UsageError(f"{of_run.root} is a run and has its own tokenizer: leave --tokenizer out.")
        source = _of_run(run) if run else checkpoint_source(path, of_run)
        return _adapter_of(source, path) if run and path.resolve() == run.adapter.resolve() else source
    place = RunFolder(Path("runs") / path.resolve().name)
    if place.resolved.is_file():
        raise UsageError(f"{place.root} is a run of the same name. Rename {name}, or publish the run.")
    if _model_type(path) == OURS:
        beside = path / "converted.json"
        told = read_json(beside) if beside.is_file() else {}
        converted = told if told.get("what", OURS) != OURS else None
        origin = told.get("origin") or origin_of(path)
        return PushSource(path.resolve().name, path, path, place, converted=converted, origin=origin)
    return _converted(path, place, tokenizer)


def checkpoints(run: RunFolder) -> list[PushSource]:
    """All checkpoints of a run that are whole, by step."""
    return sorted(
        (checkpoint_source(path, run) for path in complete_checkpoints(run)), key=lambda source: source.step or 0
    )


def checkpoint_source(path: Path, run: RunFolder) -> PushSource:
    """A checkpoint of a run. Raises: UsageError for one that a stranger could not load."""
    if (path / "adapter_model.safetensors").is_file():
        raise UsageError(
            f"{path} holds adapters, which are no model without their base. Publish the run when it is finished: "
            "its model has them merged."
        )
    if not (path / "trainer_state.json").is_file():
        raise UsageError(f"{path} is not a whole checkpoint: it has no trainer_state.json. Name another one.")
    whole = _open(run)
    return PushSource(whole.name, path, run.root, run, whole, step_of(path), is_checkpoint=True)


def _open(folder: RunFolder) -> Run:
    """A run's files. Raises: UsageError if something is not there without which its card would be wrong."""
    run = Run(folder)
    logging_steps, results = run.resolved.trainer.logging_steps, run.heldout
    if results and results.rows.rows and not (results.before and results.unigram and results.after):
        raise UsageError(f"{folder.heldout} has no losses. The run's own command, with --overwrite, makes it again.")
    if not run.metrics:
        raise UsageError(f"{folder.metrics} is missing or empty, so nothing is known of the training. Put it back.")
    if not any(row.has("loss", "train_loss") for row in run.metrics):  # the latter when training ended
        raise UsageError(
            f"{folder.metrics} has no line of training, so nothing is known of it. Put back what was removed, or train "
            f"to the first line (every {logging_steps:g} steps) or to the end."
        )
    return run


def _of_run(folder: RunFolder) -> PushSource:
    run = _open(folder)
    if run.heldout is not None and not folder.model.is_dir():
        raise UsageError(f"{folder.model} does not exist: the run's model was taken away. Publish a checkpoint of it.")
    if run.heldout is not None:
        return PushSource(run.name, folder.model, folder.root, folder, run, _kept_step(run))
    newest = next(complete_checkpoints(folder), None)
    if newest is None:
        raise UsageError(f"{folder.root} is not finished and has no checkpoint. Train on: its command goes on.")
    return checkpoint_source(newest, folder)


def _adapter_of(source: PushSource, path: Path) -> PushSource:
    """The adapter of a finished run. Raises: UsageError if it is not one that can be published alone."""
    if source.is_checkpoint:
        raise UsageError(f"{source.run_folder.root} is not finished. Train on: its command resumes it.")
    if not (path / ADAPTER_WEIGHTS).is_file():
        raise UsageError(f"{path} has no {ADAPTER_WEIGHTS}. Train the run again, or publish its model.")
    return replace(source, name=f"{source.name}-adapter", adapter=path)


def _kept_step(run: Run) -> int:
    """The step whose weights a finished run kept: its last, or its best one."""
    if run.heldout is not None and run.heldout.step is not None:  # earlier versions did not record it
        return run.heldout.step
    if not run.resolved.trainer.load_best_model_at_end:
        return run.step
    newest = next(complete_checkpoints(run.folder), None)
    if newest is not None:  # a step that was measured and not saved is not kept
        best = progress_of(newest).best_model_checkpoint
        return int(Path(best).name.rpartition("-")[2]) if best else step_of(newest)
    measured = [(row.eval_loss, row.step) for row in run.metrics if row.eval_loss is not None and row.step > 0]
    return min(measured)[1] if measured else run.step


def _converted(path: Path, place: RunFolder, tokenizer: str | None) -> PushSource:
    """Weights of another code base, as a folder of ours in `place`."""
    settings = path / "train.json"  # of the reference series
    beside = read_json(settings) if settings.is_file() else {}
    if not isinstance(beside, dict):
        raise UsageError(f"{settings} holds no settings. Take it away, or make it as the reference series does.")
    model = place.root / "converted"
    source = convert(str(path), model, OURS, tokenizer=tokenizer, overwrite=True)
    if not (model / "tokenizer.json").is_file():
        shutil.rmtree(model)
        raise UsageError(f"no tokenizer lies beside {path}. Name the one it was trained with: --tokenizer FOLDER_OR_ID")
    told = {"what": source.what, "settings": beside, "origin": origin_of(path)}
    write_json(model / "converted.json", told)  # whoever publishes this folder by its own name later is told too
    return PushSource(path.resolve().name, model, model, place, converted=told, origin=told["origin"])


def _model_type(path: Path) -> str | None:
    try:
        return json.loads((path / "config.json").read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError):
        return None
