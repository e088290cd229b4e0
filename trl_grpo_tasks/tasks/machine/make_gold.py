"""Search for gold machines of every trial and level, and write them to gold.json. This takes about
twenty minutes on one core.

trl-grpo-tasks task machine make-gold
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

from .data import GOLD_FILE, GoldMachine, gold_machine
from .designs import LEVELS, mutated, search
from .tree import ConstructionTree
from .trials import TRIALS

_VARIANTS = 3  # machines that are made from each one that the search found, by up to so many changes
_TRIES = 8  # tries per machine that is wanted


def main(arguments: Sequence[str]) -> None:
    """Search for gold machines of every trial and level, and write them to a file."""
    parser = argparse.ArgumentParser(
        "trl-grpo-tasks task machine make-gold",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--per_level", type=int, default=40, help="machines for each trial and level")
    parser.add_argument("--trials", nargs="*", default=list(TRIALS), help="trials to search for")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=GOLD_FILE)
    options = parser.parse_args(arguments)
    lines = []
    for name in options.trials:
        found: list[GoldMachine] = []
        for level in LEVELS:
            machines = _of_level(name, level, options.per_level, options.seed)
            scores = sorted(gold.score for gold in machines) or [0.0]
            print(f"{name} {level}: {len(machines)} machines, scores {scores[0]} to {scores[-1]}", flush=True)
            found += machines
        entries = ",\n".join(json.dumps(gold.compact()) for gold in found)
        lines.append(f"{json.dumps(name)}: [\n{entries}\n]")
    options.output.write_text("{" + ",\n".join(lines) + "}\n")


def _of_level(name: str, level: str, count: int, seed: int) -> list[GoldMachine]:
    """Return different machines that reach the least goal: some from searches, the others by changes of those."""
    trial, (least, most) = TRIALS[name], LEVELS[level]
    found: dict[ConstructionTree, GoldMachine] = {}
    for attempt in range(_TRIES * count):
        if len(found) * (1 + _VARIANTS) >= count:
            break
        tree, _ = search(trial, (least, most), f"{seed}-{level}-{attempt}")
        if (gold := gold_machine(tree, trial)) is not None:
            found[tree] = gold
    bases, rng = list(found), random.Random(f"{seed}-{name}-{level}")
    for _ in range(_TRIES * count if bases else 0):
        if len(found) >= count:
            break
        tree = rng.choice(bases)
        for _ in range(rng.randint(1, _VARIANTS)):
            tree = mutated(tree, rng, most)
        if least <= len(tree.blocks) and tree not in found and (gold := gold_machine(tree, trial)) is not None:
            found[tree] = gold
    return list(found.values())
