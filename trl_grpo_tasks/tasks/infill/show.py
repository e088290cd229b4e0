"""Draw held-out texts of a run before and after GRPO below the original, with fills coloured by
the judge. Also print how both judges score the originals: the best that a generator can reach.

trl-grpo-tasks task infill show outputs/infill --output before_and_after.png
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from ...report.page import task_of
from ...report.run_folder import RESULTS_FILE, RunFolder
from . import fills
from .render import UNJUDGED, picture, to_html
from .task import InfillTask


def main(arguments: Sequence[str]) -> int:
    """Draw held-out texts of a run before and after training, coloured by the judge."""
    parser = argparse.ArgumentParser(
        "trl-grpo-tasks task infill show",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dir", help="the folder of a run")
    parser.add_argument("--output", type=Path, required=True, help="a .png or .html file")
    parser.add_argument("--rows", type=int, default=6, help="how many held-out texts; the first ones")
    options = parser.parse_args(arguments)
    task = task_of(options.run_dir)
    evaluations = [one for one in RunFolder.read(options.run_dir).evaluations if one["file"] == RESULTS_FILE]
    if not isinstance(task, InfillTask) or not evaluations:
        raise ValueError(f"{options.run_dir} is not the folder of a finished run of task infill")
    lines = []
    samples = evaluations[0]["samples"]
    per_row = len(samples) // len({json.dumps(sample["row"]) for sample in samples})
    for number in range(min(options.rows, len(samples) // per_row)):
        row = samples[number * per_row]["row"]
        original = [(part, UNJUDGED if is_fill else None) for part, is_fill in fills.parts(row, fills.gold_fills(row))]
        lines.append((f"{number + 1}. original; the missing parts are grey", original))
        for evaluation in evaluations:
            sample = evaluation["samples"][number * per_row]  # the first of each row: nothing is cherry-picked
            lines += [
                (f"{evaluation['name']}: {title}", parts) for title, parts in task.coloured(row, sample["completion"])
            ]
    rows = [sample["row"] for sample in samples[::per_row]]
    for name, judge in task.judges().items():
        scores = judge.score(rows, [task.gold(row) for row in rows])
        print(f"{name} of the originals: {sum(scores) / len(scores):.3f}")
    is_page = options.output.suffix == ".html"
    options.output.write_bytes(to_html(lines).encode() if is_page else picture(lines))
    return 0
