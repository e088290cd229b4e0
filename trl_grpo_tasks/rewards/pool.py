"""Pools of reward workers. Workers may hang, crash or be killed; a thread for each feeds, times and replaces it."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import secrets
import signal
import socket
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe
from typing import Any

from ..constraints.workers import fresh_python
from ..task import Task
from .processes import MARK, kill_descendants
from .worker import Reply, TaskRecipe, score_one

START_SECONDS = 300.0  # time limit for importing a task; large simulators on a slow disk need long
START_ATTEMPTS = 3  # after this many failed starts in a row the task is considered broken
STALL_SECONDS = 10  # a worker that has begun a reply may pause so long in the middle of it
TICK = 0.1  # seconds between two looks at the pool of a thread that waits for its worker

CLOSED = "the reward executor was closed before this completion was scored"
LATE = "it was not scored before the time limit"

logger = logging.getLogger(__name__)


class RewardWorkerError(RuntimeError):
    """The task cannot be loaded in a reward worker, or the pool was closed. Not caused by a completion."""


class WorkerLost(Exception):
    """A worker has ended or must end. `again`: its node failed, so another worker takes the job, once. If the job had
    not `begun`, another worker takes it whatever happened before."""

    def __init__(self, reason: str, again: bool = False, begun: bool = True):
        super().__init__(reason)
        self.again, self.begun = again, begun


@dataclass
class Job:
    """One completion to score; `done` is called exactly once, with a reply or with a RewardWorkerError."""

    row: str
    completion: str
    done: Callable[[Reply | RewardWorkerError], None]
    lost_on: str | None = None  # the node of the worker that was lost with it


class Pool:
    """A queue of jobs, and a thread for each worker that starts it, gives it jobs and replaces it.

    No other thread touches the worker: Linux kills a process when the *thread* that started it ends.
    """

    start_seconds: float | None = START_SECONDS

    def __init__(self, workers: int = 0, timeout: float = 0.0):
        self._timeout = timeout
        self._queue: deque[Job] = deque()
        self._changed = threading.Condition()
        self._ended: RewardWorkerError | None = None  # why no more jobs are scored
        self._loaded: list[Any] = []
        self._failed_starts = 0
        self._started = threading.Event()  # a worker has loaded the task, or the pool has ended
        self._owner = os.getpid()
        self._threads = [threading.Thread(target=self._run, name="reward-pool", daemon=True) for _ in range(workers)]

    def submit(self, job: Job) -> None:
        with self._changed:
            ended = self._ended
            if ended is None:
                self._queue.append(job)
                self._changed.notify()
        if ended is not None:
            job.done(ended)

    def drain(self) -> None:
        """Score the jobs that are left to this thread: none, if there are workers."""

    def wait_until_started(self) -> None:
        """Wait until a worker has loaded the task, or none can."""
        self._started.wait()

    def discard(self) -> None:
        """Give up the jobs that no worker has begun."""
        for job in self._take_all():
            job.done(Reply(None, LATE, 0.0))

    def close(self) -> None:
        """End every worker and wait for it; unfinished jobs get an error. Safe to call twice or after a fork."""
        if self._owner != os.getpid():
            return
        self._end(RewardWorkerError(CLOSED))
        if threading.current_thread() not in self._threads:  # one may collect the pool as garbage
            for thread in self._threads:
                thread.join()

    def _start_worker(self) -> Any:
        """Start a process or Ray actor that loads the task and then scores one job at a time; see `_WorkerProcess`."""
        raise NotImplementedError

    def _take_all(self) -> list[Job]:
        with self._changed:
            taken = list(self._queue)
            self._queue.clear()
        return taken

    def _end(self, error: RewardWorkerError) -> None:
        """Give `error` to the jobs that no worker has begun, and to all later ones."""
        with self._changed:
            self._ended = self._ended or error
            self._changed.notify_all()
            abandoned = self._take_all()
        self._started.set()
        for job in abandoned:
            job.done(self._ended)

    # Each thread runs the methods below.

    def _run(self) -> None:
        try:
            while True:
                self._check()
                worker = self._start_worker()
                try:
                    if self._has_loaded(worker):
                        while self._score_next(worker):
                            pass
                finally:
                    with self._changed:
                        if worker in self._loaded:
                            self._loaded.remove(worker)
                        self._changed.notify_all()  # a job that was lost on another node may wait for any worker now
                    worker.kill()
        except RewardWorkerError as error:
            self._end(error)
        except BaseException as error:
            self._end(RewardWorkerError(f"the reward pool failed: {type(error).__name__}: {error}"))
            raise

    def _check(self) -> None:
        """Raise RewardWorkerError if the pool has ended."""
        if self._ended is not None:
            raise self._ended

    def _has_loaded(self, worker: Any) -> bool:
        """Wait until the worker has loaded the task; False if it must be replaced."""
        since = time.monotonic()
        try:
            problem = self._wait(worker.loaded, self.start_seconds)
        except WorkerLost as lost:
            self._count_failed_start(str(lost), since)
            return False
        if problem is not None:
            raise RewardWorkerError(f"the task cannot be loaded in a reward worker:\n{problem}")
        with self._changed:
            self._failed_starts = 0
            self._loaded.append(worker)
        self._started.set()
        return True

    def _count_failed_start(self, reason: str, since: float) -> None:
        self._failed_starts += 1
        if self._failed_starts >= START_ATTEMPTS:
            raise RewardWorkerError(f"reward workers fail while loading the task: {reason}")

    def _score_next(self, worker: Any) -> bool:
        """Wait for a job and let the worker score it; False if the worker must be replaced."""
        job = self._next_job(worker)
        since = time.monotonic()
        try:
            worker.begin(job)
            reply = self._wait(worker.replies, self._timeout)
        except WorkerLost as lost:
            if not lost.begun or (lost.again and job.lost_on is None):
                if lost.begun:
                    logger.warning("a completion is scored again, because on Ray node %s %s", worker.node[:8], lost)
                    job.lost_on = worker.node
                with self._changed:
                    self._queue.appendleft(job)
                return False
            reply = Reply(None, str(lost), time.monotonic() - since, retire=True)
        except BaseException as error:
            job.done(self._ended or RewardWorkerError(f"the reward pool failed: {error!r}"))
            raise
        job.done(reply)
        return not reply.retire

    def _next_job(self, worker: Any) -> Job:
        with self._changed:
            while True:
                self._check()
                is_only_node = all(one.node == worker.node for one in self._loaded)
                job = next((job for job in self._queue if is_only_node or job.lost_on != worker.node), None)
                if job is not None:
                    self._queue.remove(job)
                    return job
                self._changed.wait()

    def _wait(self, received: Callable[[float], list[Any]], seconds: float | None) -> Any:
        deadline = float("inf") if seconds is None else time.monotonic() + seconds
        while not (found := received(max(0.0, min(TICK, deadline - time.monotonic())))):
            self._check()
            if time.monotonic() >= deadline:
                raise WorkerLost(f"timed out after {seconds:g} s")
        return found[0]


class InlinePool(Pool):
    """A pool without workers: jobs are scored in the thread that requests a result."""

    def __init__(self, task: Task):
        super().__init__()
        self._task = task
        self._started.set()

    def drain(self) -> None:
        while self._queue:
            job = self._queue.popleft()
            job.done(score_one(self._task, job.row, job.completion))


class ProcessPool(Pool):
    """Scores jobs in `workers` processes."""

    def __init__(self, recipe: TaskRecipe, workers: int, timeout: float, memory_mb: int | None):
        super().__init__(workers, timeout)
        self._setup = pickle.dumps((recipe, memory_mb))
        for thread in self._threads:
            thread.start()

    def _start_worker(self) -> _WorkerProcess:
        return _WorkerProcess(self._setup)


class _WorkerProcess:
    """A worker in a process of its own."""

    node = ""  # of a Ray worker: the id of its node

    def __init__(self, setup: bytes):
        self._mark = f"{os.getpid()}-{secrets.token_hex(8)}"  # identifies it and its descendants in their environment
        self._number = 0  # of the current or last job, which its reply repeats
        self._connection, theirs = Pipe()
        with socket.socket(fileno=os.dup(self._connection.fileno())) as ours:  # an option of the socket, not of a name
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", STALL_SECONDS, 0))
        with theirs:
            # It gets its own session, so that Ctrl-C does not reach it and its process group can be killed at once.
            # What the task prints goes to standard error.
            self._process = subprocess.Popen(
                fresh_python("from trl_grpo_tasks.rewards.worker import main; main()", str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=os.environ | {MARK: self._mark},
            )
        with contextlib.suppress(OSError):  # it died at once; `loaded` will report that
            self._connection.send_bytes(setup)

    def begin(self, job: Job) -> None:
        self._number += 1
        try:
            self._connection.send_bytes(pickle.dumps((self._number, job.row, job.completion)))
        except OSError as error:
            raise WorkerLost(self._describe_exit(), begun=False) from error

    def replies(self, seconds: float) -> list[Any]:
        """Wait for at most `seconds` for the reply to the current job; [] if there is none yet."""
        try:
            if not self._connection.poll(seconds):
                return []
            reply = self._connection.recv_bytes()
        except BlockingIOError as error:
            raise WorkerLost(f"the worker stopped in the middle of a reply for {STALL_SECONDS} s") from error
        except (EOFError, OSError) as error:
            raise WorkerLost(self._describe_exit()) from error
        try:
            number, message = pickle.loads(reply)
        except Exception as error:  # unpickling runs user code
            reason = f"the worker's reply cannot be decoded: {type(error).__name__}: {error}"
            raise WorkerLost(reason) from error
        # The worker itself replies once per job, but the task may have forked.
        return [message] if number == self._number else []

    loaded = replies  # the set-up is job 0; its reply is None, or why the task cannot be loaded

    def _describe_exit(self) -> str:
        """Describe how a worker whose connection has closed ended."""
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "the worker closed its pipe"
        if code < 0:
            return f"the worker was killed by {signal.Signals(-code).name}"
        return f"the worker exited with status {code}"

    def kill(self) -> None:
        """Kill the worker and all its descendants, and leave no zombie."""
        alive = self._process.poll() is None
        if alive:
            os.kill(self._process.pid, signal.SIGSTOP)  # so that it starts nothing more and keeps its children
        kill_descendants(self._mark, self._process.pid if alive else None)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()
