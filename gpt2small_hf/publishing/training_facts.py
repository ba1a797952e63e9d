"""A run → what its card states about the training, beside its settings: amounts, loss, time, memory."""

from __future__ import annotations

from typing import Any

from gpt2small_hf.model.configuration_gpt2small import GPT2SmallConfig
from gpt2small_hf.publishing.source import ADAPTER_CONFIG, PushSource
from gpt2small_hf.runs.files import read_json
from gpt2small_hf.runs.reader import Run, logged_tokens, progress_of, tokens_of
from gpt2small_hf.runs.results import MetricsRow
from gpt2small_hf.training.budget import flops_per_token


def training_facts(source: PushSource, config: GPT2SmallConfig) -> dict[str, Any]:
    """Return what was measured while training, up to the weights of a checkpoint; None if it is not known."""
    run = source.run
    assert run is not None
    resolved, rows, tokens = run.resolved, _rows_until(source), trained_tokens(source)
    chats, epochs = resolved.data.train, _last(rows, "epoch")
    if source.is_checkpoint:  # it may be between two lines of the log
        epochs = progress_of(source.model).epoch or epochs
    tokens_per_row = chats.tokens / chats.rows if chats else resolved.seq_len
    flops = flops_per_token(config, resolved.seq_len, resolved.run.lora_rank)
    return {
        "is_finished": run.heldout is not None,
        "steps": (source.step or 0) if source.is_checkpoint else run.step,
        "last_step": run.step,
        "planned_steps": _planned_steps(run),
        "tokens": tokens,
        "tokens_per_step": None if resolved.rows_per_step is None else round(resolved.rows_per_step * tokens_per_row),
        "epochs": epochs,
        "train_loss": _last(rows, "loss"),
        "train_loss_step": _logged_until(source, "loss"),
        "kept": _kept(source, run),
        "lora_layers": _lora_layers(run),  # empty: all linear layers
        "seconds": training_seconds(rows),
        "seconds_step": _logged_until(source, "tokens_per_second"),
        "tokens_per_second": run.usual("tokens_per_second"),
        "mfu": run.usual("mfu"),
        "memory_gib": max((row.memory_gib for row in rows if row.memory_gib is not None), default=None),
        "flops": None if tokens is None else flops * tokens,
    }


def trained_tokens(source: PushSource) -> int | None:
    """Return the number of training tokens up to the weights; None if they were not counted."""
    logged = logged_tokens(_rows_until(source))
    return max(logged or 0, tokens_of(source.model)) or None if source.is_checkpoint else logged


def training_seconds(rows: list[MetricsRow]) -> float | None:
    """Sum the time in training steps over all sessions of a run: tokens of each logged interval by its tokens/s."""
    total, before = 0.0, 0
    for row in rows:
        if row.tokens_per_second and row.num_input_tokens_seen is not None:
            total += (row.num_input_tokens_seen - before) / row.tokens_per_second
            before = row.num_input_tokens_seen
    return total or None


def _lora_layers(run: Run) -> list[str]:
    settings = run.folder.adapter / ADAPTER_CONFIG
    targets = read_json(settings)["target_modules"] if settings.is_file() else []
    return sorted({target.rpartition(".")[2] for target in targets})


def _planned_steps(run: Run) -> int:
    """Return the number of steps that the schedule of a run was made for."""
    if run.newest is not None:
        return progress_of(run.newest).max_steps
    planned = run.resolved.trainer.max_steps
    return planned if planned > 0 else run.step


def _rows_until(source: PushSource) -> list[MetricsRow]:
    """Return what was logged up to the step of the weights, or to the end of a finished run."""
    assert source.run is not None
    last = source.step if source.is_checkpoint and source.step is not None else source.run.step
    return [row for row in source.run.metrics if row.step <= last]


def _logged_until(source: PushSource, name: str) -> int | None:
    """Return the step of a checkpoint's last logged value of this name; None if it is the checkpoint's own step."""
    last = next((row.step for row in reversed(_rows_until(source)) if row.has(name)), None)
    return last if source.is_checkpoint and last != source.step else None


def _kept(source: PushSource, run: Run) -> dict[str, float | None] | None:
    """Describe the step before the last whose weights a finished run kept; None if it kept the last."""
    if source.is_checkpoint or source.step is None or source.step == run.step:
        return None
    rows = [row for row in run.metrics if row.step <= source.step]
    return {"epochs": _last(rows, "epoch"), "train_loss": _last(rows, "loss")}


def _last(rows: list[MetricsRow], name: str) -> float | None:
    return next((getattr(row, name) for row in reversed(rows) if row.has(name)), None)
