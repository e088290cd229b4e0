"""A taskset of verifiers, exported from trl_grpo_tasks with `trl-grpo-tasks export --to verifiers`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import verifiers.v1 as vf

from trl_grpo_tasks.registry import get_task

SPEC = "SPEC"
OPTIONS: dict[str, Any] = {}

# A task that is a file travels beside this one.
TASK = get_task(str(Path(__file__).parent / SPEC) if SPEC.endswith(".py") else SPEC, OPTIONS)


class Data(vf.TaskData):
    row: dict[str, Any]


class ExportedTask(vf.Task[Data]):
    def _score(self, trace: Any) -> Any:
        # `last_reply` is stripped, and some tasks care for white space.
        return TASK.score(self.data.row, trace.assistant_messages[-1].content or "")

    @vf.reward
    async def components(self, trace: Any) -> dict[str, float]:
        """The weighted components of the score; their sum is its total."""
        score = self._score(trace)
        if score is None:
            raise RuntimeError(f"task {TASK.name!r} could not score this answer")
        return {name: TASK.weights[name] * value for name, value in score.components.items()}

    @vf.metric
    async def success(self, trace: Any) -> float:
        score = self._score(trace)
        return float(score is not None and score.success)


class Config(vf.TasksetConfig):
    split: str = "train"
    size: int | None = None
    seed: int = 0


class ExportedTaskset(vf.Taskset[ExportedTask, Config]):
    def load(self) -> Iterator[ExportedTask]:
        for row in TASK.dataset(self.config.split, self.config.size, self.config.seed):
            yield ExportedTask(Data(prompt=row["prompt"], row=row), self.config.task)


__all__ = ["ExportedTaskset"]
