"""A task's score as TRL sees it: one reward function a component, each logged by name, all fed by one executor."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..task import Score, Task
from .executor import Outcome, Pending, RewardExecutor
from .judge import FrozenJudge, frozen_of

# Facts about a completion that can be weighted and are logged like components, but weigh nothing unless asked.
FACTS = ("valid", "success")


class TaskRewards:
    """Scores a batch as soon as `begin` is called; the reward functions that TRL calls later wait for the result."""

    def __init__(self, task: Task, args: Any, local_processes: int = 1):
        self.task = task
        self._weights = component_weights(task, args.component_weights)
        self._judges = task.judges()
        self.executor = RewardExecutor(
            task,
            workers=worker_count(args.reward_workers, local_processes),
            timeout=args.reward_timeout,
            memory_mb=args.reward_memory_mb,
            backend=args.reward_backend,
        )
        self._pending: Pending | None = None
        self.outcomes: list[Outcome] = []

    @property
    def names(self) -> list[str]:
        return list(self._weights)

    @property
    def weights(self) -> list[float]:
        return list(self._weights.values())

    @property
    def frozen_judges(self) -> dict[str, FrozenJudge]:
        return frozen_of(self._judges)

    def functions(self) -> list[Any]:
        """The reward functions for TRL, in the order of `names`: judges are models, which TRL scores in batches, or
        score in batches themselves."""
        return [self._judges.get(name) or _component(name, self) for name in self.names]

    def begin(self, rows: Sequence[str], completions: Sequence[str]) -> None:
        self._pending = self.executor.submit(rows, completions)

    def finish(self) -> list[Outcome]:
        """Wait for the scores of the batch that `begin` started."""
        assert self._pending is not None, "finish() without begin()"
        self.outcomes = self._pending.result()
        self._pending = None
        return self.outcomes

    @property
    def has_group_components(self) -> bool:
        return type(self.task).group_components is not Task.group_components

    def fill_group_components(
        self,
        rewards_N_F: torch.Tensor,
        rows: Sequence[str],
        completions: Sequence[str],
        scores: Sequence[Score | None],
        group_size: int,
    ) -> None:
        """Components of whole groups (novelty, say), for the completions of all processes."""
        for start in range(0, len(rows), group_size):
            group = slice(start, start + group_size)
            parsed = [json.loads(row) for row in rows[group]]
            for name, values in self.task.group_components(parsed, completions[group], scores[group]).items():
                column = torch.tensor([torch.nan if value is None else value for value in values])
                rewards_N_F[group, self.names.index(name)] = column.to(rewards_N_F)

    def unscored_to_nan(self, rewards_N_F: torch.Tensor) -> torch.Tensor:
        """A completion the task could not score counts as unscored, whatever a judge said of it."""
        unscored = torch.isnan(rewards_N_F[:, self.names.index("success")])
        return rewards_N_F.masked_fill(unscored[:, None], float("nan"))


def component_weights(task: Task, asked: Mapping[str, float] | None) -> dict[str, float]:
    """The task's weights with those that the user asked for, facts included."""
    taken = sorted(set(FACTS) & set(task.weights))
    if taken:
        raise ValueError(
            f"task {task.name!r}: a component cannot be called {taken[0]!r}, which every score has anyway"
        )
    weights = dict.fromkeys(FACTS, 0.0) | {name: float(weight) for name, weight in task.weights.items()}
    unknown = sorted(set(asked or {}) - set(weights))
    if unknown:
        raise ValueError(f"component_weights: task {task.name!r} has no component {', '.join(map(repr, unknown))}; "
                         f"components are: {', '.join(weights)}")  # fmt: skip
    for name, weight in (asked or {}).items():
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
            raise ValueError(f"component_weights: the weight of {name!r} must be a number, got {weight!r}")
        if weight and name in task.watched:
            raise ValueError(f"component_weights: {name!r} is only watched, so that it stays an independent measure; "
                             "leave its weight at 0")  # fmt: skip
        weights[name] = float(weight)
    return weights


def worker_count(asked: int | None, local_processes: int) -> int:
    """What the user asked for, or this process's share of the cores, at most 16."""
    if asked is not None:
        return asked
    return max(1, min(16, (os.cpu_count() or 1) // local_processes))


def _component(name: str, rewards: TaskRewards) -> Any:
    def component(completions: Sequence[Any], **_: Any) -> list[float | None]:
        scores = [outcome.score for outcome in rewards.outcomes]
        if name in FACTS:
            return [None if score is None else float(getattr(score, name)) for score in scores]
        return [None if score is None else score.components.get(name) for score in scores]

    component.__name__ = name
    return component
