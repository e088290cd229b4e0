"""The far side of the reward executor: rebuilds a task in a fresh interpreter and scores one completion at a time.

Frames (8 bytes of length, then a pickle) come in on what was standard input and go out on what was standard output; a
score that prints goes to standard error instead. A reply carries the number of its job; that of the set-up is 0.
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
import struct
import sys
import time
import traceback
from pathlib import Path
from typing import Any, BinaryIO

from ..task import Score, Task, get_task

HEADER = struct.Struct("!Q")

# A fresh interpreter with the parent's import path: it needs no `__main__` guard in the user's script, works from a
# notebook, and inherits nothing but the path.
COMMAND = [
    sys.executable,
    "-P",
    "-c",
    "import sys; sys.path[:] = sys.argv[1].split(chr(10)); from trl_grpo_tasks.rewards.worker import main; main()",
]


@dataclasses.dataclass(frozen=True)
class Reply:
    """What a worker says of one completion. After `retire` the worker leaves and a fresh one takes its place."""

    score: Score | None
    reason: str
    seconds: float
    retire: bool = False


@dataclasses.dataclass(frozen=True)
class TaskRecipe:
    """How to have the same task in another interpreter."""

    sys_path: list[str]
    spec: str | None
    payload: bytes  # the options of a task with a spec, or the whole task where it was made by hand

    @classmethod
    def of(cls, task: Task) -> TaskRecipe:
        import dill

        spec = task.spec
        try:
            if spec is None:
                return cls(list(sys.path), None, dill.dumps(task, recurse=True))
            if spec.endswith(".py"):
                spec = str(Path(spec).expanduser().resolve())
            # By field: the class of the options may live in a task file, which only get_task can import.
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
    """Score one completion; whatever goes wrong in the task becomes a reason. Where the task forks and returns in the
    child as well, the child ends here."""
    started, process = time.perf_counter(), os.getpid()
    retire = False
    score: Score | None = None
    try:
        returned = task.score(json.loads(row), completion)
        if returned is None:
            reason = "the task returned None: it could not judge this completion"
        else:
            score, reason = check_score(task, returned)
    except MemoryError as error:
        reason, retire = f"MemoryError: {error} (over the memory limit of a reward worker)", True
    except (Exception, SystemExit) as error:  # noqa: BLE001 - user code: any failure is a reason, never a crash
        reason = _describe(error)
    if os.getpid() != process:
        os._exit(0)
    return Reply(score, reason, time.perf_counter() - started, retire)


def check_score(task: Task, score: Any) -> tuple[Score | None, str]:
    """The score with plain floats and bools, or None and what is wrong with it."""
    if not isinstance(score, Score):
        return None, f"score must be a Score or None, got {type(score).__name__}"
    components: dict[str, float] = {}
    for name, value in score.components.items():
        if name not in task.weights:
            return (
                None,
                f"unknown component {name!r}; the weights of task {task.name!r} name: {', '.join(task.weights)}",
            )
        if not isinstance(value, numbers.Real):
            return None, f"component {name!r} must be a number, got {type(value).__name__}"
        if not math.isfinite(value):
            return None, f"component {name!r} is {float(value)}"
        components[name] = float(value)
    if not isinstance(score.total, numbers.Real) or not math.isfinite(score.total):
        return None, f"total must be a finite number, got {score.total!r}"
    expected = math.fsum(task.weights[name] * value for name, value in components.items())
    if not math.isclose(score.total, expected, rel_tol=1e-6, abs_tol=1e-6):
        return None, f"total is {float(score.total)!r} but the weighted sum of the components is {expected!r}"
    flags: dict[str, bool] = {}
    for name in ("valid", "success"):
        value = getattr(score, name)
        value = value.item() if hasattr(value, "item") else value  # a comparison of NumPy numbers
        if not isinstance(value, bool):
            return None, f"{name} must be a bool, got {type(value).__name__}"
        flags[name] = value
    plain = Score(components, float(score.total), flags["valid"], flags["success"], str(score.reason), score.info)
    return plain, ""


def limit_memory(memory_mb: int | None) -> None:
    """Allow `memory_mb` on top of what the loaded task already takes."""
    if memory_mb is None:
        return
    with open("/proc/self/statm") as statm:
        taken = int(statm.read().split()[0]) * resource.getpagesize()
    limit = taken + memory_mb * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def read_frame(stream: BinaryIO) -> Any:
    """The next object, or EOFError when the other side has gone."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        raise EOFError
    (size,) = HEADER.unpack(header)
    body = stream.read(size)
    if len(body) < size:
        raise EOFError
    return pickle.loads(body)


def frame(message: Any) -> bytes:
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(body)) + body


def main() -> None:
    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _outlive_sigterm()
    _die_with_parent(parent)
    requests, replies = _take_over_pipes()
    try:
        recipe, memory_mb = read_frame(requests)
        try:
            task = recipe.build()
            limit_memory(memory_mb)
        except (Exception, SystemExit):  # noqa: BLE001 - told to the parent, which raises it there
            _send(replies, (0, traceback.format_exc()))
            return
        _send(replies, (0, None))
        while True:
            number, row, completion = read_frame(requests)
            reply = score_one(task, row, completion)
            try:
                message = frame((number, reply))
            except Exception as error:  # noqa: BLE001 - pickling runs user code
                unsent = Reply(None, f"the score cannot be sent: {_describe(error)}", reply.seconds)
                message = frame((number, unsent))
            replies.write(message)
            replies.flush()
            if reply.retire:
                return
    except (EOFError, BrokenPipeError):
        os._exit(0)  # the parent has gone; nobody is left to hear a traceback


def _send(stream: BinaryIO, message: Any) -> None:
    stream.write(frame(message))
    stream.flush()


def _take_over_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Move the protocol away from descriptors 0 and 1, where user code reads and prints."""
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


def _outlive_sigterm() -> None:
    """Slurm sends SIGTERM to every process of a job, and a run finishes its step before it ends. It still ends the
    processes that a task starts: a handler, unlike SIG_IGN, is not passed on by exec, and is put aside for a fork."""

    def outlive() -> None:
        signal.signal(signal.SIGTERM, lambda *_: None)

    outlive()
    os.register_at_fork(before=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL), after_in_parent=outlive)


def _die_with_parent(parent: int) -> None:
    pr_set_pdeathsig = 1
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above; end of file on the pipe covers the rest
        os._exit(0)


def _describe(error: BaseException) -> str:
    where = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(where[-1].filename).name}:{where[-1].lineno})" if where else ""
    return f"{type(error).__name__}: {error}{place}"
