"""Existing run folder → where training starts: at the first step, at a checkpoint, or not at all (finished).

A run resumes only with the settings that it was started with, as far as they affect the weights or the choice of them.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from dataclasses import fields
from pathlib import Path
from typing import Any

from gpt2small_hf.config.declared import declared
from gpt2small_hf.config.resolve import RunConfig
from gpt2small_hf.errors import UsageError
from gpt2small_hf.runs.files import check_writable, is_leftover, locked
from gpt2small_hf.runs.layout import RunFolder, checkpoints_in
from gpt2small_hf.runs.provenance import git_commit
from gpt2small_hf.runs.reader import progress_of, read_resolved
from gpt2small_hf.runs.records import DeviceFacts, Resolved
from gpt2small_hf.runs.results import MetricsRow, Sample
from gpt2small_hf.runs.typed_json import save_lines
from gpt2small_hf.training.checkpoint_files import complete_checkpoints, is_complete, step_of, why_not

# Settings that affect neither the weights nor which of them are kept. All others are compared, including those that
# new versions of transformers add.
MAY_CHANGE = {
    *("output_dir", "overwrite", "resume", "resume_from_checkpoint", "preflight_only", "find_batch_size"),
    *("print_recipe", "allow_high_initial_loss", "debug", "skip_memory_metrics"),
    # Paths: their content is compared instead.
    *("data_dir", "init_from", "chat_data", "validation_data", "skip_bad_rows"),
    # Hardware: the result is the same up to rounding.
    *("use_cpu", "num_threads", "local_rank", "num_workers"),
    *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"),
    *("dataloader_prefetch_factor", "dataloader_multiprocessing_context"),
    # Evaluation and reporting.
    *("prompts", "sample_all_checkpoints", "max_answers", "per_device_eval_batch_size", "eval_accumulation_steps"),
    *("eval_tasks", "eval_tasks_limit", "eval_task_data"),
    *("eval_do_concat_batches", "eval_use_gather_object", "report_to", "run_name", "project", "trackio_space_id"),
    *("trackio_bucket_id", "disable_tqdm", "log_level", "log_level_replica", "log_on_each_node", "push_to_hub"),
    *("save_total_limit", "save_only_model", "save_on_each_node"),
}
MAY_CHANGE_ALL = ("logging_", "ddp_", "hub_", "include_")
# Their product, the rows per step, is compared. Smaller micro-batches give the same weights up to rounding.
PARTS_OF_A_STEP = {"per_device_train_batch_size", "gradient_accumulation_steps"}
EVALUATIONS = {"eval_strategy", "eval_steps", "eval_delay", "eval_on_start"}
CHOICE_OF_THE_BEST = {"save_strategy", "save_steps", "metric_for_best_model", "greater_is_better"}
# Settings that a branch may change: its length and its learning-rate schedule.
BRANCHES_CHANGE = {
    *("processes", "branch_from", "max_steps", "num_train_epochs", "tokens", "tokens_per_parameter"),
    *("parameters_counted", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"),
}


# ---- where to start ----------------------------------------------------------------------------------------------


def check_folder(run: RunFolder, args: RunConfig) -> None:
    """Validate --output_dir, --resume and --branch_from before any work.

    Raises: UsageError if the folder cannot be a run folder, or a named checkpoint is incomplete or missing.
    """
    resume, branch = args.run.resume, args.run.branch_from
    if run.root.exists() and not run.root.is_dir():
        raise UsageError(f"{run.root} is a file. Choose another place with --output_dir.")
    if run.root.exists() and not (run.resolved.exists() or is_started(run)):
        raise UsageError(f"{run.root} exists and is not a run folder. Choose another with --output_dir.")
    check_writable("--output_dir", run.root)
    if resume not in ("auto", "never") and not is_complete(Path(resume)):
        raise UsageError(
            f"{resume} is not a complete checkpoint (weights, optimizer, scheduler and trainer_state.json)."
        )
    if args.run.overwrite and resume not in ("auto", "never"):
        raise UsageError("--overwrite cannot be combined with --resume: give one of them.")
    if branch is None:
        return
    if not is_complete(branch):
        raise UsageError(
            f"--branch_from {branch} is not a complete checkpoint: name a folder checkpoint-<step> of a run."
        )
    if not run_of(branch).resolved.exists():
        raise UsageError(f"--branch_from {branch} is not in a run folder, so its recipe is unknown.")
    if run_of(branch).root.resolve() == run.root.resolve():
        raise UsageError(f"--branch_from starts a new run. Choose another folder than {run.root} with --output_dir.")


def lock_folder(run: RunFolder) -> AbstractContextManager[None]:
    """Lock a run folder. Raises: UsageError if another process trains in it."""
    return locked(run.lock, f"another process trains in {run.root}. Wait until it ends, or give --output_dir.")


def check_not_in_use(run: RunFolder) -> None:
    """Raise: UsageError if another process trains in the folder. Only rank 0 checks: it locks the folder."""
    if run.lock.exists() and os.environ.get("RANK", "0") == "0":
        with lock_folder(run):
            pass


def is_started(run: RunFolder) -> bool:
    """Whether a folder without `resolved.json` is empty or contains only what a run writes before that file."""
    first_files = {run.lock, run.recipe, run.first_rows, run.checkpoints, run.former, run.former_incomplete}
    found = {path for path in run.root.iterdir() if not (is_leftover(path) or is_prepared_text(path))}
    if not found:
        return True
    is_overwritten = bool(found & {run.former, run.former_incomplete})  # the user's files are left in place
    return run.lock in found and (found <= first_files or is_overwritten) and not any(run.checkpoints.glob("*"))


def is_prepared_text(path: Path) -> bool:
    """Whether a path is data/ of the working directory, which may itself be the run folder."""
    return path.resolve() == Path("data").resolve()


def settings_to_resume(run: RunFolder, args: RunConfig) -> Resolved | None:
    """Return `resolved.json` of the run that this one resumes or branches from; None if it starts new."""
    if run.resolved.exists() and not args.run.overwrite:
        return read_resolved(run)
    checkpoint = args.run.branch_from
    if checkpoint is None and args.run.resume not in ("auto", "never"):
        checkpoint = Path(args.run.resume)
    before = None if checkpoint is None else run_of(checkpoint)
    return read_resolved(before) if before and before.resolved.exists() else None


def find_start_checkpoint(run: RunFolder, args: RunConfig, settings: Resolved) -> Path | None:
    """Return the checkpoint to resume from; None to start at the first step.

    Args:
        run: the folder, validated by `check_folder`.
        args: arguments of the run.
        settings: the contents of `resolved.json` for these arguments.

    Raises: UsageError if the folder contains a run with other settings, or no checkpoint that training can resume from.
    """
    named = None if args.run.resume in ("auto", "never") else Path(args.run.resume)
    if not run.resolved.exists() or args.run.overwrite:
        if args.run.branch_from is not None:
            check_branch(args.run.branch_from, args, settings)
            return args.run.branch_from
        before = settings_to_resume(run, args)
        if before is not None and (lines := differences(before, settings)):
            raise UsageError(f"{named} is of a run with other settings: {_few(lines, args)}. Use the same settings.")
        return named
    if args.run.resume == "never":
        raise UsageError(f"{run.root} contains a run. Resume it with --resume auto, or replace it with --overwrite.")
    before = read_resolved(run)
    if lines := differences(before, settings):
        kept = f" The run that it was meant to replace is kept in {run.former}." if run.former.exists() else ""
        weights = run.root if run.finished else next(complete_checkpoints(run), None)
        longer = (
            f" To train longer: --init_from {weights}, or --branch_from a checkpoint of a warmup_stable_decay run."
            if weights
            else ""
        )
        raise UsageError(
            f"{run.root} contains a run with other settings: {_few(lines, args)}. Resume it with its settings, or give "
            f"--output_dir or --overwrite.{longer}{kept}"
        )
    if run.finished:
        return None
    if notice := device_notice(before.device, settings.device):
        print(notice, file=sys.stderr)
    if before.made_by.commit != git_commit():
        print("the run was started with another version of this code; it resumes with this one.", file=sys.stderr)
    keeps_best = args.trainer.load_best_model_at_end
    if named is not None:  # `check_folder` validated that it is complete
        if reason := why_not(named, run, keeps_best=keeps_best):
            print(f"{named}: {reason}. The best one is chosen among those from here on.", file=sys.stderr)
        return named
    usable = next(complete_checkpoints(run, keeps_best=keeps_best), None)
    if usable is None and keeps_best and (newest := next(filter(is_complete, checkpoints_in(run.checkpoints)), None)):
        raise UsageError(
            f"{why_not(newest, run, keeps_best=True)}, so the run cannot end with it. Give --resume {newest} to choose "
            "the best checkpoint among later ones, or --overwrite to start again."
        )
    if usable is None and any(checkpoints_in(run.checkpoints)):
        raise UsageError(
            f"training can resume from no checkpoint in {run.checkpoints}. Restore one, or start again with "
            "--overwrite, which keeps this run until the new one is finished."
        )
    return usable or args.run.branch_from


def _few(lines: list[str], args: RunConfig) -> str:
    """Return the first two differences, those that the user set before those that follow from them."""
    ordered = sorted(lines, key=lambda line: line.partition(":")[0] not in args.named)
    return "; ".join(ordered[:2]) + (f"; and {len(lines) - 2} more" if len(lines) > 2 else "")


def device_notice(before: DeviceFacts, now: DeviceFacts) -> str | None:
    """Return a sentence about a run that resumes on another device; None if it is the same, as far as is known."""
    recorded = [now.name]
    if now.type == "cpu":
        recorded.append(platform.machine())  # earlier versions recorded the architecture
    if before.name in recorded:
        return None
    return f"the run was started on {before.name}: on {now.name} it is the same up to rounding."


def differences(before: Resolved, now: Resolved, allowed: AbstractSet[str] = frozenset()) -> list[str]:
    """List the differences between two runs that affect the weights or their choice, as `name: then -> now`."""
    lines = []
    if before.data.fingerprint != now.data.fingerprint:
        then, present = before.data.folder, now.data.folder
        same = " (its content, or its format, has changed)" if then == present else ""
        lines.append(f"{'chats' if now.chat else 'text'}: {then} -> {present}{same}")
    if before.rows_per_step not in (None, now.rows_per_step):  # earlier versions did not record it
        lines.append(f"rows a step: {before.rows_per_step} -> {now.rows_per_step}")
    processes = [settings.device.count for settings in (before, now)]
    if processes[0] != processes[1] and "processes" not in allowed:  # each has its own random numbers
        lines.append(f"processes: {processes[0]} -> {processes[1]}")
    if (before.base and before.base.sha256) != (now.base and now.base.sha256):
        names = [settings.base and settings.base.init_from for settings in (before, now)]
        lines.append(f"init_from: {names[0]} -> {names[1]}, which has other weights")
    return lines + [f"{name}: {then} -> {present}" for name, then, present in changed(before, now, allowed)]


def changed(
    before: Resolved,
    now: Resolved,
    allowed: AbstractSet[str] = frozenset(),
) -> list[tuple[str, Any, Any]]:
    """Return the settings that differ and affect the weights or their choice: name, value then, value now."""
    found, allowed = [], allowed | may_change(now)
    model_settings = [
        one.name for one in fields(declared("gpt2small_hf.model.configuration_gpt2small", "GPT2SmallConfig"))
    ]
    for part in ("model", "run", "chat", "trainer"):
        then, present = before.settings(part), now.settings(part)
        # Skip settings that only one version of this code knows. For the model only values other than the defaults are
        # recorded, together with what transformers adds: its version, class names and the dtype.
        names = model_settings if part == "model" else [name for name in present if name in then]
        found += [
            (name, then.get(name), present.get(name))
            for name in names
            if name not in allowed and not name.startswith(MAY_CHANGE_ALL) and then.get(name) != present.get(name)
        ]
    return found


def may_change(settings: Resolved) -> set[str]:
    """Return the names of the settings that may change when a run with these settings resumes."""
    run, trainer, model = settings.run, settings.trainer, settings.model
    draws = model.embd_pdrop or model.attn_pdrop or model.resid_pdrop
    draws = draws or run.lora_dropout or trainer.neftune_noise_alpha
    judges = trainer.load_best_model_at_end or trainer.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy")
    allowed = set(MAY_CHANGE)
    # Dropout draws random numbers for each micro-batch; how many rows are dropped at the end of an epoch depends on the
    # size of a micro-batch.
    if run.find_batch_size or not (draws or trainer.dataloader_drop_last):
        allowed |= PARTS_OF_A_STEP
    # An evaluation draws a random number on the CPU.
    if not (judges or (draws and settings.device.type == "cpu")):
        allowed |= EVALUATIONS
    if not judges:
        allowed |= CHOICE_OF_THE_BEST
    return allowed


# ---- branches ----------------------------------------------------------------------------------------------------


def run_of(checkpoint: Path) -> RunFolder:
    """Return the run folder of a checkpoint."""
    return RunFolder(checkpoint.resolve().parents[1])


def check_branch(checkpoint: Path, args: RunConfig, settings: Resolved) -> None:
    """Validate a branch: same settings but for length and schedule, and a learning rate still at its peak.

    Raises: UsageError otherwise.
    """
    if lines := differences(read_resolved(run_of(checkpoint)), settings, BRANCHES_CHANGE):
        raise UsageError(
            f"a branch may change only length and schedule, but these settings differ: {_few(lines, args)}. "
            f"Use the recipe of {run_of(checkpoint).root}."
        )
    rate = progress_of(checkpoint).learning_rate
    if rate is not None and rate < 0.999 * args.trainer.learning_rate:
        raise UsageError(
            f"{checkpoint} has a learning rate of {rate:.2g}, below its peak of {args.trainer.learning_rate:.2g}. "
            "Branch from the stable phase of --lr_scheduler_type warmup_stable_decay, or use --init_from."
        )


def steps_of_branch(checkpoint: Path, max_steps: int) -> int:
    """Return the number of decay steps of a branch that ends at `max_steps`. Raises: UsageError if it is 0 or less."""
    done = step_of(checkpoint)
    if max_steps <= done:
        raise UsageError(
            f"{checkpoint} is at step {done:,}, and the run ends at step {max_steps:,}. "
            f"Give --max_steps above {done:,}: the branch decays over the steps between."
        )
    return max_steps - done


def start_branch(checkpoint: Path, run: RunFolder) -> None:
    """Copy metrics and samples up to the checkpoint from the parent run to the branch."""
    done, parent = step_of(checkpoint), run_of(checkpoint)
    # Metrics last: they mark the branch as started.
    for kind, theirs, ours in ((Sample, parent.samples, run.samples), (MetricsRow, parent.metrics, run.metrics)):
        if theirs.exists():
            save_lines(ours, [row for row in kind.load_lines(theirs) if row.step <= done])
