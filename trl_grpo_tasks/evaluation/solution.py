"""`Solution`: the ranked distinct answers to a request, how they were found, and the check of a budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..task import Row
from .samples import Sample


@dataclass
class Answer:
    """One of the distinct answers to a request: its best sample, and how often it was drawn."""

    sample: Sample
    drawn: int = 1

    @property
    def completion(self) -> str:
        return self.sample.completion

    @property
    def success(self) -> bool:
        return self.sample.score is not None and self.sample.score["success"]

    @property
    def rank(self) -> tuple[bool, bool, float, int]:
        """A key that sorts answers: successes above others, then by score, then by how often they were drawn; those
        without a score are last."""
        score = self.sample.score
        return self.success, score is not None, 0.0 if score is None else score["total"], self.drawn


@dataclass
class Solution:
    """The answers to one request.

    Attributes:
        request: The request as it was given: text, or a row.
        row: The row of the task that the request was understood as.
        unverifiable: Why no answer can be a success (see `Task.unverifiable`); "" if one can.
        answers: The distinct answers, the best first. Answers are equal if their canonical forms are.
        samples: How many samples were drawn.
        seconds: The time from the start of sampling to the last score.
        stopped: Why no more samples were drawn.
        failures: Reason -> number of scored samples that failed for it, the most frequent first.
        unscored: Reason -> number of samples that could not be scored for it. They are neither failures nor successes.
    """

    request: str | Row
    row: dict[str, Any]
    unverifiable: str = ""
    answers: list[Answer] = field(default_factory=list)
    samples: int = 0
    seconds: float = 0.0
    stopped: str = ""
    failures: Counter[str] = field(default_factory=Counter)
    unscored: Counter[str] = field(default_factory=Counter)

    @property
    def solved(self) -> bool:
        """Whether the task accepted an answer."""
        return bool(self.answers) and self.answers[0].success

    @property
    def interpretation(self) -> str:
        """How the request was understood, in one line; "" if the task does not say."""
        return str(self.row.get("interpretation", ""))

    def add(self, samples: Sequence[Sample]) -> None:
        """Count these samples, and merge them into the ranked answers."""
        known = {answer.sample.form: answer for answer in self.answers}
        for sample in samples:
            new = Answer(sample)
            if self.unverifiable and sample.score is not None:
                sample.score["success"] = False
            if sample.score is None:
                self.unscored[sample.reason] += 1
            elif not new.success:
                self.failures[sample.reason or "no reason was given"] += 1
            old = known.setdefault(sample.form, new)
            if old is not new:
                old.sample = max(old, new, key=lambda answer: answer.rank[:-1]).sample
                old.drawn += 1
        self.samples += len(samples)
        self.answers = sorted(known.values(), key=lambda answer: answer.rank, reverse=True)


def check_budget(samples: int | None, seconds: float | None) -> None:
    """Raise ValueError for a budget that allows nothing."""
    if samples is not None and samples < 1:
        raise ValueError(f"--samples {samples} must be at least 1")
    if seconds is not None and not seconds > 0:
        raise ValueError(f"--seconds {seconds:g} must be more than 0")
