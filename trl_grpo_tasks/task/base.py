"""The `Task` interface, which every task implements.

A task is a domain whose answers a program can check: it provides prompts, and it scores completions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from .optional import OptionalMethods
from .score import NoAnswerError, NoOptions, Row, Score, UnfinishedTaskError

if TYPE_CHECKING:
    from ..constraints.base import Constraint


class Task(OptionalMethods):
    """Base class of tasks. A subclass must define `dataset` and `score`; a verifier is enough to train.

    The cold start learns from `gold` answers, and with `bad` ones `check` tests the verifier. Whatever else a task may
    define is in `OptionalMethods` (optional.py).

    Class attributes:
        name: The task's name.
        version: Change it whenever a score can change; cached scores are kept per version.
        description: One line.
        weights: Component name -> weight in the total.
        Options: A dataclass whose fields become command-line options; see `option`.
    """

    name: ClassVar[str]
    version: ClassVar[str]
    description: ClassVar[str]
    weights: Mapping[str, float]
    Options: ClassVar[type] = NoOptions

    # What was passed to `get_task`, by which a worker process loads the same task; None if the task was constructed
    # directly.
    spec: str | None = None

    def __init__(self, options: Any = None):
        self.options = self.Options() if options is None else options

    def dataset(self, split: str, size: int | None, seed: int) -> list[dict[str, Any]]:
        """Return `size` rows of the split "train" or "test" (fewer if there are not so many), or all rows if `size`
        is None.

        Each row has a `prompt`: a list of chat messages, or text that the model continues. Rows must be serialisable
        as JSON. The same seed gives the same rows, and the two splits share no request. Nothing may be downloaded
        unless the user named a dataset on the Hub.
        """
        raise UnfinishedTaskError(f"task {self.name!r} must define dataset(split, size, seed)")

    def score(self, row: Row, completion: str) -> Score | None:
        """Score one completion. This must be a pure function that raises no exception, whatever the model wrote.

        Malformed text gets a Score with valid=False and a reason. None means that the completion could not be scored
        (for example, because a solver crashed); such completions are left out, they do not count as 0. So are those
        with a component that does not lie within -1e9 and 1e9.
        """
        raise UnfinishedTaskError(f"task {self.name!r} must define score(row, completion)")

    def gold(self, row: Row) -> str:
        """Return a completion of `row` that succeeds; NoAnswerError if none is known."""
        raise NoAnswerError(f"task {self.name!r} knows no answers: it does not define gold(row)")

    def bad(self, row: Row) -> str:
        """Return a completion of `row` that does not succeed; NoAnswerError if none is known."""
        raise NoAnswerError(f"task {self.name!r} knows no wrong answers: it does not define bad(row)")

    def constraint(self, tokenizer: Any) -> Constraint | None:
        """Return the constraint on completions, compiled for `tokenizer`, or None if the task has none."""
        return None

    def defines(self, method: str) -> bool:
        """Whether this task has its own version of an optional method, such as "group_components"."""
        return getattr(type(self), method) is not getattr(Task, method)

    def make_score(
        self,
        components: Mapping[str, float],
        valid: bool,
        success: bool,
        reason: str = "",
        info: Mapping[str, Any] | None = None,
    ) -> Score:
        """Create a Score whose total is the weighted sum of `components`."""
        if unknown := [name for name in components if name not in self.weights]:
            raise ValueError(f"component {unknown[0]!r} has no weight; weights are: {', '.join(self.weights)}")
        total = math.fsum(self.weights[name] * value for name, value in components.items())
        return Score(dict(components), total, valid, success, reason, dict(info or {}))
