"""Rows of the machine task: a phrasing of the request, a size level, and a machine known to succeed."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from .blocks import PROMPT_BLOCKS
from .designs import LEVELS
from .prompts import TEST_VARIANTS, VARIANTS, manual, question
from .tree import ConstructionTree

GOLD_FILE = Path(__file__).with_name("gold.json")


@lru_cache(1)
def gold_machines() -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return the successful machines found by `make_gold.py`, by trial and level."""
    return json.loads(GOLD_FILE.read_text())


def rows(
    trials: Sequence[str],
    split: str,
    size: int | None,
    seed: int,
    *,
    kinds: Sequence[str] = PROMPT_BLOCKS,
    with_manual: bool = False,
    unbroken: bool = False,
) -> list[dict[str, Any]]:
    """Return rows that alternate between levels and trials; no phrasing is in both splits.

    There is one row per phrasing and gold machine. `unbroken` excludes machines that break when breakage is simulated.
    """
    if split not in ("train", "test"):
        raise ValueError(f"unknown split {split!r}; splits are: train, test")
    rng = random.Random(f"{seed}-{split}")
    queues = []
    for level in LEVELS:
        for trial in trials:
            variants = range(len(VARIANTS[trial]))
            kept = variants[:-TEST_VARIANTS] if split == "train" else variants[-TEST_VARIANTS:]
            machines = [
                entry["machine"]
                for entry in gold_machines()[trial][level]
                if not (unbroken and entry["breaks"]) and _uses(entry["machine"]) <= set(kinds)
            ]
            pairs = [(variant, machine) for variant in kept for machine in machines]
            rng.shuffle(pairs)
            queues.append([_row(trial, level, variant, machine, kinds, with_manual) for variant, machine in pairs])
    # Take from the queues in turn, all levels of one trial first, so that a few rows already cover all levels.
    order = [queues[level * len(trials) + trial] for trial in range(len(trials)) for level in range(len(LEVELS))]
    found = [queue[n] for n in range(max(map(len, order))) for queue in order if n < len(queue)]
    if not found:
        raise ValueError(
            f"no known machine for {', '.join(trials)} uses only the blocks {', '.join(kinds)}; allow more "
            "types with --blocks"
        )
    return found[:size]


def _row(
    trial: str, level: str, variant: int, machine: str, kinds: Sequence[str], with_manual: bool
) -> dict[str, Any]:
    max_blocks = LEVELS[level][1]
    prompt = [{"role": "user", "content": question(trial, variant, max_blocks)}]
    if with_manual:
        prompt.insert(0, {"role": "system", "content": manual(kinds)})
    return {"prompt": prompt, "level": level, "trial": trial, "max_blocks": max_blocks, "gold": machine}


@lru_cache(1024)
def _uses(machine: str) -> frozenset[str]:
    return frozenset(block.kind for block in ConstructionTree.parse(machine).blocks)
