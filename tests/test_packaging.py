"""What pyproject.toml and setup.py promise: dependencies, a complete wheel, an editable install that works anywhere."""

import ast
import inspect
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from conftest import REPOSITORY
from transformers import Trainer

from gpt2small_hf.training.trainer import CausalLMTrainer

OURS = {"gpt2small_hf", "upload", "train"}


def declared(pyproject: str) -> dict[str, str]:
    """Requirements in dependencies and in the extra `compat`: name → version specifier."""
    lists = re.findall(r"^(?:dependencies|compat) = \[(.*?)^\]", pyproject, re.MULTILINE | re.DOTALL)
    found = [re.match(r"([\w.-]+)(?:\[\w+\])?(.*)", line) for each in lists for line in re.findall(r'"(.+?)"', each)]
    return {re.sub(r"[-_.]+", "-", match[1]).lower(): match[2] for match in found if match}


def imported() -> set[str]:
    """Top-level modules that the package, its scripts and the examples import."""
    names = set()
    for folder in ("gpt2small_hf", "upload", "examples"):
        for path in [REPOSITORY / "train.py", *(REPOSITORY / folder).rglob("*.py")]:
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    names |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    names.add(node.module.split(".")[0])
    return names - OURS - sys.stdlib_module_names


def test_imports_are_declared_with_a_lower_bound():
    requirements = declared((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    distributions = packages_distributions()
    for module in imported():
        names = {re.sub(r"[-_.]+", "-", name).lower() for name in distributions.get(module, [module])}
        assert names & requirements.keys(), f"{module} is imported, and pyproject.toml does not declare it"
    assert [name for name, version in requirements.items() if not version.startswith(">=")] == []


PRIVATE_METHODS = {  # of transformers' Trainer, that our subclasses of it override: their parameters
    "_clip_grad_norm": "self, model",
    "_get_grad_norm": "self, model, grad_norm",
    "_get_output_dir": "self, trial",
    "_init_training_state": (
        "self, max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial"
    ),
    "_load_optimizer_and_scheduler": "self, checkpoint",
    "_maybe_log_save_evaluate": (
        "self, tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time, learning_rate"
    ),
    "_run_epoch": (
        "self, model, epoch, train_dataloader, steps_in_epoch, num_update_steps_per_epoch, trial, "
        "ignore_keys_for_eval, start_time, resume_from_checkpoint, epochs_trained, steps_trained_in_current_epoch"
    ),
    "_save_checkpoint": "self, model, trial",
    "_save_optimizer_and_scheduler": "self, output_dir",
    "_track_num_input_tokens": "self, inputs",
}


def test_overridden_private_methods_of_the_trainer_are_listed():
    ours = [kind for kind in CausalLMTrainer.__mro__ if kind.__module__.startswith("gpt2small_hf.")]
    private = {name for kind in ours for name in vars(kind) if name.startswith("_") and not name.startswith("__")}
    assert {name for name in private if hasattr(Trainer, name)} == PRIVATE_METHODS.keys()
    decisions = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert [name for name in PRIVATE_METHODS if f"`{name}`" not in decisions] == []


@pytest.mark.parametrize("name", PRIVATE_METHODS)
def test_overridden_private_method_has_the_known_parameters(name):
    """Fails by name with a release of transformers that changes a method that we override."""
    assert ", ".join(inspect.signature(getattr(Trainer, name)).parameters) == PRIVATE_METHODS[name]


def copy_sources(clone: Path) -> None:
    """Copy what a build reads."""
    for name in ("gpt2small_hf", "examples"):
        shutil.copytree(REPOSITORY / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "model_card.j2"):
        shutil.copy(REPOSITORY / name, clone)


def build(kind: str, clone: Path, folder: Path) -> Path:
    """Ask the build backend for a distribution, as pip does. Returns: its file in `folder`."""
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(folder)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=clone, capture_output=True, text=True, check=True)
    return folder / done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_wheel_made_from_the_sdist_finds_its_recipes_and_card_template(tmp_path):
    pytest.importorskip("setuptools.build_meta")
    copy_sources(tmp_path / "clone")
    with tarfile.open(build("sdist", tmp_path / "clone", tmp_path)) as sdist:
        sdist.extractall(tmp_path / "sdist", filter="data")
    site_packages = tmp_path / "site-packages"
    with zipfile.ZipFile(build("wheel", next((tmp_path / "sdist").iterdir()), tmp_path)) as wheel:
        wheel.extractall(site_packages)
    assert {path.name for path in site_packages.iterdir() if path.suffix != ".dist-info"} == {"gpt2small_hf"}
    code = """
import sys
from pathlib import Path
sys.argv = ["gpt2small"]  # as the console script
from gpt2small_hf.config.recipe import find_recipe, find_recipes, read_recipe
from gpt2small_hf.resources import resource
print(find_recipe("tiny"))
print(find_recipes(Path("examples/interventions-small"))["muon"])
print(resource("model_card.j2"))
assert read_recipe(find_recipe("interventions/stacked"))["max_grad_norm"]  # it extends another
assert (find_recipe("chat").parent / "data" / "chats.jsonl").is_file()
"""
    env = {**os.environ, "PYTHONPATH": str(site_packages)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    names = ["examples/tiny.yaml", "examples/interventions-small/muon.yaml", "model_card.j2"]
    for path, name in zip(done.stdout.splitlines(), names, strict=True):
        assert Path(path) == site_packages / "gpt2small_hf" / name
        assert Path(path).read_bytes() == (REPOSITORY / name).read_bytes()


def test_editable_install_works_from_the_parent_of_the_clone(tmp_path):
    pytest.importorskip("setuptools.build_meta")
    clone = tmp_path / "gpt2small_hf"  # named as `git clone` names it, like the package inside
    copy_sources(clone)
    site_packages = tmp_path / "site-packages"
    with zipfile.ZipFile(build("editable", clone, tmp_path)) as wheel:
        wheel.extractall(site_packages)
    code = (
        f"import importlib.util, site; site.addsitedir({str(site_packages)!r})\n"
        "print(importlib.util.find_spec('gpt2small_hf').origin)"
    )
    done = subprocess.run(  # -S: the environment of the tests may have another editable install of the package
        [sys.executable, "-S", "-c", code], cwd=tmp_path, env=os.environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(clone.resolve() / "gpt2small_hf" / "__init__.py")
    script = next(site_packages.glob("*.dist-info")) / "entry_points.txt"
    assert "gpt2small = gpt2small_hf.cli:main" in script.read_text(encoding="utf-8")
