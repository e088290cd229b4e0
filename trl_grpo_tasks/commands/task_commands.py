"""Commands about tasks: list, check, new, and the tools of a task."""

from __future__ import annotations

import importlib
import inspect
import json
import keyword
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ..registry import TASKS, find_task_class
from ..task import nearest
from .command_parser import CommandParser, require_task, task_with_options
from .help_screens import HELP_ALL, HELP_FLAGS, PROGRAM, columns
from .recipes import describe_recipe, expected_result, recipe_names

REWARD_TIMEOUT_HELP = "seconds that scoring one completion may take (default: 30)"


def list_tasks(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "list",
        "[TASK]",
        "List the built-in tasks: version, description, and the names of their recipes. With TASK, describe its "
        "recipes: options for a kind of machine, and the expected result. Give the name to train or eval as "
        "--config NAME; options that follow on the command line override the recipe's.",
        ["trl-grpo-tasks list brick", "trl-grpo-tasks train --config brick/single_gpu --steps 100"],
    )
    parser.add_argument("task", nargs="?", metavar="TASK", help="describe the recipes of this task")
    given = parser.parse_known(arguments)[0].task
    if given is not None and not recipe_names(given):
        raise ValueError(f"there are no recipes for task {given!r}{nearest(given, TASKS)}; "
                         f"tasks with recipes are: {', '.join(sorted(TASKS))}")  # fmt: skip
    for name in sorted(TASKS) if given is None else [given]:
        task_class = find_task_class(name)
        print(f"{name:<10} {task_class.version:<5} {task_class.description}")
        recipes = recipe_names(name)
        if given is None:
            print(f"{'':<17}recipes: {' '.join(recipes)}")
        else:
            listed = {recipe: f"{describe_recipe(recipe)}. Expected: {expected_result(recipe)}" for recipe in recipes}
            print("\n".join(columns(listed)))
    return 0


def check(arguments: Sequence[str]) -> int:
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
    parser = CommandParser(
        "new",
        "NAME",
        "Write NAME.py into this folder: a short, commented task that trains as it is. Change it step by step into "
        "your own.",
        ["trl-grpo-tasks new my_task", "trl-grpo-tasks check my_task.py", "trl-grpo-tasks train my_task.py"],
    )
    parser.add_argument("name", metavar="NAME", help="a Python identifier, such as my_task")
    parser.add_argument(
        "--no-gold",
        action="store_true",
        help="leave out known answers: a verifier is enough for GRPO, without a cold start",
    )
    parser.add_argument(
        "--environment", action="store_true", help="a task of several turns, in which a world answers the model"
    )
    given, _ = parser.parse_known(arguments)
    name = given.name
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"{name!r} cannot be the name of a module; use letters, digits and _, such as my_task")
    path = Path(f"{name}.py")
    if path.exists():
        raise ValueError(f"{path} exists already; choose another name, or move the file away")
    title = "".join(part.capitalize() for part in name.split("_")).removesuffix("Task") or "My"
    text = (Path(__file__).parent / f"{'environment' if given.environment else 'task'}_template.py").read_text()
    if given.no_gold:
        after = "    def turn_constraint(" if given.environment else "    def row_of("
        text = text[: text.index("    def gold(")] + text[text.index(after) :]
    for old, new_name in (("my_task", name), ("MyTask", f"{title}Task"), ("MyOptions", f"{title}Options")):
        text = text.replace(old, new_name)
    path.write_text(text)
    print(f"wrote {path}\nnext: {PROGRAM} check {path}\nthen: {PROGRAM} train {path}")
    return 0


def tool(arguments: Sequence[str]) -> int:
    """Run a tool of a task."""
    words = list(arguments)
    if not words or words[0] in (*HELP_FLAGS, HELP_ALL):
        print(_all_tools())
        return 0 if words else 2
    task_class = find_task_class(words[0])
    tools = {**task_class.tools, **TOOLS_OF_ALL}
    if len(words) == 1 or words[1] in (*HELP_FLAGS, HELP_ALL):
        meanings = {}
        for name, target in tools.items():
            meanings[name] = (inspect.getdoc(_find_tool(target)) or "").split("\n\n")[0].replace("\n", " ")
        usage = f"usage: {PROGRAM} tool {words[0]} TOOL ...   (TOOL -h shows its options)"
        print("\n".join([usage, "", *columns(meanings)]))
        return 0
    name, *rest = words[1:]
    if name not in tools:
        raise ValueError(
            f"task {task_class.name!r} has no tool {name!r}{nearest(name, tools)}; its tools are: {', '.join(tools)}"
        )
    if name in TOOLS_OF_ALL:
        return TOOLS_OF_ALL[name](words[0], rest)
    return _find_tool(tools[name])(["-h" if word == HELP_ALL else word for word in rest]) or 0


def _all_tools() -> str:
    lines = [f"usage: {PROGRAM} tool TASK [TOOL ...]", "", "Run a tool of a task. 'tool TASK' lists its tools, and "
             "'tool TASK TOOL -h' shows how to use one.", ""]  # fmt: skip
    listed = {name: ", ".join(find_task_class(name).tools) for name in sorted(TASKS)}
    listed = {name: tools for name, tools in listed.items() if tools} | {"every TASK": ", ".join(TOOLS_OF_ALL)}
    return "\n".join([*lines, *columns(listed)])


def _find_tool(given: Any) -> Any:
    """The function of a tool, which is given as such or as "module:function"."""
    if callable(given):
        return given
    module, _, function = given.partition(":")
    return getattr(importlib.import_module(module), function)


def score(spec: str, arguments: Sequence[str]) -> int:
    """Score completions from a file, without a model."""
    parser = CommandParser(
        f"tool {spec} score",
        "--input FILE [--option value ...]",
        'Score completions without a model. Each line of the file is {"row": {...}, "completion": "..."}; each line '
        "of the output is a score as JSON. Lines that cannot be read are reported by number on standard error.",
        ["trl-grpo-tasks tool prompts score --input answers.jsonl"],
        task=spec,
    )
    parser.add_argument("--input", required=True, metavar="FILE", help="a .jsonl file, or - for standard input")
    parser.add_argument("--reward_timeout", type=float, default=30.0, metavar="X", help=REWARD_TIMEOUT_HELP)
    known, rest = parser.parse_known(arguments)
    task = task_with_options(spec, rest)
    if known.input != "-" and not Path(known.input).is_file():
        raise ValueError(f"--input {known.input}: this file does not exist")
    from ..rewards.executor import RewardExecutor
    from .eval import read_scored_line

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


# Tools that every task has: functions of the task and the words that follow.
TOOLS_OF_ALL: dict[str, Callable[[str, Sequence[str]], int]] = {"score": score}
