"""Values that tasks are made of: rows, scores, options, tiny models, and errors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Row = Mapping[str, Any]
POLICIES = ("causal", "masked")
MASK_TOKEN = "<mask>"  # the mask token of the tiny model, for tasks with policy "masked"


@dataclass(frozen=True)
class Score:
    """The result of scoring one completion. Create it with `Task.make_score`, which computes `total`.

    Attributes:
        components: Named parts of the reward.
        total: The reward: the weighted sum of `components`.
        valid: Whether the completion is well-formed, so that it can be judged on its merits.
        success: Whether the completion solves the row.
        reason: Why the completion is not valid or not a success, for people to read.
        info: Further facts about the completion, for people to read. Evaluations average those in `Task.facts`.
    """

    components: dict[str, float]
    total: float
    valid: bool
    success: bool
    reason: str = ""
    info: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class TinySpec:
    """The tiny model of a task, which `--model tiny` creates: its vocabulary, its size and its policy kind.

    `tokens` are strings. Text is split greedily into the longest matching tokens, so the vocabulary may contain both
    single characters and whole words.
    """

    tokens: Sequence[str]
    hidden_size: int = 128
    layers: int = 4
    heads: int = 4
    context: int = 512
    policy: str = "causal"


class UnfinishedTaskError(NotImplementedError, ValueError):
    """A task lacks a required method. Being a ValueError too, it is printed in one line, without a traceback."""


def weighted_total(score: Score, weights: Mapping[str, float]) -> float:
    """Return the reward of a score: the weighted sum of its components and, where they have a weight, of its flags."""
    flags = {"valid": float(score.valid), "success": float(score.success)}
    parts = score.components | {name: value for name, value in flags.items() if name in weights}
    return math.fsum(weights[name] * value for name, value in parts.items())


class NoAnswerError(ValueError):
    """A task knows no answer of the kind that was asked for, gold or bad, to a row."""


class EditorError(ValueError):
    """The editor cannot be used with this model."""


@dataclass(frozen=True)
class NoOptions:
    """The `Options` of a task without options."""


def option(default: Any, help: str, **more: Any) -> Any:
    """Declare a field of a task's `Options` with its default value and its help text on the command line."""
    value: dict[str, Any] = {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    return field(**value, metadata={"help": help, **more})
