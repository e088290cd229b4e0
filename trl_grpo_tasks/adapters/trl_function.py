"""`--task trl:module:function`: a TRL reward function and a file of prompts as a task."""

from __future__ import annotations

import functools
import inspect
import json
import math
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..registry import load_module
from ..task import NoAnswerError, Row, Score, TinySpec, option
from . import RewardOptions, RewardTask, wait_for
from .row_files import draw, read_table, split_rows

RESERVED = ("prompt", "completion", "completion_ids")  # columns that TRL does not pass on


@dataclass(frozen=True)
class TrlOptions(RewardOptions):
    """Options of a task made from a TRL reward function."""

    dataset: str | None = option(None, "A .json, .jsonl, .csv or .parquet file with a column 'prompt'.")
    gold_column: str = option(
        "gold", "Column with answers that succeed, for a cold start and 'check', if there is one."
    )
    test_fraction: float = option(0.1, "Fraction of prompts held out for testing if there is no column 'split'.")


class TrlFunctionTask(RewardTask):
    """Scores each completion by calling the function as TRL does, with lists of one prompt and one completion."""

    version: ClassVar[str] = "2"
    Options: ClassVar[type] = TrlOptions
    function: ClassVar[Callable[..., Any]]

    def __init__(self, options: Any = None):
        super().__init__(options)
        self.weights = {self.name: 1.0}
        self._rows = split_rows(read_table(self.options.dataset, "--dataset"), self.options.test_fraction)
        columns = {key for rows in self._rows.values() for row in rows for key in row if key not in RESERVED}
        self._passed = parameters_of(type(self).function, self.name, columns)

    def dataset(self, split: str, size: int | None, seed: int) -> list[dict[str, Any]]:
        return draw(self._rows, split, size, seed)

    def score(self, row: Row, completion: str) -> Score | None:
        """Return the function's reward; None if that is no finite number. Its exceptions propagate to the caller."""
        is_chat = not isinstance(row["prompt"], str)
        answer = [{"role": "assistant", "content": completion}] if is_chat else completion
        reward = called(type(self).function, self._passed, row, answer)
        return self.score_of({self.name: math.nan if reward is None else reward})

    def gold(self, row: Row) -> str:
        if not isinstance(gold := row.get(self.options.gold_column), str):
            raise NoAnswerError(f"this row has no answer in the column {self.options.gold_column!r} (--gold_column)")
        return gold

    def tiny(self) -> TinySpec:
        texts = [json.dumps(row, ensure_ascii=False) for rows in self._rows.values() for row in rows]
        return TinySpec(sorted({*string.printable[:-5], "\n", *"".join(texts)}), context=2048)


@functools.cache
def task_class(named: str) -> type[TrlFunctionTask]:
    """Return the task class for `module:function`, where the module may also be a .py file."""
    name, function = member("trl", named, "reward", "trl:trl.rewards:think_format_reward")
    module_name = named.rpartition(":")[0]
    if not callable(function) or inspect.isclass(function):
        found = "nothing" if function is None else repr(function)
        raise ValueError(f"task 'trl:{named}': {module_name} must define a reward function {name!r}, found {found}")
    description = f"TRL reward function {name} of {module_name}"
    members = {"name": name, "description": description, "function": staticmethod(function)}
    return type("TrlTask", (TrlFunctionTask,), members)


def member(prefix: str, named: str, kind: str, example: str) -> tuple[str, Any]:
    """Return the name and the value of `module:name`; None as the value if the module has no such name."""
    module_name, _, name = named.rpartition(":")
    if not module_name or not name.isidentifier():
        raise ValueError(f"task '{prefix}:{named}' must be {prefix}:module:{kind}, such as {example}")
    return name, getattr(load_module(module_name, kind), name, None)


def called(
    function: Callable[..., Any],
    passed: set[str] | None,
    row: Row,
    completion: Any,
    more: Mapping[str, Any] | None = None,
) -> float | None:
    """Return the reward of a completion from a function that is called as TRL does, with the parameters in `passed`,
    or with all if that is None."""
    given: dict[str, Any] = {key: [value] for key, value in row.items() if key not in RESERVED} | dict(more or {})
    given |= {"prompts": [row["prompt"]], "completions": [completion], "log_extra": _ignore, "log_metric": _ignore}
    if passed is not None:
        given = {key: value for key, value in given.items() if key in passed}
    rewards = function(**given)
    if inspect.isawaitable(rewards):
        rewards = wait_for(rewards)
    if len(rewards) != 1:
        raise ValueError(
            f"{getattr(function, '__name__', function)} returned {len(rewards)} rewards for one completion"
        )
    return None if rewards[0] is None else float(rewards[0])


def parameters_of(function: Callable[..., Any], name: str, columns: set[str]) -> set[str] | None:
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
