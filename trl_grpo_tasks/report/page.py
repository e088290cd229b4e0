"""The report of a run: one HTML page that opens from disk. What was trained, what came of it, and how to repeat it."""

from __future__ import annotations

import html
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..files import write_atomically
from ..task import TASKS, Task, find_task_class, get_task, printable
from .gallery import Pictures
from .run_folder import SETTINGS_FILE, RunFolder
from .sections import best_of_k, curves, evaluation_table, headline, reproduce, samples, times
from .style import SCRIPT, page

REPORT_FILE = "report.html"
# For drawing, at most. While a run goes on it waits for us: a few pictures a time, which are kept.
SECONDS, SECONDS_WHILE_RUNNING = 60.0, 2.0


def write_report(
    run_dir: str | Path, task: Task, *, pictures: Pictures | None = None, running_to: int | None = None
) -> Path:
    """Write report.html into a run's folder from what the run left there so far, and return its path.

    `running_to` is the last step of a run that goes on now. `pictures` can be kept from one call to the next.
    """
    run = RunFolder.read(run_dir)
    pictures = Pictures(task) if pictures is None else pictures
    pictures.start_page(SECONDS if running_to is None else SECONDS_WHILE_RUNNING)
    body = [
        headline(run, task, running_to),
        _section(
            "Held-out rows", f"<div class=beside><div>{evaluation_table(run)}</div><div>{best_of_k(run)}</div></div>"
        ),
        samples(run, pictures),
        curves(run),
        _section("Time", times(run)),
        _section("How to repeat it", reproduce(run)),
        _settings(run.settings),
        "<dialog id=large><button autofocus>close</button><div></div></dialog>",
    ]
    path = run.path / REPORT_FILE
    text = page(f"{task.name}: report", "".join(body), script=SCRIPT, reloads=running_to is not None)
    write_atomically(path, text, errors="replace")
    return path


def task_of(run_dir: str | Path, command: Sequence[str] = ()) -> Task:
    """The built-in task of a run, with its options, from what is in the run's folder.

    A run folder may come from someone else, so no code that it names is imported or permitted to run. ValueError for
    those, with what the user adds to `command` to name the code, and for a folder that does not say.
    """
    run = RunFolder.read(run_dir)
    if run.is_empty:
        raise ValueError(
            f"{run_dir} is not the folder of a run: it has none of settings.json, results.json, evaluation.json and "
            "training_metrics.jsonl"
        )
    if run.task_spec is None:
        raise ValueError(f"{run_dir} does not say which task was trained (it has no settings.json): give --task")
    options = run.settings.get("task", {}).get("options") or {}
    if run.task_spec in TASKS:
        code = [f"--{name}" for name in find_task_class(run.task_spec).code_options(options)]
    else:
        code = ["the task"]
    if code:
        start = command or ["trl-grpo-tasks", "report", str(run_dir)]
        words = [*start, "--task", run.task_spec, *option_words(options)]
        raise ValueError(
            f"{run_dir} names code to run ({', '.join(code)}), which is not imported from a run folder; if you trust "
            f"it, name it yourself: {printable(shlex.join(words))}"
        )
    try:
        return get_task(run.task_spec, options)
    except TypeError as error:
        raise ValueError(
            f"{run.path / SETTINGS_FILE} has options that task {run.task_spec!r} does not have now ({error}): give "
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


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>" if content else ""


def _settings(settings: dict[str, Any]) -> str:
    if not settings:
        return ""
    text = html.escape(json.dumps(settings, indent=1, ensure_ascii=False))
    return f"<details><summary>All settings</summary><pre class=block>{text}</pre></details>"
