"""`trl-grpo-tasks archive`: the distinct successes of a run as a table and as files."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..evaluation.answer_files import check_top, write_files, write_table
from ..files import write_atomically
from ..report.archive import ARCHIVE_FILE, as_sample, read_answers
from ..report.gallery import prompt_of
from ..report.run_folder import RunFolder
from ..task import Task, printable

LONGEST_PROMPT, LONGEST_ANSWER = 40, 60  # characters of a line of the table
WHOLE = 10**6


def table(run_dir: str, top: int) -> tuple[str, list[dict[str, Any]]]:
    """Return the `top` best answers in the archive of a run, and a table of them that is safe to print."""
    check_top(top)
    run = RunFolder.read(run_dir)
    if not (run.path / ARCHIVE_FILE).is_file():
        raise ValueError(f"{run_dir} has no {ARCHIVE_FILE}; train with --archive 1000 to get one")
    stored = read_answers(run_dir)
    counted = run.curve("archive/distinct")
    distinct = max(int(counted[-1][1]) if counted else 0, len(stored))
    answers = stored[:top]
    lines = [f"{distinct:,} distinct successful answers, {len(stored):,} of them stored; the best {len(answers):,}:"]
    head = ("rank", "score", "seen", "step", "prompt", "answer")
    cells = [
        (str(rank), f"{a['total']:.4g}", f"{a['seen']:,}", f"{a['first_step']:,}",
         prompt_of(as_sample(a), LONGEST_PROMPT), _shortened(a["completion"]))
        for rank, a in enumerate(answers, 1)
    ]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    for line in (head, *cells):
        numbers = "  ".join(cell.rjust(width) for cell, width in zip(line[:4], widths[:4], strict=True))
        lines.append(f"{numbers}  {line[4].ljust(widths[4])}  {line[5]}".rstrip())
    return "\n".join(map(printable, lines)), answers


def export(task: Task, answers: Sequence[dict[str, Any]], folder: str | Path, form: str) -> list[str]:
    """Write a table `answers.jsonl` or `answers.csv`, and for each answer `answer_RANK.txt` and the files the task
    exports. Return a line for each answer whose files the task could not make."""
    if form == "csv":
        Path(folder).mkdir(parents=True, exist_ok=True)
        write_atomically(Path(folder) / "answers.csv", _csv(answers), errors="replace")
    else:
        write_table(answers, folder, "rank")
    return write_files(task, answers, folder, "answer.txt")


def _csv(answers: Sequence[dict[str, Any]]) -> str:
    text = io.StringIO()
    names = ("rank", "total", "seen", "first_step", "prompt", "completion", "canonical")
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for rank, answer in enumerate(answers, 1):
        cells = answer | {"rank": rank, "prompt": prompt_of(as_sample(answer), WHOLE)}
        writer.writerow({name: _inert(cells[name]) for name in names})
    return text.getvalue()


def _inert(cell: Any) -> Any:
    """A cell that a spreadsheet does not run as a formula: a model may have written the text."""
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r")) else cell


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LONGEST_ANSWER else f"{text[: LONGEST_ANSWER - 4]} ..."
