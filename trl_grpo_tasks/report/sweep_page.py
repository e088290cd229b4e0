"""The HTML report of a hyperparameter sweep: its trials, the best one, and the effect of each option."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from ..files import write_atomically
from .plots import chart
from .run_folder import is_number
from .templating import render

SWEEP_FILE = "sweep.json"


def write_sweep_report(folder: str | Path) -> Path:
    """Write report.html into the folder of a sweep, which may still be running, and return its path."""
    folder = Path(folder)
    sweep = json.loads((folder / SWEEP_FILE).read_text(encoding="utf-8"))
    metric, trials = sweep["metric"], sweep["trials"]
    done = [trial for trial in trials if is_number(trial["value"])]
    best = max(done, key=lambda trial: trial["value"], default=None)
    finished = sum(trial["state"] != "running" for trial in trials)
    names = list(dict.fromkeys(name for trial in trials for name in trial["params"]))
    reports = {trial["number"]: f"trial-{trial['number']:03d}/report.html" for trial in trials}
    text = render(
        "sweep.html",
        sweep=sweep,
        finished=finished,
        reloads=finished < sweep["wanted"],
        best=best,
        charts=_charts(done, metric, sweep["log"]) if len(done) > 1 else [],
        names=names,
        trials=sorted(trials, key=lambda t: (-t["value"] if is_number(t["value"]) else math.inf, t["number"])),
        reports={number: file for number, file in reports.items() if (folder / file).is_file()},
    )
    path = folder / "report.html"
    write_atomically(path, text)
    return path


def _charts(done: list[dict[str, Any]], metric: str, log: list[str]) -> list[str]:
    so_far = [(trial["number"], max(t["value"] for t in done[: n + 1])) for n, trial in enumerate(done)]
    each = [(trial["number"], trial["value"]) for trial in done]
    lines = {"best so far": so_far, "each trial": each}
    drawn = [chart(f"{metric} by trial", lines, x_label="trial", joined=("best so far",))]
    for name in done[0]["params"]:
        values = [(trial["params"][name], trial["value"]) for trial in done]
        if all(is_number(value) for value, _ in values):
            label = f"log10 {name}" if name in log else name
            points = sorted((math.log10(x) if name in log else x, y) for x, y in values)
            drawn.append(chart(f"{metric} by {name}", {name: points}, x_label=label, joined=()))
        else:
            choices = {c: [y for x, y in values if str(x) == c] for c in sorted({str(x) for x, _ in values})}
            drawn.append(render("sweep_choices.html", title=f"{metric} by {name}", choices=choices))
    return drawn
