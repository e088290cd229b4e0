"""Cost of evaluating a machine: full evaluations per second of CPU time on one core, and memory growth.

    python benchmarks/machine.py

Each row is the median over the five gold machines with the closest number of blocks. An evaluation parses and
validates the JSON, builds the MuJoCo model and simulates the full five seconds in steps of 5 ms. `parse us` and
`check us` are the times to parse and to validate; `mask` is the time per literal of the choice tree for new machines.
Prints a table and writes benchmarks/results/machine.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mujoco

from trl_grpo_tasks.tasks.machine import ConstructionTree, simulate
from trl_grpo_tasks.tasks.machine.blocks import PROMPT_BLOCKS
from trl_grpo_tasks.tasks.machine.constraint import MachineTree
from trl_grpo_tasks.tasks.machine.data import gold_machines

WANTED = (("car", 10), ("car", 18), ("rough", 10), ("catapult", 10), ("catapult", 18), ("wall", 24))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="number of evaluations per machine")
    parser.add_argument(
        "--memory", type=int, default=2000, help="number of evaluations between the two memory measurements"
    )
    parser.add_argument("--output", default=str(Path(__file__).parent / "results" / "machine.json"))
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    rows = []
    print(f"{'trial':10}{'blocks':>7}{'per s':>10}{'parse us':>9}{'check us':>9}")
    for trial, blocks in WANTED:
        measured = [measure(text, trial, arguments.repeats) for text in machines_of(trial, blocks)]
        row = {"trial": trial, **{name: statistics.median(each[name] for each in measured) for name in measured[0]}}
        rows.append(row)
        print(
            f"{trial:10}{row['blocks']:7}{row['evaluations_per_second']:10.1f}"
            f"{row['parse_us']:9.0f}{row['check_us']:9.0f}"
        )
    mask = mask_us()
    growth = memory_growth(machines_of("car", 10)[0], arguments.memory)
    print(f"mask: {mask:.0f} us per literal; memory growth: {growth} kB over {arguments.memory} evaluations")
    found = {
        "machine": platform.machine(),
        "processors": os.cpu_count(),
        "mujoco": mujoco.__version__,
        "rows": rows,
        "mask_us": mask,
        "memory_growth_kb": growth,
    }
    output = Path(arguments.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(found, indent=2) + "\n")


def machines_of(trial: str, blocks: int) -> list[str]:
    """Return the five gold machines of a trial whose number of blocks is closest to `blocks`."""
    nearest = sorted(gold_machines()[trial], key=lambda gold: abs(len(gold.tree.blocks) - blocks))
    return [gold.machine for gold in nearest[:5]]


def measure(text: str, trial: str, repeats: int) -> dict[str, Any]:
    tree = ConstructionTree.parse(text)
    return {
        "blocks": len(tree.blocks),
        "evaluations_per_second": 1 / cpu_s(lambda: simulate(text, trial, to_the_end=True), repeats),
        "parse_us": 1e6 * cpu_s(lambda: ConstructionTree.parse(text), repeats),
        "check_us": 1e6 * cpu_s(lambda: ConstructionTree(tree.blocks).validate(), repeats),
    }


def cpu_s(work: Callable[[], Any], repeats: int) -> float:
    """Return the CPU seconds per call in the best of five rounds; slower rounds were disturbed by other processes."""
    work()
    rounds = []
    for _ in range(5):
        before = time.process_time()
        for _ in range(max(1, repeats // 5)):
            work()
        rounds.append((time.process_time() - before) / max(1, repeats // 5))
    return min(rounds)


def mask_us() -> float:
    """Return the CPU microseconds per literal of the choice tree, over random machines."""
    tree, rng, literals = MachineTree(PROMPT_BLOCKS, 24), random.Random(0), 0
    before = time.process_time()
    for _ in range(60):
        node: Any = tree.root({})
        while node is not None:
            _, node = rng.choice(tree.choices(node))
            literals += 1
    return 1e6 * (time.process_time() - before) / literals


def memory_growth(text: str, evaluations: int) -> int:
    """Return the growth of the peak memory in kB over `evaluations` evaluations, after a warm-up of fifty."""
    for _ in range(50):
        simulate(text)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(evaluations):
        simulate(text)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


if __name__ == "__main__":
    main()
