"""Import rules of the packages, read from the source: one direction, no cycles, few dependencies in `model/`."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY

PACKAGE = "gpt2small_hf"
MAY_IMPORT = {  # docs/architecture.md explains the order
    "model": set(),
    "runs": {"errors", "invocation"},
    "config": {"runs", "errors", "invocation", "resources"},
    "data": {"runs", "errors", "formatting", "config", "invocation"},
    "conversion": {"model", "data", "runs", "errors", "formatting", "resources"},
    "evaluation": {"model", "data", "runs", "errors", "formatting", "config"},
    "report": {"evaluation", "runs", "errors", "formatting", "config", "invocation", "resources"},
    "training": {
        "model",
        "data",
        "evaluation",
        "report",
        "runs",
        "errors",
        "config",
        "formatting",
        "invocation",
        "resources",
    },
}
MAY_IMPORT["publishing"] = MAY_IMPORT["training"] | {"training", "conversion", "peft_targets"}
COMMANDS = REPOSITORY / PACKAGE / "commands"  # may import every package
FILES = sorted(path for path in (REPOSITORY / PACKAGE).glob("*/**/*.py") if path.parent != COMMANDS)


def imports(path: Path) -> list[str]:
    """Absolute names of all modules a file imports; relative ones begin with a dot."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append("." * node.level + (node.module or ""))
    return names


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_packages_import_only_packages_below_them(path):
    package = path.relative_to(REPOSITORY / PACKAGE).parts[0]
    for name in imports(path):
        first, _, rest = name.partition(".")
        if first == PACKAGE:
            assert rest.split(".")[0] in MAY_IMPORT[package] | {package}, f"{path} imports {name}"
        assert first not in ("train", "upload", "tests"), f"{path} imports the entry point {name}"


@pytest.mark.parametrize("path", sorted((REPOSITORY / PACKAGE / "model").glob("*.py")), ids=lambda p: p.name)
def test_model_files_import_only_published_dependencies(path):
    allowed = {"torch", "transformers", "huggingface_hub"} | sys.stdlib_module_names
    for name in imports(path):
        sibling = name.startswith(".") and not name.startswith("..") and (path.parent / f"{name[1:]}.py").is_file()
        assert sibling or name.split(".")[0] in allowed, f"{path} imports {name}"


def test_the_core_imports_pytorch_alone():
    core = REPOSITORY / PACKAGE / "model" / "gpt.py"
    assert {name.split(".")[0] for name in imports(core)} <= {"torch"} | sys.stdlib_module_names


@pytest.mark.parametrize("path", [p for p in FILES if p.parent.name == "report"], ids=lambda p: p.name)
def test_report_reads_files_and_needs_no_pytorch(path):
    assert not {name.split(".")[0] for name in imports(path)} & {"torch", "transformers"}


@pytest.mark.slow
def test_report_loads_no_pytorch_at_run_time():
    code = f"""
import sys, types
package = types.ModuleType("gpt2small_hf")  # the package's own import registers the model classes, with PyTorch
package.__path__ = [{str(REPOSITORY / PACKAGE)!r}]
sys.modules["gpt2small_hf"] = package
import gpt2small_hf.report.charts, gpt2small_hf.report.page, gpt2small_hf.report.sweep, gpt2small_hf.report.notes
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_module_is_named_after_the_standard_library():
    paths = [
        *REPOSITORY.glob("*.py"),
        *(REPOSITORY / PACKAGE).rglob("*.py"),
    ]
    assert [str(p) for p in paths if p.stem in sys.stdlib_module_names] == []
