"""Rows of a task: as its data set has them, or as a user wrote them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

from .base import Task
from .checks import nearest
from .score import Row


def rows_of(
    task: Task, split: str, size: int | None, seed: int, given: Any = None, say: Callable[[str], Any] | None = None
) -> list[dict[str, Any]]:
    """Return the rows of a split, or the rows `given` instead; ValueError if there are none.

    If the task has fewer than `size`, `say` is called with a line for people to read.
    """
    rows = task.dataset(split, size, seed) if given is None else list(given)
    if not rows:
        raise ValueError(f"task {task.name!r} has no rows in its {split!r} split")
    if say is not None and given is None and size is not None and len(rows) < size:
        say(f"The {split} split has {len(rows)} rows with these options, not the {size} asked for: all are used.")
    return rows


def checked_row(task: Task, given: Row) -> dict[str, Any]:
    """Return the row that a user wrote, completed by `Task.row_from`; ValueError if the task cannot use it."""
    row = task.row_from(given)
    try:
        task.unverifiable(row)
        task.canonical(row, "")
    except Exception as error:  # the row comes from the user, so that a task's code can fail in any way
        raise ValueError(
            f"task {task.name!r} cannot use this row ({type(error).__name__}: {error}); give a row like those of its "
            "data set"
        ) from error
    return row


def one_per_request(task: Task, rows: Iterable[Row]) -> list[Row]:
    """Return the first row of each request, in the order of the rows."""
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(task.request(row), row)
    return list(first.values())


def describe_rows(rows: int, requests: int) -> str:
    """Return "64 held-out rows", with the number of different requests where it differs."""
    different = f" ({requests} different request{'s' * (requests > 1)})" if requests != rows else ""
    return f"{rows} held-out rows{different}"


def short_hash(text: str) -> str:
    """Return 16 hexadecimal digits that stand for a text in files."""
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]


def check_editor(task: Task, name: str | None, constrain: bool) -> None:
    """Raise ValueError if the task has no such editor, or if the constraint makes it redundant."""
    if name is None:
        return
    if name not in task.editors:
        known = f"editors of task {task.name!r} are: {', '.join(task.editors)}" if task.editors else (
            f"task {task.name!r} has no editors")  # fmt: skip
        raise ValueError(f"unknown --editor {name!r}{nearest(name, task.editors)}; {known}")
    if constrain and name in task.redundant_editors:
        raise ValueError(
            f"--editor {name} is redundant with --constrain: the constraint never allows what this editor deletes; "
            "give --constrain false, or another editor"
        )
