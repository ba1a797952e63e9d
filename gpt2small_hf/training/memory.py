"""Refuse a run that cannot fit in memory, before torch is imported and text prepared."""

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

    This is a lower bound, without the activations. Sharded runs and runs on several processes are not checked.

    Args:
        args: the settings of the run.
        config: configuration of the model. None: a new model with the smallest vocabulary, for which a lower bound of
            the number of parameters is used, without importing torch.
        device: the Trainer's, if torch has been imported.
        batch_tokens: tokens of a batch; 0 if unknown.

    Raises: UsageError with both figures.
    """
    is_sharded = args.trainer.fsdp or args.trainer.deepspeed or os.environ.get("WORLD_SIZE", "1") != "1"
    if is_sharded or any(os.environ.get(f"ACCELERATE_USE_{name}") == "true" for name in ("FSDP", "DEEPSPEED")):
        return
    if config is not None:
        n_parameters = budget.sizes(config).total
    elif args.run.init_from is None:
        config = DeclaredConfig(**{**vars(args.model), "vocab_size": SMALLEST_VOCABULARY})
        n_parameters = config.least_parameters()
    else:  # the sizes of the base model are not known yet
        return
    # The model is built in the machine's memory, wherever it is trained.
    trains_on_cpu = args.trainer.use_cpu or (device is not None and device.type == "cpu")
    memories = [("this machine has", machine_bytes(), trains_on_cpu)]
    if device is not None and device.type == "cuda" and os.name != "nt":  # on Windows, GPUs use the machine's too
        import torch

        memories.append(("the GPU has", torch.cuda.get_device_properties(device).total_memory, True))
    size, names = f"{n_parameters:,} parameters", "--hidden_size, --num_hidden_layers or --max_position_embeddings"
    if batch_tokens:
        size, names = f"{size} and batches of {batch_tokens:,} tokens", f"--per_device_train_batch_size, {names}"
    for where, available, trains in memories:
        needed = budget.memory_bytes(n_parameters, config, args, trains=trains, batch_tokens=batch_tokens)
        if needed > available:
            what = "training (weights, gradients, optimizer state) takes" if trains else "the weights take"
            raise UsageError(
                f"{what} at least {byte_size(needed)} for {size}; {where} {byte_size(available)}. Lower {names}."
            )


def machine_bytes() -> int:
    """Return the bytes of memory of this machine, swap included."""
    import psutil

    return psutil.virtual_memory().total + psutil.swap_memory().total
