"""What a run says about its own evaluations: a start that never succeeds, a model that GRPO made worse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..evaluation.samples import Evaluation
from ..evaluation.summary import change
from ..report.run_folder import COLD_START_FOLDER
from .arguments import RunArguments


def before_training_hints(before: Evaluation, run: RunArguments) -> list[str]:
    """Return a hint if no held-out sample succeeds before GRPO, which can then learn only from partial credit."""
    if before.metrics["success"] > 0:
        return []
    advice = "a cold start (--cold_start_steps), or an easier level"
    if run.cold_start_steps:
        advice = (
            f"a longer cold start (--cold_start_steps, now {run.cold_start_steps}), another "
            f"--cold_start_learning_rate (now {run.cold_start_learning_rate:g}), or an easier level"
        )
    return [
        f"no held-out sample succeeds yet, so GRPO learns from partial credit only; if it does not help, try {advice}"
    ]


def outcome(before: Evaluation, after: Evaluation, run: RunArguments, args: Any, model: str) -> list[str]:
    """Return a statement if GRPO lowered success beyond its 95% interval, or if nothing succeeds.

    `model` is the model before training, which is the better one if there was no cold start.
    """
    first, last = before.metrics["success"], after.metrics["success"]
    if first == last == 0:
        return [
            "GRPO did not learn the task: no held-out sample succeeds, before or after it. The hints above say what "
            "to change."
        ]
    if change(before, after, "success", run.samples)[1] >= 0:
        return []
    better = Path(args.output_dir) / COLD_START_FOLDER if run.cold_start_steps else model
    return [
        f"GRPO made the model worse: success {first:.3f} -> {last:.3f}. Lower --lr (now {args.learning_rate:g}), or "
        f"keep the best model of a run with --best_by success. The better model is {better}: give it to solve, eval, "
        "play or --model."
    ]
