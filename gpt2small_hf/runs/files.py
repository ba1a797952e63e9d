"""Atomic writes, locks, hashes, and JSON files."""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import math
import os
import platform
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gpt2small_hf.errors import UsageError, disk_is_full


@contextmanager
def atomic_write(path: Path, *, flush: bool = True) -> Iterator[Path]:
    """Yield a temporary path next to `path`; rename what was written there to `path` unless an error was raised.

    Files at `path` are therefore complete, with `flush` also after a power failure. An existing one is replaced.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    clear_leftovers(path)
    # The parent of a folder that cannot be renamed may be another disk, or not writable.
    place = path if path.is_dir() and not is_replaceable(path) else path.parent
    temporary = place / _beside(path, "tmp")
    try:
        yield temporary
        if flush:
            sync(temporary)
        replace_path(temporary, path)
        if flush:
            sync(path.parent, contents=False)
    except Exception as error:
        if not disk_is_full(error):
            raise
        # Errors of a write do not name the file, and libraries raise different classes.
        number = error.errno if isinstance(error, OSError) else errno.ENOSPC
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise OSError(number, reason, str(path)) from error
    finally:
        remove(temporary)


def replace_path(finished: Path, path: Path, *, is_partly_moved: bool = False) -> None:
    """Rename a finished file or folder to `path`, replacing what exists there.

    In a folder that cannot be renamed, the contents are replaced, and the file that marks it as complete is moved last.
    After a kill during the move, call again with `is_partly_moved`.
    """
    if not path.is_dir():
        finished.replace(path)
    elif is_replaceable(path):
        # A folder cannot be replaced atomically: the old one is renamed first, so one of the two always exists.
        aside = path.with_name(_beside(path, "old"))
        path.rename(aside)
        finished.rename(path)
        shutil.rmtree(aside)
    else:
        for old in [] if is_partly_moved else sorted(path.iterdir(), key=_marks_complete):
            if old != finished and old.name != ".lock":
                remove(old)
        for new in sorted(finished.iterdir(), key=_marks_complete):
            new.rename(path / new.name)
        finished.rmdir()


def is_replaceable(folder: Path) -> bool:
    """Whether a folder can be renamed: not a link, mount point or working folder, and its parent is writable."""
    fixed = folder.is_symlink() or os.path.ismount(folder) or folder.samefile(Path())
    return not fixed and os.access(folder.parent, os.W_OK)


def _marks_complete(path: Path) -> bool:
    return path.name in ("meta.json", "config.json")


def sync(path: Path, *, contents: bool = True) -> None:
    """Flush a file, or a folder with its contents, to disk: a power failure may keep a new name and lose the data."""
    on_windows = os.name == "nt"  # where folders cannot be opened, and only writable files flushed
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
    """Whether a path is a temporary name of `atomic_write`, for any path or for `of`."""
    return path.name.startswith(f".{of.name}." if of else ".") and path.name.endswith((".tmp", ".old"))


def clear_leftovers(path: Path) -> None:
    """Remove temporary files that killed processes of this machine left; restore a folder that one had renamed."""
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
def exclusive_writer(folder: Path) -> Iterator[None]:
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
    """Return the lock file of a folder: next to it, or inside if it cannot be renamed."""
    is_fixed = folder.is_dir() and not is_replaceable(folder)
    return folder / ".lock" if is_fixed else folder.with_name(f".{folder.name}.lock")


def remove_if_empty(folder: Path) -> None:
    """Remove a folder, unless it has contents or cannot be removed."""
    with suppress(OSError):
        folder.rmdir()


def set_default_permissions(folder: Path) -> None:
    """Give weight files the default permissions: safetensors creates them readable by the owner only.

    The folder's configuration (`config.json` or `adapter_config.json`) is a file with the usual mode.
    """
    usual = stat.S_IMODE(next(folder.glob("*config.json")).stat().st_mode)
    for path in folder.glob("*.safetensors"):
        path.chmod(usual)


def finite(value: Any) -> Any:
    """Replace NaN and infinities by None anywhere in `value`: JSON cannot represent them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically; non-finite numbers become null."""
    with atomic_write(path) as temporary:
        temporary.write_text(
            json.dumps(finite(value), indent=2, allow_nan=False, ensure_ascii=False) + "\n", encoding="utf-8"
        )


def parse_json(text: str) -> Any:
    """Parse JSON. Raises: JSONDecodeError also for integers and nesting beyond Python's limits."""
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
        error.filename = error.filename or str(path)  # errors of a write do not name the file
        raise


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read a JSON Lines file, without a last line that a killed process cut off.

    Raises: UsageError naming a line that is damaged.
    """
    # Not splitlines: JSON strings may contain characters that Python treats as line ends, such as U+2028.
    *lines, _ = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise UsageError(f"{path}, line {number}, is not JSON ({error}). Remove that line.") from None
    return rows


def drop_torn_line(path: Path) -> None:
    """Cut off a last line that a killed process did not finish, so that lines can be appended."""
    with path.open("rb+") as file:
        file.truncate(file.read().rfind(b"\n") + 1)


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows as JSON Lines, atomically."""
    with atomic_write(path) as temporary:
        temporary.touch()
        for row in rows:
            append_jsonl(temporary, row)


def sha256(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def check_writable(flag: str, folder: Path) -> None:
    """Check that a folder can be created, or written to if it exists, without leaving files.

    Raises: UsageError naming `flag`, the folder and the reason.
    """
    try:
        str(folder).encode()  # it is written into files
        with suppress(FileNotFoundError):
            folder.lstat()
            if not folder.is_dir():
                raise FileExistsError(errno.EEXIST, "a file or a broken link has that name")
        nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        # Permissions do not suffice: root has all of them, but cannot write in /proc or on a read-only disk.
        Path(tempfile.mkdtemp(prefix=".", suffix=".tmp", dir=nearest)).rmdir()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{flag} {folder} cannot be written: {reason}. Choose another place.") from None
