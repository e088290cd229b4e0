"""Seconds by stage of the demo's training steps on this machine, compared with another commit in the same run.

    python benchmarks/demo_steps.py --against 16cf214 [--repeats 3] [--hidden 128 --layers 4]

Both trees train task brick with the same options and a tiny model of the same size, in turns, each in a process of its
own: --cold_steps steps of the cold start, then --steps of GRPO with one update per rollout. Stages exclude what they
call, so that they add up to the step. Columns: medians over all steps but the first two; the other commit divided by
this tree, so that above 1 this tree is faster. At the end, the matrix-product speed of this machine at the model's
shapes, and the share of it that forward and backward passes reach. Prints tables and writes
benchmarks/results/demo_steps.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import flags, table_line, write_results

ROOT = Path(__file__).parents[1]
OPTIONS = {
    "task": "brick",
    "brick_levels": "carry",
    "max_bricks": 16,
    "cold_start_batch_size": 64,
    "cold_start_learning_rate": 2e-3,
    "num_generations": 4,
    "num_iterations": 1,
    "per_device_train_batch_size": 128,
    "max_completion_length": 64,
    "learning_rate": 3e-4,
    "warmup_steps": 2,
    "component_weights": '{"success": 1.0}',
    "own_successes": 2048,
    "own_successes_fraction": 0.5,
    "train_rows": 3000,
    "eval_rows": 2,
    "save_strategy": "no",
}
STAGES = ("rollout", "rewards", "old log-probs", "forward and loss", "backward", "optimizer", "rest")


class Stages:
    """Exclusive seconds per stage and step, measured by wrapping methods."""

    def __init__(self) -> None:
        self.steps: dict[str, list[dict[str, float]]] = defaultdict(list)
        self._inner = [0.0]  # seconds of wrapped calls within each open one
        self._step: dict[str, float] = defaultdict(float)

    def wrap(self, owner: Any, name: str, stage: str | Callable[[Any], str | None], kind: str | None = None) -> None:
        """Time calls of a method. A `kind` makes it a whole step of that kind."""
        method = getattr(owner, name)

        def timed(first: Any, *args: Any, **kwargs: Any) -> Any:
            now = stage if isinstance(stage, str) else stage(first)
            if now is None:
                return method(first, *args, **kwargs)
            self._inner.append(0.0)
            start = time.perf_counter()
            try:
                return method(first, *args, **kwargs)
            finally:
                seconds = time.perf_counter() - start
                self._step[now] += seconds - self._inner.pop()
                self._inner[-1] += seconds
                if kind is not None:
                    self.steps[kind].append(dict(self._step, step=seconds))
                    self._step.clear()

        setattr(owner, name, timed)


def train(out: str, hidden: int, layers: int) -> None:
    """In the process of one tree, whose package comes first on the path: run its train.py and write the times."""
    import torch
    from accelerate import Accelerator
    from trl import SFTTrainer

    from trl_grpo_tasks import TaskGRPOTrainer
    from trl_grpo_tasks.tasks.brick.task import BrickTask

    tiny, stages, tokens = BrickTask.tiny, Stages(), []
    BrickTask.tiny = lambda self: dataclasses.replace(tiny(self), hidden_size=hidden, layers=layers, heads=4)
    is_rollout = {"now": False}
    generate = TaskGRPOTrainer._generate_and_score_completions

    def rollout(self: Any, *args: Any) -> Any:
        is_rollout["now"] = True
        output = generate(self, *args)
        is_rollout["now"] = False
        mask = output["completion_mask"]
        tokens.append(int(mask.sum() + output["prompt_mask"].sum()) if self.model.training else 0)
        return output

    TaskGRPOTrainer._generate_and_score_completions = rollout
    stages.wrap(TaskGRPOTrainer, "_generate", "rollout")
    stages.wrap(TaskGRPOTrainer, "_calculate_rewards", "rewards")
    stages.wrap(
        TaskGRPOTrainer,
        "_get_per_token_logps_and_entropies",
        lambda _: "old log-probs" if is_rollout["now"] else None,
    )
    for trainer in (TaskGRPOTrainer, SFTTrainer):
        stages.wrap(trainer, "compute_loss", "forward and loss")
    stages.wrap(Accelerator, "backward", "backward")
    stages.wrap(torch.optim.AdamW, "step", "optimizer")
    stages.wrap(TaskGRPOTrainer, "training_step", "rest", kind="GRPO")
    stages.wrap(SFTTrainer, "training_step", "rest", kind="cold start")
    try:
        runpy.run_path("train.py", run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise
    Path(out).write_text(json.dumps({"steps": stages.steps, "tokens": [count for count in tokens if count]}))


def measure(tree: Path, options: Any, scratch: Path) -> dict[str, Any]:
    """One training of a tree."""
    folder, out = scratch / f"run{time.monotonic_ns()}", scratch / "times.json"
    more = {"cold_start_steps": options.cold_steps, "max_steps": options.steps, "output_dir": folder}
    code = f"import demo_steps; demo_steps.train({str(out)!r}, {options.hidden}, {options.layers})"
    environment = os.environ | {"PYTHONPATH": f"{tree}:{ROOT / 'benchmarks'}", "HF_HUB_OFFLINE": "1"}
    log = scratch / "log.txt"
    with log.open("w") as file:
        arguments = [sys.executable, "-c", code, *flags(OPTIONS | more)]
        ended = subprocess.run(arguments, cwd=tree, env=environment, stdout=file, stderr=subprocess.STDOUT)
    if ended.returncode:
        raise RuntimeError(f"{tree} failed:\n{log.read_text()[-3000:]}")
    return json.loads(out.read_text())


def medians(runs: list[dict[str, Any]], kind: str) -> dict[str, float]:
    """Median seconds of each stage over the steps of all runs. The first two steps of each run do not count."""
    steps = [step for run in runs for step in run["steps"][kind][2:]]
    return {stage: statistics.median(step.get(stage, 0.0) for step in steps) for stage in (*STAGES, "step")}


def product_speed(hidden: int, seconds: float = 2.0) -> float:
    """Floating-point operations per second of matrix products of the model's shapes."""
    import torch

    left, right = torch.randn(3328, hidden), torch.randn(hidden, 3 * hidden)
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        torch.mm(left, right)
        count += 1
    return count * 2 * left.numel() * right.shape[1] / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", required=True, help="commit to compare with")
    parser.add_argument("--repeats", type=int, default=3, help="trainings of each tree")
    parser.add_argument("--cold_steps", type=int, default=25)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--out", default=str(ROOT / "benchmarks/results/demo_steps.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        scratch, other = Path(name), Path(name) / "other"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(other), options.against], check=True)
        try:
            turns = [
                (measure(other, options, scratch), measure(ROOT, options, scratch)) for _ in range(options.repeats)
            ]
        finally:
            subprocess.run([*git, "remove", "--force", str(other)], check=True)
    before, after = map(list, zip(*turns, strict=True))
    rows = []
    for kind in ("cold start", "GRPO"):
        then, now = medians(before, kind), medians(after, kind)
        print("\n" + table_line([f"{kind}, s per step", options.against, "this tree", "ratio"]))
        print(table_line(["---"] * 4))
        for stage in (*STAGES, "step"):
            if max(then[stage], now[stage]) > 1e-4:
                ratio = then[stage] / now[stage] if now[stage] > 1e-4 else None
                print(table_line([stage, then[stage], now[stage], ratio]))
                rows.append({"kind": kind, "stage": stage, "before": then[stage], "after": now[stage], "ratio": ratio})
    speed = product_speed(options.hidden)
    weights = (
        options.layers * (4 + 9) * options.hidden**2
    )  # of the matrices of a layer; its MLP is three times as wide
    for tree, runs in ((options.against, before), ("this tree", after)):
        seconds = medians(runs, "GRPO")
        tokens = statistics.median(count for run in runs for count in run["tokens"])
        used = 6 * weights * tokens / (seconds["forward and loss"] + seconds["backward"])
        print(f"{tree}: {tokens:,.0f} tokens per rollout; forward and backward at {used / 1e9:.0f} GFLOP/s, "
              f"{used / speed:.0%} of the {speed / 1e9:.0f} of matrix products")  # fmt: skip
        rows.append({"tree": tree, "tokens": tokens, "gflops": used / 1e9, "products_gflops": speed / 1e9})
    write_results(options.out, rows)


if __name__ == "__main__":
    main()
