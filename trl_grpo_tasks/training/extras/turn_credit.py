"""Credit per turn (`--turn_credit`): in an environment, a turn is credited with what it and later turns earn.

Without it, all turns of a conversation have the advantage of its total reward. With it, the return of turn t is
r_t + turn_credit * r_(t+1) + ..., and its advantage is the difference to the mean return that the other conversations
of the group have at their turn t. They do not depend on the turn, so that with turn_credit=1 the gradient is exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather, gather_object

from ...rewards.environment import EnvironmentTask
from ...task import Task, option
from .base import Extra, check_advantages_per_token


@dataclass
class TurnCreditOptions:
    """Credit per turn"""

    turn_credit: float | None = option(
        None,
        "With an environment: credit each turn with the rewards of its own and later turns, discounted by this factor "
        "per turn, instead of the sum of all rewards.",
    )


def turn_advantages(rewards: Sequence[Sequence[float] | None], discount: float) -> list[list[float]]:
    """Return the advantage of each turn of the conversations of a group. None: a conversation that was not scored.

    A turn that no other conversation has, has no baseline and an advantage of 0.
    """
    returns: list[list[float]] = []
    for turns in rewards:
        found, later = [], 0.0
        for reward in reversed(turns or ()):
            later = reward + discount * later
            found.append(later)
        returns.append(found[::-1])
    advantages = []
    for own in returns:
        values = []
        for place, value in enumerate(own):
            others = [other[place] for other in returns if other is not own and len(other) > place]
            values.append(value - sum(others) / len(others) if others else 0.0)
        advantages.append(values)
    return advantages


class TurnCreditExtra(Extra):
    """Replaces the advantage of a completion by those of its turns."""

    name = "turn_credit"
    Options = TurnCreditOptions
    switch = "turn_credit"

    @classmethod
    def check(cls, args: Any) -> None:
        if not cls.is_on(args):
            return
        asked = f"turn_credit={args.turn_credit}"
        if args.advantage_estimator != "grpo":
            raise ValueError(f"{asked} has an advantage of its own; leave advantage_estimator="
                             f"{args.advantage_estimator!r} out")  # fmt: skip
        if args.gamma != 1:
            raise ValueError(f"{asked} does not work with gamma={args.gamma}, which discounts tokens; set gamma=1")
        check_advantages_per_token(args, asked, "leave it out")

    @classmethod
    def check_task(cls, args: Any, task: Task | None, held_out: Any = None) -> None:
        if cls.is_on(args) and not isinstance(task, EnvironmentTask):
            raise ValueError(f"turn_credit={args.turn_credit} needs a task with an environment, whose turns have "
                             "rewards; leave it out")  # fmt: skip

    def after_rewards(self, output: dict[str, Any]) -> None:
        trainer, record, args = self._trainer, self._record, self._args
        mine = [None if o.score is None else o.score.info["turn_rewards"] for o in record.outcomes]
        weight = float(trainer.reward_weights[trainer.reward_func_names.index("reward")])
        everyone, size = gather_object(mine), trainer.group_size
        groups = [
            turn_advantages(everyone[start : start + size], args.turn_credit)
            for start in range(0, len(everyone), size)
        ]
        scales = {"batch": [_size(groups)] * len(groups), "group": [_size([group]) for group in groups]}
        divided = zip(groups, scales.get(args.scale_rewards, [1.0] * len(groups)), strict=True)
        advantages = [[weight * value / scale for value in turns] for group, scale in divided for turns in group]
        first = trainer.accelerator.process_index * len(mine)
        constraint, mask_B_T = trainer.generation.constraint, output["completion_mask"]
        advantages_B_T = torch.zeros(mask_B_T.shape, dtype=torch.float32, device=mask_B_T.device)
        for i, (row, ids) in enumerate(zip(record.rows, record.completion_ids, strict=True)):
            spans = constraint.turns_of(row, ids)
            for (start, end), value in zip(spans, advantages[first + i], strict=False):
                advantages_B_T[i, start:end] = value
        if args.advantage_clip is not None:
            advantages_B_T = advantages_B_T.clamp(-args.advantage_clip, args.advantage_clip)
        output["advantages"] = advantages_B_T * mask_B_T  # 0 for what mask_truncated_completions leaves out
        has_signal_N = gather((output["advantages"] != 0).any(1)).cpu()
        record.without_signal_P = ~has_signal_N.view(-1, size).any(1)


def _size(groups: Sequence[Sequence[Sequence[float]]]) -> float:
    """The root mean square of advantages, by which they are divided: totals may be equal where turns differ."""
    values = [value for group in groups for turns in group for value in turns]
    return math.sqrt(sum(value * value for value in values) / max(len(values), 1)) + 1e-4
