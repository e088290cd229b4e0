"""Callbacks that report on a run: metrics as JSON lines, console lines, a live report, and hints when training cannot
work."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import TrainerCallback

from ..failures import FailureNotice, first_line
from ..files import not_through_a_link, write_atomically
from ..report.gallery import Pictures
from ..report.page import write_report
from ..report.run_folder import METRICS_FILE, OUTCOME_FILE, PERFORMANCE_FILE, duration
from ..task import Task
from .collapse import collapse

# Wall-clock and cache figures differ from run to run; the metrics file holds only what a resumed run repeats exactly.
PERFORMANCE_KEYS = ("perf/", "step_time", "train_", "runtime", "samples_per_second", "steps_per_second")
SHORT = 10.0  # seconds; no estimate is printed for less
# Shares from which hints are given.
MOST_WASTED = 0.8  # of groups with equal rewards, or of completions that are cut off
MOST_UNSCORED = 0.2
MASTERED = 0.9  # success from which groups with equal rewards are expected
FEW = 0.01
WARM_UP, MEASURED = 2, 3  # steps that include start-up costs, and the steps after them that are timed


class MetricsFile(TrainerCallback):
    """Writes one JSON line per log step. On resuming, lines after the resumed step are dropped and written again.

    Lines that cannot be written are kept in memory, and written with later ones. `write` raises OSError for the rest.
    """

    def __init__(self, say: Any = tqdm.write):
        self._unwritten: dict[Path, str] = {}
        self._notice = FailureNotice(say)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        (Path(args.output_dir) / OUTCOME_FILE).unlink(missing_ok=True)  # of an earlier end, after which it is resumed
        for name in (METRICS_FILE, PERFORMANCE_FILE):
            path = Path(args.output_dir) / name
            if os.path.lexists(path):  # a link is replaced, also one that leads nowhere
                lines = path.read_text().splitlines() if path.is_file() and state.global_step else []
                write_atomically(path, "".join(f"{line}\n" for line in lines if _step_of(line) <= state.global_step))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        # JSON has no NaN and no infinity.
        logs = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in logs.items()}
        performance = {k: v for k, v in logs.items() if k.removeprefix("eval_").startswith(PERFORMANCE_KEYS)}
        metrics = {k: v for k, v in logs.items() if k not in performance}
        head = {"step": state.global_step}
        for name, values in ((METRICS_FILE, metrics), (PERFORMANCE_FILE, performance)):
            if values and set(values) - {"epoch", "total_flos"}:
                path = Path(args.output_dir) / name
                self._unwritten[path] = self._unwritten.get(path, "") + json.dumps(head | values) + "\n"
        try:
            self.write()
        except OSError as error:
            self._notice.failed(
                f"metrics could not be written ({first_line(error)}); training continues, and they are kept in memory "
                "until they can be written"
            )
        else:
            self._notice.succeeded()

    def write(self) -> None:
        """Write the lines that are not in their file yet."""
        for path in list(self._unwritten):
            path.parent.mkdir(parents=True, exist_ok=True)
            size = path.stat().st_size if path.is_file() else 0
            try:
                with open(path, "a", opener=not_through_a_link) as file:
                    file.write(self._unwritten[path])
            except OSError:
                with suppress(OSError):  # remove what was written of these lines
                    os.truncate(path, size)
                raise
            del self._unwritten[path]


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):  # the line that was being written when the run was killed
        return math.inf


class Console(TrainerCallback):
    """Prints one line per log step, a progress bar on terminals, and an estimate of the remaining time."""

    def __init__(self, title: str, names: Sequence[str]):
        self._title = title
        self._names = names
        self._steps: list[float] = []  # end time of each step

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._steps = []
        # One step of each cycle generates what all steps of the cycle train on, so only whole cycles are comparable.
        cycle = getattr(args, "num_iterations", 1) * getattr(args, "steps_per_generation", 1)
        cycle = max(1, cycle // args.gradient_accumulation_steps)
        self._warm, self._measured = (cycle * math.ceil(least / cycle) for least in (WARM_UP, MEASURED))
        hidden = None if state.is_world_process_zero else True  # None: unless the output is a terminal
        steps = {"total": state.max_steps, "initial": state.global_step, "unit": "step"}
        self._bar = tqdm(desc=self._title, leave=False, disable=hidden, **steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._bar.update()
        self._steps.append(time.monotonic())
        if len(self._steps) == self._warm + self._measured and state.is_world_process_zero:
            pace, left = self._pace(), state.max_steps - state.global_step
            if pace * left > SHORT:
                tqdm.write(f"{self._title}: {pace:.2g} s per step, about {duration(pace * left)} for {left} more")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        shown = {name: (logs or {}).get(name) for name in self._names}
        if not state.is_world_process_zero or all(value is None for value in shown.values()):
            return
        values = "  ".join(f"{_short(name)} {value:.3g}" for name, value in shown.items() if value is not None)
        tqdm.write(f"{self._title} {state.global_step}/{state.max_steps}  {values}{self._left(state)}")

    def _left(self, state: Any) -> str:
        if not self._bar.disable or len(self._steps) < self._warm + self._measured:  # the bar shows it
            return ""
        return f"  ({duration(self._pace() * (state.max_steps - state.global_step))} left)"

    def _pace(self) -> float:
        """Seconds per step, without the first steps, which include start-up costs."""
        return (self._steps[-1] - self._steps[self._warm - 1]) / (len(self._steps) - self._warm)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._bar.close()


def _short(name: str) -> str:
    return name.removeprefix("rewards/").removeprefix("completions/").removesuffix("/mean").removeprefix("constraint/")


class LiveReport(TrainerCallback):
    """Rewrites the report during a run, at a log or a save, at most once in `every` seconds, and rarely enough to take
    no more than a fiftieth of the time."""

    def __init__(self, task: Task, pictures: Pictures | None, every: float = 60.0, say: Any = tqdm.write):
        self._task, self._pictures, self._every = task, pictures, every
        self._notice = FailureNotice(say)
        self._next = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._next = time.monotonic() + self._every

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        start = time.monotonic()
        if not state.is_world_process_zero or start < self._next:
            return
        try:
            write_report(args.output_dir, self._task, pictures=self._pictures, running_to=state.max_steps)
        except Exception as error:  # noqa: BLE001 - training must continue whatever is wrong with the report
            self._notice.failed(
                f"the report could not be written ({type(error).__name__}: {error}); training continues"
            )
        else:
            self._notice.succeeded()
        end = time.monotonic()
        self._next = end + max(self._every, 50 * (end - start))

    on_save = on_log


def _prompts_per_step(args: Any) -> float:
    rollouts = args.gradient_accumulation_steps / (args.steps_per_generation * args.num_iterations)
    return rollouts * args.generation_batch_size / args.num_generations


class Hints(TrainerCallback):
    """Prints a hint when a known problem has lasted for `patience` logs, and again after as many more. A collapse
    is reported once."""

    def __init__(self, patience: int = 5, say: Any = tqdm.write):
        self._patience = patience
        self._say = say
        self._streaks: dict[str, int] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs or "reward" not in logs:
            return
        is_broken = not math.isfinite(logs.get("grad_norm") or 0)
        if getattr(args, "fp16", False):  # the gradient scaler skips such steps and tries smaller scales
            self._watch(
                "fp16",
                is_broken,
                "the gradient has not been finite for {n} logs, so fp16 has skipped these steps: use --fp16 false, "
                "or a lower learning_rate",
            )
        elif is_broken and "gradient" not in self._streaks:
            self._streaks["gradient"] = 1  # it does not recover
            self._say(
                "hint: the gradient is not finite, so the weights are no longer usable: stop, and resume from the "
                "checkpoint before this step with a lower learning_rate"
            )
        kl_limit = 10 * args.kl_target if getattr(args, "kl_target", None) else 10.0
        wasted = logs.get("groups_without_signal", logs.get("frac_reward_zero_std", 0))
        is_solved = (logs.get("rewards/success/mean") or 0) > MASTERED
        unscored, cut_off = logs.get("reward_failures") or 0, logs.get("completions/clipped_ratio") or 0
        is_valid = (logs.get("rewards/valid/mean") or 0) >= FEW or "rewards/valid/mean" not in logs
        for name, is_bad, message in (
            ("no signal", wasted >= MOST_WASTED and not is_solved,
             f"{wasted:.0%} of the groups have equal rewards, for {{n}} logs, so that little can be learned: use an "
             "easier level, a cold start, more num_generations, a higher temperature, or a reward "
             "with partial credit"),
            ("unscored", unscored >= MOST_UNSCORED,
             f"{unscored:.0%} of the completions could not be scored, for {{n}} logs, and are left out: the reasons "
             "are in the report and above"),
            ("nothing valid", not is_valid and unscored < MOST_UNSCORED,
             "fewer than 1% of the completions have been valid for {n} logs: turn on --constrain, run "
             "--cold_start_steps, or show the format in the prompt"),
            ("kl", (logs.get("kl") or 0) > kl_limit,
             f"the KL divergence has been above {kl_limit:g} for {{n}} logs: lower learning_rate, raise beta, or set "
             "kl_target"),
            ("cut off", cut_off >= MOST_WASTED,
             f"{cut_off:.0%} of the completions are cut off at max_completion_length, for {{n}} logs: raise it, or "
             "ask for shorter answers"),
        ):  # fmt: skip
            self._watch(name, is_bad, message)
        is_new = "pass@1" in logs and "collapse" not in self._streaks
        if is_new and (found := collapse(state.log_history, _prompts_per_step(args))):
            self._streaks["collapse"] = 1
            (success, success_now), (best, best_now) = found.values()
            name = list(found)[1]
            self._say(
                f"hint: success has risen from {success:.3f} to {success_now:.3f} while {name} has fallen from "
                f"{best:.3f} to {best_now:.3f}, so completions of a prompt become alike: use own_successes, "
                f"advantage_estimator maxrl, or a lower learning_rate; best_by {name} keeps the best model"
            )

    def _watch(self, name: str, is_bad: bool, message: str) -> None:
        self._streaks[name] = self._streaks.get(name, 0) + 1 if is_bad else 0
        if self._streaks[name] and self._streaks[name] % self._patience == 0:
            self._say(f"hint: {message.format(n=self._streaks[name])}")
