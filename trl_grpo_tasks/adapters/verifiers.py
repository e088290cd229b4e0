"""`--task verifiers:NAME`: a taskset of verifiers whose tasks are answered in one turn, with its own rewards."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from itertools import islice
from typing import Any

from ..registry import add_current_folder_to_path
from ..task import Row, Score, Task, option
from . import is_held_out, verdict

MOST = 10_000  # tasks that are read of an infinite taskset


@dataclass(frozen=True)
class VerifiersOptions:
    """Options of the tasks of verifiers."""

    taskset_config: str | None = option(
        None, "Configuration of the taskset as JSON, as under --env.taskset of verifiers."
    )
    success_reward: float = option(1.0, "Total reward from which on an answer counts as a success.")
    gold_field: str | None = option(
        None, "Field of the task data that holds a right answer, such as answer; for check and cold starts."
    )


class VerifiersTask(Task):
    """A taskset of verifiers. A row holds the index of its task; rewards are components with the taskset's weights."""

    defaults = {"max_completion_length": 512}
    Options = VerifiersOptions
    taskset_id: str

    def __init__(self, options: Any = None):
        super().__init__(options)
        if not self._tasks:
            raise ValueError(f"taskset {self.taskset_id!r} of verifiers has no tasks")
        first = self._tasks[0]
        _refuse_more_than_one_turn(first, self._taskset)
        trace = _trace(first, _messages(first), "")  # names and weights are known once something was scored
        asyncio.run(first.score(trace))
        self.weights = {name: reward.weight for name, reward in trace.rewards.items() if reward is not None}
        if not self.weights:
            raise ValueError(
                f"taskset {self.taskset_id!r} has no rewards: its task class has no method with @vf.reward"
            )

    @cached_property
    def _taskset(self) -> Any:
        from pydantic import ValidationError
        from verifiers.v1.configs.taskset import TasksetConfig
        from verifiers.v1.taskset import Taskset
        from verifiers.v1.utils.generic import concrete_type
        from verifiers.v1.utils.loaders import taskset_class

        made = taskset_class(self.taskset_id)
        config_class = concrete_type(made, TasksetConfig, origin=Taskset) or TasksetConfig
        try:
            given = json.loads(self.options.taskset_config or "{}")
            return made(config_class.model_validate(given | {"id": self.taskset_id}))
        except (ValueError, TypeError, ValidationError) as error:
            raise ValueError(f"--taskset_config {self.options.taskset_config!r}: {error}") from error

    @cached_property
    def _tasks(self) -> list[Any]:
        return list(islice(self._taskset, MOST))

    def dataset(self, split: str, size: int | None, seed: int) -> list[dict[str, Any]]:
        rows = [
            {"prompt": messages, "index": index}
            for index, task in enumerate(self._tasks)
            if is_held_out(json.dumps(messages := _messages(task)), 5) == (split == "test")
        ]
        order = sorted(range(len(rows)), key=lambda place: zlib.crc32(f"{seed}-{rows[place]['index']}".encode()))
        return [rows[place] for place in order[:size]]

    def score(self, row: Row, completion: str) -> Score | None:
        from verifiers.v1.errors import TaskError

        task = self._tasks[row["index"]]
        try:
            trace = _trace(task, row["prompt"], completion)
            asyncio.run(task.score(trace))
        except (TaskError, ValueError) as error:  # the latter for text that is not Unicode
            return self.make_score({}, False, False, f"a reward of {self.taskset_id} failed: {error}"[:300])
        values = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        if set(values) != set(self.weights) or not all(map(math.isfinite, values.values())):
            return None
        total = math.fsum(self.weights[name] * value for name, value in values.items())
        success, reason = verdict(total, self.options.success_reward)
        return self.make_score(values, True, success, reason, dict(trace.metrics))

    def gold(self, row: Row) -> str:
        field = self.options.gold_field
        data = self._tasks[row["index"]].data
        if field is None or not isinstance(getattr(data, field, None), str):
            known = [name for name, value in data if isinstance(value, str) and "prompt" not in name]
            raise ValueError(
                f"--gold_field {field}: name the field of the task data that holds a right answer; fields with text "
                f"are: {', '.join(known) or 'none'}"
            )
        return getattr(data, field)

    def bad(self, row: Row) -> str:
        return ""


def task_class(name: str) -> type[Task]:
    """The task of an installed taskset of verifiers, or of a module of this name in the current folder."""
    try:
        import verifiers.v1  # noqa: F401
    except ImportError as error:
        raise ImportError("tasks of verifiers need its package: pip install 'trl_grpo_tasks[verifiers]'") from error
    from verifiers.v1.utils.loaders import taskset_class

    add_current_folder_to_path()
    try:
        taskset_class(name)
    except (ModuleNotFoundError, AttributeError, TypeError) as error:
        raise ValueError(f"verifiers finds no taskset {name!r}: {error}") from error
    described = {
        "taskset_id": name,
        "name": f"verifiers_{name.replace('/', '_').replace('-', '_')}",
        "version": f"1+{version('verifiers')}",
        "description": f"Tasks of the taskset {name} of verifiers.",
    }
    return type("VerifiersTask", (VerifiersTask,), described)


def _refuse_more_than_one_turn(task: Any, taskset: Any) -> None:
    """Raise ValueError for tasks whose answer is more than one completion, or whose rewards need a container."""
    from verifiers.v1.task import Task as TheirTask

    needs = []
    if task.NEEDS_CONTAINER:
        needs.append("a container")
    if task.toolsets(task.config) or taskset.toolsets(taskset.config):
        needs.append("tools")
    if any(getattr(type(task), hook) is not getattr(TheirTask, hook) for hook in ("setup", "finalize")):
        needs.append("setup or finalize hooks, which need a runtime")
    for reward in task.hooks("reward"):
        parameter = inspect.signature(reward).parameters.get("runtime")
        if parameter is not None and parameter.default is inspect.Parameter.empty:
            needs.append(f"a runtime for the reward {reward.__name__}")
    if task.data.prompt is None:
        needs.append("a user that opens the conversation")
    if needs:
        raise ValueError(f"tasks of {taskset.config.id} need {', '.join(needs)}; only tasks that are answered in one "
                         "completion can be trained here, so train this one with verifiers itself")  # fmt: skip


def _messages(task: Any) -> list[dict[str, str]]:
    """The prompt of a task as chat messages, with its system prompt first."""
    from verifiers.v1.types import content_text

    data = task.data
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str):
        return [*system, {"role": "user", "content": data.prompt}]
    return [*system, *({"role": message.role, "content": content_text(message.content)} for message in data.prompt)]


def _trace(task: Any, prompt: Sequence[Mapping[str, str]], completion: str) -> Any:
    """The trace of one turn, as verifiers' own rollouts leave it for scoring."""
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask

    nodes = [MessageNode(message=message, parent=place - 1 if place else None) for place, message in enumerate(prompt)]
    answer = {"role": "assistant", "content": completion}
    nodes.append(MessageNode(message=answer, parent=len(nodes) - 1, sampled=True))
    about = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    return Trace(task=about, agent=AgentInfo(config=AgentConfig()), nodes=nodes, is_completed=True, ok=True)
