"""`python upload/push.py` against the Hub of the tests: the fixtures of test_push.py and test_hub.py in publishing/.

A push is half a second of work after four of imports. So one process imports, waits, and forks for each command, whose
arguments, folder, streams, exit status, death and `HF_ENDPOINT` are its own. What else the Hub's client reads once, at
import, it shares with the others: `HF_HOME`, no `HF_HUB_OFFLINE`. One process is for commands with Xet, whose library
reads its variables in each command, and one for those without. A command with `cold=True` imports everything itself.

PYTEST_DONT_REWRITE: test files import this one before they name it as a plugin.
"""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import ABSENT_WHEN_ISOLATED, REPOSITORY
from hub import GITATTRIBUTES, TOKEN, HubServer, Pause, Request

from gpt2small_hf.runs.layout import RunFolder

pytest_plugins = ["hub.fixtures"]
PUSH = REPOSITORY / "upload" / "push.py"
REPO = "you/tiny"
OF_HUB = {".gitattributes": GITATTRIBUTES}
"""Path → content of what the Hub puts into a new repository."""
ENOUGH_SECONDS = 300
NOWHERE = "http://127.0.0.1:1"
"""An address at which no server listens."""

FAST = """
import time, types
client.RETRY_WAITS_SECONDS = (0.01,) * 4
client.time = types.SimpleNamespace(sleep=lambda seconds: time.sleep(min(seconds, 0.01)))
"""
"""Calls are repeated at once, also where the Hub asks to wait."""
WAITING = """
import gc, json, os, runpy, sys
script, then = sys.argv[1:]
sys.path.insert(0, os.path.dirname(os.path.dirname(script)))
from gpt2small_hf.publishing import card, client, commit, hub, push, secret_scan, source, stage, verify
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, AutoTokenizer
secret_scan.check_flag_value("", "")  # compiles the rules
exec(then)
gc.freeze()  # or collecting garbage would copy all of it in each command
print("waiting", flush=True)
for line in sys.stdin:
    words, folder, environment, out, err = json.loads(line)
    if child := os.fork():
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    constants.HUGGINGFACE_CO_URL_TEMPLATE = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(
        constants.ENDPOINT, environment["HF_ENDPOINT"]
    )
    constants.ENDPOINT = environment["HF_ENDPOINT"]
    for number, path in enumerate((os.devnull, out, err)):
        os.dup2(os.open(path, os.O_WRONLY if number else os.O_RDONLY), number)
    sys.argv = [script, *words]
    sys.path[0] = os.path.dirname(script)
    runpy.run_path(script, run_name="__main__")
"""


@dataclass(frozen=True)
class Done:
    """The result of a command."""

    status: int
    out: str
    err: str
    seconds: float

    @property
    def refusal(self) -> str:
        """The error, which is the last line."""
        assert self.status > 0, self
        assert "Traceback" not in self.err, self.err
        assert self.err.endswith("\n")
        line = self.err.splitlines()[-1]
        assert line.startswith("error: ")
        return line.removeprefix("error: ")


class Command:
    """A running command. `wait_for` returns its exit status at its end."""

    def __init__(self, pid: int, wait_for: Callable[[], int], out: Path, err: Path, token: str | None) -> None:
        self.pid, self._wait_for, self._files, self._token = pid, wait_for, (out, err), token
        self._began, self._done = time.monotonic(), None

    def reach(self, pause: Pause) -> None:
        """Wait until it makes a paused request."""
        if not pause.reached.wait(60):
            self.kill()
            raise AssertionError(f"the request was never made: {self.wait()}")

    def kill(self) -> None:
        """End it as `kill -9` does."""
        if self._done is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()

    def wait(self) -> Done:
        """Wait for its end, and check that it has not printed its token."""
        if self._done is None:
            watch = threading.Timer(ENOUGH_SECONDS, os.kill, (self.pid, signal.SIGKILL))
            watch.start()
            status = self._wait_for()
            watch.cancel()
            out, err = (path.read_text(encoding="utf-8") for path in self._files)
            self._done = Done(status, out, err, time.monotonic() - self._began)
        assert self._token is None or self._token not in self._done.out + self._done.err
        return self._done


class Waiting:
    """The process that has imported what a push needs."""

    def __init__(self, home: Path, *, xet: bool = False, more: dict[str, str] | None = None, then: str = FAST) -> None:
        """Start it, with `more` variables, and execute Python code `then`."""
        self.environment = {**environment(NOWHERE, home, xet=xet), **(more or {})}
        self.process = subprocess.Popen(
            [sys.executable, "-c", WAITING, str(PUSH), then],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._read() == "waiting"
        self.latest: Command | None = None

    def start(self, words: list[str], folder: Path, given: dict[str, str], out: Path, err: Path) -> Command:
        """Fork for a command, one at a time, with variables `given` it alone; `HF_ENDPOINT` is one of them."""
        if self.latest is not None:
            self.latest.kill()
        assert self.process.stdin is not None
        job = [words, str(folder), {**self.environment, **given}, str(out), str(err)]
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        self.latest = Command(int(self._read()), lambda: int(self._read()), out, err, given.get("HF_TOKEN"))
        return self.latest

    def _read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        """End it."""
        self.process.communicate(timeout=60)


def environment(url: str, home: Path, *, xet: bool) -> dict[str, str]:
    """Of a command: nothing but what is here, and no token."""
    home.mkdir(exist_ok=True)
    shared = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "HF_ENDPOINT": url, "HF_HOME": str(home)}
    return {**shared, "HF_XET_CLIENT_RETRY_BASE_DELAY": "10ms", **({} if xet else {"HF_HUB_DISABLE_XET": "1"})}


class Push:
    """`push(*words)` runs `python upload/push.py` with these words, in `place`, against a server."""

    def __init__(self, url: str, waiting: Callable[[bool], Waiting], place: Path) -> None:
        """`waiting` returns the process that forks for commands with Xet (True) or without."""
        self.url, self.waiting, self.place, self.count = url, waiting, place, 0

    def start(
        self, *words: str, token: str | None = TOKEN, cold: bool = False, xet: bool = False, **given: str
    ) -> Command:
        """Start a command, with variables `given` it alone, which must not be those that are read at import."""
        self.count += 1
        out, err, home = (self.place / f"{name}{self.count}" for name in ("stdout", "stderr", "home"))
        out.touch(), err.touch()
        given = {**given, **({"HF_TOKEN": token} if token else {})}
        if not cold:
            if xet:  # or what another command has sent is not sent again
                given["HF_HOME"] = str(home)
            return self.waiting(xet).start(list(words), self.place, {**given, "HF_ENDPOINT": self.url}, out, err)
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, str(PUSH), *words],
                env={**environment(self.url, home, xet=xet), **given},
                cwd=self.place,
                **{"stdin": subprocess.DEVNULL, "stdout": stdout, "stderr": stderr},
            )
        return Command(process.pid, process.wait, out, err, token)

    def __call__(self, *words: str, **how: Any) -> Done:
        """Run a command to its end."""
        return self.start(*words, **how).wait()


@dataclass(frozen=True)
class DryRun:
    """A run that was staged and checked once for all tests; pushing a copy of it is quicker."""

    place: Path
    """The folder that contains `runs/short`."""
    done: Done
    requests: list[Request]
    """Requests to the server during the dry run."""


@pytest.fixture(scope="session")
def dry_run(
    tiny_run: RunFolder, waiting: Callable[[bool], Waiting], tmp_path_factory: pytest.TempPathFactory
) -> DryRun:
    """`tiny_run` after a dry run of publishing it as you/tiny. Not to be changed."""
    place = tmp_path_factory.mktemp("dry_run")
    shutil.copytree(tiny_run.root, place / "runs" / "short")
    with HubServer() as hub:
        done = Push(hub.url, waiting, place)("runs/short", REPO, "--dry_run", token=None)
        return DryRun(place, done, hub.requests)


@pytest.fixture
def run(dry_run: DryRun, tmp_path: Path) -> RunFolder:
    """A copy of the finished, checked run, as `runs/short` in the folder of the commands."""
    shutil.copytree(dry_run.place / "runs" / "short", tmp_path / "runs" / "short")
    return RunFolder(tmp_path / "runs" / "short")


@pytest.fixture(scope="session")
def waiting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[bool], Waiting]]:
    """The processes that fork for each command, with Xet (True) or without; each starts when it is first needed."""
    started: dict[bool, Waiting] = {}

    def of(xet: bool) -> Waiting:
        if xet not in started:
            started[xet] = Waiting(tmp_path_factory.mktemp("waiting") / "home", xet=xet)
        return started[xet]

    yield of
    for process in started.values():
        process.end()


@pytest.fixture
def push(hub: HubServer, waiting: Callable[[bool], Waiting], tmp_path: Path) -> Push:
    """Commands in `tmp_path` against `hub`."""
    return Push(hub.url, waiting, tmp_path)


@pytest.fixture
def from_hub(hub: HubServer, tmp_path: Path) -> Callable[..., str]:
    """Run code where torch, transformers and what they need can be imported, and the Hub is asked; get what it printed.

    As `run_isolated`, with an empty cache each time, and a token, since what is published is private at first.
    """
    packages = tmp_path / "packages"
    packages.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if entry.name.split("-")[0] not in ABSENT_WHEN_ISOLATED and entry.suffix != ".pth":
            (packages / entry.name).symlink_to(entry)

    def run(code: str, *, token: str | None = TOKEN) -> str:
        home = tmp_path / f"user{len(list(tmp_path.glob('user*')))}"
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-"],
            input=f"import sys\nsys.path.append({str(packages)!r})\n{code}",
            cwd="/",
            env={**environment(hub.url, home, xet=True), **({"HF_TOKEN": token} if token else {})},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def asked(hub: HubServer, *paths: str) -> list[str]:
    """Method and address of the requests so far whose address contains one of these."""
    found = [request for request in hub.requests if any(path in request.path for path in paths)]
    return [f"{request.method} {request.path}" for request in found]


def sent_bytes(hub: HubServer) -> int:
    """How much the server was sent as contents of files."""
    return sum(request.received for request in hub.requests if re.match("/lfs/|/v1/xorbs/", request.path))


def contents(folder: Path) -> dict[str, bytes]:
    """Path → content of all files in a folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def published(hub: HubServer, repo: str = REPO, revision: str = "main") -> dict[str, bytes]:
    """What is in a repository, without the file that the Hub puts there itself."""
    files = hub.files(repo, revision)
    del files[".gitattributes"]
    return files


def sha256_of(content: bytes) -> str:
    """As `published.json` has it."""
    return hashlib.sha256(content).hexdigest()
