"""`--task trl:module:function`: a TRL reward function and a file of prompts as a task."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import math
import random
import string
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from ..registry import load_module
from ..task import NoAnswerError, Row, Score, Task, TinySpec, option
from .row_files import SPLITS, read_table, split_rows

RESERVED = ("prompt", "completion", "completion_ids")  # columns that TRL does not pass on


@dataclass(frozen=True)
class TrlOptions:
    """Options of a task made from a TRL reward function."""

    dataset: str | None = option(None, "A .json, .jsonl, .csv or .parquet file with a column 'prompt'.")
    success_at: float = option(1.0, "A completion succeeds if its reward is at least this.")
    gold_column: str = option(
        "gold", "Column with answers that succeed, for a cold start and 'check', if there is one."
    )
    test_fraction: float = option(0.1, "Fraction of prompts held out for testing if there is no column 'split'.")


class TrlFunctionTask(Task):
    """Scores each completion by calling the function as TRL does, with lists of one prompt and one completion."""

    version: ClassVar[str] = "1"
    Options: ClassVar[type] = TrlOptions
    function: ClassVar[Callable[..., Any]]

    def __init__(self, options: Any = None):
        super().__init__(options)
        self.weights = {self.name: 1.0}
        if not math.isfinite(self.options.success_at):
            raise ValueError(f"--success_at {self.options.success_at} must be a number")
        self._rows = split_rows(read_table(self.options.dataset, "--dataset"), self.options.test_fraction)
        columns = {key for rows in self._rows.values() for row in rows for key in row if key not in RESERVED}
        self._passed = _parameters(type(self).function, self.name, columns)
        self._loop: asyncio.AbstractEventLoop | None = None

    def dataset(self, split: str, size: int | None, seed: int) -> list[dict[str, Any]]:
        if split not in SPLITS:
            raise ValueError(f"unknown split {split!r}; splits are: train, test")
        rows = list(self._rows[split])
        random.Random(f"{seed}-{split}").shuffle(rows)
        return rows[:size]

    def score(self, row: Row, completion: str) -> Score | None:
        """Return the function's reward; None if it returned None or NaN. Its exceptions propagate to the caller."""
        is_chat = not isinstance(row["prompt"], str)
        given: dict[str, Any] = {key: [value] for key, value in row.items() if key not in RESERVED}
        given |= {"prompts": [row["prompt"]], "log_extra": _ignore, "log_metric": _ignore}
        given["completions"] = [[{"role": "assistant", "content": completion}] if is_chat else completion]
        if self._passed is not None:
            given = {key: value for key, value in given.items() if key in self._passed}
        rewards = type(self).function(**given)
        if inspect.isawaitable(rewards):
            rewards = self._wait_for(rewards)
        if len(rewards) != 1:
            raise ValueError(f"{self.name} returned {len(rewards)} rewards for one completion")
        if rewards[0] is None or math.isnan(rewards[0]):
            return None
        reward = float(rewards[0])
        success = reward >= self.options.success_at
        reason = "" if success else f"the reward {reward:g} is below {self.options.success_at:g}"
        return self.make_score({self.name: reward}, valid=True, success=success, reason=reason)

    def gold(self, row: Row) -> str:
        if not isinstance(gold := row.get(self.options.gold_column), str):
            raise NoAnswerError(f"this row has no answer in the column {self.options.gold_column!r} (--gold_column)")
        return gold

    def bad(self, row: Row) -> str:
        for text in ("", "I do not know."):
            score = self.score(row, text)
            if score is not None and not score.success:
                return text
        raise NoAnswerError("the function accepts an empty answer and 'I do not know.', or cannot score them")

    def tiny(self) -> TinySpec:
        texts = [json.dumps(row, ensure_ascii=False) for rows in self._rows.values() for row in rows]
        return TinySpec(sorted({*string.printable[:-5], "\n", *"".join(texts)}), context=2048)

    def _wait_for(self, rewards: Any) -> Any:
        """Run a coroutine in a loop that stays, because clients that a function keeps belong to their loop."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, daemon=True, name="async-reward").start()
        return asyncio.run_coroutine_threadsafe(rewards, self._loop).result()


@functools.cache
def task_class(named: str) -> type[TrlFunctionTask]:
    """Return the task class for `module:function`, where the module may also be a .py file."""
    module_name, _, name = named.rpartition(":")
    if not module_name or not name.isidentifier():
        raise ValueError(
            f"task 'trl:{named}' must be trl:module:function, such as trl:trl.rewards:think_format_reward"
        )
    function = getattr(load_module(module_name, "reward"), name, None)
    if not callable(function) or inspect.isclass(function):
        found = "nothing" if function is None else repr(function)
        raise ValueError(f"task 'trl:{named}': {module_name} must define a reward function {name!r}, found {found}")
    description = f"TRL reward function {name} of {module_name}"
    members = {"name": name, "description": description, "function": staticmethod(function)}
    return type("TrlTask", (TrlFunctionTask,), members)


def _parameters(function: Callable[..., Any], name: str, columns: set[str]) -> set[str] | None:
    """Return the parameters that are passed, None for all. ValueError if the function needs one that there is not."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None  # a built-in without a signature
    available = {"prompts", "completions", "log_extra", "log_metric", *columns}
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if missing := [p.name for p in named if p.default is p.empty and p.name not in available]:
        found = ", ".join(sorted(columns)) or "none but the prompt"
        raise ValueError(
            f"{name} needs {missing[0]!r}, which is not a column of the data set ({found}); completion_ids, "
            "trainer_state and environments are not passed, because completions are scored one by one outside the "
            "trainer"
        )
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return None if takes_all else {p.name for p in named}


def _ignore(*_: Any) -> None:
    """Stand in for log_extra and log_metric: logs come from the score."""
