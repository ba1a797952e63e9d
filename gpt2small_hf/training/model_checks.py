"""Checks of a model on a few rows before the first step: initial loss, accumulation, gradients, causality."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from gpt2small_hf.config.resolve import RunConfig
from gpt2small_hf.data.chat_dataset import ChatDataset
from gpt2small_hf.data.row_dataset import RowDataset
from gpt2small_hf.model.modeling_gpt2small import GPT2SmallForCausalLM
from gpt2small_hf.training.inputs import RunInputs
from gpt2small_hf.training.trainer import CausalLMTrainer

Batch = dict[str, Tensor]
Sample = dict[int, Batch]
"""Rows of a set, each collated to a batch of one: row number → batch."""
SAME = 2e-3
"""Relative tolerance between two ways to compute a loss or a gradient norm."""
LEAKED = 1e-4
"""Minimum change of logits, as a share of their standard deviation, that shows that a token is not masked."""
UNREACHED_NOTED = 0.5
"""Note the number of trained positions if it is below this share of the context."""


@dataclass(frozen=True)
class Check:
    """Result of one check."""

    name: str
    verdict: Literal["ok", "note", "fail"]
    found: str
    """What was found; for a failure also the fix."""


def supervised(batch: Batch) -> Tensor:
    """Return the mask of supervised labels, shape (rows, T - 1). The first label of a row is never predicted."""
    return batch["labels"][:, 1:] != -100


def check_model(
    trainer: CausalLMTrainer, model: GPT2SmallForCausalLM, config: RunConfig, inputs: RunInputs, sample: Sample
) -> Iterator[Check]:
    """Check a model on two to four rows; see `preflight`."""
    rows = inputs.rows
    batch = _some_rows(trainer, rows, sample, model.device)
    with torch.no_grad():
        loss = float(trainer.compute_loss(model, batch))
    if config.run.branch_from is None and inputs.base is None:  # newly initialised
        yield _initial_loss(model, loss, config.run.allow_high_initial_loss)
    yield _accumulation(trainer, model, batch)
    yield _gradients(model, batch)
    yield _causality(model, batch)
    yield from _documents(model, sample)
    yield _positions(model, rows, sample, inputs.known_positions)


def _some_rows(trainer: CausalLMTrainer, rows: RowDataset, sample: Sample, device: torch.device) -> Batch:
    """Return two to four rows with labels; keep one label of the first row, so that the numbers of labels differ."""
    with_labels = [row for row, batch in sample.items() if supervised(batch).any()]
    n = max(2, min(4, trainer.args.per_device_train_batch_size, 2048 // rows.seq_len))
    batch = trainer.data_collator([rows[with_labels[i % len(with_labels)]] for i in range(n)])
    last = supervised(batch)[0].nonzero().max() + 1
    batch["labels"][0, :last] = -100
    return {name: tensor.to(device) for name, tensor in batch.items()}


# ---- loss and gradients ------------------------------------------------------------------------------------------


def _initial_loss(model: GPT2SmallForCausalLM, loss: float, is_high_allowed: bool) -> Check:
    even, scheme = math.log(model.config.vocab_size), model.config.init_scheme
    found = f"{loss:.3f}, where a guess among {model.config.vocab_size:,} tokens has {even:.3f}"
    if abs(loss / even - 1) <= 0.05:
        return Check("initial loss", "ok", found)
    if not math.isfinite(loss):
        return Check("initial loss", "fail", f"{found}: an initial weight or the arithmetic is not finite.")
    if loss < even:
        cause = "too low for untrained weights: labels may leak into the input, or the mean of the loss is wrong."
        return Check("initial loss", "fail", f"{found}: {cause}")
    if model.config.tie_word_embeddings and scheme == "torch":
        cause = "torch's embeddings of standard deviation 1 are too large for a tied head; set --init_scheme gpt2"
    else:
        cause = "too high: the initial weights are too large; set --init_scheme gpt2 and --initializer_range 0.02"
    if is_high_allowed or (scheme != "gpt2" and loss < 1.5 * even):  # small models vary by this much
        return Check("initial loss", "note", f"{found}: {cause}.")
    return Check("initial loss", "fail", f"{found}: {cause}, or pass --allow_high_initial_loss to train from it.")


def _loss_and_norm(trainer: CausalLMTrainer, model: GPT2SmallForCausalLM, batches: list[Batch]) -> list[float]:
    """Return loss and gradient norm of a step's micro-batches, accumulated as by the Trainer. Keeps the gradients."""
    model.zero_grad(set_to_none=True)
    counted = trainer._get_num_items_in_batch(batches, model.device)
    total = 0.0
    for batch in batches:
        loss = trainer.compute_loss(model, batch, num_items_in_batch=counted)
        loss.backward()
        total += float(loss.detach())
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return [total, float(norm)]


def _accumulation(trainer: CausalLMTrainer, model: GPT2SmallForCausalLM, batch: Batch) -> Check:
    """Check that accumulated micro-batches give the loss and gradient norm of one batch. Keeps the gradients."""
    n = len(batch["labels"])
    apart = _loss_and_norm(trainer, model, [{name: t[i : i + 1] for name, t in batch.items()} for i in range(n)])
    at_once = _loss_and_norm(trainer, model, [batch])
    if all(abs(a - b) <= SAME * abs(b) for a, b in zip(apart, at_once, strict=True)):
        found = f"loss {at_once[0]:.3f} and gradient norm {at_once[1]:.3f}, {n} rows at once or one by one"
        return Check("accumulation", "ok", found)
    both = " and ".join(f"{a:.3f}, {b:.3f}" for a, b in (at_once, apart))
    found = f"loss and gradient norm are {both} for {n} rows at once and one by one"
    fix = "the model's forward must divide its summed loss by num_items_in_batch."
    return Check("accumulation", "fail", f"{found}: {fix}")


def _gradients(model: GPT2SmallForCausalLM, batch: Batch) -> Check:
    """Check the gradients that the last backward pass left."""
    parameters = dict(model.named_parameters())
    if not isinstance(model, GPT2SmallForCausalLM):  # only adapters are trained
        parameters = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    # LoRA's second matrix is initialised with zeros, so the gradient of the first one is zero at the first step.
    is_zero = ("lora_A", *_unread_rows(model, batch))
    wrong = {
        "no gradient": [name for name in parameters if name not in gradients],
        "one that is not finite": [name for name, g in gradients.items() if not g.isfinite().all()],
        "one that is all zero": [
            n for n, g in gradients.items() if not (g.any() or any(part in n for part in is_zero))
        ],
    }
    if not any(wrong.values()):
        return Check("gradients", "ok", f"all {len(parameters):,} tensors get one that is finite and not zero")
    found = "; ".join(f"{_few(names)} got {what}" for what, names in wrong.items() if names)
    return Check("gradients", "fail", f"{found}: each must be used, not frozen, and not multiplied by zero.")


def _unread_rows(model: GPT2SmallForCausalLM, batch: Batch) -> list[str]:
    """Return LoRA's modules that train rows of an embedding (new tokens or positions) that the batch does not contain.

    Their gradient is zero without an error: a short batch, for example, contains no new position.
    """
    positions = batch.get("position_ids")
    if positions is None:
        positions = torch.arange(batch["labels"].shape[1], device=batch["labels"].device).expand_as(batch["labels"])
    read = {
        model.get_input_embeddings(): batch["input_ids"],
        # Positions after the last label have no gradient.
        model.get_position_embeddings(): positions[:, :-1][supervised(batch)],
    }
    unread = []
    for name, module in model.named_modules():
        parent, _, last = name.rpartition(".")
        if last == "token_adapter" and (ids := read.get(model.get_submodule(parent))) is not None:
            rows = torch.tensor([row for rows in module.token_indices.values() for row in rows])  # pyright: ignore
            if not torch.isin(ids.cpu(), rows).any():
                unread.append(name)
    return unread


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")


# ---- what the logits depend on -----------------------------------------------------------------------------------


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
        return Check("causality", "fail", "later tokens change the logits of earlier ones; fix the mask.")
    return Check("causality", "ok", "later tokens change nothing before them")


def _documents(model: GPT2SmallForCausalLM, sample: Sample) -> Iterator[Check]:
    """Check isolation between documents, for the first row whose position_ids restart within the row."""
    for batch in sample.values():
        if "position_ids" not in batch or not len(starts := (batch["position_ids"][0, 1:] == 0).nonzero()):
            continue
        start = int(starts[0]) + 1
        if not _changed(model, _inputs(model, batch), slice(0, start), slice(start, start + 32)):
            yield Check("documents", "ok", "those of one row do not see each other")
        else:
            found = "a document's tokens change the logits of the next one, though position_ids restart there: "
            fix = "do not pass a cache or an attention_mask together with position_ids."
            yield Check("documents", "fail", f"{found}{fix}")
        return


def _positions(model: GPT2SmallForCausalLM, rows: RowDataset, sample: Sample, known: int) -> Check:
    """Check whether most positions of the context are trained, in this run or before it."""
    if isinstance(rows, ChatDataset):
        reached, what = max(len(one.input_ids) for one in rows.encoded), "the longest chat has"
    else:
        ends = [int(batch["position_ids"].max()) + 1 for batch in sample.values() if "position_ids" in batch]
        reached, what = max(ends, default=rows.seq_len), "rows reach"
    context, learned = model.config.max_position_embeddings, max(known, reached)
    found = f"{what} {reached:,} tokens, of a context of {context:,}"
    if learned >= UNREACHED_NOTED * context:
        return Check("positions", "ok", found)
    found += (
        f": positions from {learned:,} on stay untrained, so longer texts are predicted badly. "
        f"Train on longer rows, or set --max_position_embeddings {max(known, 1 << (reached - 1).bit_length())}"
    )
    return Check("positions", "note", found)
