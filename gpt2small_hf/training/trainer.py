"""HF's Trainer with what a language model's training needs beside it."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import Trainer


class LanguageModelTrainer(Trainer):
    """HF's Trainer, asking the model for its loss alone: the logits of a batch would take more memory than the rest."""

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Loss of one batch; see `Trainer.compute_loss`."""
        return super().compute_loss(model, {**inputs, "skip_logits": True}, *args, **kwargs)
