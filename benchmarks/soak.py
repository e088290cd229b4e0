"""Memory, open files, threads and file sizes of a long run with every feature switched on.

    python benchmarks/soak.py [--task brick] [--steps 2000] [--every 50] [--folder FOLDER]

The command line trains the tiny model of the brick task, or of the toy task of the tests, with: constraint, sampling
filters, replay, curriculum, moving reference, adaptive KL, Pass@k advantages, clipping of advantages and gradients,
reward workers, evaluations during training, checkpoints, sample logs, a tracker and the live report. Every --every
steps this script reads from the kernel the memory of the training process and of each of its child processes that they
share with no other process (USS), the open files and the threads, and the sizes of the files of the run. At the end it
builds the report again and opens it in a headless Chromium, if there is one on the PATH.

Prints Markdown tables of the state after 10%, 25%, 50% and 100% of the steps, and the growth over the second half as
the slope of a straight line through its samples. Writes all samples to benchmarks/results/soak.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from harness import flags, table_line, write_results

ROOT = Path(__file__).resolve().parents[1]
SHARES = (0.1, 0.25, 0.5, 1.0)
OPTIONS: dict[str, Any] = {
    "use_cpu": True, "train_rows": 400, "cold_start_steps": 60, "cold_start_batch_size": 32,
    "cold_start_learning_rate": 0.002, "num_generations": 4, "per_device_train_batch_size": 8,
    "steps_per_generation": 2, "gradient_accumulation_steps": 1, "num_iterations": 1, "learning_rate": 1e-4,
    "constrain": True, "top_p": 0.95, "replay_size": 16, "curriculum": True,
    "curriculum_window": 64, "beta": 0.02, "reference_mode": "ema", "ema_alpha": 0.99, "kl_target": 0.05,
    "advantage_estimator": "passk", "pass_k": 2, "advantage_clip": 3.0, "max_grad_norm": 1.0, "reward_workers": 1,
    "eval_strategy": "steps", "eval_steps": 200, "save_steps": 100, "save_total_limit": 2, "logging_steps": 5,
    "log_completions": True, "num_completions_to_print": 2, "report_to": "trackio",
}  # fmt: skip
# Pass@k advantages need rewards of 0 and 1, so that success alone counts.
GRADED = {
    "brick": ("stability", "connectivity", "quality", "length", "shape", "syntax"),
    "tests.support.toy": ("match", "short"),
}
TASKS: dict[str, dict[str, Any]] = {
    "brick": {
        "brick_levels": ["stack", "small"], "max_bricks": 8, "success_iou": 0.2, "max_completion_length": 32,
        "top_k": 20, "eval_rows": 8, "samples": 2, "per_device_eval_batch_size": 8,
    },
    "tests.support.toy": {
        "max_completion_length": 5, "top_k": 4, "eval_rows": 2, "samples": 4, "per_device_eval_batch_size": 4,
    },
}  # fmt: skip
# File kinds in the folder of a run: the first pattern that matches the path of a file decides.
KINDS = {
    "checkpoint state": r"checkpoint-\d+/(task_state|rng_state|optimizer|scheduler).*",
    "checkpoint log": r"checkpoint-\d+/trainer_state\.json",
    "checkpoint weights": r"checkpoint-\d+/.*",
    "sample logs": r"completions/.*",
    "metrics": r"(training_metrics|performance)\.jsonl",
    "report": r"report\.html",
    "tracker": r"tracker/.*",
    "console": r"console\.txt",
    "other": r".*",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="brick", choices=TASKS)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=50, help="steps between two samples")
    parser.add_argument("--folder", help="of the run, kept afterwards; default: a new temporary folder")
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "soak.json"))
    options = parser.parse_args()
    folder = Path(options.folder or tempfile.mkdtemp(prefix="soak"))
    folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    samples = train(folder, options.task, options.steps, options.every)
    rows = [{"seconds": time.monotonic() - start, **report_times(folder, options.task)}, *samples]
    write_results(options.out, rows)
    print_tables(samples)
    for name, value in rows[0].items():
        print(f"{name}: {value:.4g}")


def train(folder: Path, task: str, steps: int, every: int) -> list[dict[str, Any]]:
    """Train in a process of its own, and return the samples."""
    weights = json.dumps(dict.fromkeys(GRADED[task], 0.0) | {"success": 1.0})
    options = OPTIONS | TASKS[task] | {"task": task, "component_weights": weights}
    options |= {"max_steps": steps, "output_dir": folder}
    environment = os.environ | {"TRACKIO_DIR": str(folder / "tracker"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {"PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
    with open(folder / "console.txt", "w") as console:
        process = subprocess.Popen(
            [sys.executable, "-m", "trl_grpo_tasks.commands.main", "train", *flags(options)],
            stdin=subprocess.DEVNULL, stdout=console, stderr=console, env=environment,
        )  # fmt: skip
        try:
            samples: list[dict[str, Any]] = []
            while process.poll() is None:
                step = _step(folder)
                if step >= (samples[-1]["step"] // every + 1) * every if samples else step:
                    samples.append(sample(process.pid, folder, step))
                time.sleep(0.2)
        finally:
            process.kill()
            process.wait()
    if process.returncode != 0:
        raise SystemExit(f"exit status {process.returncode}: see {folder / 'console.txt'}")
    return samples


def _step(folder: Path) -> int:
    """The last step that is in the metrics."""
    try:
        last = (folder / "training_metrics.jsonl").read_text().rsplit("\n", 2)[-2]
        return int(json.loads(last)["step"])
    except (OSError, IndexError, ValueError):  # there is none yet
        return 0


def sample(pid: int, folder: Path, step: int) -> dict[str, Any]:
    """Memory in MB of each process, threads and open files of the training process, and MB of files by kind."""
    training = psutil.Process(pid)
    values: dict[str, Any] = {"step": step, "training MB": training.memory_full_info().uss / 1e6}
    children = sorted(training.children(recursive=True), key=lambda child: child.create_time())
    for child in children:
        try:
            name = "resource tracker" if "resource_tracker" in " ".join(child.cmdline()) else f"child {child.pid}"
            values[f"{name} MB"] = child.memory_full_info().uss / 1e6
        except psutil.Error:  # it has ended since
            continue
    values |= {"children": len(children), "threads": training.num_threads(), "open files": training.num_fds()}
    sizes = dict.fromkeys(KINDS, 0.0)
    count = 0
    for path in folder.rglob("*"):
        try:
            size = path.stat().st_size if path.is_file() else None
        except OSError:  # a checkpoint is being replaced
            continue
        if size is not None:
            inside = path.relative_to(folder).as_posix()
            sizes[next(kind for kind, pattern in KINDS.items() if re.fullmatch(pattern, inside))] += size / 1e6
            count += 1
    return values | {"files": count} | {f"{kind} (disk MB)": size for kind, size in sizes.items()}


def report_times(folder: Path, name: str) -> dict[str, float]:
    """Seconds to build the report and to open it in a browser, and its size."""
    from trl_grpo_tasks import get_task
    from trl_grpo_tasks.report.page import write_report

    sys.path.insert(0, str(ROOT))
    task = get_task(name)
    start = time.monotonic()
    page = write_report(folder, task)
    values = {"report build s": time.monotonic() - start, "report MB": page.stat().st_size / 1e6}
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        return values
    # The clock starts when the browser begins to load the page, and stops when everything is loaded and laid out.
    probe = "addEventListener('load',()=>{document.body.offsetHeight;document.body.dataset.ms=performance.now()})"
    with tempfile.TemporaryDirectory() as scratch:
        probed = Path(scratch) / "report.html"
        probed.write_text(page.read_text().replace("</body>", f"<script>{probe}</script></body>"))
        flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={scratch}/profile", "--dump-dom"]
        times = []
        for _ in range(3):
            done = subprocess.run([browser, *flags, probed.as_uri()], capture_output=True, text=True, timeout=120)
            found = re.search(r'data-ms="([\d.]+)"', done.stdout)
            assert found, "the browser did not load the report"
            times.append(float(found[1]) / 1000)
    return values | {"report opens s": statistics.median(times)}


def print_tables(samples: list[dict[str, Any]]) -> None:
    """Print a Markdown table with a row per quantity and a column per share of the run, and the growth at the end."""
    last = samples[-1]["step"]
    shown = [min(samples, key=lambda one: abs(one["step"] - share * last)) for share in SHARES]
    second = [one for one in samples if one["step"] >= last / 2]
    print(table_line(["quantity", *(f"step {one['step']}" for one in shown), "growth per 1,000 steps"]))
    print(table_line(["---"] * (len(shown) + 2)))
    for name in dict.fromkeys(name for one in shown for name in one if name != "step"):
        points = [(one["step"], one[name]) for one in second if name in one]
        slope = 1000 * statistics.linear_regression(*zip(*points, strict=True)).slope if len(points) > 1 else None
        values = [one.get(name) for one in shown]
        print(table_line([name, *values, None if slope is None else f"{slope:+.3g}"]))


if __name__ == "__main__":
    main()
