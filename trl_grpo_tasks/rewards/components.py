"""Adapter from a task's score to TRL's reward functions: one function per component, all fed by one executor."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..constraints.workers import usable_cores
from ..task import Score, Task
from .classifier import FrozenClassifier
from .executor import Outcome, Pending, RewardExecutor
from .worker import LARGEST_COMPONENT

# Flags of every score. They are logged like components and can be weighted; their default weight is 0.
FACTS = ("valid", "success")
LARGEST_WEIGHT = 1e6


class TaskRewards:
    """The rewards of a task during training.

    `begin` starts scoring a batch in the background and `finish` waits for it. The reward functions, which TRL calls
    afterwards, return the components of `outcomes`.
    """

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
            weights=self._weights,
        )
        self._pending: Pending | None = None
        self.outcomes: list[Outcome] = []

    @property
    def names(self) -> list[str]:
        return list(self._weights)

    @property
    def weights(self) -> list[float]:
        return list(self._weights.values())

    def functions(self) -> list[Any]:
        """Return the reward functions for TRL in the order of `names`. TRL itself evaluates judges that are models."""
        models = {name: judge for name, judge in self._judges.items() if not isinstance(judge, FrozenClassifier)}
        return [models.get(name) or _component(name, self) for name in self.names]

    def begin(self, rows: Sequence[str], completions: Sequence[str]) -> None:
        """Start scoring a batch and return without waiting; `rows` are JSON texts."""
        self._pending = self.executor.submit(rows, completions)

    def finish(self) -> list[Outcome]:
        """Wait for the batch that `begin` started, and store and return its outcomes."""
        assert self._pending is not None, "finish() without begin()"
        self.outcomes = self._pending.result()
        self._pending = None
        return self.outcomes

    @property
    def has_group_components(self) -> bool:
        return self.task.defines("group_components")

    def fill_group_components(
        self,
        rewards_N_F: torch.Tensor,
        rows: Sequence[str],
        completions: Sequence[str],
        scores: Sequence[Score | None],
        group_size: int,
    ) -> None:
        """Write the components that depend on whole groups, such as novelty, into the rewards of all processes."""
        for start in range(0, len(rows), group_size):
            group = slice(start, start + group_size)
            parsed = [json.loads(row) for row in rows[group]]
            for name, values in self.task.group_components(parsed, completions[group], scores[group]).items():
                column = torch.tensor([torch.nan if value is None else value for value in values])
                rewards_N_F[group, self.names.index(name)] = column.to(rewards_N_F)

    def unscored_to_nan(self, rewards_N_F: torch.Tensor) -> torch.Tensor:
        """Set all rewards of completions that could not be scored to NaN, including those from judges: by the task,
        or because a judge or `group_components` gave something that is no usable number."""
        unscored = torch.isnan(rewards_N_F[:, self.names.index("success")]) | unusable(rewards_N_F).any(1)
        return rewards_N_F.masked_fill(unscored[:, None], float("nan"))


def unusable(rewards_N_F: torch.Tensor) -> torch.Tensor:
    """True for infinite and huge rewards, with which advantages cannot be computed."""
    return rewards_N_F.abs() > LARGEST_COMPONENT


def component_weights(task: Task, asked: Mapping[str, float] | None) -> dict[str, float]:
    """Return the weight of every component and flag: the task's weights, overridden by those in `asked`."""
    taken = sorted(set(FACTS) & set(task.weights))
    if taken:
        raise ValueError(
            f"task {task.name!r}: no component may be named {taken[0]!r}, because every score already has a flag of "
            "that name; rename the component"
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
            raise ValueError(f"component_weights: {name!r} is only logged, so that it stays an independent measure; "
                             "leave its weight at 0")  # fmt: skip
        weights[name] = float(weight)
    for name, weight in weights.items():
        if not abs(weight) <= LARGEST_WEIGHT:  # true for NaN
            raise ValueError(f"the weight of component {name!r} must lie within -1e6 and 1e6, got {weight}")
    return weights


def worker_count(asked: int | None, local_processes: int) -> int:
    """Return the number of reward workers: `asked` if given, else this process's share of the cores, at most 16."""
    if asked is not None:
        return asked
    return max(1, min(16, usable_cores() // local_processes))


def _component(name: str, rewards: TaskRewards) -> Any:
    """Make the reward function of one component or flag."""

    def component(completions: Sequence[Any], **_: Any) -> list[float | None]:
        scores = [outcome.score for outcome in rewards.outcomes]
        if name in FACTS:
            return [None if score is None else float(getattr(score, name)) for score in scores]
        return [None if score is None else score.components.get(name) for score in scores]

    component.__name__ = name
    return component
