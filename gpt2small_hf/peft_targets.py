"""PEFT's default target modules for our model type, so that `LoraConfig()` works without `target_modules`.

PEFT keeps a table for each method (LoRA, IA3, …): model type → names of layers. Our layers have Llama's names, so
the defaults are the same. PEFT offers no way to register them, and importing it takes seconds: they are added after it
is imported.
"""

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

CONSTANTS = "peft.utils.constants"
MODEL_TYPE, SAME_NAMES = "gpt2small", "llama"
LORA_TARGETS = ("q_proj", "v_proj")
"""What `LoraConfig()` adapts, and what the model card tells users without this package to name."""


def register() -> None:
    """Add our model type to PEFT's tables: now if PEFT is imported, else when it is."""
    if CONSTANTS in sys.modules:
        add_targets(sys.modules[CONSTANTS])
    elif not any(isinstance(finder, _ConstantsFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _ConstantsFinder())


def add_targets(constants: ModuleType) -> None:
    """Give our model type Llama's entry in every table that has one."""
    for name, table in vars(constants).items():
        if name.startswith("TRANSFORMERS_MODELS_TO_") and name.endswith("_MODULES_MAPPING") and SAME_NAMES in table:
            table.setdefault(MODEL_TYPE, table[SAME_NAMES])


class _ConstantsFinder(importlib.abc.MetaPathFinder):
    """Find PEFT's module of tables as Python does, once, and add ours after it is executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != CONSTANTS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_add(module: ModuleType) -> None:
                execute(module)
                add_targets(module)

            spec.loader.exec_module = execute_and_add
        return spec
