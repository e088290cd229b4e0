"""Pools of reward workers. Workers may hang, crash or be killed; a thread feeds, times and replaces them."""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, Any, cast

from ..task import Task
from .processes import MARK, kill_descendants
from .worker import COMMAND, HEADER, Reply, TaskRecipe, frame, score_one

START_SECONDS = 300.0  # time limit for importing a task; large simulators on a slow disk need long
START_ATTEMPTS = 3  # after this many failed starts in a row the task is considered broken

CLOSED = "the reward executor was closed before this completion was scored"
LATE = "it was not scored before the time limit"


class RewardWorkerError(RuntimeError):
    """The task cannot be loaded in a reward worker, or the pool was closed. Not caused by a completion."""


@dataclass
class Job:
    """One completion to score; `done` is called exactly once, with a reply or with a RewardWorkerError."""

    row: str
    completion: str
    done: Callable[[Reply | RewardWorkerError], None]
    lost_on: str | None = None  # the Ray node on which its first worker was lost


class Pool:
    """A queue of jobs, which a thread of the pool gives to its workers, and what happens if no worker can start.

    Only this thread touches workers: Linux kills a process when the *thread* that started it ends.
    """

    _workers: list[Any]  # each has a `job` and a `deadline`, which may be None

    def __init__(self, thread_name: str | None = None):
        self._workers = []
        self._queue: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._broken: RewardWorkerError | None = None
        self._failed_starts = 0
        self._started = threading.Event()  # a worker has loaded the task, or the pool is broken
        self._owner = os.getpid()
        self._thread = threading.Thread(target=self._run, name=thread_name, daemon=True)

    def submit(self, job: Job) -> None:
        with self._changed:
            broken = RewardWorkerError(CLOSED) if self._closing else self._broken
            if broken is None:
                self._queue.append(job)
                self._wake()
        if broken is not None:
            job.done(broken)

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
        with self._changed:
            self._closing = True
            self._wake()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _wake(self) -> None:
        """Tell the thread that the queue has changed."""
        self._changed.notify()

    def _run(self) -> None:
        """Run the thread until `_closing` is set."""

    def _take_all(self) -> list[Job]:
        with self._changed:
            taken = list(self._queue)
            self._queue.clear()
        return taken

    def _fail_start(self, reason: str) -> None:
        self._failed_starts += 1
        if self._failed_starts >= START_ATTEMPTS:
            self._fail_all(RewardWorkerError(f"reward workers fail while loading the task: {reason}"))

    def _fail_all(self, error: RewardWorkerError) -> None:
        """Mark the pool as broken and give `error` to every unfinished job."""
        with self._changed:
            self._broken = self._broken or error
            self._started.set()
            abandoned = self._take_all()
        for worker in self._workers:
            if worker.job is not None:
                abandoned.append(worker.job)
            worker.job = worker.deadline = None
        for job in abandoned:
            job.done(error)


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

    def close(self) -> None:
        self._fail_all(RewardWorkerError(CLOSED))


class ProcessPool(Pool):
    """Scores jobs in `workers` processes."""

    def __init__(self, recipe: TaskRecipe, workers: int, timeout: float, memory_mb: int | None):
        super().__init__("reward-pool")
        self._setup = frame((recipe, memory_mb))
        self._timeout = timeout
        self._size = workers
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._thread.start()

    # All methods below except _wake run in the pool's thread.

    def _run(self) -> None:
        try:
            for _ in range(self._size):
                self._workers.append(self._start_worker())
            while not self._closing:
                self._feed()
                for key, _ in self._selector.select(self._seconds_to_next_deadline()):
                    if key.fd == self._wake_read:
                        with contextlib.suppress(BlockingIOError):
                            os.read(self._wake_read, 4096)
                    elif key.data in self._workers:
                        self._receive(key.data)
                self._replace_overdue()
        except BaseException as error:
            self._fail_all(RewardWorkerError(f"the reward pool failed: {type(error).__name__}: {error}"))
            raise
        finally:
            self._fail_all(RewardWorkerError(CLOSED))
            for worker in self._workers:
                self._selector.unregister(worker.replies)
                worker.kill()
            self._workers = []
            self._selector.close()
            for end in (self._wake_read, self._wake_write):
                os.close(end)

    def _wake(self) -> None:
        # A full pipe also wakes the thread; a closed one means that the thread has already ended.
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._wake_write, b"!")

    def _start_worker(self) -> _Worker:
        worker = _Worker.start(time.monotonic() + START_SECONDS)
        self._selector.register(worker.replies, selectors.EVENT_READ, worker)
        with contextlib.suppress(BrokenPipeError):  # it died at once; reading from it will report that
            worker.send(self._setup)
        return worker

    def _feed(self) -> None:
        for worker in self._workers:
            if worker.ready and worker.job is None:
                with self._changed:
                    if not self._queue:
                        return
                    job = self._queue.popleft()
                try:
                    worker.number += 1
                    worker.send(frame((worker.number, job.row, job.completion)))
                except BrokenPipeError:  # died while idle; the job never began, so another worker takes it
                    with self._changed:
                        self._queue.appendleft(job)
                    worker.ready = False
                    continue
                worker.job = job
                worker.deadline = time.monotonic() + self._timeout

    def _receive(self, worker: _Worker) -> None:
        try:
            messages, alive = worker.receive()
        except Exception as error:  # noqa: BLE001 - unpickling runs user code
            self._replace(worker, f"the worker's reply cannot be decoded: {type(error).__name__}: {error}")
            return
        for number, message in messages:
            if number != worker.number:
                continue  # not from the worker itself, which replies once per job; the task may have forked
            if not worker.loaded:
                if message is not None:
                    self._fail_all(RewardWorkerError(f"the task cannot be loaded in a reward worker:\n{message}"))
                    return
                worker.loaded = worker.ready = True
                self._started.set()
                worker.deadline = None
                self._failed_starts = 0
            elif worker.job is not None:
                worker.ready = not message.retire
                self._finish(worker, message)
        if not alive:
            self._replace(worker, f"the worker {worker.describe_exit()}")

    def _replace_overdue(self) -> None:
        now = time.monotonic()
        for worker in list(self._workers):
            if worker.deadline is not None and worker.deadline <= now:
                limit = self._timeout if worker.loaded else START_SECONDS
                self._replace(worker, f"timed out after {limit:g} s")

    def _replace(self, worker: _Worker, reason: str) -> None:
        self._selector.unregister(worker.replies)
        worker.kill()
        self._workers.remove(worker)
        if worker.job is not None:
            self._finish(worker, Reply(None, reason, time.monotonic() - worker.since))
        if not worker.loaded:
            self._fail_start(reason)
        if self._broken is None:
            self._workers.append(self._start_worker())

    def _finish(self, worker: _Worker, reply: Reply) -> None:
        job, worker.job, worker.deadline = worker.job, None, None
        if job is not None:
            job.done(reply)

    def _seconds_to_next_deadline(self) -> float | None:
        deadlines = [worker.deadline for worker in self._workers if worker.deadline is not None]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None


@dataclass(eq=False)
class _Worker:
    process: subprocess.Popen[bytes]
    requests: IO[bytes]
    replies: IO[bytes]
    mark: str  # identifies the worker and its descendants through their environment
    deadline: float | None  # of the start, then of the current job
    since: float = field(default_factory=time.monotonic)
    job: Job | None = None
    number: int = 0  # number of the current or last job, which its reply repeats
    loaded: bool = False
    ready: bool = False
    received: bytearray = field(default_factory=bytearray)  # bytes of messages that are not complete yet

    @classmethod
    def start(cls, deadline: float) -> _Worker:
        # It gets its own session, so that Ctrl-C does not reach it and its process group can be killed at once.
        mark = f"{os.getpid()}-{secrets.token_hex(8)}"
        process = subprocess.Popen(
            [*COMMAND, "\n".join(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env=os.environ | {MARK: mark},
        )
        return cls(process, cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout), mark, deadline)

    def send(self, message: bytes) -> None:
        self.since = time.monotonic()
        rest = memoryview(message)
        while rest:
            rest = rest[self.requests.write(rest) :]

    def receive(self) -> tuple[list[Any], bool]:
        """Return the complete messages received, as (number, message), and whether the pipe is still open."""
        piece = os.read(self.replies.fileno(), 1 << 20)
        self.received += piece
        messages = []
        while len(self.received) >= HEADER.size:
            (size,) = HEADER.unpack_from(self.received)
            end = HEADER.size + size
            if len(self.received) < end:
                break
            messages.append(pickle.loads(self.received[HEADER.size : end]))
            del self.received[:end]
        return messages, bool(piece)

    def describe_exit(self) -> str:
        """Describe how a worker whose pipe has closed ended."""
        try:
            code = self.process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "closed its pipe"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with status {code}"

    def kill(self) -> None:
        """Kill the worker and all its descendants, and leave no zombie."""
        alive = self.process.poll() is None
        if alive:
            os.kill(self.process.pid, signal.SIGSTOP)  # so that it starts nothing more and keeps its children
        kill_descendants(self.mark, self.process.pid if alive else None)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.requests, self.replies):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
