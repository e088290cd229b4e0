"""What a run leaves in its folder, read back: settings, evaluations, metrics, times. Any of them may be missing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SETTINGS_FILE = "settings.json"
RESULTS_FILE = "results.json"
EVAL_ONLY_FILE = "evaluation.json"  # of --eval_only, which may be given the folder of a training run
METRICS_FILE = "training_metrics.jsonl"
PERFORMANCE_FILE = "performance.jsonl"


@dataclass
class RunFolder:
    """`evaluations` are in the order in which they were made; the first is what the run started from."""

    path: Path
    settings: dict[str, Any]
    evaluations: list[dict[str, Any]]
    metrics: list[dict[str, Any]]
    performance: list[dict[str, Any]]

    @classmethod
    def read(cls, run_dir: str | Path) -> RunFolder:
        """ValueError in words for a file that cannot be read. The last line of a running run may be half written."""
        path = Path(run_dir)
        if not path.is_dir():
            raise ValueError(f"{run_dir}: there is no such folder; give the --output_dir of a run")
        evaluations = [*_read_evaluations(path / RESULTS_FILE), *_read_evaluations(path / EVAL_ONLY_FILE)]
        metrics, performance = (_read_lines(path / name) for name in (METRICS_FILE, PERFORMANCE_FILE))
        return cls(path, _read_json(path / SETTINGS_FILE) or {}, evaluations, metrics, performance)

    @property
    def is_empty(self) -> bool:
        return not (self.settings or self.evaluations or self.metrics)

    @property
    def task_spec(self) -> str | None:
        """What --task was, or the name that the results give."""
        named = self.settings.get("run", {}).get("task") or self.settings.get("task", {}).get("name")
        named = named or next((one["task"] for one in self.evaluations if one.get("task")), None)
        return None if named is None else str(named)

    @property
    def is_finished(self) -> bool:
        """Transformers logs `train_runtime` once, when training is over."""
        return any("train_runtime" in line for line in self.performance)

    @property
    def last_step(self) -> int:
        return max((int(line["step"]) for line in self.metrics), default=0)

    @property
    def seconds(self) -> float | None:
        """How long training took, or has taken so far, as far as steps were logged."""
        ends = [line["train_runtime"] for line in self.performance if "train_runtime" in line]
        if ends:
            return ends[-1]
        timed = [line for line in self.performance if "step_time" in line]
        steps = [0, *(line["step"] for line in timed)]
        spans = zip(steps, steps[1:], timed, strict=False)
        return sum((end - start) * line["step_time"] for start, end, line in spans) if timed else None

    @property
    def before_and_after(self) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """The evaluation of what the run started from, and of what it made; None for what there is not. Of models that
        were only evaluated: the first and the last."""
        made = [one for one in self.evaluations if one["file"] == RESULTS_FILE] or self.evaluations
        after = next((one for one in made if one["name"] == "GRPO"), made[-1] if len(made) > 1 else None)
        return next((one for one in made if one is not after), None), after

    def curve(self, name: str) -> list[tuple[float, float]]:
        """(step, value) of a metric, or of a time."""
        lines = [*self.metrics, *self.performance]
        return [(line["step"], line[name]) for line in lines if is_number(line.get(name))]


def shown_metrics(evaluations: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of metrics of evaluations, without those that repeat another (pass@1 is success, max@1 the reward) or
    say nothing."""
    hidden = {"pass@1", "max@1"}
    if not any(metrics.get("unscored") for metrics in evaluations):
        hidden.add("unscored")
    return [name for name in dict.fromkeys(name for metrics in evaluations for name in metrics) if name not in hidden]


def is_number(value: Any) -> bool:
    """A number that can be drawn and averaged: not a truth value, not NaN, not infinite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _read_evaluations(path: Path) -> list[dict[str, Any]]:
    results = _read_json(path) or {}
    return [{**one, "file": path.name, "task": results.get("task")} for one in results.get("evaluations", [])]


def _read_json(path: Path) -> Any:
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); move it away to have a report without it") from error


def _read_lines(path: Path) -> list[dict[str, Any]]:
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            entry = json.loads(line)
        except ValueError:  # the line that was being written when the run was killed, or is being written now
            continue
        if isinstance(entry, dict) and is_number(entry.get("step")):
            lines.append(entry)
    return lines
