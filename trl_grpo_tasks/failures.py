"""One-line messages for failures that the user can fix, shown instead of a traceback; failures that a run survives."""

from __future__ import annotations

import errno
import pickle
import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NO_ACCESS = (errno.EROFS, errno.EACCES, errno.EPERM)
_BROKEN = (errno.EIO, errno.EFBIG, errno.ESTALE)
# Messages of PyTorch's writer, whose errors carry no number, and mostly no reason.
_PYTORCH = ("PytorchStreamWriter failed writing", "unexpected pos", "iostream error", "open file failed")


def known_failure(error: BaseException) -> str | None:
    """Describe a full, failing or read-only disk or a rejected pickle file and what to do about it; None for any other
    error."""
    resume = "then repeat the command with --resume_from_checkpoint to continue from the last checkpoint"
    for one in _chain(error):
        number = _error_number(one)
        if number in _NO_SPACE:
            return f"no space left on the device ({first_line(one)}); free some space, {resume}"
        if number in _NO_ACCESS:
            return f"no access to a file or folder ({first_line(one)}); make it readable and writable, {resume}"
        if number in _BROKEN or _is_of_pytorch(one):
            return (
                f"a file could not be read or written ({first_line(one)}); check the free space, the limit on file "
                f"sizes (ulimit -f) and the disk, {resume}"
            )
        if isinstance(one, pickle.UnpicklingError):
            return (
                f"{_loaded_file(one) or 'a file of the model or checkpoint'} was not loaded: it contains Python "
                "objects other than weights, which can run code when loaded; use only files that you wrote yourself"
            )
    return None


def is_write_failure(error: BaseException) -> bool:
    """Whether an error that was raised while files were written comes from the file system: a full disk, a quota, a
    read-only folder, a file server that does not answer."""
    if isinstance(error, OSError) or _error_number(error) is not None:
        return True
    return any(_error_number(one) in _NO_SPACE + _NO_ACCESS + _BROKEN or _is_of_pytorch(one) for one in _chain(error))


class FailureNotice:
    """Prints the first of a series of failures that a run survives. A success ends the series."""

    def __init__(self, say: Callable[[str], Any] = tqdm.write):
        self._say = say
        self._is_failing = False

    def failed(self, message: str) -> None:
        if not self._is_failing:
            self._say(message)
        self._is_failing = True

    def succeeded(self) -> None:
        self._is_failing = False


def _error_number(error: BaseException) -> int | None:
    """The number that the operating system gave an error; None if it is not one of the operating system."""
    if isinstance(error, OSError):
        return error.errno
    of_rust = re.search(r"\(os error (\d+)\)", str(error))  # safetensors raises errors of its own type
    return int(of_rust[1]) if of_rust else None


def _is_of_pytorch(error: BaseException) -> bool:
    return any(words in str(error) for words in _PYTORCH)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and the errors that caused it, newest first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _loaded_file(error: BaseException) -> Any:
    """Return the path passed to `torch.load`, if the error was raised there."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == "load"]
    return next((frame.f_locals["f"] for frame in frames if isinstance(frame.f_locals.get("f"), str | Path)), None)


def first_line(error: BaseException) -> str:
    """Return the first non-empty line of an error's message, or its type name if there is no message."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
