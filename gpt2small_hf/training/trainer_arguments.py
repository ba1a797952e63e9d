"""The settings of a run → what transformers' Trainer takes: `TrainingArguments`, with our defaults and our names."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import TrainingArguments

from gpt2small_hf.config.trainer import DEEPSEEK_STEPS, MUON, TrainerSettings
from gpt2small_hf.errors import UsageError
from gpt2small_hf.training.schedules import filled_in, rates


@dataclass
class TrainerArguments(TrainerSettings, TrainingArguments):  # pyright: ignore[reportIncompatibleVariableOverride]
    """The Trainer's own arguments with the defaults of a pre-training run. Importing their module imports torch."""

    def __post_init__(self) -> None:
        TrainerSettings.__post_init__(self)
        if self.dataloader_pin_memory is None:
            self.dataloader_pin_memory = torch.cuda.is_available()
        # transformers refuses names that it does not know: for as long as it looks, ours make way for its defaults.
        ours = {"optim": MUON, "lr_scheduler_type": DEEPSEEK_STEPS}
        chosen = {flag: name for flag, name in ours.items() if getattr(self, flag) == name}
        for flag in chosen:
            setattr(self, flag, getattr(TrainingArguments, flag))
        try:
            TrainingArguments.__post_init__(self)
        except ValueError as error:
            if "bf16" in str(error):
                raise UsageError(
                    "--bf16 needs a GPU that computes in bfloat16. Leave it out (in a recipe: --bf16 false), "
                    "or compute on the CPU with --use_cpu."
                ) from None
            raise
        for flag, name in chosen.items():
            setattr(self, flag, name)
        if not isinstance(self.lr_scheduler_kwargs, str):
            name = getattr(self.lr_scheduler_type, "value", self.lr_scheduler_type)
            self.lr_scheduler_kwargs = filled_in(name, self.lr_scheduler_kwargs)
        # How long a run is may be known only once its text is; then any length that holds every number of steps.
        rates(self, self.max_steps if self.max_steps > 0 else 10**9)
