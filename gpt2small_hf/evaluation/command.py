"""`gpt2small evaluate MODEL…`: models × tasks → items, scores, differences and tables in a folder.

Each task's items are written when it is done, so an interrupted evaluation continues with the next task.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from gpt2small_hf.config.data import PrepareArguments
from gpt2small_hf.data.corpus.prepare import prepare
from gpt2small_hf.data.text_dataset import TextDataset
from gpt2small_hf.errors import UsageError
from gpt2small_hf.evaluation.benchmarks import (
    Benchmarks,
    ContextTooShortError,
    check_installed,
    load_benchmarks,
    run_benchmark,
    wrap_model,
)
from gpt2small_hf.evaluation.comparison import (
    HELD_OUT,
    EvaluationResults,
    ModelCompletion,
    benchmark_table,
    completion_tables,
    group_table,
    heldout_table,
    notes_of,
    results_of,
    score_of,
    with_groups,
)
from gpt2small_hf.evaluation.completions import complete
from gpt2small_hf.evaluation.heldout import heldout_losses
from gpt2small_hf.evaluation.items import Header, Item, TaskItems, Text
from gpt2small_hf.evaluation.models import ModelSource, load_model, weights_sha256
from gpt2small_hf.evaluation.replicates import group_scores, replicates_of
from gpt2small_hf.formatting import console_table, escaped, markdown_table, one_line
from gpt2small_hf.runs.files import atomic_write
from gpt2small_hf.runs.layout import DataFolder
from gpt2small_hf.runs.provenance import made_by
from gpt2small_hf.runs.reader import Run

MOST_SEQ_LEN = 1024


@dataclass(frozen=True)
class Evaluation:
    """What to measure, and how."""

    models: list[ModelSource]
    tasks: list[str]
    """Names of benchmarks."""
    output_dir: Path
    heldout: bool = True
    text: list[str] | None = None
    data_dir: Path | None = None
    split: str = "validation"
    seq_len: int | None = None
    max_rows: int | None = None
    prompts: list[str] | None = None
    baseline: str | None = None
    limit: int | None = None
    num_fewshot: int | None = None
    chat_template: bool = False
    batch_size: int = 32
    dtype: str = "float32"
    device: str | None = None
    trust_remote_code: bool = False
    overwrite: bool = False

    @property
    def local_tasks(self) -> Path:
        """The folder of YAML tasks made from local files."""
        return self.output_dir / "tasks"


def evaluate_models(wanted: Evaluation) -> EvaluationResults:
    """Measure all models, write items, results.json and table.md, and print the tables.

    Raises: UsageError for a model, text or task that cannot be used.
    """
    logging.disable_progress_bar()  # those of transformers while it loads weights
    harness = check_installed() if wanted.tasks else None
    local = wanted.local_tasks if wanted.local_tasks.is_dir() else None
    benchmarks = load_benchmarks(wanted.tasks, local, wanted.num_fewshot) if wanted.tasks else Benchmarks({}, {})
    found: dict[str, dict[str, TaskItems]] = {}
    completions: list[ModelCompletion] = []
    skipped: list[str] = []
    with _progress() as progress:
        for source in wanted.models:
            measured = _Model(wanted, source, harness, progress)
            if wanted.heldout:
                found.setdefault(HELD_OUT, {})[source.label] = measured.heldout()
            for name, task in benchmarks.tasks.items():
                try:
                    found.setdefault(name, {})[source.label] = measured.benchmark(name, task)
                except ContextTooShortError as error:
                    skipped.append(f"{name} was not measured for {source.label}: {error}")
            completions += measured.completions()
            measured.print_summary(benchmarks, found)
    results = results_of(with_groups(found, benchmarks.groups), wanted.baseline)
    groups, differences = group_scores(results.scores, replicates_of(wanted.models), wanted.baseline)
    results = replace(results, groups=groups, group_comparisons=differences, completions=completions)
    return _finished(wanted, results, skipped)


def _finished(wanted: Evaluation, results: EvaluationResults, skipped: list[str]) -> EvaluationResults:
    """Write results.json and table.md, and print the tables."""
    results = replace(results, notes=[*results.notes, *skipped], made_by=made_by([]))
    path, page = wanted.output_dir / "results.json", wanted.output_dir / "table.md"
    results.save(path)
    tables = [table for table in (heldout_table(results), benchmark_table(results), group_table(results)) if table]
    parts = ["# Evaluation"]
    for header, *rows in tables:
        parts.append(markdown_table(header, rows, range(2)))
        print(f"\n{console_table(header, rows, range(2))}")
    for prompt, (header, *rows) in completion_tables(results).items():
        parts += [f"## {escaped(prompt)}", markdown_table(header, rows, range(3))]
        shown = [[model, one_line(greedy, 80)] for model, greedy, _ in rows]
        print(f"\n{console_table(['model', one_line(prompt, 80)], shown, range(2))}")
    sentences = notes_of(results)
    parts.append("\n".join(f"- {escaped(sentence)}" for sentence in sentences))
    with atomic_write(page) as temporary:
        temporary.write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")
    print("\n".join(["", *sentences, f"wrote {page}, {path}, {wanted.output_dir / 'items'}"]))
    return results


class _Model:
    """One model of an evaluation; it is loaded when a task has no results yet."""

    def __init__(self, wanted: Evaluation, source: ModelSource, harness: str | None, progress: Progress) -> None:
        self.wanted, self.source, self.harness, self.progress = wanted, source, harness, progress
        self.folder = wanted.output_dir / "items" / source.label.replace("/", "--").replace(":", "@")
        self.model, self.tokenizer = load_model(
            source, dtype=wanted.dtype, trust_remote_code=wanted.trust_remote_code, device=wanted.device
        )
        self.model.eval()
        self.weights = weights_sha256(source)

    def heldout(self) -> TaskItems:
        """Measure the loss on held-out rows."""
        settings = {"dtype": self.wanted.dtype, **_versions("torch", "transformers")}
        rows = heldout_rows(self.wanted, self.source, self.model, self.tokenizer)
        tokens = rows.tokens(0, len(rows) * rows.seq_len)
        digest = hashlib.sha256(f"{rows.seq_len} {tokens.dtype}".encode() + tokens.tobytes()).hexdigest()

        def measure() -> tuple[list[Item], str]:
            losses = heldout_losses(self.model, rows, batch_size=self.wanted.batch_size)
            ends = np.cumsum(rows.supervised_per_row())[:-1]
            n_bytes = [float(part.sum()) for part in np.split(rows.supervised_bytes(self.tokenizer), ends)]
            parts = np.split(losses, ends)
            items: list[Item] = [
                Text(id=at, nats=_finite(part.sum()), n_tokens=len(part), n_bytes=size)
                for at, (part, size) in enumerate(zip(parts, n_bytes, strict=True))
            ]
            return items, digest

        return self._kept_or(HELD_OUT, {**settings, "seq_len": rows.seq_len, "rows": len(rows)}, measure, digest)

    def benchmark(self, name: str, task: Any) -> TaskItems:
        """Measure a benchmark."""
        settings: dict[str, Any] = {
            "num_fewshot": task.get_config("num_fewshot"),
            "limit": self.wanted.limit,
            "chat_template": self.wanted.chat_template,
            "dtype": self.wanted.dtype,
            "lm_eval": self.harness,
            **_versions("torch", "transformers"),
        }

        def measure() -> tuple[list[Item], str]:
            bar = self.progress.add_task(f"{self.source.label}: {name}", total=None)
            try:
                model = wrap_model(
                    self.model,
                    self.tokenizer,
                    self.wanted.batch_size,
                    started=lambda total: self.progress.update(bar, total=total),
                    advance=lambda rows: self.progress.advance(bar, rows),
                )
                settings["prefix_token"] = self.tokenizer.decode([model.prefix_token_id])
                return run_benchmark(task, model, limit=self.wanted.limit, chat_template=self.wanted.chat_template)
            finally:
                self.progress.remove_task(bar)

        return self._kept_or(name, settings, measure)

    def _kept_or(
        self,
        task: str,
        settings: dict[str, Any],
        measure: Callable[[], tuple[list[Item], str]],
        items_sha256: str | None = None,
    ) -> TaskItems:
        """Return the items of a task from their file, or measure and write them.

        Raises: UsageError if the file is of other weights or settings.
        """
        path = self.folder / f"{task}.jsonl"
        if path.exists() and not self.wanted.overwrite:
            kept = TaskItems.load(path)
            self._check_same(path, kept.header, settings, items_sha256)
            return kept
        items, digest = measure()
        header = Header(
            task=task,
            model=self.source.label,
            weights_sha256=self.weights,
            items_sha256=digest,
            n_items=len(items),
            settings={**settings, "batch_size": self.wanted.batch_size},
        )
        found = TaskItems(header, items)
        found.save(path)
        return found

    def _check_same(self, path: Path, kept: Header, settings: dict[str, Any], items_sha256: str | None) -> None:
        former = {"weights": kept.weights_sha256[:8], "items": kept.items_sha256[:8], **kept.settings}
        now = {"weights": self.weights[:8], "items": (items_sha256 or kept.items_sha256)[:8], **settings}
        for name, value in now.items():
            if former.get(name) != value:
                raise UsageError(
                    f"{path} has results with {name} {former.get(name)}, not {value}. Give another --output_dir, or "
                    "--overwrite to measure again."
                )

    def completions(self) -> list[ModelCompletion]:
        """Continue the prompts."""
        prompts, chat = self.wanted.prompts or [], self.wanted.chat_template
        found = complete(self.model, self.tokenizer, prompts, chat=chat) if prompts else []
        return [ModelCompletion(model=self.source.label, **vars(one)) for one in found]

    def print_summary(self, benchmarks: Benchmarks, found: dict[str, dict[str, TaskItems]]) -> None:
        """Print a line with the model's scores."""
        label = self.source.label
        mine = {task: {label: models[label]} for task, models in found.items() if label in models}
        parts: list[str] = []
        for task, models in with_groups(mine, benchmarks.groups).items():
            for model, items in models.items():
                name, first = next(iter(score_of(task, model, items).scores.items()))
                parts.append(f"{task} {name} {first.value:.4f}")
        if parts:
            print(f"{self.source.label}: {', '.join(parts)}")


def heldout_rows(
    wanted: Evaluation, source: ModelSource, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> TextDataset:
    """Return the rows of --data_dir, of --text in the model's tokens, or those held out of its run.

    Raises: UsageError if there are none, or the model cannot read them.
    """
    context = getattr(model.config, "max_position_embeddings", MOST_SEQ_LEN)
    seq_len = wanted.seq_len or min(context, MOST_SEQ_LEN)
    if seq_len > context:
        raise UsageError(f"--seq_len is {seq_len}, but {source.label} has a context of {context}. Lower it.")
    if wanted.text:
        args = PrepareArguments(text=wanted.text, tokenizer=source.path_or_id, validation_fraction=0.0)
        folder, split = prepare(args, None), "train"
    elif wanted.data_dir is not None:
        folder, split = wanted.data_dir, wanted.split
    elif source.run is not None:
        settings = Run(source.run).resolved
        folder, split = Path(settings.data.folder), "validation"
        seq_len = wanted.seq_len or settings.seq_len
        if not DataFolder(folder).exists:
            raise UsageError(
                f"{source.label} has no held-out text in {folder}: it was trained on chats, or the folder is "
                "elsewhere. Give --text or --data_dir."
            )
    else:
        raise UsageError(f"{source.label} is not a run, so it has no held-out text. Give --text or --data_dir.")
    rows = TextDataset(folder, split, seq_len, max_rows=wanted.max_rows)
    if rows.largest_id >= model.config.vocab_size:
        raise UsageError(
            f"{folder} has token {rows.largest_id:,}, but {source.label} has {model.config.vocab_size:,} entries: "
            "it has another tokenizer. Give --text instead."
        )
    return rows


def _versions(*packages: str) -> dict[str, str]:
    return {package: version(package) for package in packages}


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


@contextmanager
def _progress() -> Iterator[Progress]:
    console = Console(file=sys.stderr)  # this stream: benchmarks redirect `sys.stderr` for a time
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress
