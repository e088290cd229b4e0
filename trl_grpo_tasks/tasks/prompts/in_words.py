"""Requests in words: a known prompt, by number, by id or by its own words, or any other prompt."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...task import Row

_NUMBER = re.compile(r"(?:row |#)([0-9]{1,9})", re.IGNORECASE)
_ID = re.compile(r"id (\S+)", re.IGNORECASE)


def find_row(text: str, rows: Sequence[Row], source: str) -> dict[str, Any] | None:
    """Return the row that `text` means: `row 3` or `#3`, `id x7`, or the words of its prompt.

    None for any other text. ValueError if there is no such number or id. `source` says where the rows are from.
    """
    said = text.strip()
    if rows and (number := _NUMBER.fullmatch(said)):
        index = int(number[1])
        if not 1 <= index <= len(rows):
            raise ValueError(f"{said!r}: the rows of {source} are 1 to {len(rows)}")
        return _understood(rows[index - 1], f"row {index} of {source}")
    if any("id" in row for row in rows) and (name := _ID.fullmatch(said)):
        found = [row for row in rows if str(row.get("id")) == name[1]]
        if len(found) != 1:
            raise ValueError(f"{said!r}: {len(found)} rows of {source} have this id; it must be one")
        return _understood(found[0], f"the row of {source} with {said}")
    for index, row in enumerate(rows, 1):
        if row["prompt"][-1]["content"] == text:
            return _understood(row, f"row {index} of {source}")
    return None


def _understood(row: Mapping[str, Any], place: str) -> dict[str, Any]:
    return {**row, "interpretation": f"{place}, judged by {', '.join(row['rewards']) or 'nothing'}"}
