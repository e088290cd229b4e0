"""The best model of a run by a held-out metric, and its record in the run folder."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import TrainerCallback

from ...files import write_atomically
from ...models import checkpoints
from ...report.run_folder import OUTCOME_FILE
from ...task import short_hash


class BestModel(TrainerCallback):
    """Saves a checkpoint at each new best value of `best_by`. transformers keeps that checkpoint and loads it at the
    end.

    At the end of training, outcome.json in the run folder says which step the final model is from, and on which
    requests models were compared, which later evaluations leave out. The evaluations so far are part of a checkpoint,
    so that a resumed run decides as the whole run does.
    """

    def __init__(self, args: Any, requests: Iterable[str] = (), say: Any = tqdm.write):
        self._requests = sorted({short_hash(request) for request in requests})
        self._name, self._metric = args.best_by, f"eval_{args.metric_for_best_model}"
        self._sign = 1 if args.greater_is_better else -1
        self._say = say
        self._evaluations: list[tuple[int, float]] = []  # step and value; NaN where nothing was scored

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, Any], **kwargs: Any) -> None:
        if state.global_step == 0:  # there is no checkpoint of the initial model
            return
        if self._metric not in metrics:
            known = sorted(name.removeprefix("eval_") for name in metrics)
            raise ValueError(f"best_by={self._name!r} is no metric of this evaluation; it has: {', '.join(known)}")
        value = math.nan if metrics[self._metric] is None else metrics[self._metric]
        metrics[self._metric] = value  # transformers compares it with its best value
        self._evaluations.append((state.global_step, value))
        step, best = self._best
        is_best = step == state.global_step
        if is_best:
            control.should_save = True
        if state.is_world_process_zero:
            compared = "the best so far" if is_best else f"best: {best:.4g} at step {step}"
            self._say(f"held-out rows at step {state.global_step}: {self._name} {value:.4g} ({compared})")

    @property
    def _best(self) -> tuple[int, float]:
        """Step and value of the first evaluation with the best value; step 0 if there is none."""
        known = [(step, value) for step, value in self._evaluations if not math.isnan(value)]
        return max(known, key=lambda one: self._sign * one[1], default=(0, math.nan))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step, value = self._best
        if not state.is_world_process_zero or not step:
            return
        best = Path(args.output_dir) / f"checkpoint-{step}"
        is_kept = checkpoints.is_complete(best) and checkpoints.damage(best) is None
        count = len(self._evaluations)
        evaluated = f"{self._name} {value:.4g} on held-out rows, the best of {count} evaluation{'s' * (count > 1)}"
        if is_kept:
            self._say(f"the final model is that of step {step}: {evaluated}")
        else:
            self._say(
                f"the final model is that of step {state.global_step}, because the checkpoint of step {step} "
                f"({evaluated}) could not be saved or loaded"
            )
        outcome = {
            "best_by": self._name,
            "model_step": step if is_kept else state.global_step,
            "best_step": step,
            "best_value": value,
            "last_step": state.global_step,
            "evaluations": [[at, None if math.isnan(found) else found] for at, found in self._evaluations],
            "requests": self._requests,
        }
        write_atomically(Path(args.output_dir) / OUTCOME_FILE, json.dumps(outcome))

    def state_dict(self) -> dict[str, Any]:
        return {"evaluations": list(self._evaluations)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._evaluations = [(int(step), float(value)) for step, value in state["evaluations"]]
