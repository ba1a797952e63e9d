"""Train a GPT-2-small-class model from scratch and share it so that transformers loads it in one line.

Importing this package registers its classes: `AutoModelForCausalLM.from_pretrained(folder)` then needs no remote code.
"""

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

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


def _is_own_command() -> bool:
    """Whether this process is one of our commands, which read their flags before they import torch."""
    program = getattr(sys, "argv", None) or [""]
    if program[0] == "-m":  # the module's name is not yet in place: it is the word before the program's arguments
        return sys.orig_argv[-len(program)].removeprefix("-m").split(".")[0] == __name__
    path = Path(program[0])
    if path.stem == "gpt2small" and path.suffix in ("", ".exe"):  # the console script
        return True
    checkout = Path(__file__).resolve().parents[1]
    return path.resolve() in (checkout / "train.py", checkout / "upload" / "push.py")


register_peft_targets()
if not _is_own_command():
    importlib.import_module("gpt2small_hf.model")  # registers the classes; importing torch takes seconds
