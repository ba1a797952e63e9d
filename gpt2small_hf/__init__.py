"""Train a GPT-2-small-class model from scratch and share it so that transformers loads it in one line.

Importing this package registers its classes: `AutoModelForCausalLM.from_pretrained(folder)` then needs no remote code.
`docs/api.md` has an example for each public name.
"""

import importlib
from typing import TYPE_CHECKING

from gpt2small_hf.invocation import entry_point
from gpt2small_hf.peft_targets import register as register_peft_targets

if TYPE_CHECKING:
    from gpt2small_hf.config.resolve import RunConfig, load_recipe
    from gpt2small_hf.data.chat_dataset import ChatDataset
    from gpt2small_hf.data.text_dataset import TextDataset
    from gpt2small_hf.evaluation.tasks import evaluate
    from gpt2small_hf.model import (
        GPT,
        GPT2SmallConfig,
        GPT2SmallForCausalLM,
        GPT2SmallForQuestionAnswering,
        GPT2SmallForSequenceClassification,
        GPT2SmallForTokenClassification,
        GPT2SmallModel,
    )
    from gpt2small_hf.training.gradient_guard import GradientGuard
    from gpt2small_hf.training.run import train
    from gpt2small_hf.training.trainer import CausalLMTrainer

__all__ = [
    "GPT",
    "CausalLMTrainer",
    "ChatDataset",
    "GPT2SmallConfig",
    "GPT2SmallForCausalLM",
    "GPT2SmallForQuestionAnswering",
    "GPT2SmallForSequenceClassification",
    "GPT2SmallForTokenClassification",
    "GPT2SmallModel",
    "GradientGuard",
    "RunConfig",
    "TextDataset",
    "evaluate",
    "load_recipe",
    "train",
]
_MODULES = {  # of the names that are not in gpt2small_hf.model
    "CausalLMTrainer": "gpt2small_hf.training.trainer",
    "ChatDataset": "gpt2small_hf.data.chat_dataset",
    "GradientGuard": "gpt2small_hf.training.gradient_guard",
    "RunConfig": "gpt2small_hf.config.resolve",
    "TextDataset": "gpt2small_hf.data.text_dataset",
    "evaluate": "gpt2small_hf.evaluation.tasks",
    "load_recipe": "gpt2small_hf.config.resolve",
    "train": "gpt2small_hf.training.run",
}


def __getattr__(name: str) -> object:
    if name in __all__:
        return getattr(importlib.import_module(_MODULES.get(name, "gpt2small_hf.model")), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_peft_targets()
if entry_point() is None:  # our own commands read their flags before they import torch
    importlib.import_module("gpt2small_hf.model")  # registers the classes; importing torch takes seconds
