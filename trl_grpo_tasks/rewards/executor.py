"""RewardExecutor: scores completions in parallel, in order, with a time limit each, while the GPU does something else.

with RewardExecutor(get_task("brick"), workers=4, timeout=10) as executor:
    pending = executor.submit(rows, completions)  # returns at once
    ...                                           # reference log-probs
    outcomes = pending.result()                   # one Outcome per completion, in order
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ..task import Score, Task
from .pool import InlinePool, Job, ProcessPool, RewardWorkerError
from .worker import Reply, TaskRecipe

if TYPE_CHECKING:
    from .ray_backend import RayPool

__all__ = ["BACKENDS", "Outcome", "Pending", "RewardExecutor", "RewardStats", "RewardWorkerError"]

BACKENDS = ("process", "ray")


@dataclass(frozen=True)
class Outcome:
    """The score of one completion, or None and the reason. `cached` says that it was not computed for this one."""

    score: Score | None
    reason: str
    seconds: float
    cached: bool


@dataclass
class RewardStats:
    """Counts since the start of training: completions answered from the cache, scored, and scored without success."""

    hits: int = 0
    misses: int = 0
    failures: int = 0
    seconds: float = 0.0  # spent in `score`, all workers together

    @property
    def hit_rate(self) -> float:
        return self.hits / max(1, self.hits + self.misses)

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in asdict(self):
            setattr(self, name, state[name])


class Pending:
    """The scores of one batch, some of them still on their way."""

    def __init__(self, parts: Sequence[Outcome | Future[Outcome] | _Twin], drain: Callable[[], None]):
        self._parts = parts
        self._drain = drain

    def result(self) -> list[Outcome]:
        """Wait for every score. Nothing that a model wrote raises here; a task that cannot be loaded in a worker does
        (RewardWorkerError), as it would give None for every completion."""
        self._drain()
        return [part if isinstance(part, Outcome) else part.result() for part in self._parts]


class RewardExecutor:
    """Scores completions of one task.

    `workers=0` scores in this process, when the result is asked for; `timeout` and `memory_mb` need workers. With
    workers, a completion that takes longer than `timeout` seconds, kills its worker, or needs more than `memory_mb`
    on top of the loaded task costs that worker, and gets None with a reason; the others are not affected.
    Equal (row, completion) pairs are scored once and remembered, `cache_size` of them; failures are not remembered.
    """

    def __init__(
        self,
        task: Task,
        workers: int = 0,
        timeout: float = 30.0,
        memory_mb: int | None = None,
        backend: str = "process",
        cache_size: int = 100_000,
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
        self.task = task
        self.stats = RewardStats()
        self._lock = threading.Lock()
        self._cache: OrderedDict[bytes, Score] = OrderedDict()
        self._cache_size = cache_size
        self._open: dict[bytes, Future[Outcome]] = {}
        self._identity = repr((task.name, task.version, task.options))
        self._pool: InlinePool | ProcessPool | RayPool
        if workers == 0:
            self._pool = InlinePool(task)
        elif backend == "process":
            self._pool = ProcessPool(TaskRecipe.of(task), workers, timeout, memory_mb)
        else:
            from .ray_backend import RayPool

            self._pool = RayPool(TaskRecipe.of(task), workers, timeout, memory_mb)
        # Runs at close, when the executor is garbage, or at the end of the interpreter, whichever comes first.
        self._end = weakref.finalize(self, self._pool.close)

    def submit(self, rows: Sequence[str], completions: Sequence[str]) -> Pending:
        """Start scoring `completions[i]` against `rows[i]` (a row as JSON text) and return without waiting."""
        if len(rows) != len(completions):
            raise ValueError(f"{len(rows)} rows for {len(completions)} completions; they go in pairs")
        if not self._end.alive:
            raise RuntimeError("the reward executor is closed")
        parts = [self._submit_one(row, text) for row, text in zip(rows, completions, strict=True)]
        return Pending(parts, self._pool.drain)

    def close(self) -> None:
        """Stop the workers. Called again it does nothing; it also runs at the end of the interpreter."""
        self._end()

    def state_dict(self) -> dict[str, Any]:
        return self.stats.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self._lock:
            self.stats.load_state_dict(state)

    def __enter__(self) -> RewardExecutor:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _submit_one(self, row: str, completion: str) -> Outcome | Future[Outcome] | _Twin:
        key = self._key(row, completion)
        with self._lock:
            known = self._cache.get(key)
            if known is not None:
                self._cache.move_to_end(key)
                self.stats.hits += 1
                return Outcome(known, "", 0.0, cached=True)
            twin = self._open.get(key)
            if twin is not None:
                self.stats.hits += 1
            else:
                self.stats.misses += 1
                future: Future[Outcome] = Future()
                self._open[key] = future
        if twin is not None:
            return _Twin(twin)
        self._pool.submit(Job(row, completion, lambda reply: self._finish(key, future, reply)))
        return future

    def _finish(self, key: bytes, future: Future[Outcome], reply: Reply | RewardWorkerError) -> None:
        with self._lock:
            self._open.pop(key, None)
            if isinstance(reply, Reply):
                self.stats.seconds += reply.seconds
                if reply.score is None:
                    self.stats.failures += 1
                else:
                    self._cache[key] = reply.score
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


class _Twin:
    """The outcome of a completion that is being scored already, for an equal one."""

    def __init__(self, scored: Future[Outcome]):
        self._scored = scored

    def result(self) -> Outcome:
        return replace(self._scored.result(), seconds=0.0, cached=True)
