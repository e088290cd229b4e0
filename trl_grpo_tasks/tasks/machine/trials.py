"""Trials (what machines must do) and their scores. Built-in trials are in trials.yaml; users add files of that form.

A new built-in trial also needs machines, which make_gold.py finds; a new kind of score, a function in `_SCORES`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...files import check_local_path, read_yaml
from ...task import nearest
from .results import Result
from .scene import Scene

SCORINGS = ("paper", "authors")
DRIVES = ("distance", "forward")  # kinds of score of trials without a boulder
GATE = 3.0  # minimum rise of a boulder in metres; lower throws score 0
CARRIED = 0.25  # the authors: a boulder that lands nearer to the start block, as a share of its distance, scores 0


@dataclass(frozen=True)
class Trial:
    """A trial: its scene, its kind of score (one of `DRIVES` or a key of `_SCORES`), and its requests.

    A request asks for one of the scores `goals`; `goal` is the least of them. `requests` are its wordings.
    """

    name: str
    words: str
    score: str
    goal: float
    scene: Scene = Scene()
    seconds: float = 5.0
    requests: tuple[str, ...] = ()
    goals: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "goals", self.goals or (self.goal,))

    @property
    def throws(self) -> bool:
        return self.score not in DRIVES


def get_trial(trial: Trial | str) -> Trial:
    if isinstance(trial, Trial):
        return trial
    if trial not in TRIALS:
        raise ValueError(f"unknown trial {trial!r}{nearest(trial, TRIALS)}; trials are: {', '.join(TRIALS)}")
    return TRIALS[trial]


def task_score(trial: Trial, result: Result, scoring: str = "paper") -> tuple[float, str]:
    """Return R_task of a valid run (0 or more), and a message if it is 0.

    A throw with `scoring` "paper" scores height times distance, if the boulder rises 3 m above its own start. With
    "authors", as in the published code: (1 + rise) times distance, if the boulder reaches a height of 3 m and lands
    away from the start block, by at least a quarter of its distance. The distance is measured where it lands.
    """
    if scoring not in SCORINGS:
        raise ValueError(f"unknown scoring {scoring!r}; scorings are: {', '.join(SCORINGS)}")
    if not trial.throws:
        distance = result.distance if trial.score == "distance" else max(0.0, result.forward)
        return distance, ""
    if not result.throws:
        return 0.0, "the machine has no boulder to throw"
    scores = [_SCORES[trial.score](trial, result, n, scoring) for n in range(len(result.throws))]
    return max(scores, key=lambda score: score[0])


def _throw(trial: Trial, result: Result, n: int, scoring: str) -> tuple[float, str]:
    throw = result.throws[n]
    risen = throw.rise if scoring == "paper" else throw.height
    if risen < GATE:
        above = "above its start" if scoring == "paper" else "above the ground"
        return 0.0, f"the boulder rose to {risen:.2f} m {above}; at least {GATE:g} m is needed"
    if scoring == "paper":
        return throw.height * throw.distance, ""
    if throw.from_machine < CARRIED * throw.distance:
        return 0.0, (
            f"the boulder landed {throw.from_machine:.2f} m from the start block, less than {CARRIED:g} times its "
            f"distance of {throw.distance:.2f} m: it was carried, not thrown"
        )
    return (1 + throw.rise) * throw.distance, ""


def _over_wall(trial: Trial, result: Result, n: int, scoring: str) -> tuple[float, str]:
    assert trial.scene.wall is not None
    path = result.boulder_paths[n]
    behind = path[0, 1] + result.throws[n].landing[1] > trial.scene.wall[0]
    score, why = _throw(trial, result, n, scoring)
    return (score, why) if behind and score else (0.0, why or "the boulder did not land behind the wall")


def _rings(trial: Trial, result: Result, n: int, scoring: str) -> tuple[float, str]:
    """Score up to ten points, split evenly among the rings: full share at a ring's centre, half at the rim."""
    points = 0.0
    for distance, height, radius in trial.scene.rings:
        misses = [math.hypot(p[0], p[2] - height) / radius for p in _crossings(result.boulder_paths[n], distance)]
        points += 1 / (1 + min(misses) ** 2) if misses else 0.0
    score = 10 * points / len(trial.scene.rings)
    return score, "" if score else "the boulder did not reach any ring"


def _crossings(path: np.ndarray, forward: float) -> list[np.ndarray]:
    """Return the points at which a path crosses the plane at distance `forward`, in the order of the path."""
    before, after = path[:-1], path[1:]
    found = np.flatnonzero((before[:, 1] < forward) & (after[:, 1] >= forward))
    shares = (forward - before[found, 1]) / (after[found, 1] - before[found, 1])
    return list(before[found] + shares[:, None] * (after[found] - before[found]))


_SCORES: dict[str, Callable[[Trial, Result, int, str], tuple[float, str]]] = {
    "throw": _throw,
    "over_wall": _over_wall,
    "rings": _rings,
}


# ---- files of trials

# The least and the greatest value of each number. A wall stands in front of the longest machine.
_RANGES: dict[str, Any] = {
    "goal": (1e-6, 1e6),
    "seconds": (0.5, 30.0),
    "slope": (-45.0, 45.0),
    "bumps": ((0.0, 200.0), (0.01, 1.0)),
    "wall": ((10.0, 200.0), (0.1, 100.0)),
    "rings": ((1.0, 200.0), (0.1, 100.0), (0.1, 50.0)),
}
_REQUIRED = ("words", "score", "goal", "requests")
_KEYS = (*_REQUIRED, "seconds", "bumps", "slope", "wall", "rings")


def read_trials(path: str | Path) -> dict[str, Trial]:
    """Return the trials in a YAML or JSON file, by name; ValueError names what is wrong with it."""
    check_local_path(str(path), "--trials")
    found = read_yaml(Path(path).expanduser(), "--trials")
    if not isinstance(found, dict) or not found:
        raise ValueError(f"--trials {path} must map names of trials to {', '.join(_KEYS)}")
    trials = {}
    for name, entry in found.items():
        try:
            trials[name] = _trial(name, entry)
        except ValueError as error:
            raise ValueError(f"--trials {path}, trial {str(name)!r:.80}: {error}") from error
    return trials


def load_trials(names: Sequence[str]) -> dict[str, Trial]:
    """Return the trials of --trials: names of built-in trials, and files whose trials are all used."""
    found: dict[str, Trial] = {}
    for name in names:
        if name.endswith((".yaml", ".yml", ".json")):
            new = read_trials(name)
        elif name in TRIALS:
            new = {name: TRIALS[name]}
        else:
            raise ValueError(
                f"unknown --trials {name!r}{nearest(name, TRIALS)}; choose from: {', '.join(TRIALS)}, or name a YAML "
                "or JSON file"
            )
        for one in new:
            if one in found or (one in TRIALS and new[one] is not TRIALS[one]):
                raise ValueError(f"--trials {name}: there is already a trial {one!r}; every trial needs its own name")
        found |= new
    return found


def _trial(name: Any, entry: Any) -> Trial:
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ValueError("its name must consist of lower-case letters, digits and underscores")
    if not isinstance(entry, dict):
        raise ValueError(f"{entry!r:.80} must be a mapping with {', '.join(_REQUIRED)}")
    for key in entry:
        if key not in _KEYS:
            raise ValueError(f"unknown key {key!r:.80}{nearest(str(key), _KEYS)}; keys are: {', '.join(_KEYS)}")
    if missing := [key for key in _REQUIRED if key not in entry]:
        raise ValueError(f"{missing[0]!r} is missing")
    scorings = (*DRIVES, *_SCORES)
    if entry["score"] not in scorings:
        raise ValueError(f"unknown score {entry['score']!r:.80}; scores are: {', '.join(scorings)}")
    for score, needed in (("over_wall", "wall"), ("rings", "rings")):
        if entry["score"] == score and not entry.get(needed):
            raise ValueError(f"the score {score!r} needs {needed!r}")
    requests = entry["requests"]
    if not isinstance(requests, list) or len(set(map(str, requests))) < max(2, len(requests)):
        raise ValueError("'requests' must list at least two different wordings: the last ones are held out for tests")
    for text in (entry["words"], *requests):
        if not isinstance(text, str) or not text.strip() or len(text) > 1000:
            raise ValueError(f"{text!r:.80} must be a text of 1 to 1,000 characters")
    for key in ("bumps", "rings"):
        value = entry.get(key, [0])
        if not isinstance(value, list) or not 1 <= len(value) <= 100:
            raise ValueError(f"{key!r} must be a list of 1 to 100 lists of {len(_RANGES[key])} numbers")
    several = ("bumps", "rings", "goal")
    goal = entry["goal"] if isinstance(entry["goal"], list) else [entry["goal"]]
    numbers: dict[str, Any] = {
        key: tuple(_checked(key, one) for one in value) if key in several else _checked(key, value)
        for key, value in {**entry, "goal": goal}.items()
        if key in _RANGES
    }
    goals = numbers.pop("goal")
    if not goals or list(goals) != sorted(set(goals)):
        raise ValueError(f"'goal': {entry['goal']!r:.80} must be a number, or numbers that rise")
    seconds = numbers.pop("seconds", Trial.seconds)
    return Trial(name, entry["words"], entry["score"], goals[0], Scene(**numbers), seconds, tuple(requests), goals)


def _checked(key: str, value: Any, ranges: Any = None) -> Any:
    """Return a number, or a list of numbers as a tuple, each within its range."""
    ranges = ranges or _RANGES[key]
    if isinstance(ranges[0], tuple):
        if not isinstance(value, list) or len(value) != len(ranges):
            raise ValueError(f"{key!r}: {value!r:.80} must be a list of {len(ranges)} numbers")
        return tuple(_checked(key, one, limits) for one, limits in zip(value, ranges, strict=True))
    low, high = ranges
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"{key!r}: {value!r:.80} must be a number from {low:g} to {high:g}")
    return float(value)


TRIALS = read_trials(Path(__file__).with_name("trials.yaml"))
