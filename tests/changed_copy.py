"""Copies of this package's files with a change, to show which files an addition touches."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from conftest import REPOSITORY


def write_changed(name: str, changes: dict[str, str], path: Path) -> None:
    """Write a copy of a file of the repository, in which each old text, which occurs once, is replaced by a new one."""
    text = (REPOSITORY / name).read_text(encoding="utf-8")
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")


def load_changed(name: str, changes: dict[str, str], place: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import a changed copy of a module, which is written into the folder `place`."""
    write_changed(name, changes, place / "copy.py")
    spec = importlib.util.spec_from_file_location("changed_copy", place / "copy.py")
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, copy)
    spec.loader.exec_module(copy)
    return copy
