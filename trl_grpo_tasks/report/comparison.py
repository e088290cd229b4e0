"""The HTML page that compares several runs: evaluations, training curves and the settings that differ."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..files import write_atomically
from .gallery import prompt_of
from .page import REPORT_FILE, section
from .plots import COLOURS, chart
from .run_folder import RunFolder, shown_metrics
from .sections import TRAINING, cell, reward_titles
from .style import page

COMPARED_SETTINGS = ("task", "run", "model", "machine", "versions", "training")  # of settings.json
NEVER_COMPARED = ("output_dir", "logging_dir", "run_name")  # different for every run


def write_comparison(run_dirs: Sequence[str | Path], path: str | Path) -> Path:
    """Write a page that compares 2 to 6 runs, which may still be training, and return its path."""
    if not 2 <= len(run_dirs) <= COLOURS:
        raise ValueError(f"{len(run_dirs)} runs cannot be compared on one page; give 2 to {COLOURS}")
    runs = {name: RunFolder.read(folder) for name, folder in zip(_names(run_dirs), run_dirs, strict=True)}
    if empty := [str(run.path) for run in runs.values() if run.is_empty]:
        raise ValueError(f"{empty[0]} is not a run folder: it has no settings, results or metrics")
    path = Path(path)
    body = [
        f"<header><h1>{len(runs)} runs compared</h1><ul class=facts>{_links(runs, path.parent)}</ul></header>",
        section("Evaluation on held-out prompts", _evaluations(runs)),
        section("Rewards during training", _curves(runs, reward_titles(list(runs.values())))),
        section("Other training metrics", _curves(runs, TRAINING)),
        section("Settings that differ", _settings(runs)),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page("Runs compared", "".join(body)), errors="replace")
    return path


def _names(run_dirs: Sequence[str | Path]) -> list[str]:
    """The names of the folders, or whole paths if two names are equal."""
    names = [Path(folder).resolve().name for folder in run_dirs]
    if len(set(names)) < len(names):
        names = [os.path.normpath(folder) for folder in run_dirs]
    if len(set(names)) < len(names):
        raise ValueError(f"{max(names, key=names.count)} is given twice; give different runs")
    return names


def _links(runs: Mapping[str, RunFolder], folder: Path) -> str:
    lines = []
    for name, run in runs.items():
        shown, report = html.escape(name), run.path / REPORT_FILE
        if report.is_file():
            target = html.escape(os.path.relpath(report, folder), quote=True)
            shown = f"<a href='{target}'>{shown}</a>"
        state = "finished" if run.is_finished else "not finished"
        lines.append(f"<li>{shown} <span class=soft>{state}: step {run.last_step:,}</span></li>")
    return "".join(lines)


def _evaluations(runs: Mapping[str, RunFolder]) -> str:
    """Return a table of the last evaluation of each run, and a note if the prompts differ."""
    latest = {name: after or before for name, run in runs.items() for before, after in [run.before_and_after]}
    found = {name: one for name, one in latest.items() if one is not None}
    if not found:
        return ""
    head = [f"{html.escape(name)}<br><small>{html.escape(one['name'])}</small>" for name, one in found.items()]
    lines = {
        metric: [cell(one["metrics"].get(metric), one.get("intervals", {}).get(metric)) for one in found.values()]
        for metric in shown_metrics([one["metrics"] for one in found.values()])
    }
    prompts = [sorted(prompt_of(sample, 10**6) for sample in one["samples"]) for one in found.values()]
    same = all(one == prompts[0] for one in prompts)
    note = (
        "All runs were evaluated on the same prompts." if same else
        "<b>These evaluations are not comparable</b>: their prompts or numbers of samples differ."
    )  # fmt: skip
    return f"<p class=soft>{note} Small print: 95% confidence intervals.</p>{_table(head, lines)}"


def _curves(runs: Mapping[str, RunFolder], titles: Mapping[str, str]) -> str:
    drawn = []
    for metric, title in titles.items():
        lines = {name: points for name, run in runs.items() if len(points := run.curve(metric)) > 1}
        if len({value for points in lines.values() for _, value in points}) > 1:
            drawn.append(chart(title, lines, name=metric))
    return f"<div class=charts>{''.join(drawn)}</div>" if drawn else ""


def _settings(runs: Mapping[str, RunFolder]) -> str:
    flat = {
        name: _flattened({part: run.settings.get(part) for part in COMPARED_SETTINGS}) for name, run in runs.items()
    }
    names = dict.fromkeys(key for settings in flat.values() for key in settings)
    differing = [key for key in names if len({settings.get(key, "") for settings in flat.values()}) > 1]
    if not differing:
        return "<p class=soft>None.</p>"
    lines = {
        key: [f"<td>{html.escape(settings.get(key, ''))}</td>" for settings in flat.values()] for key in differing
    }
    return _table([html.escape(name) for name in runs], lines)


def _table(head: Sequence[str], lines: Mapping[str, Sequence[str]]) -> str:
    """Return a table from the HTML of its headings and, for each name, of its cells."""
    columns = "".join(f"<th>{title}</th>" for title in head)
    rows = "".join(f"<tr><td>{html.escape(name)}</td>{''.join(cells)}</tr>" for name, cells in lines.items())
    return f"<div class=scroll><table><tr><th></th>{columns}</tr>{rows}</table></div>"


def _flattened(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as {"training.learning_rate": "0.001"}; paths that name a run are left out."""
    flat: dict[str, str] = {}
    for key, value in settings.items():
        if key in NEVER_COMPARED:
            continue
        if isinstance(value, Mapping):
            flat |= _flattened(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value)
    return flat
