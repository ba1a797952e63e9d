"""Each code block of README and docs/ is run here or by CI, or parsed, as the comment above it says."""

import json
import os
import re
import shlex
import shutil
import socketserver
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from conftest import REPOSITORY, run_script

from gpt2small_hf.config.resolve import read_config
from gpt2small_hf.publishing.arguments import parse_arguments as push_arguments
from gpt2small_hf.publishing.facts import MINIMUM_TRANSFORMERS

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
PAGES.remove(REPOSITORY / "docs" / "api.md")  # tests/test_api.py runs it
README, *GUIDES = TEXTS = [page.read_text(encoding="utf-8") for page in PAGES]
# A mark is a comment on the line above the block: how the block is tested.
BLOCKS = [
    block for text in TEXTS for block in re.findall(r"(?:<!-- (.+?) -->\n)?```(bash|python)\n(.*?)```", text, re.DOTALL)
]
WITH_COMPAT = "test, with the extra compat"
RUN_HERE = list(dict.fromkeys(block for block in BLOCKS if block[0] in ("test", WITH_COMPAT)))
# Blocks that need more than an offline CPU and some minutes, or the reader's own files.
MORE = {"needs the Hub", "needs a GPU", "an hour", "needs a second terminal", "needs your data", "needs runs/tiny"}
OF_CI = {"ci: install", "ci: main job", "ci: tests", "ci: chat", "ci: talk", "ci: share"}
PARSED = list(dict.fromkeys((language, code) for mark, language, code in BLOCKS if mark in MORE | OF_CI))


def test_every_block_has_a_mark_of_how_it_is_tested():
    marks = {mark for mark, _, _ in BLOCKS}
    assert marks <= {"test", WITH_COMPAT} | OF_CI | MORE
    assert {"test"} | OF_CI <= marks
    script = (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8")
    assert all(f'readme_block "{mark}"' in script for mark in OF_CI)


class Asked(socketserver.StreamRequestHandler):
    """Run the command that a warm `python` was given, and send back what it printed and its status."""

    def handle(self) -> None:
        words, folder = json.loads(self.rfile.readline())
        done = run_script(words, Path(folder))
        self.wfile.write(json.dumps([done.stdout, done.stderr, done.returncode]).encode())


@pytest.fixture(scope="module")
def warm_python(tmp_path_factory):
    """A folder with a command `python` that runs its arguments as `run_script`, without the time of the imports."""
    place = tmp_path_factory.mktemp("bin")
    lines = [
        f"#!{sys.executable} -IS",
        "import json, os, socket, sys",
        "connection = socket.socket(socket.AF_UNIX)",
        f"connection.connect({str(place / 'socket')!r})",
        "connection.sendall(json.dumps([sys.argv[1:], os.getcwd()]).encode() + b'\\n')",
        "out, err, status = json.loads(connection.makefile().read())",
        "sys.stdout.write(out)",
        "sys.stderr.write(err)",
        "sys.exit(status)",
    ]
    (place / "python").write_text("\n".join(lines) + "\n")
    (place / "python").chmod(0o755)
    with socketserver.ThreadingUnixStreamServer(str(place / "socket"), Asked) as server:
        threading.Thread(target=server.serve_forever).start()
        yield place
        server.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(("mark", "language", "code"), RUN_HERE)
def test_block_runs(mark, language, code, tiny_run, warm_python, tmp_path):
    """Run a block in a folder that has the checkout's files and a finished run called `tiny`."""
    if mark == WITH_COMPAT:
        pytest.importorskip("peft")
    for name in ("train.py", "upload", "examples", "docs", "README.md", "CONTRIBUTING.md"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    (tmp_path / "runs").mkdir()
    shutil.copytree(tiny_run.root, tmp_path / "runs" / "tiny")  # a block may write into it
    if language == "python":
        done = run_script(["-c", code], tmp_path)
    else:
        # What is piped into Python needs a real one: `warm_python` has no standard input.
        folder = Path(sys.executable).parent if "|" in code else warm_python
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", code],
            cwd=tmp_path,
            env={**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("language", "code"), PARSED)
def test_block_that_is_not_run_parses(language, code):
    if language == "python":
        compile(code, "README.md", "exec")
        return
    subprocess.run(["bash", "-n", "-c", code], check=True)
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[0] in ("accelerate", "torchrun"):
            words = ["python", *words[words.index("train.py") :]]
        if words[:2] == ["python", "train.py"]:
            words.append("--bf16=false")  # refused where there is no GPU
            read_config(words[2:], default_recipe=REPOSITORY / "examples" / "tiny.yaml")
        elif words[:2] == ["python", "upload/push.py"]:
            push_arguments(words[2:])
        elif words[:4] == ["python", "-m", "gpt2small_hf", "prepare"]:
            assert all(flag.startswith("--") for flag in words[4::2]), line


def test_tree_in_readme_names_existing_files():
    tree = re.search(r"```text\n(train\.py.*?)```", README, flags=re.DOTALL)
    assert tree
    for line in tree[1].splitlines():
        name = line.split()[0]
        assert (REPOSITORY / name).exists(), name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no/such/folder"], "no/such/folder is neither a model folder nor a Hub id"),
        (["MODEL", "word " * 200], "the model takes fewer than 32"),
        (["MODEL", "--max", "3"], "unrecognized arguments: --max"),
    ],
)
def test_use_from_hub_reports_user_errors_in_one_line(words, message, tiny_run, tmp_path):
    words = [str(tiny_run.model) if word == "MODEL" else word for word in words]
    done = run_script([REPOSITORY / "examples" / "use_from_hub.py", *words], tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_minimum_transformers_of_a_card_is_tested_by_ci_and_documented():
    script = (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8")
    assert f"python tests/compat/versions.py {MINIMUM_TRANSFORMERS}\n" in script
    assert f"unmodified under transformers {MINIMUM_TRANSFORMERS} and later" in "".join(GUIDES)


@pytest.mark.parametrize("page", [*PAGES, REPOSITORY / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_relative_links_of_a_page_lead_to_files(page):
    links = re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []


def test_readme_has_at_most_two_hundred_lines():
    assert len(README.splitlines()) <= 200
