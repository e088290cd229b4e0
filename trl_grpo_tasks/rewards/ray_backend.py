"""Reward workers on a Ray cluster, with the same guarantees as the process pool, for rewards that need many machines.

The pool joins the cluster at RAY_ADDRESS or the one running on this machine, or else starts a local one. This package
and the task must be installed on every node. If a node dies, the completions that it was scoring are scored on another
one. The head node and the node of the training process must stay up.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import time
from dataclasses import dataclass
from typing import Any

from .pool import CLOSED, START_SECONDS, Job, Pool, RewardWorkerError
from .worker import Reply, TaskRecipe, limit_memory, score_one

POLL_SECONDS = 0.05  # how often the queue is checked for new jobs while actors are busy

logger = logging.getLogger(__name__)


class RayPool(Pool):
    """Scores jobs in `workers` Ray actors, one job at a time each; an actor that times out is killed and replaced.

    A job whose actor is lost, because its node failed or its process died, is scored once more, on another node if
    there is one.
    """

    def __init__(self, recipe: TaskRecipe, workers: int, timeout: float, memory_mb: int | None):
        super().__init__("reward-ray")
        self._ray = _import_ray()
        self._started_ray = _join_cluster(self._ray, workers)
        self._actor_class = self._ray.remote(num_cpus=1, max_restarts=0, max_task_retries=0)(_Scorer)
        self._setup = (recipe, memory_mb)
        self._timeout = timeout
        self._size = workers
        self._last_worked = time.monotonic()  # when a loaded actor existed or nothing was to be scored
        self._last_failed_start = -math.inf
        self._started.set()  # nobody waits: actors may wait for a free CPU of the cluster for any length of time
        self._thread.start()
        atexit.register(self.close)  # registered after Ray's own hook, so it runs before it

    def close(self) -> None:
        """Kill every actor, and shut Ray down if this pool started it."""
        super().close()
        if self._owner == os.getpid():
            atexit.unregister(self.close)
            if self._started_ray:
                self._started_ray = False
                self._ray.shutdown()

    def _run(self) -> None:
        try:
            self._workers = [self._start_actor() for _ in range(self._size)]
            while not self._closing and self._broken is None:
                self._check_that_an_actor_is_loaded()
                self._feed()
                waited_for = {actor.answer: actor for actor in self._workers if actor.answer is not None}
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
            for actor in self._workers:
                self._ray.kill(actor.handle, no_restart=True)

    def _start_actor(self) -> _Actor:
        handle = self._actor_class.remote(*self._setup)
        # No deadline yet: while other actors score, it may wait for a free CPU of the cluster for any length of time.
        return _Actor(handle, handle.ready.remote(), deadline=None, since=time.monotonic())

    def _check_that_an_actor_is_loaded(self) -> None:
        now = time.monotonic()
        if not self._queue or any(actor.loaded for actor in self._workers):
            self._last_worked = now
        elif now - self._last_worked > START_SECONDS:
            free, total = (r.get("CPU", 0) for r in (self._ray.available_resources(), self._ray.cluster_resources()))
            reason = f"no reward worker has started on the Ray cluster for {START_SECONDS:g} s"
            cpus = f"{free:g} of its {total:g} CPUs are free, and each worker needs one"
            self._fail_all(RewardWorkerError(f"{reason}; {cpus}: add nodes, or use --reward_backend process"))

    def _feed(self) -> None:
        nodes = {actor.node for actor in self._workers if actor.loaded}
        for actor in self._workers:
            if actor.answer is None:
                with self._changed:
                    fit = (job for job in self._queue if job.lost_on != actor.node or nodes == {actor.node})
                    actor.job = next(fit, None)
                    if actor.job is None:
                        continue
                    self._queue.remove(actor.job)
                actor.answer = actor.handle.score.remote(actor.job.row, actor.job.completion)
                actor.since = time.monotonic()
                actor.deadline = actor.since + self._timeout

    def _receive(self, actor: _Actor) -> None:
        try:
            reply = self._ray.get(actor.answer)
        except self._ray.exceptions.RayError as error:
            lost = not isinstance(error, self._ray.exceptions.RayTaskError)  # which is raised in a worker that lives
            what = "the worker died" if lost else "the score cannot be sent"
            self._replace(actor, f"{what}: {' '.join(str(error).split())[:500]}", lost)
            return
        actor.answer = actor.deadline = None
        if not actor.loaded:
            problem, actor.node = reply
            if problem is not None:
                self._fail_all(RewardWorkerError(f"the task cannot be loaded in a reward worker:\n{problem}"))
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
        for actor in list(self._workers):
            if actor.deadline is not None and actor.deadline <= now:
                self._replace(actor, f"timed out after {self._timeout:g} s")

    def _replace(self, actor: _Actor, reason: str, lost: bool = False) -> None:
        self._ray.kill(actor.handle, no_restart=True)
        self._workers.remove(actor)
        if actor.job is not None:
            if lost and actor.job.lost_on is None:
                logger.warning("a completion is scored again, because on Ray node %s %s", actor.node[:8], reason)
                actor.job.lost_on = actor.node
                with self._changed:
                    self._queue.appendleft(actor.job)
            else:
                actor.job.done(Reply(None, reason, time.monotonic() - actor.since))
        if not actor.loaded and actor.since > self._last_failed_start:  # a node that dies fails several starts at once
            self._last_failed_start = time.monotonic()
            self._fail_start(reason)
        if self._broken is None:
            self._workers.append(self._start_actor())


@dataclass(eq=False)
class _Actor:
    handle: Any
    answer: Any  # the Ray object reference to wait for; None when idle
    deadline: float | None
    since: float  # when it was started, then when its current job was
    job: Job | None = None
    loaded: bool = False
    node: str = ""  # the id of its node, known once it is loaded


class _Scorer:
    """The class of the Ray actors that score."""

    def __init__(self, recipe: TaskRecipe, memory_mb: int | None):
        import traceback

        self._problem: str | None = None
        try:
            self._task = recipe.build()
            limit_memory(memory_mb)
        except (Exception, SystemExit):  # noqa: BLE001 - reported to the driver, which raises it there
            self._problem = traceback.format_exc()

    def ready(self) -> tuple[str | None, str]:
        """Return the traceback if the task could not be loaded, else None; and the id of the node."""
        import ray

        return self._problem, ray.get_runtime_context().get_node_id()

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
