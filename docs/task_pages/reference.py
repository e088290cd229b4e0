"""Generated blocks of the reference pages: commands, options, metrics and public names, made from the code."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

from trl_grpo_tasks.commands.arguments import RunArguments, parse
from trl_grpo_tasks.commands.command_words import ALIASES
from trl_grpo_tasks.commands.main import COMMANDS, main
from trl_grpo_tasks.registry import TASKS, find_task_class

from . import metric_meanings
from .blocks import table

WIDTH = "100"  # of help texts, in characters
API_PAGE = Path(__file__).parents[1] / "reference" / "api.md"


def command_screens() -> str:
    """The text of -h of the program and of each command: the whole of commands.txt."""
    return "\n\n\n".join(_said_by(*words, "-h") for words in [(), *((name,) for name in COMMANDS)]) + "\n"


def _said_by(*arguments: str) -> str:
    said = io.StringIO()
    with (
        patch.dict(os.environ, COLUMNS=WIDTH),
        contextlib.redirect_stdout(said),
        contextlib.suppress(SystemExit),
    ):
        main(arguments)
    return said.getvalue().strip()


def tools() -> str:
    rows = []
    for task in sorted(TASKS):
        for tool, target in find_task_class(task).tools.items():
            module = import_module(target.partition(":")[0])
            rows.append((f"`trl-grpo-tasks tool {task} {tool}`", _first_line(module)))
    return table(["command", "what it does"], rows)


def run_options() -> str:
    return _option_table(option for option in fields(RunArguments) if option.init)


def aliases() -> str:
    return table(["short name", "option"], ((f"`{short}`", f"`{option}`") for short, option in ALIASES.items()))


def task_defaults() -> str:
    """The training options whose defaults a task changes."""
    rows = []
    for name in sorted(TASKS):
        changed = ", ".join(f"`--{key}` {_code(value)}" for key, value in find_task_class(name).defaults.items())
        rows.append((f"[{name}](../tasks/{name}.md#options)", changed))
    return table(["task", "defaults that it changes"], rows)


def grpo_options() -> str:
    """What TaskGRPOConfig adds to TRL's: the core's options under the headings that are comments in its source, then
    those of the extras."""
    from trl_grpo_tasks import TaskGRPOConfig

    with patch.object(find_task_class("prompts"), "defaults", {}):
        _, _, on_command_line, _ = parse(["--task", "prompts"])
    groups: dict[str, list[Field]] = {}
    own = TaskGRPOConfig.own_options()
    for line in inspect.getsource(TaskGRPOConfig).splitlines():
        if heading := re.fullmatch(r"    # (.+)", line):
            groups[heading[1]] = group = []
        elif (found := re.match(r"    (\w+): ", line)) and found[1] in own[""]:
            group.append(TaskGRPOConfig.__dataclass_fields__[found[1]])
    for heading, names in own.items():
        if heading:
            groups[heading] = [TaskGRPOConfig.__dataclass_fields__[name] for name in names]
    return "\n".join(
        f"### {heading}\n\n{_option_table(group, on_command_line)}" for heading, group in groups.items() if group
    )


def task_metrics() -> str:
    return _metrics(metric_meanings.TRAINING)


def trl_metrics() -> str:
    return _metrics(metric_meanings.TRL)


def evaluation_metrics() -> str:
    return _metrics(metric_meanings.EVALUATION)


def _metrics(meanings: Mapping[str, str]) -> str:
    return table(["metric", "meaning"], ((f"`{name}`", text) for name, text in meanings.items()))


def names() -> str:
    """What the page of the Python API documents, with the first line of each docstring."""
    rows = []
    page = API_PAGE.read_text(encoding="utf-8")
    for path in re.findall(r"^\.\. auto(?:class|function):: (\S+)$", page, re.MULTILINE):
        module, _, name = path.rpartition(".")
        rows.append((f"`{path}`", _first_line(getattr(import_module(module), name))))
    return table(["name", "what it is"], rows)


def _first_line(documented: Any) -> str:
    """The first sentence of a docstring."""
    paragraph = " ".join((inspect.getdoc(documented) or "").split("\n\n")[0].split())
    return re.split(r"(?<=\.) ", paragraph)[0]


def _option_table(options: Iterable[Field], on_command_line: object = None) -> str:
    rows = ((f"`--{o.name}`", _default_of(o, on_command_line), _escaped(o.metadata["help"])) for o in options)
    return table(["option", "default", "meaning"], rows)


def _default_of(option: Field, on_command_line: object) -> str:
    """The default of an option; where the command line has another than the dataclass, both."""
    default = option.default_factory() if option.default_factory is not MISSING else option.default
    value = getattr(on_command_line, option.name, default)
    return _code(value) if value == default else f"{_code(value)} (Python: {_code(default)})"


def _code(value: Any) -> str:
    """A value as it is typed."""
    if value is None or value in ("", [], ()):
        return "none"
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)
    return f"`{text}`"


def _escaped(text: str) -> str:
    """Plain text as a cell of a Markdown table, with options set as code."""
    text = re.sub(r"([*<\[\\])", r"\\\1", " ".join(text.split()))
    return re.sub(r"(?<![\w`-])(--\w+)", r"`\1`", text)
