"""Throughput of rewards on Ray against local worker processes, for several numbers of workers.

    python benchmarks/ray_rewards.py [--workers 1 2 4 8] [--milliseconds 50] [--completions 20] [--nodes 2]

Two rewards of the same duration are timed: one sleeps (like a solver on another machine), one computes. The cluster is
started on this machine, with the workers spread over its nodes, so that the throughput of the reward that computes is
limited by the CPU cores of this machine. A row times local workers and Ray in turns, after a warm-up, and shows the
ratio of both. Throughput is in completions per second. Writes benchmarks/results/ray_rewards.json.
"""

from __future__ import annotations

import os
import time
from typing import Any

from harness import Report, run_table, table_parser

from trl_grpo_tasks.rewards.executor import BACKENDS, RewardExecutor
from trl_grpo_tasks.task import Row, Score, Task

COLUMNS = {
    "reward": "reward",
    "workers": "workers",
    "local per s": "process",
    "Ray per s": "ray",
    "Ray / local": "ratio",
    "start-up s, local": "process_start_s",
    "start-up s, Ray": "ray_start_s",
}


class Wait(Task):
    """A task whose reward takes `seconds` of sleep or of CPU time per completion."""

    name, version, description = "wait", "1", "a reward that takes a known time"
    weights = {"value": 1.0}

    def __init__(self, kind: str, seconds: float):
        super().__init__()
        self.kind, self.seconds = kind, seconds

    def score(self, row: Row, completion: str) -> Score:
        if self.kind == "sleep":
            time.sleep(self.seconds)
        else:
            end = time.thread_time() + self.seconds
            while time.thread_time() < end:
                pass
        return self.make_score({"value": 1.0}, True, True, info={"pid": os.getpid()})


def main() -> None:
    parser = table_parser(__doc__, __file__)
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--milliseconds", type=float, default=50.0)
    parser.add_argument("--completions", type=int, default=20, help="completions per worker in a batch")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    cells = [{"reward": reward, "workers": n} for reward in ("sleep", "compute") for n in options.workers]
    print(f"{len(os.sched_getaffinity(0))} CPU cores, {options.nodes} Ray nodes on this machine\n")
    cluster = start_cluster(options.nodes, max(options.workers))
    try:
        os.environ["RAY_ADDRESS"] = cluster.address  # the processes of the rows join it
        run_table("ray_rewards", cells, options, COLUMNS)
    finally:
        cluster.shutdown()


def start_cluster(nodes: int, workers: int) -> Any:
    """Start a cluster of so many nodes on this machine, with a CPU in Ray's sense for each worker."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    for _ in range(nodes):
        cluster.add_node(num_cpus=-(-workers // nodes), include_dashboard=False)
    return cluster


def measure(report: Report, options: Any, reward: str, workers: int) -> None:
    """Measure one row."""
    task = Wait(reward, options.milliseconds / 1000)
    executors = {}
    for backend in BACKENDS:
        started = time.perf_counter()
        executors[backend] = RewardExecutor(task, workers=workers, backend=backend)
        warm_up(executors[backend], workers)
        report({f"{backend}_start_s": time.perf_counter() - started})
    per_s: dict[str, list[float]] = {backend: [] for backend in executors}
    for repeat in range(options.repeats):
        for backend, executor in executors.items():
            texts = [f"{repeat} {i}" for i in range(options.completions * workers)]
            started = time.perf_counter()
            outcomes = executor.submit(["{}"] * len(texts), texts).result()
            per_s[backend].append(len(texts) / (time.perf_counter() - started))
            assert all(outcome.score is not None and not outcome.cached for outcome in outcomes)
        ratios = [far / near for near, far in zip(per_s["process"], per_s["ray"], strict=True)]
        report({**per_s, "ratio": ratios})
    for executor in executors.values():
        executor.close()


def warm_up(executor: RewardExecutor, workers: int) -> None:
    """Score until every worker has scored."""
    seen: set[int] = set()
    while len(seen) < workers:
        texts = [f"warm-up {time.perf_counter()} {i}" for i in range(workers)]
        seen |= {o.score.info["pid"] for o in executor.submit(["{}"] * workers, texts).result() if o.score}


if __name__ == "__main__":
    main()
