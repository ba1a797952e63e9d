"""Import rules of the packages, read from the source: one direction, no cycles, few dependencies in `model/`."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY

PACKAGE = "gpt2small_hf"
GUIDE = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
NOT_IN_TABLE = {"__init__", "__main__", "cli"}  # they start everything else


def read_import_rules() -> dict[str, set[str]]:
    """Read the table of packages in docs/architecture.md: package or module → those that it may import."""
    rules: dict[str, set[str]] = {}
    for line in GUIDE.partition("## Where is it decided?")[0].splitlines():
        if line.startswith("| `"):
            names, _, allowed = line.strip("| ").split(" | ")
            may = set(re.findall(r"`(\w+)`", allowed)) | (set(rules) if allowed == "all of the above" else set())
            rules |= {name.rstrip("/").removesuffix(".py"): may for name in re.findall(r"`([^`]+)`", names)}
    return rules


MAY_IMPORT = read_import_rules()
FILES = sorted(path for path in (REPOSITORY / PACKAGE).rglob("*.py"))


def imports(path: Path) -> list[str]:
    """Absolute names of all modules a file imports; relative ones begin with a dot."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == PACKAGE:
            names += [f"{PACKAGE}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append("." * node.level + (node.module or ""))
    return names


def package_of(path: Path) -> str:
    """Return the package of a file, or its own name at the top level."""
    return path.relative_to(REPOSITORY / PACKAGE).parts[0].removesuffix(".py")


def test_every_package_has_a_row_in_the_table():
    assert {package_of(path) for path in FILES} == MAY_IMPORT.keys() | NOT_IN_TABLE
    assert set().union(*MAY_IMPORT.values()) <= MAY_IMPORT.keys()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(REPOSITORY / PACKAGE).as_posix())
def test_packages_import_only_those_of_the_table(path):
    package = package_of(path)
    for name in imports(path):
        first, _, rest = name.partition(".")
        assert first not in ("train", "upload", "tests"), f"{path} imports the entry point {name}"
        if first == PACKAGE and rest and package not in NOT_IN_TABLE:
            assert rest.split(".")[0] in MAY_IMPORT[package] | {package}, f"{path} imports {name}"


@pytest.mark.parametrize("path", sorted((REPOSITORY / PACKAGE / "model").glob("*.py")), ids=lambda p: p.name)
def test_model_files_import_only_published_dependencies(path):
    allowed = {"torch", "transformers", "huggingface_hub"} | sys.stdlib_module_names
    for name in imports(path):
        sibling = name.startswith(".") and not name.startswith("..") and (path.parent / f"{name[1:]}.py").is_file()
        assert sibling or name.split(".")[0] in allowed, f"{path} imports {name}"


def test_the_core_imports_pytorch_alone():
    core = REPOSITORY / PACKAGE / "model" / "gpt.py"
    assert {name.split(".")[0] for name in imports(core)} <= {"torch"} | sys.stdlib_module_names


@pytest.mark.parametrize("path", [p for p in FILES if package_of(p) == "report"], ids=lambda p: p.name)
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


# ---- names in docs/architecture.md --------------------------------------------------------------------------------


NOT_HERE = {"argcomplete", "shtab", "found_inf", "upload_folder", "torch.ao.quantization.quantize_dynamic"}
"""Names in the guide of what this repository does not use."""
WRITTEN_LATER = {"commands/NAME.py", "meta.json", "resolved.json", "checkpoint.json"}
IS_PATH = re.compile(r"[\w.-]*/[\w./-]*|[\w.-]+\.(py|md|yaml|yml|j2|json|toml)")
BESIDE_A_PATH = re.compile(r"((?:`[^`\n]+`(?:,\s+|\s+and\s+))*`[^`\n]+`)\s+in\s+`([\w/.-]+\.\w+)`")


def find(name: str) -> Path | None:
    """Return the file or folder of a name in the guide, which is written from the repository or from the package."""
    return next((path for path in (REPOSITORY / name, REPOSITORY / PACKAGE / name) if path.exists()), None)


def defined_names(path: Path) -> set[str]:
    """Return the functions, classes, methods, fields and constants that a Python file defines."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
    return names


def test_names_in_the_guide_exist():
    """Paths exist in the repository or the package; identifiers occur in a Python file or in pyproject.toml."""
    paths = [REPOSITORY / "pyproject.toml"]
    for folder in (PACKAGE, "upload", "tests"):
        paths += (REPOSITORY / folder).rglob("*.py")
    known = set(re.findall(r"\w+", "\n".join(path.read_text(encoding="utf-8") for path in paths)))
    missing = []
    for name in set(re.findall(r"`([^`\n]+)`", GUIDE)) - NOT_HERE - WRITTEN_LATER:
        if IS_PATH.fullmatch(name):
            missing += [name] if find(name) is None else []
        elif re.fullmatch(r"\w+(\.\w+)*(\(.*\))?", name):
            missing += [word for word in re.findall(r"\w+", name.partition("(")[0]) if word not in known]
    assert missing == []


def test_symbols_in_the_guide_are_defined_in_the_files_beside_them():
    """In "`compare` and `Difference.verdict` in `report/sweep.py`", both are defined in that file."""
    found = [(name, path) for names, path in BESIDE_A_PATH.findall(GUIDE) for name in re.findall(r"`([^`]+)`", names)]
    assert len(found) > 40
    missing = []
    for name, place in found:
        path = find(place)
        assert path is not None, place
        if path.suffix == ".py":
            defined, parts = defined_names(path), name.removeprefix("--").partition("(")[0].split(".")
            missing += [f"{name} in {place}"] if not defined.issuperset(parts) else []
        elif name not in path.read_text(encoding="utf-8"):
            missing.append(f"{name} in {place}")
    assert missing == []
