"""Solve rates before and after training: held-out rows that `Solver` solves within budgets of samples and of seconds.

    python benchmarks/solve.py RUN_DIR [--rows 32] [--samples 1 8 64] [--seconds 1 10] [--models NAME=MODEL ...]

RUN_DIR is the --output_dir of a run of a built-in task with a cold start; --models compares others. The rows are from
the test split. A row counts as solved within a time if its answer was accepted before the time had passed, which
depends on the machine; loading the model and starting the workers are not counted. `samples in 10 s` is the mean
number of samples of unsolved rows. Each share has its 95% interval (Wilson) over rows, which says nothing about other
seeds of training. Prints a Markdown table and writes benchmarks/results/solve.json.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from harness import table_line, write_results

from trl_grpo_tasks import Solver
from trl_grpo_tasks.commands.quiet import quiet_third_party_logging
from trl_grpo_tasks.report.page import task_of
from trl_grpo_tasks.report.run_folder import RunFolder
from trl_grpo_tasks.task import one_per_request


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN_DIR")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--samples", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--seconds", nargs="+", type=float, default=[1.0, 10.0])
    parser.add_argument(
        "--models", nargs="+", metavar="NAME=MODEL", help="default: the cold start and the trained model"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "solve.json"))
    options = parser.parse_args()
    quiet_third_party_logging()
    task = task_of(options.run)
    rows = one_per_request(task, task.dataset("test", options.rows, options.seed))
    models = options.models or [f"cold start={options.run}/cold_start", f"GRPO={options.run}"]
    budgets = [(f"{n} sample{'s' * (n != 1)}", {"samples": n}) for n in options.samples]
    budgets += [(f"{limit:g} s", {"seconds": limit}) for limit in options.seconds]
    heads = [name for name, _ in budgets] + [f"samples in {limit:g} s" for limit in options.seconds]
    print(f"task {task.name}, {len(rows)} held-out rows, seed {options.seed}\n")
    print(table_line(["model", *heads]), table_line(["---"] * (len(heads) + 1)), sep="\n", flush=True)
    results = []
    for name, _, model in (text.partition("=") for text in models):
        measured = measure(options.run, model, task, rows, budgets, options.seed)
        results.append({"model": name, "rows": len(rows), **measured})
        print(table_line([name, *(measured[head] for head in heads)]), flush=True)
        write_results(options.out, results)


def measure(run: str, model: str, task, rows, budgets, seed: int) -> dict[str, str]:
    """Return the cells of one model by heading. Sampling settings of the run are used for all models."""
    trained = RunFolder.read(run).settings.get("training", {})
    names = ("temperature", "top_k", "top_p", "min_p", "max_completion_length")
    settings = {name: trained[name] for name in names if trained.get(name) is not None}
    cells = {}
    with Solver.from_pretrained(model, task, seed=seed, **settings) as solver:
        solver(rows[0], samples=1)  # compile constraints and start workers before the first time is taken
        for name, budget in budgets:
            found = [solver(row, **budget) for row in rows]
            limit = budget.get("seconds", math.inf)
            solved = sum(one.solved and one.seconds <= limit for one in found)
            cells[name] = rate(solved, len(rows))
            if "seconds" in budget:
                drawn = [one.samples for one in found if not one.solved]
                cells[f"samples in {name}"] = f"{sum(drawn) / len(drawn):.0f}" if drawn else ""
    return cells


def rate(solved: int, rows: int) -> str:
    """Return a share in percent with its 95% Wilson interval."""
    z, share = 1.96, solved / rows
    middle = (share + z * z / (2 * rows)) / (1 + z * z / rows)
    half = z * math.sqrt(share * (1 - share) / rows + z * z / (4 * rows * rows)) / (1 + z * z / rows)
    return f"{share:.0%} [{max(0.0, middle - half):.0%}, {min(1.0, middle + half):.0%}]"


if __name__ == "__main__":
    main()
