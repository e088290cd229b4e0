"""Means over the samples of an evaluation during training, which TRL evaluates in batches of different sizes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch


class EvaluatedBatches:
    """The batches of one evaluation.

    TRL averages the values of batches, and the last batch may be smaller. With several processes it is filled up with
    rows from the beginning, which must not count twice.
    """

    def __init__(self) -> None:
        self._seen: Counter[int | None] = Counter()  # samples by row
        self._sizes: list[tuple[int, int]] = []  # samples that count, and those of them that have a score
        self.is_new_N: list[bool] = []  # for each sample of the latest batch, whether it counts

    def add(self, indexes_N: Sequence[int | None], rewards_N_F: torch.Tensor, group_size: int) -> torch.Tensor:
        """Count a batch of all processes, and return its rewards with NaN for rows that were there before.

        `indexes_N` are the rows of the samples, of which each has `group_size`; None: unknown.
        """
        self.is_new_N = []
        for index in indexes_N:
            self._seen[index] += 1
            self.is_new_N.append(index is None or self._seen[index] <= group_size)
        repeated_N = ~torch.tensor(self.is_new_N, device=rewards_N_F.device)
        rewards_N_F = rewards_N_F.masked_fill(repeated_N[:, None], torch.nan)
        scored = int((~rewards_N_F.isnan().all(1)).sum())
        self._sizes.append((sum(self.is_new_N), scored))
        return rewards_N_F

    def average(self, metrics: dict[str, list[float]]) -> None:
        """Replace the values of the batches by their means over samples."""
        for name, values in metrics.items():
            if len(values) != len(self._sizes):
                continue
            is_of_scores = name == "reward" or name.startswith("rewards/")
            sized = zip(values, self._sizes, strict=True)
            weighted = [(value, size[is_of_scores]) for value, size in sized if not math.isnan(value)]
            if total := sum(weight for _, weight in weighted):
                values[:] = [sum(value * weight for value, weight in weighted) / total]
