"""A run to publish."""

import shutil
from pathlib import Path

import pytest

from gpt2small_hf.runs.layout import RunFolder


@pytest.fixture
def short_run(tiny_run, tmp_path, monkeypatch) -> RunFolder:
    """A copy of the finished run as runs/short, seen from above `runs/` as from a checkout."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_run.root, "runs/short")
    return RunFolder(Path("runs/short"))
