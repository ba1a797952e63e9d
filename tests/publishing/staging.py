"""Staging as `push` does it, for tests of what is staged."""

from pathlib import Path
from typing import Any

from gpt2small_hf.publishing.source import find_source
from gpt2small_hf.publishing.stage import stage
from gpt2small_hf.runs.files import atomic_write

RESULTS = {"resolved.json", "evaluation/heldout.json", "evaluation/completions.json"}
"""The files of a finished run's settings and results."""


def staged(name: Path, **more: Any) -> Path:
    """Stage a model, completely or not at all. Returns: the staged folder."""
    with atomic_write(Path("out/staged")) as folder:
        stage(find_source(name), folder, **more)
    return Path("out/staged")
