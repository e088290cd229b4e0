"""Reading of requests for `solve`: a text, a row, or a file of them. Mistakes are found before a model is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..task import Row, Task, checked_row, printable

SUFFIXES = (".txt", ".jsonl")


class Request(NamedTuple):
    """What was asked for, and the row of the task that it means."""

    given: str | Row
    row: dict[str, Any]

    def __str__(self) -> str:
        """The request in one line that is safe to print."""
        return printable(self.given if isinstance(self.given, str) else json.dumps(self.given, ensure_ascii=False))


def read_requests(task: Task, text: str | None, file: str | None, row: str | None) -> list[Request]:
    """Read the requests of exactly one of the options --text, --requests and --row.

    ValueError if something is not understood; for a file, it names the line.
    """
    given = [name for name, value in (("--text", text), ("--requests", file), ("--row", row)) if value is not None]
    if len(given) != 1:
        wrong = f"{' and '.join(given)} exclude each other" if given else "there is no request"
        raise ValueError(f"{wrong}; give one of --text TEXT, --requests FILE and --row JSON")
    if text is not None:
        return [_of_text(task, text)]
    if row is not None:
        try:
            return [_of_json(task, row)]
        except ValueError as error:
            raise ValueError(f"--row: {error}") from error
    assert file is not None
    return _of_file(task, Path(file))


def _of_file(task: Task, path: Path) -> list[Request]:
    if path.suffix not in SUFFIXES:
        raise ValueError(f"--requests {path}: the name must end in {' or '.join(SUFFIXES)}")
    if not path.is_file():
        raise ValueError(f"--requests {path}: this file does not exist")
    read: Callable[[Task, str], Request] = _of_json if path.suffix == ".jsonl" else _of_text
    requests = []
    # Only "\n" separates lines: a request may contain other characters at which splitlines() would cut it.
    for number, line in enumerate(path.read_text(encoding="utf-8-sig", errors="replace").split("\n"), 1):
        if line.strip():
            try:
                requests.append(read(task, line.strip()))
            except ValueError as error:
                raise ValueError(printable(f"{path}, line {number}: {error}")) from error
    if not requests:
        raise ValueError(f"--requests {path} contains no request")
    return requests


def _of_text(task: Task, text: str) -> Request:
    return Request(text, task.row_of(text))


def _of_json(task: Task, text: str) -> Request:
    """Read a row, or an object whose only entry is a text."""
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(entry, Mapping):
        raise ValueError(f'must be a row, an object with a "prompt", or {{"text": "..."}}, not {text[:60]!r}')
    if set(entry) == {"text"} and isinstance(entry["text"], str):
        return _of_text(task, entry["text"])
    return Request(entry, checked_row(task, entry))
