"""The command `trl-grpo-tasks`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version

from ..failures import known_failure
from ..registry import TASKS
from ..task import nearest
from . import task_commands
from .errors import DEBUG, failed, takes_debug
from .export import export
from .export_gguf import export_model
from .help_screens import HELP_ALL, HELP_FLAGS, PROGRAM, columns
from .old_names import OLD_COMMANDS
from .play import play
from .push import push
from .report import report
from .serve import serve
from .solve import solve


def _train(command: str, arguments: Sequence[str]) -> int:
    from .train import main  # slow

    return main(arguments, command)


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "train": partial(_train, "train"),
    "eval": partial(_train, "eval"),
    "solve": solve,
    "play": play,
    "report": report,
    "export": export,
    "export-model": export_model,
    "push": push,
    "serve": serve,
    "check": task_commands.check,
    "new": task_commands.new,
    "list": task_commands.list_tasks,
    "tool": task_commands.tool,
}
SUMMARIES = {
    "train [TASK] [--config RECIPE]": "train a model with GRPO",
    "eval RUN_OR_MODEL ...": "compare models on held-out rows",
    "solve RUN_OR_MODEL --text T": "sample until the verifier accepts an answer",
    "play RUN_OR_MODEL": "open a local page: ask, watch tokens and verdicts, compare before and after",
    "report RUN ...": "write the HTML report of a run, compare runs, --status: where they stand",
    "export RUN_OR_FILE": "write answers as files: the best samples of a run, or a file",
    "export-model RUN": "write the final model of a run as a GGUF file",
    "push RUN": "upload the final model of a run to the Hub",
    "serve RUN_OR_MODEL": "start a vLLM server that samples under the task's constraint",
    "check TASK": "check without a model that a task is consistent",
    "new NAME": "write a task of your own, NAME.py, that trains as it is",
    "list [TASK]": "list the tasks, or the recipes of one",
    "tool TASK [TOOL ...]": "run a tool of a task, such as score, or list its tools",
}


@takes_debug
def main(argv: Sequence[str]) -> int:
    """Run a command. Returns the exit status: 0 if it succeeded, 2 for wrong options, 1 for other errors."""
    arguments = list(argv)
    if arguments and arguments[0] == "help":
        arguments = [*arguments[1:], "-h"]
    if not arguments or arguments[0] in (*HELP_FLAGS, HELP_ALL):
        print(usage())
        return 0
    if arguments[0] in ("--version", "version"):
        print(f"{PROGRAM} {version('trl_grpo_tasks')}")
        return 0
    command, *rest = arguments
    if command in OLD_COMMANDS:
        print(f"error: {command!r} is now: {PROGRAM} {OLD_COMMANDS[command]}", file=sys.stderr)
        return 2
    if command not in COMMANDS:
        print(
            f"error: unknown command {command!r}{nearest(command, COMMANDS)}; commands are: {', '.join(COMMANDS)}",
            file=sys.stderr,
        )
        return 2
    try:
        return COMMANDS[command](rest)
    except SystemExit as end:  # after a help screen
        if end.code in (0, None):
            return 0
        raise
    except (ValueError, ImportError, OSError) as error:
        if command in ("train", "eval"):  # which report their own errors: this one is a bug
            raise
        return failed(error, 2)
    except Exception as error:
        if (failure := known_failure(error)) is None:
            raise
        return failed(error, 1, failure)


def usage() -> str:
    lines = [f"usage: {PROGRAM} COMMAND ...", "", "commands:", *columns(SUMMARIES, most=40), ""]
    lines += [
        "RUN is the folder of a run; MODEL also a folder, a Hub id, a .gguf file, or tiny.",
        f"TASK is a built-in task ({', '.join(sorted(TASKS))}), a path to a .py file, a",
        "module such as my_package.my_task, or trl:module:function, a reward function for TRL.",
        "RECIPE is a name such as brick/single_gpu, or a YAML file.",
        "",
        "to begin:",
        f"  {PROGRAM} train brick                  train a tiny model on this machine in minutes",
        f"  {PROGRAM} new my_task                  write a task of your own",
        "",
        f"'{PROGRAM} COMMAND -h' (or 'help COMMAND') shows the options most people need,",
        f"'{PROGRAM} COMMAND {HELP_ALL} [WORD]' all of them, or those about WORD.",
        f"'{PROGRAM} --version' shows the version.",
        f"With {DEBUG}, a command that fails prints the full traceback.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
