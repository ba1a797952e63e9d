"""Run and data folders: every file name in one place, whole-or-nothing writes, and the error a user can fix.

The rooms hand each other files; this module alone spells where those files lie. What is in them is the rooms' business.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import math
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


class DoorError(Exception):
    """An end that is no fault of the code. Doors print it as one line, after `word`, and exit with `status`."""

    word = "error"
    status = 1


class UsageError(DoorError):
    """Something the user can fix; the line says what, why and what to do."""

    status = 2


class RunStoppedError(DoorError):
    """Training that cannot go on: it no longer learns, or cannot be saved."""

    word, status = "stopped", 3


class RunInterruptedError(DoorError):
    """Training that a signal ended, after it was saved."""

    word = "interrupted"

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.status = 128 + signal


# ---- where things lie -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunFolder:
    """The files of one training run."""

    root: Path

    @property
    def recipe(self) -> Path:
        """The recipe as it was given."""
        return self.root / "recipe.yaml"

    @property
    def resolved(self) -> Path:
        """Every value in force, with commit, versions and device."""
        return self.root / "resolved.json"

    @property
    def metrics(self) -> Path:
        """One JSON object a log line."""
        return self.root / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        """One JSON object a saved step and prompt: what the model made of it then."""
        return self.root / "samples.jsonl"

    @property
    def first_rows(self) -> Path:
        """The first training rows, decoded, with what is learned from them marked."""
        return self.root / "first_rows.txt"

    @property
    def checkpoints(self) -> Path:
        """Folder of `checkpoint-<step>/`; each loads by itself."""
        return self.root / "checkpoints"

    @property
    def model(self) -> Path:
        """Final weights, config, code and tokenizer: what a stranger loads."""
        return self.root / "model"

    @property
    def adapter(self) -> Path:
        """Of a run with LoRA: what was trained, alone. `model/` has it merged."""
        return self.root / "adapter"

    @property
    def answers(self) -> Path:
        """Of a run on chats: one JSON object a held-out question, with the finished model's answer."""
        return self.root / "evaluation" / "answers.jsonl"

    @property
    def heldout(self) -> Path:
        """Held-out loss before and after training, with its baselines."""
        return self.root / "evaluation" / "heldout.json"

    @property
    def completions(self) -> Path:
        """Fixed prompts continued by the finished model."""
        return self.root / "evaluation" / "completions.json"

    def chart(self, name: str) -> Path:
        """A picture: `loss`, `grad_norm`, `learning_rate` or `throughput`."""
        return self.root / "charts" / f"{name}.png"

    @property
    def report(self) -> Path:
        """The run to look at: its results, pictures and samples."""
        return self.root / "report.md"

    @property
    def staged(self) -> Path:
        """What is published, byte for byte. `staged.html` beside it shows the card as the Hub will."""
        return self.root / "staged"

    @property
    def published(self) -> Path:
        """Where the run was published: repository, commit, tag, hashes, and what was verified."""
        return self.root / "published.json"

    @property
    def lock(self) -> Path:
        """Held by the process that trains here. It marks the folder as a run's before `resolved.json` exists."""
        return self.root / ".lock"

    @property
    def former(self) -> Path:
        """The run that this one overwrites, kept here until this one is finished: a mount point cannot be renamed."""
        return self.root / "former"

    @property
    def former_incomplete(self) -> Path:
        """`former` while files are moved into it."""
        return self.root / ".former"

    def is_own(self, path: Path) -> bool:
        """Whether this project writes a file or folder of that name into a run's folder; all others are the user's."""
        own = (self.recipe, self.resolved, self.metrics, self.samples, self.first_rows, self.checkpoints, self.model)
        own += (self.adapter, self.heldout.parent, self.chart("").parent, self.report, self.published)
        return path in own or path.name.startswith(self.staged.name) or is_leftover(path)

    @property
    def finished(self) -> bool:
        """True once the model and its results are on disk. The held-out result is written last; charts may follow."""
        return self.heldout.exists()


@dataclass(frozen=True)
class DataFolder:
    """The files of one prepared data set."""

    root: Path

    @property
    def meta(self) -> Path:
        """Counts, source and tokenizer. Written last: a folder without it is not a data set."""
        return self.root / "meta.json"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer that made the ids, loadable by `AutoTokenizer`."""
        return self.root / "tokenizer"

    @property
    def progress(self) -> Path:
        """How far an unfinished preparation came. Only in the folder of `unfinished()`."""
        return self.root / "progress.json"

    def tokens(self, split: str, shard: int) -> Path:
        """Flat little-endian token ids, uint16 or uint32 as `meta.json` says."""
        return self.root / f"{split}-{shard:05d}.bin"

    def documents(self, split: str) -> Path:
        """Flat little-endian uint64: where each document starts in the split's stream, then the stream's length."""
        return self.root / f"{split}-documents.bin"

    def rows(self, split: str, packing: str, seq_len: int) -> Path:
        """Which documents make each row: kept once it was worked out, and made again whenever it is gone."""
        return self.root / f"{split}-{packing}-{seq_len}.npy"

    @property
    def lock(self) -> Path:
        """Held by the process that prepares the set: beside the folder, or inside where one cannot be renamed."""
        return lock_of(self.root)

    @property
    def exists(self) -> bool:
        """Whether a data set is prepared here, or was begun."""
        begun = not self.root.exists() and bool(self.root.name) and self.unfinished().root.exists()
        return self.meta.is_file() or begun

    def unfinished(self) -> DataFolder:
        """The folder in which the set is built before it takes its name: beside it, or inside as the lock."""
        is_fixed = self.root.is_dir() and not is_replaceable(self.root)
        return DataFolder(self.root / ".partial" if is_fixed else self.root.with_name(self.root.name + ".partial"))


def check_named(flag: str, name: str | None) -> None:
    """Raise: UsageError if a name is neither of something here nor could be an id on the Hub."""
    if name and not Path(name).expanduser().exists() and not HUB_ID.fullmatch(name):
        raise UsageError(f"{flag} {name} does not exist. Check the spelling; the working folder is {Path.cwd()}.")


def check_run(folder: RunFolder) -> None:
    """Raise: UsageError if a folder is not a run's, or its `resolved.json` is not as train.py wrote it."""
    if not folder.resolved.is_file():
        raise UsageError(f"{folder.root} is not a run folder. Name one that train.py wrote, such as runs/tiny.")
    resolved, parts = read_json(folder.resolved), {"run", "data", "model", "trainer", "device", "made_by"}
    if not isinstance(resolved, dict) or not parts <= resolved.keys():
        raise UsageError(f"{folder.resolved} is damaged: settings of the run are missing. Restore the file.")


def check_writable(flag: str, folder: Path) -> None:
    """See that a folder can be created, or written to if it exists. Nothing is left behind.

    Raises: UsageError naming `flag`, the folder and the reason.
    """
    try:
        str(folder).encode()  # it is written into files
        with suppress(FileNotFoundError):
            folder.lstat()
            if not folder.is_dir():
                raise FileExistsError(errno.EEXIST, "a file or a broken link has that name")
        nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        # Only trying tells: root may write anywhere, but not in /proc or on a read-only disk.
        Path(tempfile.mkdtemp(prefix=".", suffix=".tmp", dir=nearest)).rmdir()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{flag} {folder} cannot be written: {reason}. Choose another place.") from None


# ---- reading and writing ----------------------------------------------------------------------------------------


@contextmanager
def whole(path: Path, *, flush: bool = True) -> Iterator[Path]:
    """Yield a temporary name beside `path`; give the file or folder written there its real name if nothing was raised.

    So what exists is whole, with `flush` also after a power cut. A file or folder of the same name is replaced.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    clear_leftovers(path)
    # Beside a folder that cannot be renamed may be another disk, or one that may not be written.
    place = path if path.is_dir() and not is_replaceable(path) else path.parent
    temporary = place / _beside(path, "tmp")
    try:
        yield temporary
        if flush:
            sync(temporary)
        put_in_place(temporary, path)
        if flush:
            sync(path.parent, contents=False)
    except Exception as error:
        if not disk_is_full(error):
            raise
        # The error of a write does not name its file, and those of other libraries are of no common class.
        number = error.errno if isinstance(error, OSError) else errno.ENOSPC
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise OSError(number, reason, str(path)) from error
    finally:
        remove(temporary)


def put_in_place(finished: Path, path: Path, *, is_filled_in_part: bool = False) -> None:
    """Give a finished file or folder its name. What had that name is replaced.

    A folder that cannot be renamed is emptied and filled, each time the file last that marks it as complete. A call
    that was killed after the first part is repeated with `is_filled_in_part`.
    """
    if not path.is_dir():
        finished.replace(path)
    elif is_replaceable(path):
        # A folder cannot be replaced in one step: the old one steps aside first, so one of the two always exists.
        aside = path.with_name(_beside(path, "old"))
        path.rename(aside)
        finished.rename(path)
        shutil.rmtree(aside)
    else:
        for old in [] if is_filled_in_part else sorted(path.iterdir(), key=_marks_complete):
            if old != finished and old.name != ".lock":
                remove(old)
        for new in sorted(finished.iterdir(), key=_marks_complete):
            new.rename(path / new.name)
        finished.rmdir()


def is_replaceable(folder: Path) -> bool:
    """Whether a folder can be renamed: no link, mount point or working folder, and its parent may be written."""
    fixed = folder.is_symlink() or os.path.ismount(folder) or folder.samefile(Path())
    return not fixed and os.access(folder.parent, os.W_OK)


def _marks_complete(path: Path) -> bool:
    return path.name in ("meta.json", "config.json")


def sync(path: Path, *, contents: bool = True) -> None:
    """Flush a file, or a folder with its contents, to the disk: a power cut may keep a new name and lose the data."""
    on_windows = os.name == "nt"  # which opens no folder, and flushes only what may be written
    for found in [path, *(path.rglob("*") if contents else [])]:
        if on_windows and found.is_dir():
            continue
        descriptor = os.open(found, os.O_RDWR if on_windows else os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL:  # some network file systems cannot flush a folder
                raise
        finally:
            os.close(descriptor)


_MACHINE = re.sub(r"\W", "", platform.node())[:32]


def _beside(path: Path, kind: str) -> str:
    return f".{path.name}.{_MACHINE}-{os.getpid()}.{kind}"


def is_leftover(path: Path, of: Path | None = None) -> bool:
    """Whether a name is one that `whole` gives to what is not complete, of any path or of this one."""
    return path.name.startswith(f".{of.name}." if of else ".") and path.name.endswith((".tmp", ".old"))


def clear_leftovers(path: Path) -> None:
    """Remove what killed processes of this machine left of `path`; restore a folder that one had moved aside."""
    for place in (path.parent, path):
        for found in place.glob(f".{glob.escape(path.name)}.{_MACHINE}-*.*"):
            import psutil

            match = re.fullmatch(r"(\d+)\.(tmp|old)", found.name.rpartition("-")[2])
            if match is None or (int(match[1]) != os.getpid() and psutil.pid_exists(int(match[1]))):
                continue
            if match[2] == "old" and not path.exists():
                found.rename(path)
            else:
                remove(found)


def remove(path: Path) -> None:
    """Remove a file or folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def locked(path: Path, refusal: str) -> Iterator[None]:
    """Hold the lock file `path` during the block. The kernel releases it when the process ends, even by kill -9.

    Network file systems with locks (NFS) refuse processes of other machines too. Without locks, a warning is printed.

    Raises: UsageError with the message `refusal` if another process holds it.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise UsageError(refusal) from None
    except (NotImplementedError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        print(
            f"{path.parent} is on a file system without locks: make sure that no other process writes there.",
            file=sys.stderr,
        )
    try:
        yield
    finally:
        lock.release()


@contextmanager
def writing_alone(folder: Path) -> Iterator[None]:
    """Keep other processes from writing `folder` during the block. Raises: UsageError if one does."""
    path = lock_of(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path, f"another process writes {folder}. Wait for its end, or choose another folder."):
        try:
            yield
        finally:
            with suppress(OSError):  # Windows keeps a file that is open
                path.unlink()


def lock_of(folder: Path) -> Path:
    """The lock file of a folder that is written as a whole: beside it, or inside if it cannot be renamed."""
    is_fixed = folder.is_dir() and not is_replaceable(folder)
    return folder / ".lock" if is_fixed else folder.with_name(f".{folder.name}.lock")


def remove_if_empty(folder: Path) -> None:
    """Remove a folder, unless it has contents or cannot be removed."""
    with suppress(OSError):
        folder.rmdir()


def checkpoints_in(folder: Path) -> list[Path]:
    """All checkpoints of a folder, newest first."""
    found = (path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdecimal())
    return sorted(found, key=number_of, reverse=True)


def number_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


def give_usual_permissions(folder: Path) -> None:
    """Give the weights in a model folder the mode of other new files: safetensors lets only the owner read them.

    The folder's configuration (`config.json` or `adapter_config.json`) is a file with the usual mode.
    """
    usual = stat.S_IMODE(next(folder.glob("*config.json")).stat().st_mode)
    for path in folder.glob("*.safetensors"):
        path.chmod(usual)


def finite(value: Any) -> Any:
    """Replace NaN and infinities by None anywhere in `value`: JSON has no word for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, whole or not at all; non-finite numbers become null."""
    with whole(path) as temporary:
        temporary.write_text(
            json.dumps(finite(value), indent=2, allow_nan=False, ensure_ascii=False) + "\n", encoding="utf-8"
        )


def parse_json(text: str) -> Any:
    """`json.loads`, whose error is a JSONDecodeError also for integers and nesting beyond Python's limits."""
    try:
        return json.loads(text)
    except RecursionError:
        raise json.JSONDecodeError("it is nested too deeply", text, 0) from None
    except ValueError as error:
        if isinstance(error, json.JSONDecodeError):
            raise
        raise json.JSONDecodeError("an integer has too many digits", text, 0) from None


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises: UsageError naming the file when it is missing or is not JSON.
    """
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist. Check the folder's name.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid JSON ({error}). Make it again with the command that wrote it.") from None


def append_jsonl(path: Path, value: dict[str, Any]) -> None:
    """Add one line to a JSON Lines file; non-finite numbers become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite(value), allow_nan=False, ensure_ascii=False) + "\n")
    except OSError as error:
        error.filename = error.filename or str(path)  # that of a write does not name its file
        raise


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read a JSON Lines file, without a last line that a killed process cut off.

    Raises: UsageError naming a line that is damaged.
    """
    # Not splitlines: in a string JSON may have characters raw that Python takes for ends of lines, U+2028 for one.
    *lines, _ = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise UsageError(f"{path}, line {number}, is not JSON ({error}). Take that line out.") from None
    return rows


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows as JSON Lines, whole or not at all."""
    with whole(path) as temporary:
        temporary.touch()
        for row in rows:
            append_jsonl(temporary, row)


# ---- where things came from -------------------------------------------------------------------------------------


def sha256(path: Path) -> str:
    """The hexadecimal SHA-256 of a file, read in blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def made_by(inputs: Iterable[Path] = ()) -> dict[str, Any]:
    """How a result came to be: command, git commit, date, versions, SHA-256 of the model's code and each input file."""
    return {
        "command": command_line(),
        "commit": git_commit(),
        "model_code": model_code(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": versions(),
        "inputs": {str(path): sha256(path) for path in inputs},
    }


def model_code() -> dict[str, str]:
    """SHA-256 of the files of `model/`, whose code is saved with each model."""
    return {path.name: sha256(path) for path in sorted((Path(__file__).parent / "model").glob("*.py"))}


def command_line() -> str:
    """The command as it can be typed again from a checkout, without the folder of the program."""
    program = Path(sys.argv[0])
    door = "-m gpt2small_hf" if program.name == "__main__.py" else program.name
    return shlex.join(["python", *door.split(), *sys.argv[1:]])


def git_commit() -> str | None:
    """The commit of the checkout this package runs from, `-dirty` added when files differ; None outside a checkout."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        if not git("ls-files", Path(__file__).name):  # a checkout of something else that has us in its environment
            return None
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def processor_name() -> str:
    """Return the processor's name as its maker gives it, or its architecture where the system does not tell."""
    name = ""
    with suppress(OSError, subprocess.CalledProcessError):
        if sys.platform == "win32":
            import winreg

            with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, r"HARDWARE\DESCRIPTION\System\CentralProcessor\0") as key:
                name = str(winreg.QueryValueEx(key, "ProcessorNameString")[0])
        elif sys.platform == "darwin":
            words = ["sysctl", "-n", "machdep.cpu.brand_string"]
            name = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        else:
            found = re.search(r"^model name\s*:(.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
            name = found[1] if found else ""
    return " ".join(name.split()) or platform.machine()


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a run's numbers."""
    found = {"python": platform.python_version()}
    for name in ("gpt2small-hf", "torch", "transformers", "accelerate", "tokenizers", "tiktoken", "datasets"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


# ---- doors ------------------------------------------------------------------------------------------------------


_USERS_TO_MEND = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOSPC,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.EDQUOT,
    errno.EFBIG,
}


def disk_is_full(error: BaseException) -> bool:
    """Whether an error says that the disk takes no more: of a file, of PyTorch's writer, or of safetensors'."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    words = ("No space left", "File too large", "Disk quota exceeded", "PytorchStreamWriter failed", "unexpected pos")
    return any(word in str(error) for word in words)


def say(line: str) -> None:
    """One line on stderr, once: where several processes run the same, they end for the same reason."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(line, file=sys.stderr)


def open_door(main: Callable[[], None]) -> int:
    """Run a command's `main` and turn what a user can fix into one line on stderr.

    Returns: the exit status. 0 done, 2 bad input, 128 + n ended by signal n, others as the command says. Errors of the
        code keep their traceback.
    """
    try:
        main()
    except DoorError as error:
        say(f"{error.word}: {error}")
        return error.status
    except BrokenPipeError:  # whoever read along has seen enough: `… | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13
    except OSError as error:  # a folder that may not be written, a full disk: nothing in our code can mend these
        if error.errno not in _USERS_TO_MEND:
            raise
        print(
            f"error: {error.filename2 or error.filename or 'the disk'}: {error.strerror}. Choose another place.",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        say("interrupted.")
        return 130
    except Exception as error:  # tokenizers, safetensors and PyTorch have errors of their own for a full disk
        if not disk_is_full(error):
            raise
        print(f"error: the disk is full ({' '.join(str(error).split())}). Choose another place.", file=sys.stderr)
        return 2
    return 0
