"""Rows of the machine task: a request, its size level, and a machine known to succeed.

A request is a phrasing of a trial with two demands: how many blocks the machine may have, and the score that it must
reach. Gold machines are stored per trial with their scores, so a machine serves every request that it satisfies.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from .designs import LEVELS
from .prompts import question, variants
from .simulator import DT, simulate
from .tree import ROOT, Block, ConstructionTree
from .trials import SCORINGS, TRIALS, Trial, task_score

GOLD_FILE = Path(__file__).with_name("gold.json")
MARGIN = 1.1  # gold machines exceed the demanded score by this factor, so that rounding differences do not matter
LEAST_BLOCKS = 6  # no request allows fewer
_ENOUGH, _TRIED = 10, 30  # machines for each level of a trial of the user; built-in machines that are tried for it
_WOOD_OR_ROD = re.compile(r"(?<!\S)(?:1|41)/")
_NEAR = 3  # a request gets a gold machine with at most so many blocks fewer than allowed, if there is one


@dataclass(frozen=True)
class GoldMachine:
    """A machine that is known to work, as in gold.json. `score` is its lowest, over ways to score and time steps."""

    blocks: str  # type/parent/face of each block after the first, and the second parent and face if there is one
    score: float
    holds: bool  # it was also simulated with breakage, and does not break

    @classmethod
    def of(cls, tree: ConstructionTree, score: float, holds: bool) -> GoldMachine:
        ends = [(b.kind, b.parent, b.face, b.parent_b, b.face_b) for b in tree.blocks[1:]]
        return cls(" ".join("/".join(str(part) for part in end if part is not None) for end in ends), score, holds)

    @cached_property
    def tree(self) -> ConstructionTree:
        parts = [block.split("/") for block in self.blocks.split()]
        return ConstructionTree((ROOT, *(Block(kind, *map(int, ends)) for kind, *ends in parts)))

    @property
    def size(self) -> int:
        return 2 + self.blocks.count(" ")

    @property
    def kinds(self) -> set[str]:
        return {"0", *(block.partition("/")[0] for block in self.blocks.split())}

    @property
    def machine(self) -> str:
        return self.tree.to_json()


@lru_cache(1)
def gold_machines() -> dict[str, list[GoldMachine]]:
    """Return machines that are known to work, by trial: those of gold.json, and the same with rods instead of wood
    and wood instead of rods, whose simulation is the same as long as nothing breaks."""
    found = {}
    for trial, entries in json.loads(GOLD_FILE.read_text()).items():
        stored = {blocks: GoldMachine(blocks, score, bool(holds)) for blocks, score, holds in entries}
        others = [(_WOOD_OR_ROD.sub(lambda m: "41/" if m[0] == "1/" else "1/", blocks), score)
                  for blocks, score, _ in entries]  # fmt: skip
        found[trial] = [
            *stored.values(),
            *(GoldMachine(*other, holds=False) for other in others if other[0] not in stored),
        ]
    return found


def gold_machine(tree: ConstructionTree, trial: Trial, breakage: bool = True) -> GoldMachine | None:
    """Simulate a machine; return it with its score, or None if it does not reach the least goal with a margin.

    Without `breakage`, which takes twice the time, the machine is not known to hold. A second time step makes sure
    that processors and MuJoCo versions with different rounding give the same verdict; it is longer, so that most
    machines that fail do so in half the time.
    """
    score = lowest_score(tree, trial, [2 * DT, DT])
    if score is None:
        return None
    return GoldMachine.of(tree, score, breakage and not simulate(tree, trial, breakage=True).broken)


def lowest_score(tree: ConstructionTree, trial: Trial, time_steps: Sequence[float]) -> float | None:
    """Return the lowest score of a machine over time steps and ways to score, or None if one does not reach the least
    goal with a margin."""
    score = float("inf")
    for dt in time_steps:
        result = simulate(tree, trial, dt=dt)
        score = min(score, *(task_score(trial, result, way)[0] if result.valid else 0.0 for way in SCORINGS))
        if score < MARGIN * trial.goal:
            return None
    return round(score, 3)


def known_machines(trial: Trial) -> list[GoldMachine]:
    """Return known machines that succeed. For a trial of the user, those of similar built-in trials are tried."""
    return gold_machines()[trial.name] if trial == TRIALS.get(trial.name) else _machines_for(trial)


@lru_cache(64)
def _machines_for(trial: Trial) -> list[GoldMachine]:
    similar = [name for name, other in TRIALS.items() if other.throws == trial.throws]
    found: list[GoldMachine] = []
    for least, most in LEVELS.values():
        machines = [known for name in similar for known in gold_machines()[name]]
        candidates = list(dict.fromkeys(known.tree for known in machines if least <= known.size <= most))
        tried = random.Random(0).sample(candidates, min(_TRIED, len(candidates)))
        found += itertools.islice(filter(None, (gold_machine(tree, trial) for tree in tried)), _ENOUGH)
    return found


def level_of(max_blocks: int) -> str:
    """Return the smallest level whose machines may have so many blocks."""
    return next(level for level, (_, most) in LEVELS.items() if max_blocks <= most)


def request_row(
    trial: Trial, variant: int, max_blocks: int, goal: float, message: str, reasoning: bool
) -> dict[str, Any]:
    """Return the row of a request, without gold. `message` is the system message, "" if there is none."""
    system = [{"role": "system", "content": message}] if message else []
    text = question(trial, variant, max_blocks, goal, reasoning)
    return {
        "prompt": [*system, {"role": "user", "content": text}],
        "level": level_of(max_blocks),
        "trial": trial.name,
        "max_blocks": max_blocks,
        "goal": goal,
    }


def rows(
    trials: Sequence[Trial],
    split: str,
    size: int | None,
    seed: int,
    kinds: Sequence[str],
    message: str,
    reasoning: bool,
    unbroken: bool,
) -> list[dict[str, Any]]:
    """Return rows that alternate between levels and trials; no phrasing is in both splits.

    There is one row per request. If `size` is larger than their number, training rows with the machines that no row
    has yet follow. A machine is in two rows only if there is no other for a request. Requests that no known machine
    satisfies are left out. `unbroken` excludes machines that are not known to hold when breakage is simulated. A trial
    of the user without known machines has rows without gold.
    """
    if split not in ("train", "test"):
        raise ValueError(f"unknown split {split!r}; splits are: train, test")
    rng = random.Random(f"{seed}-{split}")
    queues: list[list[tuple[_Demand, int]]] = []
    for trial in trials:
        golds = [gold for gold in known_machines(trial) if (gold.holds or not unbroken) and gold.kinds <= set(kinds)]
        rng.shuffle(golds)
        shared = _Shared(trial, golds)
        for level in LEVELS:
            sizes = [blocks for blocks in range(LEAST_BLOCKS, LEVELS[level][1] + 1) if level_of(blocks) == level]
            demands = [_Demand(shared, *demand) for demand in itertools.product(sizes, trial.goals)]
            if golds or trial.name in TRIALS:
                demands = [demand for demand in demands if demand.fitting]
            asked = [(demand, n) for n in variants(trial, split) for demand in demands]
            rng.shuffle(asked)
            queues.append(asked)
    # All levels of one trial come first, so that a few rows already cover all levels.
    order = [request for turn in itertools.zip_longest(*queues) for request in turn if request is not None]

    def row(demand: _Demand, variant: int, gold: GoldMachine | None) -> dict[str, Any]:
        asked = request_row(demand.shared.trial, variant, demand.max_blocks, demand.goal, message, reasoning)
        return asked | ({"gold": gold.machine} if gold else {})

    def answered() -> Iterator[dict[str, Any]]:
        # Requests with few machines choose before those that can take others.
        choosing = sorted(order, key=lambda request: len(request[0].fitting))
        first = {request: request[0].unused() or request[0].any() for request in choosing}
        for demand, variant in order:
            yield row(demand, variant, first[demand, variant])
        more = split == "train" and size is not None
        while more:
            more = False
            for demand, variant in order:
                if (gold := demand.unused()) is not None:
                    more = True
                    yield row(demand, variant, gold)

    found = list(itertools.islice(answered(), size))
    if not found:
        raise ValueError(
            f"no known machine succeeds at {', '.join(trial.name for trial in trials)} with only the blocks "
            f"{', '.join(kinds)} and these options; allow more types with --blocks"
        )
    return found


class _Shared:
    """The gold machines of a trial, and which of them a row has already."""

    def __init__(self, trial: Trial, golds: Sequence[GoldMachine]):
        self.trial, self.golds = trial, golds
        self.sizes, self.scores = np.array([gold.size for gold in golds]), np.array([gold.score for gold in golds])
        self.used: set[int] = set()


class _Demand:
    """How many blocks a machine may have and what it must score; hands out the gold machines that satisfy this, first
    those with about as many blocks as are allowed."""

    def __init__(self, shared: _Shared, max_blocks: int, goal: float):
        self.shared, self.max_blocks, self.goal = shared, max_blocks, goal
        fits = (shared.sizes <= max_blocks) & (shared.scores >= MARGIN * goal)
        is_near = shared.sizes >= max_blocks - _NEAR
        self.fitting = np.concatenate([np.flatnonzero(fits & is_near), np.flatnonzero(fits & ~is_near)]).tolist()
        self._unused, self._given = iter(self.fitting), 0

    def unused(self) -> GoldMachine | None:
        """Return a machine that no row has yet, None if there is none."""
        for n in self._unused:
            if n not in self.shared.used:
                self.shared.used.add(n)
                return self.shared.golds[n]
        return None

    def any(self) -> GoldMachine | None:
        """Return the next machine in turn, None if there is none."""
        self._given += 1
        return self.shared.golds[self.fitting[self._given % len(self.fitting)]] if self.fitting else None
