"""Requests in words: a prompt of the user's file, by number, by id or by its own words, or any other prompt."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...task import Row

_NUMBER = re.compile(r"(?:row |#)([0-9]{1,9})", re.IGNORECASE)
_ID = re.compile(r"id (\S+)", re.IGNORECASE)


def find_row(text: str, rows: Sequence[Row]) -> dict[str, Any] | None:
    """Return the row of a file that `text` means: `row 3` or `#3`, `id x7`, or the words of its prompt.

    None for any other text. ValueError if there is no such number or id.
    """
    said = text.strip()
    if rows and (number := _NUMBER.fullmatch(said)):
        index = int(number[1])
        if not 1 <= index <= len(rows):
            raise ValueError(f"{said!r}: the file has rows 1 to {len(rows)}")
        return _understood(rows[index - 1], f"row {index} of the file")
    if any("id" in row for row in rows) and (name := _ID.fullmatch(said)):
        found = [row for row in rows if str(row.get("id")) == name[1]]
        if len(found) != 1:
            raise ValueError(f"{said!r}: {len(found)} rows of the file have this id; it must be one")
        return _understood(found[0], f"the row of the file with {said}")
    for index, row in enumerate(rows, 1):
        if row["prompt"][-1]["content"] == text:
            return _understood(row, f"row {index} of the file")
    return None


def _understood(row: Mapping[str, Any], place: str) -> dict[str, Any]:
    return {**row, "interpretation": f"{place}, judged by {', '.join(row['rewards']) or 'nothing'}"}
