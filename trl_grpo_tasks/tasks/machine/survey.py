"""Print the mean and the best score of the machines of one or more runs, by evaluation and trial.

trl-grpo-tasks tool machine survey outputs/machine_grpo outputs/machine_maxk

The samples are those of results.json: held-out prompts, before and after training.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def main(arguments: Sequence[str]) -> None:
    """Print the mean and the best score of the machines of runs, by evaluation and trial."""
    parser = argparse.ArgumentParser(
        "trl-grpo-tasks tool machine survey",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", type=Path, help="output folders of runs")
    runs = parser.parse_args(arguments).runs
    wide = 2 + max(len(run.name) for run in runs)
    print(f"{'':{wide}}{'':12}{'trial':10}{'machines':>9}{'valid':>8}{'success':>9}{'mean':>9}{'best':>9}")
    for run in runs:
        for name, samples in evaluations(run).items():
            scores: dict[str, list[dict[str, Any]]] = {}
            for sample in samples:
                scores.setdefault(sample["row"]["trial"], []).append(sample["score"])
            for trial, some in scores.items():
                valid, success, mean = (sum(s[key] for s in some) / len(some) for key in ("valid", "success", "total"))
                best = max(score["total"] for score in some)  # invalid machines score 0
                print(
                    f"{run.name:{wide}}{name:12}{trial:10}{len(some):9d}{valid:8.3f}{success:9.3f}{mean:9.2f}{best:9.2f}"
                )


def evaluations(run: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the scored samples of each evaluation of a run, by its name."""
    file = run / "results.json"
    if not file.is_file():
        raise SystemExit(f"{run} contains no results.json; pass the output folder of a run that was evaluated")
    found = json.loads(file.read_text(encoding="utf-8"))["evaluations"]
    return {one["name"]: [s for s in one["samples"] if s["score"] is not None] for one in found}
