"""A run → what its card states about its results: held-out loss, comparison with a baseline, samples, answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2small_hf.config.recipe import BASELINE
from gpt2small_hf.evaluation.comparison import PERCENT
from gpt2small_hf.evaluation.estimates import CONFIDENCE
from gpt2small_hf.formatting import one_line
from gpt2small_hf.publishing.lineage_facts import Excerpt, baseline_repository
from gpt2small_hf.publishing.privacy import scrub
from gpt2small_hf.publishing.publication import Publication
from gpt2small_hf.publishing.source import PushSource
from gpt2small_hf.report.notes import rise_line
from gpt2small_hf.report.page import SampleTable, sample_tables
from gpt2small_hf.report.sweep import round_loss
from gpt2small_hf.runs.layout import RunFolder, SweepFolder
from gpt2small_hf.runs.reader import Run
from gpt2small_hf.runs.records import Resolved
from gpt2small_hf.runs.results import (
    Answer,
    Completions,
    HeldOut,
    MetricsRow,
    RecipeResult,
    Sample,
    Score,
    SweepResults,
    TaskScore,
)
from gpt2small_hf.training.resume import changed

MAX_SAMPLES = 3
MAX_SAMPLE_CHARACTERS = 66
"""Of a sample in the table of samples over training: a wider table would have to be scrolled on the Hub."""
IGNORED_SETTINGS = {"output_dir", "prompts", "num_threads", "data_dir", "data_seed"}
"""Settings whose difference from a baseline is no change to the recipe."""


@dataclass(frozen=True)
class LossRise:
    """A held-out loss above that before training."""

    before: float
    after: float
    message: str
    """For the console."""


@dataclass(frozen=True)
class BenchmarkMeasure:
    """One measure of a benchmark."""

    task: str
    measure: str
    """`accuracy`, `accuracy_norm`, `bits_per_byte`, or one of the harness."""
    is_share: bool
    """Whether the value is a share of items, which is shown in percent."""
    score: Score
    chance: float | None
    """Value of a guess; None if it is not known for this measure."""
    is_chance: bool
    """Whether the 95 % interval contains chance or is below it."""


@dataclass(frozen=True)
class BenchmarkFacts:
    """The benchmarks that a run measured on these weights."""

    step: int
    harness: str
    """Version of lm-evaluation-harness."""
    limit: int | None
    """Maximum number of items of a task."""
    rows: list[BenchmarkMeasure]
    confidence: float = CONFIDENCE
    """Of the intervals."""


def benchmarks(source: PushSource) -> BenchmarkFacts | None:
    """Return the scores of --eval_tasks at the step of the weights; None if this step was not measured."""
    if source.run is None:
        return None
    step = source.run.step if source.step is None else source.step
    row = next((row for row in source.run.metrics if row.benchmarks is not None and row.step == step), None)
    if row is None or row.benchmarks is None:
        return None
    rows = [_benchmark_measure(one, name, score) for one in row.benchmarks.scores for name, score in one.scores.items()]
    return BenchmarkFacts(step, row.benchmarks.harness, row.benchmarks.limit, rows) if rows else None


def _benchmark_measure(one: TaskScore, name: str, score: Score) -> BenchmarkMeasure:
    chance = one.chance if name in ("accuracy", "accuracy_norm") else None
    is_chance = chance is not None and (score.low is None or score.low <= chance)
    return BenchmarkMeasure(one.task, name, name in PERCENT, score, chance, is_chance)


def held_out_facts(source: PushSource) -> HeldOut | None:
    """Return the held-out results; None of checkpoints and where nothing was measured."""
    return None if source.run is None or source.is_checkpoint else source.run.measured


def loss_at_step(source: PushSource) -> MetricsRow | None:
    """Return the last log entry with a held-out loss up to the step of a checkpoint; None of other models."""
    if not source.is_checkpoint or source.run is None or source.step is None:
        return None
    held = (row for row in reversed(source.run.metrics) if row.eval_loss is not None and 0 < row.step <= source.step)
    return next(held, None)


def loss_rise(source: PushSource) -> LossRise | None:
    """Return the held-out losses if that of these weights is above that before training."""
    run = source.run
    if run is None:
        return None
    if source.is_checkpoint:
        then, chats = loss_at_step(source), run.resolved.data.validation
        before = run.loss_before_nats
        after, conversations = then.eval_loss if then else None, chats.trained_on if chats else None
    else:
        heldout = run.heldout
        before = heldout.before.loss_nats if heldout and heldout.before else None
        after = heldout.after.loss_nats if heldout and heldout.after else None
        conversations = heldout.rows.conversations if heldout else None
    if before is None or after is None:
        return None
    line = rise_line(before, after, conversations, run.train_loss_nats)
    if line is None:
        return None
    return LossRise(before, after, line)


def samples(source: PushSource, folder: Path, prompts: list[str]) -> Excerpt | None:
    """Return what the model generated after the prompts that are published; None if nothing was saved."""
    if source.run is None:
        return None
    file = RunFolder(folder).completions
    if source.is_checkpoint:
        found = [sample for sample in _saved_samples(source.run, prompts) if sample.step == source.step]
    else:
        found = Completions.load(file).completions if file.is_file() else []
    return Excerpt(found[:MAX_SAMPLES], len(found)) if found else None


def prompts_in_training(run: Run, shown: Excerpt) -> int | None:
    """Count the prompts of some samples that are in the training chats; None if it was not recorded."""
    flags = run.resolved.prompts_in_training or []  # earlier versions did not record them
    known = dict(zip(run.resolved.run.prompts, flags, strict=False))
    prompts = [sample.prompt for sample in shown.shown]
    return sum(known[prompt] for prompt in prompts) if known.keys() >= set(prompts) else None


def _saved_samples(run: Run, prompts: list[str]) -> list[Sample]:
    """Return the samples saved while training; of a run on chats those after `prompts`, which are published."""
    return [sample for sample in run.samples if not run.resolved.chat or sample.prompt in prompts]


def held_out_answers(source: PushSource) -> list[Answer]:
    """Return the answers to held-out questions that the card may have beside the samples, which may be such already."""
    run = source.run
    if run is None or source.is_checkpoint or run.resolved.prompts_from == "held-out chats":
        return []
    return run.answers


def answers(source: PushSource) -> Excerpt | None:
    """Return the first answers to held-out questions."""
    found = held_out_answers(source)
    return Excerpt(found[:MAX_SAMPLES], len(found)) if found else None


def samples_over_training(source: PushSource, prompts: list[str]) -> SampleTable | None:
    """Return the samples after the first prompt at several steps up to the weights; None of fewer than two."""
    if source.run is None or not (saved := _saved_samples(source.run, prompts)):
        return None
    first = sample_tables(saved, source.run.metrics)[0]
    until = source.run.step if source.step is None else source.step
    rows = [row for row in first.rows if int(row[0].replace(",", "")) <= until]
    shown = [[*row[:-1], one_line(row[-1], MAX_SAMPLE_CHARACTERS)] for row in rows]
    return SampleTable(first.prompt, shown) if len(shown) > 1 else None


def comparison(run: Run, baseline: Run, publication: Publication) -> dict[str, Any]:
    """Compare a run with a baseline: settings and losses."""
    is_comparable = run.measured and baseline.measured and run.measured_on == baseline.measured_on
    scrubbed = _scrubbed(baseline)
    settings = changed(scrubbed, _scrubbed(run))
    return {
        "name": baseline.name,
        "repo": baseline_repository(publication),
        "baseline": scrubbed,
        "changes": [(name, then, now) for name, then, now in settings if name not in IGNORED_SETTINGS],
        "losses": (run.loss_nats, baseline.loss_nats) if is_comparable else None,
        "paired": paired_comparison(run, baseline) if is_comparable else None,
    }


def _scrubbed(run: Run) -> Resolved:
    return Resolved.from_json(scrub(run.resolved.to_json()), f"{run.folder.resolved}:")


def paired_comparison(run: Run, baseline: Run) -> RecipeResult | None:
    """Read the verdict on a run's recipe from the sweep of both, as `report.sweep.compare` computed it.

    Returns: None if the two are not runs of one sweep, or if too few runs ended to estimate the noise.
    """
    root = run.folder.root.resolve().parent
    if not (results := SweepFolder(root).results).is_file() or baseline.folder.root.resolve().parent != root:
        return None
    rows = {row.recipe: row for row in SweepResults.load(results).recipes}
    if not _has(rows.get(BASELINE), baseline):
        return None
    return next((row for row in rows.values() if _has(row, run) and row.standard_error is not None), None)


def _has(row: RecipeResult | None, run: Run) -> bool:
    """Whether a run is among those of a recipe's row, with the loss that it has now."""
    if row is None or run.measured is None:
        return False
    losses = {SweepFolder(Path()).run(row.recipe, r.init_seed, r.seed).root.name: r.loss_nats for r in row.runs}
    return losses.get(run.folder.root.resolve().name) == round_loss(run.loss_nats)
