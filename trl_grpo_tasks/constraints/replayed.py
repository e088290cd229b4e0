"""The masks of completions that another program sampled."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from .base import Constraint
from .table import MaskTable
from .workers import states_for


def replay_all(
    constraint: Constraint, rows: Sequence[Mapping[str, Any]], completions: Sequence[Sequence[int]], table: MaskTable
) -> list[list[int]]:
    """Return the table number of the mask at each token of each completion.

    The completions advance together, so that those with equal beginnings share their states. Raises ValueError if a
    completion has a token that its constraint does not allow.
    """
    states = states_for(constraint, table, len(rows))
    slots = list(range(len(rows)))
    masks: list[list[int]] = [[] for _ in rows]
    forced = [deque(zip(*each, strict=True)) for each in states.start(slots, rows)]
    for position in range(max(map(len, completions), default=0)):
        sampled = []
        for slot in slots:
            if position >= len(completions[slot]):
                continue
            if not forced[slot]:
                sampled.append(slot)
                continue
            token, number = forced[slot].popleft()
            if token != completions[slot][position]:
                raise ValueError(f"token {completions[slot][position]} is not allowed here: only {token} is")
            masks[slot].append(number)
        for slot, number in zip(sampled, states.numbers(sampled), strict=True):
            masks[slot].append(number)
        accepted = states.accept(sampled, [completions[slot][position] for slot in sampled])
        for slot, each in zip(sampled, accepted, strict=True):
            forced[slot].extend(zip(*each, strict=True))
    return masks
