"""Groups without a learning signal are sampled again, with other prompts (`resample_rounds`)."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...task import option
from ..groups import RolloutGroups, StoredGroup, check_replaceable, check_whole_groups
from .base import Extra


@dataclass
class ResamplingOptions:
    """Resampling"""

    resample_rounds: int = option(
        0,
        "At most this many more rollouts after each, in which groups without signal are replaced by new groups of "
        "other prompts. 0: none.",
    )


class ResamplingExtra(Extra):
    """Replaces groups without signal by new groups, in at most `resample_rounds` more rollouts.

    Each round samples as many groups per process as the process with most empty ones needs. Metrics and logged
    completions stay those of the first rollout, whose prompts were not selected by their outcome.
    """

    name = "resampling"
    Options = ResamplingOptions
    switch = "resample_rounds"
    replaces_groups = True

    @classmethod
    def check(cls, args: Any) -> None:
        if args.resample_rounds:
            check_whole_groups(args, "resample_rounds")

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        check_replaceable(trainer, "resample_rounds")

    @torch.no_grad()
    def replace_groups(self, groups: RolloutGroups) -> None:
        trainer, record, table = self._trainer, self._record, groups.table
        metrics, logs = copy.deepcopy(dict(self._metrics)), copy.deepcopy(trainer._logs)
        empty_P, size, first = groups.without_signal_P, groups.size, groups.first
        solved_P = (trainer.rewarding.component("success").view(-1, size) == 1).all(1).tolist()
        dropped: list[int] = []
        chosen: list[tuple[int, StoredGroup, float]] = []
        sampled = 0
        for number in range(self._args.resample_rounds):
            most = max(sum(empty_P[i : i + groups.count]) for i in range(0, len(empty_P), groups.count))
            if most == 0:
                break
            drawn = [trainer.train_example(self.draw(number, place)) for place in range(most)]
            examples = [example for example in drawn for _ in range(size)]
            output = trainer.sample_and_reward(examples)
            fresh = RolloutGroups(trainer, output, [example["row"] for example in examples])
            sampled += len(fresh.without_signal_P)
            pairs = _paired(empty_P, fresh.without_signal_P, trainer.accelerator.num_processes)
            mine = [(old - first, new - fresh.first) for old, new in pairs if first <= old < first + groups.count]
            stored = fresh.stored([new for _, new in mine])
            chosen += [(old, group, 1.0) for (old, _), group in zip(mine, stored, strict=True)]
            for old, new in mine:
                groups.results[old] = fresh.results[new]
            for old, _ in pairs:
                empty_P[old] = False
                dropped.append(old)
        trainer.latest_rollout = record
        for values, before in ((self._metrics, metrics), (trainer._logs, logs)):
            values.clear()
            values.update(before)
        if table is not None:
            trainer.generation.tables["train"] = table
        record.without_signal_P = torch.tensor(empty_P)
        groups.replace(chosen, len(dropped))
        for group, stored_group, _ in chosen:
            groups.rows[group * size : (group + 1) * size] = [stored_group.row] * size
        self._metrics["resample/sampled_groups"].append(float(sampled))
        self._metrics["resample/replaced_groups"].append(float(len(dropped)))
        if dropped:
            self._metrics["resample/dropped_solved"].append(sum(solved_P[i] for i in dropped) / len(dropped))

    def draw(self, round_number: int, place: int) -> int:
        """The index of a training row; it depends on nothing that a checkpoint would have to store."""
        trainer = self._trainer
        key = f"{self._args.seed}-{trainer._step}-{round_number}-{trainer.accelerator.process_index}-{place}"
        return random.Random(key).randrange(len(trainer.train_dataset))


def _paired(empty_P: Sequence[bool], fresh_empty_P: Sequence[bool], processes: int) -> list[tuple[int, int]]:
    """Pair each process's groups without signal with its new groups that have one: (number of the old group, number
    of the new one)."""
    old, new = len(empty_P) // processes, len(fresh_empty_P) // processes
    pairs = []
    for process in range(processes):
        empty = [i for i in range(process * old, (process + 1) * old) if empty_P[i]]
        usable = [i for i in range(process * new, (process + 1) * new) if not fresh_empty_P[i]]
        pairs += list(zip(empty, usable, strict=False))
    return pairs
