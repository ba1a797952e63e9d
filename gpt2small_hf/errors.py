"""Errors that a command prints as one line, and the exit status of each."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable


class CommandError(Exception):
    """An end that is no fault of the code. Doors print it as one line, after `word`, and exit with `status`."""

    word = "error"
    status = 1


class UsageError(CommandError):
    """Something the user can fix; the line says what, why and what to do."""

    status = 2


class RunStoppedError(CommandError):
    """Training that cannot go on: it no longer learns, or cannot be saved."""

    word, status = "stopped", 3


class RunInterruptedError(CommandError):
    """Training that a signal ended, after it was saved."""

    word = "interrupted"

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.status = 128 + signal


_USER_FIXABLE = {
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


def print_stderr(line: str) -> None:
    """One line on stderr, once: where several processes run the same, they end for the same reason."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(line, file=sys.stderr)


def run_command(main: Callable[[], None]) -> int:
    """Run a command's `main` and turn what a user can fix into one line on stderr.

    Returns: the exit status. 0 done, 2 bad input, 128 + n ended by signal n, others as the command says. Errors of the
        code keep their traceback.
    """
    try:
        main()
    except CommandError as error:
        print_stderr(f"{error.word}: {error}")
        return error.status
    except BrokenPipeError:  # whoever read along has seen enough: `… | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13
    except OSError as error:  # a folder that may not be written, a full disk: no fix is in our code
        if error.errno not in _USER_FIXABLE:
            raise
        print(
            f"error: {error.filename2 or error.filename or 'the disk'}: {error.strerror}. Choose another place.",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print_stderr("interrupted.")
        return 130
    except Exception as error:  # tokenizers, safetensors and PyTorch have errors of their own for a full disk
        if not disk_is_full(error):
            raise
        print(f"error: the disk is full ({' '.join(str(error).split())}). Choose another place.", file=sys.stderr)
        return 2
    return 0
