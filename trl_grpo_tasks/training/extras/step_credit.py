"""Step-level credit: token-level advantages from the prefix scores of a task (`--step_credit`, `--gamma`).

A completion consists of K steps: those after which `Task.prefix_scores` gives a score, and the end of the answer. With
phi_m the score after m steps (phi_0 = 0), step m has the reward gamma phi_m - phi_(m-1). This is potential-based
shaping, so the sum of gamma^(m-1) times these rewards, from the step after the first m on, telescopes to

    R_m = gamma^K phi_K - gamma^m phi_m.

A token before which m steps are complete gets the advantage R_m - b_m. For a completion i, b_m is the mean of R_m
over the other completions of its group that have m complete steps or more; 0 if there are none. Summed over tokens,
this is an unbiased policy gradient of the objective E[gamma^K phi_K]: R_m holds every reward that the token can
influence, with its discount. gamma^m phi_m depends only on the prompt and the prefix. b_m depends on the prompt, the
number of steps in the prefix, and other completions, which are independent of this one. A mean that included
completion i itself, or a division by the deviation of the group, would depend on what was sampled after the token.

Under a constraint nothing changes: a forced token has probability 1 and no gradient, so that the credit of a step acts
on its decisions. A token that spans the end of a step belongs to the step in which it begins.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from accelerate.utils import gather, gather_object

from ...constraints.turns import split_turns
from ...rewards.worker import PrefixScores
from ...task import Task, option
from .base import Extra


@dataclass
class StepCreditOptions:
    """Step credit"""

    step_credit: float = option(
        0.0,
        "Weight of token-level advantages from the task's prefix scores, which credit the steps of a completion, "
        "for example single bricks. They are added to the advantage of the completion. 0: none.",
    )
    gamma: float = option(
        1.0, "Discount per step of step_credit: below 1, its objective prefers answers in fewer steps."
    )


def returns_to_go(pairs: PrefixScores, gamma: float) -> list[float]:
    """R_m for m = 0, 1, ..., K-1 complete steps."""
    potentials = [0.0, *(score for _, score in pairs)]
    discounted = [gamma**m * potential for m, potential in enumerate(potentials)]
    return [discounted[-1] - value for value in discounted[:-1]]


def step_credits(scores_N: Sequence[PrefixScores | None], group_size: int, gamma: float) -> list[list[float]]:
    """R_m - b_m of each completion, for m = 0, 1, ... complete steps. The groups follow one another. Completions
    without scores have an empty list, and are no part of a baseline."""
    credits_N = []
    for start in range(0, len(scores_N), group_size):
        returns = [[] if s is None else returns_to_go(s, gamma) for s in scores_N[start : start + group_size]]
        for i, own in enumerate(returns):
            others = [other for j, other in enumerate(returns) if j != i]
            credits_N.append([_centred(value, [o[m] for o in others if len(o) > m]) for m, value in enumerate(own)])
    return credits_N


def _centred(value: float, others: Sequence[float]) -> float:
    """value - mean(others), which is exactly 0 if all are equal; the value itself without others."""
    return math.fsum(value - other for other in others) / len(others) if others else value


class StepFinder:
    """Finds the steps of a completion among its tokens."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._piece_of: dict[int, str] = {}  # decoded single tokens

    def steps_before(self, ids: Sequence[int], text: str, ends: Sequence[int]) -> list[int] | None:
        """The number of complete steps before each token; step i is complete after `ends[i]` characters of `text`.

        A character that consists of several tokens counts from the last of them on. None if `text` is no part of what
        the tokens spell, for example because the tokenizer parses responses.
        """
        whole = self._decode(ids)
        shift = whole.find(text)
        if shift < 0:
            return None
        for token in set(ids) - self._piece_of.keys():
            self._piece_of[token] = self._decode([token])
        pieces = [self._piece_of[token] for token in ids]
        spelt: Callable[[int], int]  # number of tokens -> characters that they spell
        if "".join(pieces) == whole:
            spelt = list(accumulate(map(len, pieces), initial=0)).__getitem__
        else:  # there are characters of several tokens, or the text of a token depends on those before it

            def spelt(tokens: int) -> int:
                text = self._decode(ids[:tokens])
                differs = (place for place, (a, b) in enumerate(zip(text, whole, strict=False)) if a != b)
                return next(differs, min(len(text), len(whole)))

        tokens_of: list[int] = []  # the number of tokens after which each step is complete
        for end in ends:
            first = tokens_of[-1] if tokens_of else 0
            tokens_of.append(bisect.bisect_left(range(len(ids) + 1), end + shift, lo=first, key=spelt))
        return [bisect.bisect_right(tokens_of, token) for token in range(len(ids))]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


def token_credits(
    finder: StepFinder,
    ids_B: Sequence[Sequence[int]],
    texts_B: Sequence[str],
    scores_B: Sequence[PrefixScores | None],
    credits_B: Sequence[Sequence[float]],
    last_turns_B: Sequence[int],
    width: int,
) -> torch.Tensor:
    """The credit of each token, padded with 0 to `width` tokens. It is 0 in completions without prefix scores.

    `last_turns_B` are the first tokens of the last turns, to which all steps belong: before them no step is complete.
    """
    credits_B_T = torch.zeros(len(ids_B), width)
    completions = zip(ids_B, texts_B, scores_B, credits_B, last_turns_B, strict=True)
    for row, (ids, text, pairs, credits, start) in enumerate(completions):
        if pairs is not None:
            turn = split_turns(text)[0][-1] if start else text
            before = len(text) - len(turn)
            # The last step ends with the last token, whatever it spells.
            ends = [place - before for place, _ in pairs[:-1]]
            steps = finder.steps_before(ids[start:], turn, ends)
            if steps is not None:
                credits_B_T[row, : len(ids)] = torch.tensor([credits[step] for step in [0] * start + steps])
    return credits_B_T


class StepCreditExtra(Extra):
    """Gives every token the advantage of its completion plus the weighted credit of its step."""

    name = "step_credit"
    Options = StepCreditOptions
    switch = "step_credit"
    needs_prefix_scores = True

    @classmethod
    def check(cls, args: Any) -> None:
        if not 0 <= args.step_credit < math.inf:
            raise ValueError(f"step_credit={args.step_credit} must be a number of at least 0; 0 turns it off")
        if not 0 < args.gamma <= 1:
            raise ValueError(f"gamma={args.gamma} must be above 0 and at most 1; 1 does not discount")
        if args.step_credit and args.importance_sampling_level == "sequence":
            raise ValueError(
                "step_credit does not work with importance_sampling_level='sequence', whose gradient gives every "
                "token the mean advantage of its completion; set importance_sampling_level='token', or step_credit=0"
            )

    @classmethod
    def check_task(cls, args: Any, task: Task | None) -> None:
        if not args.step_credit:
            return
        if task is None or not task.defines("prefix_scores"):
            name = "there is no task" if task is None else f"task {task.name!r} does not define it"
            raise ValueError(f"step_credit={args.step_credit} needs Task.prefix_scores, but {name}; set step_credit=0")
        if task.policy == "masked":
            raise ValueError(
                f"step_credit does not work with task {task.name!r}: a masked language model writes all tokens at "
                "once, so that there are no steps; set step_credit=0"
            )

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        if trainer.tools:
            raise ValueError("step_credit does not work with tools, whose results are in the text; set step_credit=0")
        self._steps = StepFinder(trainer._tokenizer)

    def after_rewards(self, output: dict[str, Any]) -> None:
        record, size = self._record, self._trainer.num_generations
        scores_B = [outcome.prefix_scores for outcome in record.outcomes]
        scores_N = gather_object(scores_B)
        credits_N = step_credits(scores_N, size, self._args.gamma)
        assert record.without_signal_P is not None
        mask_B_T, advantages_B = output["completion_mask"], output["advantages"]
        has_credit_N = torch.tensor([any(credits) for credits in credits_N], device=record.without_signal_P.device)
        record.without_signal_P &= ~(has_credit_N & gather(mask_B_T.any(1))).view(-1, size).any(1)
        first = self._trainer.accelerator.process_index * len(advantages_B)
        credits_B_T = self._args.step_credit * token_credits(
            self._steps,
            record.completion_ids,
            record.completions,
            scores_B,
            credits_N[first : first + len(advantages_B)],
            record.last_turns,
            mask_B_T.shape[1],
        ).to(advantages_B)
        output["advantages"] = (advantages_B[:, None] + credits_B_T) * mask_B_T
        sums = torch.stack([(credits_B_T * mask_B_T).abs().sum(), mask_B_T.sum().to(advantages_B)])
        credit, tokens = gather(sums).view(-1, 2).sum(0).tolist()
        self._metrics["step_credit/steps"].append(sum(map(len, credits_N)) / len(credits_N))
        self._metrics["step_credit/unscored"].append(scores_N.count(None) / len(scores_N))
        self._metrics["step_credit/mean_abs"].append(credit / max(tokens, 1))
