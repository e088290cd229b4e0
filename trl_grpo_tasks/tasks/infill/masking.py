"""Gap schedules: they choose places in a text, which is a sequence of characters or tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

Pieces = Sequence[str]
LONGEST_SPAN = 6


def characters(pieces: Pieces, count: int, rng: random.Random) -> set[int]:
    """Choose single places, anywhere."""
    return set(rng.sample(range(len(pieces)), count))


def spans(pieces: Pieces, count: int, rng: random.Random) -> set[int]:
    """Choose runs of two to six places."""
    chosen: set[int] = set()
    while len(chosen) < count:
        start = rng.randrange(len(pieces))
        length = min(rng.randint(2, LONGEST_SPAN), count - len(chosen))
        chosen.update(range(start, min(start + length, len(pieces))))
    return chosen


def words(pieces: Pieces, count: int, rng: random.Random) -> set[int]:
    """Choose whole words with their punctuation, about `count` places in total, at least one word.

    A token longer than one character counts as a word.
    """
    found: list[list[int]] = [[]]
    for place, piece in enumerate(pieces):
        if piece == " ":
            found.append([])
        elif len(piece) > 1:
            found.append([place])
        else:
            found[-1].append(place)
    chosen: set[int] = set()
    candidates = [word for word in found if word]
    rng.shuffle(candidates)
    for word in candidates:
        if not chosen or len(chosen) + len(word) <= count:
            chosen.update(word)
    return chosen


def ends(pieces: Pieces, count: int, rng: random.Random) -> set[int]:
    """Choose places at the beginning, at the end, or at both."""
    before = rng.choice([0, count, rng.randint(0, count)])
    return {*range(before), *range(len(pieces) - (count - before), len(pieces))}


SCHEDULES: dict[str, Callable[[Pieces, int, random.Random], set[int]]] = {
    "characters": characters,
    "spans": spans,
    "words": words,
    "ends": ends,
}


def choose_places(pieces: Pieces, schedule: str, ratio: float, rng: random.Random) -> list[int]:
    """Choose about `ratio` of the places, at least one and at most all, in order."""
    count = min(len(pieces), max(1, round(ratio * len(pieces))))
    return sorted(SCHEDULES[schedule](pieces, count, rng))


def runs(places: Sequence[int]) -> list[list[int]]:
    """Group consecutive places into gaps."""
    found: list[list[int]] = []
    for place in places:
        if found and found[-1][-1] == place - 1:
            found[-1].append(place)
        else:
            found.append([place])
    return found
