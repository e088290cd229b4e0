"""The command `trl-grpo-tasks`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version

from ..failures import known_failure
from ..registry import TASKS
from ..task import nearest
from . import run_commands, task_commands
from .errors import DEBUG, failed, takes_debug
from .generate import generate_command
from .help_screens import HELP_ALL, HELP_FLAGS, PROGRAM, columns
from .play import play
from .push import push
from .serve import serve
from .solve import solve
from .status import status

COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "train": run_commands.train,
    "eval": run_commands.evaluate,
    "solve": solve,
    "generate": generate_command,
    "play": play,
    "status": status,
    "report": run_commands.report,
    "archive": run_commands.archive,
    "export": run_commands.export,
    "push": push,
    "sweep": run_commands.sweep,
    "serve": serve,
    "score": task_commands.score,
    "check": task_commands.check,
    "new": task_commands.new,
    "tasks": task_commands.tasks,
    "recipes": task_commands.recipes,
    "task": task_commands.tool,
}
SUMMARIES = {
    "train [TASK] [--config RECIPE]": "train a model with GRPO: cold start, evaluation, report",
    "eval [TASK] --models NAME=MODEL ...": "compare models on held-out rows",
    "solve RUN_OR_MODEL --text T": "sample until the verifier accepts an answer",
    "generate [TASK] --model M --text T": "generate completions for a text of your own",
    "play RUN_OR_MODEL": "open a local page: ask, watch tokens and verdicts, compare before and after",
    "status RUN_DIR ...": "show where runs stand",
    "report RUN_DIR ...": "write the HTML report of a run, or a page that compares several runs",
    "archive RUN_DIR": "list and export the distinct successes of a run",
    "export RUN_DIR_OR_FILE": "write answers as files, --gguf: a model, --to: a task for another library",
    "push RUN_DIR": "upload the final model of a run to the Hub",
    "sweep [TASK] --search OPTION=VALUES": "search over options with Optuna",
    "serve [TASK] [--config RECIPE]": "start a vLLM server that samples under the task's constraint",
    "score TASK --input FILE": "score completions from a file, without a model",
    "check TASK": "check without a model that a task is consistent",
    "new NAME": "write a task of your own, NAME.py, that trains as it is",
    "tasks": "list the tasks",
    "recipes [TASK]": "list the recipes",
    "task NAME [TOOL ...]": "run a tool of a task, or list its tools",
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
        f"TASK is a built-in task ({', '.join(sorted(TASKS))}), a path to a .py file, a",
        "module such as my_package.my_task, or trl:module:function, a reward function for TRL.",
        "RECIPE is a name such as brick/single_gpu, or a YAML file.",
        "",
        "to begin:",
        f"  {PROGRAM} train brick                  train a tiny model on this machine in minutes",
        f"  {PROGRAM} new my_task                  write a task of your own",
        "",
        f"'{PROGRAM} COMMAND -h' (or 'help COMMAND') shows the options most people need,",
        f"'{PROGRAM} COMMAND {HELP_ALL}' all of them; '{PROGRAM} --version' shows the version.",
        f"With {DEBUG}, a command that fails prints the full traceback.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
