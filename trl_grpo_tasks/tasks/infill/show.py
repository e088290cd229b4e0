"""Draw held-out texts of a run before and after GRPO below the original, with fills coloured by
the judge. Also print how both judges score the originals: the best that a generator can reach.

trl-grpo-tasks task infill show outputs/infill_tiny --output before_and_after.png
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ...report.page import task_of
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
    try:
        task = task_of(options.run_dir)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    results = Path(options.run_dir) / "results.json"
    if not isinstance(task, InfillTask) or not results.is_file():
        print(f"error: {options.run_dir} holds no finished run of task infill", file=sys.stderr)
        return 2
    evaluations = json.loads(results.read_text(encoding="utf-8"))["evaluations"]
    lines = []
    samples_a_row = len(evaluations[0]["samples"]) // len({json.dumps(s["row"]) for s in evaluations[0]["samples"]})
    for number in range(options.rows):
        row = evaluations[0]["samples"][number * samples_a_row]["row"]
        original = [(part, UNJUDGED if is_fill else None) for part, is_fill in fills.parts(row, fills.gold_fills(row))]
        lines.append((f"{number + 1}. original; what was missing is grey", original))
        for evaluation in evaluations:
            sample = evaluation["samples"][number * samples_a_row]  # the first sample of each row: nothing is chosen
            lines += [
                (f"{evaluation['name']}: {title}", parts) for title, parts in task.coloured(row, sample["completion"])
            ]
    rows = [sample["row"] for sample in evaluations[0]["samples"][::samples_a_row]]
    for name, judge in task.judges().items():
        scores = judge.score(rows, [task.gold(row) for row in rows])
        print(f"{name} of the originals: {sum(scores) / len(scores):.3f}")
    is_page = options.output.suffix == ".html"
    options.output.write_bytes(to_html(lines).encode() if is_page else picture(lines))
    return 0
