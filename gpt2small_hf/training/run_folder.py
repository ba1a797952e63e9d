"""The run folder while a run trains: locked, with the run that it replaces set aside until this one is finished."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gpt2small_hf.config.recipe import recipe_text
from gpt2small_hf.config.resolve import ALTERNATIVES, RunConfig
from gpt2small_hf.data.preview.render import as_text
from gpt2small_hf.errors import UsageError
from gpt2small_hf.runs.files import atomic_write, remove, remove_if_empty
from gpt2small_hf.runs.layout import RunFolder
from gpt2small_hf.runs.records import Resolved
from gpt2small_hf.training.inputs import RunInputs
from gpt2small_hf.training.resume import lock_folder

ROWS_TO_SHOW = 3


@contextmanager
def training_in(run: RunFolder, *, read_only: bool) -> Iterator[None]:
    """Create and lock the run folder until training ends, unless `read_only`. Remove created folders that stay empty.

    Raises: UsageError if another process trains in the folder.
    """
    created = [folder for folder in (run.checkpoints, run.root) if not folder.exists()]  # the Trainer creates both, too
    try:
        if read_only:
            yield
            return
        run.root.mkdir(parents=True, exist_ok=True)
        with lock_folder(run):
            restore(run)
            try:
                yield
            finally:
                if run.checkpoints in created:
                    remove_if_empty(run.checkpoints)
                if [*run.root.glob("*")] == [run.lock]:
                    with suppress(OSError):  # Windows does not remove an open file
                        run.lock.unlink()
    finally:
        for folder in created:
            remove_if_empty(folder)


def start_folder(config: RunConfig, record: Resolved, inputs: RunInputs) -> None:
    """Write the recipe, every value in force, and the first rows, before the first step.

    With --overwrite, a former run in the folder is set aside until this one is finished.
    """
    run, recipe = config.folder, recipe_text(config.recipe, ALTERNATIVES)
    if config.run.overwrite:
        set_aside(run)
    with atomic_write(run.recipe) as temporary:
        temporary.write_text(recipe, encoding="utf-8")
    first = range(min(ROWS_TO_SHOW, len(inputs.rows)))
    with atomic_write(run.first_rows) as temporary:
        temporary.write_text(as_text(inputs.rows, inputs.tokenizer, first), encoding="utf-8")
    record.save(run.resolved)


def set_aside(run: RunFolder) -> None:
    """Move the run in the folder to `former/`. An earlier run there is replaced only by a finished one."""
    if run.former.exists() and not run.finished:
        for path in contents(run):
            remove(path)
        return
    shutil.rmtree(run.former, ignore_errors=True)
    run.former_incomplete.mkdir()
    for path in contents(run):
        path.rename(run.former_incomplete / path.name)
    run.former_incomplete.rename(run.former)


def restore(run: RunFolder) -> None:
    """Move back what `set_aside` had moved when it was killed.

    Raises: UsageError if another file has one of the names by now; then nothing is moved.
    """
    if not run.former_incomplete.exists():
        return
    moved = list(run.former_incomplete.iterdir())
    for path in moved:
        taken = run.root / path.name
        remove_if_empty(taken)
        if taken.exists():
            raise UsageError(
                f"{path} is of a run that --overwrite was moving when it was killed, and {taken} is newer. Remove one."
            )
    for path in moved:
        path.rename(run.root / path.name)
    run.former_incomplete.rmdir()


def contents(run: RunFolder) -> list[Path]:
    """List the files and folders of a run, `resolved.json` last: it marks the folder as a run folder."""
    return sorted(filter(run.is_own, run.root.iterdir()), key=lambda path: path == run.resolved)
