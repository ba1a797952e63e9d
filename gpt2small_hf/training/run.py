"""One run: text or prepared rows → a run folder with a model that loads anywhere, its measure and its chart.

Assembles the other packages around HF's `Trainer`. Settings come from `arguments.py`, file names from `runs/layout.py`.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import distributed as dist
from transformers import PreTrainedTokenizerBase, PrinterCallback, SchedulerType
from transformers.utils import logging

from gpt2small_hf.config.parser import without_flags
from gpt2small_hf.config.recipe import recipe_text
from gpt2small_hf.config.resolve import ALTERNATIVES, Arguments
from gpt2small_hf.config.run import PROMPT
from gpt2small_hf.data.chat_dataset import ChatDataset
from gpt2small_hf.data.preview.render import as_text
from gpt2small_hf.data.row_dataset import RowDataset
from gpt2small_hf.errors import RunStoppedError, UsageError, disk_is_full, print_stderr
from gpt2small_hf.evaluation.answers import first_questions
from gpt2small_hf.evaluation.heldout import heldout_losses
from gpt2small_hf.evaluation.task import EvaluationInputs
from gpt2small_hf.evaluation.tasks import notes, run_tasks, save_results, tables
from gpt2small_hf.formatting import duration
from gpt2small_hf.invocation import command
from gpt2small_hf.model.modeling_gpt2small import GPT2SmallForCausalLM
from gpt2small_hf.report.charts import draw_charts
from gpt2small_hf.report.tables import (
    NOTHING_HELD_OUT,
    console_table,
    kept_line,
    worse_line,
)
from gpt2small_hf.runs.files import (
    atomic_write,
    finite,
    locked,
    read_jsonl,
    remove,
    remove_if_empty,
    set_default_permissions,
    write_jsonl,
)
from gpt2small_hf.runs.layout import RunFolder, number_of
from gpt2small_hf.runs.provenance import made_by, processor_name
from gpt2small_hf.runs.records import ParameterCounts, Resolved
from gpt2small_hf.training.batch_size import find_batch_size, is_out_of_memory, trials_table
from gpt2small_hf.training.budget import (
    flops_per_token,
    peak_flops,
    precision_of,
    steps_for,
    steps_of_epochs,
    wanted_tokens,
)
from gpt2small_hf.training.callbacks import (
    Charts,
    EarlyStopping,
    MetricsLog,
    ProgressLine,
    Samples,
    StopOnSignal,
    unsharded_model,
)
from gpt2small_hf.training.checkpoint_files import complete_checkpoints, is_scheduled
from gpt2small_hf.training.health import Health
from gpt2small_hf.training.inputs import RunInputs, build_run_inputs
from gpt2small_hf.training.memory import check_memory
from gpt2small_hf.training.preflight import preflight, show
from gpt2small_hf.training.resume import (
    check_folder,
    find_start_checkpoint,
    settings_to_resume,
    start_branch,
    steps_of_branch,
)
from gpt2small_hf.training.trainer import CausalLMTrainer


def train(args: Arguments) -> RunFolder:
    """Do the whole run, or what is left of it. Several processes may call this together; the first alone speaks.

    Raises: UsageError for anything a user can fix, before the first step; RunStoppedError when training cannot go on;
        RunInterruptedError when a signal ended it.
    """
    check_launch(args)
    run = RunFolder(args.run.output_dir)
    check_folder(run, args)
    with ExitStack() as stack:
        if args.trainer.process_index > 0:
            stack.enter_context(redirect_stdout(stack.enter_context(Path(os.devnull).open("w"))))
        run_on_rank_0(lambda: stack.enter_context(opened(run, look_only=args.run.preflight_only)))
        try:
            return _train(args, run)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            reason = f"{out_of_memory(error)} Last good checkpoint: {newest(run) or 'none was saved'}."
            if args.trainer.process_index > 0:  # commands print the errors of rank 0, which may have enough memory
                print(f"rank {args.trainer.process_index}: {reason}", file=sys.stderr)
            raise RunStoppedError(reason) from None


def check_launch(args: Arguments) -> None:
    """Raise: UsageError if a launcher started several processes, and the Trainer takes each for the only one."""
    n_launched, n_known = int(os.environ.get("WORLD_SIZE", "1")), args.trainer.world_size
    if n_launched in (1, n_known):
        return
    if dist.is_initialized():
        dist.barrier()  # or the launcher may end rank 0, which prints the error, because another was first to exit
    raise UsageError(
        f"{n_launched} processes were launched (WORLD_SIZE), but each would train alone. Without a GPU, add --use_cpu. "
        f"To train in one process, run {command('train')} without a launcher."
    )


@contextmanager
def opened(run: RunFolder, *, look_only: bool) -> Iterator[None]:
    """Create the run folder and keep other trainings out of it until this one ends; only look at it if `look_only`.

    Folders that are still empty at the end are removed again, if they were created here.

    Raises: UsageError if another process trains in the folder.
    """
    created = [folder for folder in (run.checkpoints, run.root) if not folder.exists()]  # the Trainer makes both, too
    try:
        if look_only:
            yield
            return
        run.root.mkdir(parents=True, exist_ok=True)
        refusal = f"another process trains in {run.root}. Wait for its end, or choose another folder with --output_dir."
        with locked(run.lock, refusal):
            restore(run)
            try:
                yield
            finally:
                if run.checkpoints in created:
                    remove_if_empty(run.checkpoints)
                if [*run.root.glob("*")] == [run.lock]:
                    with suppress(OSError):  # Windows removes no open file
                        run.lock.unlink()
    finally:
        for folder in created:
            remove_if_empty(folder)


def _train(args: Arguments, run: RunFolder) -> RunFolder:
    began = time.perf_counter()
    logging.disable_progress_bar()  # the run has its own; a bar a saved file would push it off the screen
    if args.run.num_threads is not None:
        torch.set_num_threads(args.run.num_threads)
    check_memory(args, device=args.trainer.device)
    inputs = build_run_inputs(args)
    rows, heldout, tokenizer, config = inputs.rows, inputs.heldout, inputs.tokenizer, inputs.config
    chats = rows.is_chat
    in_batch = 0  # not known beforehand
    if not chats and not args.run.find_batch_size:
        in_batch = min(args.trainer.per_device_train_batch_size, len(rows)) * rows.seq_len
    check_memory(args, config, device=args.trainer.device, batch_tokens=in_batch)
    prompts_from = "given"
    if args.run.prompts is None:
        args.run.prompts, prompts_from = default_prompts(rows, heldout)
    if args.trainer.n_gpu > 1:
        raise UsageError(
            f"one process sees {args.trainer.n_gpu} GPUs. Launch one process a GPU (accelerate launch -m gpt2small_hf "
            "train …), or show it a single one: CUDA_VISIBLE_DEVICES=0."
        )
    rows_per_step = (
        args.trainer.per_device_train_batch_size * args.trainer.gradient_accumulation_steps * args.trainer.world_size
    )
    tokens_per_step = round(rows_per_step * rows.tokens_per_row)
    tokens = wanted_tokens(config, args.run.tokens, args.run.tokens_per_parameter, args.run.parameters_counted)
    if tokens is not None:
        args.trainer.max_steps = steps_for(tokens, tokens_per_step)
    if args.run.branch_from is not None:
        n_decay = steps_of_branch(args.run.branch_from, args.trainer.max_steps)
        args.trainer.lr_scheduler_type = SchedulerType.WARMUP_STABLE_DECAY
        args.trainer.lr_scheduler_kwargs = {"num_decay_steps": n_decay, "decay_type": "linear"}
        args.trainer.warmup_steps = 0  # it is over, whatever share of the new length it was said to be

    described = config.to_diff_dict()  # before the Trainer turns use_cache off in it
    in_training = prompts_in_training(args.run.prompts, rows)
    settings = resolve(args, inputs, described, rows_per_step, prompts_from, in_training)
    first = args.trainer.process_index == 0
    checkpoint = None
    if not args.run.preflight_only:  # which looks at a run as if it were new, and touches none
        checkpoint = run_on_rank_0(lambda: find_start_checkpoint(run, args, settings))
    if run.finished and not args.run.overwrite and not args.run.preflight_only:
        if first:
            if not run.chart("loss").exists():  # killed before they were drawn, or the disk was full
                draw_charts(run)
            shutil.rmtree(run.former, ignore_errors=True)
        print(f"{run.root} is finished, with these settings. --overwrite does it again.")
        return run
    model = inputs.build()
    trained = model.num_parameters(only_trainable=True)
    adapter = sum(p.numel() for name, p in model.named_parameters() if "lora_" in name)
    parameters = ParameterCounts(total=model.num_parameters(), trained=trained, adapter=adapter)
    settings = replace(settings, parameters=parameters)
    if config.tie_word_embeddings:
        # Saved under the embedding's name alone; Trainer would report it missing whenever it resumes.
        model._keys_to_ignore_on_save = set(model._tied_weights_keys)
    branching = checkpoint is not None and checkpoint == args.run.branch_from
    if args.run.find_batch_size:
        before = settings_to_resume(run, args)
        if before is not None and checkpoint is not None and not branching:  # as it was found when the run began
            for name in FOUND:
                setattr(args.trainer, name, getattr(before.trainer, name))
        else:
            print(trials_table(find_batch_size(model, args.trainer, rows.seq_len), args.trainer))
        found = {name: getattr(args.trainer, name) for name in FOUND}
        settings = replace(settings, trainer=replace(settings.trainer, **found))
    progress = ProgressLine(tokens_per_step)
    stop = StopOnSignal(progress, to_resume=args.run.command_to_resume)
    metrics = MetricsLog(run.metrics)
    tokenizer.model_max_length = config.max_position_embeddings
    device = args.trainer.device
    peak = None
    if device.type == "cuda":
        peak = peak_flops(torch.cuda.get_device_name(device), precision_of(args.trainer))
    try:
        trainer = CausalLMTrainer(
            model=model,
            args=args.trainer,
            data_collator=rows.collate,
            train_dataset=rows,
            eval_dataset=heldout,
            processing_class=tokenizer,
            decay=args.run.decay,
            spike_factor=args.run.spike_factor,
            max_bad_steps=args.run.max_bad_steps,
            flops_per_token=flops_per_token(config, rows.seq_len, args.run.lora_rank),
            peak_flops=peak,
            stop=stop,
            callbacks=[
                stop,
                metrics,
                progress,
                Health(run.metrics),
                Samples(
                    run.samples,
                    tokenizer,
                    args.run.prompts,
                    chat=chats,
                    progress=progress,
                    all_checkpoints=args.run.sample_all_checkpoints,
                    starts_scheduled=checkpoint is None or is_scheduled(checkpoint),
                ),
                Charts(run),
                *([EarlyStopping(patience)] if (patience := args.run.early_stopping_patience) else []),
            ],
        )
    except (ImportError, RuntimeError, ValueError) as error:  # a reporter or kernel that is not installed, say
        raise UsageError(" ".join(str(error).split())) from error
    trainer.remove_callback(PrinterCallback)
    if checkpoint is None:
        run_on_rank_0(lambda: inspect(trainer, args, inputs, tokens_per_step))
    if args.run.preflight_only:
        words = without_flags(args.words, {"preflight_only"})
        if words == args.words:  # the recipe says it
            words += ["--preflight_only", "false"]
        print(f"next: {command('train', *words)}")
        return run
    if first:
        begin_folder(args, run, settings, inputs)
        if checkpoint is not None and branching and not run.metrics.exists():
            start_branch(checkpoint, run)
        print(
            f"{count_parameters(model)} · {len(rows):,} rows of {'up to ' if chats else ''}{rows.seq_len} tokens to "
            f"train on, {f'{len(heldout):,}' if heldout else 'none'} held out · {tokens_per_step:,} tokens a step"
            + (f" · {rows.cropped_share:.1%} of the text in no row" if not chats and rows.cropped_share > 0.01 else "")
        )
        if checkpoint is not None:
            print(f"going on with {checkpoint}")
            if not run.metrics.exists():
                print(f"{run.metrics} is not there: what was logged up to here is lost.", file=sys.stderr)
        if heldout and (not run.metrics.exists() or not read_jsonl(run.metrics)):
            before = heldout_losses(model, heldout, batch_size=args.trainer.eval_batch_size).mean()
            write_jsonl(run.metrics, [{"step": 0, "eval_loss": float(before)}])

    learn(trainer, run, checkpoint, stop, progress)
    model = unsharded_model(trainer.accelerator.unwrap_model(trainer.model))
    if first:
        try:
            finish_folder(args, run, inputs, merged(model, run), kept_step(trainer), trainer.state.global_step)
        except Exception as error:
            if not disk_is_full(error):
                raise
            reason = " ".join(str(error).split())
            raise RunStoppedError(
                f"the disk did not take all that is written after the last step ({reason}). Free some space; "
                f"{args.run.command_to_resume} writes the rest."
            ) from None
        print(f"done in {duration(time.perf_counter() - began)} · wrote {run.root}")
        print(f"next: {command('report', str(run.root))}")
    return run


def learn(
    trainer: CausalLMTrainer, run: RunFolder, checkpoint: Path | None, stop: StopOnSignal, progress: ProgressLine
) -> None:
    """Train to the last step.

    Raises: RunStoppedError and RunInterruptedError, which name the checkpoint that the run goes on from.
    """
    # What is imported and built by now stays: the garbage collector need not walk through it again and again.
    gc.collect()
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
        raise RunStoppedError(f"{reason} Last good checkpoint: {newest(run) or 'none was saved'}.") from None
    finally:
        gc.unfreeze()
        stop.close()
        progress.close()
    if stop.agreed(trainer.args.device):  # after the last step
        raise stop.interruption(newest(run))
    best, kept = trainer.state.best_global_step, trainer.state.best_model_checkpoint
    if trainer.args.load_best_model_at_end and best and (kept is None or number_of(Path(kept)) != best):
        instead = "the last model" if kept is None else Path(kept).name
        print_stderr(
            f"the lowest held-out loss was at step {best:,}, where no checkpoint was saved; {instead} is kept."
        )


def kept_step(trainer: CausalLMTrainer) -> int:
    """Return the step of the weights that a finished training has: its last, or that of the best checkpoint."""
    best = trainer.state.best_model_checkpoint
    return number_of(Path(best)) if trainer.args.load_best_model_at_end and best else trainer.state.global_step


def out_of_memory(error: BaseException) -> str:
    """What a run that does not fit in memory can do, and the allocator's own first line."""
    first, *_ = str(error).splitlines() or ["no more memory"]
    return (
        f"out of memory ({first[:200]}). Give --find_batch_size, or a smaller --per_device_train_batch_size with more "
        "--gradient_accumulation_steps; --activation_checkpointing, --bf16 and a shorter --seq_len save memory too."
    )


# ---- before the first step ---------------------------------------------------------------------------------------


T = TypeVar("T")
ROWS_TO_LOOK_AT = 3
FOUND = ("per_device_train_batch_size", "gradient_accumulation_steps")  # what --find_batch_size decides


def run_on_rank_0(decide: Callable[[], T]) -> T:
    """What the first process decides, on all of them; what it refuses, all refuse."""
    answer: list[Any] = [None, None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            answer[0] = decide()
        except UsageError as error:
            answer[1] = str(error)
    if dist.is_initialized():
        dist.broadcast_object_list(answer)
    if answer[1] is not None:
        raise UsageError(answer[1])
    return answer[0]


def newest(run: RunFolder) -> Path | None:
    """The run's newest whole checkpoint."""
    return next(complete_checkpoints(run), None)


def count_parameters(model: Any) -> str:
    """How many parameters a model has, and how many of them are trained if not all."""
    total, trained = model.num_parameters(), model.num_parameters(only_trainable=True)
    return f"{total:,} parameters" if trained == total else f"{trained:,} of {total:,} parameters trained"


def default_prompts(rows: RowDataset, heldout: RowDataset | None) -> tuple[list[str], str]:
    """The prompts of a run that was given none, and where they are from, which decides whether they are published."""
    if isinstance(heldout, ChatDataset):
        return first_questions(heldout.chats), "held-out chats"
    if isinstance(rows, ChatDataset):  # nothing is held out
        return first_questions(rows.chats), "training chats"
    return [PROMPT], "default"


def prompts_in_training(prompts: list[str], rows: RowDataset) -> list[bool] | None:
    """Return for each prompt whether it is also a user's turn in the training chats; None of a run on text."""
    if not isinstance(rows, ChatDataset):
        return None
    turns = (turn["content"].strip() for chat in rows.chats for turn in chat.messages if turn["role"] == "user")
    found = {prompt.strip() for prompt in prompts}.intersection(turns)  # holds prompts alone, not all turns
    return [prompt.strip() in found for prompt in prompts]


def resolve(
    args: Arguments,
    inputs: RunInputs,
    model: dict[str, Any],
    rows_per_step: int,
    prompts_from: str,
    prompts_in_training: list[bool] | None,
) -> Resolved:
    """Every value in force, as `resolved.json` has it."""
    device = args.trainer.device
    values = {
        "run": {name: _plain(value) for name, value in vars(args.run).items()},
        "prompts_from": prompts_from,
        "prompts_in_training": prompts_in_training,
        "chat": {name: _plain(value) for name, value in vars(args.chat).items()} if args.chat.chat_data else None,
        "data": inputs.data,
        "base": inputs.base,
        "model": model,
        "trainer": {name: _plain(value) for name, value in args.trainer.to_dict().items()},
        "rows_per_step": rows_per_step,
        "device": {
            "type": device.type,
            "name": torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name(),
            "count": args.trainer.world_size,
            "threads": torch.get_num_threads(),
        },
        "made_by": made_by([args.recipe]).to_json(),
    }
    # As it will be read again, by an earlier or later version of this code too.
    return Resolved.from_json(json.loads(json.dumps(finite(values))), "the run's settings:")


def inspect(trainer: CausalLMTrainer, args: Arguments, inputs: RunInputs, tokens_per_step: int) -> None:
    """Check what is about to be trained; show all of it with --preflight_only, else what deserves a look.

    Raises: UsageError if something is wrong.
    """
    total = args.trainer.max_steps
    if total < 1:
        total = steps_of_epochs(len(inputs.rows), args.trainer, args.trainer.world_size)
    checks = preflight(
        trainer,
        rows=inputs.rows,
        heldout=inputs.heldout,
        total_steps=total,
        tokens_per_step=tokens_per_step,
        folder_to_write=args.run.output_dir,
        fresh=args.run.branch_from is None and inputs.base is None,
        known_positions=inputs.known_positions,
        allow_high_initial_loss=args.run.allow_high_initial_loss,
        prompts=args.run.prompts or [],
    )
    show(checks, everything=args.run.preflight_only)


def begin_folder(args: Arguments, run: RunFolder, settings: Resolved, inputs: RunInputs) -> None:
    """Write the recipe as given, every value in force, and the first rows to look at, before the first step.

    A run that is there already, and is to be overwritten, steps aside until this one is finished.
    """
    recipe = recipe_text(args.recipe, ALTERNATIVES)
    if args.run.overwrite:
        set_aside(run)
    with atomic_write(run.recipe) as temporary:
        temporary.write_text(recipe, encoding="utf-8")
    first = range(min(ROWS_TO_LOOK_AT, len(inputs.rows)))
    with atomic_write(run.first_rows) as temporary:
        temporary.write_text(as_text(inputs.rows, inputs.tokenizer, first), encoding="utf-8")
    settings.save(run.resolved)


def set_aside(run: RunFolder) -> None:
    """Move the run that is in the folder to `former/`. It replaces an earlier one there only if it is finished."""
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
    """Put back what `set_aside` had moved when it was killed.

    Raises: UsageError if something else has one of the names by now; then nothing is moved.
    """
    if not run.former_incomplete.exists():
        return
    moved = list(run.former_incomplete.iterdir())
    for path in moved:
        taken = run.root / path.name
        remove_if_empty(taken)
        if taken.exists():
            raise UsageError(
                f"{path} belongs to a run that --overwrite was moving when it was killed, and {taken} was made since. "
                "Remove or rename one of the two."
            )
    for path in moved:
        path.rename(run.root / path.name)
    run.former_incomplete.rmdir()


def contents(run: RunFolder) -> list[Path]:
    """The files and folders of a run, `resolved.json` last: without it the folder is not known as a run's."""
    return sorted(filter(run.is_own, run.root.iterdir()), key=lambda path: path == run.resolved)


# ---- after the last step -----------------------------------------------------------------------------------------


def finish_folder(
    args: Arguments, run: RunFolder, inputs: RunInputs, model: GPT2SmallForCausalLM, step: int, last_step: int
) -> None:
    """Write the model, measure it, let it speak, and draw the charts. `heldout.json` ends the run.

    Args:
        args: the run's settings.
        run: the folder.
        inputs: data and tokenizer.
        model: the trained model, without adapters.
        step: the step of its weights.
        last_step: the step that training ended at.

    Raises: RunStoppedError if the model's loss is not finite.
    """
    rows, tokenizer = inputs.rows, inputs.tokenizer
    measured_on = EvaluationInputs(
        tokenizer=tokenizer,
        heldout=inputs.heldout,
        train=rows,
        prompts=args.run.prompts or [],
        is_chat=rows.is_chat,
        loss_before=read_jsonl(run.metrics)[0]["eval_loss"] if inputs.heldout else None,
        max_answers=args.run.max_answers,
        batch_size=args.trainer.eval_batch_size,
    )
    if inputs.heldout and not np.isfinite(measured_on.losses(model)).all():
        raise RunStoppedError(
            "the trained model's held-out loss is not finite, so the model was not saved. Lower --learning_rate; "
            f"{run.metrics} shows when it broke."
        )
    save_model(model, tokenizer, run.model)
    results = run_tasks(model, measured_on)
    made = made_by([run.model / "model.safetensors", run.model / "tokenizer.json", *inputs.inputs])
    measured = save_results(run, results, seq_len=rows.seq_len, step=step, last_step=last_step, made_by=made)
    draw_charts(run)
    if run.former.exists():
        shutil.rmtree(run.former)

    texts = {name: results.pop(name) for name in ("completions",) if name in results}
    for text in notes(texts):
        print(f"\n{text}")
    for table in tables(results):
        print(f"\n{console_table(table[0], table[1:])}")
    if not inputs.heldout:
        print(f"\n{NOTHING_HELD_OUT}")
    for line in filter(None, (kept_line(step, last_step), *notes(results))):
        print(f"\n{line}")
    print()
    if worse := worse_line(measured):
        print(f"warning: {worse}\n")


def merged(model: Any, run: RunFolder) -> GPT2SmallForCausalLM:
    """The whole model; if it was trained with adapters, these are saved alone first."""
    if isinstance(model, GPT2SmallForCausalLM):
        return model
    with atomic_write(run.adapter) as temporary:
        # Old rows of the embedding and head are the base's; with new tokens peft would save all of them again.
        model.save_pretrained(temporary, save_embedding_layers=False)
        (temporary / "README.md").unlink(missing_ok=True)  # a card with nothing filled in
        set_default_permissions(temporary)
    return model.merge_and_unload()


def save_model(model: GPT2SmallForCausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write weights, config, code, tokenizer and generation settings: all that a stranger needs, in one folder."""
    model.config.use_cache = True  # the Trainer turns it off for training
    model.generation_config._from_model_config = False
    context = model.config.max_position_embeddings
    # The pipeline asks for 256 new tokens unless the model sets a length, which a short context cannot hold. The length
    # is a max_length: a max_new_tokens would also override the max_length of a caller.
    model.generation_config.max_length = context if context < 512 else None
    if context < 512:
        model.generation_config.max_new_tokens = None
    with atomic_write(folder) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        set_default_permissions(temporary)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
