"""The sizes of a run → whether it can fit in memory at all, answered before torch is imported and text prepared."""

from __future__ import annotations

import os
from typing import Any

from gpt2small_hf.config.data import SMALLEST_VOCABULARY
from gpt2small_hf.config.resolve import RunConfig
from gpt2small_hf.config.run import DeclaredConfig
from gpt2small_hf.errors import UsageError
from gpt2small_hf.formatting import byte_size
from gpt2small_hf.training import budget


def check_memory(args: RunConfig, config: Any = None, *, device: Any = None, batch_tokens: int = 0) -> None:
    """Refuse a run whose weights, gradients and optimizer state alone exceed the memory of this machine or its GPU.

    What a step computes comes on top of them, so a run that is not refused here may still not fit. Runs that share
    the weights out (FSDP, DeepSpeed) or are launched on several processes are not judged.

    Args:
        args: the settings of the run.
        config: of the model, whose parameters are counted. Unset, it is a new model with the smallest vocabulary, and
            a lower bound of their number is used, which needs no torch.
        device: the Trainer's, if torch has been imported.
        batch_tokens: tokens of a batch, as far as they are known.

    Raises: UsageError with both figures.
    """
    trainer = args.trainer
    shares_out = trainer.fsdp or trainer.deepspeed or os.environ.get("WORLD_SIZE", "1") != "1"
    if shares_out or any(os.environ.get(f"ACCELERATE_USE_{name}") == "true" for name in ("FSDP", "DEEPSPEED")):
        return
    if config is None:
        if args.run.init_from is not None:  # whose sizes are not known yet
            return
        config = DeclaredConfig(**{**vars(args.model), "vocab_size": SMALLEST_VOCABULARY})
        n_parameters = config.least_parameters()
    else:
        n_parameters = budget.sizes(config).total
    # The model is built in the machine's memory, wherever it is trained.
    on_cpu = trainer.use_cpu or (device is not None and device.type == "cpu")
    needed = budget.memory_bytes(n_parameters, config, args, trains=on_cpu, batch_tokens=batch_tokens)
    if needed > (there := machine_bytes()):
        available = f"this machine has {byte_size(there)}"
        raise UsageError(_refusal(n_parameters, needed, available, trains=on_cpu, batch_tokens=batch_tokens))
    if device is not None and device.type == "cuda" and os.name != "nt":  # Windows lends GPUs the machine's memory
        import torch

        there = torch.cuda.get_device_properties(device).total_memory
        needed = budget.memory_bytes(n_parameters, config, args, trains=True, batch_tokens=batch_tokens)
        if needed > there:
            available = f"the GPU has {byte_size(there)}"
            raise UsageError(_refusal(n_parameters, needed, available, trains=True, batch_tokens=batch_tokens))


def machine_bytes() -> int:
    """Bytes of memory of this machine, swap included."""
    import psutil

    return psutil.virtual_memory().total + psutil.swap_memory().total


def _refusal(n_parameters: int, needed: int, there: str, *, trains: bool, batch_tokens: int) -> str:
    what = "training (weights, gradients, optimizer state) takes" if trains else "the weights take"
    size = f"{n_parameters:,} parameters"
    names = "--hidden_size, --num_hidden_layers or --max_position_embeddings"
    if batch_tokens:
        size += f" and batches of {batch_tokens:,} tokens"
        names = f"--per_device_train_batch_size, {names}"
    return f"{what} at least {byte_size(needed)} for {size}; {there}. Lower {names}."
