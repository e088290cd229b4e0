"""Options of the commands that sample (`solve`, `generate`, `play`), and the `Solver` that they describe."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..constraints.filters import SamplingFilters
from ..files import check_local_path
from ..task import Task
from ..training.options.ranges import check_ranges
from .arguments import option_names
from .command_parser import CommandParser, task_of_run, truth_value
from .help_screens import PROGRAM
from .task_commands import REWARD_TIMEOUT_HELP

if TYPE_CHECKING:
    from ..evaluation.solver import Solver

POLICY_NAMES = (
    *("constrain", "temperature", "top_k", "top_p", "min_p", "max_completion_length"),
    *("rollout_batch_size", "seed", "reward_timeout"),
)
NAMES = ("editor", *POLICY_NAMES)


def add_sampling_options(parser: CommandParser, output_dir: str) -> None:
    """Add the options of sampling; `output_dir` is the default folder of the files."""
    parser.add_argument(
        "--output_dir", default=output_dir, metavar="DIR", help=f"folder of the files (default: {output_dir})"
    )
    parser.add_argument("--editor", metavar="NAME", help="let an editor of the task delete generated text")
    add_policy_options(parser)


def add_policy_options(parser: CommandParser) -> None:
    """Add the options of the distribution that is sampled from, and of scoring."""
    parser.add_argument(
        "--constrain", type=truth_value, nargs="?", const=True, metavar="BOOL",
        help="sample under the task's constraint (default: true if the task has one)",
    )  # fmt: skip
    parser.add_argument(
        "--temperature", type=float, metavar="X", help="0 takes the likeliest token (default: the run's)"
    )
    for name, kind, letter in (("top_k", int, "N"), ("top_p", float, "X"), ("min_p", float, "X")):
        parser.add_argument(f"--{name}", type=kind, metavar=letter, help="sampling filter (default: the run's)")
    parser.add_argument(
        "--max_completion_length", type=int, metavar="N", help="maximum number of tokens (default: the run's)"
    )
    parser.add_argument(
        "--rollout_batch_size", type=int, metavar="N", help="completions at a time (default: as many as fit)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of sampling (default: 0)")
    parser.add_argument("--reward_timeout", type=float, default=30.0, metavar="X", help=REWARD_TIMEOUT_HELP)


def task_of_model(
    parser: CommandParser, known: Namespace, rest: Sequence[str], command: str, typed: Sequence[str]
) -> Task:
    """The task that is named, with its flags in `rest`, or that of the run `known.model`. The numbers in `known` are
    checked first, because everything else is slow. For a run on the Hub, `known.model` becomes its local folder."""
    check_ranges(vars(known), as_flags=True)
    SamplingFilters.of(vars(known))
    from ..report.run_folder import local_run, settings_of

    options = option_names(parser)
    check_local_path(known.model, "--model" if "--model" in options else "model")
    given, known.model = known.model, local_run(known.model)
    if not known.task and not settings_of(known.model):
        raise ValueError(
            f"{given} is not a run, neither a folder nor on the Hub; name the task too: {PROGRAM} {command} "
            "--task TASK ..."
        )
    return task_of_run(known.task, rest, known.model, [command, *typed], options)


def solver_of(known: Namespace, task: Task, **more: Any) -> Solver:
    """Load the model `known.model` with the options of sampling; `more` are further arguments of `from_pretrained`."""
    from ..evaluation.solver import Solver
    from .plan import check_writable

    check_writable(known.output_dir)
    return Solver.from_pretrained(known.model, task, folder=known.output_dir, **sampling_of(known), **more)


def sampling_of(known: Namespace, names: Sequence[str] = NAMES) -> dict[str, Any]:
    """The values of the options of sampling, as arguments of `Solver.from_pretrained`."""
    return {name: getattr(known, name) for name in names}
