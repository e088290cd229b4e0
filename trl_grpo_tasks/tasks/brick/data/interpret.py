"""Free captions: the request of the levels that comes nearest to a caption in the user's own words.

A category is recognised by its name, a synonym, or a word within a typing error of either. Sizes are read from phrases
of captions ("4 long"), from products ("4 x 3"), from weights ("200 g") and from words such as "big". The request with
the nearest sizes wins. This needs no model, and the same caption is always understood in the same way.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from .captions import PHRASES, adjectives, choices
from .catalogue import CATEGORIES, LEVELS, Request

SYNONYMS = {
    "sofa": "couch settee loveseat", "mug": "cup beaker", "ship": "boat vessel yacht sailboat",
    "car": "automobile vehicle sedan truck", "train": "locomotive engine", "stairs": "staircase stairway stair steps",
    "chair": "stool armchair throne", "bookshelf": "bookcase shelves cupboard cabinet", "arch": "gate gateway archway",
    "bridge": "viaduct overpass", "house": "cottage hut home cabin building", "lamp": "light lantern",
    "wall": "fence barrier", "tower": "castle skyscraper turret", "stack": "pile column", "tree": "fir pine oak",
    "bed": "cot bunk", "table": "worktop", "bench": "pew", "desk": "workbench", "piano": "pianoforte",
    "guitar": "ukulele", "pyramid": "ziggurat", "balcony": "terrace", "shelf": "ledge",
    "diving board": "springboard", "street lamp": "streetlight streetlamp lamppost", "crane": "derrick",
    "footbridge": "walkway",
}  # fmt: skip
SIZE_WORDS = {"small": "small tiny little mini", "medium": "medium normal", "large": "large big huge giant"}
TALL_WORDS = {"low": "low short", "tall": "tall high"}
_NUMBERS = "one two three four five six seven eight nine ten eleven twelve"
NUMBER_WORDS = {word: str(number) for number, word in enumerate(_NUMBERS.split(), 1)}
_IGNORED = """a an and at bricks build by carries carry carrying cells for from g gram grams hold holding holds in is
it its kg kilo kilogram kilograms kilos make me of on please studs that the this times to which with world x"""
_WEIGHT = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(kg|kilos?|kilograms?|g|grams?)\b")
_PRODUCT = re.compile(r"\b([0-9]+) ?(?:x|by|times) ?([0-9]+)(?: ?(?:x|by|times) ?([0-9]+))?\b")
_UNITS = r"(?: (?:cells?|studs?|bricks?|layers?))?"
LEAST_SIMILARITY = 0.8  # of a misspelt word to a category's name, as difflib measures it


@dataclass
class Wishes:
    """What was read from a caption: parameters by name, weights in g, and words for size and height."""

    params: dict[str, Any] = field(default_factory=dict)
    grams: tuple[float, ...] = ()
    size: str | None = None
    tall: str | None = None


def nearest_requests(text: str, levels: Sequence[str]) -> Iterator[tuple[str, Request, int]]:
    """Generate (level, request, detail) of these levels, nearest to the text first, all of one category.

    Among equals, the first level comes first. Raises ValueError if no category is recognised.
    """
    known = list(dict.fromkeys(name for level in levels for name in LEVELS[level].grids))
    words = _words(text)
    name = _category(words, known)
    if name is None:
        raise ValueError(f"no category matches {text!r}; categories are: {', '.join(sorted(known))}")
    wishes = _wishes(" ".join(words), name)
    ranked = [
        ((*_distance(wishes, level, request, detail), place), (level, request, detail))
        for place, level in enumerate(levels)
        for request, detail in choices(level)
        if request.category == name
    ]
    yield from (choice for _, choice in sorted(ranked, key=lambda pair: pair[0]))


def unused_words(text: str, understood: str) -> list[str]:
    """Return the words of a text that the caption it is understood as does not account for."""
    said = set(_words(understood))
    meant = {word for group in (SYNONYMS, SIZE_WORDS, TALL_WORDS) for key, words in group.items()
             if said & set(key.split()) for word in words.split()}  # fmt: skip
    left = [word for word in _words(text) if word not in {*said, *meant, *_IGNORED.split()} and not word[0].isdigit()]
    near = {word for word in left if difflib.get_close_matches(word, said | meant, 1, LEAST_SIMILARITY)}
    return list(dict.fromkeys(word for word in left if word not in near))


def _words(text: str) -> list[str]:
    found = re.findall(r"[0-9]+(?:\.[0-9]+)?|[a-z]+", text.lower())
    return [NUMBER_WORDS.get(word, word) for word in found]


def _category(words: Sequence[str], known: Sequence[str]) -> str | None:
    """Return the category that is named first. A whole name is better than its last word, such as "lamp"."""
    spellings: dict[str, str] = {}
    for name in known:
        spellings |= dict.fromkeys(SYNONYMS.get(name, "").split(), name)
    vocabulary = {*spellings, *(word for name in known for word in name.split())}
    meant = [_nearest_word(word, vocabulary) for word in words]
    best: tuple[tuple[int, int, int], str] | None = None
    for name in known:
        parts = name.split()
        for start, word in enumerate(meant):
            whole = meant[start : start + len(parts)] == parts or spellings.get(word) == name
            if whole or word == parts[-1]:
                key = (int(not whole), start, -len(parts))
                best = min(best or (key, name), (key, name))
    return None if best is None else best[1]


def _nearest_word(word: str, vocabulary: set[str]) -> str:
    """Return the word of the vocabulary that this word is, is the plural of, or is a misspelling of; else the word."""
    for candidate in (word, word.removesuffix("s"), word.removesuffix("es")):
        if candidate in vocabulary:
            return candidate
    near = difflib.get_close_matches(word, sorted(vocabulary), 1, LEAST_SIMILARITY) if len(word) > 3 else []
    return near[0] if near else word


def _wishes(text: str, name: str) -> Wishes:
    category, wishes = CATEGORIES[name], Wishes()

    def weight(match: re.Match[str]) -> str:
        times = 1000 if match[2].startswith("k") else 1
        wishes.grams += (float(match[1]) * times,)
        return " "

    text = _WEIGHT.sub(weight, text)
    # Phrases with a word before the number come first: "seat 3 high" is not a height of 3.
    known = (*category.main, *category.fine, *filter(None, [category.support]))
    names = sorted(known, key=lambda one: PHRASES[one].startswith("{}"))
    for param in names:
        phrase = PHRASES[param].replace("high", "(?:high|tall)").replace("wide", "(?:wide|broad)")
        pattern = rf"\b(?:{phrase.format(rf'([0-9]+){_UNITS}')}|{param} ([0-9]+))\b"
        if param == "lean":
            pattern = r"\b(straight|crossed|(?:leaning|zigzag) (?:right|back))()\b"
        if match := re.search(pattern, text):
            value = match[1] or match[2]
            wishes.params[param] = int(value) if value.isdigit() else value
            text = text[: match.start()] + text[match.end() :]
    if match := _PRODUCT.search(text):
        for param, value in zip(category.main, filter(None, match.groups()), strict=False):
            wishes.params.setdefault(param, int(value))
    spoken = set(text.split())
    for words, meaning in ((SIZE_WORDS, "size"), (TALL_WORDS, "tall")):
        setattr(wishes, meaning, next((key for key, said in words.items() if spoken & set(said.split())), None))
    return wishes


def _distance(wishes: Wishes, level: str, request: Request, detail: int) -> tuple[float, ...]:
    """Return how far a request is from the wishes, as numbers of decreasing importance."""
    category, params = CATEGORIES[request.category], dict(request.params)
    off = sum(
        abs(params[name] - value) if isinstance(value, int) else 10.0 * (params[name] != value)
        for name, value in wishes.params.items()
        if name in params  # the support is not part of a request
    )
    weights = abs(len(request.grams) - len(wishes.grams)) if request.grams and wishes.grams else 0
    ratios = sum(
        abs(math.log(max(asked, 1e-3) / grams)) for asked, grams in zip(wishes.grams, request.grams, strict=False)
    )
    main = tuple(params[name] for name in category.main)
    size, tall = adjectives(level)[request.category].get(main, (None, None))
    words = 0
    if wishes.size or not wishes.params.keys() & {*category.size}:
        words += 2 * (size != (wishes.size or "medium"))
    if wishes.tall or not wishes.params.keys() & {*category.tall}:
        words += tall != (wishes.tall or "")
    wanted = 3 if wishes.params.keys() & {*category.fine, category.support} else 2 if wishes.params else 1
    return (weights, off, ratios, words, 0 if wishes.grams else sum(request.grams), abs(detail - wanted))
