"""The figure of a grid of benchmarks/learning.py: metrics of training per iteration, from the logs of its runs.

A grid has a key `curves`, {metric of training_metrics.jsonl: label}. Each metric is a panel and each setting a colour;
thin lines are seeds and the thick one their mean, all as moving averages over WINDOW iterations.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from harness import spread, table_line

from trl_grpo_tasks.report.run_folder import METRICS_FILE

WINDOW = 10
LAST = 20  # iterations at the end of a run, of which `ends` shows the mean
CAPTION = (
    f"Metrics of training per iteration, as moving averages over {WINDOW} iterations; thin lines are seeds, thick "
    "lines their means."
)


def draw(runs: Mapping[str, Sequence[Path]], labels: Mapping[str, str], path: Path) -> None:
    """Draw the metrics of the runs, {setting: folder of each seed}, into a file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(labels), 3.6), layout="constrained")
    panels = figure.subplots(1, len(labels), squeeze=False)[0]
    for axes, (metric, label) in zip(panels, labels.items(), strict=True):
        for number, (name, folders) in enumerate(runs.items()):
            lines = [smoothed(values_of(folder, metric)) for folder in folders]
            for line in lines:
                axes.plot(*line.T, color=f"C{number}", alpha=0.35, linewidth=0.8)
            steps = sorted(set.intersection(*(set(line[:, 0]) for line in lines)))
            means = np.mean([line[np.isin(line[:, 0], steps), 1] for line in lines], axis=0)
            axes.plot(steps, means, color=f"C{number}", linewidth=2, label=name)
        axes.set(title=label, xlabel="iteration")
        axes.grid(alpha=0.3)
    panels[0].legend()
    figure.savefig(path, dpi=120, metadata={"Software": None})


def ends(runs: Mapping[str, Sequence[Path]], labels: Mapping[str, str]) -> str:
    """Return a Markdown table of the metrics at the end of the runs: the mean over seeds, and the range."""
    lines = [table_line([f"last {LAST} iterations", *labels.values()]), "|---" * (1 + len(labels)) + "|"]
    for name, folders in runs.items():
        found = ([values_of(folder, metric)[-LAST:, 1].mean() for folder in folders] for metric in labels)
        lines.append(table_line([name, *(spread(values, 1) for values in found)]))
    return "\n".join(lines)


def values_of(folder: Path, metric: str) -> np.ndarray:
    """Return (iteration, value) of a metric in the order of iterations, (lines, 2); ValueError if a run has none.

    A run that was resumed logs some iterations again: the last value counts.
    """
    file = folder / METRICS_FILE
    logs: list[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    found = {log["step"]: log[metric] for log in logs if metric in log and "step" in log}
    if not found:
        raise ValueError(f"{file} has no metric {metric!r}; remove the run's folder and let it run again")
    return np.array(sorted(found.items()), dtype=float)


def smoothed(values: np.ndarray) -> np.ndarray:
    """Return the mean over each WINDOW consecutive iterations, at the last of them; fewer in shorter runs."""
    window = min(WINDOW, len(values))
    means = np.convolve(values[:, 1], np.full(window, 1 / window), mode="valid")
    return np.column_stack([values[window - 1 :, 0], means])
