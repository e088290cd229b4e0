"""The HTML report of a run: one self-contained page with results, samples, training curves and settings."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..files import write_atomically
from ..registry import find_task_class, get_task, is_safe_by_name
from ..task import Task, printable
from .gallery import Pictures, exported_files
from .run_folder import EXPORTS_FOLDER, SETTINGS_FILE, RunFolder, shown_metrics
from .sections import best_of_k, curves, glossary, headline, sample_counts, samples, tiles, times
from .templating import render

REPORT_FILE = "report.html"
# Limits on the time for drawing pictures. Training waits while the report is written, so the limit is lower then; the
# pictures drawn are kept for the next version of the page.
SECONDS, SECONDS_WHILE_RUNNING = 60.0, 2.0


def write_report(
    run_dir: str | Path, task: Task, *, pictures: Pictures | None = None, running_to: int | None = None
) -> Path:
    """Write report.html into a run folder from the files that are there so far, and return its path.

    `running_to` is the last planned step of a run that is still training. `pictures` can be passed to repeated calls,
    so that each picture is drawn only once.
    """
    run = RunFolder.read(run_dir)
    pictures = Pictures(task) if pictures is None else pictures
    pictures.start_page(SECONDS if running_to is None else SECONDS_WHILE_RUNNING)
    names = shown_metrics([one["metrics"] for one in run.evaluations])
    text = render(
        "report.html",
        run=run,
        task=task,
        reloads=running_to is not None,
        headline=headline(run, task, running_to),
        tiles=tiles(run, task),
        names=names,
        counts=sample_counts(run),
        best_of_k=best_of_k(run),
        glossary=glossary(names),
        samples=samples(run, pictures),
        exports=exported_files(run.path / EXPORTS_FOLDER),
        exports_folder=EXPORTS_FOLDER,
        curves=curves(run),
        times=times(run),
        settings=json.dumps(run.settings, indent=1, ensure_ascii=False),
    )
    path = run.path / REPORT_FILE
    write_atomically(path, text, errors="replace")
    return path


def task_of(run_dir: str | Path, command: Sequence[str] = ()) -> Task:
    """Load the built-in task of a run, with its options, from the files in the run folder.

    A run folder may come from somebody else, so code that it names is neither imported nor run, and files that its
    options name are not written. In that case a ValueError shows what the user must add to `command` to name them. A
    folder that names no task is a ValueError.
    """
    run = RunFolder.read(run_dir)
    if run.is_empty:
        raise ValueError(
            f"{run_dir} is not a run folder: it contains none of settings.json, results.json, evaluation.json and "
            "training_metrics.jsonl"
        )
    if run.task_spec is None:
        raise ValueError(f"{run_dir} does not name the task that was trained (it has no settings.json); pass --task")
    options = run.settings.get("task", {}).get("options") or {}
    if is_safe_by_name(run.task_spec):
        refused = [f"--{name}" for name in find_task_class(run.task_spec).user_options(options)]
    else:
        refused = ["the task"]
    if refused:
        start = command or ["trl-grpo-tasks", "report", str(run_dir)]
        words = [*start, "--task", run.task_spec, *option_words(options)]
        raise ValueError(
            f"{run_dir} names code to run or files to write ({', '.join(refused)}), which for safety is not taken "
            f"from a run folder; if you trust it, name it yourself: {printable(shlex.join(words))}"
        )
    try:
        return get_task(run.task_spec, options)
    except TypeError as error:
        raise ValueError(
            f"{run.path / SETTINGS_FILE} contains options that task {run.task_spec!r} no longer has ({error}); pass "
            "--task and its options"
        ) from error


def option_words(options: Mapping[str, Any]) -> list[str]:
    """Options by name as the words of a command line. Options that are None or an empty list are left out."""
    words: list[str] = []
    for name, value in options.items():
        if isinstance(value, list):
            words += [f"--{name}", *map(str, value)] if value else []
        elif value is not None:
            words += [f"--{name}", value if isinstance(value, str) else json.dumps(value)]
    return words
