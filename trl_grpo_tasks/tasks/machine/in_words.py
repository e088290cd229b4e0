"""Requests in words: which trial a text means, how large the machine may be, and the score that it must reach."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .data import LEAST_BLOCKS, request_row
from .designs import LEVELS, MOST_ASKED
from .prompts import EXPLAIN
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
_GOAL = re.compile(
    r"\b(?:and )?(?:get|score|reach)?(?: a score of)? ?(?:at least|over|more than) (?P<goal>[0-9]{1,4}(?:\.[0-9])?)"
    r"(?: ?m\b| met(?:re|er)s?\b| points?\b)?(?: away| ahead)?",
    re.IGNORECASE,
)


def row_of(text: str, trials: Mapping[str, Trial], message: str, reasoning: bool = False) -> dict[str, Any]:
    """Return the row of a request; ValueError if it names none of the task's `trials`.

    The model gets a phrasing that it was trained on: that of the text if it is one of them, else the trial's first.
    """
    text = text.removesuffix(EXPLAIN)
    name = _trial_of(text, trials)
    if name is None or name not in trials:
        meant = "is not understood" if name is None else f"means trial {name!r}, which is not among --trials"
        known = "; ".join(f"{trial.name} ({trial.words})" for trial in trials.values())
        raise ValueError(f"{text[:80]!r} {meant}; ask for a machine of one of these trials: {known}")
    trial, most = trials[name], _size_of(text)
    goal = _goal_of(text, trial)
    plain = " ".join(_SIZE.sub("", _GOAL.sub("", text)).split()).rstrip(". ").lower()
    same = [n for n, request in enumerate(trial.requests) if request.rstrip(".").lower() == plain]
    meant = f"{name}: {trial.words}, at most {most} blocks; success needs a score of {goal:g}"
    return request_row(trial, same[0] if same else 0, most, goal, message, reasoning) | {"interpretation": meant}


def _trial_of(text: str, trials: Mapping[str, Trial]) -> str | None:
    said = text.lower()
    words = {name: re.escape(name.lower()) for name in trials if name not in _WORDS} | _WORDS
    return next((name for name, known in words.items() if re.search(rf"\b(?:{known})\b", said)), None)


def _size_of(text: str) -> int:
    """Return how many blocks a text allows, by number or by the word for a level; those of the smallest level if it
    says nothing."""
    if size := _SIZE.search(text):
        if int(size["count"]) < LEAST_BLOCKS:
            raise ValueError(f"{size['count']} blocks are too few; allow at least {LEAST_BLOCKS}")
        return min(int(size["count"]), MOST_ASKED)
    said = text.lower()
    named = (most for level, (_, most) in LEVELS.items() if re.search(rf"\b(?:{_LEVEL_WORDS[level]})\b", said))
    return next(named, next(iter(LEVELS.values()))[1])


def _goal_of(text: str, trial: Trial) -> float:
    """Return the least of the trial's goals that is enough for a text; the least of all if it demands nothing."""
    demand = _GOAL.search(_SIZE.sub("", text))
    enough = [goal for goal in trial.goals if demand is None or goal >= float(demand["goal"])]
    if not enough:
        assert demand is not None
        raise ValueError(f"{demand['goal']} is too much for trial {trial.name!r}; ask for at most {trial.goals[-1]:g}")
    return enough[0]
