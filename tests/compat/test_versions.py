"""The checks that `versions.py` runs under other versions of transformers: here under the installed one."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from conftest import REPOSITORY

from compat.versions import FLOOR, table

HERE = REPOSITORY / "tests" / "compat"


@pytest.mark.slow
def test_version_checks_pass_here_and_report_a_changed_loss(published, without_package, tmp_path):
    folder = shutil.copytree(published, tmp_path / "model")
    (folder / "expected_loss.json").write_text("9.75")
    start = "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    done = subprocess.run(**without_package(start, str(HERE / "version_checks.py"), str(folder)), capture_output=True)
    assert done.returncode == 0, done.stderr
    checks = json.loads(done.stdout.splitlines()[-1])["checks"]
    moved = checks.pop("forward")
    assert re.match(r"AssertionError: [\d.]+ instead of 9.75 \(version_checks.py:\d+\)", moved), moved
    assert set(checks.values()) == {"ok"}, checks
    assert len(checks) == 10


def test_table_names_failed_checks():
    found = {"5.4.0": {"versions": {"torch": "2.13.0"}, "checks": {"forward": "ok", "left_padding": "Error: no"}}}
    assert table(found).splitlines() == [
        "              5.4.0",
        "torch         2.13.0",
        "forward       ok",
        "left padding  FAILED",
    ]


@pytest.mark.slow
@pytest.mark.skipif("VERSION_ENVIRONMENTS" not in os.environ, reason="VERSION_ENVIRONMENTS names no folder for them")
def test_published_folder_runs_under_the_minimum_transformers():
    words = [FLOOR, "--environments", os.environ["VERSION_ENVIRONMENTS"]]
    done = subprocess.run([sys.executable, str(HERE / "versions.py"), *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
