"""Reading of a run folder: settings, evaluations, metrics and timings. Any of its files may be missing."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..failures import first_line
from ..files import looks_local
from ..models.hub_access import use_cache_if_unreachable

SETTINGS_FILE = "settings.json"
COLD_START_FOLDER = "cold_start"  # the model before GRPO
RESULTS_FILE = "results.json"
EVAL_ONLY_FILE = "evaluation.json"  # written by --eval_only, possibly into the folder of a training run
METRICS_FILE = "training_metrics.jsonl"
PERFORMANCE_FILE = "performance.jsonl"
OUTCOME_FILE = "outcome.json"  # written at the end of a run with --best_by
JUDGE_FILE = "judge.json"  # written at the end of a run with an LLM judge
EXPORTS_FOLDER = "exports"  # written by `trl-grpo-tasks export`
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "max_completion_length", "chat_template_kwargs",
            "component_weights")  # fmt: skip
# What these files hold, as far as it is used; see `mismatch`. They may come from somebody else, or be edited by hand.
NUMBER = int | float
SETTINGS = {
    "command?": str,
    "run?": {"task?": str},
    "task?": {"name?": str, "version?": str, "options?": dict},
    "model?": {"name?": str, "revision?": str},
    "training?": {
        "temperature?": NUMBER, "top_p?": NUMBER, "min_p?": NUMBER, "top_k?": int, "max_completion_length?": int,
        "seed?": int, "repair_turns?": int, "repair_discount?": NUMBER, "chat_template_kwargs?": dict,
        "component_weights?": dict, "generation_kwargs?": dict,
    },
}  # fmt: skip
_SCORE = {"total": NUMBER, "success": bool, "valid": bool}
_SAMPLE = {
    "row": {"prompt": str | list}, "completion": str, "tokens?": int, "score?": _SCORE, "reason?": str,
    "counts?": dict, "form?": str,
}  # fmt: skip
RESULTS = {"task?": str, "evaluations?": [{"name": str, "metrics": dict, "samples": [_SAMPLE], "intervals?": dict}]}
OUTCOME = {"requests?": [str], "evaluations?": list, "best_by?": str, "best_value?": NUMBER}
# The names of the evaluations of a training run, explained below the tables of results.
EVALUATION_NAMES = {
    "before": "the model before training",
    "cold start": "after supervised fine-tuning on gold answers, before GRPO",
    "GRPO": "the trained model",
}


def local_run(name: str) -> str:
    """Return the folder of a run that was pushed to the Hub, downloaded if it is not there yet; `name` itself for
    everything else, also if the Hub cannot be reached. ValueError if the download of a run fails."""
    if "/" not in name or looks_local(name) or Path(name).exists():
        return name
    from huggingface_hub import hf_hub_download, snapshot_download

    use_cache_if_unreachable()
    try:
        settings = json.loads(Path(hf_hub_download(name, SETTINGS_FILE)).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return name
    if not isinstance(settings, dict) or not {"task", "training"} <= settings.keys():
        return name
    try:
        return snapshot_download(name, ignore_patterns=["*.html", "*.png"])
    except OSError as error:
        raise ValueError(f"the run {name} could not be downloaded from the Hub: {first_line(error)}") from error


def settings_of(model: str | Path) -> dict[str, Any]:
    """Read the settings of the run that made a model, given the run's folder, its cold start or a checkpoint of it; {}
    for other models. ValueError if they are damaged."""
    folder = Path(model)
    is_part = folder.name == COLD_START_FOLDER or folder.name.startswith("checkpoint-")
    above = _read_json(folder.parent / SETTINGS_FILE, SETTINGS) if is_part else {}
    return _read_json(folder / SETTINGS_FILE, SETTINGS) or above


def compared_requests(model: str) -> set[str]:
    """Return the hashes of the requests on which --best_by compared the models of a run, given its folder, a
    checkpoint in it or its id on the Hub; none for other models."""
    folder = Path(local_run(model))
    outcome = _read_json(folder / OUTCOME_FILE, OUTCOME) or _read_json(folder.parent / OUTCOME_FILE, OUTCOME)
    return set(outcome.get("requests", []))


def sampling_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with which a run made prompts, sampled and weighted rewards, as far as its settings have
    them. Their names are those of the arguments of `Solver.from_pretrained`."""
    training = settings.get("training") or {}
    used = training | (training.get("generation_kwargs") or {})  # as in TRL, these come before the options
    return {name: used[name] for name in SAMPLING if used.get(name) is not None}


@dataclass
class RunFolder:
    """The contents of a run folder.

    `evaluations` are in the order in which they were made; the first one is that of the initial model.
    """

    path: Path
    settings: dict[str, Any]
    evaluations: list[dict[str, Any]]
    metrics: list[dict[str, Any]]
    performance: list[dict[str, Any]]
    outcome: dict[str, Any] = field(default_factory=dict)
    judge: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, run_dir: str | Path) -> RunFolder:
        """Read a run folder; ValueError if it does not exist or a JSON file is damaged.

        Incomplete lines of log files are skipped, because a running process may be writing them.
        """
        path = Path(run_dir)
        if not path.is_dir():
            raise ValueError(f"{run_dir}: folder not found; pass the --output_dir of a run")
        evaluations = [*_read_evaluations(path / RESULTS_FILE), *_read_evaluations(path / EVAL_ONLY_FILE)]
        metrics, performance = (_read_lines(path / name) for name in (METRICS_FILE, PERFORMANCE_FILE))
        outcome, judge = _read_json(path / OUTCOME_FILE, OUTCOME), _read_json(path / JUDGE_FILE, {})
        return cls(path, settings_of(path), evaluations, metrics, performance, outcome, judge)

    @property
    def is_empty(self) -> bool:
        return not (self.settings or self.evaluations or self.metrics)

    @property
    def task_spec(self) -> str | None:
        """The value of --task, or else the task's name in the results."""
        spec = self.settings.get("run", {}).get("task") or self.settings.get("task", {}).get("name")
        spec = spec or next((one["task"] for one in self.evaluations if one.get("task")), None)
        return None if spec is None else str(spec)

    @property
    def is_finished(self) -> bool:
        """Whether training has finished: only then does transformers log `train_runtime`."""
        return any("train_runtime" in line for line in self.performance)

    @property
    def last_step(self) -> int:
        return max((int(line["step"]) for line in self.metrics), default=0)

    @property
    def seconds(self) -> float | None:
        """The training time so far, as far as steps were logged; None if unknown."""
        ends = [line["train_runtime"] for line in self.performance if "train_runtime" in line]
        if ends:
            return ends[-1]
        timed = [line for line in self.performance if "step_time" in line]
        steps = [0, *(line["step"] for line in timed)]
        spans = zip(steps, steps[1:], timed, strict=False)
        return sum((end - start) * line["step_time"] for start, end, line in spans) if timed else None

    @property
    def planned_steps(self) -> int | None:
        """The number of steps that the run was started with; None if it is unknown."""
        steps = self.settings.get("training", {}).get("max_steps")
        return steps if isinstance(steps, int) and steps > 0 else None

    @property
    def seconds_left(self) -> float | None:
        """The expected remaining training time, from the median of the last ten logged step times; None if unknown."""
        recent = [value for _, value in self.curve("step_time")][-10:]
        if self.planned_steps is None or not recent:
            return None
        return max(self.planned_steps - self.last_step, 0) * statistics.median(recent)

    @property
    def final_model(self) -> str | None:
        """Which step of a run with --best_by the final model is from, and why; None for other runs."""
        made = self.outcome
        if not {"evaluations", "best_by", "best_value", "best_step", "model_step", "last_step"} <= made.keys():
            return None
        count = len(made["evaluations"])
        best = (
            f"the best {made['best_by']} ({made['best_value']:.4g}) of {count} evaluation{'s' * (count > 1)} during "
            "training"
        )
        if made["model_step"] != made["best_step"]:
            return f"step {made['model_step']}; step {made['best_step']} had {best}, but could not be saved"
        return f"step {made['model_step']} of {made['last_step']}: {best}"

    @property
    def before_and_after(self) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """The evaluations of the initial and of the trained model, None if missing.

        If models were only evaluated, these are the first and the last evaluation.
        """
        made = [one for one in self.evaluations if one["file"] == RESULTS_FILE] or self.evaluations
        after = next((one for one in made if one["name"] == "GRPO"), made[-1] if len(made) > 1 else None)
        return next((one for one in made if one is not after), None), after

    @property
    def latest_evaluation(self) -> dict[str, Any] | None:
        """The evaluation of the trained model, or else of the initial one."""
        before, after = self.before_and_after
        return after or before

    @property
    def evaluation_names(self) -> str:
        """An explanation of the names of the training run's evaluations, "" if there are none."""
        names = [one["name"] for one in self.evaluations if one["file"] == RESULTS_FILE]
        return "; ".join(f"{name}: {EVALUATION_NAMES[name]}" for name in names if name in EVALUATION_NAMES)

    def curve(self, name: str) -> list[tuple[float, float]]:
        """Return (step, value) for each logged number of a metric or timing."""
        lines = [*self.metrics, *self.performance]
        return [(line["step"], line[name]) for line in lines if is_number(line.get(name))]


def largest_k(metrics: Iterable[str]) -> int:
    """Return the largest k of the metrics pass@k, 1 if there are none."""
    return max((int(match[1]) for name in metrics if (match := re.fullmatch(r"pass@(\d+)", name))), default=1)


def shown_metrics(evaluations: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the metrics to show, without redundant ones.

    pass@1 equals success, max@1 equals the reward, and `unscored` is hidden if it is 0.
    """
    hidden = {"pass@1", "max@1"}
    if not any(metrics.get("unscored") for metrics in evaluations):
        hidden.add("unscored")
    return [name for name in dict.fromkeys(name for metrics in evaluations for name in metrics) if name not in hidden]


def is_number(value: Any) -> bool:
    """Tell whether `value` is a finite number and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


def duration(seconds: float) -> str:
    """Format a duration in seconds, minutes or hours."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _read_evaluations(path: Path) -> list[dict[str, Any]]:
    results = _read_json(path, RESULTS)
    return [{**one, "file": path.name, "task": results.get("task")} for one in results.get("evaluations", [])]


def _read_json(path: Path, kinds: Any) -> dict[str, Any]:
    """Read a file whose content is of these kinds; see `mismatch`."""
    if not path.is_file():
        return {}
    way_out = "move it away to go on without it"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); {way_out}") from error
    if (problem := mismatch(content, kinds)) is not None:
        raise ValueError(f"{path} is damaged: {problem}; {way_out}")
    return content


def mismatch(value: Any, kinds: Any, place: str = "its content") -> str | None:
    """Say where a value of JSON is not of the given kinds; None if it is. Kinds are a type, [kinds] for a list, or a
    mapping for an object: names that end in ? may be missing or null, and other names are not looked at."""
    if isinstance(kinds, Mapping):
        if not isinstance(value, dict):
            return f"{place} must be an object, not {value!r:.60}"
        for name, inner in kinds.items():
            entry = value.get(name.rstrip("?"))
            if entry is None and name.endswith("?"):
                continue
            if (problem := mismatch(entry, inner, repr(name.rstrip("?")))) is not None:
                return problem
        return None
    if isinstance(kinds, list):
        if not isinstance(value, list):
            return f"{place} must be a list, not {value!r:.60}"
        return next((found for one in value if (found := mismatch(one, kinds[0], f"an entry of {place}"))), None)
    if isinstance(value, kinds) and (kinds is bool or not isinstance(value, bool)):
        return None
    return f"{place} must be of type {getattr(kinds, '__name__', kinds)}, not {value!r:.60}"


def _read_lines(path: Path) -> list[dict[str, Any]]:
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            entry = json.loads(line)
        except ValueError:  # a line that is being written now, or that was cut off when the run was killed
            continue
        if isinstance(entry, dict) and is_number(entry.get("step")):
            lines.append(entry)
    return lines
