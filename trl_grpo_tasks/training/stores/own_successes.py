"""A store of the model's own verified successes, which training imitates (`own_successes`)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

MOST_PER_REQUEST = 4  # different successes that are kept per request


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
    """A completion that solves a row of a request. `answer` is its canonical form, `total` its reward."""

    row: str
    request: str
    answer: str
    prompt_ids: list[int]
    completion_ids: list[int]
    total: float
    step: int
    is_relabelled: bool = False


class SuccessStore:
    """Keeps the best successes of each request, at most MOST_PER_REQUEST different ones and `capacity` in total.

    If it is full, the request with the most samples loses its worst one. Among equal numbers it is the request with
    the most successes so far, so that requests which are seldom solved stay; then the one whose sample is oldest.
    """

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._requests: dict[str, list[Success]] = {}  # from the best to the worst
        self._found: dict[str, int] = {}  # how often each stored request was solved, since it is stored

    def __len__(self) -> int:
        return sum(map(len, self._requests.values()))

    @property
    def relabelled(self) -> int:
        """The number of stored samples whose prompt was chosen after the fact."""
        return sum(success.is_relabelled for kept in self._requests.values() for success in kept)

    def update(self, successes: Iterable[Success]) -> None:
        """Add the successes of a rollout, then drop what exceeds the capacity."""
        for success in successes:
            kept = self._requests.setdefault(success.request, [])
            self._found[success.request] = self._found.get(success.request, 0) + 1
            same = [other for other in kept if other.answer == success.answer]
            if not same or same[0].total < success.total:
                kept[:] = sorted([other for other in kept if other not in same] + [success], key=lambda s: -s.total)
                del kept[MOST_PER_REQUEST:]
        for _ in range(len(self) - self._capacity):
            kept_of = self._requests
            request = max(kept_of, key=lambda one: (len(kept_of[one]), self._found[one], -kept_of[one][-1].step))
            kept_of[request].pop()
            if not kept_of[request]:
                del kept_of[request], self._found[request]

    def draw(self, count: int, rng: random.Random) -> list[Success]:
        """Draw `count` samples; none if the store is empty. No request is drawn again before every other one, and no
        sample before every other one."""
        shuffled = [rng.sample(kept, len(kept)) for kept in self._requests.values()]
        rng.shuffle(shuffled)
        turns = itertools.chain.from_iterable(itertools.zip_longest(*shuffled))
        order = [success for success in turns if success is not None]
        return list(itertools.islice(itertools.cycle(order), count))

    def state_dict(self) -> dict[str, Any]:
        return {
            "requests": [[vars(s) for s in kept] for kept in self._requests.values()],
            "found": list(self._found.values()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        stored = [[Success(**success) for success in kept] for kept in state["requests"]]
        self._requests = {kept[0].request: kept for kept in stored}
        self._found = dict(zip(self._requests, state["found"], strict=True))
