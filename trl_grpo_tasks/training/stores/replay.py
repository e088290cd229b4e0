"""Prioritised replay of groups with a learning signal, with the log-probs of the policy that sampled them."""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from trl.trainer.utils import pad

from ...constraints.table import MaskTable

# Entries of a rollout that belong to the policy that sampled it: its log-probs in training and at sampling time, and
# the ratio of the two that importance_sampling_correction applies, which is one per completion in sequence mode.
OF_SAMPLER = ("old_per_token_logps", "sampling_per_token_logps", "importance_sampling_ratio")
PER_TOKEN = (*OF_SAMPLER, "advantages", "ref_per_token_logps", "mask_numbers")  # advantages only with step_credit


@dataclass
class StoredGroup:
    """The completions of one prompt, as unpadded tensors on the CPU. A completion that `mask_truncated_completions`
    left out of the loss has no tokens."""

    row: str
    prompt_ids: torch.Tensor
    completion_ids: list[torch.Tensor]
    of_sampler: dict[str, list[torch.Tensor]]  # the entries OF_SAMPLER that the rollout had, of each completion
    advantages: torch.Tensor  # one value per completion, or with step_credit one per token, padded with 0
    priority: float
    step: int
    # The distinct masks that the completions were sampled under (MaskTable.export), and the index of each token's
    # mask.
    masks: list[torch.Tensor] = field(default_factory=list)
    mask_of_token: list[torch.Tensor] = field(default_factory=list)
    # Of the completions when they were sampled; NaN if none could be scored.
    mean_reward: float = math.nan
    success: float = math.nan


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
        """Drop groups that do not fit into `rollout`: the run was resumed with another `step_credit`, constraint or
        `importance_sampling_correction`."""
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


def unpadded(rollout: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The prompts and the completions of a rollout as TRL returns it, without padding."""
    prompts = [ids[mask.bool()] for ids, mask in zip(rollout["prompt_ids"], rollout["prompt_mask"], strict=True)]
    completions = [
        ids[mask.bool()] for ids, mask in zip(rollout["completion_ids"], rollout["completion_mask"], strict=True)
    ]
    return prompts, completions


def groups_of(
    rollout: dict[str, Any],
    rows: Sequence[str],
    groups: Sequence[int],
    group_size: int,
    step: int,
    table: MaskTable | None = None,
) -> list[StoredGroup]:
    """The given groups of a rollout, ready to be stored; each must have a token in the loss. The rollout's log-probs
    must be those of the policy that sampled it; it may have none if the groups are used at once. `table` is the table
    of its `mask_numbers`, where it has them."""
    prompts, completions = unpadded(rollout)
    stored = []
    for group in groups:
        members = range(group * group_size, (group + 1) * group_size)
        advantages = rollout["advantages"][list(members)].cpu()
        lengths = [len(completions[i]) for i in members]
        if advantages.ndim == 2:
            advantages = advantages[:, : max(lengths)]
            used = torch.cat([row[:length] for row, length in zip(advantages, lengths, strict=True)])
        else:
            used = advantages[torch.tensor(lengths) > 0]
        numbers: list[list[int]] = []
        if table is not None:
            numbers = [rollout["mask_numbers"][i, : len(completions[i])].tolist() for i in members]
        index_of = {number: index for index, number in enumerate(dict.fromkeys(itertools.chain(*numbers)))}
        stored.append(
            StoredGroup(
                row=rows[members[0]],
                prompt_ids=prompts[members[0]].cpu(),
                completion_ids=[completions[i].cpu() for i in members],
                of_sampler={
                    name: [rollout[name][i, : len(completions[i])].to("cpu", copy=True) for i in members]
                    for name in OF_SAMPLER
                    if name in rollout
                },
                advantages=advantages,
                priority=used.abs().mean().item() + 0.01,
                step=step,
                masks=[] if table is None else table.export(index_of),
                mask_of_token=[torch.tensor([index_of[n] for n in row], dtype=torch.int32) for row in numbers],
            )
        )
    return stored


def put_groups(
    rollout: dict[str, Any],
    chosen: Sequence[tuple[int, StoredGroup, float]],
    group_size: int,
    pad_id: int,
    table: MaskTable | None = None,
) -> list[int]:
    """Overwrite groups of a rollout with stored groups and their importance weights, and pad again to the new lengths.
    Returns the replaced rows, whose reference log-probs the caller must recompute."""
    device = rollout["prompt_ids"].device
    prompts, completions = unpadded(rollout)
    # Cut to the length of each completion; they are padded again below.
    per_token = {
        name: [values[i, : len(ids)] for i, ids in enumerate(completions)]
        for name, values in rollout.items()
        if name in PER_TOKEN and values.ndim == 2 and values.shape[1] == rollout["completion_ids"].shape[1]
    }
    replaced = []
    for group, stored, weight in chosen:
        numbers = [] if table is None else table.add(stored.masks)
        for j in range(group_size):
            i = group * group_size + j
            replaced.append(i)
            prompts[i] = stored.prompt_ids.to(device)
            completions[i] = stored.completion_ids[j].to(device)
            for name, values in per_token.items():
                values[i] = torch.zeros(len(completions[i]), dtype=rollout[name].dtype, device=rollout[name].device)
            for name, of_completions in stored.of_sampler.items():
                of_tokens = of_completions[j].to(device)
                if name in per_token:  # if all completions had one token, a ratio per completion looks the same
                    per_token[name][i] = of_tokens.expand(len(completions[i]))
                else:
                    rollout[name][i, : len(of_tokens)] = of_tokens
            if table is not None:
                renumbered = [numbers[index] for index in stored.mask_of_token[j].tolist()]
                per_token["mask_numbers"][i] = torch.tensor(renumbered, dtype=rollout["mask_numbers"].dtype)
            advantages = weight * stored.advantages[j].to(device)
            if "advantages" in per_token:
                per_token["advantages"][i] = advantages[: len(completions[i])]
            else:
                rollout["advantages"][i] = advantages
    for name, tensors, value, side in (
        ("prompt", prompts, pad_id, "left"),
        ("completion", completions, pad_id, "right"),
    ):
        rollout[f"{name}_ids"] = pad(tensors, value, side)
        rollout[f"{name}_mask"] = pad([torch.ones_like(ids) for ids in tensors], 0, side)
    for name, values in per_token.items():
        rollout[name] = pad(values, 0, "right")
    return replaced
