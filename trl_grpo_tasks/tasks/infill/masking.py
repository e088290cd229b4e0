"""Gap schedules: they choose places in a text, which is a sequence of characters or tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

SPAN_LENGTHS = (2, 6)


@dataclass(frozen=True)
class Layout:
    """What schedules know of a text: the number of its places, which places form words, and how long spans are."""

    length: int
    words: Sequence[Sequence[int]]
    span_lengths: tuple[int, int]


def characters(layout: Layout, count: int, rng: random.Random) -> set[int]:
    """Choose single places, anywhere."""
    return set(rng.sample(range(layout.length), count))


def spans(layout: Layout, count: int, rng: random.Random) -> set[int]:
    """Choose runs of places; the last one may be shorter, so that there are `count` places."""
    chosen: set[int] = set()
    while len(chosen) < count:
        start = rng.randrange(layout.length)
        length = min(rng.randint(*layout.span_lengths), count - len(chosen))
        chosen.update(range(start, min(start + length, layout.length)))
    return chosen


def words(layout: Layout, count: int, rng: random.Random) -> set[int]:
    """Choose whole words with their punctuation, about `count` places in total, at least one word."""
    chosen: set[int] = set()
    candidates = list(layout.words)
    rng.shuffle(candidates)
    for word in candidates:
        if not chosen or len(chosen) + len(word) <= count:
            chosen.update(word)
    return chosen


def ends(layout: Layout, count: int, rng: random.Random) -> set[int]:
    """Choose places at the beginning, at the end, or at both."""
    before = rng.choice([0, count, rng.randint(0, count)])
    return {*range(before), *range(layout.length - (count - before), layout.length)}


SCHEDULES: dict[str, Callable[[Layout, int, random.Random], set[int]]] = {
    "characters": characters,
    "spans": spans,
    "words": words,
    "ends": ends,
}


def choose_places(
    pieces: Sequence[str],
    schedule: str,
    ratio: float,
    rng: random.Random,
    span_lengths: tuple[int, int] = SPAN_LENGTHS,
    words: Sequence[Sequence[int]] | None = None,
) -> list[int]:
    """Choose about `ratio` of the places, at least one and at most all, in order.

    `words` are the places of each word; by default, words are separated by pieces that are a space.
    """
    count = min(len(pieces), max(1, round(ratio * len(pieces))))
    if words is None:
        words = runs([place for place, piece in enumerate(pieces) if piece != " "])
    return sorted(SCHEDULES[schedule](Layout(len(pieces), words, span_lengths), count, rng))


def runs(places: Sequence[int]) -> list[list[int]]:
    """Group consecutive places into gaps."""
    found: list[list[int]] = []
    for place in places:
        if found and found[-1][-1] == place - 1:
            found[-1].append(place)
        else:
            found.append([place])
    return found
