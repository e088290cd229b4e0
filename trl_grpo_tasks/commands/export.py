"""`trl-grpo-tasks export`: answers as files for other programs, such as LDraw, SARAH and MuJoCo files."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..evaluation.answer_files import Answer, check_top, write_files, write_table
from ..files import write_atomically
from ..report.archive import ARCHIVE_FILE, as_sample, read_answers
from ..report.gallery import key_of, prompt_of, rank_of
from ..report.run_folder import EXPORTS_FOLDER, RunFolder
from ..task import Task, printable
from .command_parser import CommandParser, require_task, task_of_run, task_with_options
from .plan import check_writable

FORMATS = ("jsonl", "csv")  # of the table of an archive
LONGEST_PROMPT, LONGEST_ANSWER = 40, 60  # characters of a line of the table
WHOLE = 10**6


def export(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "export",
        "RUN_OR_FILE [--archive] [--out FOLDER] [--top N] [--task TASK] [--text TEXT]",
        "Write answers as the files that their task exports: pictures, and files for other programs, such as LDraw, "
        "SARAH and MuJoCo files. The answers are the best samples of the last evaluation of a run, the lines of a "
        '.jsonl file, {"row": {...}, "completion": "..."}, or a text file with one answer to --text. With --archive, '
        "they are the best distinct successes of a run that was trained with --archive: they are listed, and written "
        "if --out is given. The run may still be training; its archive is that of the newest checkpoint.",
        [
            "trl-grpo-tasks export outputs/demo --top 5",
            "trl-grpo-tasks export outputs/demo --archive --out discoveries --top 100 --format csv",
            "trl-grpo-tasks export table.txt --task brick --text 'a small table, world 8'",
            "trl-grpo-tasks export answers.jsonl --task theory --out files",
        ],
    )
    parser.add_argument("source", metavar="RUN_OR_FILE", help="the folder of a run, or a file of answers")
    parser.add_argument("--archive", action="store_true", help="take the answers from the archive of the run")
    parser.add_argument(
        "--out", metavar="FOLDER", help=f"folder of the files (default: {EXPORTS_FOLDER}, in that of the run)"
    )
    parser.add_argument("--top", type=int, default=20, metavar="N", help="number of answers of a run (default: 20)")
    parser.add_argument(
        "--format", choices=FORMATS, default=FORMATS[0], metavar="FORMAT",
        help="the table of an archive: jsonl (default), or csv for spreadsheets",
    )  # fmt: skip
    parser.add_argument("--text", metavar="TEXT", help="the prompt of an answer in a text file, as in solve")
    parser.add_task_of_run()
    known, rest = parser.parse_known(arguments)
    is_run = Path(known.source).is_dir()
    if not is_run and not Path(known.source).is_file():
        raise ValueError(f"{known.source}: there is no such run folder or file")
    if known.archive and not is_run:
        raise ValueError(f"--archive: {known.source} is a file; give the folder of a run")
    if is_run and known.text is not None:
        raise ValueError("--text is for a file with one answer; the samples of a run have their own prompts")
    if known.format != FORMATS[0] and not known.archive:
        raise ValueError(f"--format {known.format} is for the table of an archive; add --archive")
    answers: Sequence[Any]
    if known.archive:
        listed, answers = table(known.source, known.top)
        if known.out is None:
            print(listed)
            return 0
    out = known.out if known.out is not None else str((Path(known.source) if is_run else Path()) / EXPORTS_FOLDER)
    check_writable(out, "--out")
    if not is_run:
        task = task_with_options(require_task(known.task, "export FILE --task"), rest)
        answers = answers_of_file(known.source, task, known.text)
    else:
        if not known.archive:
            answers = answers_of_run(known.source, known.top)
        task = task_of_run(known.task, rest, known.source, ["export", *arguments])
    if known.archive:
        print(listed)
    write = write_csv if known.format == "csv" else write_table
    write(answers, out)
    for problem in write_files(task, answers, out):
        print(problem)
    print(f"files of {len(answers)} answer{'s' * (len(answers) != 1)}: {out}")
    return 0


def answers_of_run(run_dir: str | Path, top: int) -> list[Answer]:
    """Return the best `top` different samples of the run's last evaluation: successes first, then by score."""
    check_top(top)
    before, after = RunFolder.read(run_dir).before_and_after
    evaluation = after or before
    if evaluation is None:
        raise ValueError(f"{run_dir} has no evaluation yet; evaluate the run with 'trl-grpo-tasks eval'")
    scored = sorted((s for s in evaluation["samples"] if s["score"] is not None), key=rank_of, reverse=True)
    different: dict[str, Answer] = {
        key_of(sample): {"row": sample["row"], "completion": sample["completion"]} for sample in scored
    }
    return list(different.values())[:top]


def answers_of_file(path: str | Path, task: Task, text: str | None) -> list[Answer]:
    """Return the answer in a text file, which belongs to the row of `text`, or the answers in the lines of a .jsonl
    file, which have their own rows."""
    from .eval import read_scored_line

    path = Path(path)
    content = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix != ".jsonl":
        if text is None:
            raise ValueError(
                f"{path} is an answer without a prompt; add --text with the prompt, or give a .jsonl file whose lines "
                'are {"row": {...}, "completion": "..."}'
            )
        return [{"row": task.row_of(text), "completion": content}]
    if text is not None:
        raise ValueError("--text is for a file with one answer; the lines of a .jsonl file have their own rows")
    answers: list[Answer] = []
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            try:
                row, completion = read_scored_line(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
            answers.append({"row": row, "completion": completion.text})
    return answers


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
    head = ("number", "score", "seen", "step", "prompt", "answer")
    cells = [
        (str(number), f"{a['total']:.4g}", f"{a['seen']:,}", f"{a['first_step']:,}",
         prompt_of(as_sample(a), LONGEST_PROMPT), _shortened(a["completion"]))
        for number, a in enumerate(answers, 1)
    ]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    for line in (head, *cells):
        numbers = "  ".join(cell.rjust(width) for cell, width in zip(line[:4], widths[:4], strict=True))
        lines.append(f"{numbers}  {line[4].ljust(widths[4])}  {line[5]}".rstrip())
    return "\n".join(map(printable, lines)), answers


def write_csv(answers: Sequence[dict[str, Any]], folder: str | Path) -> None:
    """Write `answers.csv`, a table for spreadsheets."""
    text = io.StringIO()
    names = ("number", "total", "seen", "first_step", "prompt", "completion", "canonical")
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for number, answer in enumerate(answers, 1):
        cells = answer | {"number": number, "prompt": prompt_of(as_sample(answer), WHOLE)}
        writer.writerow({name: _inert(cells[name]) for name in names})
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_atomically(Path(folder) / "answers.csv", text.getvalue(), errors="replace")


def _inert(cell: Any) -> Any:
    """A cell that a spreadsheet does not run as a formula: a model may have written the text."""
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r")) else cell


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LONGEST_ANSWER else f"{text[: LONGEST_ANSWER - 4]} ..."
