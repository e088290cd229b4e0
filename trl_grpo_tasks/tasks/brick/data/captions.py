"""Captions at three levels of detail, and their vocabulary.

A caption consists of lower-case words separated by single spaces, with commas after words. Within a level, captions
are unique. Detail 1 describes the smallest, middle and largest values of the level in words ("small", "low"). Detail 2
gives the main parameters as numbers; the others have the level's default values. Detail 3 gives all parameters.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from typing import Any

from .catalogue import CATEGORIES, LEVELS, Request

DETAILS = (1, 2, 3)
SIZE_WORDS = ("small", "medium", "large")
TALL_WORDS = ("low", "", "tall")
SUPPORTS = range(1, 7)  # possible thicknesses of supports

PHRASES = {
    "length": "{} long", "width": "{} wide", "height": "{} high", "depth": "{} deep", "reach": "reach {}",
    "span": "span {}", "base": "base {}", "steps": "{} steps", "shelves": "{} shelves", "gap": "gaps of {}",
    "seat": "seat {} high", "leg": "legs {} thick", "head": "head {} high", "drawer": "drawers {} long",
    "pillar": "pillars {} thick", "pier": "piers {} thick", "body": "body {} high", "cabin": "cabin {} long",
    "hull": "hull {} high", "mast": "mast {} high", "cab": "cab {} long", "keys": "keys {} high",
    "neck": "neck {} high", "grip": "handle {} high", "tread": "treads {} deep", "thick": "{} thick",
    "door": "door {} wide", "shade": "shade {} high", "step": "each step {} in", "crown": "crown {} wide",
    "trunk": "trunk {} high", "lean": "{}", "shift": "shift {}", "back": "back {}", "wall": "wall {} thick",
    "post": "post {} thick", "pole": "pole {} thick", "column": "column {} thick", "tower": "tower {} thick",
}  # fmt: skip


def caption(level: str, request: Request, detail: int, support: int | None) -> str:
    """Describe a request in words. `support` is the support's thickness, which only detail 3 mentions."""
    category = CATEGORIES[request.category]
    params = dict(request.params)
    words = [request.category]
    if detail == 1:
        words = [word for word in (*adjectives(level)[request.category][_main(request)], request.category) if word]
    text = ("an " if words[0][0] in "aeiou" else "a ") + " ".join(words)
    names = {1: (), 2: category.main, 3: category.main + category.fine}[detail]
    parts = [text, *(PHRASES[name].format(params[name]) for name in names)]
    if detail == 3 and category.support:
        parts.append(PHRASES[category.support].format(support))
    if request.grams:
        places = zip(request.grams, (category.place, "on the back"), strict=False)
        parts.append("with " + " and ".join(f"{grams} g {place}" for grams, place in places))
    return ", ".join(parts)


def requests_like(text: str, levels: Sequence[str]) -> list[tuple[str, Request, int]]:
    """Return (level, request, detail) for the captions of these levels that a text is, or is a part of: some words of
    the name with the category, and some of the phrases after it. Whole captions come first, then shorter ones."""
    name, *phrases = (part.strip() for part in text.lower().split(","))
    words = set(name.split()) - {"a", "an"}
    found = []
    for level in levels:
        for request, detail in choices(level):
            if not words & set(request.category.split()):
                continue
            has_support = detail == 3 and CATEGORIES[request.category].support
            for support in SUPPORTS if has_support else (None,):
                said = caption(level, request, detail, support)
                of_name, *of_phrases = said.split(", ")
                if words <= set(of_name.split()) and set(phrases) <= set(of_phrases):
                    found.append(((said != text, len(said.split())), (level, request, detail)))
    if not found:
        known = sorted({name for level in levels for name in LEVELS[level].grids})
        example = caption(levels[0], choices(levels[0])[0][0], 2, None)
        raise ValueError(
            f"no caption has {text!r}; write one such as {example!r} or a part of one; categories are: "
            f"{', '.join(known)}"
        )
    return list(dict.fromkeys(one for _, one in sorted(found, key=lambda pair: pair[0])))


@functools.cache
def choices(level: str, sharing: tuple[str, ...] = ()) -> list[tuple[Request, int]]:
    """Return every request of a level with every level of detail at which its caption is unambiguous.

    `sharing` are the levels whose worlds have one size (--world_dim), so that prompts do not tell the level: captions
    that mean different things in two of them are left out, and a request of two levels belongs to the first.
    """
    if sharing:
        meanings: dict[str, dict[Request, str]] = {}  # caption -> request -> its first level
        for name in sharing:
            for request, detail in choices(name):
                meanings.setdefault(caption(name, request, detail, None), {}).setdefault(request, name)
        return [
            (request, detail)
            for request, detail in choices(level)
            if meanings[caption(level, request, detail, None)] == {request: level}
        ]
    found = []
    usual = set()
    for request in LEVELS[level].requests():
        found.append((request, 3))
        if (key := (request.category, _main(request), request.grams)) not in usual:
            usual.add(key)
            found.append((request, 2))
            if _main(request) in adjectives(level)[request.category]:
                found.append((request, 1))
    return found


@functools.cache
def adjectives(level: str) -> dict[str, dict[tuple[Any, ...], tuple[str, str]]]:
    """Map category -> main parameters -> (size word, height word), where words describe them unambiguously."""
    mains: dict[str, set[tuple[Any, ...]]] = {}
    for request in LEVELS[level].requests():
        mains.setdefault(request.category, set()).add(_main(request))
    words = {}
    for name, found in mains.items():
        cut = len(CATEGORIES[name].size)
        sizes = _landmarks({main[:cut] for main in found}, SIZE_WORDS)
        heights = _landmarks({main[cut:] for main in found}, TALL_WORDS)
        words[name] = {main: (sizes[main[:cut]], heights[main[cut:]])
                       for main in sorted(found) if main[:cut] in sizes and main[cut:] in heights}  # fmt: skip
    return words


def _landmarks(values: Iterable[tuple[int, ...]], words: Sequence[str]) -> dict[tuple[int, ...], str]:
    """Map the smallest, middle and largest value to words; of two values only the ends; one value needs no word."""
    ordered = sorted(values, key=lambda value: (sum(value), value))
    if len(ordered) == 1:
        return {ordered[0]: ""}
    ends = {ordered[0]: words[0], ordered[-1]: words[2]}
    return {ordered[len(ordered) // 2]: words[1], **ends} if len(ordered) > 2 else ends


def _main(request: Request) -> tuple[Any, ...]:
    params = dict(request.params)
    return tuple(params[name] for name in CATEGORIES[request.category].main)


def _caption_words() -> tuple[str, ...]:
    texts = [*PHRASES.values(), *SIZE_WORDS, *TALL_WORDS, *CATEGORIES, *(c.place for c in CATEGORIES.values())]
    texts.append("a an , with g and on the back world")
    numbers = set(SUPPORTS)
    for level in LEVELS.values():
        texts += [str(value) for grid in level.grids.values() for values in grid.values() for value in values]
        numbers |= {
            level.world,
            *(n for by_first in level.grams.values() for few in by_first.values() for two in few for n in two),
        }
    texts += map(str, numbers)
    return tuple(sorted({word for text in texts for word in re.findall(r"\w+|,", text)}))


CAPTION_WORDS = _caption_words()  # every word and comma in captions and short prompts
