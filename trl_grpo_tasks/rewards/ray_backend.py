"""Reward workers on a Ray cluster, with the same guarantees as the process pool, for rewards that need many machines.

The pool joins the cluster at RAY_ADDRESS or the one running on this machine, or else starts a local one. This package
and the task must be installed on every node. If a node dies or stops answering, the completions that it was scoring
are scored on another node. The head node and the node of the training process must stay up.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from .pool import CLOSED, LATE, START_ATTEMPTS, START_SECONDS, Job, RewardWorkerError
from .worker import Reply, TaskRecipe, limit_memory, score_one

POLL_SECONDS = 0.05  # how often the queue is checked for new jobs while actors are busy
SILENCE_SECONDS = 5.0  # a node that does not answer a ping for this long, or for half the time limit, is given up

logger = logging.getLogger(__name__)


class RayPool:
    """Scores jobs in `workers` Ray actors, one job at a time each; an actor that times out is killed and replaced.

    A job whose actor is lost, because its node failed or its process died, is scored once more, on another node if
    there is one. Nodes are pinged: to a driver, an actor on a stopped node looks like a reward that takes long.
    """

    def __init__(self, recipe: TaskRecipe, workers: int, timeout: float, memory_mb: int | None):
        self._ray = _import_ray()
        self._started_ray = _join_cluster(self._ray, workers)
        self._actor_class = self._ray.remote(num_cpus=1, max_restarts=0, max_task_retries=0)(_Scorer)
        self._setup = (recipe, memory_mb)
        self._timeout = timeout
        self._silence = min(SILENCE_SECONDS, timeout / 2)
        self._size = workers
        self._actors: list[_Actor] = []
        # This process stops together with its own node, which is therefore not pinged.
        self._own_node = self._ray.get_runtime_context().get_node_id()
        self._nodes: dict[str, _Node] = {}
        self._last_worked = time.monotonic()  # when a loaded actor existed or nothing was to be scored
        self._queue: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._broken: RewardWorkerError | None = None
        self._failed_starts = 0
        self._last_failed_start = -math.inf
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

    def wait_until_started(self) -> None:
        """Do nothing: actors may wait for a free CPU of the cluster for any length of time."""

    def discard(self) -> None:
        """Give up the jobs that no actor has begun."""
        with self._changed:
            abandoned = list(self._queue)
            self._queue.clear()
        for job in abandoned:
            job.done(Reply(None, LATE, 0.0))

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
                self._check_that_an_actor_is_loaded()
                self._feed()
                waited_for = {actor.answer: actor for actor in self._actors if actor.answer is not None}
                if waited_for:
                    done, _ = self._ray.wait(list(waited_for), num_returns=1, timeout=POLL_SECONDS)
                    for answer in done:
                        self._receive(waited_for[answer])
                    self._ping_nodes()
                    self._replace_overdue()
                else:
                    with self._changed:
                        self._changed.wait_for(lambda: bool(self._queue) or self._closing)
        except BaseException as error:
            self._fail_all(RewardWorkerError(f"the Ray reward pool failed: {type(error).__name__}: {error}"))
            raise
        finally:
            self._fail_all(RewardWorkerError(CLOSED))
            for handle in [a.handle for a in self._actors] + [node.handle for node in self._nodes.values()]:
                self._ray.kill(handle, no_restart=True)

    def _start_actor(self) -> _Actor:
        handle = self._actor_class.remote(*self._setup)
        # No deadline yet: while other actors score, it may wait for a free CPU of the cluster for any length of time.
        return _Actor(handle, handle.ready.remote(), deadline=None, since=time.monotonic())

    def _check_that_an_actor_is_loaded(self) -> None:
        now = time.monotonic()
        if not self._queue or any(actor.loaded for actor in self._actors):
            self._last_worked = now
        elif now - self._last_worked > START_SECONDS:
            free, total = (r.get("CPU", 0) for r in (self._ray.available_resources(), self._ray.cluster_resources()))
            reason = f"no reward worker has started on the Ray cluster for {START_SECONDS:g} s"
            cpus = f"{free:g} of its {total:g} CPUs are free, and each worker needs one"
            self._fail_all(RewardWorkerError(f"{reason}; {cpus}: add nodes, or use --reward_backend process"))

    def _feed(self) -> None:
        nodes = {actor.node for actor in self._actors if actor.loaded}
        for actor in self._actors:
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
            if not actor.node:
                problem, actor.node, address = reply
                if problem is not None:
                    self._fail_all(RewardWorkerError(f"the task cannot be loaded in a reward worker:\n{problem}"))
                    return
                if actor.node != self._own_node:  # it gets jobs when its node has answered a ping
                    if actor.node not in self._nodes:
                        self._nodes[actor.node] = self._start_pinging(actor.node, address)
                    actor.answer = self._nodes[actor.node].handle.ping.remote()
                    return
            actor.loaded = True
            self._failed_starts = 0
            return
        job, actor.job = actor.job, None
        assert job is not None  # a loaded actor only replies to jobs
        job.done(reply)
        if reply.retire:
            self._replace(actor, "over the memory limit")

    def _start_pinging(self, node: str, address: str) -> _Node:
        there = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        handle = self._ray.remote(num_cpus=0, scheduling_strategy=there)(_Pulse).remote()
        return _Node(f"{node[:8]} at {address}", handle, handle.ping.remote(), asked=math.inf)

    def _ping_nodes(self) -> None:
        now = time.monotonic()
        for name, node in list(self._nodes.items()):
            try:
                self._ray.get(node.answer, timeout=0)
            except self._ray.exceptions.GetTimeoutError:
                if now - node.asked > self._silence:
                    self._lose(name, f"has not answered for {self._silence:g} s")
            except self._ray.exceptions.RayError:
                self._lose(name, "has died")
            else:
                if now - node.asked > self._silence / 5 or node.asked == math.inf:
                    node.answer, node.asked = node.handle.ping.remote(), now

    def _lose(self, name: str, what: str) -> None:
        node = self._nodes.pop(name)
        then = "the completions that it was scoring are scored on other nodes"
        logger.warning("Ray node %s %s; %s, and its reward workers start where CPUs are free", node.title, what, then)
        self._ray.kill(node.handle, no_restart=True)
        for actor in [actor for actor in self._actors if actor.node == name]:
            self._replace(actor, f"its Ray node {what}", lost=True)

    def _replace_overdue(self) -> None:
        now = time.monotonic()
        for actor in list(self._actors):
            if actor.deadline is not None and actor.deadline <= now:
                self._replace(actor, f"timed out after {self._timeout:g} s")

    def _replace(self, actor: _Actor, reason: str, lost: bool = False) -> None:
        self._ray.kill(actor.handle, no_restart=True)
        self._actors.remove(actor)
        if actor.job is not None:
            if lost and actor.job.lost_on is None:
                actor.job.lost_on = actor.node
                with self._changed:
                    self._queue.appendleft(actor.job)
            else:
                actor.job.done(Reply(None, reason, time.monotonic() - actor.since))
        if not actor.loaded and actor.since > self._last_failed_start:  # a node that dies fails several starts at once
            self._failed_starts += 1
            self._last_failed_start = time.monotonic()
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
    since: float  # when it was started, then when its current job was
    job: Job | None = None
    loaded: bool = False
    node: str = ""  # the id of its node, known once it is loaded


@dataclass(eq=False)
class _Node:
    title: str
    handle: Any  # the actor that answers pings
    answer: Any
    asked: float  # when the last ping was sent; infinity while the actor starts


class _Pulse:
    """The class of the Ray actors that show that a node works; scorers cannot answer while they score."""

    def ping(self) -> None:
        pass


class _Scorer:
    """The class of the Ray actors that score."""

    def __init__(self, recipe: TaskRecipe, memory_mb: int | None):
        import traceback

        self._problem: str | None = None
        self._with_prefixes = recipe.with_prefixes
        try:
            self._task = recipe.build()
            limit_memory(memory_mb)
        except (Exception, SystemExit):  # noqa: BLE001 - reported to the driver, which raises it there
            self._problem = traceback.format_exc()

    def ready(self) -> tuple[str | None, str, str]:
        """Return the traceback if the task could not be loaded, else None; and the id and the address of the node."""
        import ray

        return self._problem, ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

    def score(self, row: str, completion: str) -> Reply:
        return score_one(self._task, row, completion, self._with_prefixes)


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
