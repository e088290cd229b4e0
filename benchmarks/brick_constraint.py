"""Cost of the brick constraint: microseconds per token (mask and accept together) for structures of 100 bricks.

    python benchmarks/brick_constraint.py                              # a 49k vocabulary, numbers in one token
    python benchmarks/brick_constraint.py --tokenizer FOLDER_OR_GGUF   # the tokenizer of a model

Random structures, tokenized by the tokenizer, are replayed on one core with the garbage collector enabled. Columns:
`place us` (time to place one brick), `tokens` per brick, `forced` (fraction of tokens that are the only allowed one),
`first us` (first structure of a new constraint), `new us` (further structures), `again us` (a structure once more).

A second table shows the cost for a rollout: `rows` rows of the brick task, 8 per prompt, in which every token is drawn
at random from the mask and ended rows start again. `us per row` is the time of one pass (the drawn token, the forced
tokens after it, and the next mask) per row; `ms` is its 50th and 90th percentile for all rows. States are held by this
process or by workers, with the garbage collector disabled. Prints both tables and writes
benchmarks/results/brick_constraint.json.
"""

from __future__ import annotations

import argparse
import gc
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
from trl_grpo_tasks.constraints.shared import SharedStates
from trl_grpo_tasks.constraints.table import MaskTable
from trl_grpo_tasks.constraints.workers import StateWorkers, WorkerStates
from trl_grpo_tasks.tasks.brick.constraint import brick_constraint
from trl_grpo_tasks.tasks.brick.placements import Placements, Rules
from trl_grpo_tasks.tasks.brick.structure import FORMS, SIZES, Brick, Structure
from trl_grpo_tasks.tasks.brick.task import BrickOptions, BrickTask


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", help="a folder with a tokenizer, or a .gguf file")
    parser.add_argument("--structures", type=int, default=30, help="number of structures per table row")
    parser.add_argument("--bricks", type=int, default=100, help="number of bricks per structure, if they fit")
    parser.add_argument("--rows", type=int, default=1024, help="number of rows of the rollout")
    parser.add_argument("--workers", type=int, nargs="*", default=[2, 8], help="numbers of worker processes")
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
    rollouts = [measure_rollout(tokenizer, arguments.rows, count) for count in dict.fromkeys((0, *arguments.workers))]
    machine = {"machine": platform.machine(), "processors": os.cpu_count(), "python": platform.python_version()}
    output = Path(arguments.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    tokenizer_name = arguments.tokenizer or "synthetic"
    output.write_text(
        json.dumps({"tokenizer": tokenizer_name, **machine, "rows": rows, "rollouts": rollouts}, indent=2)
    )


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


def measure_rollout(tokenizer: Any, count: int, workers: int, passes: int = 100) -> dict[str, float]:
    """Time the passes of a rollout of `count` rows with states in so many workers; 0 means in this process."""
    task = BrickTask(BrickOptions())
    constraint, table, rng = task.constraint(tokenizer), MaskTable(len(tokenizer)), np.random.default_rng(0)
    rows = [row for row in task.dataset("train", count // 8, 0) for _ in range(8)]
    slots = list(range(len(rows)))
    states: Any = SharedStates(constraint, table)
    if workers:
        processes = StateWorkers(constraint, workers)
        while not processes.ready:
            time.sleep(0.1)
        states = WorkerStates(processes, table)
    states.start(slots, rows)
    drawable: dict[int, np.ndarray] = {}  # by mask number, without the end of the text where another token is allowed
    seconds, forced_tokens = [], 0
    gc.collect()
    gc.disable()
    for _ in range(passes):
        tokens = []
        for number in states.numbers(slots):
            if number not in drawable:
                ids = table.ids(number)
                drawable[number] = ids if len(ids) == 1 else ids[ids != tokenizer.eos_token_id]
            tokens.append(int(rng.choice(drawable[number])))
        began = time.perf_counter()
        accepted = states.accept(slots, tokens)
        states.numbers(slots)
        seconds.append(time.perf_counter() - began)
        forced_tokens += sum(len(forced.tokens) for forced in accepted)
        pairs = zip(slots, tokens, accepted, strict=True)
        ended = [slot for slot, token, forced in pairs if tokenizer.eos_token_id in (token, *forced.tokens[-1:])]
        states.start(ended, [rows[slot] for slot in ended])
    gc.enable()
    half, most = np.percentile(seconds, [50, 90]) * 1e3
    where = f"{workers} workers" if workers else "this process"
    per_row, forced_per_row = float(np.mean(seconds)) / count * 1e6, forced_tokens / passes / count
    print(f"{count} rows, {where:14}{per_row:8.1f} us per row{half:8.1f} ms{most:8.1f} ms", end="")
    print(f"{forced_per_row:8.2f} forced tokens per row")
    result = {"workers": workers, "us_per_row": per_row, "median_ms": float(half), "p90_ms": float(most)}
    return result | {"forced_per_row": forced_per_row}


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
