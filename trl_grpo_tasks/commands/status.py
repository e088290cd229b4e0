"""`trl-grpo-tasks status`: where runs stand, from the files in their folders. Runs are not disturbed."""

from __future__ import annotations

from collections.abc import Sequence

from ..models.checkpoints import checkpoint_folders
from ..report.run_folder import RunFolder, duration, largest_k
from ..task import printable
from .command_parser import CommandParser
from .lock import running_process

# The metrics of the line about training, as far as they are logged; the largest pass@k is added.
SHOWN = {"rewards/success/mean": "success", "reward": "reward", "entropy": "entropy", "kl": "KL"}


def status(arguments: Sequence[str]) -> int:
    """Show where runs stand."""
    parser = CommandParser(
        "status",
        "RUN_DIR [RUN_DIR ...]",
        "Show for each run whether it is training, its step, the time it has taken and still needs, metrics of the "
        "first and the latest log, evaluations, and the newest checkpoint.",
        ["trl-grpo-tasks status outputs/demo", "watch trl-grpo-tasks status outputs/*"],
    )
    parser.add_argument("run_dirs", nargs="+", metavar="RUN_DIR", help="the --output_dir of a run")
    known = parser.parse(arguments)
    print("\n".join(describe(RunFolder.read(folder)) for folder in known.run_dirs))
    return 0


def describe(run: RunFolder) -> str:
    """Describe a run in a few lines that are safe to print."""
    model = run.settings.get("model", {}).get("name")
    lines = [f"{run.path}: {run.task_spec or 'unknown task'}{f', model {model}' if model else ''}"]
    lines += [f"  {line}" for line in (_progress(run), _training(run), *_evaluations(run), _checkpoint(run)) if line]
    return "\n".join(map(printable, lines))


def _progress(run: RunFolder) -> str:
    process = running_process(run.path, "train")
    if run.is_empty:
        return f"running ({process}): no step yet" if process else "no settings, results or metrics: not a run folder"
    steps = f"step {run.last_step:,}{f' of {run.planned_steps:,}' if run.planned_steps else ''}"
    taken = f", {duration(run.seconds)} so far" if run.seconds else ""
    if process is not None:
        left = f", about {duration(run.seconds_left)} left" if run.seconds_left else ""
        return f"running ({process}): {steps}{taken}{left}"
    if run.is_finished:
        return f"finished: {steps} in {duration(run.seconds or 0)}"
    if not run.settings.get("training"):
        return "evaluation only"
    return f"not running: {steps}{taken}; --resume_from_checkpoint continues it"


def _training(run: RunFolder) -> str:
    k = largest_k(name for line in run.metrics for name in line)
    parts = []
    for name, label in {**SHOWN, **({f"pass@{k}": f"pass@{k}"} if k > 1 else {})}.items():
        if points := run.curve(name):
            first, last = (f"{value:.3g}" for _, value in (points[0], points[-1]))
            parts.append(f"{label} {first} -> {last}" if len(points) > 1 else f"{label} {last}")
    return f"in training: {', '.join(parts)}" if parts else ""


def _evaluations(run: RunFolder) -> list[str]:
    lines = []
    for one in run.evaluations:
        shown = ("success", "reward", f"pass@{largest_k(one['metrics'])}")
        names = [name for name in shown if name in one["metrics"]]
        lines.append(f"held-out, {one['name']}: " + ", ".join(f"{name} {one['metrics'][name]:.3g}" for name in names))
    return lines


def _checkpoint(run: RunFolder) -> str:
    newest = next(iter(checkpoint_folders(run.path)), None)
    return "" if newest is None else f"newest checkpoint: step {int(newest.name.partition('-')[2]):,}"
