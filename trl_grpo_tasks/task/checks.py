"""Checks and wordings that tasks, options and commands share."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Collection, Iterable
from pathlib import Path

from .score import Row


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'brick'?)` for an error about an unknown name, or "" if no known name is similar."""
    near = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    """Raise ValueError if the value of the option `name` is not one of its choices. A Literal type would be
    checked on the command line only, and its message names no nearest choice."""
    if value not in choices:
        raise ValueError(f"unknown --{name} {value!r}{nearest(value, choices)}; choose from: {', '.join(choices)}")


def check_whole(row: Row, name: str, least: int, most: int) -> None:
    """Raise ValueError unless the entry `name` of a row is a whole number from `least` to `most`."""
    value = row.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"the {name!r} of a row must be a whole number from {least} to {most}, not {value!r:.60}")


def check_one_of(row: Row, name: str, choices: Collection[str]) -> None:
    """Raise ValueError unless the entry `name` of a row is one of `choices`."""
    value = row.get(name)
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"the {name!r} of a row must be one of {', '.join(choices)}, not {value!r:.60}")


def check_text(row: Row, name: str) -> None:
    """Raise ValueError unless the entry `name` of a row is a text, or None, or missing."""
    if not isinstance(row.get(name), str | None):
        raise ValueError(f"the {name!r} of a row must be a text, not {row[name]!r:.60}")


def printable(text: str) -> str:
    """Escape control characters in text from a model or a file, so that it is safe to print to a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def describe_error(error: Exception, path: str | Path) -> str:
    """Describe an error raised by a task's code in one line, with the innermost line number in the file `path`."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    if isinstance(error, SyntaxError):
        lines, error = [error.lineno], SyntaxError(f"{error.msg}: {(error.text or '').strip()}")
    return f"{type(error).__name__}: {error}{f' (line {lines[-1]})' if lines else ''}"
