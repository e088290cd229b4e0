"""Parallel scoring of completions in worker processes, with a time limit per completion.

Results come back in order, and scoring overlaps with other work, such as GPU computations:

with RewardExecutor(get_task("brick"), workers=4, timeout=10) as executor:
    pending = executor.submit(rows, completions)  # returns at once
    ...                                           # reference log-probs
    outcomes = pending.result()                   # one Outcome per completion, in order
"""

from __future__ import annotations

import hashlib
import json
import math
import pickle
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ..task import Score, Task, weighted_total
from .pool import LATE, InlinePool, Job, Pool, ProcessPool, RewardWorkerError
from .worker import Reply, TaskRecipe

if TYPE_CHECKING:
    from .classifier import FrozenClassifier
    from .llm_judge import Opinion

__all__ = ["BACKENDS", "Outcome", "Pending", "RewardExecutor", "RewardStats", "RewardWorkerError"]

BACKENDS = ("process", "ray")


@dataclass(frozen=True)
class Outcome:
    """The score of one completion, or None and the reason why there is no score."""

    score: Score | None
    reason: str
    seconds: float  # spent on scoring this completion; 0 if cached
    cached: bool  # the score was already known, or is shared with an equal completion


@dataclass
class RewardStats:
    """Counters since the start of training."""

    hits: int = 0  # completions whose score came from the cache
    misses: int = 0  # completions that had to be scored
    failures: int = 0  # completions that could not be scored
    seconds: float = 0.0  # time spent in `score`, summed over all workers

    @property
    def hit_rate(self) -> float:
        return self.hits / max(1, self.hits + self.misses)


class Pending:
    """The outcomes of one batch, some of which may still be computed. A part is an outcome, and whether it is that of
    an equal completion."""

    def __init__(
        self,
        parts: Sequence[tuple[Future[Outcome], bool]],
        pool: Pool,
        finish: Callable[[list[Outcome]], list[Outcome]],
    ):
        self._parts, self._pool, self._finish = parts, pool, finish

    def is_done(self) -> bool:
        """Whether `result` need not wait for workers."""
        return all(future.done() for future, _ in self._parts)

    def result(self, deadline: float | None = None) -> list[Outcome]:
        """Wait for all outcomes and return them in order.

        At the `deadline`, a value of time.monotonic(), completions that are not scored yet get None and a reason, and
        those that no worker has begun are given up. Without workers, it has no effect.

        No completion makes this raise. A task that cannot be loaded in a worker raises RewardWorkerError, because
        every completion would get None.
        """
        self._pool.drain()
        futures = {future for future, _ in self._parts}
        if deadline is not None and wait(futures, timeout=max(0.0, deadline - time.monotonic())).not_done:
            self._pool.discard()
        outcomes = []
        for future, is_shared in self._parts:
            if deadline is not None and not future.done():
                outcomes.append(Outcome(None, LATE, 0.0, cached=False))
            else:
                outcome = future.result()
                outcomes.append(replace(outcome, seconds=0.0, cached=True) if is_shared else outcome)
        return self._finish(outcomes)


class RewardExecutor:
    """Scores completions of one task.

    With `workers=0`, completions are scored in this process when the result is requested; `timeout` and `memory_mb`
    then have no effect. With workers, a completion that takes longer than `timeout` seconds, crashes its worker, or
    needs more than `memory_mb` on top of the loaded task gets None with a reason, and its worker is replaced; other
    completions are not affected. On Ray, a completion whose worker or node dies is scored once more first.

    If the task has an `llm_judge`, it is asked meanwhile, and its component is added to the scores. A completion that
    it cannot grade gets None. `timeout` does not apply to it: it has time limits of its own. The task's frozen judges
    score in this process, in batches, when the result is requested.

    Totals are made with `weights`, from `component_weights`; without them, with those of the task.

    Equal (row, completion) pairs are scored once. Up to `cache_size` scores are cached; failures are not cached.
    """

    def __init__(
        self,
        task: Task,
        workers: int = 0,
        timeout: float = 30.0,
        memory_mb: int | None = None,
        backend: str = "process",
        cache_size: int = 100_000,
        weights: Mapping[str, float] | None = None,
    ):
        if backend not in BACKENDS:
            raise ValueError(f"unknown reward backend {backend!r}; backends are: {', '.join(BACKENDS)}")
        if workers < 0:
            raise ValueError(f"reward workers must be 0 (score in this process) or more, got {workers}")
        if backend == "ray" and workers == 0:
            raise ValueError("the ray reward backend needs workers: give --reward_workers 1 or more")
        if not timeout > 0:
            raise ValueError(f"the reward timeout must be more than 0 seconds, got {timeout}")
        if memory_mb is not None and memory_mb <= 0:
            raise ValueError(f"the reward memory limit must be more than 0 MB or None, got {memory_mb}")
        self.task, self.workers, self.weights = task, workers, task.weights if weights is None else weights
        self._reweights = weights is not None
        self.judge = task.llm_judge()
        self.frozen_judges: dict[str, FrozenClassifier] = {}
        if judges := task.judges():
            from .classifier import frozen_of  # which needs torch

            self.frozen_judges = frozen_of(judges)
        self.stats = RewardStats()
        self._lock = threading.Lock()
        self._cache: OrderedDict[bytes, bytes] = OrderedDict()  # pickled replies, which take a sixth of the memory
        self._cache_size = cache_size
        self._in_progress: dict[bytes, Future[Outcome]] = {}
        self._identity = repr((task.name, task.version, task.options))
        self._pool: Pool
        if workers == 0:
            self._pool = InlinePool(task)
        elif backend == "process":
            self._pool = ProcessPool(TaskRecipe.of(task), workers, timeout, memory_mb)
        else:
            from .ray_backend import RayPool

            self._pool = RayPool(TaskRecipe.of(task), workers, timeout, memory_mb)
        # Runs on close, on garbage collection or at interpreter exit, whichever comes first.
        self._finalizer = weakref.finalize(self, self._pool.close)

    def submit(self, rows: Sequence[str], completions: Sequence[str]) -> Pending:
        """Start scoring `completions[i]` against `rows[i]` (a row as JSON text) and return without waiting."""
        if len(rows) != len(completions):
            raise ValueError(f"got {len(rows)} rows and {len(completions)} completions; pass one row per completion")
        if not self._finalizer.alive:
            raise RuntimeError("the reward executor is closed")
        pairs = list(zip(rows, completions, strict=True))
        parts = [self._submit_one(row, text) for row, text in pairs]
        opinions: list[Opinion | None] = [None] * len(pairs)
        if self.judge is not None:
            opinions = [self.judge.ask(json.loads(row), text) for row, text in pairs]
        return Pending(parts, self._pool, partial(self._completed, pairs, opinions))

    def wait_until_started(self) -> None:
        """Wait until a worker has loaded the task, so that the time this takes does not count for later requests."""
        self._pool.wait_until_started()

    def close(self) -> None:
        """Stop the workers and the judge. Further calls do nothing. It is also called at interpreter exit."""
        self._finalizer()
        if self.judge is not None:
            self.judge.close()

    def state_dict(self) -> dict[str, Any]:
        return asdict(self.stats) | ({} if self.judge is None else {"judge": self.judge.state_dict()})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self._lock:
            self.stats = RewardStats(**{one.name: state[one.name] for one in fields(RewardStats)})
        if self.judge is not None and "judge" in state:
            self.judge.load_state_dict(state["judge"])

    def __enter__(self) -> RewardExecutor:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _submit_one(self, row: str, completion: str) -> tuple[Future[Outcome], bool]:
        key = self._key(row, completion)
        future: Future[Outcome] = Future()
        with self._lock:
            known = self._cache.get(key)
            if known is not None:
                self._cache.move_to_end(key)
                score, reason = pickle.loads(known)
                future.set_result(Outcome(score, reason, 0.0, cached=True))
            original = self._in_progress.get(key)
            if known is not None or original is not None:
                self.stats.hits += 1
                return original or future, True
            self.stats.misses += 1
            self._in_progress[key] = future
        self._pool.submit(Job(row, completion, lambda reply: self._finish(key, future, reply)))
        return future, False

    def _completed(
        self, pairs: Sequence[tuple[str, str]], opinions: Sequence[Opinion | None], outcomes: list[Outcome]
    ) -> list[Outcome]:
        """Wait for the judges, add their components to the outcomes, and make the totals with the weights."""
        completed, judged = [], {}
        if self.frozen_judges:
            rows, texts = [json.loads(row) for row, _ in pairs], [text for _, text in pairs]
            judged = {name: judge.score(rows, texts) for name, judge in self.frozen_judges.items()}
        for i, (outcome, opinion) in enumerate(zip(outcomes, opinions, strict=True)):
            score, reason = outcome.score, outcome.reason
            if score is not None and opinion is not None:
                score, reason = opinion.added_to(score)
            if score is not None:
                for name, values in judged.items():
                    score = self.frozen_judges[name].added_to(score, values[i])
                score = replace(score, total=self._total(outcome.score, score))
            completed.append(replace(outcome, score=score, reason=reason if score is None else outcome.reason))
        return completed

    def _total(self, scored: Score | None, score: Score) -> float:
        """Return the total of a score, given as the task made it and with the components of judges."""
        assert scored is not None
        if self._reweights:
            return weighted_total(score, self.weights)
        # A row may name rewards that no other row of the task has, so that only the task knows their weights.
        added = [name for name in score.components if name not in scored.components]
        return math.fsum([scored.total, *(self.weights[name] * score.components[name] for name in added)])

    def _finish(self, key: bytes, future: Future[Outcome], reply: Reply | RewardWorkerError) -> None:
        with self._lock:
            self._in_progress.pop(key, None)
            if isinstance(reply, Reply):
                self.stats.seconds += reply.seconds
                if reply.score is None:
                    self.stats.failures += 1
                else:
                    self._cache[key] = pickle.dumps((reply.score, reply.reason))
                    while len(self._cache) > self._cache_size:
                        self._cache.popitem(last=False)
        if isinstance(reply, Reply):
            future.set_result(Outcome(reply.score, reply.reason, reply.seconds, cached=False))
        else:
            future.set_exception(reply)

    def _key(self, row: str, completion: str) -> bytes:
        digest = hashlib.blake2b(digest_size=20)
        for part in (self._identity, row, completion):
            text = part.encode("utf-8", "surrogatepass")
            digest.update(len(text).to_bytes(8, "big") + text)
        return digest.digest()
