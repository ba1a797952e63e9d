"""A command added to a copy of the package, in a module and a line of COMMANDS: it is listed, checks flags and runs."""

import shutil
import subprocess
import sys

import pytest
from changed_copy import write_changed
from conftest import REPOSITORY

MODULE = """
from pathlib import Path

from gpt2small_hf.config.parser import FlagParser
from gpt2small_hf.invocation import command


def main(words: list[str]) -> None:
    parser = FlagParser(prog=command("count"), description="Count the lines of text files.")
    parser.add_argument("TEXT", nargs="+", type=Path, help="A text file.")
    parser.add_argument("--not_empty", action="store_true", help="Count only lines with text.")
    (args,) = parser.fill(words)
    lines = [line for path in args.TEXT for line in path.read_text().splitlines()]
    print(len([line for line in lines if line or not args.not_empty]))
"""
LINE = '    "count": ("gpt2small_hf.commands.count", "count the lines of text files"),\n'


@pytest.fixture(scope="module")
def count(tmp_path_factory):
    """Run words with the copy of the package, without torch."""
    place = tmp_path_factory.mktemp("copy")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "gpt2small_hf", place / "gpt2small_hf", ignore=ignored)
    (place / "gpt2small_hf/commands/count.py").write_text(MODULE, encoding="utf-8")
    changes = {'    "report": (': f'{LINE}    "report": ('}
    write_changed("gpt2small_hf/cli.py", changes, place / "gpt2small_hf/cli.py")

    def run(*words: str) -> tuple[int, str, str]:
        """Returns: exit status, stdout and stderr."""
        command = [sys.executable, "-X", "importtime", "-m", "gpt2small_hf", *words]
        done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
        lines = done.stderr.splitlines()
        imports, printed = (
            [line for line in lines if line.startswith("import time:") == kind] for kind in (True, False)
        )
        assert not [line for line in imports if line.split("|")[-1].strip() == "torch"]
        return done.returncode, done.stdout, "\n".join(printed)

    return run


def test_new_command_is_listed_and_has_a_help(count):
    assert "\n  count    count the lines of text files\n" in count("--help")[1]
    status, out, _ = count("count", "--help")
    assert (status, "--not_empty" in out) == (0, True)


def test_new_command_refuses_an_unknown_flag_in_one_line(count):
    assert count("count", "a.txt", "--not_emty") == (
        2,
        "",
        "error: --not_emty is not a flag. Did you mean --not_empty?",
    )


def test_new_command_runs(count, tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n", encoding="utf-8")
    assert count("count", str(tmp_path / "a.txt"), "--not_empty") == (0, "2\n", "")


def test_architecture_guide_names_the_files_of_a_new_command():
    guide = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    (entry,) = [entry for entry in guide.split("\n- ") if entry.startswith("**A command** ")]
    for name in ("commands/NAME.py", "cli.py", "tests/test_new_command.py"):
        assert f"`{name}`" in entry
