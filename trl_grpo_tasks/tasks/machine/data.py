"""Rows of the machine task: a phrasing of the request, a size level, and a machine known to succeed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from .blocks import PROMPT_BLOCKS
from .designs import LEVELS
from .prompts import manual, question, variants
from .simulator import simulate
from .tree import ConstructionTree
from .trials import SCORINGS, TRIALS, Trial, task_score

GOLD_FILE = Path(__file__).with_name("gold.json")
_ENOUGH = 10  # machines for each level of a trial


@lru_cache(1)
def gold_machines() -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return the successful machines found by `make_gold.py`, by trial and level."""
    return json.loads(GOLD_FILE.read_text())


def known_machines(trial: Trial, level: str) -> list[dict[str, Any]]:
    """Return known machines that succeed. For a trial of the user, those of similar built-in trials are tried."""
    if trial == TRIALS.get(trial.name):
        return gold_machines()[trial.name][level]
    return _machines_for(trial, level)


@lru_cache(64)
def _machines_for(trial: Trial, level: str) -> list[dict[str, Any]]:
    similar = [name for name, other in TRIALS.items() if other.throws == trial.throws]
    candidates = dict.fromkeys(entry["machine"] for name in similar for entry in gold_machines()[name][level])
    found: list[dict[str, Any]] = []
    for machine in candidates:
        result = simulate(machine, trial, to_the_end=True)
        if result.valid and all(task_score(trial, result, scoring)[0] >= trial.goal for scoring in SCORINGS):
            found.append({"machine": machine, "breaks": bool(simulate(machine, trial, breakage=True).broken)})
        if len(found) == _ENOUGH:
            break
    return found


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
    passes: Callable[[Trial, str], bool] = lambda trial, machine: True,
) -> list[dict[str, Any]]:
    """Return rows that alternate between levels and trials; no phrasing is in both splits.

    There is one row per phrasing and gold machine. `unbroken` excludes machines that break when breakage is simulated,
    and `passes` is a further test. A trial of the user without known machines has rows without gold.
    """
    if split not in ("train", "test"):
        raise ValueError(f"unknown split {split!r}; splits are: train, test")
    rng = random.Random(f"{seed}-{split}")
    queues = []
    for level in LEVELS:
        for trial in trials:
            machines: list[str | None] = [
                entry["machine"]
                for entry in known_machines(trial, level)
                if not (unbroken and entry["breaks"])
                and {block.kind for block in _parse(entry["machine"]).blocks} <= set(kinds)
                and (wheels_on_wheels or not _parse(entry["machine"]).carried_wheels())
                and passes(trial, entry["machine"])
            ]
            if not machines and trial.name not in TRIALS:
                machines = [None]
            pairs = [(variant, machine) for variant in variants(trial, split) for machine in machines]
            rng.shuffle(pairs)
            system = [{"role": "system", "content": manual(kinds, wheels_on_wheels)}] if with_manual else []
            queues.append([_row(trial, level, variant, machine, system) for variant, machine in pairs])
    # Take from the queues in turn, all levels of one trial first, so that a few rows already cover all levels.
    order = [queues[level * len(trials) + trial] for trial in range(len(trials)) for level in range(len(LEVELS))]
    found = [queue[n] for n in range(max(map(len, order))) for queue in order if n < len(queue)]
    if not found:
        raise ValueError(
            f"no known machine succeeds at {', '.join(trial.name for trial in trials)} with only the blocks "
            f"{', '.join(kinds)} and these options; allow more types with --blocks"
        )
    return found[:size]


def _row(trial: Trial, level: str, variant: int, machine: str | None, system: list[dict[str, str]]) -> dict[str, Any]:
    max_blocks = LEVELS[level][1]
    prompt = [*system, {"role": "user", "content": question(trial, variant, max_blocks)}]
    gold = {} if machine is None else {"gold": machine}
    return {"prompt": prompt, "level": level, "trial": trial.name, "max_blocks": max_blocks, **gold}


@lru_cache(1024)
def _parse(machine: str) -> ConstructionTree:
    return ConstructionTree.parse(machine)
