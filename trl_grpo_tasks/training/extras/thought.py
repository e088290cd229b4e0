"""Thoughts and answers: their lengths and entropies, and the weight of thoughts in the loss (`--thought_weight`).

The thought of a completion is its tokens up to the one in which the marker ends, or all of them if none does. With a
weight w, the advantages of these tokens are multiplied by w. In every loss type of TRL, the policy-gradient term of a
token is its advantage times a factor that depends only on the sign of the advantage. So the term is multiplied by w
exactly. KL and entropy terms, and what the loss is divided by, stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather

from ...constraints.base import Constraint
from ...constraints.think import ThinkThen
from ...task import option
from ..record import RolloutRecord
from .base import Extra, check_advantages_per_token


@dataclass
class ThoughtOptions:
    """Thoughts"""

    thought_weight: float = option(
        1.0, "Weight of thoughts, marker included, in the policy-gradient loss. 0: only answers train."
    )


class ThoughtExtra(Extra):
    """Logs lengths and entropies of thoughts and answers, and weights thoughts. Every trainer with thoughts has it."""

    name = "thought"
    Options = ThoughtOptions
    switch = "thought_weight"

    @classmethod
    def is_used(cls, args: Any, constraint: Constraint | None) -> bool:
        return isinstance(_unlimited(constraint), ThinkThen)

    @classmethod
    def check(cls, args: Any) -> None:
        if cls.is_on(args):
            check_advantages_per_token(args, f"thought_weight={args.thought_weight}", "thought_weight=1")

    @classmethod
    def check_constraint(cls, args: Any, constraint: Constraint | None) -> None:
        if cls.is_on(args) and not cls.is_used(args, constraint):
            kind = type(_unlimited(constraint)).__name__
            found = "there is no constraint" if constraint is None else f"they are under {kind}"
            raise ValueError(
                f"thought_weight={args.thought_weight} needs completions of a thought and an answer, but {found}; set "
                "constrain=True and repair_turns=1 with a task that uses ThinkThen (prompts with --think), or "
                "thought_weight=1"
            )

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        self._constraint: ThinkThen = _unlimited(trainer.generation.constraint)

    def after_sampling(self) -> None:
        """Log the share of completions whose thought ended, and the mean lengths of these thoughts and answers."""
        lengths = [(self._constraint.thought_length(ids), len(ids)) for ids in self._record.completion_ids]
        ended = [(thought, total - thought) for thought, total in lengths if thought is not None]
        sums = [len(lengths), len(ended), sum(thought for thought, _ in ended), sum(answer for _, answer in ended)]
        device = self._trainer.accelerator.device
        rows, count, thoughts, answers = gather(torch.tensor(sums, device=device)).view(-1, 4).sum(0).tolist()
        metrics = self._trainer._metrics[self._trainer.mode]
        metrics["thought/ended"].append(count / max(rows, 1))
        metrics["thought/tokens"].append(thoughts / max(count, 1))
        metrics["thought/answer_tokens"].append(answers / max(count, 1))

    def after_rewards(self, output: dict[str, Any]) -> None:
        """Weight the advantages. A group may lose its signal with its thoughts."""
        if not self.is_on(self._args):
            return
        advantages, mask_B_T = output["advantages"], output["completion_mask"]
        advantages_B_T = advantages if advantages.ndim == 2 else advantages[:, None]
        weights_B_T = torch.where(self._is_thought(output), self._args.thought_weight, 1.0) * mask_B_T
        output["advantages"] = advantages_B_T * weights_B_T.to(advantages)
        if (without_signal_P := self._record.without_signal_P) is not None:
            has_signal_N = gather((output["advantages"] != 0).any(1)).to(without_signal_P.device)
            without_signal_P |= ~has_signal_N.view(len(without_signal_P), -1).any(1)

    def after_loss(self, batch: dict[str, Any], record: RolloutRecord) -> None:
        """Log the mean entropy of the decisions in thoughts, and of those in answers."""
        with self._trainer.scoring.under(record):
            decisions_B_T = self._trainer.scoring.decisions(batch["completion_mask"])
        is_thought_B_T = self._is_thought(batch)
        parts = [decisions_B_T * is_thought_B_T, decisions_B_T * ~is_thought_B_T]
        assert record.entropies_B_T is not None
        sums = [value for part in parts for value in ((record.entropies_B_T * part).sum(), part.sum())]
        sums = self._trainer.accelerator.reduce(torch.stack([value.float() for value in sums])).tolist()
        metrics, (thought, thought_tokens, answer, answer_tokens) = self._trainer._metrics[self._trainer.mode], sums
        if thought_tokens:
            metrics["thought/entropy"].append(thought / thought_tokens)
        if answer_tokens:
            metrics["thought/answer_entropy"].append(answer / answer_tokens)

    def _is_thought(self, rollout: dict[str, Any]) -> torch.Tensor:
        """Which tokens of the completions belong to a thought."""
        ids_B_T, counts_B = rollout["completion_ids"], rollout["completion_mask"].sum(1)
        completions = zip(ids_B_T.tolist(), counts_B.tolist(), strict=True)
        lengths = [self._constraint.thought_length(ids[:count]) for ids, count in completions]
        width = ids_B_T.shape[1]
        ends_B = torch.tensor([width if length is None else length for length in lengths], device=ids_B_T.device)
        return torch.arange(width, device=ids_B_T.device) < ends_B[:, None]


def _unlimited(constraint: Any) -> Any:
    return getattr(constraint, "unlimited", constraint)
