"""The HTML report of a hyperparameter sweep: its trials, the best one, and the effect of each option."""

from __future__ import annotations

import html
import json
import math
from pathlib import Path
from typing import Any

from ..files import write_atomically
from .plots import chart
from .run_folder import duration, is_number
from .style import page

SWEEP_FILE = "sweep.json"


def write_sweep_report(folder: str | Path) -> Path:
    """Write report.html into the folder of a sweep, which may still be running, and return its path."""
    folder = Path(folder)
    sweep = json.loads((folder / SWEEP_FILE).read_text(encoding="utf-8"))
    metric, trials = sweep["metric"], sweep["trials"]
    done = [trial for trial in trials if is_number(trial["value"])]
    best = max(done, key=lambda trial: trial["value"], default=None)
    finished = sum(trial["state"] != "running" for trial in trials)
    title = f"{sweep['task']}: hyperparameter sweep to maximise {metric}"
    state = f"{finished} of {sweep['wanted']} trials finished"
    body = [
        f"<header><span class=state>{state}</span><h1>{html.escape(title)}</h1></header>",
        "<p class=note>No trial is finished yet.</p>" if best is None else _best(best, metric),
        _charts(done, metric, sweep["log"]),
        f"<section><h2>Trials</h2>{_table(trials, metric, folder)}</section>",
    ]
    path = folder / "report.html"
    write_atomically(path, page(title, "".join(body), reloads=finished < sweep["wanted"]))
    return path


def _best(best: dict[str, Any], metric: str) -> str:
    return (
        f"<div class=tiles><div class='tile main'><small>best {html.escape(metric)}, trial {best['number']}</small>"
        f"<b>{best['value']:.3f}</b></div></div><p>This is the maximum of several noisy measurements, so a new run "
        "with these settings will score slightly lower on average. The command of this trial:</p>"
        f"<pre class=block>{html.escape(best['command'])}</pre>"
    )


def _charts(done: list[dict[str, Any]], metric: str, log: list[str]) -> str:
    if len(done) < 2:
        return ""
    so_far = [(trial["number"], max(t["value"] for t in done[: n + 1])) for n, trial in enumerate(done)]
    each = [(trial["number"], trial["value"]) for trial in done]
    drawn = [
        chart(
            f"{metric} by trial", {"best so far": so_far, "each trial": each}, x_label="trial", joined=("best so far",)
        )
    ]
    for name in done[0]["params"]:
        values = [(trial["params"][name], trial["value"]) for trial in done]
        if not all(is_number(value) for value, _ in values):
            drawn.append(_choices(f"{metric} by {name}", values))
            continue
        label = f"log10 {name}" if name in log else name
        points = sorted((math.log10(x) if name in log else x, y) for x, y in values)
        drawn.append(chart(f"{metric} by {name}", {name: points}, x_label=label, joined=()))
    return f"<section><h2>Effect of each option</h2><div class=charts>{''.join(drawn)}</div></section>"


def _choices(title: str, values: list[tuple[Any, float]]) -> str:
    """Return a table with the results for each value of an option whose values are not numbers."""
    lines = []
    for choice in sorted({str(x) for x, _ in values}):
        of_choice = [y for x, y in values if str(x) == choice]
        mean = sum(of_choice) / len(of_choice)
        lines.append(f"<tr><td>{html.escape(choice)}</td><td>{len(of_choice)}</td><td>{mean:.3f}</td>"
                     f"<td>{max(of_choice):.3f}</td></tr>")  # fmt: skip
    head = "<tr><th></th><th>trials</th><th>mean</th><th>best</th></tr>"
    return (
        f"<figure><figcaption><b>{html.escape(title)}</b></figcaption><table>{head}{''.join(lines)}</table></figure>"
    )


def _table(trials: list[dict[str, Any]], metric: str, folder: Path) -> str:
    names = list(dict.fromkeys(name for trial in trials for name in trial["params"]))
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ("trial", metric, *names, "time"))
    lines = []
    for trial in sorted(trials, key=lambda t: (-t["value"] if is_number(t["value"]) else math.inf, t["number"])):
        place = f"trial-{trial['number']:03d}/report.html"
        number = f"<a href='{place}'>{trial['number']}</a>" if (folder / place).is_file() else str(trial["number"])
        result = (
            f"{trial['value']:.3f}" if is_number(trial["value"]) else html.escape(trial["reason"] or trial["state"])
        )
        params = (trial["params"].get(name, "") for name in names)
        shown = "".join(f"<td>{f'{v:.3g}' if is_number(v) else html.escape(str(v))}</td>" for v in params)
        took = duration(trial["seconds"]) if is_number(trial["seconds"]) else ""
        lines.append(f"<tr><td>{number}</td><td>{result}</td>{shown}<td>{took}</td></tr>")
    return f"<div class=scroll><table><tr>{head}</tr>{''.join(lines)}</table></div>"
