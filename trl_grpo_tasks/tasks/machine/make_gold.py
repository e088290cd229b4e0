"""Search for gold machines of every trial and level, and write them to gold.json. This takes about
five minutes on one core.

trl-grpo-tasks task machine make-gold
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .data import GOLD_FILE
from .designs import LEVELS, search
from .simulator import DT, simulate
from .tree import ConstructionTree
from .trials import SCORINGS, TRIALS, Trial, task_score

_MARGIN = 1.1  # gold machines exceed their trial's goal by this factor, so that rounding differences do not matter


def main(arguments: Sequence[str]) -> None:
    """Search for gold machines of every trial and level, and write them to a file."""
    parser = argparse.ArgumentParser(
        "trl-grpo-tasks task machine make-gold",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--per_level", type=int, default=10, help="machines for each trial and level")
    parser.add_argument("--trials", nargs="*", default=list(TRIALS), help="trials to search for")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=GOLD_FILE)
    options = parser.parse_args(arguments)
    found: dict[str, Any] = {}
    for name in options.trials:
        for level, blocks in LEVELS.items():
            machines: dict[str, dict[str, Any]] = {}
            for attempt in range(8 * options.per_level):
                if len(machines) == options.per_level:
                    break
                tree, score = search(name, blocks, f"{options.seed}-{level}-{attempt}")
                if score >= _MARGIN * TRIALS[name].goal and _is_gold(tree, TRIALS[name]):
                    text = tree.to_json()
                    breaks = bool(simulate(tree, name, breakage=True).broken)
                    machines[text] = {"machine": text, "score": round(score, 3), "breaks": breaks}
            found.setdefault(name, {})[level] = list(machines.values())
            scores = sorted(entry["score"] for entry in machines.values()) or [0.0]
            print(f"{name} {level}: {len(machines)} machines, scores {scores[0]} to {scores[-1]}", flush=True)
    options.output.write_text(json.dumps(found, indent=0) + "\n")


def _is_gold(tree: ConstructionTree, trial: Trial) -> bool:
    """Return whether the machine succeeds with every scoring, and with a different time step too.

    The second step size makes sure that processors and MuJoCo versions with different rounding give the same verdict.
    """
    for dt in (DT, 0.8 * DT):
        result = simulate(tree, trial, dt=dt, to_the_end=True)
        if not result.valid or any(task_score(trial, result, way)[0] < _MARGIN * trial.goal for way in SCORINGS):
            return False
    return True
