"""A task's rows as the data set that TRL trains on, and held-out rows for comparing models."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from functools import partial
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


def task_datasets(task: Task, args: Any, train_rows: Any, eval_rows: Any) -> tuple[Dataset, Any]:
    """The data sets for training and evaluation, from rows that were given or from the task's own. The second is a
    dictionary of them where several were given, and None where nothing is evaluated."""
    train = task_dataset(task, "train", args.train_rows, args.seed, train_rows)
    test = partial(task_dataset, task, "test", args.eval_rows, args.seed)
    if eval_rows is None and args.load_best_model_at_end:
        _, eval_rows = split_held_out(task, args.eval_rows, args.seed)
    if isinstance(eval_rows, Mapping):
        return train, {name: test(rows) for name, rows in eval_rows.items()}
    return train, test(eval_rows) if eval_rows is not None or args.eval_strategy != "no" else None


def split_held_out(
    task: Task, size: int | None, seed: int, say: Callable[[str], Any] | None = None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return held-out rows to report, and rows to compare models on. They share no request.

    Where the task has no requests beyond `size` rows, a random half of them is for comparing, and `say` is called with
    a line for people to read. ValueError if there is only one.
    """
    reported = rows_of(task, "test", size, seed, say=say)
    requests = list(dict.fromkeys(map(task.request, reported)))
    more = [] if size is None else rows_of(task, "test", 2 * size, seed)
    taken = set(requests)
    compared = [row for row in more if task.request(row) not in taken][:size]
    if not compared:
        if len(requests) == 1:
            raise ValueError(
                f"best_by compares models on other held-out rows than those that are reported, and task {task.name!r} "
                "has only one held-out request; leave best_by out"
            )
        chosen = set(random.Random(seed).sample(requests, len(requests) // 2))
        compared = [row for row in reported if task.request(row) in chosen]
        reported = [row for row in reported if task.request(row) not in chosen]
        if say is not None:
            say(
                f"--best_by compares models on {len(compared)} held-out rows, and {len(reported)} are left for the "
                "evaluation: the task has no others (a smaller --eval_rows leaves some)"
            )
    return reported, compared
