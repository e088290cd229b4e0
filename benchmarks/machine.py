"""What it costs to judge a machine: full evaluations a second of CPU time on one core, and bytes left behind.

    python benchmarks/machine.py

Each row is the median of the five gold machines nearest in size. An evaluation reads the JSON, checks it, builds the
model and simulates five seconds in steps of 5 ms, landed or not. `reading` and `checking` are microseconds to parse
and to validate, `mask` microseconds for each literal of the choice tree in machines that it has not seen. Prints a
table and writes benchmarks/results/machine.json.
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
    parser.add_argument("--repeats", type=int, default=15, help="evaluations of each machine")
    parser.add_argument("--memory", type=int, default=2000, help="evaluations between the two looks at the memory")
    parser.add_argument("--output", default=str(Path(__file__).parent / "results" / "machine.json"))
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    rows = []
    print(f"{'trial':10}{'blocks':>7}{'a second':>10}{'reading':>9}{'checking':>9}")
    for trial, blocks in WANTED:
        measured = [measure(text, trial, arguments.repeats) for text in machines_of(trial, blocks)]
        row = {"trial": trial, **{name: statistics.median(each[name] for each in measured) for name in measured[0]}}
        rows.append(row)
        print(
            f"{trial:10}{row['blocks']:7}{row['evaluations_a_second']:10.1f}"
            f"{row['reading_us']:9.0f}{row['checking_us']:9.0f}"
        )
    mask = mask_us()
    growth = memory_growth(machines_of("car", 10)[0], arguments.memory)
    print(f"mask: {mask:.0f} us a literal; memory: {growth} kB more after {arguments.memory} evaluations")
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
    """The five gold machines of a trial whose numbers of blocks are nearest."""
    texts = [entry["machine"] for level in gold_machines()[trial].values() for entry in level]
    return sorted(texts, key=lambda text: abs(text.count("order_id") - blocks))[:5]


def measure(text: str, trial: str, repeats: int) -> dict[str, Any]:
    tree = ConstructionTree.parse(text)
    return {
        "blocks": len(tree.blocks),
        "evaluations_a_second": 1 / cpu_s(lambda: simulate(text, trial, to_the_end=True), repeats),
        "reading_us": 1e6 * cpu_s(lambda: ConstructionTree.parse(text), repeats),
        "checking_us": 1e6 * cpu_s(lambda: ConstructionTree(tree.blocks).validate(), repeats),
    }


def cpu_s(work: Callable[[], Any], repeats: int) -> float:
    """Seconds of CPU time in the best of five rounds: in the others somebody else had the caches."""
    work()
    rounds = []
    for _ in range(5):
        before = time.process_time()
        for _ in range(max(1, repeats // 5)):
            work()
        rounds.append((time.process_time() - before) / max(1, repeats // 5))
    return min(rounds)


def mask_us() -> float:
    tree, rng, literals = MachineTree(PROMPT_BLOCKS, 24), random.Random(0), 0
    before = time.process_time()
    for _ in range(60):
        node: Any = tree.root({})
        while node is not None:
            _, node = rng.choice(tree.choices(node))
            literals += 1
    return 1e6 * (time.process_time() - before) / literals


def memory_growth(text: str, evaluations: int) -> int:
    """kB by which the process grew at its largest, after a first fifty evaluations."""
    for _ in range(50):
        simulate(text)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(evaluations):
        simulate(text)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


if __name__ == "__main__":
    main()
