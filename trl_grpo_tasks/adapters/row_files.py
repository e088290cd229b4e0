"""Rows of prompts from .json, .jsonl, .csv and .parquet files, and their split into training and test."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..files import check_local_path

SPLITS = ("train", "test")
SUFFIXES = (".json", ".jsonl", ".csv", ".parquet")
PlacedRow = tuple[str, dict[str, Any]]  # the location of a row ("prompts.jsonl, line 3") and its content


def read_file(path: Path, prompt_column: str) -> list[PlacedRow]:
    """Read the rows of a file by its suffix. An entry that is only text is the prompt. ValueError names the place."""
    if path.suffix.lower() == ".parquet":
        import pyarrow
        import pyarrow.parquet

        try:
            rows = pyarrow.parquet.read_table(path).to_pylist()
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            said = " ".join(str(error).split())
            raise ValueError(f"{path.name} is not a Parquet file, or is damaged: {said:.300}") from error
        return [(f"{path.name}, row {i}", row) for i, row in enumerate(rows, 1)]
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path.name} is not UTF-8 text: {error}") from error
    if path.suffix.lower() == ".csv":
        reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        rows = []
        try:
            for row in reader:
                if None in row:
                    raise ValueError(f"{path.name}, line {reader.line_num}: there are more cells than columns")
                rows.append((f"{path.name}, line {reader.line_num}", {k: v for k, v in row.items() if k and v}))
        except csv.Error as error:
            raise ValueError(f"{path.name}, line {reader.line_num}: {error}") from error
        return rows
    if path.suffix.lower() == ".jsonl":
        placed = [(f"{path.name}, line {i}", line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
        return [(place, _as_row(_parse(line, place), place, prompt_column)) for place, line in placed]
    entries = _parse(text, path.name)
    if isinstance(entries, dict):
        if not isinstance(entries.get("prompts"), list):
            raise ValueError(f'{path.name} must contain a list, or an object with a list under "prompts"')
        entries = entries["prompts"]
    if not isinstance(entries, list):
        raise ValueError(f"{path.name} must contain a list of prompts, got {type(entries).__name__}")
    places = [f"{path.name}, row {i}" for i in range(1, len(entries) + 1)]
    return [(place, _as_row(entry, place, prompt_column)) for place, entry in zip(places, entries, strict=True)]


def read_table(source: str | None, option: str) -> list[PlacedRow]:
    """Read the rows of the file that `option` names: JSON values with all columns of the file, and a `prompt`."""
    if not source:
        raise ValueError(f"pass {option} with a file of prompts that ends in {', '.join(SUFFIXES)}")
    check_local_path(source, option)
    path = Path(source).expanduser()
    if path.suffix.lower() not in SUFFIXES or not path.is_file():
        raise ValueError(f"{option} {source}: this is not a file that ends in {', '.join(SUFFIXES)}")
    placed = read_file(path, "prompt")
    if not placed:
        raise ValueError(f"{option} {source} contains no row")
    columns = dict.fromkeys(key for _, row in placed for key in row)
    return [(place, _checked({**dict.fromkeys(columns), **row}, place)) for place, row in placed]


def split_rows(placed: list[PlacedRow], test_fraction: float) -> dict[str, list[dict[str, Any]]]:
    """Split rows by their column `split`, or else by a hash of the prompt."""
    if not 0 <= test_fraction < 1:
        raise ValueError(f"--test_fraction {test_fraction} must be at least 0 and less than 1")
    if "split" not in placed[0][1]:
        return cut([row for _, row in placed], test_fraction)
    for place, row in placed:
        if row["split"] not in SPLITS:
            raise ValueError(f"{place}: the column 'split' must be train or test, got {row['split']!r:.60}")
    train, test = ([row for _, row in placed if row["split"] == split] for split in SPLITS)
    return {"train": without_prompts_of(train, test), "test": test}


def cut(rows: Iterable[dict[str, Any]], test_fraction: float) -> dict[str, list[dict[str, Any]]]:
    """Split rows into training and test by a hash of their prompt, so that equal prompts stay together."""
    by_prompt: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_prompt.setdefault(_prompt_key(row), []).append(row)
    tested = max(1, round(test_fraction * len(by_prompt))) if test_fraction > 0 and len(by_prompt) > 1 else 0
    in_test = set(sorted(by_prompt)[:tested])
    return {
        "train": [row for key, group in by_prompt.items() if key not in in_test for row in group],
        "test": [row for key, group in by_prompt.items() if key in in_test for row in group],
    }


def check_split(split: str) -> None:
    """Raise ValueError for a split that is neither train nor test."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; splits are: {', '.join(SPLITS)}")


def draw(rows: Mapping[str, list[dict[str, Any]]], split: str, size: int | None, seed: int) -> list[dict[str, Any]]:
    """Return `size` rows of a split, or all, in an order that depends on the seed."""
    check_split(split)
    drawn = list(rows[split])
    random.Random(f"{seed}-{split}").shuffle(drawn)
    return drawn[:size]


def without_prompts_of(train: Iterable[dict[str, Any]], test: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the training rows whose prompt is not in the test split."""
    tested = {_prompt_key(row) for row in test}
    return [row for row in train if _prompt_key(row) not in tested]


def _prompt_key(row: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(row["prompt"]).encode()).hexdigest()


def _parse(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f", line {error.lineno}" if "line" not in place else ""
        raise ValueError(f"{place}{line}: not JSON: {error.msg} (column {error.colno})") from error
    except RecursionError as error:
        raise ValueError(f"{place}: JSON nested too deeply") from error


def _as_row(entry: Any, place: str, prompt_column: str) -> dict[str, Any]:
    if isinstance(entry, str):
        return {prompt_column: entry}
    if isinstance(entry, dict):
        return entry
    raise ValueError(f"{place}: a prompt must be text or an object with a {prompt_column!r}, got {entry!r:.60}")


def _checked(row: dict[str, Any], place: str) -> dict[str, Any]:
    prompt = row.get("prompt")
    is_chat = isinstance(prompt, list) and all(
        isinstance(m, Mapping) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in prompt
    )
    if not prompt or not (isinstance(prompt, str) or is_chat):
        raise ValueError(f"{place}: 'prompt' must be text, or messages with 'role' and 'content'; got {prompt!r:.60}")
    for key, value in row.items():
        missing = value != value  # NaN, as pandas writes it
        try:
            row[key] = None if missing else json.loads(json.dumps(value))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{place}: column {key!r} cannot be written as JSON: {error}") from error
    return row
