"""Commands about tasks: tasks, recipes, check, new, score, and the tools of a task."""

from __future__ import annotations

import importlib
import inspect
import json
import keyword
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ..registry import TASKS, find_task_class
from ..task import Task, nearest
from .command_parser import CommandParser, require_task, task_with_options
from .help_screens import HELP_ALL, HELP_FLAGS, PROGRAM, columns
from .recipes import describe_recipe, expected_result, recipe_names

REWARD_TIMEOUT_HELP = "seconds that scoring one completion may take (default: 30)"


def tasks(arguments: Sequence[str]) -> int:
    """List the built-in tasks with their versions."""
    CommandParser("tasks", "", "List the built-in tasks: name, version and description.").parse(arguments)
    for name in sorted(TASKS):
        task_class = find_task_class(name)
        print(f"{name:<10} {task_class.version:<5} {task_class.description}")
    return 0


def recipes(arguments: Sequence[str]) -> int:
    """List the recipes of the package."""
    parser = CommandParser(
        "recipes",
        "[TASK]",
        "List the recipes of the package, or those of one task: options for a task and a kind of machine. Give the "
        "name to train or eval as --config NAME; options that follow on the command line override the recipe's.",
        ["trl-grpo-tasks recipes brick", "trl-grpo-tasks train brick --steps 100"],
    )
    parser.add_argument("task", nargs="?", metavar="TASK", help="only the recipes of this task")
    task = parser.parse(arguments).task
    names = recipe_names(task)
    if not names:
        raise ValueError(f"there are no recipes for task {task!r}{nearest(task, TASKS)}; "
                         f"tasks with recipes are: {', '.join(sorted(TASKS))}")  # fmt: skip
    listed = {name: f"{describe_recipe(name)}. Expected: {expected_result(name)}" for name in names}
    print("\n".join(line.removeprefix("  ") for line in columns(listed)))
    return 0


def check(arguments: Sequence[str]) -> int:
    """Check a task without a model."""
    parser = CommandParser(
        "check",
        "TASK [--option value ...]",
        "Check without a model that the parts of a task fit together: rows are reproducible and not shared by the "
        "splits, gold answers succeed and bad ones do not, any text gets a score, the constraint allows gold answers.",
        ["trl-grpo-tasks check my_task.py", "trl-grpo-tasks check brick --text_form pivot"],
        takes_task=True,
    )
    known, rest = parser.parse_known(arguments)
    from .check import check_task

    task = task_with_options(require_task(known.task, "check"), rest)
    try:
        check_task(task, say=print)
    except AssertionError as error:
        print(f"task {task.name!r} failed the check: {error}", file=sys.stderr)
        return 1
    print(f"task {task.name!r} passed all checks")
    return 0


def new(arguments: Sequence[str]) -> int:
    """Write a task of your own."""
    parser = CommandParser(
        "new",
        "NAME",
        "Write NAME.py into this folder: a short, commented task that trains as it is. Change it step by step into "
        "your own.",
        ["trl-grpo-tasks new my_task", "trl-grpo-tasks check my_task.py", "trl-grpo-tasks train my_task.py"],
    )
    parser.add_argument("name", metavar="NAME", help="a Python identifier, such as my_task")
    name = parser.parse(arguments).name
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"{name!r} cannot be the name of a module; use letters, digits and _, such as my_task")
    path = Path(f"{name}.py")
    if path.exists():
        raise ValueError(f"{path} exists already; choose another name, or move the file away")
    title = "".join(part.capitalize() for part in name.split("_")).removesuffix("Task") or "My"
    text = (Path(__file__).parent / "task_template.py").read_text()
    for old, given in (("my_task", name), ("MyTask", f"{title}Task"), ("MyOptions", f"{title}Options")):
        text = text.replace(old, given)
    path.write_text(text)
    print(f"wrote {path}\nnext: {PROGRAM} check {path}\nthen: {PROGRAM} train {path}")
    return 0


def score(arguments: Sequence[str]) -> int:
    """Score completions from a file."""
    parser = CommandParser(
        "score",
        "TASK --input FILE [--option value ...]",
        'Score completions without a model. Each line of the file is {"row": {...}, "completion": "..."}; each line '
        "of the output is a score as JSON. Lines that cannot be read are reported by number on standard error.",
        ["trl-grpo-tasks score prompts --input answers.jsonl", "trl-grpo-tasks score my_task.py --input - < in.jsonl"],
        takes_task=True,
    )
    parser.add_argument("--input", required=True, metavar="FILE", help="a .jsonl file, or - for standard input")
    parser.add_argument("--reward_timeout", type=float, default=30.0, metavar="X", help=REWARD_TIMEOUT_HELP)
    known, rest = parser.parse_known(arguments)
    task = task_with_options(require_task(known.task, "score"), rest)
    if known.input != "-" and not Path(known.input).is_file():
        raise ValueError(f"--input {known.input}: this file does not exist")
    from ..rewards.executor import RewardExecutor
    from .compare import read_scored_line

    unreadable = 0
    with _lines_of(known.input) as lines, RewardExecutor(task, 1, known.reward_timeout) as executor:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row, completion = read_scored_line(line)
            except ValueError as error:
                print(f"line {number}: {error}", file=sys.stderr)
                unreadable += 1
                continue
            (outcome,) = executor.submit([json.dumps(row)], [completion.text]).result()
            unscored: dict[str, Any] = {"components": {}, "total": None, "valid": False, "success": False, "info": {}}
            result = outcome.score.as_dict() if outcome.score else {**unscored, "reason": outcome.reason}
            print(json.dumps(result, default=str), flush=True)  # in ASCII: a completion may hold lone surrogates
    return 1 if unreadable else 0


def _lines_of(path: str) -> Any:
    return nullcontext(sys.stdin) if path == "-" else open(path, encoding="utf-8", errors="replace")


def tool(arguments: Sequence[str]) -> int:
    """Run a tool of a task."""
    words = list(arguments)
    if not words or words[0] in (*HELP_FLAGS, HELP_ALL):
        print(_all_tools())
        return 0 if words else 2
    task_class = find_task_class(words[0])
    if len(words) == 1 or words[1] in (*HELP_FLAGS, HELP_ALL):
        print(_tools_of(task_class))
        return 0
    name = words[1]
    if name not in task_class.tools:
        known = f"its tools are: {', '.join(task_class.tools)}" if task_class.tools else "it has none"
        raise ValueError(f"task {task_class.name!r} has no tool {name!r}{nearest(name, task_class.tools)}; {known}")
    return _find_tool(task_class, name)(["-h" if word == HELP_ALL else word for word in words[2:]]) or 0


def _all_tools() -> str:
    lines = [f"usage: {PROGRAM} task NAME [TOOL ...]", "", "Run a tool of a task. 'task NAME' lists its tools, and "
             "'task NAME TOOL -h' shows how to use one.", ""]  # fmt: skip
    classes = {name: find_task_class(name) for name in sorted(TASKS)}
    return "\n".join([*lines, *columns({name: ", ".join(one.tools) for name, one in classes.items() if one.tools})])


def _tools_of(task_class: type[Task]) -> str:
    if not task_class.tools:
        return f"task {task_class.name!r} has no tools"
    meanings = {name: (inspect.getdoc(_find_tool(task_class, name)) or "").split("\n\n")[0].replace("\n", " ")
                for name in task_class.tools}  # fmt: skip
    usage = f"usage: {PROGRAM} task {task_class.name} TOOL ...   (TOOL -h shows its options)"
    return "\n".join([usage, "", *columns(meanings)])


def _find_tool(task_class: type[Task], name: str) -> Any:
    given = task_class.tools[name]
    if callable(given):
        return given
    module, _, function = given.partition(":")
    return getattr(importlib.import_module(module), function)
