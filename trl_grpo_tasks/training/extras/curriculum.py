"""Curriculum: trains on the hardest level that the model can learn from, and falls back when it cannot.

The learning signal of a pass/fail task is largest where success is neither rare nor certain. TRL's sampler chooses the
rows as usual, and the curriculum replaces each by a row of the current level. The replacement depends only on the
row's index and the step, so all processes choose the same one.
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accelerate.utils import gather_object

from ...task import Task, option
from .base import Extra


@dataclass
class CurriculumOptions:
    """Curriculum"""

    curriculum: bool = option(
        False, "Train on one level of the task at a time; the success rate decides when the level changes."
    )
    curriculum_window: int = option(128, "Number of completions of a level over which the success rate is measured.")
    curriculum_advance: float = option(0.7, "Success rate at which training moves to the next level.")
    curriculum_fall_back: float = option(0.1, "Success rate at which training returns to the previous level.")


class Curriculum:
    """`rows` are the training rows, each with a `level` that is one of `levels` (easy to hard).

    After `window` completions of the current level, the level rises if their success rate is at least `advance`, and
    falls if it is at most `fall_back`. A share `review` of the prompts comes from lower levels.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        levels: Sequence[str],
        window: int = 128,
        advance: float = 0.7,
        fall_back: float = 0.1,
        review: float = 0.2,
        seed: int = 0,
    ):
        by_level: dict[str, list[int]] = {str(level): [] for level in levels}
        for index, row in enumerate(rows):
            level = str(row.get("level"))
            if level not in by_level:
                raise ValueError(
                    f"row {index} has level {row.get('level')!r}; the task's levels are: {list(by_level)}"
                )
            by_level[level].append(index)
        empty = [level for level, indices in by_level.items() if not indices]
        if empty:
            raise ValueError(f"curriculum: no training row of level {', '.join(empty)}; make the training set larger")
        self.levels = list(by_level)
        self._indices = list(by_level.values())
        self._window, self._advance, self._fall_back = window, advance, fall_back
        self._review, self._seed = review, seed
        self.level = 0
        self._recent: deque[float] = deque(maxlen=window)

    def select(self, index: int, step: int) -> int:
        """The index of the row that replaces row `index` of the sampler."""
        draw = random.Random(f"{self._seed}-{step}-{index}")
        level = self.level
        if level > 0 and draw.random() < self._review:
            level = draw.randrange(level)
        return draw.choice(self._indices[level])

    def observe(self, levels: Sequence[str], successes: Sequence[float]) -> None:
        """Count the success (0 or 1; NaN is ignored) of each completion, given the level of its row."""
        current = self.levels[self.level]
        self._recent.extend(s for level, s in zip(levels, successes, strict=True) if level == current and s == s)
        if len(self._recent) < self._window:
            return
        rate = sum(self._recent) / len(self._recent)
        if rate >= self._advance and self.level + 1 < len(self.levels):
            self.level += 1
            self._recent.clear()
        elif rate <= self._fall_back and self.level > 0:
            self.level -= 1
            self._recent.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"level": self.level, "recent": list(self._recent)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.level = state["level"]
        self._recent = deque(state["recent"], maxlen=self._window)


class CurriculumExtra(Extra):
    """Chooses the rows of each training rollout, and observes their success."""

    name = "curriculum"
    Options = CurriculumOptions
    switch = "curriculum"

    @classmethod
    def check(cls, args: Any) -> None:
        if args.curriculum and args.curriculum_fall_back >= args.curriculum_advance:
            raise ValueError(
                f"curriculum_fall_back={args.curriculum_fall_back} must be below "
                f"curriculum_advance={args.curriculum_advance}, or the level would alternate"
            )

    @classmethod
    def check_task(cls, args: Any, task: Task | None, held_out: Any = None) -> None:
        if args.curriculum and (task is None or not task.levels):
            raise ValueError("curriculum=True needs a task with levels; this task has none, so leave curriculum off")

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        args = self._args
        self.state = Curriculum(
            [json.loads(row) for row in trainer.train_dataset["row"]],
            trainer.task.levels,
            args.curriculum_window,
            args.curriculum_advance,
            args.curriculum_fall_back,
            seed=args.seed,
        )

    def row_for(self, index: int) -> int:
        return self.state.select(index, self._trainer.state.global_step)

    def before_rollout(self, inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if not self._trainer.model.training:
            return inputs
        return [self._trainer.train_dataset[self.row_for(example["index"])] for example in inputs]

    def after_rollout(self, inputs: list[dict[str, Any]]) -> None:
        self._metrics["curriculum/level"].append(float(self.state.level))
        levels = gather_object([str(json.loads(example["row"]).get("level")) for example in inputs])
        self.state.observe(levels, self._trainer.rewarding.component("success").tolist())
