"""A run → what its card states about the training: amounts, settings, hardware, time, versions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpt2small_hf.model.configuration_gpt2small import GPT2SmallConfig
from gpt2small_hf.publishing.privacy import public_ids, scrub_command
from gpt2small_hf.publishing.source import PushSource
from gpt2small_hf.runs.files import read_json
from gpt2small_hf.runs.reader import Run, logged_tokens, tokens_of
from gpt2small_hf.runs.records import DeviceFacts, ModelSettings, ParameterCounts, TrainerSettings
from gpt2small_hf.training.budget import flops_per_token


@dataclass(frozen=True)
class KeptStep:
    """The step before the last whose weights a finished run kept."""

    step: int
    last_step: int
    epochs: float | None
    train_loss: float | None


@dataclass(frozen=True)
class TrainingTotals:
    """How much was trained, up to the weights if they are a checkpoint's."""

    date: str
    steps: int
    planned_steps: int
    tokens: int | None
    epochs: float | None
    conversations: int | None
    loss_on: str | None
    train_loss: float | None
    train_loss_step: int | None
    """Step of `train_loss`; None if it is that of the weights."""
    kept: KeptStep | None


@dataclass(frozen=True)
class LoraSettings:
    """The adapter that was trained."""

    rank: int
    alpha: float
    dropout: float
    layers: list[str]
    """Empty: all linear layers."""
    is_merged: bool
    parameters: ParameterCounts | None
    """None if they were not recorded."""


@dataclass(frozen=True)
class TrainingFacts:
    """The settings of the training."""

    trainer: TrainerSettings
    model: ModelSettings
    rows_per_step: int | None
    tokens_per_step: int | None
    devices: int
    min_lr_rate: float | None
    """Of a cosine schedule: its end, as a share of the peak."""
    scheduler_options: dict[str, Any]
    decays_matrices_only: bool
    uses_fp16: bool
    init_seed: int | None
    """None if it is the seed."""
    lora: LoraSettings | None


@dataclass(frozen=True)
class ComputeFacts:
    """Hardware and time."""

    device: DeviceFacts
    seconds: float | None
    """In training steps."""
    seconds_step: int | None
    """Step up to which `seconds` were logged; None if it is that of the weights."""
    tokens_per_second: float | None
    mfu: float | None
    memory_gib: float | None
    flops: float | None


@dataclass(frozen=True)
class Provenance:
    """The code that trained the model."""

    command: str
    commit: str
    """Empty if it was not recorded."""
    is_dirty: bool
    date: str
    versions: dict[str, str]


def training_totals(source: PushSource) -> TrainingTotals:
    """Return how much was trained."""
    run = source.run
    assert run is not None
    rows, chats = _rows_until(source), run.resolved.data.train
    tokens, epochs = logged_tokens(rows), _last(rows, "epoch")
    if source.is_checkpoint:  # it may be between two lines of the log
        tokens = max(tokens or 0, tokens_of(source.model)) or None  # earlier versions counted none
        epochs = read_json(source.model / "trainer_state.json").get("epoch", epochs)
    return TrainingTotals(
        date=run.resolved.made_by.date[:10],
        steps=(source.step or 0) if source.is_checkpoint else run.step,
        planned_steps=_planned_steps(run),
        tokens=tokens,
        epochs=epochs,
        conversations=chats.trained_on if chats else None,
        loss_on=run.resolved.chat.loss_on if run.resolved.chat else None,
        train_loss=_last(rows, "loss"),
        train_loss_step=_logged_until(source, "loss"),
        kept=_kept(source, run),
    )


def training_facts(run: Run) -> TrainingFacts:
    """Return the settings of the training."""
    resolved = run.resolved
    trainer, rows, counts = resolved.trainer, resolved.rows_per_step, resolved.data.train
    tokens_per_row = counts.tokens / counts.rows if counts else resolved.seq_len
    options = dict(trainer.lr_scheduler_kwargs or {})
    is_cosine = trainer.lr_scheduler_type == "cosine_with_min_lr" and "min_lr_rate" in options
    return TrainingFacts(
        trainer=trainer,
        model=resolved.model,
        rows_per_step=rows,
        tokens_per_step=None if rows is None else round(rows * tokens_per_row),
        devices=resolved.device.count,
        min_lr_rate=options.pop("min_lr_rate") if is_cosine else None,
        scheduler_options=options,
        decays_matrices_only=resolved.run.decay == "matrices",
        uses_fp16=trainer.fp16 and resolved.device.type != "cpu",  # Accelerate turns it off on a CPU
        init_seed=None if resolved.run.init_seed == trainer.seed else resolved.run.init_seed,
        lora=_lora(run),
    )


def _lora(run: Run) -> LoraSettings | None:
    given, counts = run.resolved.run, run.resolved.parameters
    if given.lora_rank is None:
        return None
    settings = run.folder.adapter / "adapter_config.json"
    targets = read_json(settings)["target_modules"] if settings.is_file() else []
    return LoraSettings(
        rank=given.lora_rank,
        alpha=given.lora_alpha or 2 * given.lora_rank,
        dropout=given.lora_dropout or 0,
        layers=sorted({target.rpartition(".")[2] for target in targets}),
        is_merged=run.heldout is not None,
        parameters=counts if counts and counts.trained != counts.total else None,
    )


def compute_facts(source: PushSource, config: GPT2SmallConfig) -> ComputeFacts:
    """Return hardware, time and FLOPs of the training up to the weights."""
    run, rows = source.run, _rows_until(source)
    assert run is not None
    tokens = training_totals(source).tokens
    flops = flops_per_token(config, run.resolved.seq_len, run.resolved.run.lora_rank)
    return ComputeFacts(
        device=run.resolved.device,
        seconds=training_seconds(rows),
        seconds_step=_logged_until(source, "tokens_per_second"),
        tokens_per_second=run.usual("tokens_per_second"),
        mfu=run.usual("mfu"),
        memory_gib=max((row["memory_gib"] for row in rows if "memory_gib" in row), default=None),
        flops=None if tokens is None else flops * tokens,
    )


def provenance(run: Run, private: frozenset[str]) -> Provenance:
    """Return command, commit, date and versions of the training."""
    made_by = run.resolved.made_by
    commit, dirty, _ = (made_by.commit or "").partition("-dirty")
    command = scrub_command(made_by.command, public_ids(run.resolved, private))
    return Provenance(command, commit, bool(dirty), made_by.date, made_by.versions)


def training_seconds(rows: list[dict[str, Any]]) -> float | None:
    """Sum the time in training steps over all sessions of a run: tokens of each logged interval by its tokens/s."""
    total, before = 0.0, 0
    for row in rows:
        if row.get("tokens_per_second") and "num_input_tokens_seen" in row:
            total += (row["num_input_tokens_seen"] - before) / row["tokens_per_second"]
            before = row["num_input_tokens_seen"]
    return total or None


def _planned_steps(run: Run) -> int:
    """Return the number of steps that the schedule of a run was made for."""
    if run.newest is not None:
        return read_json(run.newest / "trainer_state.json")["max_steps"]
    planned = run.resolved.trainer.max_steps
    return planned if planned > 0 else run.step


def _rows_until(source: PushSource) -> list[dict[str, Any]]:
    """Return what was logged up to the step of the weights, or to the end of a finished run."""
    assert source.run is not None
    last = source.step if source.is_checkpoint and source.step is not None else source.run.step
    return [row for row in source.run.metrics if row["step"] <= last]


def _logged_until(source: PushSource, name: str) -> int | None:
    """Return the step of a checkpoint's last logged value of this name; None if it is the checkpoint's own step."""
    last = next((row["step"] for row in reversed(_rows_until(source)) if name in row), None)
    return last if source.is_checkpoint and last != source.step else None


def _kept(source: PushSource, run: Run) -> KeptStep | None:
    if source.is_checkpoint or source.step is None or source.step == run.step:
        return None
    rows = [row for row in run.metrics if row["step"] <= source.step]
    return KeptStep(source.step, run.step, _last(rows, "epoch"), _last(rows, "loss"))


def _last(rows: list[dict[str, Any]], name: str) -> float | None:
    return next((row[name] for row in reversed(rows) if name in row), None)
