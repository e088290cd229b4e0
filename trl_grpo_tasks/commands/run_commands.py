"""Commands about runs: train, eval, sweep, report, archive and export."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from ..report.run_folder import EXPORTS_FOLDER
from ..task import check_choice
from .arguments import refuse_unknown
from .command_parser import CommandParser, require_task, task_of_run, task_with_options, truth_value
from .help_screens import HELP_ALL, PROGRAM, asks_for_help, command_screen


def train(arguments: Sequence[str]) -> int:
    """Train a model on a task."""
    from .train import main

    return main(arguments)


def evaluate(arguments: Sequence[str]) -> int:
    """Evaluate models on held-out rows."""
    from .train import main

    return main(arguments, command="eval")


def sweep(arguments: Sequence[str]) -> int:
    """Search over options."""
    from .arguments import read_command_line, with_task_option

    words = with_task_option(arguments)
    if asks_for_help(words):
        if HELP_ALL in words:
            print(command_screen("sweep"), end="\n\n")
            return train([word for word in words if not word.startswith("--search")])
        print(command_screen("sweep"))
        return 0
    read_command_line(words, "sweep")  # a missing task is reported before missing options
    from .sweep import sweep as search

    return search(words)


def report(arguments: Sequence[str]) -> int:
    """Write the report of a run, or compare runs."""
    parser = CommandParser(
        "report",
        "RUN_DIR [RUN_DIR ...] [--out FILE] [--task TASK]",
        "Write report.html into the folder of a run or a sweep, from what is there so far: curves, samples before and "
        "after, timings, settings. Several runs are compared on one page: evaluations, curves, and the settings that "
        "differ. Runs may still be training.",
        [
            "trl-grpo-tasks report outputs/demo",
            "trl-grpo-tasks report outputs/my_task --task my_task.py",
            "trl-grpo-tasks report outputs/first outputs/second --out comparison.html",
        ],
    )
    parser.add_argument("run_dirs", nargs="+", metavar="RUN_DIR", help="the --output_dir of a run or a sweep")
    parser.add_argument("--out", metavar="FILE", help="the page that compares several runs (default: comparison.html)")
    parser.add_argument(
        "--task", metavar="TASK", help="the task, if it is not a built-in one; options of the task may follow"
    )
    known, rest = parser.parse_known(arguments)
    from ..report.comparison import write_comparison
    from ..report.page import write_report
    from ..report.sweep_page import SWEEP_FILE, write_sweep_report
    from .quiet import quiet_third_party_logging

    if len(known.run_dirs) > 1:
        refuse_unknown(rest, parser)
        print(write_comparison(known.run_dirs, known.out or "comparison.html"))
        return 0
    if known.out is not None:
        raise ValueError("--out is for a page that compares several runs; the report of one run is in its folder")
    (run_dir,) = known.run_dirs
    if (Path(run_dir) / SWEEP_FILE).is_file():
        print(write_sweep_report(run_dir))
        return 0
    quiet_third_party_logging()
    print(write_report(run_dir, task_of_run(known.task, rest, run_dir, ["report", *arguments])))
    return 0


def archive(arguments: Sequence[str]) -> int:
    """List and export the archive of a run."""
    parser = CommandParser(
        "archive",
        "RUN_DIR [--out FOLDER] [--top N] [--format jsonl|csv] [--task TASK]",
        "List the best distinct successful answers of a run that was trained with --archive. With --out, write them "
        "into a folder: a table, and the text, picture and other files of each answer. The run may still be training; "
        "its archive is that of the newest checkpoint.",
        [
            "trl-grpo-tasks archive outputs/demo",
            "trl-grpo-tasks archive outputs/demo --out discoveries --top 100 --format csv",
        ],
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the --output_dir of a run")
    parser.add_argument("--out", metavar="FOLDER", help="folder of the files (default: no files are written)")
    parser.add_argument("--top", type=int, default=20, metavar="N", help="number of answers (default: 20)")
    parser.add_argument(
        "--format", choices=("jsonl", "csv"), default="jsonl", metavar="FORMAT",
        help="the table in --out: jsonl (default), or csv for spreadsheets",
    )  # fmt: skip
    parser.add_argument(
        "--task", metavar="TASK",
        help="the task, if it is not a built-in one; options of the task may follow; only needed for --out",
    )  # fmt: skip
    known, rest = parser.parse_known(arguments)
    if rest and not known.task:
        refuse_unknown(rest, parser)
    from .archive import export, table
    from .plan import check_writable

    text, answers = table(known.run_dir, known.top)
    if known.out is None:
        print(text)
        return 0
    check_writable(known.out, "--out")
    task = task_of_run(known.task, rest, known.run_dir, ["archive", *arguments])
    print(text)
    for problem in export(task, answers, known.out, known.format):
        print(problem)
    print(f"files: {known.out}")
    return 0


def export(arguments: Sequence[str]) -> int:
    """Write answers as files for other programs, a model as a GGUF file, or a task for another library."""
    parser = CommandParser(
        "export",
        "RUN_DIR_OR_FILE|TASK [--gguf] [--to LIBRARY] [--out FOLDER] [--top N] [--task TASK] [--text TEXT]",
        "Write answers as the files that their task exports: pictures, and files for other programs, such as LDraw, "
        "SARAH and MuJoCo files. The answers are the best samples of the last evaluation of a run, the lines of a "
        '.jsonl file, {"row": {...}, "completion": "..."}, or a text file with one answer to --text. With --gguf, '
        "write the final model of a run instead, as a GGUF file for llama.cpp and Ollama; if llama.cpp's converter is "
        "not found, the commands that do it are printed, and the exit status is 3. With --to, write a task instead: a "
        "package for verifiers, or a server for OpenEnv.",
        [
            "trl-grpo-tasks export outputs/demo --top 5",
            "trl-grpo-tasks export table.txt --task brick --text 'a small table, world 8'",
            "trl-grpo-tasks export answers.jsonl --task theory --out files",
            "trl-grpo-tasks export outputs/my_run --gguf --gguf_type f16",
            "trl-grpo-tasks export prompts --to verifiers --out my_taskset",
        ],
    )
    parser.add_argument(
        "source", metavar="RUN_DIR_OR_FILE|TASK",
        help="the --output_dir of a run, or a file of answers; with --to a task, whose options may follow",
    )  # fmt: skip
    parser.add_argument(
        "--gguf", type=truth_value, nargs="?", const=True, default=False, metavar="BOOL",
        help="export the final model instead; an adapter is merged into its base model",
    )  # fmt: skip
    parser.add_argument(
        "--gguf_type", metavar="TYPE", help="type of the weights: q8_0 (default, 8 bits), f16, bf16 or f32"
    )
    parser.add_argument("--to", metavar="LIBRARY", help="export a task instead, to verifiers or openenv")
    parser.add_argument(
        "--out", metavar="FOLDER",
        help=f"folder of the files (default: {EXPORTS_FOLDER}, or gguf, in the folder of the run; or in this folder)",
    )  # fmt: skip
    parser.add_argument("--top", type=int, default=20, metavar="N", help="number of samples of a run (default: 20)")
    parser.add_argument(
        "--task", metavar="TASK",
        help="the task; options of the task may follow; not needed for a run of a built-in task",
    )  # fmt: skip
    parser.add_argument("--text", metavar="TEXT", help="the prompt of an answer in a text file, as in generate")
    known, rest = parser.parse_known(arguments)
    if known.gguf_type is not None and not known.gguf:
        raise ValueError("--gguf_type is for a model; add --gguf")
    if known.to is not None:
        return _export_task(known, rest)
    if rest and (known.gguf or not known.task):
        refuse_unknown(rest, parser)
    if known.gguf:
        return _export_model(known)
    from ..evaluation.answer_files import write_files, write_table
    from .export import answers_of_file, answers_of_run
    from .plan import check_writable

    is_run = Path(known.source).is_dir()
    if not is_run and not Path(known.source).is_file():
        raise ValueError(f"{known.source}: there is no such run folder or file")
    if is_run and known.text is not None:
        raise ValueError("--text is for a file with one answer; the samples of a run have their own prompts")
    out = known.out if known.out is not None else str((Path(known.source) if is_run else Path()) / EXPORTS_FOLDER)
    check_writable(out, "--out")
    if is_run:
        answers = answers_of_run(known.source, known.top)
        task = task_of_run(known.task, rest, known.source, ["export", *arguments])
    else:
        task = task_with_options(require_task(known.task, "export FILE --task"), rest)
        answers = answers_of_file(known.source, task, known.text)
    write_table(answers, out)
    for problem in write_files(task, answers, out):
        print(problem)
    print(f"files of {len(answers)} answer{'s' * (len(answers) != 1)}: {out}")
    return 0


def _export_model(known: Namespace) -> int:
    from .export_gguf import TYPES, export_gguf

    if known.task or known.text is not None:
        raise ValueError(f"--task and --text are for answers; with --gguf write: {PROGRAM} export RUN_DIR --gguf")
    kind = known.gguf_type or TYPES[0]
    check_choice("gguf_type", kind, TYPES)
    return export_gguf(known.source, kind, known.out)


def _export_task(known: Namespace, flags: Sequence[str]) -> int:
    from .export_task import LIBRARIES, export_task
    from .plan import check_writable

    check_choice("to", known.to, LIBRARIES)
    if known.gguf:
        raise ValueError("--gguf exports a model and --to a task; give one of them")
    if known.task or known.text is not None:
        raise ValueError(f"--task and --text are for answers; with --to write: {PROGRAM} export TASK --to {known.to}")
    task = task_with_options(known.source, flags)
    out = known.out or f"{task.name}_{known.to}"
    check_writable(out, "--out")
    print(f"{out}: {export_task(task, known.to, out)}")
    return 0
