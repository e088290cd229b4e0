"""The gallery of benchmarks/results/reasoning_gym.md: ten tasks of reasoning-gym before and after training.

    python benchmarks/reasoning_gym_gallery.py [--tasks NAME ...] [--output_dir outputs/gallery] [--seed 42]

Each task is one run of `trl-grpo-tasks train` on the CPU, a few minutes on two cores. Runs that are finished are not
repeated. The table has a row for each task that is finished, and keeps the rows of other tasks if they were made with
the same seed on the same kind of machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness import table_line

from trl_grpo_tasks.files import write_atomically
from trl_grpo_tasks.report.run_folder import RunFolder

# Configurations that a model of 0.8M parameters can learn in minutes.
TASKS: dict[str, dict[str, Any]] = {
    "basic_arithmetic": {"max_terms": 2, "max_digits": 1},
    "chain_sum": {"max_terms": 2, "max_digits": 1},
    "coin_flip": {"max_trials": 5},
    "count_bits": {"max_n": 255},
    "gcd": {"max_value": 30},
    "lcm": {"max_value": 12},
    "letter_counting": {"min_words": 2, "max_words": 3},
    "number_sequence": {"max_complexity": 1},
    "products": {"max_terms": 2, "max_digits": 1},
    "spell_backward": {"min_word_len": 3, "max_word_len": 4},
}
PAGE = Path(__file__).parent / "results" / "reasoning_gym.md"
BEGIN, END = "<!-- gallery -->", "<!-- end of gallery -->"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/gallery"))
    parser.add_argument("--seed", type=int, default=42)
    options = parser.parse_args()
    for name in options.tasks:
        folder = options.output_dir / name
        if not is_finished(folder):
            subprocess.run([sys.executable, "-m", "trl_grpo_tasks.commands.main", *words(name, folder, options.seed)],
                           check=True)  # fmt: skip
    rows = {name: row(name, options.output_dir / name) for name in TASKS if is_finished(options.output_dir / name)}
    if not rows:
        raise SystemExit("no run is finished")
    machine = f"Seed {options.seed}, one seed; {platform.machine()}, {os.cpu_count()} cores."
    write_atomically(PAGE, with_table(PAGE.read_text(), rows, machine))


def with_table(page: str, rows: dict[str, dict[str, str]], machine: str) -> str:
    """The page with these rows in its table, and with its other rows if its line about the machine is the same."""
    head, _, rest = page.partition(BEGIN)
    old, _, tail = rest.partition(END)
    kept = old.splitlines() if machine in old else []
    lines = {name: line for name in TASKS for line in kept if line.startswith(f"| `{name}` |")}
    lines |= {name: table_line(list(cells.values())) for name, cells in rows.items()}
    names = list(next(iter(rows.values())))
    table = [table_line(names), table_line(["---"] * len(names)), *(lines[name] for name in TASKS if name in lines)]
    return "\n".join([f"{head}{BEGIN}", "", machine, "", *table, "", f"{END}{tail}"])


def words(name: str, folder: Path, seed: int) -> list[str]:
    """The command that trains one task."""
    return [
        "train", f"reasoning_gym:{name}", "--gym_config", json.dumps(TASKS[name]), "--model", "tiny",
        "--use_cpu", "true", "--seed", str(seed), "--eval_rows", "100", "--output_dir", str(folder),
    ]  # fmt: skip


def is_finished(folder: Path) -> bool:
    return folder.is_dir() and RunFolder.read(folder).before_and_after[1] is not None


def row(name: str, folder: Path) -> dict[str, str]:
    """A row of the table: success on held-out questions, and the first held-out question with both answers."""
    before, after = RunFolder.read(folder).before_and_after
    assert before is not None and after is not None
    first, same = before["samples"][0], after["samples"][0]
    return {
        "task": f"`{name}`",
        "configuration": f"`{json.dumps(TASKS[name])}`",
        "success before": f"{before['metrics']['success']:.0%}",
        "after": f"{after['metrics']['success']:.0%}",
        "question": " ".join(first["row"]["prompt"][-1]["content"].split()).replace("|", "\\|")[:120],
        "answer before": f"`{first['completion']}`",
        "answer after": f"`{same['completion']}`",
        "known answer": f"`{first['row']['answer']}`",
    }


if __name__ == "__main__":
    main()
