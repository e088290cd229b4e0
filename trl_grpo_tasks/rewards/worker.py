"""The worker process of the reward executor: loads a task in a fresh interpreter and scores one completion at a time.

Messages are pickles on a connection whose descriptor is an argument. A reply carries the number of its job; the set-up
is job 0.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import math
import numbers
import os
import pickle
import resource
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ..registry import get_task
from ..task import Score, Task

# The largest size of a component. Its square, times those of a weight and of a batch, is finite in float32.
LARGEST_COMPONENT = 1e9


@dataclasses.dataclass(frozen=True)
class Reply:
    """The result of scoring one completion. With `retire`, the worker exits and the pool starts a new one."""

    score: Score | None
    reason: str
    seconds: float
    retire: bool = False


@dataclasses.dataclass(frozen=True)
class TaskRecipe:
    """Everything needed to build the same task in another interpreter."""

    sys_path: list[str]
    spec: str | None
    payload: bytes  # pickled: the options of a task with a spec, else the task itself

    @classmethod
    def of(cls, task: Task) -> TaskRecipe:
        import dill

        spec = task.spec
        try:
            if spec is None:
                return cls(list(sys.path), None, dill.dumps(task, recurse=True))
            if spec.endswith(".py"):
                spec = str(Path(spec).expanduser().resolve())
            # As a dictionary: the class of the options may be defined in a task file, which only get_task can import.
            options = {f.name: getattr(task.options, f.name) for f in dataclasses.fields(task.options)}
            return cls(list(sys.path), spec, dill.dumps(options))
        except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
            raise TypeError(
                f"task {task.name!r} cannot be sent to a reward worker ({type(error).__name__}: {error}); "
                "put it in a .py file and load it with get_task, or score in this process with workers=0"
            ) from error

    def build(self) -> Task:
        import dill

        known = set(sys.path)
        sys.path.extend(entry for entry in self.sys_path if entry not in known)
        loaded = dill.loads(self.payload)
        return loaded if self.spec is None else get_task(self.spec, loaded)


def score_one(task: Task, row: str, completion: str) -> Reply:
    """Score one completion; an error in the task becomes the reason of the reply.

    If the task forks and also returns in the child, the child exits here.
    """
    started, process = time.perf_counter(), os.getpid()
    retire = False
    score: Score | None = None
    try:
        returned = task.score(json.loads(row), completion)
        if returned is None:
            reason = "the task returned None: it could not score this completion"
        else:
            score, reason = check_score(task, returned)
            reason = reason and f"{reason} (row {row if len(row) <= 100 else row[:97] + '...'})"
    except MemoryError as error:
        reason, retire = f"MemoryError: {error} (over the memory limit of a reward worker)", True
    except (Exception, SystemExit) as error:  # noqa: BLE001 - user code: any failure is a reason, never a crash
        reason = _describe(error)
    if os.getpid() != process:
        os._exit(0)
    return Reply(score, reason, time.perf_counter() - started, retire)


def check_score(task: Task, score: Any) -> tuple[Score | None, str]:
    """Return the score with plain floats and bools and "", or None and what is wrong with it."""
    if not isinstance(score, Score):
        return None, f"score must be a Score or None, got {type(score).__name__}"
    components: dict[str, float] = {}
    for name, value in score.components.items():
        if name not in task.weights:
            return (
                None,
                f"unknown component {name!r}; components of task {task.name!r} are: {', '.join(task.weights)}",
            )
        if not isinstance(value, numbers.Real):
            return None, f"component {name!r} must be a number, got {type(value).__name__}"
        if not abs(value) <= LARGEST_COMPONENT:  # true for NaN
            return None, f"component {name!r} is {value}, but it must lie within -1e9 and 1e9"
        components[name] = float(value)
    if not isinstance(score.total, numbers.Real) or not math.isfinite(score.total):
        return None, f"total must be a finite number, got {score.total!r}"
    expected = math.fsum(task.weights[name] * value for name, value in components.items())
    if not math.isclose(score.total, expected, rel_tol=1e-6, abs_tol=1e-6):
        return None, f"total is {float(score.total)!r} but the weighted sum of the components is {expected!r}"
    flags: dict[str, bool] = {}
    for name in ("valid", "success"):
        value = getattr(score, name)
        value = value.item() if hasattr(value, "item") else value  # NumPy comparisons give numpy.bool
        if not isinstance(value, bool):
            return None, f"{name} must be a bool, got {type(value).__name__}"
        flags[name] = value
    plain = Score(components, float(score.total), flags["valid"], flags["success"], str(score.reason), score.info)
    return plain, ""


def limit_memory(memory_mb: int | None) -> None:
    """Limit the address space to `memory_mb` on top of what the loaded task already uses; None means no limit."""
    if memory_mb is None:
        return
    with open("/proc/self/statm") as statm:
        taken = int(statm.read().split()[0]) * resource.getpagesize()
    limit = taken + memory_mb * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> None:
    """Run the worker until the parent closes the connection."""
    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _survive_sigterm()
    _die_with_parent(parent)
    connection = Connection(int(sys.argv[1]))
    os.set_inheritable(connection.fileno(), False)
    try:
        recipe, memory_mb = pickle.loads(connection.recv_bytes())
        try:
            task = recipe.build()
            limit_memory(memory_mb)
        except (Exception, SystemExit):  # noqa: BLE001 - reported to the parent, which raises it there
            connection.send_bytes(pickle.dumps((0, traceback.format_exc())))
            return
        connection.send_bytes(pickle.dumps((0, None)))
        while True:
            number, row, completion = pickle.loads(connection.recv_bytes())
            reply = score_one(task, row, completion)
            try:
                message = pickle.dumps((number, reply))
            except Exception as error:  # noqa: BLE001 - pickling runs user code
                unsent = Reply(None, f"the score cannot be sent: {_describe(error)}", reply.seconds)
                message = pickle.dumps((number, unsent))
            connection.send_bytes(message)
            if reply.retire:
                return
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the parent has exited, so there is nobody to report to


def _survive_sigterm() -> None:
    """Make this process, but not its children, ignore SIGTERM.

    Slurm sends SIGTERM to every process of a job, and a run finishes its current step before it exits, for which it
    needs its workers. A handler is used because children inherit SIG_IGN: exec resets a handler, and the hooks below
    reset it for a fork.
    """

    def ignore() -> None:
        signal.signal(signal.SIGTERM, lambda *_: None)

    ignore()
    os.register_at_fork(before=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL), after_in_parent=ignore)


def _die_with_parent(parent: int) -> None:
    pr_set_pdeathsig = 1
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGKILL), 0, 0, 0)
    # The parent may have died before the call above. Elsewhere than on Linux, the end of the connection ends it.
    if os.getppid() != parent:
        os._exit(0)


def _describe(error: BaseException) -> str:
    where = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(where[-1].filename).name}:{where[-1].lineno})" if where else ""
    return f"{type(error).__name__}: {error}{place}"
