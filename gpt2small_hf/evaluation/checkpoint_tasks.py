"""Names of benchmarks, and a model in training → their scores at a step, without an effect on training."""

from __future__ import annotations

import copy
import math
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gpt2small_hf.errors import UsageError
from gpt2small_hf.evaluation.benchmarks import (
    PRESETS,
    Benchmarks,
    ContextTooShortError,
    check_installed,
    load_benchmarks,
    local_names,
    run_benchmark,
    wrap_model,
    write_tasks,
)
from gpt2small_hf.evaluation.comparison import score_of, with_groups
from gpt2small_hf.evaluation.items import Header, TaskItems
from gpt2small_hf.runs.results import BenchmarkScores

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MOST_ROWS = 32
"""Maximum number of rows of a forward pass: benchmarks compute the logits of all positions."""


@dataclass(frozen=True)
class CheckpointTasks:
    """Benchmarks whose data is loaded."""

    benchmarks: Benchmarks
    harness: str
    limit: int | None = None

    def measure(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, step: int, *, batch_size: int
    ) -> tuple[BenchmarkScores, list[str]]:
        """Evaluate a model on all tasks, with dropout off. Random states and the model stay as they are.

        Returns: the scores, and a sentence for each task that cannot be measured.
        """
        began, label = time.perf_counter(), f"step {step:,}"
        found: dict[str, dict[str, TaskItems]] = {}
        skipped: list[str] = []
        with undisturbed(model):
            # The harness changes padding and truncation of the tokenizer.
            wrapped = wrap_model(
                model,
                copy.deepcopy(tokenizer),
                min(batch_size, MOST_ROWS),
                started=lambda total: None,
                advance=lambda rows: None,
            )
            for name, task in self.benchmarks.tasks.items():
                try:
                    items, digest = run_benchmark(task, wrapped, limit=self.limit)
                except ContextTooShortError as error:
                    skipped.append(f"--eval_tasks {name} is not measured: {error}")
                    continue
                header = Header(
                    task=name, model=label, weights_sha256="", items_sha256=digest, n_items=len(items), settings={}
                )
                found[name] = {label: TaskItems(header, items)}
        shown = with_groups(found, self.benchmarks.groups).items()
        scores = [score_of(name, label, items[label]) for name, items in shown if label in items]
        finite = [
            replace(one, scores={name: it for name, it in one.scores.items() if math.isfinite(it.value)})
            for one in scores
        ]
        seconds = round(time.perf_counter() - began, 3)
        return BenchmarkScores(scores=finite, harness=self.harness, limit=self.limit, seconds=seconds), skipped


def check_tasks(data: Path | None) -> None:
    """Check what can be checked without the harness: that it is installed, and the form of local files.

    Raises: UsageError otherwise.
    """
    check_installed()
    if data is not None:
        if not data.is_dir():
            raise UsageError(f"--eval_task_data {data} does not exist. Name a folder.")
        _local_names(data)


def load_tasks(names: Sequence[str] | None, data: Path | None, limit: int | None) -> CheckpointTasks:
    """Load benchmarks: `names`, or all of the folder `data`.

    Raises: UsageError if the harness is not installed, a task is not known or its data cannot be loaded.
    """
    harness = check_installed()
    local = {} if data is None else _local_names(data)
    wanted = list(local) if names is None else [name for one in names for name in PRESETS.get(one, [one])]
    with tempfile.TemporaryDirectory() as folder, _random_states():
        output = Path(folder)
        try:
            write_tasks({name: files for name, files in local.items() if name in wanted}, output)
            benchmarks = load_benchmarks(wanted, output if local else None, None)
        except UsageError as error:
            raise UsageError(_own_flags(str(error))) from None
    return CheckpointTasks(benchmarks, harness, limit)


def _local_names(data: Path) -> dict[str, list[Path]]:
    try:
        return local_names(data)
    except UsageError as error:
        raise UsageError(_own_flags(str(error))) from None


def _own_flags(message: str) -> str:
    """Replace the flags of `evaluate` by those of `train`."""
    return message.replace("--task_data", "--eval_task_data").replace("--tasks", "--eval_tasks")


@contextmanager
def undisturbed(model: PreTrainedModel) -> Iterator[None]:
    """Turn dropout and gradients off, and restore afterwards: random states, modes and the generation settings."""
    import torch

    modes = {module: module.training for module in model.modules()}
    settings = model.generation_config
    model.generation_config = copy.deepcopy(settings)  # the harness changes it, and checkpoints contain it
    kind = model.device.type
    devices = [] if kind == "cpu" else [model.device]
    fork = torch.random.fork_rng(devices, device_type="cuda" if kind == "cpu" else kind)
    try:
        with _random_states(), fork, torch.no_grad():
            model.eval()
            yield
    finally:
        model.generation_config = settings
        for module, is_training in modes.items():
            module.training = is_training


@contextmanager
def _random_states() -> Iterator[None]:
    """Restore the states of the global generators of Python and NumPy."""
    python, arrays = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)
