"""Prioritised replay of groups with a learning signal, in place of groups without one (`replay_size`).

Groups are kept with the log-probs of the policy that sampled them.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather, gather_object

from ...task import option
from ..groups import OF_SAMPLER, RolloutGroups, StoredGroup, check_replaceable, check_whole_groups
from .base import Extra

MAX_AGE = 50  # optimizer steps after which a stored group is dropped
LARGEST_SHARE = 0.5  # of all groups, that replay may replace on average


@dataclass
class ReplayOptions:
    """Replay"""

    replay_size: int = option(0, "Number of groups stored to replace groups without signal. 0: no replay.")
    replay_alpha: float = option(0.6, "How strongly replay prefers groups with large advantages. 0: no preference.")


class ReplayBuffer:
    """Groups are drawn with probability P_i ~ priority_i ** alpha; their importance weights are (N P_i) ** -beta,
    divided by the largest in the buffer. Groups older than `max_age` steps are dropped, and the oldest when full."""

    def __init__(self, capacity: int, max_age: int, alpha: float = 0.6, beta: float = 0.4, seed: int = 0):
        self._groups: deque[StoredGroup] = deque(maxlen=capacity)
        self._max_age, self._alpha, self._beta = max_age, alpha, beta
        self._random = random.Random(seed)
        self._allowed = 0.0  # groups that may be replaced, including the fraction left over from earlier rollouts
        self._first = 0  # the process whose groups are considered first in the next rollout

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, group: StoredGroup) -> None:
        self._groups.append(group)

    def drop_older(self, step: int) -> None:
        """Drop groups that were sampled more than `max_age` steps before `step`."""
        while self._groups and step - self._groups[0].step > self._max_age:
            self._groups.popleft()

    def drop_unlike(self, rollout: dict[str, Any]) -> None:
        """Drop groups that do not fit into `rollout`: the run was resumed with or without `gamma`, a constraint or
        `importance_sampling_correction`, unlike before."""
        kept = [
            group
            for group in self._groups
            if group.advantages.ndim == rollout["advantages"].ndim
            and group.of_sampler.keys() == set(OF_SAMPLER) & rollout.keys()
            and bool(group.mask_of_token) == ("mask_numbers" in rollout)
        ]
        self._groups = deque(kept, self._groups.maxlen)

    def sample(self, count: int) -> list[tuple[StoredGroup, float]]:
        """Up to `count` different groups, each with its importance weight."""
        chosen: list[tuple[StoredGroup, float]] = []
        probabilities, weights = probabilities_and_weights([g.priority for g in self._groups], self._alpha, self._beta)
        left = list(range(len(self._groups)))
        for _ in range(min(count, len(left))):
            index = self._random.choices(left, weights=[probabilities[i] for i in left])[0]
            left.remove(index)
            chosen.append((self._groups[index], weights[index]))
        return chosen

    def allot(self, is_empty_P: Sequence[bool], stored: Sequence[int], fraction: float) -> list[int]:
        """Choose the groups of a rollout to replace: groups without signal, on average at most `fraction` of all.

        `is_empty_P` covers the groups of all processes, in the order of the processes; `stored` says how many groups
        each process can provide. All processes must call this and get the same answer. A fraction of a group is
        carried over to the next rollout, so that replay also works with one group per process, or one in total."""
        groups = len(is_empty_P) // len(stored)
        self._allowed += fraction * len(is_empty_P)
        count = int(self._allowed + 1e-9)
        self._allowed -= count
        # Processes take turns, and a different one starts each time.
        order = [(self._first + turn) % len(stored) for turn in range(len(stored))]
        self._first = (self._first + 1) % len(stored)
        offers = []
        for process in order:
            empty = [p for p in range(process * groups, (process + 1) * groups) if is_empty_P[p]]
            offers.append(empty[: stored[process]])
        turns = itertools.chain.from_iterable(itertools.zip_longest(*offers))
        return [p for p in turns if p is not None][:count]

    def state_dict(self) -> dict[str, Any]:
        return {
            "groups": [vars(group) for group in self._groups],
            "random": self._random.getstate(),
            "allowed": self._allowed,
            "first": self._first,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._groups.clear()
        self._groups.extend(StoredGroup(**group) for group in state["groups"])
        self._random.setstate(state["random"])
        self._allowed, self._first = state["allowed"], state["first"]

    def share_out(self, states: Sequence[dict[str, Any]], index: int, count: int) -> dict[str, Any]:
        """The state of buffer `index` of `count`, after the groups of another number of buffers are redistributed."""
        groups = sorted((group for state in states for group in state["groups"]), key=lambda group: group["step"])
        return self.state_dict() | {"groups": groups[index::count]}


def probabilities_and_weights(
    priorities: Sequence[float], alpha: float, beta: float
) -> tuple[list[float], list[float]]:
    """The probability of drawing each item, and the importance weight that corrects for it."""
    if not priorities:
        return [], []
    powers = [p**alpha for p in priorities]
    total = sum(powers)
    probabilities = [p / total for p in powers]
    raw = [(len(powers) * p) ** -beta for p in probabilities]
    largest = max(raw)
    return probabilities, [w / largest for w in raw]


class ReplayExtra(Extra):
    """Stores groups with signal and their results, and replaces groups without signal by stored ones."""

    name = "replay"
    Options = ReplayOptions
    switch = "replay_size"
    is_common = False
    replaces_groups = True
    needs_fsdp2 = True

    @classmethod
    def check(cls, args: Any) -> None:
        if args.replay_size:
            check_whole_groups(args, "replay_size")

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        check_replaceable(trainer, "replay_size")
        args, seed = self._args, self._args.seed + trainer.accelerator.process_index
        self.state = ReplayBuffer(args.replay_size, MAX_AGE, args.replay_alpha, seed=seed)

    @torch.no_grad()
    def replace_groups(self, groups: RolloutGroups) -> None:
        trainer, buffer, output = self._trainer, self.state, groups.output
        step, first = trainer.state.global_step, groups.first
        if "old_per_token_logps" not in output:
            # TRL leaves them out where they equal the current ones, which those of a stored group do not.
            output["old_per_token_logps"] = trainer.scoring.logps(output, of_reference=False)
        buffer.drop_older(step)
        buffer.drop_unlike(output)
        is_empty_P = groups.without_signal_P
        allotted = buffer.allot(is_empty_P, gather_object([len(buffer)]), LARGEST_SHARE)
        mine = sorted(group - first for group in allotted if first <= group < first + groups.count)
        drawn = buffer.sample(len(mine))
        chosen = [(group, stored, weight) for group, (stored, weight) in zip(mine, drawn, strict=True)]
        kept = [group for group in range(groups.count) if not is_empty_P[first + group]]
        for number, group in zip(kept, groups.stored(kept), strict=True):
            group.mean_reward, group.success = groups.results[number]
            buffer.add(group)
        groups.replace(chosen, len(allotted))
        self._log([stored for _, stored, _ in chosen], step)

    def _log(self, replayed: Sequence[StoredGroup], step: int) -> None:
        facts = [
            [1.0, float(step - one.step), one.mean_reward, one.success, float(not math.isnan(one.success))]
            for one in replayed
        ]
        sums = torch.tensor([[0.0] * 5, *facts], device=self._trainer.accelerator.device).nansum(0)
        sums = gather(torch.cat([sums, sums.new_tensor([len(self.state)])])).view(-1, 6).sum(0)
        replaced_groups, age, reward, success, with_results, stored_groups = sums.tolist()
        self._metrics["replay/size"].append(stored_groups)
        self._metrics["replay/replaced_groups"].append(replaced_groups)
        if replaced_groups:
            self._metrics["replay/age"].append(age / replaced_groups)
        if with_results:
            self._metrics["replay/mean_reward"].append(reward / with_results)
            self._metrics["replay/success"].append(success / with_results)
