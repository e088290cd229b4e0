"""The samples of an evaluation and what they add up to, as results.json keeps them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Sample:
    """One completion of a held-out row, and what the task said of it. `counts` of what was done while decoding; `form`
    is the same for completions that the task takes for the same answer. Of a completion that somebody else wrote the
    number of tokens may be unknown."""

    row: dict[str, Any]
    completion: str
    tokens: int | None
    score: dict[str, Any] | None
    reason: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    form: str = ""


@dataclass
class Evaluation:
    """`metrics` by name, their 95% `intervals`, and the samples behind them: row after row, as many of each."""

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
