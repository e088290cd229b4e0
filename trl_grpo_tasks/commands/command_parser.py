"""CommandParser: the parser of a command with few options; its help is one screen and its errors are one line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..registry import TASKS, find_task_class, get_task, is_safe_by_name
from ..task import Task
from .arguments import make_parser, refuse_unknown, refuse_value
from .command_words import with_task_option
from .help_screens import (
    HELP_ALL,
    LINES,
    PROGRAM,
    asks_for_help,
    help_word,
    mentions,
    screen,
)
from .old_names import refuse_old_options

TASK_HELP = "a built-in task, a .py file, a module, or PREFIX:NAME of another library; also as the first word"


def truth_value(text: str) -> bool:
    """The value of a command-line option that is true or false."""
    known = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if text.lower() not in known:
        raise argparse.ArgumentTypeError(f"{text!r} must be true or false")
    return known[text.lower()]


# The arguments of an option that is true or false; alone it is true.
FLAG: dict[str, Any] = {"type": truth_value, "nargs": "?", "const": True, "metavar": "BOOL"}


class CommandParser(argparse.ArgumentParser):
    """Parser of `trl-grpo-tasks COMMAND`. `task` is the task whose options may follow, which `parse_known` returns
    unread; with `takes_task`, it is the first word, or --task."""

    def __init__(
        self,
        command: str,
        usage: str,
        description: str,
        examples: Sequence[str] = (),
        *,
        task: str | None = None,
        takes_task: bool = False,
    ):
        super().__init__(prog=f"{PROGRAM} {command}", add_help=False, allow_abbrev=False)
        self._shown_usage, self._shown_description, self._examples = usage, description, list(examples)
        self._action_groups.remove(self._positionals)
        self._positionals, self._optionals.title = self._optionals, "options"
        self._task, self._takes_task = task, takes_task
        if takes_task:
            self.add_argument("--task", metavar="TASK", help=TASK_HELP)

    def error(self, message: str) -> Any:
        missing = message.partition("the following arguments are required: ")[2]
        if missing:
            raise ValueError(f"give {missing}; '{self.prog} -h' shows how")
        refuse_value(message)

    def add_task_of_run(self) -> None:
        """Add --task for a command whose first word is a run or a model."""
        help = "the task, if it is not the built-in one of the run; its options may follow"
        self.add_argument("--task", metavar="TASK", help=help)

    def parse_known(self, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """The options of the command, and the words that may be options of a task. Help is printed on request."""
        words = with_task_option(arguments) if self._takes_task else list(arguments)
        if asks_for_help(words):
            given = words[words.index("--task") + 1] if "--task" in words[:-1] else self._task
            print(self._screen(given, HELP_ALL in words, help_word(words)))
            raise SystemExit(0)
        refuse_old_options(self.prog.removeprefix(f"{PROGRAM} "), words)
        known, rest = self.parse_known_args(words)
        if rest and not (self._task or getattr(known, "task", None) or getattr(known, "config", None)):
            if not rest[0].startswith("--"):
                raise ValueError(f"{rest[0]!r} is one word too many; '{self.prog} -h' shows how")
            needs_task = "to set options of a task, name it with --task"
            refuse_unknown(rest, self, way_out=needs_task if hasattr(known, "task") else "")
        return known, rest

    def _screen(self, task: str | None, whole: bool, word: str | None) -> str:
        sections: dict[str, dict[str, str]] = {}
        for group in self._action_groups:
            listed = sections.setdefault(f"{group.title}", {})
            for action in group._group_actions:
                value = "" if action.nargs == 0 else action.metavar or action.dest.upper()
                name = f"{action.option_strings[0]} {value}" if action.option_strings else str(value)
                if mentions(word, name, action.help):
                    listed[name.strip()] = action.help or ""
        asks_for_task = self._takes_task and not (task and whole)
        more = f"'{self.prog} TASK {HELP_ALL}' also lists the options of the task." if asks_for_task else ""
        usage, lines = f"{self.prog} {self._shown_usage}".rstrip(), 1000 if whole else LINES
        return screen(
            usage, self._shown_description, sections, self._examples, more, task=task, lines=lines, word=word
        )


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
    from ..report.page import task_of
    from ..report.run_folder import RunFolder, settings_of
    from ..rewards.repair import with_repair_of

    is_looked_up = spec is not None and not flags and is_safe_by_name(spec) and Path(run_dir).is_dir()
    of_run = RunFolder.read(run_dir).task_spec if is_looked_up else None
    if spec and (flags or of_run != spec):
        task = task_with_options(spec, flags, also)
    else:
        task = task_of(run_dir, [PROGRAM, *typed])
    return with_repair_of(task, settings_of(run_dir))
