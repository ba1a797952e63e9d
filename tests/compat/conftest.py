"""The published folder that these tests use, and processes that can import its code only from that folder."""

import os
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

os.environ["HF_DATASETS_OFFLINE"] = "1"

import pytest

from compat.published import publish


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model with its code, tokenizer and chat template. Not to be changed."""
    folder = tmp_path_factory.mktemp("published") / "model"
    publish(folder)
    return folder


@pytest.fixture(scope="session")
def without_package(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict]:
    """Arguments for `subprocess` to run code where every installed library but ours can be imported.

    In a process that has imported this package, its classes silently take precedence over the folder's
    code. -I and -S leave out the current folder, PYTHONPATH and site-packages, so also an editable install.
    """
    place = tmp_path_factory.mktemp("without_us")
    packages = place / "site-packages"  # dill knows installed modules by this name
    packages.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "gpt2small_hf" not in entry.name and entry.suffix != ".pth":
            (packages / entry.name).symlink_to(entry)
    start = (
        f"import importlib.util, sys\nsys.path.append({str(packages)!r})\n"
        "assert importlib.util.find_spec('gpt2small_hf') is None\n"
    )

    def arguments(code: str, *words: str) -> dict:
        return {
            "args": [sys.executable, "-I", "-S", "-c", start + code, *words],
            "cwd": place,
            "env": {
                "PATH": os.environ["PATH"],
                "HOME": str(place),
                "HF_HOME": str(place / "cache"),
                "HF_HUB_OFFLINE": "1",
                "HF_DATASETS_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
                "TOKENIZERS_PARALLELISM": "false",
            },
            "text": True,
        }

    return arguments
