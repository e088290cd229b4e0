"""Errors of commands as one line; with `--debug`, which every command takes, after the full traceback."""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

DEBUG = "--debug"
THEIR_VALUES = ("underflow_overflow", "tpu_metrics_debug")  # of transformers' option of the same name, which has one
_shows_tracebacks = ContextVar("shows_tracebacks", default=False)


def takes_debug(command: Callable[..., int]) -> Callable[..., int]:
    """Let a command, a function of its words, take --debug. Without words, they are those of the command line."""

    @functools.wraps(command)
    def with_debug(argv: Sequence[str] | None = None, *args: Any, **kwargs: Any) -> int:
        words = list(sys.argv[1:] if argv is None else argv)
        pairs = zip(words, [*words[1:], ""], strict=False)
        others = [word for word, after in pairs if word != DEBUG or after in THEIR_VALUES]
        before = _shows_tracebacks.set(_shows_tracebacks.get() or len(others) < len(words))
        try:
            return command(others, *args, **kwargs)
        finally:
            _shows_tracebacks.reset(before)

    return with_debug


def failed(error: BaseException, status: int, message: str = "") -> int:
    """Print an error and return the exit status. If no `raise` statement made the error, such as the ValueError of
    int("x"), it is likely a bug, and the line says that --debug shows its place."""
    if _shows_tracebacks.get():
        traceback.print_exception(error)
    elif not message:
        places = traceback.extract_tb(error.__traceback__)
        if places and not (places[-1].line or "raise").startswith("raise"):
            message = f"{error} ({type(error).__name__}; {DEBUG} shows where)"
    print(f"error: {message or error}", file=sys.stderr)
    return status
