"""`trl-grpo-tasks export`: answers as files for other programs, such as LDraw, SARAH and MuJoCo files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..evaluation.answer_files import Answer, check_top, write_files, write_table
from ..report.gallery import key_of, rank_of
from ..report.run_folder import EXPORTS_FOLDER, RunFolder
from ..task import Task
from .command_parser import CommandParser, require_task, task_of_run, task_with_options
from .plan import check_writable


def export(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "export",
        "RUN_OR_FILE [--out FOLDER] [--top N] [--task TASK] [--text TEXT]",
        "Write answers as the files that their task exports: pictures, and files for other programs, such as LDraw, "
        "SARAH and MuJoCo files. The answers are the best samples of the last evaluation of a run, the lines of a "
        '.jsonl file, {"row": {...}, "completion": "..."}, or a text file with one answer to --text.',
        [
            "trl-grpo-tasks export outputs/demo --top 5",
            "trl-grpo-tasks export table.txt --task brick --text 'a small table, world 8'",
            "trl-grpo-tasks export answers.jsonl --task theory --out files",
        ],
    )
    parser.add_argument("source", metavar="RUN_OR_FILE", help="the folder of a run, or a file of answers")
    parser.add_argument(
        "--out", metavar="FOLDER", help=f"folder of the files (default: {EXPORTS_FOLDER}, in that of the run)"
    )
    parser.add_argument("--top", type=int, default=20, metavar="N", help="number of answers of a run (default: 20)")
    parser.add_argument("--text", metavar="TEXT", help="the prompt of an answer in a text file, as in solve")
    parser.add_task_of_run()
    known, rest = parser.parse_known(arguments)
    is_run = Path(known.source).is_dir()
    if not is_run and not Path(known.source).is_file():
        raise ValueError(f"{known.source}: there is no such run folder or file")
    if is_run and known.text is not None:
        raise ValueError("--text is for a file with one answer; the samples of a run have their own prompts")
    out = known.out if known.out is not None else str((Path(known.source) if is_run else Path()) / EXPORTS_FOLDER)
    check_writable(out, "--out")
    if not is_run:
        task = task_with_options(require_task(known.task, "export FILE --task"), rest)
        answers = answers_of_file(known.source, task, known.text)
    else:
        answers = answers_of_run(known.source, known.top)
        task = task_of_run(known.task, rest, known.source, ["export", *arguments])
    write_table(answers, out)
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
    from .eval import read_scored_lines

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
    lines = read_scored_lines(path, content.splitlines())
    return [{"row": row, "completion": completion.text} for _, row, completion in lines]
