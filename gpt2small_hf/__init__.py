"""Train a GPT-2-small-class model from scratch and share it so that transformers loads it in one line.

Importing this package registers its classes: `AutoModelForCausalLM.from_pretrained(folder)` then needs no remote code.
"""

import importlib
from typing import TYPE_CHECKING

from gpt2small_hf.invocation import entry_point
from gpt2small_hf.peft_targets import register as register_peft_targets

if TYPE_CHECKING:
    from gpt2small_hf.model import (
        GPT,
        GPT2SmallConfig,
        GPT2SmallForCausalLM,
        GPT2SmallForQuestionAnswering,
        GPT2SmallForSequenceClassification,
        GPT2SmallForTokenClassification,
        GPT2SmallModel,
    )

__all__ = [
    "GPT",
    "GPT2SmallConfig",
    "GPT2SmallForCausalLM",
    "GPT2SmallForQuestionAnswering",
    "GPT2SmallForSequenceClassification",
    "GPT2SmallForTokenClassification",
    "GPT2SmallModel",
]


def __getattr__(name: str) -> object:
    if name in __all__:
        return getattr(importlib.import_module("gpt2small_hf.model"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


register_peft_targets()
if entry_point() is None:  # our own commands read their flags before they import torch
    importlib.import_module("gpt2small_hf.model")  # registers the classes; importing torch takes seconds
