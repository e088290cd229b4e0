"""Files of answers: a table `answers.jsonl`, and for each answer its text and what the task exports, numbered."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..failures import first_line
from ..files import write_atomically
from ..task import Task, printable

Answer = Mapping[str, Any]  # it has a "row" and a "completion", and may have more


def check_top(top: int) -> None:
    """Raise ValueError for a number of answers, the option --top of several commands, that selects none."""
    if top < 1:
        raise ValueError(f"--top {top} must be at least 1")


def write_files(task: Task, answers: Sequence[Answer], folder: str | Path, first: int = 1) -> list[str]:
    """Write for each answer its text and the files that the task exports, with the number of the answer in each name:
    sample.txt becomes sample_1.txt. `first` is the first number. Return a line for each answer whose files the task
    could not make. An answer that has a list "files" gets their names in it."""
    problems = []
    Path(folder).mkdir(parents=True, exist_ok=True)
    for number, answer in enumerate(answers, first):
        files: dict[str, str | bytes] = {"sample.txt": answer["completion"]}
        try:
            files |= task.exports(answer["row"], answer["completion"])
        except Exception as error:  # noqa: BLE001 - the row may be one that the task never made
            problems.append(printable(f"answer {number}: no files ({type(error).__name__}: {first_line(error)})"))
        for name, content in files.items():
            file = Path(folder) / f"{Path(name).stem}_{number}{Path(name).suffix}"
            write_atomically(file, content, errors="replace")
            answer.get("files", []).append(file.name)
    return problems


def remove_earlier(folder: str | Path) -> None:
    """Remove the files that answers.jsonl of an earlier command names; others with higher numbers would stay."""
    table = Path(folder) / "answers.jsonl"
    try:
        entries = [json.loads(line) for line in table.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):  # there is none, or it is not ours
        return
    for entry in entries:
        names = entry.get("files", []) if isinstance(entry, Mapping) else []
        for name in names if isinstance(names, list) else []:
            if isinstance(name, str) and name == Path(name).name and (table.parent / name).is_file():
                (table.parent / name).unlink()


def write_table(answers: Sequence[Answer], folder: str | Path) -> None:
    """Write answers.jsonl, which `export` and the tool `score` read: one numbered answer per line."""
    lines = [json.dumps({"number": number, **answer}) for number, answer in enumerate(answers, 1)]
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_atomically(Path(folder) / "answers.jsonl", "".join(f"{line}\n" for line in lines))
