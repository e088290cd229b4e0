"""Commands about runs: train, eval, sweep, report, archive, export and generate."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from ..registry import is_safe_by_name
from ..report.run_folder import EXPORTS_FOLDER
from ..task import Task, check_choice
from .arguments import refuse_unknown
from .command_parser import CommandParser, require_task, task_with_options, truth_value
from .help_screens import HELP_ALL, PROGRAM, asks_for_help, command_screen
from .task_commands import REWARD_TIMEOUT_HELP


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
    """Write the report of a run."""
    parser = CommandParser(
        "report",
        "RUN_DIR [--task TASK]",
        "Write report.html into the folder of a run or a sweep, from what is there so far: curves, samples before and "
        "after, timings, settings. The run may still be training.",
        ["trl-grpo-tasks report outputs/demo", "trl-grpo-tasks report outputs/my_task --task my_task.py"],
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the --output_dir of a run or a sweep")
    parser.add_argument(
        "--task", metavar="TASK", help="the task, if it is not a built-in one; options of the task may follow"
    )
    known, rest = parser.parse_known(arguments)
    from ..report.page import write_report
    from ..report.sweep_page import SWEEP_FILE, write_sweep_report
    from .train import quiet_third_party_logging

    if (Path(known.run_dir) / SWEEP_FILE).is_file():
        print(write_sweep_report(known.run_dir))
        return 0
    quiet_third_party_logging()
    print(write_report(known.run_dir, _task_of(known.task, rest, known.run_dir, ["report", *arguments])))
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
    task = _task_of(known.task, rest, known.run_dir, ["archive", *arguments])
    print(text)
    for problem in export(task, answers, known.out, known.format):
        print(problem)
    print(f"files: {known.out}")
    return 0


def export(arguments: Sequence[str]) -> int:
    """Write answers as files for other programs, or a task for another library."""
    parser = CommandParser(
        "export",
        "RUN_DIR_OR_FILE|TASK [--to LIBRARY] [--out FOLDER] [--top N] [--task TASK] [--text TEXT]",
        "Write answers as the files that their task exports: pictures, and files for other programs, such as LDraw, "
        "SARAH and MuJoCo files. The answers are the best samples of the last evaluation of a run, the lines of a "
        '.jsonl file, {"row": {...}, "completion": "..."}, or a text file with one answer to --text. With --to, write '
        "a task instead: a package for verifiers, or a server for OpenEnv.",
        [
            "trl-grpo-tasks export outputs/demo --top 5",
            "trl-grpo-tasks export table.txt --task brick --text 'a small table, world 8'",
            "trl-grpo-tasks export answers.jsonl --task theory --out files",
            "trl-grpo-tasks export prompts --to verifiers --out my_taskset",
        ],
    )
    parser.add_argument(
        "source", metavar="RUN_DIR_OR_FILE|TASK",
        help="the --output_dir of a run, or a file of answers; with --to a task, whose options may follow",
    )  # fmt: skip
    parser.add_argument("--to", metavar="LIBRARY", help="export a task instead, to verifiers or openenv")
    parser.add_argument(
        "--out", metavar="FOLDER",
        help=f"folder of the files (default: {EXPORTS_FOLDER} in the folder of the run, or in this folder)",
    )  # fmt: skip
    parser.add_argument("--top", type=int, default=20, metavar="N", help="number of samples of a run (default: 20)")
    parser.add_argument(
        "--task", metavar="TASK",
        help="the task; options of the task may follow; not needed for a run of a built-in task",
    )  # fmt: skip
    parser.add_argument("--text", metavar="TEXT", help="the prompt of an answer in a text file, as in generate")
    known, rest = parser.parse_known(arguments)
    if known.to is not None:
        return _export_task(known, rest)
    if rest and not known.task:
        refuse_unknown(rest, parser)
    from .export import answers_of_file, answers_of_run, write_table
    from .export import export as write
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
        task = _task_of(known.task, rest, known.source, ["export", *arguments])
    else:
        task = task_with_options(require_task(known.task, "export FILE --task"), rest)
        answers = answers_of_file(known.source, task, known.text)
    write_table(answers, out)
    for problem in write(task, answers, out):
        print(problem)
    print(f"files of {len(answers)} answer{'s' * (len(answers) != 1)}: {out}")
    return 0


def _export_task(known: Namespace, flags: Sequence[str]) -> int:
    from .export_task import LIBRARIES, export_task
    from .plan import check_writable

    check_choice("to", known.to, LIBRARIES)
    if known.task or known.text is not None:
        raise ValueError(f"--task and --text are for answers; with --to write: {PROGRAM} export TASK --to {known.to}")
    task = task_with_options(known.source, flags)
    out = known.out or f"{task.name}_{known.to}"
    check_writable(out, "--out")
    print(f"{out}: {export_task(task, known.to, out)}")
    return 0


def generate(arguments: Sequence[str]) -> int:
    """Generate completions for a text of your own."""
    parser = CommandParser(
        "generate",
        "[TASK] --model RUN_OR_MODEL --text TEXT [--option value ...]",
        "Generate completions for a text of your own, score them, and write texts, pictures and other files into a "
        "folder. For the folder of a run of a built-in task, the task and its options are those of the run; otherwise "
        "name the task: code is never imported because a run folder says so.",
        [
            "trl-grpo-tasks generate --model outputs/demo --text 'a small table, world 8'",
            "trl-grpo-tasks generate my_task.py --model outputs/my_task --text abc",
        ],
        takes_task=True,
    )
    parser.add_argument(
        "--model", "--model_name_or_path", required=True, metavar="MODEL",
        help="the folder of a run or a model, a .gguf file, a Hub id, or tiny",
    )  # fmt: skip
    parser.add_argument("--text", required=True, metavar="TEXT", help="what to generate, in the words of the task")
    parser.add_argument("--num_samples", type=int, default=4, metavar="N", help="number of completions (default: 4)")
    parser.add_argument(
        "--constrain", type=truth_value, nargs="?", const=True, metavar="BOOL",
        help="sample under the task's constraint (default: true if the task has one)",
    )  # fmt: skip
    parser.add_argument("--editor", metavar="NAME", help="let an editor of the task delete generated text")
    parser.add_argument(
        "--output_dir", default="generated", metavar="DIR", help="folder of the files (default: generated)"
    )
    parser.add_argument(
        "--temperature", type=float, metavar="X", help="0 takes the likeliest token (default: the task's)"
    )
    for name, kind, letter in (("top_k", int, "N"), ("top_p", float, "X"), ("min_p", float, "X")):
        parser.add_argument(f"--{name}", type=kind, metavar=letter, help="sampling filter (default: the run's)")
    parser.add_argument(
        "--max_completion_length", type=int, metavar="N", help="maximum number of tokens (default: the task's)"
    )
    parser.add_argument(
        "--rollout_batch_size", type=int, metavar="N", help="completions at a time (default: as many as fit)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of sampling (default: 0)")
    parser.add_argument("--reward_timeout", type=float, default=30.0, metavar="X", help=REWARD_TIMEOUT_HELP)
    known, rest = parser.parse_known(arguments)
    from ..files import check_local_path
    from ..report.run_folder import RunFolder
    from .train import quiet_third_party_logging

    if not known.task:
        check_local_path(known.model, "--model")
    settings = RunFolder.read(known.model).settings if Path(known.model).is_dir() else {}
    if not known.task and not settings:
        raise ValueError(f"{known.model} is not the folder of a run; name the task too: {PROGRAM} generate TASK ...")
    task = _task_of(known.task, rest, known.model, ["generate", *arguments])
    from .generate import describe_sample
    from .generate import generate as write

    trained = settings.get("training", {})
    given = {name: getattr(known, name) for name in ("top_k", "top_p", "min_p")}
    filters = {name: trained.get(name) if value is None else value for name, value in given.items()}
    quiet_third_party_logging()
    samples = write(
        task,
        known.model,
        known.text,
        known.output_dir,
        num_samples=known.num_samples,
        constrain=known.constrain,
        editor=known.editor,
        temperature=known.temperature,
        filters=filters,
        max_completion_length=known.max_completion_length,
        rollout_batch_size=known.rollout_batch_size,
        seed=known.seed,
        reward_timeout=known.reward_timeout,
        run_seed=trained.get("seed", 42),
    )
    for number, sample in enumerate(samples, 1):
        print(f"sample {number}: {describe_sample(sample)}")
    print(f"files: {Path(known.output_dir) / 'sample_*'}")
    return 0


def _task_of(spec: str | None, flags: Sequence[str], run_dir: str, typed: Sequence[str]) -> Task:
    """The task that is named, with its flags. Without flags, a built-in task has the options it had in the run."""
    if spec and (flags or not _is_built_in_task_of(run_dir, spec)):
        return task_with_options(spec, flags)
    if flags:
        raise ValueError(f"{flags[0]}: to set options of a task, name it with --task; without it they are the run's")
    from ..report.page import task_of

    return task_of(run_dir, [PROGRAM, *typed])


def _is_built_in_task_of(run_dir: str, spec: str) -> bool:
    from ..report.run_folder import RunFolder

    return is_safe_by_name(spec) and Path(run_dir).is_dir() and RunFolder.read(run_dir).task_spec == spec
