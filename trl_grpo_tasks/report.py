"""The report of a run: one HTML page that opens from disk. What was trained, the curves, before and after, samples."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .callbacks import METRICS_FILE
from .task import Task

REPORT_FILE = "report.html"
CURVES = ("reward", "rewards/success/mean", "rewards/valid/mean", "kl", "entropy", "completions/mean_length",
          "groups_without_signal", "constraint/allowed_mass", "beta", "curriculum/level")  # fmt: skip
STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
table{border-collapse:collapse;margin:1rem 0}td,th{padding:.25rem .8rem;border-bottom:1px solid #ddd;text-align:right}
td:first-child,th:first-child{text-align:left}.curves,.samples{display:grid;gap:1rem;
grid-template-columns:repeat(auto-fill,minmax(17rem,1fr));align-items:start}
figure{margin:0;border:1px solid #ddd;border-radius:.5rem;padding:.6rem;overflow:auto}
figcaption{font-size:.85rem;color:#555}.good{border-color:#2a7}.bad{border-color:#c54}
pre{white-space:pre-wrap;margin:0;font-size:.85rem}img{max-width:100%}summary{cursor:pointer;font-weight:600}
"""


def write_report(run_dir: str | Path, task: Task) -> Path:
    """Write report.html into a run's folder from what the run left there, and return its path."""
    folder = Path(run_dir)
    results = _read_json(folder / "results.json") or {"evaluations": []}
    settings = _read_json(folder / "settings.json") or {}
    metrics_file = folder / METRICS_FILE
    metrics = [json.loads(line) for line in metrics_file.read_text().splitlines()] if metrics_file.is_file() else []
    evaluations = results["evaluations"]
    body = [
        f"<h1>{html.escape(task.name)}: {html.escape(task.description)}</h1>",
        f"<p>Model {html.escape(str(settings.get('model', {}).get('name', '?')))}, task version "
        f"{html.escape(task.version)}. Command: <code>{html.escape(settings.get('command', '?'))}</code></p>",
        "<h2>Held-out rows, before and after</h2>",
        _table(evaluations),
        "<h2>Training</h2>",
        f"<div class=curves>{''.join(_curve(name, metrics) for name in CURVES)}</div>",
        *[_samples(task, evaluation) for evaluation in reversed(evaluations)],
        f"<details><summary>Settings</summary><pre>{html.escape(json.dumps(settings, indent=1))}</pre></details>",
    ]
    page = (
        f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>{html.escape(task.name)}</title><style>{STYLE}</style><body>{''.join(body)}</body></html>"
    )
    path = folder / REPORT_FILE
    path.write_text(page, encoding="utf-8", errors="replace")
    return path


def _table(evaluations: Sequence[dict[str, Any]]) -> str:
    if not evaluations:
        return "<p>No evaluation was asked for.</p>"
    names = list(evaluations[0]["metrics"])
    head = "".join(f"<th>{html.escape(evaluation['name'])}</th>" for evaluation in evaluations)
    lines = [
        f"<tr><td>{html.escape(name)}</td>"
        + "".join(f"<td>{evaluation['metrics'].get(name, float('nan')):.3f}</td>" for evaluation in evaluations)
        for name in names
    ]
    return f"<table><tr><th></th>{head}</tr>{''.join(lines)}</table>"


def _curve(name: str, metrics: Sequence[dict[str, Any]], width: int = 260, height: int = 120) -> str:
    points = [(line["step"], line[name]) for line in metrics if isinstance(line.get(name), (int, float))]
    if len(points) < 2:
        return ""
    steps, values = zip(*points, strict=True)
    low, high = min(values), max(values)
    spread = (high - low) or 1.0
    reach = (steps[-1] - steps[0]) or 1
    path = " ".join(
        f"{10 + (width - 20) * (step - steps[0]) / reach:.1f},{height - 10 - (height - 20) * (v - low) / spread:.1f}"
        for step, v in points
    )
    return (
        f"<figure><figcaption>{html.escape(name)}: {values[0]:.3g} &rarr; {values[-1]:.3g} "
        f"(between {low:.3g} and {high:.3g})</figcaption><svg viewBox='0 0 {width} {height}' role=img>"
        f"<polyline points='{path}' fill=none stroke='#2569c8' stroke-width=2 /></svg></figure>"
    )


def _samples(task: Task, evaluation: dict[str, Any], count: int = 12) -> str:
    """One completion of each of the first rows."""
    shown: dict[str, dict[str, Any]] = {}
    for sample in evaluation["samples"]:
        shown.setdefault(json.dumps(sample["row"], sort_keys=True), sample)
    figures = "".join(_sample(task, sample) for sample in list(shown.values())[:count])
    return f"<h2>Samples: {html.escape(evaluation['name'])}</h2><div class=samples>{figures}</div>"


def _sample(task: Task, sample: dict[str, Any]) -> str:
    success = bool(sample["score"] and sample["score"]["success"])
    picture = task.render(sample["row"], sample["completion"])
    if isinstance(picture, bytes):
        picture = f"<img alt='' src='data:image/png;base64,{base64.b64encode(picture).decode()}'>"
    caption = "success" if success else html.escape(sample["reason"] or "no success")
    return f"<figure class={'good' if success else 'bad'}>{picture}<figcaption>{caption}</figcaption></figure>"


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text()) if path.is_file() else None
