"""What a run folder holds already → where the run begins: at its first step, at a checkpoint, or not at all.

A run goes on only as what it was begun as: whatever decides what is learned must be the same. `run.py` acts on it.
"""

from __future__ import annotations

import platform
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from gpt2small_hf.config.declared import declared
from gpt2small_hf.config.resolve import RunConfig
from gpt2small_hf.errors import UsageError
from gpt2small_hf.runs.files import check_writable, is_leftover, read_json, read_jsonl, write_jsonl
from gpt2small_hf.runs.layout import RunFolder, checkpoints_in
from gpt2small_hf.runs.provenance import git_commit
from gpt2small_hf.runs.reader import read_resolved
from gpt2small_hf.runs.records import DeviceFacts, Resolved
from gpt2small_hf.training.checkpoint_files import complete_checkpoints, is_complete, step_of, why_not

# Settings that decide nothing that is learned or kept. All others, and those that a new version of transformers brings,
# are compared.
MAY_CHANGE = {
    *("output_dir", "overwrite", "resume", "resume_from_checkpoint", "preflight_only", "find_batch_size"),
    *("print_recipe", "allow_high_initial_loss", "debug", "skip_memory_metrics"),
    # What these name is compared by its content.
    *("data_dir", "init_from", "chat_data", "validation_data", "skip_bad_rows"),
    # Where and on what: the result is the same up to the rounding of another device.
    *("use_cpu", "num_threads", "local_rank", "num_workers"),
    *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"),
    *("dataloader_prefetch_factor", "dataloader_multiprocessing_context"),
    # How it is evaluated and reported.
    *("prompts", "sample_all_checkpoints", "max_answers", "per_device_eval_batch_size", "eval_accumulation_steps"),
    *(
        "eval_do_concat_batches",
        "eval_use_gather_object",
        "report_to",
        "run_name",
        "project",
        "trackio_space_id",
        "trackio_bucket_id",
    ),
    *("disable_tqdm", "log_level", "log_level_replica", "log_on_each_node", "push_to_hub"),
    *("save_total_limit", "save_only_model", "save_on_each_node"),
}
MAY_CHANGE_ALL = ("logging_", "ddp_", "hub_", "include_")
# Rows a step are compared as a whole. The same rows in smaller parts give the same weights up to rounding.
PARTS_OF_A_STEP = {"per_device_train_batch_size", "gradient_accumulation_steps"}
EVALUATIONS = {"eval_strategy", "eval_steps", "eval_delay", "eval_on_start"}
CHOICE_OF_THE_BEST = {"save_strategy", "save_steps", "metric_for_best_model", "greater_is_better"}
# What a branch may have otherwise than the run it leaves: how long, and how the learning rate goes on.
BRANCHES_CHANGE = {
    *(
        "processes",
        "branch_from",
        "max_steps",
        "num_train_epochs",
        "tokens",
        "tokens_per_parameter",
        "parameters_counted",
    ),
    *("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"),
}


# ---- where to begin ----------------------------------------------------------------------------------------------


def check_folder(run: RunFolder, args: RunConfig) -> None:
    """Before any work: see that the run folder may be a run's, and that what --resume and --branch_from name is there.

    Raises: UsageError otherwise.
    """
    resume, branch = args.run.resume, args.run.branch_from
    if run.root.exists() and not run.root.is_dir():
        raise UsageError(f"{run.root} is a file. Choose another place with --output_dir.")
    if run.root.exists() and not (run.resolved.exists() or is_started(run)):
        raise UsageError(f"{run.root} exists and is not a run folder. Choose another with --output_dir.")
    check_writable("--output_dir", run.root)
    if resume not in ("auto", "never") and not is_complete(Path(resume)):
        raise UsageError(f"{resume} is not a whole checkpoint (weights, optimizer, scheduler and trainer_state.json).")
    if args.run.overwrite and resume not in ("auto", "never"):
        raise UsageError("--overwrite begins again and --resume goes on. Leave one out.")
    if branch is None:
        return
    if not is_complete(branch):
        raise UsageError(f"--branch_from {branch} is not a whole checkpoint: name a folder checkpoint-<step> of a run.")
    if not run_of(branch).resolved.exists():
        raise UsageError(f"--branch_from {branch} does not lie in a run folder, so its recipe is not known.")
    if run_of(branch).root.resolve() == run.root.resolve():
        raise UsageError(f"--branch_from begins another run. Choose another folder than {run.root} with --output_dir.")


def is_started(run: RunFolder) -> bool:
    """Whether a folder without `resolved.json` is empty, or has no more than a run writes before that file."""
    first_files = {run.lock, run.recipe, run.first_rows, run.checkpoints, run.former, run.former_incomplete}
    found = {path for path in run.root.iterdir() if not (is_leftover(path) or is_prepared_text(path))}
    if not found:
        return True
    is_overwritten = bool(found & {run.former, run.former_incomplete})  # files of the user are left where they are
    return run.lock in found and (found <= first_files or is_overwritten) and not any(run.checkpoints.glob("*"))


def is_prepared_text(path: Path) -> bool:
    """Whether this is data/ of the working folder, which may be the run folder."""
    return path.resolve() == Path("data").resolve()


def settings_to_resume(run: RunFolder, args: RunConfig) -> Resolved | None:
    """Return `resolved.json` of the run that this one resumes or branches from; None if it starts new."""
    if run.resolved.exists() and not args.run.overwrite:
        return read_resolved(run)
    checkpoint = args.run.branch_from
    if checkpoint is None and args.run.resume not in ("auto", "never"):
        checkpoint = Path(args.run.resume)
    if checkpoint is None or not run_of(checkpoint).resolved.exists():
        return None
    return read_resolved(run_of(checkpoint))


def find_start_checkpoint(run: RunFolder, args: RunConfig, settings: Resolved) -> Path | None:
    """The checkpoint to go on from; None to begin at the first step.

    Args:
        run: the folder, checked by `check_folder`.
        args: the run's arguments.
        settings: what `resolved.json` would say of this run.

    Raises: UsageError if the folder holds another run than this one.
    """
    named = args.run.resume
    if not run.resolved.exists() or args.run.overwrite:
        if args.run.branch_from is not None:
            check_branch(args.run.branch_from, args, settings)
            return args.run.branch_from
        if named in ("auto", "never"):
            return None
        theirs = run_of(Path(named))
        if theirs.resolved.exists() and (lines := differences(read_resolved(theirs), settings)):
            raise UsageError(f"{named} is of a run with other settings: {'; '.join(lines)}. Leave them as they were.")
        return Path(named)
    if named == "never":
        raise UsageError(f"{run.root} holds a run. Go on with it (--resume auto), or begin again with --overwrite.")
    before = read_resolved(run)
    if lines := differences(before, settings):
        weights = run.root if run.finished else next(complete_checkpoints(run), None)
        longer = (
            f"To train longer, start another run from its weights: --init_from {weights}; or, if" if weights else "If"
        )
        kept = f" The run that it was to replace is kept in {run.former}." if run.former.exists() else ""
        raise UsageError(
            f"{run.root} holds a run with other settings: {'; '.join(lines)}. Leave them as they were to go on, "
            "or begin another run with --output_dir, or this one again with --overwrite. "
            f"{longer} it was trained with --lr_scheduler_type warmup_stable_decay, from a checkpoint of its stable "
            f"phase: --branch_from.{kept}"
        )
    if run.finished:
        return None
    if notice := device_notice(before.device, settings.device):
        print(notice, file=sys.stderr)
    if before.made_by.commit != git_commit():
        print("the run was begun with another version of this code; it goes on with this one.", file=sys.stderr)
    keeps_best = args.trainer.load_best_model_at_end
    if named != "auto":  # `check_folder` has seen that it is complete
        if reason := why_not(Path(named), run, keeps_best=keeps_best):
            print(f"{named}: {reason}. The best one is chosen among those from here on.", file=sys.stderr)
        return Path(named)
    usable = next(complete_checkpoints(run, keeps_best=keeps_best), None)
    if usable is None and keeps_best and (newest := next(filter(is_complete, checkpoints_in(run.checkpoints)), None)):
        raise UsageError(
            f"{why_not(newest, run, keeps_best=True)}, so the run cannot end with it. To continue from {newest} and "
            f"choose the best checkpoint among later ones, give --resume {newest}; to start again, give --overwrite."
        )
    if usable is None and any(checkpoints_in(run.checkpoints)):
        raise UsageError(
            f"training can resume from no checkpoint in {run.checkpoints}. Restore one, or start again with "
            "--overwrite, which keeps this run until the new one is finished."
        )
    return usable or args.run.branch_from


def device_notice(before: DeviceFacts, now: DeviceFacts) -> str | None:
    """Return a sentence about a run that resumes on another device; None if it is the same, as far as is known."""
    recorded = [now.name]
    if now.type == "cpu":
        recorded.append(platform.machine())  # earlier versions recorded the architecture
    if before.name in recorded:
        return None
    return f"the run was started on {before.name}: on {now.name} it is the same up to rounding."


def differences(before: Resolved, now: Resolved, allowed: set[str] = frozenset()) -> list[str]:  # pyright: ignore[reportArgumentType]
    """What two runs' settings differ in, as far as it decides what is learned: `name: then -> now`, one each."""
    lines = []
    if before.data.fingerprint != now.data.fingerprint:
        then, present = before.data.folder, now.data.folder
        same = " (its content, or how it is written down, has changed)" if then == present else ""
        lines.append(f"{'chats' if now.chat else 'text'}: {then} -> {present}{same}")
    if before.rows_per_step not in (None, now.rows_per_step):  # earlier versions did not record it
        lines.append(f"rows a step: {before.rows_per_step} -> {now.rows_per_step}")
    processes = [settings.device.count for settings in (before, now)]
    if processes[0] != processes[1] and "processes" not in allowed:  # each has random numbers of its own
        lines.append(f"processes: {processes[0]} -> {processes[1]}")
    if (before.base and before.base.sha256) != (now.base and now.base.sha256):
        names = [settings.base and settings.base.init_from for settings in (before, now)]
        lines.append(f"init_from: {names[0]} -> {names[1]}, which has other weights")
    return lines + [f"{name}: {then} -> {present}" for name, then, present in changed(before, now, allowed)]


def changed(
    before: Resolved,
    now: Resolved,
    allowed: set[str] = frozenset(),  # pyright: ignore[reportArgumentType]
) -> list[tuple[str, Any, Any]]:
    """The settings that decide what is learned and that two runs have otherwise: name, value then, value now."""
    found, allowed = [], allowed | may_change(now)
    for part in ("model", "run", "chat", "trainer"):
        then, present = before.settings(part), now.settings(part)
        # A setting that one version of this code does not know makes no difference. Of a model, only what is not the
        # default was written, together with what transformers notes: its version, class names, the saved dtype.
        names = model_settings() if part == "model" else [name for name in present if name in then]
        found += [
            (name, then.get(name), present.get(name))
            for name in names
            if name not in allowed and not name.startswith(MAY_CHANGE_ALL) and then.get(name) != present.get(name)
        ]
    return found


def model_settings() -> dict[str, Any]:
    """The settings of our model's configuration and their defaults, read without importing torch."""
    declaration = declared("gpt2small_hf.model.configuration_gpt2small", "GPT2SmallConfig")
    return {setting.name: setting.default for setting in fields(declaration)}


def may_change(settings: Resolved) -> set[str]:
    """The settings that may be others when a run resumes, given all of them."""
    run, trainer, model = settings.run, settings.trainer, settings.model
    draws = model.embd_pdrop or model.attn_pdrop or model.resid_pdrop
    draws = draws or run.lora_dropout or trainer.neftune_noise_alpha
    judges = trainer.load_best_model_at_end or trainer.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy")
    allowed = set(MAY_CHANGE)
    # Dropout draws for each micro-batch; with rows left out at the end of an epoch, how many depends on its size.
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
    """The run that a checkpoint is of."""
    return RunFolder(checkpoint.resolve().parents[1])


def check_branch(checkpoint: Path, args: RunConfig, settings: Resolved) -> None:
    """See that this run is a branch of the checkpoint's: the same but for its end, and the rate still at its peak.

    Raises: UsageError otherwise.
    """
    if lines := differences(read_resolved(run_of(checkpoint)), settings, BRANCHES_CHANGE):
        raise UsageError(
            f"a branch has its run's settings, but for length and schedule; here differ {'; '.join(lines)}. "
            f"Use the recipe of {run_of(checkpoint).root}."
        )
    state = read_json(checkpoint / "trainer_state.json")
    rates = [row["learning_rate"] for row in state["log_history"] if "learning_rate" in row]
    if rates and rates[-1] < 0.999 * args.trainer.learning_rate:
        raise UsageError(
            f"{checkpoint} has a learning rate of {rates[-1]:.2g}, below its peak of {args.trainer.learning_rate:.2g}: "
            "it is warming up, or decaying already. Branch from a checkpoint of the stable phase, which a run has with "
            "--lr_scheduler_type warmup_stable_decay; to train on from any other weights, give --init_from in place of "
            "--branch_from."
        )


def steps_of_branch(checkpoint: Path, max_steps: int) -> int:
    """Steps that a branch takes, at a falling rate, to end at `max_steps`. Raises: UsageError if there are none."""
    done = step_of(checkpoint)
    if max_steps <= done:
        raise UsageError(
            f"{checkpoint} is at step {done:,}, and the run ends at step {max_steps:,}. "
            f"Give --max_steps above {done:,}: the branch decays over the steps between."
        )
    return max_steps - done


def start_branch(checkpoint: Path, run: RunFolder) -> None:
    """Give a branch the history of the run it leaves: lines of metrics and samples up to the checkpoint."""
    done, parent = step_of(checkpoint), run_of(checkpoint)
    for theirs, ours in ((parent.samples, run.samples), (parent.metrics, run.metrics)):  # metrics mark it as begun
        if theirs.exists():
            write_jsonl(ours, [row for row in read_jsonl(theirs) if row["step"] <= done])
