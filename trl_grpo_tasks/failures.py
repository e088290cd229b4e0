"""One-line messages for failures that the user can fix, shown instead of a traceback; failures that a run survives."""

from __future__ import annotations

import errno
import pickle
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

# Messages of the safetensors and PyTorch writers when the disk is full; their errors carry no errno.
_NO_SPACE = ("No space left on device", "PytorchStreamWriter failed writing", "unexpected pos", "iostream error")


def known_failure(error: BaseException) -> str | None:
    """Describe a full disk, a read-only folder or a rejected pickle file and what to do about it; None for any other
    error."""
    for one in _chain(error):
        if _is_out_of_space(one):
            return (
                f"no space left on the device ({first_line(one)}); free some space, then repeat the command with "
                "--resume_from_checkpoint to continue from the last checkpoint"
            )
        if isinstance(one, OSError) and one.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            return (
                f"no access to a file or folder ({first_line(one)}); make it readable and writable, then repeat the "
                "command with --resume_from_checkpoint to continue from the last checkpoint"
            )
        if isinstance(one, pickle.UnpicklingError):
            return (
                f"{_loaded_file(one) or 'a file of the model or checkpoint'} was not loaded: it contains Python "
                "objects other than weights, which can run code when loaded; use only files that you wrote yourself"
            )
    return None


def is_write_failure(error: BaseException) -> bool:
    """Whether an error that was raised while files were written comes from the file system: a full disk, a read-only
    folder, a file server that does not answer."""
    return isinstance(error, OSError) or any(map(_is_out_of_space, _chain(error)))


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


def _is_out_of_space(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return any(words in str(error) for words in _NO_SPACE)


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
