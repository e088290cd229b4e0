"""Reward workers on a Ray cluster, with the same guarantees as the process pool, for rewards that need many machines.

The pool joins the cluster at RAY_ADDRESS or the one running on this machine, or else starts a local one. This package
and the task must be installed on every node. If a node dies, the completions that it was scoring are scored on another
one. The head node and the node of the training process must stay up.
"""

from __future__ import annotations

import atexit
import math
import os
import time
from typing import Any

from .pool import START_SECONDS, Job, Pool, RewardWorkerError, WorkerLost
from .worker import Reply, TaskRecipe, limit_memory, score_one


class RayPool(Pool):
    """Scores jobs in `workers` Ray actors, one job at a time each; an actor that times out is killed and replaced.

    A job whose actor is lost, because its node failed or its process died, is scored once more, on another node if
    there is one.
    """

    start_seconds = None  # while other actors score, one may wait for a free CPU of the cluster for any length of time

    def __init__(self, recipe: TaskRecipe, workers: int, timeout: float, memory_mb: int | None):
        super().__init__(workers, timeout)
        self._ray = _import_ray()
        self._started_ray = _join_cluster(self._ray, workers)
        self._actor_class = self._ray.remote(num_cpus=1, max_restarts=0, max_task_retries=0)(_Scorer)
        self._setup = (recipe, memory_mb)
        self._last_worked = time.monotonic()  # when a loaded actor existed or nothing was to be scored
        self._last_failed_start = -math.inf
        self._started.set()  # nobody waits, for the same reason
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)  # registered after Ray's own hook, so it runs before it

    def close(self) -> None:
        """Kill every actor, and shut Ray down if this pool started it."""
        super().close()
        if self._owner == os.getpid():
            atexit.unregister(self.close)
            if self._started_ray:
                self._started_ray = False
                self._ray.shutdown()

    def _start_worker(self) -> _Actor:
        return _Actor(self._ray, self._actor_class.remote(*self._setup))

    def _check(self) -> None:
        """Raise RewardWorkerError also if jobs have waited too long for an actor that has loaded the task."""
        super()._check()
        now = time.monotonic()
        if not self._queue or self._loaded:
            self._last_worked = now
        elif now - self._last_worked > START_SECONDS:
            free, total = (r.get("CPU", 0) for r in (self._ray.available_resources(), self._ray.cluster_resources()))
            reason = f"no reward worker has started on the Ray cluster for {START_SECONDS:g} s"
            cpus = f"{free:g} of its {total:g} CPUs are free, and each worker needs one"
            raise RewardWorkerError(f"{reason}; {cpus}: add nodes, or use --reward_backend process")

    def _count_failed_start(self, reason: str, since: float) -> None:
        if since > self._last_failed_start:  # a node that dies fails several starts at once
            self._last_failed_start = time.monotonic()
            super()._count_failed_start(reason, since)


class _Actor:
    """A worker on Ray, with the methods of a worker process."""

    node = ""  # known once it is loaded

    def __init__(self, ray: Any, handle: Any):
        self._ray, self._handle = ray, handle
        self._answer = handle.ready.remote()

    def begin(self, job: Job) -> None:
        self._answer = self._handle.score.remote(job.row, job.completion)

    def loaded(self, seconds: float) -> list[str | None]:
        found = self.replies(seconds)
        if found:
            problem, self.node = found[0]
            return [problem]
        return []

    def replies(self, seconds: float) -> list[Any]:
        if not self._ray.wait([self._answer], timeout=seconds)[0]:
            return []
        try:
            return [self._ray.get(self._answer)]
        except self._ray.exceptions.RayError as error:
            lost = not isinstance(error, self._ray.exceptions.RayTaskError)  # which is raised in a worker that lives
            what = "the worker died" if lost else "the score cannot be sent"
            raise WorkerLost(f"{what}: {' '.join(str(error).split())[:500]}", again=lost) from error

    def kill(self) -> None:
        self._ray.kill(self._handle, no_restart=True)


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
