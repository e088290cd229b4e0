"""Requests in words: which trial a text means, and how large the machine may be."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .designs import LEVELS
from .prompts import question
from .trials import Trial

# The first trial of this list with one of its words in the text is meant, so special words come before general ones.
_WORDS = {
    "wall": r"wall|obstacle",
    "rings": r"rings?|hoops?|aim|targets?",
    "slope": r"slopes?|hills?|uphill|climb\w*|steep|rises",
    "rough": r"rough|bump\w*|ridges?|uneven|off-?road|not flat|rugged|terrain",
    "catapult": r"catapult\w*|throw\w*|trebuchets?|hurls?|flings?|lobs?|siege|boulders?",
    "car": r"cars?|carts?|vehicles?|driv\w+|rac\w+|rolls?|wheels|moves by itself",
}
_LEVEL_WORDS = {"small": r"small|little|tiny", "medium": r"medium", "large": r"large|big|huge|giant"}
_SIZE = re.compile(r"\b(?:(?:use )?(?:at most|up to|with|of) )?(?P<count>[0-9]{1,4}) blocks?\b", re.IGNORECASE)


def row_of(text: str, trials: Mapping[str, Trial], message: str) -> dict[str, Any]:
    """Return the row of a request; ValueError if it names none of the task's `trials`.

    `message` is the system message, "" if there is none.
    The model gets a phrasing that it was trained on: that of the text if it is one of them, else the trial's first.
    """
    name = _trial_of(text, trials)
    if name is None or name not in trials:
        meant = "is not understood" if name is None else f"means trial {name!r}, which is not among --trials"
        known = "; ".join(f"{trial.name} ({trial.words})" for trial in trials.values())
        raise ValueError(f"{text[:80]!r} {meant}; ask for a machine of one of these trials: {known}")
    trial, level = trials[name], _level_of(text)
    most = LEVELS[level][1]
    plain = " ".join(_SIZE.sub("", text).split()).rstrip(". ").lower()
    same = [n for n, request in enumerate(trial.requests) if request.rstrip(".").lower() == plain]
    prompt = [{"role": "user", "content": question(trial, same[0] if same else 0, most)}]
    if message:
        prompt.insert(0, {"role": "system", "content": message})
    understood = f"{name}: {trial.words}, at most {most} blocks; success needs a score of {trial.goal:g}"
    return {"prompt": prompt, "level": level, "trial": name, "max_blocks": most, "interpretation": understood}


def _trial_of(text: str, trials: Mapping[str, Trial]) -> str | None:
    said = text.lower()
    words = {name: re.escape(name.lower()) for name in trials if name not in _WORDS} | _WORDS
    return next((name for name, known in words.items() if re.search(rf"\b(?:{known})\b", said)), None)


def _level_of(text: str) -> str:
    """Return the level that a text names by word or by a number of blocks; the smallest if it names none."""
    if size := _SIZE.search(text):
        fitting = [level for level, (_, most) in LEVELS.items() if most <= int(size["count"])]
        if not fitting:
            least = min(most for _, most in LEVELS.values())
            raise ValueError(f"{size['count']} blocks are too few; allow at least {least}")
        return fitting[-1]
    said = text.lower()
    named = (level for level in LEVELS if re.search(rf"\b(?:{_LEVEL_WORDS[level]})\b", said))
    return next(named, next(iter(LEVELS)))
