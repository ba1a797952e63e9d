"""Copy files of the repository's top level into the package when a wheel is built; pyproject.toml has the rest.

Not `package_data`, which takes files inside a package only, and not another entry of `package-dir`, with which an
editable install registers an import hook (see pyproject.toml). An editable install reads these files where they are.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

PACKAGE = "gpt2small_hf"  # gpt2small_hf/resources.py finds the files there
SUFFIXES = {".yaml", ".py", ".jsonl"}


def resources() -> list[str]:
    """Recipes, scripts and data of the examples, the template of the model card, and the license of the code."""
    examples = (path for path in Path("examples").rglob("*") if path.suffix in SUFFIXES)
    return ["model_card.j2", "LICENSE", *sorted(path.as_posix() for path in examples)]


class BuildWithResources(build_py):
    """Build the package with its resources; `get_source_files` puts them into the sdist too."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for name in resources():
                target = Path(self.build_lib, PACKAGE, name)
                self.mkpath(str(target.parent))
                self.copy_file(name, str(target))

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), *resources()]


setup(cmdclass={"build_py": BuildWithResources})
