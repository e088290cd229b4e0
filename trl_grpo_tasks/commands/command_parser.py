"""CommandParser: the parser of a command with few options; its help is one screen and its errors are one line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..registry import TASKS, find_task_class, get_task, is_safe_by_name
from ..task import Task
from .arguments import make_parser, refuse_unknown, refuse_value, with_task_option
from .help_screens import HELP_ALL, LINES, PROGRAM, asks_for_help, examples, screen, task_options

TASK_HELP = "a built-in task, a .py file, a module, or PREFIX:NAME of another library; also as the first word"


class CommandParser(argparse.ArgumentParser):
    """Parser of `trl-grpo-tasks COMMAND`. `takes_task`: the first word may be the task, and the options of the task
    may follow, which `parse_with_task` returns unread."""

    def __init__(
        self, command: str, usage: str, description: str, examples: Sequence[str] = (), takes_task: bool = False
    ):
        super().__init__(prog=f"{PROGRAM} {command}", add_help=False, allow_abbrev=False)
        self._command, self._shown_usage, self._shown_description = command, usage, description
        self._examples, self._takes_task = list(examples), takes_task
        if takes_task:
            self.add_argument("--task", metavar="TASK", help=TASK_HELP)

    def error(self, message: str) -> Any:
        missing = message.partition("the following arguments are required: ")[2]
        if missing:
            raise ValueError(f"give {missing}; '{self.prog} -h' shows how")
        refuse_value(message)

    def parse_known(self, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """The options of the command, and the words that may be options of a task. Help is printed on request."""
        words = with_task_option(arguments) if self._takes_task else list(arguments)
        if asks_for_help(words):
            task = words[words.index("--task") + 1] if "--task" in words[:-1] else None
            print(self._screen(task, whole=HELP_ALL in words))
            raise SystemExit(0)
        return self.parse_known_args(words)

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """The options of a command that takes no others."""
        known, rest = self.parse_known(arguments)
        if rest and not rest[0].startswith("--"):
            raise ValueError(f"{rest[0]!r} is one word too many; '{self.prog} -h' shows how")
        refuse_unknown(rest, self)
        return known

    def _screen(self, task: str | None, whole: bool) -> str:
        listed = {}
        for action in self._actions:
            value = action.metavar or action.dest.upper()
            name = f"{action.option_strings[0]} {value}" if action.option_strings else str(value)
            listed[name.strip()] = action.help or ""
        lines = screen(f"{self.prog} {self._shown_usage}".rstrip(), self._shown_description, listed)
        end = examples(self._examples)
        if self._takes_task:
            more = [] if task and whole else ["", f"'{self.prog} TASK {HELP_ALL}' also lists the options of the task."]
            end += more
        own = task_options(task, 1000 if whole else LINES - len(lines) - len(end)) if task else []
        return "\n".join([*lines, *own, *end])


def truth_value(text: str) -> bool:
    """The value of a command-line option that is true or false."""
    known = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if text.lower() not in known:
        raise argparse.ArgumentTypeError(f"{text!r} must be true or false")
    return known[text.lower()]


def task_with_options(spec: str, flags: Sequence[str], also: Sequence[str] = ()) -> Task:
    """The task of this name, with its options from flags. For an unknown one, options of the task and of `also` are
    suggested."""
    options_class = find_task_class(spec).Options
    if not flags:
        return get_task(spec, options_class())
    parser = make_parser(options_class)
    options, rest = parser.parse_args_and_config(list(flags), return_remaining_strings=True)
    refuse_unknown(rest, parser, also=also)
    return get_task(spec, options)


def require_task(spec: str | None, command: str) -> str:
    """The task that was given; ValueError if none was."""
    if not spec:
        raise ValueError(
            f"name a task: {PROGRAM} {command} TASK; built-in tasks are {', '.join(sorted(TASKS))}, and your own is "
            "a .py file, a module, or trl:module:function"
        )
    return spec


def task_of_run(
    spec: str | None, flags: Sequence[str], run_dir: str, typed: Sequence[str], also: Sequence[str] = ()
) -> Task:
    """The task that is named, with its flags. Without flags, a built-in task has the options it had in the run. If the
    answers of the run have several turns, the task reads them. See `task_with_options` for `also`."""
    from ..report.run_folder import settings_of
    from ..training.repair import with_repair_of

    return with_repair_of(_one_turn_task(spec, flags, run_dir, typed, also), settings_of(run_dir))


def _one_turn_task(
    spec: str | None, flags: Sequence[str], run_dir: str, typed: Sequence[str], also: Sequence[str]
) -> Task:
    if spec and (flags or not _is_built_in_task_of(run_dir, spec)):
        return task_with_options(spec, flags, also)
    if flags:
        raise ValueError(f"{flags[0]}: to set options of a task, name it with --task; without it they are the run's")
    from ..report.page import task_of

    return task_of(run_dir, [PROGRAM, *typed])


def _is_built_in_task_of(run_dir: str, spec: str) -> bool:
    from ..report.run_folder import RunFolder

    return is_safe_by_name(spec) and Path(run_dir).is_dir() and RunFolder.read(run_dir).task_spec == spec
