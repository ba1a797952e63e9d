"""Errors that a command prints as one line, and the exit status of each."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable


class CommandError(Exception):
    """An error that a command prints as one line, after `word`, before it exits with `status`."""

    word = "error"
    status = 1


class UsageError(CommandError):
    """An error that a user can fix: what is wrong, the value found, the value allowed, the fix."""

    status = 2


class RunStoppedError(CommandError):
    """Training cannot continue: the model no longer learns, or cannot be saved."""

    word, status = "stopped", 3


class RunInterruptedError(CommandError):
    """A signal ended training, after a checkpoint was saved."""

    word = "interrupted"

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.status = 128 + signal


_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_USER_FIXABLE = {*_DISK_FULL, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG}


def disk_is_full(error: BaseException) -> bool:
    """Return whether an error of a file, of PyTorch's writer or of safetensors means that the disk is full."""
    if isinstance(error, OSError):
        return error.errno in _DISK_FULL
    words = ("No space left", "File too large", "Disk quota exceeded", "PytorchStreamWriter failed", "unexpected pos")
    return any(word in str(error) for word in words)


def print_stderr(line: str) -> None:
    """Print a line on stderr, on rank 0 only."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(line, file=sys.stderr)


def run_command(main: Callable[[], None]) -> int:
    """Run a command's `main`, and print an error that a user can fix as one line on stderr.

    Returns: the exit status: 0 done, 2 invalid input, 128 + n ended by signal n, or the status of the `CommandError`.
        All other errors keep their traceback.
    """
    try:
        main()
    except CommandError as error:
        print_stderr(f"{error.word}: {error}")
        return error.status
    except BrokenPipeError:  # the reader has closed the pipe: `… | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13
    except KeyboardInterrupt:
        print_stderr("interrupted.")
        return 130
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _USER_FIXABLE:
            what = f"{error.filename2 or error.filename or 'the disk'}: {error.strerror}"
        elif disk_is_full(error):  # tokenizers, safetensors and PyTorch raise errors of their own
            what = f"the disk is full ({' '.join(str(error).split())})"
        else:
            raise
        print(f"error: {what}. Choose another place.", file=sys.stderr)
        return 2
    return 0
