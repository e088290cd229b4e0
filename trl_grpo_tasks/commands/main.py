"""The command `trl-grpo-tasks`: tasks, train, eval, report, sweep, generate, score, prepare-judge, check, new."""

from __future__ import annotations

import argparse
import json
import keyword
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ..failures import known_failure
from ..task import TASKS, Task, find_task_class, get_task
from .train import quiet_third_party_logging

USAGE = """usage: trl-grpo-tasks COMMAND ...

  tasks                           list the tasks
  train --task NAME ...           cold start, GRPO, evaluation, report (the options of train.py; --help lists them)
  eval  --task NAME --models NAME=MODEL ...
                                  models, adapters, checkpoints, files of completions side by side on held-out rows
                                  (the options of train.py; --num_samples, --k and --decoding are for this)
  report RUN_DIR                  write the page of a run again: curves, pictures before and after, times, settings
  sweep --task NAME --search OPTION=VALUES ...
                                  search over any options of train.py, by Optuna; goes on where it was stopped
  generate --model_name_or_path RUN_DIR --text TEXT
                                  write what the text asks for: completions, pictures, files, and what they are worth
  score --task NAME --input FILE  score completions from a .jsonl file; needs no model
  prepare-judge --output_dir DIR  train a judge for task infill, on real against corrupted text
  check --task NAME               prove with no model that the pieces of a task fit together
  new   NAME                      write a commented task of your own, which works as it is

NAME is one of the tasks, a path to a .py file, or a module such as my_package.my_task. To begin with one of the tasks:
trl-grpo-tasks train --config recipes/NAME/tiny_cpu.yaml
"""

REWARD_TIMEOUT_HELP = "seconds that the score of one completion may take; 30 if not given"


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands = {"tasks": tasks, "train": train, "eval": evaluate, "report": report, "sweep": sweep, "check": check,
                "generate": generate, "score": score, "prepare-judge": prepare_judge, "new": new}  # fmt: skip
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if arguments[0] not in commands:
        print(f"error: unknown command {arguments[0]!r}; commands are: {', '.join(commands)}", file=sys.stderr)
        return 2
    if arguments[0] in ("train", "eval"):  # which say themselves what is wrong
        return commands[arguments[0]](arguments[1:])
    try:
        return commands[arguments[0]](arguments[1:])
    except (ValueError, ImportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        if (failure := known_failure(error)) is None:
            raise
        print(f"error: {failure}", file=sys.stderr)
        return 1


def tasks(arguments: Sequence[str]) -> int:
    """List the tasks, with their versions."""
    for name in sorted(TASKS):
        task_class = find_task_class(name)
        print(f"{name:<10} {task_class.version:<5} {task_class.description}")
    return 0


def train(arguments: Sequence[str]) -> int:
    from .train import main as run_main

    return run_main(list(arguments))


def evaluate(arguments: Sequence[str]) -> int:
    return train([*arguments, "--eval_only", "true"])


def report(arguments: Sequence[str]) -> int:
    """Write report.html into the folder of a run, from what the run has left there so far."""
    parser = argparse.ArgumentParser(prog="trl-grpo-tasks report", description=report.__doc__, allow_abbrev=False)
    parser.add_argument("run_dir", help="the --output_dir of a run, which may still be going on")
    parser.add_argument(
        "--task", help="the task, where the run's is one of your own or unknown; its options may follow"
    )
    known, rest = parser.parse_known_args(arguments)
    from ..report.page import write_report
    from ..report.sweep_page import SWEEP_FILE, write_sweep_report

    if (Path(known.run_dir) / SWEEP_FILE).is_file():
        print(write_sweep_report(known.run_dir))
        return 0
    quiet_third_party_logging()
    print(write_report(known.run_dir, _task_of(known.task, rest, known.run_dir, ["report", *arguments])))
    return 0


def sweep(arguments: Sequence[str]) -> int:
    from .sweep import sweep as search

    quiet_third_party_logging()
    return search(arguments)


def generate(arguments: Sequence[str]) -> int:
    """Write what a text asks for: completions, pictures and files in a folder, and a line on what each is worth. For
    the folder of a run of a built-in task, the task and its options are those of the run; otherwise they are given, as
    for train: a run folder never has code imported."""
    parser = argparse.ArgumentParser(prog="trl-grpo-tasks generate", description=generate.__doc__, allow_abbrev=False)
    parser.add_argument(
        "--task", help="a task's name, a .py file with one, or a module; not given: that of the run, if built in"
    )
    parser.add_argument(
        "--model_name_or_path", required=True, help="the folder of a run or a model, a .gguf file, or a Hub id"
    )
    parser.add_argument("--text", required=True, help="what is asked for, such as 'a small table, world 8'")
    parser.add_argument("--num_samples", type=int, default=4, help="how many completions; 4 if not given")
    parser.add_argument("--decoding", help="how they are written; constrained, if not given and there is such a way")
    parser.add_argument("--output_dir", default="generated", help="folder of the files; 'generated' if not given")
    parser.add_argument("--temperature", type=float, help="0 takes the likeliest token; the task's if not given")
    for name, kind in (("top_k", int), ("top_p", float), ("min_p", float)):
        parser.add_argument(f"--{name}", type=kind, help="as in training; those of the run if not given")
    parser.add_argument("--max_completion_length", type=int, help="most tokens; the task's if not given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reward_timeout", type=float, default=30.0, help=REWARD_TIMEOUT_HELP)
    known, rest = parser.parse_known_args(arguments)
    from ..report.run_folder import RunFolder

    settings = RunFolder.read(known.model_name_or_path).settings if Path(known.model_name_or_path).is_dir() else {}
    if not known.task and not settings:
        raise ValueError(f"{known.model_name_or_path} is not the folder of a run: give --task too")
    task = _task_of(known.task, rest, known.model_name_or_path, ["generate", *arguments])
    from .generate import generate as write
    from .generate import verdict

    trained = settings.get("training", {})
    given = {name: getattr(known, name) for name in ("top_k", "top_p", "min_p")}
    filters = {name: trained.get(name) if value is None else value for name, value in given.items()}
    quiet_third_party_logging()
    samples = write(
        task,
        known.model_name_or_path,
        known.text,
        known.output_dir,
        num_samples=known.num_samples,
        decoding=known.decoding,
        temperature=known.temperature,
        filters=filters,
        max_completion_length=known.max_completion_length,
        seed=known.seed,
        reward_timeout=known.reward_timeout,
        run_seed=trained.get("seed", 42),
    )
    for number, sample in enumerate(samples, 1):
        print(f"sample {number}: {verdict(sample)}")
    print(f"files: {Path(known.output_dir) / 'sample_*'}")
    return 0


def score(arguments: Sequence[str]) -> int:
    """Score lines of {"row": {...}, "completion": "..."}. A line that cannot be read is reported by its number, on
    standard error; the others are still scored."""
    parser = argparse.ArgumentParser(prog="trl-grpo-tasks score", description=score.__doc__, allow_abbrev=False)
    parser.add_argument("--task", required=True, help="a task's name, a path to a .py file with one, or a module")
    parser.add_argument("--input", required=True, help="a .jsonl file, or - for standard input")
    parser.add_argument("--reward_timeout", type=float, default=30.0, help=REWARD_TIMEOUT_HELP)
    known, rest = parser.parse_known_args(arguments)
    task = get_task(known.task, _task_options(known.task, rest))
    if known.input != "-" and not Path(known.input).is_file():
        raise ValueError(f"--input {known.input}: there is no such file")
    from ..rewards.executor import RewardExecutor
    from .compare import read_scored_line

    bad = 0
    with _lines_of(known.input) as lines, RewardExecutor(task, 1, known.reward_timeout) as executor:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row, completion, _ = read_scored_line(line)
            except ValueError as error:
                print(f"line {number}: {error}", file=sys.stderr)
                bad += 1
                continue
            (outcome,) = executor.submit([json.dumps(row)], [completion]).result()
            unscored: dict[str, Any] = {"components": {}, "total": None, "valid": False, "success": False, "info": {}}
            told = outcome.score.as_dict() if outcome.score else {**unscored, "reason": outcome.reason}
            print(json.dumps(told, default=str), flush=True)  # in ASCII: a completion may hold lone surrogates
    return 1 if bad else 0


def _lines_of(path: str) -> Any:
    return nullcontext(sys.stdin) if path == "-" else open(path, encoding="utf-8", errors="replace")


def _task_of(spec: str | None, flags: Sequence[str], run_dir: str, typed: Sequence[str]) -> Task:
    """The task that is named, with its flags; otherwise that of the run, with its options, where it is built in."""
    if spec:
        return get_task(spec, _task_options(spec, flags))
    if flags:
        raise ValueError(f"{flags[0]}: options of a task need --task; without it they are those of the run")
    from ..report.page import task_of

    return task_of(run_dir, ["trl-grpo-tasks", *typed])


def _task_options(spec: str, flags: Sequence[str]) -> object:
    """The options of a task alone, from its flags."""
    options_class = find_task_class(spec).Options
    if not flags:
        return options_class()
    from .arguments import make_parser, refuse_unknown

    parser = make_parser(options_class)
    options, rest = parser.parse_args_and_config(list(flags), return_remaining_strings=True)
    refuse_unknown(rest, parser)
    return options


def prepare_judge(arguments: Sequence[str]) -> int:
    """Train a judge on real against corrupted text, print how it does on held-out text, and save it; one that is no
    better than chance is refused. Options of the task are taken too: --corpus, --text_length, --judge_steps, ..."""
    parser = argparse.ArgumentParser(
        prog="trl-grpo-tasks prepare-judge", description=prepare_judge.__doc__, allow_abbrev=False
    )
    parser.add_argument("--task", default="infill", help="a task that trains judges; infill, if not given")
    parser.add_argument("--output_dir", required=True, help="folder of the judge")
    parser.add_argument("--held_out", action="store_true", help="train on the other half of the text: a second judge")
    parser.add_argument("--seed", type=int, default=42)
    known, rest = parser.parse_known_args(arguments)
    task = get_task(known.task, _task_options(known.task, rest))
    train_judge = getattr(task, "train_judge", None)
    if train_judge is None:
        raise ValueError(f"task {known.task!r} trains no judges: it does not define train_judge(...)")
    quiet_third_party_logging()
    train_judge(known.output_dir, known.held_out, known.seed)
    print(f"judge: {known.output_dir}")
    return 0


def check(arguments: Sequence[str]) -> int:
    """Prove with no model that the pieces of a task fit together: rows that repeat and that splits do not share, gold
    answers that succeed and bad ones that do not, scores for any text, a constraint that allows the gold answers."""
    parser = argparse.ArgumentParser(prog="trl-grpo-tasks check", description=check.__doc__, allow_abbrev=False)
    parser.add_argument("--task", required=True, help="a task's name, a path to a .py file with one, or a module")
    known, rest = parser.parse_known_args(arguments)
    from .check import check_task

    task = get_task(known.task, _task_options(known.task, rest))
    try:
        check_task(task)
    except AssertionError as error:
        print(f"task {task.name!r} does not keep the contract: {error}", file=sys.stderr)
        return 1
    print(f"task {task.name!r} keeps the contract")
    return 0


def new(arguments: Sequence[str]) -> int:
    """Write a commented task of your own, which works as it is."""
    parser = argparse.ArgumentParser(prog="trl-grpo-tasks new", description=new.__doc__)
    parser.add_argument("name", help="its name, such as my_task; the file is NAME.py in this folder")
    name = parser.parse_args(arguments).name
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"{name!r} cannot be a module's name; use letters, digits and _, such as my_task")
    path = Path(f"{name}.py")
    if path.exists():
        raise ValueError(f"{path} is there already; choose another name, or move it away")
    title = "".join(part.capitalize() for part in name.split("_"))
    text = (Path(__file__).parent / "task_template.py").read_text()
    for old, given in (("my_task", name), ("MyTask", f"{title}Task"), ("MyOptions", f"{title}Options")):
        text = text.replace(old, given)
    path.write_text(text)
    print(f"wrote {path}; try: trl-grpo-tasks check --task {path}, then trl-grpo-tasks train --task {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
