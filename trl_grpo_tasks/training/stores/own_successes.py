"""A store of the model's own verified successes, which training imitates (`own_successes`)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

MOST_PER_ROW = 4  # different successes that are kept per row


def check_own_successes(args: Any) -> None:
    """Raise ValueError for options of a TaskGRPOConfig with which own successes cannot be imitated."""
    if args.own_successes < 0:
        raise ValueError(f"own_successes={args.own_successes} must be at least 0, the number of stored samples")
    if not 0 < args.own_successes_fraction <= 1:
        raise ValueError(f"own_successes_fraction={args.own_successes_fraction} must be above 0 and at most 1")
    if not args.own_successes_weight > 0:
        raise ValueError(
            f"own_successes_weight={args.own_successes_weight} must be above 0; own_successes=0 turns imitation off"
        )
    if args.relabel and not args.own_successes:
        raise ValueError("relabel=True needs a store: set own_successes, for example to 512, or relabel=False")


@dataclass(frozen=True)
class Success:
    """A completion that solves a row. `answer` is its canonical form, `total` its reward."""

    row: str
    answer: str
    prompt_ids: list[int]
    completion_ids: list[int]
    total: float
    step: int
    is_relabelled: bool = False


class SuccessStore:
    """Keeps the best successes of each row, at most MOST_PER_ROW different ones and at most `capacity` in total.

    If it is full, the row with the most samples loses its worst one. Among equal numbers it is the row with the most
    successes so far, so that rows which are seldom solved stay; then the one whose sample is oldest.
    """

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._rows: dict[str, list[Success]] = {}  # from the best to the worst
        self._found: dict[str, int] = {}  # how often each stored row was solved, since it is stored

    def __len__(self) -> int:
        return sum(map(len, self._rows.values()))

    @property
    def relabelled(self) -> int:
        """The number of stored samples whose prompt was chosen after the fact."""
        return sum(success.is_relabelled for kept in self._rows.values() for success in kept)

    def update(self, successes: Iterable[Success]) -> None:
        """Add the successes of a rollout, then drop what exceeds the capacity."""
        for success in successes:
            kept = self._rows.setdefault(success.row, [])
            self._found[success.row] = self._found.get(success.row, 0) + 1
            same = [other for other in kept if other.answer == success.answer]
            if not same or same[0].total < success.total:
                kept[:] = sorted([other for other in kept if other not in same] + [success], key=lambda s: -s.total)
                del kept[MOST_PER_ROW:]
        for _ in range(len(self) - self._capacity):
            row = max(self._rows, key=lambda r: (len(self._rows[r]), self._found[r], -self._rows[r][-1].step))
            self._rows[row].pop()
            if not self._rows[row]:
                del self._rows[row], self._found[row]

    def draw(self, count: int, rng: random.Random) -> list[Success]:
        """Draw `count` samples; none if the store is empty. No row is drawn again before every other one, and no
        sample before every other one."""
        shuffled = [rng.sample(kept, len(kept)) for kept in self._rows.values()]
        rng.shuffle(shuffled)
        turns = itertools.chain.from_iterable(itertools.zip_longest(*shuffled))
        order = [success for success in turns if success is not None]
        return list(itertools.islice(itertools.cycle(order), count))

    def state_dict(self) -> dict[str, Any]:
        return {"rows": [[vars(s) for s in kept] for kept in self._rows.values()], "found": list(self._found.values())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        stored = [[Success(**success) for success in kept] for kept in state["rows"]]
        self._rows = {kept[0].row: kept for kept in stored}
        self._found = dict(zip(self._rows, state["found"], strict=True))
