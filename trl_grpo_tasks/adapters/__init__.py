"""Tasks of other libraries: each module makes the tasks of one library a `Task`; see `registry.PREFIXES`.

This file has what they share: the tasks of libraries that only give rewards, optional libraries, and the split of
prompts that have no end.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import math
import threading
import zlib
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import zip_longest
from typing import Any, ClassVar

from ..rewards.environment import EnvironmentTask
from ..task import NoAnswerError, Row, Score, Task, option


@dataclass(frozen=True)
class RewardOptions:
    """Options of `RewardTask`."""

    success_at: float = option(1.0, "A completion succeeds if its total reward is at least this.")


class RewardTask(Task):
    """A task of a library that gives rewards and does not say which of them is a success."""

    Options: ClassVar[type] = RewardOptions

    def __init__(self, options: Any = None):
        super().__init__(options)
        if not math.isfinite(self.options.success_at):
            raise ValueError(f"--success_at {self.options.success_at} must be a number")

    def score_of(self, rewards: Mapping[str, float], info: Mapping[str, Any] | None = None) -> Score | None:
        """Return the score with these rewards as components; None if one of them is not a finite number."""
        if not all(map(math.isfinite, rewards.values())):
            return None
        score = self.make_score(rewards, valid=True, success=True, info=info)
        least = self.options.success_at
        if score.total >= least:
            return score
        return replace(score, success=False, reason=f"the reward is {score.total:.3g}, less than {least:g}")

    def bad(self, row: Row) -> str:
        for text in ("", "I do not know."):
            score = self.score(row, text)
            if score is not None and not score.success:
                return text
        raise NoAnswerError("an empty answer and 'I do not know.' are successes, or cannot be scored")


class RewardEnvironmentTask(EnvironmentTask, RewardTask):
    """A task of several turns of a library that gives rewards. Their sum decides on success."""

    def score(self, row: Row, completion: str) -> Score | None:
        score = super().score(row, completion)
        if score is None or not score.valid:
            return score
        decided = self.score_of(score.components, score.info)
        return (
            decided if decided is None or decided.success else replace(decided, reason=score.reason or decided.reason)
        )

    def check_repeats(self, row: Row, actions: Sequence[str]) -> None:
        """Raise ValueError if the environment answers differently when these actions are played again."""
        first, again = ([(self._shown_text(step.observation), step.done, step.valid, f"{step.reward}")
                         for step in self.play(row, actions)] for _ in range(2))  # fmt: skip
        if first != again:
            place, (one, other) = next(
                (place, pair) for place, pair in enumerate(zip_longest(first, again), 1) if pair[0] != pair[1]
            )
            raise ValueError(
                f"{self.name}: the same actions in the same episode get different answers, from action {place} on: "
                f"{one!r:.200} and then {other!r:.200}; completions are scored by playing them again, so the "
                "environment must take its random numbers from the row or its seed"
            )


def library_version(library: str, module: str) -> str:
    """Return the version of an optional library; ImportError, with what to install, if its module is missing."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"tasks of {library} need its package: pip install 'trl_grpo_tasks[{library}]'") from error
    return version(library)


def is_held_out(prompt: str) -> bool:
    """Whether a prompt belongs to the test split, as every second one does, whatever the seed it was made from.

    This is for prompts that have no end; `row_files.cut` splits a list.
    """
    return zlib.crc32(prompt.encode(errors="replace")) % 2 == 0


def wait_for(rewards: Awaitable[Any]) -> Any:
    """Wait for asynchronous rewards in a loop that stays, because clients that a reward keeps belong to their loop."""

    async def finished() -> Any:
        return await rewards

    return asyncio.run_coroutine_threadsafe(finished(), _loop()).result()


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="async-rewards").start()
    return loop
