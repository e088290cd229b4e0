"""`trl-grpo-tasks report`: the page of a run, a page that compares runs, or where runs stand, from the files in their
folders. Runs are not disturbed."""

from __future__ import annotations

from collections.abc import Sequence

from ..models.checkpoints import checkpoint_folders
from ..report.run_folder import RunFolder, duration, largest_k
from ..task import printable
from .arguments import refuse_unknown
from .command_parser import CommandParser, task_of_run
from .lock import running_process

# The metrics of the line about training, as far as they are logged; the largest pass@k is added.
SHOWN = {"rewards/success/mean": "success", "reward": "reward", "entropy": "entropy", "kl": "KL"}


def report(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "report",
        "RUN [RUN ...] [--status] [--out FILE] [--task TASK]",
        "Write report.html into the folder of a run: curves, samples before and after training, "
        "timings and settings. Several runs are compared on one page: evaluations, curves, and the settings "
        "that differ. With --status, print for each run whether it is training, its step, the time it has taken and "
        "still needs, metrics, evaluations and the newest checkpoint, and write nothing. Runs may still be training.",
        [
            "trl-grpo-tasks report outputs/demo",
            "trl-grpo-tasks report outputs/my_task --task my_task.py",
            "trl-grpo-tasks report outputs/first outputs/second --out comparison.html",
            "watch trl-grpo-tasks report --status outputs/*",
        ],
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="the folder of a run")
    parser.add_argument("--status", action="store_true", help="print where the runs stand; no page is written")
    parser.add_argument("--out", metavar="FILE", help="the page that compares several runs (default: comparison.html)")
    parser.add_task_of_run()
    known, rest = parser.parse_known(arguments)
    from ..report.comparison import write_comparison
    from ..report.page import write_report
    from .quiet import quiet_third_party_logging

    if known.status:
        print("\n".join(describe(RunFolder.read(folder)) for folder in known.runs))
        return 0
    if len(known.runs) > 1:
        refuse_unknown(rest, parser)
        print(write_comparison(known.runs, known.out or "comparison.html"))
        return 0
    if known.out is not None:
        raise ValueError("--out is for a page that compares several runs; the report of one run is in its folder")
    (run_dir,) = known.runs
    quiet_third_party_logging()
    print(write_report(run_dir, task_of_run(known.task, rest, run_dir, ["report", *arguments])))
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
