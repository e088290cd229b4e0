"""Discount (`--gamma`): the advantage of a token is multiplied by gamma ** (decisions that follow it). A decision is a
sampled token: not one that a constraint forced, not the text of a tool, and not one that the loss leaves out.

The reward comes at the end of a completion, so its discounted return at a token has this factor. The baseline is
discounted with it, and the number of later decisions depends on what is sampled: the gradient is an approximation, in
which a long failure is pushed down less than a short one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather

from ...task import Task, option
from .base import Extra, check_advantages_per_token

NOT_IN_ORDER = (
    "does not work with a masked language model, which does not write its tokens one after the other; set gamma=1"
)


@dataclass
class DiscountOptions:
    """Discount"""

    gamma: float = option(
        1.0, "Discount factor: the advantage of a token is multiplied by gamma once per decision that follows it."
    )


class DiscountExtra(Extra):
    """Multiplies the advantage of each token by its discount."""

    name = "discount"
    Options = DiscountOptions
    switch = "gamma"

    @classmethod
    def check(cls, args: Any) -> None:
        if cls.is_on(args):
            check_advantages_per_token(args, f"gamma={args.gamma}", "gamma=1")

    @classmethod
    def check_task(cls, args: Any, task: Task | None, held_out: Any = None) -> None:
        if cls.is_on(args) and task is not None and task.policy == "masked":
            raise ValueError(f"gamma={args.gamma} {NOT_IN_ORDER}")

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        if trainer.generation.masked_policy is not None:
            raise ValueError(f"gamma={self._args.gamma} {NOT_IN_ORDER}")

    def after_rewards(self, output: dict[str, Any]) -> None:
        scoring, mask_B_T = self._trainer.scoring, output["completion_mask"]
        with scoring.under(scoring.record_of(output)):
            decisions_B_T = scoring.decisions(mask_B_T * output.get("tool_mask", 1))
        later_B_T = decisions_B_T.flip(1).cumsum(1).flip(1) - decisions_B_T
        factors_B_T = self._args.gamma**later_B_T
        output["advantages"] = output["advantages"][:, None] * factors_B_T * mask_B_T
        sums = torch.stack([(factors_B_T * decisions_B_T).sum(), decisions_B_T.sum()])
        factor, decisions = gather(sums).view(-1, 2).sum(0).tolist()
        self._metrics["discount/mean"].append(factor / max(decisions, 1))
