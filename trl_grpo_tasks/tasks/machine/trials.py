"""Trials (what machines must do) and their scores.

To add a trial, add an entry to TRIALS, phrasings to prompts.py, and machines with make_gold.py. A new kind of score
also needs a function in `_SCORES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ...task import nearest
from .results import Result, Throw
from .scene import Scene

SCORINGS = ("paper", "authors")
GATE = 3.0  # minimum rise of a boulder in metres; lower throws score 0


@dataclass(frozen=True)
class Trial:
    """A trial: its scene, its kind of score ("distance", "forward" or a key of `_SCORES`), and its goal."""

    name: str
    words: str
    score: str
    goal: float
    scene: Scene = Scene()
    seconds: float = 5.0

    @property
    def throws(self) -> bool:
        return self.score not in ("distance", "forward")


_BUMPS = tuple((4.0 + 3.0 * n, (0.15, 0.3, 0.2, 0.35)[n % 4]) for n in range(16))
TRIALS: dict[str, Trial] = {
    trial.name: trial
    for trial in (
        Trial("car", "drive as far as possible on flat ground", "distance", 20.0),
        Trial("rough", "drive as far as possible over bumps", "distance", 12.0, Scene(bumps=_BUMPS)),
        Trial("slope", "drive up a slope of 15 degrees", "forward", 12.0, Scene(slope=15.0)),
        Trial("catapult", "throw the boulder high and far", "throw", 40.0),
        Trial("wall", "throw the boulder over a wall", "over_wall", 40.0, Scene(wall=(12.0, 4.0))),
        Trial(
            "rings", "throw the boulder through rings", "rings", 4.0, Scene(rings=((8.0, 7.0, 3.0), (16.0, 6.0, 3.0)))
        ),
    )
}


def get_trial(trial: Trial | str) -> Trial:
    if isinstance(trial, Trial):
        return trial
    if trial not in TRIALS:
        raise ValueError(f"unknown trial {trial!r}{nearest(trial, TRIALS)}; trials are: {', '.join(TRIALS)}")
    return TRIALS[trial]


def task_score(trial: Trial, result: Result, scoring: str = "paper") -> tuple[float, str]:
    """Return R_task of a valid run (0 or more), and a message if it is 0.

    `scoring` "paper": a boulder must rise 3 m above its own start, and its distance is measured where it lands.
    "authors": it must reach a height of 3 m, and its distance is measured at the end of the run, including rolling.
    """
    if scoring not in SCORINGS:
        raise ValueError(f"unknown scoring {scoring!r}; scorings are: {', '.join(SCORINGS)}")
    if not trial.throws:
        distance = result.distance if trial.score == "distance" else max(0.0, result.forward)
        return distance, ""
    if not result.throws:
        return 0.0, "the machine has no boulder to throw"
    best = max(
        (_SCORES[trial.score](trial, result, n, scoring) for n in range(len(result.throws))), key=lambda s: s[0]
    )
    return best


def _throw(trial: Trial, result: Result, n: int, scoring: str) -> tuple[float, str]:
    throw = result.throws[n]
    risen = throw.rise if scoring == "paper" else throw.height
    if risen < GATE:
        above = "above its start" if scoring == "paper" else "above the ground"
        return 0.0, f"the boulder rose to {risen:.2f} m {above}; at least {GATE:g} m is needed"
    return throw.height * _measured(throw, scoring), ""


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


def _measured(throw: Throw, scoring: str) -> float:
    return throw.distance if scoring == "paper" else throw.final_distance


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
