"""Guard: an adaptive weight that keeps a reward component from falling while training raises the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...task import Task, nearest, option
from .base import Extra

HIGHEST_WEIGHT = 10.0
RATE = 0.2  # lasting change of the weight after a rollout whose mean is 1 below the floor
START = 10  # rollouts over which the floor is measured
DAMPING_ROLLOUTS = 20  # the latest deficit counts this much more in the weight than earlier ones


@dataclass
class GuardOptions:
    """Guard"""

    guard: str | None = option(
        None,
        "Keep the mean of this reward component from falling below its value at the start, or below guard_floor: its "
        "weight grows with each rollout below that, and shrinks towards the usual weight with each rollout above. "
        "'none': no guard, for example in spite of a recipe.",
    )
    guard_floor: float | None = option(
        None, "The value that guard keeps. Default: the mean of the component in the first 10 rollouts."
    )


class Guard:
    """A Lagrange multiplier for the constraint that the mean of a component stays at or above a floor.

    After each rollout, multiplier <- multiplier + rate * (floor - mean), and the weight of the component is the
    multiplier + 20 * rate * (floor - mean), both within [0, 10]. The second term damps the oscillations of the first.
    Without a floor, it is the mean of the component in the first rollouts, in which the weight stays 0.
    """

    def __init__(self, component: str, floor: float | None, rate: float = RATE, start: int = START):
        self.component = component
        self.weight = 0.0
        self.floor = floor
        self._rate, self._start = rate, start
        self._multiplier = 0.0
        self._first_means: list[float] = []

    def observe(self, mean: float) -> None:
        """Take the mean of the component in one rollout; NaN, if no completion could be scored, is ignored."""
        if math.isnan(mean):
            return
        if self.floor is not None:
            change = self._rate * (self.floor - mean)
            self._multiplier = _bounded(self._multiplier + change)
            self.weight = _bounded(self._multiplier + DAMPING_ROLLOUTS * change)
            return
        self._first_means.append(mean)
        if len(self._first_means) >= self._start:
            self.floor = sum(self._first_means) / len(self._first_means)

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight, "multiplier": self._multiplier, "floor": self.floor,
                "first_means": list(self._first_means)}  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight, self._multiplier, self.floor = state["weight"], state["multiplier"], state["floor"]
        self._first_means = list(state["first_means"])


def _bounded(weight: float) -> float:
    return min(max(weight, 0.0), HIGHEST_WEIGHT)


class GuardExtra(Extra):
    """Adds the guard's weight to that of its component, in training only: evaluations must stay comparable."""

    name = "guard"
    Options = GuardOptions
    switch = "guard"

    @classmethod
    def complete(cls, args: Any) -> None:
        args.guard = None if args.guard == "none" else args.guard

    @classmethod
    def check(cls, args: Any) -> None:
        if args.guard is None:
            if args.guard_floor is not None:
                raise ValueError(f"guard_floor={args.guard_floor} needs guard, the component to keep above it")
            return
        if args.guard_floor is not None and not math.isfinite(args.guard_floor):
            raise ValueError(f"guard_floor={args.guard_floor} must be a finite number")
        if getattr(args, "curriculum", False) and args.guard_floor is None:
            raise ValueError(
                f"guard={args.guard!r} compares rollouts with the first ones, but curriculum=True changes their rows; "
                "set guard_floor, or leave curriculum off"
            )

    @classmethod
    def check_components(cls, args: Any, task: Task | None, components: Sequence[str]) -> None:
        if args.guard is None:
            return
        if args.guard not in components:
            raise ValueError(
                f"unknown guard {args.guard!r}{nearest(args.guard, components)}; choose one of: "
                f"{', '.join(components)}"
            )
        if task is not None and args.guard in task.watched:
            raise ValueError(
                f"guard={args.guard!r} would reward a component that is only logged, so that it stays an independent "
                "measure; guard another one"
            )

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        self.state = Guard(self._args.guard, self._args.guard_floor)
        self._plain_weights = trainer.reward_weights.clone()

    def before_rollout(self, inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        self._trainer.reward_weights = weights = self._plain_weights.clone()
        if self._trainer.model.training:
            weights[self._trainer.reward_func_names.index(self.state.component)] += self.state.weight
        return inputs

    def after_rollout(self, inputs: list[dict[str, Any]]) -> None:
        self._metrics["guard/weight"].append(self.state.weight)
        self.state.observe(self._trainer.rewarding.component(self.state.component).nanmean().item())
        if self.state.floor is not None:
            self._metrics["guard/floor"].append(self.state.floor)
