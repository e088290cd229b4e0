"""`--task verifiers:NAME`: a taskset of verifiers whose tasks are answered in one turn, with its own rewards."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ..registry import add_current_folder_to_path
from ..task import NoAnswerError, Row, Score, Task, option
from . import RewardOptions, RewardTask, library_version
from .row_files import cut, draw
from .verifiers_turn import messages_of, refuse_more_than_one_turn, scored_trace

MOST = 10_000  # tasks that are read of an infinite taskset
TEST_FRACTION = 0.2


@dataclass(frozen=True)
class VerifiersOptions(RewardOptions):
    """Options of the tasks of verifiers."""

    taskset_config: str | None = option(
        None, "Configuration of the taskset as JSON, as under --env.taskset of verifiers."
    )
    gold_field: str | None = option(
        None, "Field of the task data that holds a right answer, such as answer; for check and cold starts."
    )


class VerifiersTask(RewardTask):
    """A taskset of verifiers. A row holds the index of its task; rewards are components with the taskset's weights."""

    defaults = {"max_completion_length": 512}
    Options = VerifiersOptions
    taskset_id: str

    def __init__(self, options: Any = None):
        from verifiers.v1.errors import TaskError

        super().__init__(options)
        taskset = self._load()
        self._tasks = list(islice(taskset, MOST))
        if not self._tasks:
            raise ValueError(f"taskset {self.taskset_id!r} of verifiers has no tasks")
        refuse_more_than_one_turn(self._tasks[0], taskset)
        rows: list[dict[str, Any]] = [
            {"prompt": messages_of(task), "index": index} for index, task in enumerate(self._tasks)
        ]
        self._rows = cut(rows, TEST_FRACTION)
        if self.options.gold_field is not None:
            self.gold(rows[0])
        try:
            trace = scored_trace(self._tasks[0], rows[0]["prompt"], "")
        except TaskError as error:
            raise ValueError(f"a reward of {self.taskset_id} fails for an empty answer, which is scored to learn the "
                             f"names of the rewards: {error}") from error  # fmt: skip
        self.weights = {name: reward.weight for name, reward in trace.rewards.items() if reward is not None}
        if not self.weights:
            raise ValueError(
                f"taskset {self.taskset_id!r} has no rewards: its task class has no method with @vf.reward"
            )

    def _load(self) -> Any:
        from verifiers.v1.utils.loaders import load_taskset, taskset_config_type

        try:
            given = json.loads(self.options.taskset_config or "{}")
            return load_taskset(taskset_config_type(self.taskset_id).model_validate(given | {"id": self.taskset_id}))
        except (ValueError, TypeError) as error:  # the first also from pydantic
            raise ValueError(f"--taskset_config {self.options.taskset_config!r}: {error}") from error

    def dataset(self, split: str, size: int | None, seed: int) -> list[dict[str, Any]]:
        return draw(self._rows, split, size, seed)

    def score(self, row: Row, completion: str) -> Score | None:
        from verifiers.v1.errors import TaskError

        try:
            trace = scored_trace(self._tasks[row["index"]], row["prompt"], completion)
        except (TaskError, ValueError) as error:  # the latter for text that is not Unicode
            return self.make_score({}, False, False, f"a reward of {self.taskset_id} failed: {error}"[:300])
        values = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        return self.score_of(values, trace.metrics) if set(values) == set(self.weights) else None

    def gold(self, row: Row) -> str:
        field, data = self.options.gold_field, self._tasks[row["index"]].data
        if field is None or not isinstance(getattr(data, field, None), str):
            known = [name for name, value in data if isinstance(value, str) and "prompt" not in name]
            raise NoAnswerError(
                f"--gold_field {field}: name the field of the task data that holds a right answer; fields with text "
                f"are: {', '.join(known) or 'none'}"
            )
        return getattr(data, field)


def task_class(name: str) -> type[Task]:
    """The task of an installed taskset of verifiers, or of a module of this name in the current folder."""
    installed = library_version("verifiers", "verifiers.v1")
    from verifiers.v1.utils.loaders import taskset_class

    add_current_folder_to_path()
    try:
        taskset_class(name)
    except (ModuleNotFoundError, AttributeError, TypeError) as error:
        raise ValueError(f"verifiers finds no taskset {name!r}: {error}") from error
    described = {
        "taskset_id": name,
        "name": f"verifiers_{name.replace('/', '_').replace('-', '_')}",
        "version": f"1+{installed}",
        "description": f"Tasks of the taskset {name} of verifiers.",
    }
    return type("VerifiersTask", (VerifiersTask,), described)
