"""What pyproject.toml promises: an editable install that works from everywhere."""

import os
import shutil
import subprocess
import sys
import zipfile

import pytest
from conftest import REPOSITORY

pytest.importorskip("setuptools.build_meta")


def test_editable_install_works_from_the_parent_of_the_clone(tmp_path):
    clone = tmp_path / "gpt2small_hf"  # named as `git clone` names it, like the package inside
    shutil.copytree(REPOSITORY / "gpt2small_hf", clone / "gpt2small_hf", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, clone)
    subprocess.run(  # what `pip install -e` asks of the build backend
        [sys.executable, "-c", f"from setuptools import build_meta; build_meta.build_editable({str(tmp_path)!r})"],
        cwd=clone,
        check=True,
        capture_output=True,
    )
    site_packages = tmp_path / "site-packages"
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
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
    assert "gpt2small = gpt2small_hf.__main__:run" in script.read_text(encoding="utf-8")
