"""What a run folder holds already → where the run begins: at its first step, at a checkpoint, or not at all.

A run goes on only as what it was begun as: whatever decides what is learned must be the same. `run.py` acts on it.
"""

from __future__ import annotations

import json
import math
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from gpt2small_hf.runs import RunFolder, UsageError, git_commit, is_leftover, read_json, read_jsonl, write_jsonl
from gpt2small_hf.training.arguments import Arguments

# Settings that decide nothing that is learned: where and how often is written, how rows are loaded, how the work is
# divided. Rows a step are compared as a whole.
MAY_CHANGE = {
    *("output_dir", "overwrite", "resume", "resume_from_checkpoint", "preflight_only", "find_batch_size"),
    "allow_high_initial_loss",
    # What these name is compared by its content.
    *("init_from", "chat_data", "validation_data", "skip_bad_rows", "max_answers"),
    *(
        "print_recipe",
        "num_threads",
        "prompts",
        "sample_all_checkpoints",
        "report_to",
        "run_name",
        "project",
        "trackio_space_id",
        "trackio_bucket_id",
    ),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "per_device_eval_batch_size"),
    *("num_workers", "disable_tqdm", "log_level", "log_level_replica", "log_on_each_node", "local_rank", "use_cpu"),
    *("skip_memory_metrics", "load_best_model_at_end", "metric_for_best_model", "greater_is_better", "debug"),
    *("fsdp", "fsdp_config", "deepspeed", "parallelism_config", "accelerator_config", "auto_find_batch_size"),
}
MAY_CHANGE_ALL = ("save_", "logging_", "eval_", "dataloader_", "ddp_", "hub_", "push_to_hub", "include_")
# What a branch may have otherwise than the run it leaves: how long, and how the learning rate goes on.
BRANCHES_CHANGE = {
    *("branch_from", "max_steps", "num_train_epochs", "tokens", "tokens_per_parameter", "parameters_counted"),
    *("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"),
}


# ---- checkpoints -------------------------------------------------------------------------------------------------


def whole_checkpoints(run: RunFolder) -> Iterator[Path]:
    """The run's checkpoints that can be resumed from, newest first; says which ones it passes over."""
    checkpoints = run.checkpoints.glob("checkpoint-*")
    for path in sorted(checkpoints, key=lambda path: (len(path.name), path.name), reverse=True):
        if is_whole(path):
            yield path
        else:
            print(f"passing over {path}: it is damaged, or was not written to its end.", file=sys.stderr)


def is_whole(checkpoint: Path) -> bool:
    """Whether a checkpoint can be resumed from: weights, optimizer, schedule and state are there, none cut short."""
    try:
        json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
        for path in checkpoint.glob("*.safetensors"):
            with safe_open(path, framework="pt"):  # compares the file's length to its header
                pass
    except (OSError, SafetensorError, ValueError):
        return False
    files = [*checkpoint.glob("*.pt"), *checkpoint.glob("*.pth"), *checkpoint.glob("*.bin")]
    names = {path.name for path in checkpoint.iterdir()}
    has_optimizer = any(name.startswith(("optimizer", "global_step")) for name in names)  # the latter is DeepSpeed's
    # FSDP and DeepSpeed may keep the weights in folders of their own.
    alone = {"model.safetensors", "adapter_model.safetensors"}
    has_weights = bool(alone & names) or any((checkpoint / name).is_dir() for name in names)
    return has_weights and has_optimizer and "scheduler.pt" in names and all(map(zipfile.is_zipfile, files))


def step_of(checkpoint: Path) -> int:
    """The step that a checkpoint was saved at."""
    return int(read_json(checkpoint / "trainer_state.json")["global_step"])


def is_last(checkpoint: Path, patience: int | None = None) -> bool:
    """Whether a checkpoint was saved at the run's last step, or where `rising` stopped it."""
    state = read_json(checkpoint / "trainer_state.json")
    return state["global_step"] >= state["max_steps"] or rising(state["log_history"], patience)


def rising(log: list[dict[str, Any]], patience: int | None) -> bool:
    """Whether the held-out loss was not the lowest so far in the last `patience` measurements."""
    losses = [row["eval_loss"] for row in log if "eval_loss" in row]
    losses = [math.inf if loss is None or math.isnan(loss) else loss for loss in losses]
    if patience is None or len(losses) <= patience:
        return False
    return min(losses[-patience:]) >= min(losses[:-patience])


# ---- where to begin ----------------------------------------------------------------------------------------------


def check_folder(run: RunFolder, args: Arguments) -> None:
    """Before any work: see that the run folder may be a run's, and that what --resume and --branch_from name is there.

    Raises: UsageError otherwise.
    """
    resume, branch = args.run.resume, args.run.branch_from
    if run.root.exists() and not run.root.is_dir():
        raise UsageError(f"{run.root} is a file. Choose another place with --output_dir.")
    if run.root.exists() and not (run.resolved.exists() or is_begun(run)):
        raise UsageError(f"{run.root} exists and is not a run folder. Choose another with --output_dir.")
    if resume not in ("auto", "never") and not is_whole(Path(resume)):
        raise UsageError(f"{resume} is not a whole checkpoint (weights, optimizer, scheduler and trainer_state.json).")
    if args.run.overwrite and resume not in ("auto", "never"):
        raise UsageError("--overwrite begins again and --resume goes on. Leave one out.")
    if branch is None:
        return
    if not is_whole(branch):
        raise UsageError(f"--branch_from {branch} is not a whole checkpoint: name a folder checkpoint-<step> of a run.")
    if not run_of(branch).resolved.exists():
        raise UsageError(f"--branch_from {branch} does not lie in a run folder, so its recipe is not known.")
    if run_of(branch).root.resolve() == run.root.resolve():
        raise UsageError(f"--branch_from begins another run. Choose another folder than {run.root} with --output_dir.")


def is_begun(run: RunFolder) -> bool:
    """Whether a folder without `resolved.json` is empty, or has no more than a run writes before that file."""
    first_files = {run.lock, run.recipe, run.first_rows, run.checkpoints, run.former, run.former_incomplete}
    found = {path for path in run.root.iterdir() if not (is_leftover(path) or is_prepared_text(path))}
    if not found:
        return True
    return run.lock in found and found <= first_files and not any(run.checkpoints.glob("*"))


def is_prepared_text(path: Path) -> bool:
    """Whether this is data/ of the working folder, which may be the run folder."""
    return path.resolve() == Path("data").resolve()


def where_to_begin(run: RunFolder, args: Arguments, settings: dict[str, Any]) -> Path | None:
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
        theirs = run_of(Path(named)).resolved
        if theirs.exists() and (lines := differences(read_json(theirs), settings)):
            raise UsageError(f"{named} is of a run with other settings: {'; '.join(lines)}. Leave them as they were.")
        return Path(named)
    if named == "never":
        raise UsageError(f"{run.root} holds a run. Go on with it (--resume auto), or begin again with --overwrite.")
    before = read_json(run.resolved)
    if lines := differences(before, settings):
        kept = f" The run that it was to replace is kept in {run.former}." if run.former.exists() else ""
        raise UsageError(
            f"{run.root} holds a run with other settings: {'; '.join(lines)}. Leave them as they were to go on, "
            "or begin another run with --output_dir, or this one again with --overwrite. "
            f"(To train longer, see --branch_from.){kept}"
        )
    if run.finished:
        return None
    if before["made_by"]["commit"] != git_commit():
        print("the run was begun with another version of this code; it goes on with this one.", file=sys.stderr)
    if named != "auto":
        return Path(named)
    return next(whole_checkpoints(run), args.run.branch_from)


def differences(before: dict[str, Any], now: dict[str, Any], allowed: set[str] = frozenset()) -> list[str]:  # pyright: ignore[reportArgumentType]
    """What two runs' settings differ in, as far as it decides what is learned: `name: then -> now`, one each."""
    lines = []
    if before["data"]["fingerprint"] != now["data"]["fingerprint"]:
        then, present = before["data"]["folder"], now["data"]["folder"]
        same = " (its content, or how it is written down, has changed)" if then == present else ""
        lines.append(f"{'chats' if now.get('chat') else 'text'}: {then} -> {present}{same}")
    if before.get("rows_per_step", now["rows_per_step"]) != now["rows_per_step"]:
        lines.append(f"rows a step: {before['rows_per_step']} -> {now['rows_per_step']}")
    if (before.get("base") or {}).get("sha256") != (now.get("base") or {}).get("sha256"):
        names = [(settings.get("base") or {"init_from": None})["init_from"] for settings in (before, now)]
        lines.append(f"init_from: {names[0]} -> {names[1]}, which has other weights")
    return lines + [f"{name}: {then} -> {present}" for name, then, present in changed(before, now, allowed)]


def changed(
    before: dict[str, Any],
    now: dict[str, Any],
    allowed: set[str] = frozenset(),  # pyright: ignore[reportArgumentType]
) -> list[tuple[str, Any, Any]]:
    """The settings that decide what is learned and that two runs have otherwise: name, value then, value now."""
    found = []
    for part in ("model", "run", "chat", "trainer"):
        then, present = before.get(part) or {}, now.get(part) or {}
        # A setting that one version of this code does not know is no difference; of a model only what is not default
        # was written down.
        names = then | present if part == "model" else [name for name in present if name in then]
        found += [
            (name, then.get(name), present.get(name))
            for name in names
            if name not in MAY_CHANGE | allowed
            and not name.startswith(MAY_CHANGE_ALL)
            and then.get(name) != present.get(name)
        ]
    return found


# ---- branches ----------------------------------------------------------------------------------------------------


def run_of(checkpoint: Path) -> RunFolder:
    """The run that a checkpoint is of."""
    return RunFolder(checkpoint.resolve().parents[1])


def check_branch(checkpoint: Path, args: Arguments, settings: dict[str, Any]) -> None:
    """See that this run is a branch of the checkpoint's: the same but for its end, and the rate still at its peak.

    Raises: UsageError otherwise.
    """
    if lines := differences(read_json(run_of(checkpoint).resolved), settings, BRANCHES_CHANGE):
        raise UsageError(
            f"a branch has its run's settings, but for length and schedule; here differ {'; '.join(lines)}. "
            f"Use the recipe of {run_of(checkpoint).root}."
        )
    state = read_json(checkpoint / "trainer_state.json")
    rates = [row["learning_rate"] for row in state["log_history"] if "learning_rate" in row]
    if rates and rates[-1] < 0.999 * args.trainer.learning_rate:
        raise UsageError(
            f"{checkpoint} has a learning rate of {rates[-1]:.2g}, below its peak of {args.trainer.learning_rate:.2g}: "
            "it is warming up, or decaying already. Branch from a checkpoint of the stable phase."
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


def begin_branch(checkpoint: Path, run: RunFolder) -> None:
    """Give a branch the history of the run it leaves: lines of metrics and samples up to the checkpoint."""
    done, parent = step_of(checkpoint), run_of(checkpoint)
    for theirs, ours in ((parent.metrics, run.metrics), (parent.samples, run.samples)):
        if theirs.exists():
            write_jsonl(ours, [row for row in read_jsonl(theirs) if row["step"] <= done])
