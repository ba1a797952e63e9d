"""Files beside the package that a wheel has inside it, by `setup.py`: `examples/`, `model_card.j2`, `LICENSE`."""

import shlex
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def resource(name: str) -> Path:
    """Return the path of such a file or folder: inside the package if it is there, else beside it, in a checkout."""
    installed = PACKAGE / name
    return installed if installed.exists() else PACKAGE.parent / name


def example_command(script: str, *words: str) -> str:
    """Return a line that runs a script of `examples/` from the current folder."""
    path = resource(f"examples/{script}")
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return shlex.join(["python", str(path), *words])
