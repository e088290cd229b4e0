"""A task's rows as the data set that TRL trains on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from datasets import Dataset

from ..task import Task, rows_of


def task_dataset(task: Task, split: str, size: int | None, seed: int, rows: Any = None) -> Dataset:
    """Rows of a task (or `rows`, if given) as a data set with the prompt and the row as JSON; Arrow columns would
    merge the keys of nested rows."""
    if isinstance(rows, Dataset) and {"prompt", "row", "index"} <= set(rows.column_names):
        return rows
    rows = rows_of(task, split, size, seed, rows)
    wrong = next((row for row in rows if not (isinstance(row, Mapping) and "prompt" in row)), None)
    if wrong is not None:
        raise ValueError(f"rows of task {task.name!r} are dictionaries with a 'prompt', but one is {wrong!r:.80}")
    return Dataset.from_dict(
        {
            "prompt": [row["prompt"] for row in rows],
            "row": [json.dumps(row, ensure_ascii=False) for row in rows],
            "index": list(range(len(rows))),
        }
    )
