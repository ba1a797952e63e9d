"""The settings of a run → what transformers' Trainer takes: `TrainingArguments`."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import fields
from pathlib import Path

import torch
from transformers import TrainingArguments

from gpt2small_hf.config.trainer import DEEPSEEK_STEPS, OWN_OPTIMIZERS, TrainerSettings
from gpt2small_hf.errors import UsageError
from gpt2small_hf.training.schedules import rates


def training_arguments(settings: TrainerSettings, output_dir: Path | str) -> TrainingArguments:
    """Make the Trainer's arguments, which it changes while it trains; `settings` stay as they are.

    Args:
        settings: of the Trainer.
        output_dir: folder of the checkpoints.

    Raises: UsageError for what cannot be done on this machine or with these packages.
    """
    values = {one.name: deepcopy(getattr(settings, one.name)) for one in fields(settings) if one.init}
    if values["dataloader_pin_memory"] is None:
        values["dataloader_pin_memory"] = torch.cuda.is_available()
    # transformers refuses names that it does not know: ours are set after its checks.
    ours = {"optim": OWN_OPTIMIZERS, "lr_scheduler_type": [DEEPSEEK_STEPS]}
    chosen = {flag: values.pop(flag) for flag, names in ours.items() if values[flag] in names}
    try:
        arguments = TrainingArguments(output_dir=str(output_dir), **values)
    except (ValueError, TypeError, ImportError) as error:
        if "bf16" in str(error):
            raise UsageError(
                "--bf16 needs a GPU that computes in bfloat16. Leave it out (in a recipe: bf16: false), or compute on "
                "the CPU with --use_cpu."
            ) from None
        raise UsageError(" ".join(str(error).split())) from error
    for flag, name in chosen.items():
        setattr(arguments, flag, name)
    # The length of a run may depend on its text; then any length that holds every number of steps.
    rates(arguments, arguments.max_steps if arguments.max_steps > 0 else 10**9)
    return arguments
