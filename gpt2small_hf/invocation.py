"""How this process was started, and how to type a command of ours in the same way."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
SCRIPTS = {"train": Path("train.py"), "push": Path("upload", "push.py")}
"""Commands that are also scripts of a checkout."""


def entry_point() -> str | None:
    """Return which of our entry points this process runs.

    Returns: `gpt2small` (the console script), `-m` (`python -m gpt2small_hf`), `train` or `push` (the scripts), or None
        for any other program that imports the package.
    """
    program = getattr(sys, "argv", None) or [""]
    if program[0] == "-m":  # the module is not imported yet: its name is the word before the program's arguments
        return "-m" if sys.orig_argv[-len(program)].removeprefix("-m").split(".")[0] == PACKAGE.name else None
    path = Path(program[0])
    if path.stem == "gpt2small" and path.suffix in ("", ".exe"):
        return "gpt2small"
    if path.resolve() == PACKAGE / "__main__.py":
        return "-m"
    return next((name for name, script in SCRIPTS.items() if path.resolve() == PACKAGE.parent / script), None)


def command(*words: str) -> str:
    """Return a command, `words[0]`, with its arguments, as the user started this one. It runs in the current folder."""
    started, in_checkout = entry_point(), Path.cwd() == PACKAGE.parent
    if started in SCRIPTS and words and words[0] in SCRIPTS and in_checkout:
        return shlex.join(["python", SCRIPTS[words[0]].as_posix(), *words[1:]])
    is_module = started == "-m" or (started in SCRIPTS and (in_checkout or shutil.which("gpt2small") is None))
    return shlex.join([*(["python", "-m", PACKAGE.name] if is_module else ["gpt2small"]), *words])


def command_line() -> str:
    """Return the command line of this process, without the folder of the program."""
    program = {"gpt2small": ["gpt2small"], "-m": ["python", "-m", PACKAGE.name]}
    program |= {name: ["python", script.as_posix()] for name, script in SCRIPTS.items()}
    default = ["python", Path(sys.argv[0]).name]
    return shlex.join([*program.get(entry_point() or "", default), *sys.argv[1:]])
