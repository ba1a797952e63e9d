"""Search for the largest micro-batch that fits in memory, with the same rows per step."""

from __future__ import annotations

import copy
import gc
import time
from dataclasses import dataclass

import psutil
import torch
from torch import distributed as dist
from transformers import TrainingArguments

from gpt2small_hf.errors import UsageError
from gpt2small_hf.formatting import console_table, counted
from gpt2small_hf.model.modeling_gpt2small import GPT2SmallForCausalLM
from gpt2small_hf.training.budget import BYTES_A_NUMBER

USABLE = 0.9
"""Share of the free memory that a step may use: memory is fragmented, and other processes need some."""


@dataclass
class Trial:
    """Result of one micro-batch size."""

    rows: int
    gib: float
    """Peak memory in GiB; the total memory of the device if the size did not fit."""
    tokens_per_second: float | None
    """None if it did not fit."""


def find_batch_size(model: GPT2SmallForCausalLM, args: TrainingArguments, seq_len: int) -> tuple[int, int, list[Trial]]:
    """Find the largest micro-batch that fits in memory. The rows per step do not change.

    Divisors of a device's rows per step are tried in ascending order, each with a complete step (forward, backward,
    optimizer) on a copy of the model; the ranks agree on the smallest result. On a CPU, where running out of memory
    would end the process, a size is tried only if it fits by extrapolation.

    Returns: rows of the micro-batch, the gradient accumulation steps that keep the rows per step, and all trials.
    Raises:  UsageError if one row does not fit.
    """
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
    trials: list[Trial] = []
    if args.device.type == "cuda":
        memory = torch.cuda.get_device_properties(args.device).total_memory
    else:
        memory = psutil.virtual_memory().available
    # Each block keeps the input of every row for the backward pass.
    a_row = BYTES_A_NUMBER * seq_len * model.config.hidden_size * model.config.num_hidden_layers
    for size in (n for n in range(1, min(rows, memory // a_row) + 1) if rows % n == 0):
        if args.device.type == "cpu" and not _will_fit(trials, size):
            break
        trials.append(_try(model, args, size, seq_len))
        if trials[-1].tokens_per_second is None:
            break
    best = max((trial.rows for trial in trials if trial.tokens_per_second is not None), default=0)
    if dist.is_initialized():
        agreed = torch.tensor(best, device=args.device)
        dist.all_reduce(agreed, dist.ReduceOp.MIN)
        best = int(agreed)
    if not best:
        raise UsageError(
            f"not even one row of {seq_len:,} tokens fits in memory. Shorten --seq_len, make the model smaller, "
            "or give --activation_checkpointing."
        )
    return best, rows // best, trials


def _will_fit(trials: list[Trial], size: int) -> bool:
    if len(trials) < 2:
        return True
    a, b = trials[-2:]
    a_row = max(0.0, (b.gib - a.gib) / (b.rows - a.rows))
    return (size - b.rows) * a_row < USABLE * psutil.virtual_memory().available / 2**30


def _try(model: GPT2SmallForCausalLM, args: TrainingArguments, size: int, seq_len: int) -> Trial:
    device = args.device
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 and on_gpu else None
    trial = copy.deepcopy(model).to(device).train()  # pyright: ignore[reportArgumentType]
    if args.activation_checkpointing:
        trial.activation_checkpointing_enable()
    optimizer = torch.optim.AdamW(trial.parameters())
    ids = torch.zeros(size, seq_len, dtype=torch.long, device=device)
    peak, started = 0, 0.0
    try:
        with torch.random.fork_rng([device] if on_gpu else []):
            for _ in range(2):  # the first step allocates the optimizer's state
                started = time.perf_counter()
                with torch.autocast(device.type, dtype, enabled=dtype is not None):
                    loss = trial(input_ids=ids, labels=ids, skip_logits=True).loss
                peak = max(peak, psutil.Process().memory_info().rss)
                loss.backward()
                peak = max(peak, psutil.Process().memory_info().rss)
                optimizer.step()
                optimizer.zero_grad()
                if on_gpu:
                    torch.cuda.synchronize(device)
        speed = size * seq_len / (time.perf_counter() - started)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        total = torch.cuda.get_device_properties(device).total_memory if on_gpu else psutil.virtual_memory().total
        return Trial(size, total / 2**30, None)
    finally:
        del trial, optimizer, ids
        gc.collect()
    return Trial(size, (torch.cuda.max_memory_allocated(device) if on_gpu else peak) / 2**30, speed)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means out of memory: of a GPU, of PyTorch's CPU allocator or of Python."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in ("allocate memory", "bad_alloc"))


def trials_table(trials: list[Trial], size: int, accumulation: int) -> str:
    """Format the trials and the chosen size as text."""
    rows = [
        [
            counted(trial.rows, "row"),
            f"{trial.gib:.1f} GiB",
            "does not fit" if trial.tokens_per_second is None else f"{trial.tokens_per_second:,.0f} tok/s",
        ]
        for trial in trials
    ]
    return (
        f"{console_table(['micro-batch', 'memory', 'pace'], rows)}\n"
        f"using --per_device_train_batch_size {size} --gradient_accumulation_steps {accumulation}"
    )
