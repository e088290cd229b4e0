"""`--task trl_env:module:name`: an environment class, or a list of tools, as TRL's GRPOTrainer takes them."""

from __future__ import annotations

import functools
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar

from ..constraints.tools import parse_call, tool_schemas
from ..rewards.environment import Environment, Step
from ..rewards.tools import ToolTask
from ..task import NoAnswerError, Row, option
from . import RewardEnvironmentTask, trl_function, wait_for
from .row_files import draw, read_table, split_rows


@dataclass(frozen=True)
class TrlEnvironmentOptions(trl_function.TrlOptions):
    """Options of a task made from an environment or from tools of TRL."""

    reward_function: str | None = option(
        None, "A reward function, as module:function. Its reward is added to that of the environment's get_reward()."
    )
    turns: int = option(8, "The most turns of the model. Tools that the last one calls are not run.")


class TRLEnvironment(Environment):
    """A conversation with an environment of TRL: a turn calls one of its methods; one without a call is the last."""

    def __init__(self, task: TRLEnvironmentTask):
        self._task, self._instance = task, task.instance()
        self._messages: list[dict[str, Any]] = []
        self._turns = 0
        self._is_running = False  # a call that was interrupted may still be

    def start(self, row: Row) -> str:
        self._row = {name: deepcopy(value) for name, value in row.items() if name != "asked"}
        self._row["prompt"] = deepcopy(row["asked"])
        said = None if self._instance is None else self._instance.reset(**self._row)
        if not isinstance(said, str | None):
            raise ValueError(f"reset() must return text or None, not {said!r:.60}")
        self._row["prompt"] = _continued(row["asked"], said or "")
        return said or ""

    def step(self, action: str) -> Step:
        self._turns += 1
        call = parse_call(action)
        if call is None or self._turns >= self._task.turns:
            self._messages.append({"role": "assistant", "content": action})
            return Step(reward=self._reward(), done=True)
        result = str(self._called(call.name, call.arguments))
        called = {"type": "function", "function": call._asdict()}
        self._messages += [{"role": "assistant", "content": action, "tool_calls": [called]},
                           {"role": "tool", "name": call.name, "content": result}]  # fmt: skip
        return Step(result)

    def close(self) -> None:
        if not self._is_running:
            self._task.idle.append(self._instance)

    def _called(self, name: str, arguments: Mapping[str, Any]) -> Any:
        tools = {tool.__name__: tool for tool in (*self._task.plain_tools, *_methods(self._instance))}
        try:
            if name not in tools:
                raise ValueError(f"Tool {name} not found.")
            return _finished(tools[name](**arguments))
        except (MemoryError, TimeoutError):
            self._is_running = True
            raise  # limits of the completion
        except Exception as error:  # noqa: BLE001 - the model is told, as in TRL
            return {"error": str(error)}

    def _reward(self) -> float:
        """Return the sum of the rewards that are numbers, as TRL does; NaN if there is none."""
        rewards = []
        if hasattr(self._instance, "get_reward"):
            rewards.append(_finished(self._instance.get_reward()))
        if (function := self._task.function) is not None:
            more = {"environments": [self._instance]}
            rewards.append(trl_function.called(function, self._task.passed, self._row, self._messages, more))
        found = [float(reward) for reward in rewards if reward is not None and not math.isnan(reward)]
        return sum(found) if found else math.nan


class TRLEnvironmentTask(RewardEnvironmentTask, ToolTask):
    """Rows of a file, which are played in an environment of TRL or with its tools.

    As in TRL, instances are used again after `reset`. A row has the prompt of the file as `asked`; its `prompt` adds
    the tools, and what `reset` says.
    """

    version: ClassVar[str] = "1"
    defaults = {"max_completion_length": 1024}
    marker = ""
    Options = TrlEnvironmentOptions
    factory: ClassVar[Callable[[], Any]]
    plain_tools: ClassVar[Sequence[Callable[..., Any]]]

    def __init__(self, options: Any = None):
        super().__init__(options)
        self.idle: list[Any] = []
        self.turns = self.options.turns
        if self.turns < 2:
            raise ValueError(f"--turns {self.turns} must be at least 2: one that calls a tool, and one that answers")
        rows = read_table(self.options.dataset, "--dataset")
        self._rows = split_rows(rows, self.options.test_fraction)
        self.function: Callable[..., Any] | None = None
        if self.options.reward_function is not None:
            rewarding = trl_function.task_class(self.options.reward_function)
            self.function, columns = rewarding.function, {*rows[0][1], "environments"} - {*trl_function.RESERVED}
            self.passed = trl_function.parameters_of(self.function, rewarding.name, columns)
        instance = self.instance()
        if not (self.plain_tools or callable(getattr(instance, "reset", None))):
            raise ValueError(f"{self.name} must return an environment with a method reset(**row), but it returns "
                             f"{instance!r:.60}")  # fmt: skip
        if self.function is None and not hasattr(instance, "get_reward"):
            raise ValueError(f"{self.name} has no method get_reward(); name a reward function with --reward_function")
        self.idle.append(instance)
        for tool in self.functions:
            try:
                tool_schemas([tool])
            except Exception as error:  # transformers does not export the classes of these errors
                raise ValueError(f"tool {tool.__name__!r} needs type hints and a docstring in Google's style: "
                                 f"{error}") from error  # fmt: skip
        self._check(rows[0][1])

    def _check(self, row: dict[str, Any]) -> None:
        row, again = self._opened(row), self._opened(row)
        if row != again:
            raise ValueError(f"{self.name}: reset() says different things about the same row; completions are scored "
                             "by playing them again, so take random numbers from the row")  # fmt: skip
        calls = [json.dumps({"name": tool.__name__, "parameters": {}}) for tool in self.functions]
        for turns in ([*calls[: self.turns - 1], ""], self._gold_turns(row)):
            if turns:
                self.check_repeats(row, turns)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "idle": []}

    @property
    def functions(self) -> Sequence[Callable[..., Any]]:  # type: ignore[override]
        self.idle.append(instance := self.instance())
        return (*self.plain_tools, *_methods(instance))

    def instance(self) -> Any:
        """Return an environment that no conversation uses; None if there are only tools."""
        return self.idle.pop() if self.idle else type(self).factory()

    def environment(self) -> TRLEnvironment:
        return TRLEnvironment(self)

    def dataset(self, split: str, size: int | None, seed: int) -> list[dict[str, Any]]:
        return [self._opened(row) for row in draw(self._rows, split, size, seed)]

    def gold(self, row: Row) -> str:
        if not (turns := self._gold_turns(row)):
            column = self.options.gold_column
            raise NoAnswerError(f"this row has no turns in the column {column!r} (--gold_column)")
        return self.conversation(row, turns)

    def _gold_turns(self, row: Row) -> list[str]:
        """Return the turns of a solution: a list, or a text that is the only one."""
        gold = row.get(self.options.gold_column) or []
        return [gold] if isinstance(gold, str) else [str(turn) for turn in gold]

    def _opened(self, row: dict[str, Any]) -> dict[str, Any]:
        prompt = row["prompt"]
        row = {**row, "asked": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt}
        with closing(self.environment()) as environment:
            return {**row, "prompt": self.with_tools(_continued(row["asked"], environment.start(row)))}


@functools.cache
def task_class(named: str) -> type[TRLEnvironmentTask]:
    """Return the task class for `module:name`, where the name is that of a class, a function or a list of tools."""
    name, value = trl_function.member("trl_env", named, "environment", "trl_env:my_environments:Wordle")
    is_tools = isinstance(value, list | tuple) and bool(value) and all(map(inspect.isroutine, value))
    if not (is_tools or callable(value)):
        raise ValueError(
            f"task 'trl_env:{named}': {name!r} must be a class or a function that returns an environment, or a list "
            f"of functions, which are tools; found {value!r:.60}"
        )
    members = {
        "name": name,
        "description": f"TRL {'tools' if is_tools else 'environment'} {name} of {named.rpartition(':')[0]}",
        "factory": staticmethod((lambda: None) if is_tools else value),
        "plain_tools": tuple(value) if is_tools else (),
    }
    return type("TRLEnvironmentTask", (TRLEnvironmentTask,), members)


def _methods(instance: Any) -> list[Callable[..., Any]]:
    """Return the tools of an environment: its public methods, in TRL's order."""
    names = [name for name, _ in inspect.getmembers(type(instance), predicate=inspect.isfunction)]
    return [getattr(instance, name) for name in names if name not in ("reset", "get_reward") and name[0] != "_"]


def _finished(result: Any) -> Any:
    return wait_for(result) if inspect.isawaitable(result) else result


def _continued(prompt: Sequence[Mapping[str, Any]], said: str) -> list[Mapping[str, Any]]:
    """Return the prompt with what `reset` says after its last message, as in TRL."""
    return [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + said}]
