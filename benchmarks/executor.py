"""Speed-up of the reward executor over scoring in the training process.

    python benchmarks/executor.py [--completions 200] [--milliseconds 20] [--workers 1 2 4]

Two rewards of the same duration are timed: one sleeps (like a solver on another machine), one computes. The speed-up
of the second is limited by the number of CPU cores. The benchmark also times one run of the sandbox. Prints a table
and writes benchmarks/results/executor.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

from trl_grpo_tasks.rewards.executor import RewardExecutor
from trl_grpo_tasks.rewards.sandbox import run_python, run_tests, sandbox_layers
from trl_grpo_tasks.task import Row, Score, Task


class Wait(Task):
    """A task whose reward takes `seconds` of sleep or of CPU time per completion."""

    name, version, description = "wait", "1", "a reward that takes a known time"
    weights = {"value": 1.0}

    def __init__(self, kind: str, seconds: float):
        super().__init__()
        self.kind = kind
        self.seconds = seconds

    def score(self, row: Row, completion: str) -> Score:
        if self.kind == "sleep":
            time.sleep(self.seconds)
        else:
            end = time.thread_time() + self.seconds
            while time.thread_time() < end:
                pass
        return self.make_score({"value": 1.0}, True, True, info={"pid": os.getpid()})


def seconds_for(task: Task, workers: int, completions: int) -> float:
    """Return the wall-clock seconds of one batch, with workers already running as in a later training step."""
    with RewardExecutor(task, workers=workers) as executor:
        executor.submit(["{}"] * max(1, workers), [f"warm-up {i}" for i in range(max(1, workers))]).result()
        texts = [f"completion {i}" for i in range(completions)]
        started = time.perf_counter()
        outcomes = executor.submit(["{}"] * completions, texts).result()
        elapsed = time.perf_counter() - started
    assert all(outcome.score is not None and not outcome.cached for outcome in outcomes)
    return elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--completions", type=int, default=200)
    parser.add_argument("--milliseconds", type=float, default=20.0)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    arguments = parser.parse_args()

    cores = len(os.sched_getaffinity(0))
    rows: list[dict[str, Any]] = []
    print(f"{arguments.completions} rewards of {arguments.milliseconds:g} ms, {cores} CPU cores")
    print(f"{'reward':8}{'workers':>9}{'seconds':>9}{'speed-up':>10}{'efficiency':>12}")
    for kind in ("sleep", "compute"):
        task = Wait(kind, arguments.milliseconds / 1000)
        alone = seconds_for(task, 0, arguments.completions)
        print(f"{kind:8}{'none':>9}{alone:9.2f}{1:9.2f}x")
        rows.append({"reward": kind, "workers": 0, "seconds": alone, "speedup": 1.0})
        for workers in arguments.workers:
            seconds = seconds_for(task, workers, arguments.completions)
            speedup = alone / seconds
            print(f"{kind:8}{workers:9}{seconds:9.2f}{speedup:9.2f}x{speedup / workers:12.0%}")
            rows.append({"reward": kind, "workers": workers, "seconds": seconds, "speedup": speedup})

    sandbox_layers()
    sandbox = {
        "run_python": median_ms(lambda: run_python("print(1)")),
        "run_tests": median_ms(lambda: run_tests("def add(a, b): return a + b", ["assert add(1, 2) == 3"])),
    }
    print("sandbox, one run: " + ", ".join(f"{name} {ms:.0f} ms" for name, ms in sandbox.items()))

    path = Path(__file__).parent / "results" / "executor.json"
    path.parent.mkdir(exist_ok=True)
    machine = {"cores": cores, "machine": platform.machine(), "python": platform.python_version()}
    settings = {"completions": arguments.completions, "milliseconds": arguments.milliseconds}
    path.write_text(json.dumps({**machine, **settings, "rows": rows, "sandbox_ms": sandbox}, indent=2) + "\n")


def median_ms(run: Any, repeats: int = 11) -> float:
    """Return the median wall-clock time of a call in milliseconds."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        times.append((time.perf_counter() - started) * 1000)
    return statistics.median(times)


if __name__ == "__main__":
    main()
