"""Provenance of results: command, commit, versions, machine."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from gpt2small_hf.invocation import command_line
from gpt2small_hf.runs.files import sha256
from gpt2small_hf.runs.records import MadeBy


def made_by(inputs: Iterable[Path] = ()) -> MadeBy:
    """Return command, git commit, date, versions, SHA-256 of the model's code and each input file."""
    return MadeBy(
        command=command_line(),
        commit=git_commit(),
        model_code=model_code(),
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        versions=versions(),
        inputs={str(path): sha256(path) for path in inputs},
    )


def model_code() -> dict[str, str]:
    """Return the SHA-256 of each file of `model/`, which is saved with each model."""
    return {path.name: sha256(path) for path in sorted((Path(__file__).parents[1] / "model").glob("*.py"))}


def git_commit() -> str | None:
    """Return the commit of this package's checkout, with `-dirty` if files differ; None outside a checkout."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        if not git("ls-files", Path(__file__).name):  # another project's checkout, with this package in its environment
            return None
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def processor_name() -> str:
    """Return the processor's name as its maker gives it, or its architecture if that is unknown."""
    name = ""
    with suppress(OSError, subprocess.CalledProcessError):
        if sys.platform == "win32":
            import winreg

            with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, r"HARDWARE\DESCRIPTION\System\CentralProcessor\0") as key:
                name = str(winreg.QueryValueEx(key, "ProcessorNameString")[0])
        elif sys.platform == "darwin":
            words = ["sysctl", "-n", "machdep.cpu.brand_string"]
            name = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        else:
            found = re.search(r"^model name\s*:(.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
            name = found[1] if found else ""
    return " ".join(name.split()) or platform.machine()


def versions() -> dict[str, str]:
    """Return the versions of Python and of packages that affect results."""
    found = {"python": platform.python_version()}
    for name in ("gpt2small-hf", "torch", "transformers", "accelerate", "tokenizers", "tiktoken", "datasets"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
