"""HF's Trainer with what a language model's training needs beside it."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import Trainer


class LanguageModelTrainer(Trainer):
    """HF's Trainer, asking the model for its loss alone: the logits of a batch would take more memory than the rest."""

    def __init__(self, *args: Any, decay: str = "matrices", **kwargs: Any) -> None:
        """Take what `Trainer` takes, and whether weight decay shrinks `matrices` or `all` parameters."""
        self.decay = decay
        super().__init__(*args, **kwargs)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the parameters that weight decay shrinks."""
        if self.decay == "all":
            return [name for name, _ in model.named_parameters()]
        return super().get_decay_parameter_names(model)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Loss of one batch; see `Trainer.compute_loss`."""
        return super().compute_loss(model, {**inputs, "skip_logits": True}, *args, **kwargs)
