"""Count how many theories succeed, how many of them are distinct, and which of them have a name.

trl-grpo-tasks tool theory survey --samples 4000                  # random walks of the grammar
trl-grpo-tasks tool theory survey --results outputs/theory   # beside the samples of a run

All rows count the same number of theories: that of the run's evaluations, or --samples.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...task import Row
from .constraint import after_prompt, choices
from .task import TheoryOptions, TheoryTask


def random_walk(prompt: str, rng: random.Random) -> str:
    """Return a completion in which every choice is uniformly random."""
    written = ""
    options: Sequence[tuple[str, Any]] = after_prompt(prompt)
    while True:
        text, node = rng.choice(options)
        written += text
        if node is None:
            return written
        options = choices(node)


def summarise(scores: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Count successes and distinct and known theories in scores in the form of `Score.as_dict`."""
    scores = list(scores)
    found = [score["info"] for score in scores if score["success"]]
    return {
        "theories": len(scores),
        "success": len(found) / max(1, len(scores)),
        "distinct": len({info["theory"] for info in found}),
        "named": sorted({info["named"] for info in found} - {None}),
    }


def survey_random_walks(task: TheoryTask, rows: Sequence[Row], samples: int, seed: int = 0) -> dict[str, Any]:
    """Summarise random walks from these rows, taken in turn."""
    rng = random.Random(seed)
    chosen = [rows[n % len(rows)] for n in range(samples)]
    return summarise(task.score(row, random_walk(row["prompt"], rng)).as_dict() for row in chosen)


def main(argv: Sequence[str]) -> None:
    """Count the successful and distinct theories of a run, beside random walks of the grammar."""
    parser = argparse.ArgumentParser(
        "trl-grpo-tasks tool theory survey",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--results", help="the output folder of a run, with results.json")
    parser.add_argument("--start", default="standard_model", help="without --results: the kind of prompt")
    parser.add_argument("--new_multiplets", type=int, default=4, help="without --results: as in training")
    parser.add_argument("--samples", type=int, default=1000, help="without --results: how many random walks")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    if arguments.results:
        results = json.loads((Path(arguments.results) / "results.json").read_text(encoding="utf-8"))
        evaluations = {evaluation["name"]: evaluation["samples"] for evaluation in results["evaluations"]}
        rows = [sample["row"] for sample in results["evaluations"][0]["samples"]]
        task, count = TheoryTask(), len(rows)
    else:
        evaluations = {}
        task = TheoryTask(TheoryOptions(start=arguments.start, new_multiplets=arguments.new_multiplets))
        rows, count = task.dataset("test", None, arguments.seed), arguments.samples
    columns = {"random walk": survey_random_walks(task, rows, count, arguments.seed)}
    for name, samples in evaluations.items():
        columns[name] = summarise(sample["score"] for sample in samples if sample["score"] is not None)
    walked = columns["random walk"]["success"]
    print(f"{'':14}{'theories':>10}{'success':>10}{'distinct':>10}{'gain':>8}  named theories")
    for name, column in columns.items():
        gain = f"{column['success'] / walked:.0f}" if walked and name != "random walk" else ""
        numbers = f"{column['theories']:10d}{column['success']:10.4f}{column['distinct']:10d}{gain:>8}"
        print(f"{name:14}{numbers}  {', '.join(column['named']) or '-'}")
