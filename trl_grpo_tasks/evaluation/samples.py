"""Data classes for the samples and the metrics of an evaluation, as stored in results.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple


class Completion(NamedTuple):
    """The text of a completion as it is scored, its number of tokens, and whether it reached the length limit before
    its end; the last two are None if unknown (completions read from a file)."""

    text: str
    tokens: int | None = None
    cut_off: bool | None = None


@dataclass
class Sample:
    """One completion of a held-out row with its score.

    Attributes:
        row: The row of the dataset.
        completion: The generated text.
        tokens: The number of generated tokens; None if unknown (completions read from a file).
        score: `Score.as_dict()`, or None if the completion could not be scored.
        reason: Why the completion failed or could not be scored.
        counts: Counters of the editor during decoding, by name.
        form: A hash of the task's normal form; equal for completions that the task considers the same answer.
        request: A hash of `Task.request`, equal for rows that ask the same; "" if unknown.
        cut_off: Whether the completion reached the length limit before its end; None if unknown.
    """

    row: dict[str, Any]
    completion: str
    tokens: int | None
    score: dict[str, Any] | None
    reason: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    form: str = ""
    request: str = ""
    cut_off: bool | None = None


@dataclass
class Evaluation:
    """The metrics of one model, their 95% confidence intervals, and the samples they were computed from.

    Samples are ordered by row, with the same number of samples for each row.
    """

    name: str
    metrics: dict[str, float]
    samples: list[Sample] = field(default_factory=list)
    intervals: dict[str, list[float]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Evaluation:
        samples = [Sample(**sample) for sample in values["samples"]]
        return cls(values["name"], values["metrics"], samples, values.get("intervals", {}))


def request_numbers(rows_P: Sequence[Sequence[Sample]]) -> list[int]:
    """Return the number of each row's request, given the samples of each row. A row whose request is unknown has a
    request of its own."""
    requests = [row[0].request or place for place, row in enumerate(rows_P)]
    numbers = {request: number for number, request in enumerate(dict.fromkeys(requests))}
    return [numbers[request] for request in requests]
