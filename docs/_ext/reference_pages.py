"""Sphinx extension: the reference pages of commands, options and metrics, made from the code while the site is built.

A page says where a part goes with a line such as `<!-- generated: commands -->`.
"""

import contextlib
import inspect
import io
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any
from unittest.mock import patch

import metric_meanings
from docstrings import to_rst

from trl_grpo_tasks.commands.arguments import ALIASES, RunArguments, parse
from trl_grpo_tasks.commands.main import COMMANDS, main
from trl_grpo_tasks.registry import TASKS, find_task_class

WIDTH = "100"  # of help texts, in characters
MARK = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)


def commands() -> str:
    """Each command with the text of its -h, and the tools of the tasks."""
    parts = [screen("-h"), *(f"## {name}\n\n{screen(name, '-h')}" for name in COMMANDS), "## Tools of tasks\n"]
    for task in sorted(TASKS):
        parts += [
            f"### task {task} {tool}\n\n{screen('task', task, tool, '-h')}" for tool in find_task_class(task).tools
        ]
    return "\n".join(parts)


def screen(*arguments: str) -> str:
    return f"```text\n{said_by(*arguments)}\n```\n"


def said_by(*arguments: str) -> str:
    said = io.StringIO()
    with (
        patch.dict(os.environ, COLUMNS=WIDTH),
        contextlib.redirect_stdout(said),
        contextlib.suppress(SystemExit),
    ):
        main(arguments)
    return said.getvalue().strip()


def run_options() -> str:
    return option_table(option for option in fields(RunArguments) if option.init)


def aliases() -> str:
    return table(("short name", "option"), ((f"`{short}`", f"`{option}`") for short, option in ALIASES.items()))


def task_options() -> str:
    parts = []
    for name in sorted(TASKS):
        task = find_task_class(name)
        own = fields(task.Options)
        parts += [f"### {name}\n", option_table(own) if own else "This task has no options of its own.\n"]
        if task.defaults:
            parts.append("It changes these defaults of training options; recipes and flags override them.\n")
            parts.append(table(("option", "default"), ((f"`--{key}`", code(v)) for key, v in task.defaults.items())))
    return "\n".join(parts)


def grpo_options() -> str:
    """What TaskGRPOConfig adds to TRL's, under the headings that are comments in its source."""
    from trl_grpo_tasks import TaskGRPOConfig

    with patch.object(find_task_class("prompts"), "defaults", {}):
        _, _, on_command_line, _ = parse(["--task", "prompts"])
    groups: dict[str, list[Field]] = {}
    for line in inspect.getsource(TaskGRPOConfig).splitlines():
        if heading := re.fullmatch(r"    # (.+)", line):
            groups[heading[1]] = group = []
        elif (found := re.match(r"    (\w+): ", line)) and found[1] in TaskGRPOConfig.__annotations__:
            group.append(TaskGRPOConfig.__dataclass_fields__[found[1]])
    return "\n".join(
        f"### {heading}\n\n{option_table(group, on_command_line)}" for heading, group in groups.items() if group
    )


def config() -> str:
    """TaskGRPOConfig with the fields of its own; autodoc does not know their help."""
    from trl_grpo_tasks import TaskGRPOConfig

    lines = ["```{eval-rst}", ".. autoclass:: trl_grpo_tasks.TaskGRPOConfig", ""]
    for name, kind in TaskGRPOConfig.__annotations__.items():
        field = TaskGRPOConfig.__dataclass_fields__[name]
        lines += [f"   .. attribute:: {name}", f"      :type: {kind}", f"      :value: {field.default!r}", ""]
        lines += [f"      {line}" for line in to_rst([field.metadata["help"]])] + [""]
    return "\n".join([*lines, "```"])


def metrics(which: str) -> str:
    meanings: dict[str, str] = getattr(metric_meanings, which)
    return table(("metric", "meaning"), ((f"`{name}`", text) for name, text in meanings.items()))


PARTS: Mapping[str, Callable[[], str]] = {
    "commands": commands,
    "run_options": run_options,
    "aliases": aliases,
    "task_options": task_options,
    "grpo_options": grpo_options,
    "config": config,
    "task_metrics": lambda: metrics("TRAINING"),
    "trl_metrics": lambda: metrics("TRL"),
    "evaluation_metrics": lambda: metrics("EVALUATION"),
}


def option_table(options: Iterable[Field], on_command_line: object = None) -> str:
    rows = ((f"`--{o.name}`", default_of(o, on_command_line), escaped(o.metadata["help"])) for o in options)
    return table(("option", "default", "meaning"), rows)


def default_of(option: Field, on_command_line: object) -> str:
    """The default of an option; where the command line has another than the dataclass, both."""
    default = option.default_factory() if option.default_factory is not MISSING else option.default
    value = getattr(on_command_line, option.name, default)
    return code(value) if value == default else f"{code(value)} (Python: {code(default)})"


def code(value: Any) -> str:
    """A value as it is typed."""
    if value is None or value in ("", [], ()):
        return "none"
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)
    return "`" + text.replace("|", r"\|") + "`"


def escaped(text: str) -> str:
    """Plain text as a cell of a Markdown table, with options set as code."""
    text = re.sub(r"([|*<\[\\])", r"\\\1", " ".join(text.split()))
    return re.sub(r"(?<![\w`-])(--\w+)", r"`\1`", text)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    names = list(head)
    lines = [names, ["---"] * len(names), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def fill_in(app: Any, page: str, source: list[str]) -> None:
    source[0] = MARK.sub(lambda mark: PARTS[mark[1]](), source[0])


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", fill_in)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
