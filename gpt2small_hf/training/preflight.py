"""Check a trainer, its model and its data before the first step.

The checks compute in full precision, on one process, with two to four rows: less work than two steps of training.
"""

from __future__ import annotations

import copy
import random
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from gpt2small_hf.config.resolve import RunConfig
from gpt2small_hf.data.chat_dataset import ChatDataset
from gpt2small_hf.data.row_dataset import RowDataset
from gpt2small_hf.data.text_dataset import TextDataset
from gpt2small_hf.errors import UsageError
from gpt2small_hf.evaluation.completions import encode_prompts
from gpt2small_hf.evaluation.heldout import seen_in_training
from gpt2small_hf.formatting import byte_size, console_table, counted
from gpt2small_hf.report.notes import CHATS_TO_JUDGE_BY
from gpt2small_hf.training import budget
from gpt2small_hf.training.inputs import RunInputs
from gpt2small_hf.training.model_checks import Check, Sample, check_model, supervised
from gpt2small_hf.training.schedules import rates
from gpt2small_hf.training.trainer import CausalLMTrainer

FEW_STEPS = 100
SAMPLE_ROWS = 1000
HELDOUT_TOKENS, TRAINING_TOKENS = 100_000, 2_000_000
"""Tokens compared to find held-out text in the training text: takes about a second."""
SEEN_NOTED, SEEN_REFUSED = 0.1, 0.98
CUT_NOTED = 0.1


def preflight(
    trainer: CausalLMTrainer, config: RunConfig, inputs: RunInputs, *, free_bytes: int | None = None
) -> list[Check]:
    """Check a run before training. The state of the trainer is restored; gradients are None.

    Args:
        trainer: before `train`. A single rank of several may call this alone.
        config: the settings of the run.
        inputs: its rows and its base model.
        free_bytes: free space; None reads that of the run folder's disk.

    Returns: the checks. The model is run only if the checks of the data do not fail.
    """
    model, args, rows, heldout = (
        trainer.accelerator.unwrap_model(trainer.model),
        trainer.args,
        inputs.rows,
        inputs.heldout,
    )
    total_steps = args.max_steps
    if total_steps < 1:
        total_steps = budget.steps_of_epochs(len(rows), args, args.world_size)
    with _no_trace(trainer, model):
        sets = {"training": rows} | ({"held-out": heldout} if heldout else {})
        samples = {name: _sample(trainer, some) for name, some in sets.items()}
        checks = [_first_row(rows, inputs.tokenizer)]
        checks += [_ids(model.config.vocab_size, list(sets.values()), samples), *_labels(samples)]
        if all(check.verdict != "fail" for check in checks):
            checks += check_model(trainer, model, config, inputs, samples["training"])
    if args.fp16 and args.device.type == "cpu":  # Accelerate supports float16 only on GPUs
        checks.append(Check("precision", "note", "--fp16 has no effect on a CPU: training is in float32. Use --bf16."))
    checks += [
        _weight_decay(trainer, model),
        _learning_rate(trainer, total_steps),
        _tokens(trainer, rows, total_steps),
        _disk(trainer, model, total_steps, config.run.output_dir, free_bytes),
        _heldout(rows, heldout),
    ]
    if config.run.prompts:
        checks.append(_prompts(inputs, config.run.prompts))
    if isinstance(rows, ChatDataset):
        checks += [_long_chats(rows), _steps(trainer, rows, total_steps)]
    if isinstance(heldout, ChatDataset):
        checks.append(_heldout_chats(heldout, keeps_best=args.load_best_model_at_end))
    return checks


def show(checks: Sequence[Check], *, everything: bool = True) -> None:
    """Print the checks as a table; unless `everything`, only those that are not ok.

    Raises: UsageError that lists the failed checks in one line.
    """
    verdicts = [check.verdict for check in checks]
    counts = {"ok": f"{verdicts.count('ok')} ok", "note": counted(verdicts.count("note"), "note")}
    counts["fail"] = f"{verdicts.count('fail')} failed"
    parts = [words for verdict, words in counts.items() if verdict == "ok" or verdict in verdicts]
    print(f"{counted(len(checks), 'check')} before the first step: {', '.join(parts)}")
    shown = [check for check in checks if everything or check.verdict != "ok"]
    if shown:
        width = max(len(text) for text in ("found", *(check.found for check in shown)))
        lines = [[check.name, check.verdict.ljust(4), check.found.ljust(width)] for check in shown]
        table = console_table(["check", "    ", "found".ljust(width)], lines)
        print("\n".join(line.rstrip() for line in table.splitlines()))
    if failed := [f"{check.name}: {check.found}" for check in checks if check.verdict == "fail"]:
        raise UsageError(f"training was not started. {' '.join(failed)}")


@contextmanager
def _no_trace(trainer: CausalLMTrainer, model: nn.Module) -> Iterator[None]:
    """Disable dropout and communication between ranks; restore modes and random state, and remove gradients."""
    modes = [(module, module.training) for module in model.modules()]
    averaged, python, numpy = trainer.args.average_tokens_across_devices, random.getstate(), np.random.get_state()
    try:
        model.eval()
        trainer.args.average_tokens_across_devices = False
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            yield
    finally:
        trainer.args.average_tokens_across_devices = averaged
        for module, training in modes:
            module.training = training
        model.zero_grad(set_to_none=True)
        random.setstate(python)
        np.random.set_state(numpy)


# ---- the data ----------------------------------------------------------------------------------------------------


def _sample(trainer: CausalLMTrainer, rows: RowDataset) -> Sample:
    """Return evenly spaced rows of a set."""
    numbers = np.linspace(0, len(rows) - 1, min(len(rows), SAMPLE_ROWS)).astype(int).tolist()
    return {row: trainer.data_collator([rows[row]]) for row in numbers}


def _first_row(rows: RowDataset, tokenizer: Any) -> Check:
    text = tokenizer.decode(rows[0]["input_ids"][:32].tolist(), skip_special_tokens=False)
    return Check("first row", "ok", f"begins {text!r}")


def _ids(vocab_size: int, sets: Sequence[RowDataset], samples: dict[str, Sample]) -> Check:
    ids = [rows.largest_id for rows in sets]
    for batches in samples.values():
        ids += [int(batch[key].max()) for batch in batches.values() for key in ("input_ids", "labels")]
    if max(ids) < vocab_size:
        return Check("token ids", "ok", f"up to {max(ids):,}, of a vocabulary of {vocab_size:,}")
    found = f"the largest is {max(ids):,}, but the model has vocab_size={vocab_size:,}"
    return Check("token ids", "fail", f"{found}: prepare the text with this model's tokenizer.")


def _labels(samples: dict[str, Sample]) -> Iterator[Check]:
    for name, batches in samples.items():
        masks = {row: supervised(batch) for row, batch in batches.items()}
        share = sum(int(mask.sum()) for mask in masks.values()) / sum(mask.numel() for mask in masks.values())
        empty = [row for row, mask in masks.items() if not mask.any()]
        if len(empty) == len(masks):
            found = f"none in {len(masks):,} rows: all labels are -100, so nothing can be learned; see what masks them."
            yield Check(f"{name} labels", "fail", found)
        elif empty:
            found = f"{len(empty):,} of {len(masks):,} rows have none, row {empty[0]:,} first: drop or shorten them."
            yield Check(f"{name} labels", "note", found)
        else:
            yield Check(f"{name} labels", "ok", f"{share:.1%} of the tokens in {len(masks):,} rows are supervised")


def _prompts(inputs: RunInputs, prompts: list[str]) -> Check:
    """Check that prompts leave half of the context for the samples."""
    half = inputs.config.max_position_embeddings // 2
    lengths = [len(ids) for ids in encode_prompts(inputs.tokenizer, prompts, chat=inputs.rows.is_chat)]
    longest, n_long = f"the longest has {counted(max(lengths), 'token')}", sum(n > half for n in lengths)
    if not n_long:
        return Check("prompts", "ok", longest)
    found = f"{n_long:,} of {len(lengths):,} are longer than half the context ({half:,} tokens): {longest}"
    return Check("prompts", "note", f"{found}. Samples read only the end of these.")


def _heldout(rows: RowDataset, heldout: RowDataset | None) -> Check:
    if isinstance(rows, ChatDataset) and isinstance(heldout, ChatDataset):
        return _repeated_chats(rows, heldout)
    if isinstance(rows, TextDataset) and isinstance(heldout, TextDataset):
        return _repeated_text(rows, heldout)
    return Check("held-out data", "note", "none: the loss on new data is unknown.")


def _repeated_chats(rows: ChatDataset, heldout: ChatDataset) -> Check:
    trained = {one.input_ids.tobytes() for one in rows.encoded}
    seen = np.mean([one.input_ids.tobytes() in trained for one in heldout.encoded])
    found = f"{seen:.0%} of {len(heldout.encoded):,} held-out conversations are also in the training set, word for word"
    if seen > SEEN_REFUSED:
        found += ": hold out others (--validation_data or --validation_fraction)."
        return Check("held-out chats", "fail", found)
    return Check("held-out chats", "note" if seen > 0 else "ok", found)


def _repeated_text(rows: TextDataset, heldout: TextDataset) -> Check:
    text = _first_tokens(rows, TRAINING_TOKENS)
    seen = seen_in_training(text, _first_tokens(heldout, HELDOUT_TOKENS))
    places = np.arange(seen.shape[0])[:, None] * heldout.seq_len + np.arange(1, heldout.seq_len)
    seen = seen[places >= 12]  # positions at which 13 tokens can end
    if not len(seen):
        return Check("held-out text", "note", "is too short to tell whether it repeats training text.")
    found = (
        f"{seen.mean():.0%} of the first {len(seen):,} held-out tokens repeat training text: they and the 12 before "
        f"them occur in its first {text.n_tokens:,} tokens"
    )
    if seen.mean() > SEEN_REFUSED:
        found += ": hold out other text (--validation_fraction or --validation_text)."
        return Check("held-out text", "fail", found)
    return Check("held-out text", "note" if seen.mean() > SEEN_NOTED else "ok", found)


def _first_tokens(rows: TextDataset, n_tokens: int) -> TextDataset:
    """Return the same set, cut after `n_tokens` tokens."""
    few = copy.copy(rows)
    few.n_tokens = min(rows.n_tokens, n_tokens)
    few.n_rows = max(1, min(len(rows), n_tokens // rows.seq_len))
    return few


def _long_chats(rows: ChatDataset) -> Check:
    counts = rows.counts
    cut, empty, limit = counts.shortened + counts.too_long, counts.empty_answers, CUT_NOTED * counts.conversations
    if cut > limit:
        found = f"{cut:,} of {counts.conversations:,} are longer than a row, lost turns or were left out"
        return Check("long chats", "note", f"{found}: raise --max_position_embeddings, or see them with `preview`.")
    if empty > limit:
        found = f"{empty:,} of {counts.conversations:,} have an empty answer: the model learns to stop at once."
        return Check("long chats", "note", found)
    return Check("long chats", "ok", f"{cut:,} of {counts.conversations:,} lost turns or were left out")


def _heldout_chats(heldout: ChatDataset, *, keeps_best: bool) -> Check:
    """Check whether there are enough held-out chats to choose the best checkpoint."""
    n, kept = counted(heldout.counts.kept, "held-out chat"), f"the {'best' if keeps_best else 'last'} model is kept"
    if heldout.counts.kept >= CHATS_TO_JUDGE_BY:
        return Check("checkpoint", "ok", f"{kept}; {n}")
    fix = ": hold out more (--validation_fraction), or give --load_best_model_at_end false" if keeps_best else ""
    return Check("checkpoint", "note", f"{n}: too few to choose a checkpoint by; {kept}{fix}.")


# ---- the run -----------------------------------------------------------------------------------------------------


def _weight_decay(trainer: CausalLMTrainer, model: nn.Module) -> Check:
    names = set(trainer.get_decay_parameter_names(model))
    trained = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    decayed = [n for name, n in trained.items() if name in names]
    found = f"{trainer.args.weight_decay:g} on {len(decayed):,} tensors of {sum(decayed):,} parameters, "
    rest = f"none on {len(trained) - len(decayed):,} of {sum(trained.values()) - sum(decayed):,}"
    return Check("weight decay", "ok", found + rest)


def _learning_rate(trainer: CausalLMTrainer, total_steps: int) -> Check:
    share, peak = rates(trainer.args, total_steps), trainer.args.learning_rate
    warmup = trainer.args.get_warmup_steps(total_steps)
    if share is None:
        return Check("learning rate", "note", "depends on the held-out loss, so it is not known in advance.")
    if not peak:
        return Check("learning rate", "fail", "is 0, so the model does not train: set --learning_rate.")
    steps = sorted({*np.linspace(0, total_steps, 2000).astype(int).tolist(), min(warmup, total_steps)})
    highest = max(steps, key=share)
    if share(highest) < 1 - 1e-6:
        found = (
            f"goes to {peak * share(highest):.1e} and never reaches its peak of {peak:.1e}: of {total_steps:,} steps "
            f"warm-up takes {warmup:,}; set --warmup_steps, in optimizer steps, or below 1 as a share of all."
        )
        return Check("learning rate", "fail", found)
    course = " -> ".join(
        f"{peak * share(step):.1e} at step {step:,}" if share(step) else "0"
        for step in sorted({0, highest, total_steps})
    )
    if highest < total_steps:
        return Check("learning rate", "ok", course)
    return Check("learning rate", "note", f"{course}: the whole run is warm-up; see --warmup_steps.")


def _tokens(trainer: CausalLMTrainer, rows: RowDataset, total_steps: int) -> Check:
    one_pass = budget.one_pass(len(rows), trainer.args, trainer.args.world_size)
    n_trained = round(one_pass.rows_in(total_steps) * rows.tokens_per_row)  # the last step of an epoch may be shorter
    n_available = round(len(rows) * rows.tokens_per_row)
    data = "chats" if rows.is_chat else "text"
    found = f"{n_trained:,} trained on, of {n_available:,}: {n_trained / n_available:.1f} epochs of the {data}"
    # Several epochs of chats are usual.
    return Check("tokens", "note" if n_trained > n_available and not rows.is_chat else "ok", found)


def _disk(trainer: CausalLMTrainer, model: nn.Module, total_steps: int, folder: Path, free_bytes: int | None) -> Check:
    args = trainer.args
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    one_pass = budget.one_pass(len(trainer.train_dataset), args, args.world_size)  # pyright: ignore[reportArgumentType]
    _, n = budget.checkpoints_saved(args, total_steps, one_pass.steps)
    needed = budget.disk_bytes(weights, n, args)
    if free_bytes is None:
        existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        free_bytes = shutil.disk_usage(existing).free
    found = f"{n} checkpoints and the model take {byte_size(needed)}, {folder} has {byte_size(free_bytes)} free"
    if needed <= free_bytes:
        return Check("disk", "ok", found)
    return Check("disk", "fail", f"{found}: free some, lower --save_total_limit, or choose another --output_dir.")


def _steps(trainer: CausalLMTrainer, rows: ChatDataset, total_steps: int) -> Check:
    args = trainer.args
    found = f"{total_steps:,} in all, of {counted(args.per_device_train_batch_size, 'row')} on each device"
    if total_steps >= FEW_STEPS:
        return Check("steps", "ok", found)
    ways = ["raise --num_train_epochs" if args.max_steps < 1 else "raise --max_steps"]
    if args.max_steps < 1 and args.per_device_train_batch_size > 1:
        ways.append("lower --per_device_train_batch_size")
    if args.max_steps < 1 and rows.packing == "best_fit" and len(rows) < len(rows.encoded):
        ways.append("give --packing padding")
    return Check("steps", "note", f"{found}: few. The model may learn little; {', or '.join(ways)}.")
