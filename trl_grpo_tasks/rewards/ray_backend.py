"""Reward workers on a Ray cluster, with the same guarantees as the process pool, for rewards that need many machines.

The pool joins the cluster at RAY_ADDRESS or the one running on this machine, or else starts a local one. This package
and the task must be installed on every node.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from .pool import CLOSED, START_ATTEMPTS, Job, RewardWorkerError
from .worker import Reply, TaskRecipe, limit_memory, score_one

POLL_SECONDS = 0.05  # how often the queue is checked for new jobs while actors are busy


class RayPool:
    """Scores jobs in `workers` Ray actors, one job at a time each; an actor that times out is killed and replaced."""

    def __init__(self, recipe: TaskRecipe, workers: int, timeout: float, memory_mb: int | None):
        self._ray = _import_ray()
        self._started_ray = _join_cluster(self._ray, workers)
        self._actor_class = self._ray.remote(num_cpus=1, max_restarts=0, max_task_retries=0)(_Scorer)
        self._setup = (recipe, memory_mb)
        self._timeout = timeout
        self._size = workers
        self._actors: list[_Actor] = []
        self._queue: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._broken: RewardWorkerError | None = None
        self._failed_starts = 0
        self._owner = os.getpid()
        self._thread = threading.Thread(target=self._run, name="reward-ray", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # registered after Ray's own hook, so it runs before it

    def submit(self, job: Job) -> None:
        with self._changed:
            broken = RewardWorkerError(CLOSED) if self._closing else self._broken
            if broken is None:
                self._queue.append(job)
                self._changed.notify()
        if broken is not None:
            job.done(broken)

    def drain(self) -> None:
        """Do nothing: the actors score jobs without being asked."""

    def close(self) -> None:
        """Kill every actor, and shut Ray down if this pool started it."""
        if self._owner != os.getpid() or self._closing:
            return
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not threading.current_thread():
            self._thread.join()
        if self._started_ray:
            self._ray.shutdown()
        atexit.unregister(self.close)

    def _run(self) -> None:
        try:
            self._actors = [self._start_actor() for _ in range(self._size)]
            while not self._closing and self._broken is None:
                self._feed()
                waited_for = {actor.answer: actor for actor in self._actors if actor.answer is not None}
                if waited_for:
                    done, _ = self._ray.wait(list(waited_for), num_returns=1, timeout=POLL_SECONDS)
                    for answer in done:
                        self._receive(waited_for[answer])
                    self._replace_overdue()
                else:
                    with self._changed:
                        self._changed.wait_for(lambda: bool(self._queue) or self._closing)
        except BaseException as error:
            self._fail_all(RewardWorkerError(f"the Ray reward pool failed: {type(error).__name__}: {error}"))
            raise
        finally:
            self._fail_all(RewardWorkerError(CLOSED))
            for actor in self._actors:
                self._ray.kill(actor.handle, no_restart=True)

    def _start_actor(self) -> _Actor:
        handle = self._actor_class.remote(*self._setup)
        # No deadline yet: an actor may wait for a free CPU of the cluster for any length of time.
        return _Actor(handle, handle.ready.remote(), deadline=None)

    def _feed(self) -> None:
        for actor in self._actors:
            if actor.answer is None:
                with self._changed:
                    if not self._queue:
                        return
                    actor.job = self._queue.popleft()
                actor.answer = actor.handle.score.remote(actor.job.row, actor.job.completion)
                actor.since = time.monotonic()
                actor.deadline = actor.since + self._timeout

    def _receive(self, actor: _Actor) -> None:
        try:
            reply = self._ray.get(actor.answer)
        except self._ray.exceptions.RayError as error:
            self._replace(actor, f"the worker died: {' '.join(str(error).split())[:500]}")
            return
        actor.answer = actor.deadline = None
        if not actor.loaded:
            if reply is not None:
                self._fail_all(RewardWorkerError(f"the task cannot be loaded in a reward worker:\n{reply}"))
                return
            actor.loaded = True
            self._failed_starts = 0
            return
        job, actor.job = actor.job, None
        assert job is not None  # a loaded actor only replies to jobs
        job.done(reply)
        if reply.retire:
            self._replace(actor, "over the memory limit")

    def _replace_overdue(self) -> None:
        now = time.monotonic()
        for actor in list(self._actors):
            if actor.deadline is not None and actor.deadline <= now:
                self._replace(actor, f"timed out after {self._timeout:g} s")

    def _replace(self, actor: _Actor, reason: str) -> None:
        self._ray.kill(actor.handle, no_restart=True)
        self._actors.remove(actor)
        if actor.job is not None:
            actor.job.done(Reply(None, reason, time.monotonic() - actor.since))
        if not actor.loaded:
            self._failed_starts += 1
            if self._failed_starts >= START_ATTEMPTS:
                self._fail_all(RewardWorkerError(f"reward workers fail while loading the task: {reason}"))
        if self._broken is None:
            self._actors.append(self._start_actor())

    def _fail_all(self, error: RewardWorkerError) -> None:
        """Mark the pool as broken and give `error` to every unfinished job."""
        with self._changed:
            self._broken = self._broken or error
            abandoned = list(self._queue)
            self._queue.clear()
        abandoned += [actor.job for actor in self._actors if actor.job is not None]
        for actor in self._actors:
            actor.job = actor.deadline = None
        for job in abandoned:
            job.done(error)


@dataclass(eq=False)
class _Actor:
    handle: Any
    answer: Any  # the Ray object reference to wait for; None when idle
    deadline: float | None
    since: float = 0.0
    job: Job | None = None
    loaded: bool = False


class _Scorer:
    """The class of the Ray actors. `ready` returns the traceback if the task could not be loaded, else None."""

    def __init__(self, recipe: TaskRecipe, memory_mb: int | None):
        import traceback

        self._problem: str | None = None
        try:
            self._task = recipe.build()
            limit_memory(memory_mb)
        except (Exception, SystemExit):  # noqa: BLE001 - reported to the driver, which raises it there
            self._problem = traceback.format_exc()

    def ready(self) -> str | None:
        return self._problem

    def score(self, row: str, completion: str) -> Reply:
        return score_one(self._task, row, completion)


def _import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise ImportError(
            "the ray reward backend needs Ray: pip install 'trl_grpo_tasks[ray]', or use --reward_backend process"
        ) from error
    return ray


def _join_cluster(ray: Any, workers: int) -> bool:
    """Connect to Ray; return whether this call started or joined it, so that `close` must disconnect."""
    if ray.is_initialized():
        return False
    try:
        ray.init(address="auto", log_to_driver=False)
    except ConnectionError:
        ray.init(address="local", num_cpus=workers, include_dashboard=False, log_to_driver=False)
    return True
