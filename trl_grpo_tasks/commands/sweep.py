"""`trl-grpo-tasks train --search`: search over options with Optuna. Each trial is a run in its own folder and process;
finished trials are not repeated."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..files import MODEL_FILES, not_through_a_link, write_atomically
from ..models.checkpoints import newest_complete
from ..redact import redacted, redacted_words
from ..report.run_folder import RESULTS_FILE, SETTINGS_FILE, duration
from ..report.sweep_page import SWEEP_FILE, write_sweep_report
from ..task import Task, printable, rows_of
from .arguments import parse
from .command_parser import CommandParser
from .command_words import ALIASES
from .help_screens import add_search_options
from .lock import locked
from .plan import check_writable

JOURNAL_FILE = "optuna.journal"
CONSOLE_FILE = "console.txt"  # of a trial: its output
RANGE = re.compile(r"(?P<low>[-+.\deE]+?)\.\.(?P<high>[-+.\deE]+?)(?P<log>:log)?")


def sweep(arguments: Sequence[str]) -> int:
    """Run a sweep. Trials are runs of `train` with the options given here and those that Optuna chooses. The same
    command resumes a sweep that was stopped."""
    parser = CommandParser("train", "", "")  # the help of train is in help_screens.py
    add_search_options(parser)
    parser.add_argument("--out", "--output_dir", dest="output_dir", default="outputs/sweep")
    known, rest = parser.parse_known_args(arguments)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError("--search starts runs in processes of their own; start it with trl-grpo-tasks train")
    if known.search_trials < 1:
        raise ValueError(f"--search_trials {known.search_trials} must be at least 1")
    try:
        import optuna
        from optuna.storages.journal import JournalFileBackend, JournalStorage
    except ImportError as error:
        raise ImportError("--search needs Optuna; pip install 'trl_grpo_tasks[sweep]'") from error
    read = [_read_values(text) for text in known.search]
    space = dict(read)
    if len(space) < len(read):
        raise ValueError(f"--search {' '.join(known.search)}: give each option once")
    task, seed = _check(space, rest, known.output_dir, known.search_metric)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    folder = Path(known.output_dir)
    with locked(folder, "sweep"):
        storage = JournalStorage(JournalFileBackend(str(folder / JOURNAL_FILE)))
        study = optuna.create_study(storage=storage, study_name="sweep", direction="maximize", load_if_exists=True)
        asked = {"search": known.search, "metric": known.search_metric, "options": redacted_words(rest)}
        if study.user_attrs.get("asked", asked) != asked:
            raise ValueError(
                f"{folder} holds a sweep with other options; repeat its command to resume it, or choose another --out"
            )
        study.set_user_attr("asked", asked)
        # With the same seed again, the sampler would propose the first trials again.
        study.sampler = optuna.samplers.TPESampler(seed=seed + len(study.trials))
        return _Sweep(study, space, folder, known, rest, task).run()


class _Sweep:
    def __init__(self, study: Any, space: dict[str, Any], folder: Path, known: Any, rest: list[str], task: str):
        self._study, self._space, self._folder = study, space, folder
        self._metric, self._trials = known.search_metric, known.search_trials
        self._rest, self._task = rest, task

    def run(self) -> int:
        from optuna.trial import TrialState

        unfinished = [trial.number for trial in self._study.trials if trial.state == TrialState.RUNNING]
        done = len(self._study.trials) - len(unfinished)
        print(f"{self._trials} trials, {done} of them done; output in {self._folder}", flush=True)
        while done < self._trials:
            number = unfinished.pop(0) if unfinished else self._study.ask(self._space).number
            self._write()
            try:
                self._try(number)
            except KeyboardInterrupt as interruption:
                from .interrupt import exit_status

                print("stopped; the same command resumes the sweep", file=sys.stderr)
                return exit_status(interruption)
            self._write()
            done += 1
        page = write_sweep_report(self._folder)
        completed = [trial for trial in self._study.trials if trial.state == TrialState.COMPLETE]
        if completed:
            best = self._study.best_trial
            print(f"\nbest: trial {best.number}, {self._metric} {best.value:.3f}\n{self._command(best.params)}")
            if len(completed) > 1:
                print(
                    "chosen on the rows that it is measured on, it looks better than it is: try it with another --seed"
                )
        print(f"report: {page}")
        return 0 if completed else 1

    def _try(self, number: int) -> None:
        from optuna.trial import TrialState

        params = self._study.trials[number].params
        folder = self._folder / f"trial-{number:03d}"
        folder.mkdir(exist_ok=True)
        words = [*self._rest, *_flags(params), "--output_dir", str(folder)]
        if newest_complete(folder):
            words.append("--resume_from_checkpoint")
        else:  # it starts again, even if it was stopped after its model was saved
            for name in MODEL_FILES:
                (folder / name).unlink(missing_ok=True)
        start = time.monotonic()
        code = _run([sys.executable, "-m", "trl_grpo_tasks.commands.main", "train", *words], folder / CONSOLE_FILE)
        shown = "  ".join(f"{name} {_text(value)}" for name, value in params.items())
        took = duration(time.monotonic() - start)
        if code != 0:
            lines = (folder / CONSOLE_FILE).read_text(errors="replace").splitlines()
            reason = next((line for line in reversed(lines) if line.strip()), f"exit status {code}")
            self._study.set_user_attr(f"reason {number}", redacted(reason))
            self._study.tell(number, state=TrialState.FAIL)
            print(f"trial {number}: failed ({printable(reason)})  {shown}  ({took})", flush=True)
            return
        after = json.loads((folder / RESULTS_FILE).read_text(encoding="utf-8"))["evaluations"][-1]
        if self._metric not in after["metrics"]:
            raise ValueError(
                f"--search_metric {self._metric}: the evaluation has no such metric; its metrics are: "
                + ", ".join(after["metrics"])
            )
        value = after["metrics"][self._metric]
        self._study.tell(number, value) if value == value else self._study.tell(number, state=TrialState.FAIL)
        low, high = after["intervals"].get(self._metric, (value, value))
        print(f"trial {number}: {self._metric} {value:.3f} [{low:.3f}, {high:.3f}]  {shown}  ({took})", flush=True)

    def _command(self, params: dict[str, Any]) -> str:
        return f"trl-grpo-tasks train {shlex.join(redacted_words([*self._rest, *_flags(params)]))}"

    def _write(self) -> None:
        """Write the data and the page of the sweep; called after each trial."""
        trials = [
            {
                "number": trial.number,
                "state": trial.state.name.lower(),
                "params": trial.params,
                "value": trial.value,
                "reason": self._study.user_attrs.get(f"reason {trial.number}", ""),
                "seconds": trial.duration.total_seconds() if trial.duration else None,
                "command": self._command(trial.params),
            }
            for trial in self._study.trials
        ]
        log = [name for name, values in self._space.items() if getattr(values, "log", False)]
        content = {"task": self._task, "metric": self._metric, "log": log, "wanted": self._trials}
        write_atomically(self._folder / SWEEP_FILE, json.dumps(content | {"trials": trials}, indent=1))
        write_sweep_report(self._folder)


def _read_values(text: str) -> tuple[str, Any]:
    """The name of an option and Optuna's distribution of its values."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    name, equals, values = text.partition("=")
    if not equals or not name.isidentifier() or not values:
        raise ValueError(f"--search {text}: write NAME=LOW..HIGH, NAME=LOW..HIGH:log or NAME=ONE,OTHER")
    match = RANGE.fullmatch(values)
    if match is None:
        if ".." in values:
            raise ValueError(f"--search {text}: both ends of a range must be numbers, as in 1e-5..1e-3:log")
        return name, CategoricalDistribution(values.split(","))
    try:
        low, high, log = match["low"], match["high"], match["log"] is not None
        if set(low + high) & set(".eE"):
            return name, FloatDistribution(float(low), float(high), log=log)
        return name, IntDistribution(int(low), int(high), log=log)
    except ValueError as error:
        raise ValueError(f"--search {text}: {error}") from error


def _check(space: dict[str, Any], rest: list[str], output_dir: str, metric: str) -> tuple[str, int]:
    """The name of the task and the seed. The ends of all ranges are parsed as `train` would parse them."""
    from optuna.distributions import CategoricalDistribution

    check_writable(output_dir)
    if (Path(output_dir) / SETTINGS_FILE).is_file():
        raise ValueError(f"{output_dir} holds a run, whose report would be overwritten; choose another --out")
    for name in space:
        if any(option in rest for option in _spellings(f"--{name}")):
            raise ValueError(f"--{name} is both searched and given; leave one of them out")
    ends = {
        name: d.choices if isinstance(d, CategoricalDistribution) else (d.low, d.high) for name, d in space.items()
    }
    first = {name: values[0] for name, values in ends.items()}
    trials = [first | {name: value} for name, values in ends.items() for value in values]
    for params in trials:
        task, run, args, _ = parse([*rest, *_flags(params), "--output_dir", output_dir])
    if not run.eval_before_and_after or run.eval_only:
        raise ValueError(
            "a sweep compares evaluations after GRPO; leave --eval_before_and_after on and --eval_only off"
        )
    if args.push_to_hub:
        raise ValueError(
            "runs of a sweep cannot be pushed; train the best one again with the command printed at the end"
        )
    _check_metric(metric, task, run, args)
    return task.name, args.seed


def _check_metric(name: str, task: Task, run: Any, args: Any) -> None:
    """Raise ValueError for a metric that evaluations do not have, before the first trial."""
    from ..evaluation.samples import Sample
    from ..evaluation.summary import summarise

    samples = []
    for row in rows_of(task, "test", args.eval_rows, args.seed):
        score = task.score(row, "")
        samples += [Sample(row, "", 0, None if score is None else score.as_dict())] * run.samples
    metrics, _ = summarise(samples, run.samples, task.facts)
    known = [*dict.fromkeys([*metrics, *task.weights, "seconds"])]
    if name not in known and run.editor is None:  # editors add counts of their own
        listed = ", ".join(known)
        raise ValueError(f"--search_metric {name}: evaluations have no such metric; their metrics are: {listed}")


def _spellings(option: str) -> list[str]:
    """The option, and its other name where it has one."""
    return [option, *(other for pair in ALIASES.items() if option in pair for other in pair if other != option)]


def _flags(params: dict[str, Any]) -> list[str]:
    return [word for name, value in params.items() for word in (f"--{name}", _text(value))]


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _run(command: Sequence[str], console: Path) -> int:
    """Run a trial and return its exit status. Ctrl-C reaches it as well, SIGTERM is passed on; then it saves a
    checkpoint, which is waited for."""
    asked: list[int] = []
    with open(console, "a", encoding="utf-8", opener=not_through_a_link) as said:
        running = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=os.environ)

        def pass_on(number: int, _: Any) -> None:
            asked.append(number)
            if number == signal.SIGTERM:
                running.send_signal(number)

        earlier = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            code = running.wait()
        finally:
            for number, handler in earlier.items():
                signal.signal(number, handler)
    if asked or code in (130, 143):
        from .interrupt import SignalError

        raise SignalError(asked[0] if asked else code - 128)
    return code
