"""Cost of the brick constraint in microseconds per token (mask and accept together) for structures of 100 bricks.

    python benchmarks/brick_constraint.py                              # a 49k vocabulary, numbers in one token
    python benchmarks/brick_constraint.py --tokenizer FOLDER_OR_GGUF   # the tokenizer of a model

Random structures, tokenized by the tokenizer, are replayed on one core with the garbage collector enabled. Columns:
`place us` (time to place one brick), `tokens` per brick, `forced` (fraction of tokens that are the only allowed one),
`first us` (first structure of a new constraint), `new us` (further structures), `again us` (a structure once more).
Prints a table and writes benchmarks/results/brick_constraint.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
from masks import load_tokenizer, synthetic_bpe_tokenizer

from trl_grpo_tasks.constraints import Constraint, Vocabulary, replay
from trl_grpo_tasks.tasks.brick.constraint import FORMS, brick_constraint
from trl_grpo_tasks.tasks.brick.placements import Placements, Rules
from trl_grpo_tasks.tasks.brick.structure import SIZES, Brick, Structure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", help="a folder with a tokenizer, or a .gguf file")
    parser.add_argument("--structures", type=int, default=30, help="number of structures per table row")
    parser.add_argument("--bricks", type=int, default=100, help="number of bricks per structure, if they fit")
    parser.add_argument("--output", default=str(Path(__file__).parent / "results" / "brick_constraint.json"))
    arguments = parser.parse_args()

    tokenizer = load_tokenizer(arguments.tokenizer) if arguments.tokenizer else synthetic_bpe_tokenizer(49152)
    print(f"{Vocabulary.of(tokenizer).size} tokens, {arguments.structures} structures\n")
    print(f"{'':28}{'place us':>10}{'tokens':>8}{'forced':>8}{'first us':>10}{'new us':>8}{'again us':>10}")
    rows = []
    for world, canonical in itertools.product((20, 8), (False, True)):
        built = [random_structure(world, arguments.bricks, canonical, seed) for seed in range(arguments.structures)]
        for form in FORMS:
            row: dict[str, Any] = {"world": world, "form": form, "canonical": canonical}
            row["place_us"] = float(np.median([seconds / len(structure) for structure, seconds in built])) * 1e6
            row |= measure(tokenizer, [structure for structure, _ in built], world, form, canonical)
            rows.append(row)
            name = f"{world}, {form}{', canonical' if canonical else ''}"
            print(
                f"{name:28}{row['place_us']:10.1f}{row['tokens_per_brick']:8.1f}{row['forced']:8.2f}"
                f"{row['first_us']:10.1f}{row['new_us']:8.1f}{row['again_us']:10.1f}"
            )
    machine = {"machine": platform.machine(), "processors": os.cpu_count(), "python": platform.python_version()}
    output = Path(arguments.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({"tokenizer": arguments.tokenizer or "synthetic", **machine, "rows": rows}, indent=2))


def measure(tokenizer: Any, structures: list[Structure], world: int, form: str, canonical: bool) -> dict[str, float]:
    """Time the replay of structures under one variant of the constraint."""
    texts = [structure.text if form == "absolute" else structure.pivot_text() for structure in structures]
    token_lists = [[*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for text in texts]
    constraint = brick_constraint(tokenizer, world=world, form=form, canonical=canonical)
    times = [seconds_to_replay(constraint, tokens) / len(tokens) * 1e6 for tokens in token_lists]
    again = seconds_to_replay(constraint, token_lists[-1]) / len(token_lists[-1]) * 1e6
    allowed = [np.bitwise_count(mask.view(np.uint32)).sum() for mask in replay(constraint, {}, token_lists[-1])]
    return {
        "first_us": times[0],
        "new_us": float(np.mean(times[1:])),
        "again_us": again,
        "tokens_per_brick": sum(map(len, token_lists)) / sum(map(len, structures)),
        "forced": float(np.mean(np.array(allowed) == 1)),
    }


def seconds_to_replay(constraint: Constraint, tokens: list[int]) -> float:
    """Return the CPU time of computing all masks and accepting all tokens."""
    began = time.process_time()
    state = constraint.start({})
    assert state is not None
    for token in tokens:
        state.mask()
        state.accept(token)
    return time.process_time() - began


def random_structure(world: int, count: int, canonical: bool, seed: int) -> tuple[Structure, float]:
    """Return a random structure and the CPU seconds spent on placing bricks, without the time to choose them.

    Bricks are placed at random legal positions or, in canonical order, at one of the next positions.
    """
    rng = random.Random(seed)
    rules = Rules(world, max_bricks=count + 1, canonical=canonical)
    placed, seconds = Placements.empty(rules), 0.0
    while len(placed.bricks) < count and (sizes := placed.sizes()):
        size, box, last = rng.choice(sizes), rules.everywhere, 0
        if canonical:
            lowest = next(z for z in range(world) if placed.legal[z][size])
            box, last = box._replace(low=lowest, high=lowest + 1), -2
        x = rng.choice(placed.xs(size, box)[last:])
        y = rng.choice(placed.ys(size, box, x)[last:])
        brick = Brick(*SIZES[size], x, y, rng.choice(placed.zs(size, box, x, y)))
        began = time.process_time()
        placed = placed.place(brick)
        seconds += time.process_time() - began
    return Structure(placed.bricks, world), seconds


if __name__ == "__main__":
    main()
