"""One run: a `RunConfig` → a run folder with a trained model, its held-out loss and its charts."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import time
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, TrainingArguments
from transformers.utils import logging

from gpt2small_hf.config.parser import without_flags
from gpt2small_hf.config.resolve import RunConfig
from gpt2small_hf.config.run import PROMPT
from gpt2small_hf.data.chat_dataset import ChatDataset
from gpt2small_hf.data.row_dataset import RowDataset
from gpt2small_hf.errors import RunStoppedError, UsageError, disk_is_full, print_stderr
from gpt2small_hf.evaluation.answers import first_questions
from gpt2small_hf.evaluation.checkpoint_tasks import CheckpointTasks, load_tasks
from gpt2small_hf.evaluation.heldout import heldout_losses
from gpt2small_hf.formatting import duration
from gpt2small_hf.invocation import command
from gpt2small_hf.report.charts import draw_charts
from gpt2small_hf.runs.layout import RunFolder, number_of
from gpt2small_hf.runs.reader import Run
from gpt2small_hf.runs.records import Resolved
from gpt2small_hf.runs.results import MetricsRow
from gpt2small_hf.runs.typed_json import save_lines
from gpt2small_hf.training.batch_size import find_batch_size, is_out_of_memory, trials_table
from gpt2small_hf.training.benchmark_callback import BenchmarkCallback
from gpt2small_hf.training.budget import flops_per_token, peak_flops, precision_of, steps_for_tokens
from gpt2small_hf.training.callbacks import (
    ChartCallback,
    EarlyStopping,
    MetricsLog,
    SampleCallback,
    StopOnSignal,
    unsharded_model,
)
from gpt2small_hf.training.checkpoint_files import complete_checkpoints, is_scheduled
from gpt2small_hf.training.distributed import check_launch, run_on_rank_0
from gpt2small_hf.training.finalize import finalize, merge_adapter
from gpt2small_hf.training.health import HealthCallback
from gpt2small_hf.training.inputs import RunInputs, build_run_inputs
from gpt2small_hf.training.memory import check_memory
from gpt2small_hf.training.preflight import preflight, show
from gpt2small_hf.training.progress import ProgressLine
from gpt2small_hf.training.resume import (
    check_folder,
    find_start_checkpoint,
    settings_to_resume,
    start_branch,
    steps_of_branch,
)
from gpt2small_hf.training.run_folder import start_folder, training_in
from gpt2small_hf.training.run_record import count_parameters, describe_run, tokens_per_step
from gpt2small_hf.training.trainer import CausalLMTrainer
from gpt2small_hf.training.trainer_arguments import training_arguments

LESS_MEMORY = (
    "Give --find_batch_size, or a smaller --per_device_train_batch_size with more --gradient_accumulation_steps; "
    "--activation_checkpointing, --bf16 and a shorter --seq_len save memory too."
)


def train(config: RunConfig) -> RunFolder:
    """Train a model, or resume its run. Several processes may call this together; only rank 0 writes and logs.

    >>> run = train(load_recipe("tiny", max_steps=20, output_dir="runs/short"))

    Args:
        config: the settings, from `load_recipe`. They stay as they are.

    Returns: the run folder.
    Raises:  UsageError for anything a user can fix, before the first step; RunStoppedError when training cannot
        continue; RunInterruptedError when a signal ended it.
    """
    run = config.folder
    launch = training_arguments(config.trainer, run.checkpoints)
    check_launch(launch.world_size)
    check_folder(run, config)
    with ExitStack() as stack:
        if launch.process_index > 0:
            stack.enter_context(redirect_stdout(stack.enter_context(Path(os.devnull).open("w"))))
        run_on_rank_0(lambda: stack.enter_context(training_in(run, read_only=config.run.preflight_only)))
        try:
            _train(config, launch)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            first, *_ = str(error).splitlines() or ["no more memory"]
            reason = f"out of memory ({first[:200]}). {LESS_MEMORY} {last_checkpoint(run)}"
            if launch.process_index > 0:  # commands print the errors of rank 0, which may have enough memory
                print(f"rank {launch.process_index}: {reason}", file=sys.stderr)
            raise RunStoppedError(reason) from None
    return run


def _train(config: RunConfig, launch: TrainingArguments) -> None:
    """Run the stages in order: inputs, preflight, training, final evaluation."""
    started, run = time.perf_counter(), config.folder
    logging.disable_progress_bar()  # those of transformers would overwrite the progress line
    if config.run.num_threads is not None:
        torch.set_num_threads(config.run.num_threads)
    tasks = find_tasks(config)
    config, inputs = find_inputs(config, launch)
    arguments = training_arguments(config.trainer, run.checkpoints)
    record = describe_run(config, inputs, arguments)
    checkpoint = None
    if not config.run.preflight_only:  # which checks a run as if it were new
        checkpoint = run_on_rank_0(lambda: find_start_checkpoint(run, config, record))
        if run.finished and not config.run.overwrite:
            _report_finished(run, arguments)
            return
    model = inputs.build()
    record = replace(record, parameters=count_parameters(model))
    if config.run.find_batch_size:
        found = choose_batch_size(config, inputs, model, checkpoint, arguments)
        config, record = config.with_settings(**found), replace(record, trainer=replace(record.trainer, **found))
        arguments = training_arguments(config.trainer, run.checkpoints)
    trainer = build_trainer(config, inputs, model, arguments, checkpoint)
    if config.run.has_eval_tasks:
        add_benchmarks(trainer, run, tasks, is_scheduled_start(checkpoint))
    if checkpoint is None:
        run_on_rank_0(lambda: show(preflight(trainer, config, inputs), everything=config.run.preflight_only))
    if config.run.preflight_only:
        _print_next(config)
        return
    if arguments.process_index == 0:
        start_run(config, record, inputs, trainer, checkpoint)
    fit(trainer, run, checkpoint)
    model = unsharded_model(trainer.accelerator.unwrap_model(trainer.model))  # every rank has a part of it
    if arguments.process_index == 0:
        _finalize_or_stop(config, inputs, trainer, model)
        print(f"done in {duration(time.perf_counter() - started)} · wrote {run.root}")
        print(f"next: {command('chat', str(run.root))}")
        print(f"next: {command('report', str(run.root))}")


# ---- inputs ------------------------------------------------------------------------------------------------------


def find_inputs(config: RunConfig, launch: TrainingArguments) -> tuple[RunConfig, RunInputs]:
    """Find or prepare the data, and complete the settings that depend on it: prompts, steps, the schedule of a branch.

    Raises: UsageError for anything a user can fix.
    """
    if launch.n_gpu > 1:
        raise UsageError(
            f"one process sees {launch.n_gpu} GPUs. Launch one process for each (accelerate launch -m gpt2small_hf "
            "train …), or make one visible: CUDA_VISIBLE_DEVICES=0."
        )
    check_memory(config, device=launch.device)
    inputs = build_run_inputs(config)
    config, rows = inputs.run_config, inputs.rows
    batch_tokens = 0  # unknown
    if not rows.is_chat and not config.run.find_batch_size:
        batch_tokens = min(config.trainer.per_device_train_batch_size, len(rows)) * rows.seq_len
    check_memory(config, inputs.config, device=launch.device, batch_tokens=batch_tokens)
    if config.run.prompts is None:
        prompts, source = default_prompts(rows, inputs.heldout)
        config, inputs = config.with_settings(prompts=prompts), replace(inputs, prompts_from=source)
    steps = steps_for_tokens(inputs.config, config.run, tokens_per_step(config, rows, launch.world_size))
    if steps is not None:
        config = config.with_settings(max_steps=steps)
    if config.run.branch_from is not None:
        n_decay = steps_of_branch(config.run.branch_from, config.trainer.max_steps)
        config = config.with_settings(
            lr_scheduler_type="warmup_stable_decay",
            lr_scheduler_kwargs={"num_decay_steps": n_decay, "decay_type": "linear"},
            warmup_steps=0,  # the run it leaves has warmed up
        )
    return config, inputs


def default_prompts(rows: RowDataset, heldout: RowDataset | None) -> tuple[list[str], str]:
    """Return the prompts of a run without --prompts, and their source, which decides whether they are published."""
    if isinstance(heldout, ChatDataset):
        return first_questions(heldout.chats), "held-out chats"
    if isinstance(rows, ChatDataset):  # nothing is held out
        return first_questions(rows.chats), "training chats"
    return [PROMPT], "default"


def choose_batch_size(
    config: RunConfig, inputs: RunInputs, model: Any, checkpoint: Path | None, arguments: TrainingArguments
) -> dict[str, int]:
    """Return the settings of the micro-batch that fits in memory: measured now, or when the run started."""
    before = settings_to_resume(config.folder, config)
    if before is not None and checkpoint is not None and checkpoint != config.run.branch_from:
        size, accumulation = before.trainer.per_device_train_batch_size, before.trainer.gradient_accumulation_steps
    else:
        size, accumulation, trials = find_batch_size(model, arguments, inputs.rows.seq_len)
        print(trials_table(trials, size, accumulation))
    return {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation}


# ---- preflight ---------------------------------------------------------------------------------------------------


def build_trainer(
    config: RunConfig, inputs: RunInputs, model: Any, arguments: TrainingArguments, checkpoint: Path | None
) -> CausalLMTrainer:
    """Build the Trainer with its callbacks. Raises: UsageError if a package that it needs is not installed."""
    run, rows, settings, device = config.folder, inputs.rows, config.run, arguments.device
    if inputs.config.tie_word_embeddings:
        # Saved under the embedding's name alone; the Trainer would report the other name missing when it resumes.
        model._keys_to_ignore_on_save = set(model._tied_weights_keys)
    inputs.tokenizer.model_max_length = inputs.config.max_position_embeddings
    progress = ProgressLine(tokens_per_step(config, rows, arguments.world_size))
    stop = StopOnSignal(progress, to_resume=settings.command_to_resume)
    samples = SampleCallback(
        run.samples,
        inputs.tokenizer,
        settings.prompts or [],
        chat=rows.is_chat,
        progress=progress,
        all_checkpoints=settings.sample_all_checkpoints,
        starts_scheduled=is_scheduled_start(checkpoint),
    )
    callbacks = [stop, MetricsLog(run.metrics), progress, HealthCallback(run.metrics), samples, ChartCallback(run)]
    if settings.early_stopping_patience is not None:
        callbacks.append(EarlyStopping(settings.early_stopping_patience))
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    try:
        trainer = CausalLMTrainer(
            model=model,
            args=arguments,
            data_collator=rows.collate,
            train_dataset=rows,
            eval_dataset=inputs.heldout,
            processing_class=inputs.tokenizer,
            decay=settings.decay,
            spike_factor=settings.spike_factor,
            max_bad_steps=settings.max_bad_steps,
            flops_per_token=flops_per_token(inputs.config, rows.seq_len, settings.lora_rank),
            peak_flops=peak_flops(gpu, precision_of(arguments)),
            stop=stop,
            callbacks=callbacks,
        )
    except (ImportError, RuntimeError, ValueError) as error:  # such as a reporter that is not installed
        raise UsageError(" ".join(str(error).split())) from error
    trainer.remove_callback(PrinterCallback)
    return trainer


def find_tasks(config: RunConfig) -> CheckpointTasks | None:
    """Load the benchmarks of --eval_tasks on rank 0. Returns: None on other ranks, and if none are to be evaluated.

    Raises: UsageError on every rank for tasks that cannot be used.
    """
    settings, found = config.run, list[CheckpointTasks]()
    if settings.has_eval_tasks and (settings.overwrite or not config.folder.finished):
        run_on_rank_0(  # which keeps them: their data is not sent to the other ranks
            lambda: found.append(load_tasks(settings.eval_tasks, settings.eval_task_data, settings.eval_tasks_limit))
        )
    return found[0] if found else None


def add_benchmarks(
    trainer: CausalLMTrainer, run: RunFolder, tasks: CheckpointTasks | None, starts_scheduled: bool
) -> None:
    """Let benchmarks be evaluated at each scheduled checkpoint; all ranks must call it."""
    assert trainer.stop is not None
    tokenizer: Any = trainer.processing_class
    trainer.add_callback(
        BenchmarkCallback(
            run.metrics, tasks, tokenizer, progress=trainer.stop.progress, starts_scheduled=starts_scheduled
        )
    )


def is_scheduled_start(checkpoint: Path | None) -> bool:
    """Return whether training starts at step 0 or at a checkpoint that was not only requested by a signal."""
    return checkpoint is None or is_scheduled(checkpoint)


def _print_next(config: RunConfig) -> None:
    words = without_flags(config.words, {"preflight_only"})
    if words == list(config.words):  # the recipe has it
        words += ["--preflight_only", "false"]
    print(f"next: {command('train', *words)}")


def _report_finished(run: RunFolder, arguments: TrainingArguments) -> None:
    if arguments.process_index == 0:
        if not run.chart("loss").exists():  # the process was killed before, or the disk was full
            draw_charts(run)
        shutil.rmtree(run.former, ignore_errors=True)
    print(f"{run.root} is finished, with these settings. To train again, give --overwrite.")


# ---- training ----------------------------------------------------------------------------------------------------


def start_run(
    config: RunConfig, record: Resolved, inputs: RunInputs, trainer: CausalLMTrainer, checkpoint: Path | None
) -> None:
    """Write what describes the run, and the loss before training, unless the run is resumed."""
    run, rows, heldout = config.folder, inputs.rows, inputs.heldout
    model: Any = trainer.model
    start_folder(config, record, inputs)
    if checkpoint is not None and checkpoint == config.run.branch_from and not run.metrics.exists():
        start_branch(checkpoint, run)
    total, trained = model.num_parameters(), model.num_parameters(only_trainable=True)
    parts = [
        f"{total:,} parameters" if trained == total else f"{trained:,} of {total:,} parameters trained",
        f"{len(rows):,} training rows of {'up to ' if rows.is_chat else ''}{rows.seq_len} tokens",
        f"{f'{len(heldout):,}' if heldout else 'none'} held out",
        f"{tokens_per_step(config, rows, trainer.args.world_size):,} tokens per step",
    ]
    if not rows.is_chat and rows.cropped_share > 0.01:
        parts.append(f"{rows.cropped_share:.1%} of the text in no row")
    print(" · ".join(parts))
    if checkpoint is not None:
        print(f"resuming from {checkpoint}")
        if not run.metrics.exists():
            print(f"{run.metrics} does not exist: earlier log lines are lost.", file=sys.stderr)
    if heldout:
        loss = Run(run).loss_before_nats
        if loss is None:
            loss = float(heldout_losses(model, heldout, batch_size=trainer.args.eval_batch_size).mean())
        if not MetricsRow.load_lines(run.metrics):
            save_lines(run.metrics, [MetricsRow.of(0, eval_loss=loss)])
        replace(record, loss_before_nats=loss).save(run.resolved)


def fit(trainer: CausalLMTrainer, run: RunFolder, checkpoint: Path | None) -> None:
    """Train to the last step. Raises: RunStoppedError and RunInterruptedError, which name the last checkpoint."""
    stop = trainer.stop
    assert stop is not None
    gc.collect()  # and skip the objects that exist by now in later collections
    gc.freeze()
    try:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        trainer.tidy()
    except ImportError as error:  # an optimizer that is not installed
        raise UsageError(" ".join(str(error).split())) from error
    except Exception as error:
        if isinstance(error, RunStoppedError):
            reason = str(error)
        elif disk_is_full(error):
            reason = f"the disk is full ({error})."
        elif str(error).startswith("DebugUnderflowOverflow"):
            reason = "--debug underflow_overflow found a value that is not finite; its report is above."
        else:
            raise
        raise RunStoppedError(f"{reason} {last_checkpoint(run)}") from None
    finally:
        gc.unfreeze()
        stop.close()
        stop.progress.close()
    if stop.agreed(trainer.args.device):  # after the last step
        raise stop.interruption(next(complete_checkpoints(run), None))
    best, kept = trainer.state.best_global_step, trainer.state.best_model_checkpoint
    if trainer.args.load_best_model_at_end and best and (kept is None or number_of(Path(kept)) != best):
        instead = "the last model" if kept is None else Path(kept).name
        print_stderr(
            f"the lowest held-out loss was at step {best:,}, where no checkpoint was saved; {instead} is kept."
        )


def last_checkpoint(run: RunFolder) -> str:
    """Return a sentence that names the newest complete checkpoint of a run."""
    return f"Last good checkpoint: {next(complete_checkpoints(run), None) or 'none was saved'}."


def _finalize_or_stop(config: RunConfig, inputs: RunInputs, trainer: CausalLMTrainer, model: Any) -> None:
    """Call `finalize` with the trained model, without adapters. Raises: RunStoppedError if the disk is full."""
    model = merge_adapter(model, config.folder)
    try:
        finalize(config, inputs, trainer, model)
    except Exception as error:
        if not disk_is_full(error):
            raise
        reason = " ".join(str(error).split())
        raise RunStoppedError(
            f"the disk is too full for the files that are written after the last step ({reason}). Free some space; "
            f"{config.run.command_to_resume} writes the rest."
        ) from None
