# pyright: strict
"""Dataclasses, enums and the keys of dictionaries, read from the source of a module without importing it.

`TrainingArguments` and `GPT2SmallConfig` cannot be imported without torch, which takes seconds. Flags are checked
before that, against their names, types, defaults and help texts.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import sys
from copy import copy
from enum import Enum
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints


class ExplicitEnum(str, Enum):
    """Stands for transformers' base class of enums with strings as members."""


# Names in transformers' fields whose values need the rest of it. A test compares what is read with the real classes.
_NAMES: dict[str, Any] = {
    "ExplicitEnum": ExplicitEnum,
    "ParallelismConfig": Any,
    "trainer_log_levels": dict.fromkeys(("detail", "debug", "info", "warning", "error", "critical", "passive")),
}


def source_of(module: str) -> Path:
    """Return the file of a module. Raises: ModuleNotFoundError if its package is not installed."""
    package, *rest = module.split(".")
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    return Path(spec.origin).parent.joinpath(*rest).with_suffix(".py")


def imported_alone(module: str) -> ModuleType:
    """Import a module that needs nothing else of its package, without importing the package."""
    spec = spec_from_file_location(f"{module} alone", source_of(module))
    assert spec is not None
    assert spec.loader is not None
    alone = module_from_spec(spec)
    sys.modules[spec.name] = alone
    spec.loader.exec_module(alone)
    return alone


@cache
def declared(module: str, name: str, *also: str, methods: tuple[str, ...] = ()) -> Any:
    """Return a class with the declarations of another, a dataclass or an enum, without its methods and bases.

    Args:
        module: module of the class.
        name: name of the class.
        also: modules whose enums the class names.
        methods: methods to keep, which need the fields alone.

    Returns: the class; the real one, imported, if its source needs more than this module, `also` and the standard
        library.
    """
    known = {**_NAMES, "__name__": __name__}
    try:
        for one in (*also, module):
            _execute(source_of(one), known, name, methods)
        return known[name]
    except (OSError, NameError, KeyError):
        real = getattr(importlib.import_module(module), name)
        return _frozen(real) if dataclasses.is_dataclass(real) else real


def declared_keys(module: str, name: str) -> list[str]:
    """Return the keys of the dictionary `name` that a module declares, without importing it."""
    for node in ast.parse(source_of(module).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name and isinstance(node.value, ast.Dict):
            return [ast.literal_eval(key) for key in node.value.keys if key is not None]
    raise KeyError(f"{module} has no dictionary {name}: write `{name}: TYPE = {{…}}`")


def _frozen(real: Any) -> type:
    """Return a frozen dataclass with the fields of another."""
    hints = get_type_hints(real)
    rows = [(one.name, hints[one.name], copy(one)) for one in dataclasses.fields(real)]
    return dataclasses.make_dataclass(real.__name__, rows, frozen=True, repr=False, eq=False)


def _execute(path: Path, known: dict[str, Any], wanted: str, methods: tuple[str, ...]) -> None:
    """Execute what a module declares: imports of the standard library, constants, enums and the class `wanted`."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    called = {  # functions that make fields
        call.func.id
        for node in body
        if isinstance(node, ast.ClassDef) and node.name == wanted
        for line in node.body
        for call in ast.walk(line)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    }
    for node in body:
        is_enum = isinstance(node, ast.ClassDef) and "ExplicitEnum" in map(ast.unparse, node.bases)
        if isinstance(node, ast.ClassDef) and (is_enum or node.name == wanted):
            node.bases, node.keywords, node.decorator_list = node.bases if is_enum else [], [], []
            node.body = [
                line
                for line in node.body
                if isinstance(line, ast.AnnAssign)
                or _is_constant(line)
                or (isinstance(line, ast.FunctionDef) and line.name in methods)
            ]
        elif not (
            _is_constant(node)
            or _is_of_standard_library(node)
            or (isinstance(node, ast.FunctionDef) and node.name in called)
        ):
            continue
        exec(compile(ast.Module([node], []), str(path), "exec", dont_inherit=True), known)
        if isinstance(node, ast.ClassDef) and not is_enum:
            known[wanted] = dataclasses.dataclass(frozen=True, repr=False, eq=False)(known[wanted])


def _is_constant(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)


def _is_of_standard_library(node: ast.stmt) -> bool:
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and not node.level:
        names = [node.module or ""]
    else:
        return False
    return all(name.split(".")[0] in sys.stdlib_module_names for name in names)
