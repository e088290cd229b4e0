"""Soak test, not part of `make test`: runs that are killed at random times and resumed end bit for bit as if they had
not been. Prints a table; the exit status is 1 if any run differs.

    python -m tests.training.soak                 # 20 kills, about a quarter of an hour on two cores
    python -m tests.training.soak --kills 3 --seed 7
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from safetensors.torch import load_file

from tests.support.paths import ROOT

KILLS_PER_RUN = 4  # then it is left to finish
COMMON = {
    "task": "tests.support.toy",
    "use_cpu": True,
    "report_to": "none",
    "reward_workers": 1,
    "eval_rows": 2,
    "cold_start_steps": 2,
    "cold_start_batch_size": 4,
    "max_steps": 150,  # longer than the start of a run, so that most kills hit training
    "save_steps": 2,
    "save_total_limit": 2,
    "logging_steps": 3,
    "num_generations": 8,
    "per_device_train_batch_size": 16,
    "max_completion_length": 5,
    "learning_rate": 1e-2,
    "constrain": True,
    "beta": 0.1,
    "kl_target": 0.01,
    "replay_size": 6,
    "curriculum": True,
    "curriculum_window": 32,
    "curriculum_advance": 0.02,
    "curriculum_fall_back": 0.0,
    "num_iterations": 2,
    "steps_per_generation": 2,
    "gradient_accumulation_steps": 1,
    "advantage_estimator": "mean",
    "component_weights": '{"success": 1.0, "match": 0.0, "short": 0.0}',
}
LORA = {"use_peft": True, "lora_target_modules": "q_proj", "lora_r": 2}
CONFIGURATIONS = {
    "full weights, ema reference": {"reference_mode": "ema", "ema_alpha": 0.7, "rollout": "trl"},
    "LoRA, ema reference": LORA | {"reference_mode": "ema", "ema_alpha": 0.7},
    "LoRA, periodic reference": LORA | {"reference_mode": "periodic", "reference_update_freq": 3},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the times at which runs are killed")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return soak(Path(folder), asked.kills, random.Random(asked.seed))


def soak(folder: Path, kills: int, chance: random.Random) -> int:
    """Kill and resume until there were `kills` kills, and compare every run with its uninterrupted one."""
    uninterrupted: dict[str, tuple[dict, float]] = {}
    differing = number = 0
    print(f"{'run':>3}  {'configuration':28} {'killed after':42} {'minutes':>7}  result", flush=True)
    while kills:
        name = list(CONFIGURATIONS)[number % len(CONFIGURATIONS)]
        number += 1
        if name not in uninterrupted:
            start = time.monotonic()
            run(folder / name, name)
            uninterrupted[name] = outcome(folder / name), time.monotonic() - start
        wanted, seconds = uninterrupted[name]
        start, output, killed = time.monotonic(), folder / f"run-{number}", []
        while True:
            may_kill = kills and len(killed) < KILLS_PER_RUN
            if not run(output, name, kill_after=chance.uniform(0.1, 0.9) * seconds if may_kill else None):
                break
            kills -= 1
            killed.append(where(output))
        found = outcome(output)
        different = [key for key in wanted if found.get(key) != wanted[key]] + sorted(found.keys() - wanted.keys())
        differing += bool(different)
        result = f"DIFFERENT: {', '.join(different)[:200]}" if different else "the same bits"
        minutes = (time.monotonic() - start) / 60
        print(f"{number:3}  {name:28} {', '.join(killed):42} {minutes:7.1f}  {result}", flush=True)
    print(f"{number} runs, {differing} different from the uninterrupted run")
    return 1 if differing else 0


def run(output: Path, name: str, kill_after: float | None = None) -> bool:
    """Start a run, or resume it. Whether it was killed before it was done."""
    options = COMMON | CONFIGURATIONS[name] | {"output_dir": output, "resume_from_checkpoint": "auto"}
    words = [word for option, value in options.items() for word in (f"--{option}", str(value))]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["TOKENIZERS_PARALLELISM"] = "false"
    console = output.with_suffix(".txt")
    with open(console, "a") as said:
        running = subprocess.Popen(
            [sys.executable, "-m", "trl_grpo_tasks.commands.main", "train", *words],
            stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=environment, cwd=ROOT,
        )  # fmt: skip
        try:
            code = running.wait(kill_after)
        except subprocess.TimeoutExpired:
            running.send_signal(signal.SIGKILL)
            running.wait()
            return True
    if code != 0:
        raise SystemExit(f"{name}: exit status {code}\n{console.read_text()[-3000:]}")
    return False


def where(output: Path) -> str:
    """How far a run got: its newest checkpoint, and the last step in its metrics."""
    steps = [int(path.name.rpartition("-")[2]) for path in output.glob("checkpoint-*")]
    metrics = output / "training_metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.is_file() else []
    return f"step {max([*steps, 3 * len(lines)])}" if steps or lines else "no step"


def outcome(output: Path) -> dict[str, object]:
    """What a run ended with, by name: weights as bytes, metrics, and evaluations without their times."""
    files = [output / name for name in ("model.safetensors", "adapter_model.safetensors")]
    weights = {name: value for file in files if file.is_file() for name, value in load_file(file).items()}
    assert weights, f"{output} holds no weights"
    found: dict[str, object] = {name: value.numpy().tobytes() for name, value in weights.items()}
    for number, line in enumerate((output / "training_metrics.jsonl").read_text().splitlines()):
        found[f"metrics {number}"] = line
    for evaluation in json.loads((output / "results.json").read_text())["evaluations"]:
        evaluation["metrics"].pop("seconds")
        found[f"evaluation {evaluation['name']}"] = json.dumps(evaluation)
    return found


if __name__ == "__main__":
    sys.exit(main())
