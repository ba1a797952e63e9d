"""Check a trainer, its model and its data before the first step.

The checks compute in full precision, on one process, with two to four rows: less work than two steps of training.
"""

from __future__ import annotations

import copy
import math
import random
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from gpt2small_hf.data.chat_dataset import ChatDataset
from gpt2small_hf.data.row_dataset import RowDataset
from gpt2small_hf.data.text_dataset import TextDataset
from gpt2small_hf.errors import UsageError
from gpt2small_hf.evaluation.completions import encode_prompts
from gpt2small_hf.evaluation.heldout import seen_in_training
from gpt2small_hf.formatting import byte_size, counted
from gpt2small_hf.model.modeling_gpt2small import GPT2SmallForCausalLM
from gpt2small_hf.report.tables import CHATS_TO_JUDGE_BY, console_table
from gpt2small_hf.training import budget
from gpt2small_hf.training.schedules import rates
from gpt2small_hf.training.trainer import CausalLMTrainer

Batch = dict[str, Tensor]

ROWS_LOOKED_AT = 1000
SAME = 2e-3
"""Relative tolerance between two ways to compute a loss or a gradient norm."""
LEAKED = 1e-4
"""Minimum change of logits, as a share of their standard deviation, that shows that a token is not masked."""
HELDOUT_TOKENS, TRAINING_TOKENS = 100_000, 2_000_000
"""Tokens compared to find held-out text in the training text: takes about a second."""
SEEN_NOTED, SEEN_REFUSED = 0.1, 0.98
CUT_NOTED = 0.1
FEW_STEPS = 100
UNREACHED_NOTED = 0.5
"""Note the number of trained positions if it is below this share of the context."""


@dataclass(frozen=True)
class Check:
    """Result of one check."""

    name: str
    verdict: Literal["ok", "note", "fail"]
    says: str
    """What was found; for a failure also the fix."""


def preflight(
    trainer: CausalLMTrainer,
    *,
    rows: RowDataset,
    heldout: RowDataset | None,
    total_steps: int,
    tokens_per_step: int,
    folder_to_write: Path,
    fresh: bool,
    known_positions: int = 0,
    allow_high_initial_loss: bool = False,
    free_bytes: int | None = None,
    prompts: Sequence[str] = (),
) -> list[Check]:
    """Check a run before training. The state of the trainer is restored; gradients are None.

    Args:
        trainer: before `train`. A single rank of several may call this alone.
        rows: training rows.
        heldout: held-out rows, if any.
        total_steps: optimizer steps of the run.
        tokens_per_step: tokens per step over all ranks.
        folder_to_write: folder of checkpoints and model; it need not exist yet.
        fresh: whether the weights are newly initialised.
        allow_high_initial_loss: note an initial loss far above that of a uniform guess instead of failing.
        known_positions: positions that the weights were trained on before this run.
        free_bytes: free space; None reads that of the folder's disk.
        prompts: prompts of the samples.

    Returns: the checks. The model is run only if the checks of the data do not fail.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    with _no_trace(trainer, model):
        sets = {"training": rows} | ({"held-out": heldout} if heldout else {})
        looked_at = {name: _batches(trainer, some) for name, some in sets.items()}
        checks = [_text(trainer, rows), _ids(model, list(sets.values()), looked_at), *_labels(looked_at)]
        if all(check.verdict != "fail" for check in checks):
            batch = _some_rows(trainer, rows, looked_at["training"], model.device)
            with torch.no_grad():
                loss = float(trainer.compute_loss(model, batch))
            if fresh:
                checks.append(_initial_loss(model, loss, allow_high_initial_loss))
            checks += [_count(trainer, model, batch, loss), *_accumulation_and_gradients(trainer, model, batch)]
            checks += [_causality(model, batch), *_documents(model, looked_at["training"])]
            checks.append(_positions(model, rows, looked_at["training"], known_positions))
            if isinstance(model, GPT2SmallForCausalLM):  # without adapters
                checks.append(_tied(model))
        checks += [
            *_precision(trainer),
            _decay(trainer, model),
            _rate(trainer, total_steps),
            _passes(rows, total_steps, tokens_per_step),
            _disk(trainer, model, total_steps, folder_to_write, free_bytes),
            _seen(rows, heldout),
            *([_prompts(trainer, model, prompts, chat=isinstance(rows, ChatDataset))] if prompts else []),
            *([_cut(rows), _steps(trainer, rows, total_steps)] if isinstance(rows, ChatDataset) else []),
            *([_choice(trainer, heldout)] if isinstance(heldout, ChatDataset) else []),
        ]
    return checks


def show(checks: Sequence[Check], *, everything: bool = True) -> None:
    """Print the checks as a table; unless `everything`, only those that are not ok.

    Raises: UsageError that lists the failed checks in one line.
    """
    shown = [check for check in checks if everything or check.verdict != "ok"]
    width = max(len(words) for words in ("found", *(check.says for check in shown)))
    lines = [[check.name, check.verdict.ljust(4), check.says.ljust(width)] for check in shown]
    counts = {verdict: sum(check.verdict == verdict for check in checks) for verdict in ("ok", "note", "fail")}
    parts = [f"{counts['ok']} ok"]
    parts += [counted(counts["note"], "note")] * (counts["note"] > 0) + [f"{counts['fail']} failed"] * (
        counts["fail"] > 0
    )
    print(f"{counted(len(checks), 'check')} before the first step: {', '.join(parts)}")
    if lines:
        table = console_table(["check", "    ", "found".ljust(width)], lines)
        print("\n".join(line.rstrip() for line in table.splitlines()))
    if failed := [f"{check.name}: {check.says}" for check in checks if check.verdict == "fail"]:
        raise UsageError(f"training was not started. {' '.join(failed)}")


@contextmanager
def _no_trace(trainer: CausalLMTrainer, model: nn.Module) -> Iterator[None]:
    """Disable dropout and communication between ranks; restore modes and random state, and remove gradients."""
    modes = [(module, module.training) for module in model.modules()]
    averaged = trainer.args.average_tokens_across_devices
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        model.eval()
        trainer.args.average_tokens_across_devices = False
        yield
    finally:
        trainer.args.average_tokens_across_devices = averaged
        for module, training in modes:
            module.training = training
        model.zero_grad(set_to_none=True)
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if gpus:
            torch.cuda.set_rng_state_all(gpus)


# ---- the data ----------------------------------------------------------------------------------------------------


def _batches(trainer: CausalLMTrainer, rows: RowDataset) -> dict[int, Batch]:
    """Return evenly spaced rows of a set, each collated to a batch of one: row number → batch."""
    n = min(len(rows), ROWS_LOOKED_AT)
    return {row: trainer.data_collator([rows[row]]) for row in np.linspace(0, len(rows) - 1, n).astype(int).tolist()}


def _supervised(batch: Batch) -> Tensor:
    """Return the mask of supervised labels, shape (rows, T - 1). The first label of a row is never predicted."""
    return batch["labels"][:, 1:] != -100


def _text(trainer: CausalLMTrainer, rows: RowDataset) -> Check:
    tokenizer = trainer.processing_class
    if tokenizer is None:
        return Check("first row", "note", "no tokenizer to decode it.")
    text = tokenizer.decode(rows[0]["input_ids"][:32].tolist(), skip_special_tokens=False)  # pyright: ignore[reportAttributeAccessIssue]
    return Check("first row", "ok", f"begins {text!r}")


def _ids(model: GPT2SmallForCausalLM, sets: Sequence[RowDataset], looked_at: dict[str, dict[int, Batch]]) -> Check:
    found = [rows.largest_id for rows in sets]
    for batches in looked_at.values():
        found += [int(batch[key].max()) for batch in batches.values() for key in ("input_ids", "labels")]
    largest, vocabulary = max(found), model.config.vocab_size
    if largest >= vocabulary:
        says = (
            f"the largest is {largest:,}, but the model has vocab_size={vocabulary:,}: prepare the text with this "
            f"model's tokenizer, or set vocab_size to {largest + 1:,} or more."
        )
        return Check("token ids", "fail", says)
    return Check("token ids", "ok", f"up to {largest:,}, of a vocabulary of {vocabulary:,}")


def _labels(looked_at: dict[str, dict[int, Batch]]) -> Iterator[Check]:
    for name, batches in looked_at.items():
        counts = {row: _supervised(batch) for row, batch in batches.items()}
        share = sum(int(mask.sum()) for mask in counts.values()) / sum(mask.numel() for mask in counts.values())
        empty = [row for row, mask in counts.items() if not mask.any()]
        if len(empty) == len(counts):
            says = f"none in {len(counts):,} rows: all labels are -100, so nothing can be learned; see what masks them."
            yield Check(f"{name} labels", "fail", says)
        elif empty:
            says = f"{len(empty):,} of {len(counts):,} rows have none, row {empty[0]:,} first: drop or shorten them."
            yield Check(f"{name} labels", "note", says)
        else:
            yield Check(f"{name} labels", "ok", f"{share:.1%} of the tokens in {len(counts):,} rows are learned from")


def _some_rows(trainer: CausalLMTrainer, rows: RowDataset, looked_at: dict[int, Batch], device: torch.device) -> Batch:
    """Return two to four rows with labels; keep one label of the first row, so that the numbers of labels differ."""
    with_labels = [row for row, batch in looked_at.items() if _supervised(batch).any()]
    n = max(2, min(4, trainer.args.per_device_train_batch_size, 2048 // rows.seq_len))
    batch = trainer.data_collator([rows[with_labels[i % len(with_labels)]] for i in range(n)])
    last = _supervised(batch)[0].nonzero().max() + 1
    batch["labels"][0, :last] = -100
    return {name: tensor.to(device) for name, tensor in batch.items()}


# ---- the model ---------------------------------------------------------------------------------------------------


def _initial_loss(model: GPT2SmallForCausalLM, loss: float, is_high_allowed: bool) -> Check:
    even, scheme, tied = math.log(model.config.vocab_size), model.config.init_scheme, model.config.tie_word_embeddings
    found = f"{loss:.3f}, where a guess among {model.config.vocab_size:,} tokens has {even:.3f}"
    if abs(loss / even - 1) <= 0.05:
        return Check("initial loss", "ok", found)
    if not math.isfinite(loss):
        cause = "the weights or the arithmetic are broken before anything is learned."
    elif loss < even:
        cause = (
            "too low for untrained weights: the labels may leak into the input, or the loss may be averaged wrongly."
        )
    elif tied and scheme == "torch":
        cause = "torch's embeddings of standard deviation 1 are too large for a tied head; set --init_scheme gpt2."
    else:
        cause = "too high: the initial weights are too large; set --init_scheme gpt2 and --initializer_range 0.02."
    is_high = even < loss < math.inf
    if is_high and (is_high_allowed or (scheme != "gpt2" and loss < 1.5 * even)):  # small models vary that much
        return Check("initial loss", "note", f"{found}: {cause}")
    if is_high:
        cause = f"{cause.rstrip('.')}, or pass --allow_high_initial_loss to train from it."
    return Check("initial loss", "fail", f"{found}: {cause}")


def _count(trainer: CausalLMTrainer, model: GPT2SmallForCausalLM, batch: Batch, mean: float) -> Check:
    """Check that the Trainer divides by the number of labels that the model averages over."""
    counted = trainer._get_num_items_in_batch([batch], model.device)
    if counted is None:
        says = "the Trainer does not count them, so all micro-batches weigh the same, whatever their labels."
        return Check("labels counted", "note", says)
    with torch.no_grad():
        total = float(trainer.compute_loss(model, batch, num_items_in_batch=torch.tensor(1, device=model.device)))
    averaged = round(total / mean) if math.isfinite(total) and mean else 0
    if averaged != int(counted):
        says = (
            f"the Trainer divides the loss by {int(counted):,} labels, the model's mean is over {averaged:,}: its "
            "forward must pass num_items_in_batch to its loss, and its class name must end in ForCausalLM."
        )
        return Check("labels counted", "fail", says)
    return Check(
        "labels counted", "ok", f"{averaged:,} in {len(batch['labels'])} rows, by the Trainer and by the model"
    )


def _loss_and_norm(trainer: CausalLMTrainer, model: GPT2SmallForCausalLM, batches: list[Batch]) -> list[float]:
    """Return loss and gradient norm of a step's micro-batches, accumulated as by the Trainer. Keeps the gradients."""
    model.zero_grad(set_to_none=True)
    counted = trainer._get_num_items_in_batch(batches, model.device)
    total = 0.0
    for batch in batches:
        loss = trainer.compute_loss(model, batch, num_items_in_batch=counted)
        loss = loss / len(batches) if counted is None else loss
        loss.backward()
        total += float(loss.detach())
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return [total, float(norm)]


def _accumulation_and_gradients(trainer: CausalLMTrainer, model: GPT2SmallForCausalLM, batch: Batch) -> Iterator[Check]:
    n = len(batch["labels"])
    one_by_one = [{name: tensor[i : i + 1] for name, tensor in batch.items()} for i in range(n)]
    apart = _loss_and_norm(trainer, model, one_by_one)
    at_once = _loss_and_norm(trainer, model, [batch])
    found = " and ".join(f"{a:.3f}, {b:.3f}" for a, b in (at_once, apart))
    if all(abs(a - b) <= SAME * abs(b) for a, b in zip(apart, at_once, strict=True)):
        says = f"loss {at_once[0]:.3f} and gradient norm {at_once[1]:.3f}, {n} rows at once or one by one"
        yield Check("accumulation", "ok", says)
    else:
        says = (
            f"loss and gradient norm are {found} for {n} rows at once and one by one: the model's forward must "
            "divide its summed loss by num_items_in_batch."
        )
        yield Check("accumulation", "fail", says)

    parameters = dict(model.named_parameters())
    if not isinstance(model, GPT2SmallForCausalLM):  # only adapters are trained
        parameters = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    without = [name for name, parameter in parameters.items() if parameter.grad is None]
    broken = [name for name, p in parameters.items() if p.grad is not None and not p.grad.isfinite().all()]
    # LoRA's second matrix is initialised with zeros, so the gradient of the first one is zero at the first step.
    unread = _unread_rows(model, batch)
    zero = [
        name
        for name, p in parameters.items()
        if p.grad is not None and not p.grad.any() and "lora_A" not in name and not name.startswith(unread)
    ]
    wrong = {"no gradient": without, "one that is not finite": broken, "one that is all zero": zero}
    if any(wrong.values()):
        says = "; ".join(f"{_few(names)} got {what}" for what, names in wrong.items() if names)
        yield Check(
            "gradients", "fail", f"{says}: check that each is used, is not frozen, and is not multiplied by zero."
        )
    else:
        yield Check("gradients", "ok", f"all {len(parameters):,} tensors get one that is finite and not zero")


def _unread_rows(model: GPT2SmallForCausalLM, batch: Batch) -> tuple[str, ...]:
    """Return LoRA's modules that train rows of an embedding (new tokens or positions) that the batch does not contain.

    Their gradient is zero without an error: a short batch, for example, contains no new position.
    """
    positions = batch.get("position_ids")
    if positions is None:
        positions = torch.arange(batch["labels"].shape[1], device=batch["labels"].device).expand_as(batch["labels"])
    read = {
        model.get_input_embeddings(): batch["input_ids"],
        # Positions after the last label have no gradient.
        model.get_position_embeddings(): positions[:, :-1][_supervised(batch)],
    }
    unread = []
    for name, module in model.named_modules():
        parent, _, last = name.rpartition(".")
        if last == "token_adapter" and (ids := read.get(model.get_submodule(parent))) is not None:
            rows = torch.tensor([row for rows in module.token_indices.values() for row in rows])  # pyright: ignore
            if not torch.isin(ids.cpu(), rows).any():
                unread.append(name)
    return tuple(unread)


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"


def _changed(model: GPT2SmallForCausalLM, inputs: Batch, change: slice, look: slice) -> bool:
    """Return whether replacing the tokens at `change` changes the logits at `look`, for one row of inputs."""
    other = inputs["input_ids"].clone()
    other[:, change] = (other[:, change] + 1) % model.config.vocab_size
    keep = torch.arange(inputs["input_ids"].shape[1], device=model.device)[look]
    with torch.no_grad():
        before, after = (
            model(**{**inputs, "input_ids": ids}, use_cache=False, logits_to_keep=keep).logits
            for ids in (inputs["input_ids"], other)
        )
    return bool((before - after).abs().max() > LEAKED * before.std())


def _inputs(model: GPT2SmallForCausalLM, batch: Batch, length: int | None = None) -> Batch:
    """Return the inputs of the first row without labels, cut to `length` tokens if given."""
    return {name: tensor[:1, :length].to(model.device) for name, tensor in batch.items() if name != "labels"}


def _causality(model: GPT2SmallForCausalLM, batch: Batch) -> Check:
    inputs = _inputs(model, batch, 64)  # in a short row a single leaked token changes the logits more
    middle = inputs["input_ids"].shape[1] // 2
    if _changed(model, inputs, slice(middle, None), slice(0, middle)):
        says = "later tokens change the logits of earlier ones: the model sees what it predicts; fix its mask."
        return Check("causality", "fail", says)
    return Check("causality", "ok", "later tokens change nothing before them")


def _documents(model: GPT2SmallForCausalLM, looked_at: dict[int, Batch]) -> Iterator[Check]:
    """Check isolation between documents, for rows whose position_ids restart within the row."""
    for batch in looked_at.values():
        if "position_ids" not in batch:
            return
        starts = (batch["position_ids"][0, 1:] == 0).nonzero()
        if not len(starts):
            continue
        start = int(starts[0]) + 1
        if _changed(model, _inputs(model, batch), slice(0, start), slice(start, start + 32)):
            says = (
                "a document's tokens change the logits of the next one, though position_ids restart there: do not "
                "pass a cache or an attention_mask together with position_ids."
            )
            yield Check("documents", "fail", says)
        else:
            yield Check("documents", "ok", "those of one row do not see each other")
        return


def _positions(model: GPT2SmallForCausalLM, rows: RowDataset, looked_at: dict[int, Batch], known: int) -> Check:
    """Check whether most positions of the context are trained, in this run or before it."""
    if isinstance(rows, ChatDataset):
        reached, what = max(len(one.input_ids) for one in rows.encoded), "the longest chat has"
    else:
        ends = [int(batch["position_ids"].max()) + 1 for batch in looked_at.values() if "position_ids" in batch]
        reached, what = max(ends, default=rows.seq_len), "rows reach"
    context, learned = model.config.max_position_embeddings, max(known, reached)
    says = f"{what} {reached:,} tokens, of a context of {context:,}"
    if learned < UNREACHED_NOTED * context:
        says += (
            f": positions from {learned:,} on stay untrained, so longer texts are predicted badly. "
            f"Train on longer rows, or set --max_position_embeddings {max(known, 1 << (reached - 1).bit_length())}"
        )
        return Check("positions", "note", says)
    return Check("positions", "ok", says)


def _tied(model: GPT2SmallForCausalLM) -> Check:
    head, embedding = next(iter(model._tied_weights_keys.items()))
    named = dict(model.named_parameters(remove_duplicate=False))
    one = named[head] is named[embedding]
    saved = model.state_dict()
    one_saved = saved[head].data_ptr() == saved[embedding].data_ptr()
    tie = model.config.tie_word_embeddings
    if one == one_saved == tie:
        says = "the head is the embedding, in memory and as saved" if tie else "head and embedding are apart, as set"
        return Check("tied weights", "ok", says)
    where = "as saved" if one == tie else "in memory"
    says = (
        f"tie_word_embeddings is {str(tie).lower()}, but head and embedding are {'two' if tie else 'one'} {where}: "
        f"{'call model.tie_weights() after changing either' if tie else 'give the head a weight of its own'}."
    )
    return Check("tied weights", "fail", says)


# ---- the run -----------------------------------------------------------------------------------------------------


def _precision(trainer: CausalLMTrainer) -> Iterator[Check]:
    """Note a precision that the device does not support."""
    if trainer.args.fp16 and trainer.args.device.type == "cpu":  # Accelerate supports float16 only on GPUs
        says = "--fp16 does nothing on a CPU: training is in float32, without loss scaling. 16-bit products: --bf16"
        yield Check("precision", "note", says)


def _decay(trainer: CausalLMTrainer, model: nn.Module) -> Check:
    names = set(trainer.get_decay_parameter_names(model))
    trained = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    decayed = [n for name, n in trained.items() if name in names]
    kept = [n for name, n in trained.items() if name not in names]
    says = (
        f"{trainer.args.weight_decay:g} on {len(decayed):,} tensors of {sum(decayed):,} parameters, "
        f"none on {len(kept):,} of {sum(kept):,}"
    )
    return Check("weight decay", "ok", says)


def _rate(trainer: CausalLMTrainer, total_steps: int) -> Check:
    share, peak = rates(trainer.args, total_steps), trainer.args.learning_rate
    warmup = trainer.args.get_warmup_steps(total_steps)
    if share is None:
        return Check("learning rate", "note", "depends on the held-out loss, so it is not known in advance.")
    if not peak:
        return Check("learning rate", "fail", "is 0, so the model does not train: set --learning_rate.")
    steps = sorted({*np.linspace(0, total_steps, 2000).astype(int).tolist(), min(warmup, total_steps)})
    highest = max(steps, key=share)
    if share(highest) < 1 - 1e-6:
        says = (
            f"goes to {peak * share(highest):.1e} and never reaches its peak of {peak:.1e}: of {total_steps:,} steps "
            f"warm-up takes {warmup:,}; set --warmup_steps, in optimizer steps, or below 1 as a share of all."
        )
        return Check("learning rate", "fail", says)
    course = " -> ".join(
        f"{peak * share(step):.1e} at step {step:,}" if share(step) else "0"
        for step in sorted({0, highest, total_steps})
    )
    if highest < total_steps:
        return Check("learning rate", "ok", course)
    return Check("learning rate", "note", f"{course}: the whole run is warm-up; see --warmup_steps.")


def _passes(rows: RowDataset, total_steps: int, tokens_per_step: int) -> Check:
    wanted, there = total_steps * tokens_per_step, round(len(rows) * rows.tokens_per_row)
    if rows.is_chat:  # several epochs are usual
        return Check("tokens", "ok", f"{there:,} are there: {wanted / there:.1f} epochs of the chats")
    says = f"{wanted:,} are trained on, {there:,} are there: {wanted / there:.1f} epochs of the text"
    return Check("tokens", "note" if wanted > there else "ok", says)


def _disk(trainer: CausalLMTrainer, model: nn.Module, total_steps: int, folder: Path, free_bytes: int | None) -> Check:
    args = trainer.args
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    one_pass = budget.one_pass(len(trainer.train_dataset), args, args.world_size)  # pyright: ignore[reportArgumentType]
    _, n = budget.checkpoints_saved(args, total_steps, one_pass.steps)
    needed = budget.disk_bytes(weights, n, args)
    if free_bytes is None:
        there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        free_bytes = shutil.disk_usage(there).free
    says = f"{n} checkpoints and the model take {byte_size(needed)}, {folder} has {byte_size(free_bytes)} free"
    if needed > free_bytes:
        says += ": make room, lower --save_total_limit, or choose another disk with --output_dir."
    return Check("disk", "fail" if needed > free_bytes else "ok", says)


def _seen(rows: RowDataset, heldout: RowDataset | None) -> Check:
    if isinstance(rows, ChatDataset) and isinstance(heldout, ChatDataset):
        return _repeated(rows, heldout)
    if isinstance(rows, TextDataset) and isinstance(heldout, TextDataset):
        return _overlap(rows, heldout)
    says = "none: the run trains on all of the data, so the loss on new data is unknown."
    return Check("held-out data", "note", says)


def _prompts(trainer: CausalLMTrainer, model: nn.Module, prompts: Sequence[str], *, chat: bool) -> Check:
    """Check that prompts leave half of the context for the samples."""
    half = model.config.max_position_embeddings // 2  # pyright: ignore[reportAttributeAccessIssue, reportOperatorIssue]
    lengths = [len(ids) for ids in encode_prompts(trainer.processing_class, list(prompts), chat=chat)]  # pyright: ignore[reportArgumentType]
    says = f"the longest has {counted(max(lengths), 'token')}"
    if not (cut := sum(length > half for length in lengths)):
        return Check("prompts", "ok", says)
    says = f"{cut:,} of {len(lengths):,} are longer than half the context ({half:,} tokens): {says}. Samples read only "
    return Check("prompts", "note", f"{says}the end of such a prompt, and the model card's code may need another.")


def _repeated(rows: ChatDataset, heldout: ChatDataset) -> Check:
    trained = {one.input_ids.tobytes() for one in rows.encoded}
    seen = np.mean([one.input_ids.tobytes() in trained for one in heldout.encoded])
    says = f"{seen:.0%} of {len(heldout.encoded):,} held-out conversations are also in the training set, word for word"
    if seen > SEEN_REFUSED:
        says += ": it would measure memory; hold out others (--validation_data or --validation_fraction)."
        return Check("held-out chats", "fail", says)
    return Check("held-out chats", "note" if seen > 0 else "ok", says)


def _cut(rows: ChatDataset) -> Check:
    counts = rows.counts
    cut, empty = counts.shortened + counts.too_long, counts.empty_answers
    if cut > CUT_NOTED * counts.conversations:
        says = (
            f"{cut:,} of {counts.conversations:,} are longer than a row, lost turns or were left out: make the "
            "context longer (--max_position_embeddings), or see them with `preview`."
        )
        return Check("long chats", "note", says)
    if empty > CUT_NOTED * counts.conversations:
        says = f"{empty:,} of {counts.conversations:,} have an empty answer: the model learns to stop at once."
        return Check("long chats", "note", says)
    return Check("long chats", "ok", f"{cut:,} of {counts.conversations:,} lost turns or were left out")


def _steps(trainer: CausalLMTrainer, rows: ChatDataset, total_steps: int) -> Check:
    says = f"{total_steps:,} in all, of {counted(trainer.args.per_device_train_batch_size, 'row')} on each device"
    if total_steps >= FEW_STEPS:
        return Check("steps", "ok", says)
    ways = ["raise --num_train_epochs"]
    if trainer.args.per_device_train_batch_size > 1:
        ways.append("lower --per_device_train_batch_size")
    if rows.packing == "best_fit" and len(rows) < len(rows.encoded):
        ways.append("give --packing padding")
    return Check("steps", "note", f"{says}: few. The model may learn little; {', or '.join(ways)}.")


def _choice(trainer: CausalLMTrainer, heldout: ChatDataset) -> Check:
    """Check whether there are enough held-out chats to choose the best checkpoint."""
    n, keeps_best = heldout.counts.kept, trainer.args.load_best_model_at_end
    kept = f"the {'best' if keeps_best else 'last'} model is kept"
    if n >= CHATS_TO_JUDGE_BY:
        return Check("checkpoint", "ok", f"{kept}; {counted(n, 'held-out chat')}")
    says = f"{counted(n, 'held-out chat')}: too few to choose a checkpoint by; {kept}"
    if keeps_best:
        says += ", by chance: hold out more (--validation_fraction), or give --load_best_model_at_end false"
    return Check("checkpoint", "note", f"{says}.")


def _overlap(rows: TextDataset, heldout: TextDataset) -> Check:
    text = _first(rows, TRAINING_TOKENS)
    seen = seen_in_training(text, _first(heldout, HELDOUT_TOKENS))
    places = np.arange(seen.shape[0])[:, None] * heldout.seq_len + np.arange(1, heldout.seq_len)
    seen = seen[places >= 12]  # positions at which 13 tokens can end
    if not len(seen):
        return Check("held-out text", "note", "is too short to tell whether it repeats training text.")
    says = (
        f"{seen.mean():.0%} of the first {len(seen):,} held-out tokens repeat training text: they and the 12 before "
        f"them occur in its first {text.n_tokens:,} tokens"
    )
    if seen.mean() > SEEN_REFUSED:
        says += ": it would measure memory; hold out other text (--validation_fraction or --validation_text)."
        return Check("held-out text", "fail", says)
    return Check("held-out text", "note" if seen.mean() > SEEN_NOTED else "ok", says)


def _first(rows: TextDataset, n_tokens: int) -> TextDataset:
    """Return the same set, cut after `n_tokens` tokens."""
    few = copy.copy(rows)
    few.n_tokens = min(rows.n_tokens, n_tokens)
    few.n_rows = max(1, min(len(rows), n_tokens // rows.seq_len))
    return few
