"""Options of the commands that sample, `solve` and `play`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from ..constraints.filters import SamplingFilters
from ..files import check_local_path
from ..task import Task
from ..training.ranges import check_ranges
from .arguments import option_names
from .command_parser import FLAG, CommandParser, task_of_run
from .help_screens import PROGRAM
from .task_commands import REWARD_TIMEOUT_HELP

NAMES = ("constrain", "temperature", "top_k", "top_p", "min_p", "max_completion_length", "rollout_batch_size", "seed",
         "reward_timeout")  # fmt: skip


def add_model(parser: CommandParser) -> None:
    """Add the first word of a command that samples."""
    help = "the folder of a run, model or adapter, a .gguf file, a Hub id, or tiny"
    parser.add_argument("model", metavar="RUN_OR_MODEL", help=help)


def add_sampling_options(parser: CommandParser) -> None:
    """Add the options of the task, of the distribution that is sampled from, and of scoring."""
    parser.add_task_of_run()
    group = parser.add_argument_group("sampling (default: as in the run)")
    group.add_argument("--constrain", **FLAG, help="sample under the task's constraint (default: if it has one)")
    group.add_argument("--temperature", type=float, metavar="X", help="0 takes the likeliest token")
    group.add_argument("--top_k", type=int, metavar="N", help="keep the N likeliest tokens")
    group.add_argument("--top_p", type=float, metavar="X", help="keep the likeliest tokens up to this probability")
    group.add_argument("--min_p", type=float, metavar="X", help="keep tokens this likely, relative to the likeliest")
    group.add_argument("--max_completion_length", type=int, metavar="N", help="maximum number of tokens")
    group.add_argument("--rollout_batch_size", type=int, metavar="N", help="completions at a time")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="seed of sampling (default: 0)")
    group.add_argument("--reward_timeout", type=float, default=30.0, metavar="X", help=REWARD_TIMEOUT_HELP)


def task_of_model(
    parser: CommandParser, known: Namespace, rest: Sequence[str], command: str, typed: Sequence[str]
) -> Task:
    """The task that is named, with its flags in `rest`, or that of the run `known.model`. The numbers in `known` are
    checked first, because everything else is slow. For a run on the Hub, `known.model` becomes its local folder."""
    check_ranges(vars(known), as_flags=True)
    SamplingFilters.of(vars(known))
    from ..report.run_folder import local_run, settings_of

    check_local_path(known.model, "model")
    given, known.model = known.model, local_run(known.model)
    if not known.task and not settings_of(known.model):
        raise ValueError(
            f"{given} is not a run, neither a folder nor on the Hub; name the task too: {PROGRAM} {command} "
            "--task TASK ..."
        )
    return task_of_run(known.task, rest, known.model, [command, *typed], option_names(parser))


def sampling_of(known: Namespace) -> dict[str, Any]:
    """The values of the options of sampling, as arguments of `Solver.from_pretrained`."""
    return {name: getattr(known, name) for name in NAMES}
