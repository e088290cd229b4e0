"""The HTML page that compares several runs: evaluations, training curves and the settings that differ."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..files import write_atomically
from .gallery import prompt_of
from .page import REPORT_FILE
from .plots import COLOURS
from .run_folder import RunFolder, shown_metrics
from .sections import TRAINING, metric_charts, reward_titles
from .templating import render

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
    evaluations = {name: one for name, run in runs.items() if (one := run.latest_evaluation) is not None}
    prompts = [sorted(prompt_of(sample, 10**6) for sample in one["samples"]) for one in evaluations.values()]
    text = render(
        "comparison.html",
        runs=runs,
        reports={
            name: os.path.relpath(report, path.parent)
            for name, run in runs.items()
            if (report := run.path / REPORT_FILE).is_file()
        },
        evaluations=evaluations,
        names=shown_metrics([one["metrics"] for one in evaluations.values()]),
        is_comparable=all(one == prompts[0] for one in prompts),
        rewards=metric_charts(runs, reward_titles(list(runs.values())))[0],
        others=metric_charts(runs, TRAINING)[0],
        settings=_differing_settings(runs),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text, errors="replace")
    return path


def _names(run_dirs: Sequence[str | Path]) -> list[str]:
    """The names of the folders, or whole paths if two names are equal."""
    names = [Path(folder).resolve().name for folder in run_dirs]
    if len(set(names)) < len(names):
        names = [os.path.normpath(folder) for folder in run_dirs]
    if len(set(names)) < len(names):
        raise ValueError(f"{max(names, key=names.count)} is given twice; give different runs")
    return names


def _differing_settings(runs: Mapping[str, RunFolder]) -> dict[str, list[str]]:
    """Return the settings that are not equal in all runs, each with its value in every run."""
    flat = [_flattened({part: run.settings.get(part) for part in COMPARED_SETTINGS}) for run in runs.values()]
    names = dict.fromkeys(name for settings in flat for name in settings)
    values = {name: [settings.get(name, "") for settings in flat] for name in names}
    return {name: found for name, found in values.items() if len(set(found)) > 1}


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
