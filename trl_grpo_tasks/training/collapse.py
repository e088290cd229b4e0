"""Detection of a collapse: pass@k falls while success rises, because the completions of a prompt become alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

LEAST_LOGS = 6  # two in each third
LEAST_CHANGE = 0.02
STANDARD_ERRORS = 2.0


def collapse(history: Sequence[Mapping[str, Any]], prompts_per_step: float) -> dict[str, tuple[float, float]] | None:
    """If pass@k has fallen while success rose: the values before and now of pass@1, which is success, and of
    pass@k for the largest k. Otherwise None.

    `history` holds the logs of a run so far; after a change of the curriculum's level, only later logs count. They are
    cut into thirds, and the last third is compared with each of the others: success must have risen and pass@k fallen,
    each by more than two points and two standard errors. Both are means over prompts of numbers between 0 and 1, so
    that their variance is at most p (1 - p), and the number of prompts bounds the standard error.
    """
    logs: list[Mapping[str, Any]] = []
    prompts: list[float] = []
    last_step, level = 0, None
    for line in history:
        if "pass@1" not in line:  # an evaluation
            continue
        if line.get("curriculum/level") != level:
            logs, prompts, level = [], [], line.get("curriculum/level")
        logs.append(line)
        prompts.append((line["step"] - last_step) * prompts_per_step)
        last_step = line["step"]
    if len(logs) < LEAST_LOGS:
        return None
    k = max(int(name.removeprefix("pass@")) for name in logs[-1] if name.startswith("pass@"))
    names = ("pass@1", f"pass@{k}")
    if k == 1 or any(line.get(name) is None for line in logs for name in names):
        return None
    values_L_2 = np.array([[line[name] for name in names] for line in logs])
    weights_L, size = np.array(prompts), len(logs) // 3
    now, now_count = np.average(values_L_2[-size:], 0, weights_L[-size:]), weights_L[-size:].sum()
    for part in (slice(0, size), slice(size, 2 * size)):
        before, count = np.average(values_L_2[part], 0, weights_L[part]), weights_L[part].sum()
        changes = now - before
        limits = [_noise((p + q) / 2, 1 / count + 1 / now_count) for p, q in zip(before, now, strict=True)]
        if changes[0] > limits[0] and changes[1] < -limits[1]:
            return {name: (float(a), float(b)) for name, a, b in zip(names, before, now, strict=True)}
    return None


def _noise(p: float, variance_factor: float) -> float:
    """The change of a success rate near `p` up to which it may be noise."""
    return max(LEAST_CHANGE, STANDARD_ERRORS * math.sqrt(p * (1 - p) * variance_factor))
