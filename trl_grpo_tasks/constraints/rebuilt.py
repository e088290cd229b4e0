"""Completions that another program samples token by token, also where the constraint forces the token."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from .base import Constraint
from .shared import Forced, SharedStates
from .table import MaskTable
from .workers import WorkerStates, states_for


class ReplayedStates:
    """States by slot that advance by one token at a time, with the methods of SharedStates. The given states advance
    past forced tokens at once, so that a forced token costs no work when it comes."""

    def __init__(self, states: SharedStates | WorkerStates):
        self._states = states
        self._forced: dict[int, deque[tuple[int, int]]] = {}  # tokens that must follow, and their mask numbers

    def start(self, slots: Sequence[int], rows: Sequence[Mapping[str, Any]]) -> None:
        for slot, forced in zip(slots, self._states.start(slots, rows), strict=True):
            self._expect(slot, forced)

    def restart(self, slot: int, tokens: Sequence[int]) -> None:
        self._expect(slot, self._states.restart(slot, tokens))

    def numbers(self, slots: Sequence[int]) -> list[int]:
        numbers = self._states.numbers(slots)
        return [self._forced[slot][0][1] if self._forced[slot] else n for slot, n in zip(slots, numbers, strict=True)]

    def accept(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """Accept a token for each slot. Raises ValueError if it is not allowed."""
        sampled: dict[int, int] = {}
        for slot, token in zip(slots, tokens, strict=True):
            if not self._forced[slot]:
                sampled[slot] = token
            elif token != (expected := self._forced[slot].popleft()[0]):
                raise ValueError(f"token {token} is not allowed here: only {expected} is")
        accepted = self._states.accept(list(sampled), list(sampled.values()))
        for slot, forced in zip(sampled, accepted, strict=True):
            self._expect(slot, forced)

    def release(self, slot: int) -> None:
        self._forced.pop(slot, None)
        self._states.release(slot)

    def _expect(self, slot: int, forced: Forced) -> None:
        self._forced[slot] = deque(zip(forced.tokens, forced.numbers, strict=True))


def replay_all(
    constraint: Constraint, rows: Sequence[Mapping[str, Any]], completions: Sequence[Sequence[int]], table: MaskTable
) -> list[list[int]]:
    """Return the table number of the mask at each token of each completion.

    The completions advance together, so that those with equal beginnings share their states. Raises ValueError if a
    completion has a token that its constraint does not allow.
    """
    states = ReplayedStates(states_for(constraint, table, len(rows)))
    states.start(range(len(rows)), rows)
    masks: list[list[int]] = [[] for _ in rows]
    for position in range(max(map(len, completions), default=0)):
        slots = [slot for slot, tokens in enumerate(completions) if position < len(tokens)]
        for slot, number in zip(slots, states.numbers(slots), strict=True):
            masks[slot].append(number)
        states.accept(slots, [completions[slot][position] for slot in slots])
    return masks
