"""Rows of the machine task: a request, its size level, and a machine known to succeed.

A request is a phrasing of a trial with two demands: how many blocks the machine may have, and the score that it must
reach. Gold machines are stored per trial with their scores, so a machine serves every request that it satisfies.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from .blocks import PROMPT_BLOCKS
from .designs import LEVELS
from .prompts import manual, question, variants
from .simulator import DT, simulate
from .tree import ROOT, Block, ConstructionTree
from .trials import SCORINGS, TRIALS, Trial, task_score

GOLD_FILE = Path(__file__).with_name("gold.json")
MARGIN = 1.1  # gold machines exceed the demanded score by this factor, so that rounding differences do not matter
LEAST_BLOCKS = 6  # no request allows fewer
_ENOUGH, _TRIED = 10, 30  # machines for each level of a trial of the user; built-in machines that are tried for it
_NEAR = 3  # a request gets a gold machine with at most so many blocks fewer than allowed, if there is one


class GoldMachine(NamedTuple):
    """A machine that is known to work. `score` is its lowest, over ways to score and time steps."""

    tree: ConstructionTree
    score: float
    breaks: bool  # when breakage is simulated

    @property
    def machine(self) -> str:
        return self.tree.to_json()

    def compact(self) -> list[Any]:
        """Return the entry of gold.json: the blocks as type/parent/face, the score, and whether the machine breaks."""
        ends = [(b.kind, b.parent, b.face, b.parent_b, b.face_b) for b in self.tree.blocks[1:]]
        blocks = " ".join("/".join(str(part) for part in end if part is not None) for end in ends)
        return [blocks, self.score, self.breaks]

    @classmethod
    def from_compact(cls, entry: Sequence[Any]) -> GoldMachine:
        parts = [block.split("/") for block in entry[0].split()]
        blocks = (Block(kind, *map(int, ends)) for kind, *ends in parts)
        return cls(ConstructionTree((ROOT, *blocks)), entry[1], entry[2])


@lru_cache(1)
def gold_machines() -> dict[str, list[GoldMachine]]:
    """Return the successful machines found by `make_gold.py`, by trial."""
    found = json.loads(GOLD_FILE.read_text())
    return {trial: [GoldMachine.from_compact(entry) for entry in entries] for trial, entries in found.items()}


def gold_machine(tree: ConstructionTree, trial: Trial) -> GoldMachine | None:
    """Simulate a machine; return it with its score, or None if it does not reach the least goal with a margin.

    A second time step makes sure that processors and MuJoCo versions with different rounding give the same verdict.
    """
    score = float("inf")
    for dt in (DT, 0.8 * DT):
        result = simulate(tree, trial, dt=dt)
        score = min(score, *(task_score(trial, result, way)[0] if result.valid else 0.0 for way in SCORINGS))
        if score < MARGIN * trial.goal:
            return None
    return GoldMachine(tree, round(score, 3), bool(simulate(tree, trial, breakage=True).broken))


def known_machines(trial: Trial) -> list[GoldMachine]:
    """Return known machines that succeed. For a trial of the user, those of similar built-in trials are tried."""
    return gold_machines()[trial.name] if trial == TRIALS.get(trial.name) else _machines_for(trial)


@lru_cache(64)
def _machines_for(trial: Trial) -> list[GoldMachine]:
    similar = [name for name, other in TRIALS.items() if other.throws == trial.throws]
    found: list[GoldMachine] = []
    for least, most in LEVELS.values():
        machines = [known for name in similar for known in gold_machines()[name]]
        candidates = list(dict.fromkeys(known.tree for known in machines if least <= len(known.tree.blocks) <= most))
        tried = random.Random(0).sample(candidates, min(_TRIED, len(candidates)))
        golds = (gold for tree in tried if (gold := gold_machine(tree, trial)) is not None)
        found += itertools.islice(golds, _ENOUGH)
    return found


def level_of(max_blocks: int) -> str:
    """Return the smallest level whose machines may have so many blocks."""
    return next(level for level, (_, most) in LEVELS.items() if max_blocks <= most)


def rows(
    trials: Sequence[Trial],
    split: str,
    size: int | None,
    seed: int,
    *,
    kinds: Sequence[str] = PROMPT_BLOCKS,
    with_manual: bool = False,
    unbroken: bool = False,
    wheels_on_wheels: bool = True,
    passes: Callable[[Trial, str, float], bool] = lambda trial, machine, goal: True,
) -> list[dict[str, Any]]:
    """Return rows that alternate between levels and trials; no phrasing is in both splits.

    There is one row per request. If `size` is larger than their number, training rows with other gold machines of the
    same requests follow, as long as there are any. Requests that no known machine satisfies are left out. `unbroken`
    excludes machines that break when breakage is simulated, and `passes` is a further test. A trial of the user
    without known machines has rows without gold.
    """
    if split not in ("train", "test"):
        raise ValueError(f"unknown split {split!r}; splits are: train, test")
    rng = random.Random(f"{seed}-{split}")
    system = [{"role": "system", "content": manual(kinds, wheels_on_wheels)}] if with_manual else []
    queues: list[list[Iterator[dict[str, Any]]]] = []
    for trial in trials:
        golds = [
            gold
            for gold in known_machines(trial)
            if not (unbroken and gold.breaks)
            and {block.kind for block in gold.tree.blocks} <= set(kinds)
            and (wheels_on_wheels or not gold.tree.carried_wheels())
        ]
        for level in LEVELS:
            sizes = [blocks for blocks in range(LEAST_BLOCKS, LEVELS[level][1] + 1) if level_of(blocks) == level]
            demands = [
                (
                    blocks,
                    goal,
                    [gold for gold in golds if len(gold.tree.blocks) <= blocks and gold.score >= MARGIN * goal],
                )
                for blocks, goal in itertools.product(sizes, trial.goals)
            ]
            is_open = not golds and trial.name not in TRIALS
            asked = [(n, *demand) for n in variants(trial, split) for demand in demands if demand[-1] or is_open]
            rng.shuffle(asked)
            queues.append([_rows_of_request(trial, *one, system, rng.random(), passes) for one in asked])
    # All levels of one trial come first, so that a few rows already cover all levels.
    order = [request for turn in itertools.zip_longest(*queues) for request in turn if request is not None]
    found: list[dict[str, Any]] = []
    while order and (size is None or len(found) < size):
        answered = []
        for request in order:
            if len(found) == size:
                break
            if (row := next(request, None)) is not None:
                found.append(row)
                answered.append(request)
        order = answered if size is not None and split == "train" else []
    if not found:
        raise ValueError(
            f"no known machine succeeds at {', '.join(trial.name for trial in trials)} with only the blocks "
            f"{', '.join(kinds)} and these options; allow more types with --blocks"
        )
    return found


def _rows_of_request(
    trial: Trial,
    variant: int,
    max_blocks: int,
    goal: float,
    fitting: Sequence[GoldMachine],
    system: list[dict[str, str]],
    seed: float,
    passes: Callable[[Trial, str, float], bool],
) -> Iterator[dict[str, Any]]:
    """Yield rows of one request with the gold machines that satisfy it, first those with about as many blocks as are
    allowed; a row without gold if there are none."""
    row = {
        "prompt": [*system, {"role": "user", "content": question(trial, variant, max_blocks, goal)}],
        "level": level_of(max_blocks),
        "trial": trial.name,
        "max_blocks": max_blocks,
        "goal": goal,
    }
    if not fitting:
        yield row
    shuffled = random.Random(seed).sample(fitting, len(fitting))
    for gold in sorted(shuffled, key=lambda gold: len(gold.tree.blocks) < max_blocks - _NEAR):
        if passes(trial, gold.machine, goal):
            yield {**row, "gold": gold.machine}
