"""Make gold machines of every trial and level, and write them to gold.json.

The same command resumes a run that was stopped. Machines of trials that are not named stay as they
are.

trl-grpo-tasks tool machine make-gold --trials car catapult
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ...files import write_atomically
from .data import GOLD_FILE, GoldMachine, gold_machine, lowest_score
from .designs import LEVELS, mirrored, mutated, sketch_car, sketch_catapult
from .simulator import DT
from .trials import TRIALS

# Designs of the trials of the published training, which has 9,984 machines. Their mirror images are stored too, and
# data.py adds all of these with rods instead of wood. Small ones are quicker to make.
MANY = {"small": 1000, "medium": 400, "large": 300}
MANY_TRIALS = ("car", "catapult")
_FEW = 40  # designs of each level of the other trials
_PART = 100  # machines that are made, and stored, together; the parts are independent of each other
_SKETCHES = 0.1  # the share of a part that are new sketches; the others are changes of machines of the part
_CHANGES = 2  # a machine is changed at most so many times at once
_TRIES = 20  # tries per machine that is wanted
_HOLDING = 10  # so many designs of a part are also simulated with breakage, which takes twice the time


def main(arguments: Sequence[str]) -> None:
    """Make gold machines of every trial and level, and write them to a file."""
    parser = argparse.ArgumentParser(
        "trl-grpo-tasks tool machine make-gold",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--per_level",
        type=int,
        help=f"designs of each level; if omitted, {_FEW}, and more for {' and '.join(MANY_TRIALS)}",
    )
    parser.add_argument("--trials", nargs="*", default=list(TRIALS), choices=TRIALS, help="trials to make them for")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=GOLD_FILE)
    options = parser.parse_args(arguments)
    unfinished = options.output.with_suffix(".part")
    parts = json.loads(unfinished.read_text()) if unfinished.is_file() else {}
    made = json.loads(options.output.read_text()) if options.output.is_file() else {}
    for name in options.trials:
        found: dict[object, list[Any]] = {}
        for level in LEVELS:
            wanted = options.per_level or (MANY[level] if name in MANY_TRIALS else _FEW)
            before = len(found)
            for start in range(0, wanted, _PART):
                count = min(_PART, wanted - start)
                key = f"{options.seed}-{name}-{level}-{start}-{count}"
                if key not in parts:
                    designs = _part(key, name, level, count)
                    parts[key] = [dataclasses.astuple(gold) for gold in [*designs, *_images(designs, name)]]
                    write_atomically(unfinished, json.dumps(parts))
                found |= {GoldMachine(*entry).tree.shape(): entry for entry in parts[key]}
            print(f"{name} {level}: {len(found) - before} machines", flush=True)
        made[name] = list(found.values())
    lines = [json.dumps(name) + ": [\n" + ",\n".join(map(json.dumps, made[name])) + "\n]" for name in made]
    write_atomically(options.output, "{" + ",\n".join(lines) + "}\n")
    unfinished.unlink(missing_ok=True)


def _part(seed: str, name: str, level: str, count: int) -> list[GoldMachine]:
    """Return machines of different shapes that reach the least goal; better ones are changed more often."""
    trial, (least, most), rng = TRIALS[name], LEVELS[level], random.Random(seed)
    draw = sketch_catapult if trial.throws else sketch_car
    found: dict[object, GoldMachine] = {}
    for attempt in range(_TRIES * count):
        if len(found) >= count:
            break
        if not found or (len(found) < _SKETCHES * count and attempt < _TRIES * count // 2):
            size = rng.randint(least, most) if least > 2 else rng.randint(5, most)
            tree = draw(rng, (size, size))
        else:
            tree = max(rng.choices(list(found.values()), k=2), key=lambda gold: gold.score).tree
            for _ in range(rng.randint(1, _CHANGES)):
                tree = mutated(tree, rng, most)
        if not least <= len(tree.blocks) <= most or tree.shape() in found:
            continue
        if (gold := gold_machine(tree, trial, breakage=len(found) < _HOLDING)) is not None:
            found[tree.shape()] = gold
    return list(found.values())


def _images(designs: Sequence[GoldMachine], name: str) -> Iterator[GoldMachine]:
    """Yield the mirror images that reach the least goal too. One time step is enough for them: their designs passed
    with two."""
    for gold in designs:
        tree = mirrored(gold.tree)
        if tree.shape() != gold.tree.shape() and (score := lowest_score(tree, TRIALS[name], [DT])) is not None:
            yield GoldMachine.of(tree, min(gold.score, score), holds=False)
