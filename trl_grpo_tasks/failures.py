"""Failures of a run that the user can mend, as one line instead of a traceback."""

from __future__ import annotations

import errno
import pickle
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# What safetensors and PyTorch's writers say where the system says ENOSPC.
_NO_SPACE = ("No space left on device", "PytorchStreamWriter failed writing", "unexpected pos", "iostream error")


def known_failure(error: BaseException) -> str | None:
    """What happened and what to do, for a full disk or a pickle that is refused; None for any other error."""
    for one in _chain(error):
        if _is_out_of_space(one):
            return (
                f"no space left on the device ({first_line(one)}); free some space, then continue from the last "
                "checkpoint: the same command with --resume_from_checkpoint"
            )
        if isinstance(one, pickle.UnpicklingError):
            return (
                f"{_loaded_file(one) or 'a file of the model or checkpoint'} is refused: it holds Python objects "
                "other than weights, which could run code when loaded; use a file that you wrote yourself"
            )
    return None


def _is_out_of_space(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return any(words in str(error) for words in _NO_SPACE)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and those from which it came."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _loaded_file(error: BaseException) -> Any:
    """What `torch.load` was given, if the error came from there."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == "load"]
    return next((frame.f_locals["f"] for frame in frames if isinstance(frame.f_locals.get("f"), str | Path)), None)


def first_line(error: BaseException) -> str:
    """The first line of what an error says."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
