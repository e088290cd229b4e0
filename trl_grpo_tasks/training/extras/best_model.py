"""The best model of a run by a held-out metric, and its record in the run folder (`best_by`)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import TrainerState

from ...files import write_atomically
from ...models import checkpoints
from ...report.run_folder import OUTCOME_FILE
from ...task import Task, option, short_hash
from ..advantages import doublings
from .base import Extra

# Metrics of evaluations during training for which a smaller value is better.
LESS_IS_BETTER = ("loss", "kl", "groups_without_signal", "reward_failures", "completions/clipped_ratio")
PLAIN_METRICS = ("reward", "reward_std", "loss", "entropy", "kl")
TASK_METRICS = ("distinct_answers", "groups_without_signal", "reward_failures")


@dataclass
class BestModelOptions:
    """Best model"""

    best_by: str | None = option(
        None,
        "Keep the checkpoint with the best value of this metric on held-out rows, and make it the final model: "
        "success, valid, reward, pass@K, max@K, distinct_answers, a component of the reward, or another metric of "
        "evaluations during training. Sets eval_strategy, if it is 'no', so that each saved step is evaluated.",
    )


def metric_name(best_by: str) -> str:
    """The name under which an evaluation logs a metric, after `eval_`. Components of the reward have a longer name."""
    name = best_by.removeprefix("eval_")
    is_component = not ("/" in name or "@" in name or name in (*PLAIN_METRICS, *TASK_METRICS))
    return f"rewards/{name}/mean" if is_component else name


class BestModelExtra(Extra):
    """Saves a checkpoint at each new best value of `best_by`. transformers keeps that checkpoint and loads it at the
    end.

    At the end of training, outcome.json in the run folder says which step the final model is from, and on which
    requests models were compared, which later evaluations leave out. The evaluations so far are part of a checkpoint,
    so that a resumed run decides as the whole run does.
    """

    name = "best"
    Options = BestModelOptions
    switch = "best_by"

    @classmethod
    def complete(cls, args: Any) -> None:
        args.best_by = args.best_by or None  # an empty value on the command line overrides that of a recipe
        if args.best_by is None:
            return
        if not args.is_eval_batch_size_given:  # whole groups, and at least as many as in training
            size, group = args.per_device_train_batch_size, args.num_generations_eval or args.num_generations
            args.per_device_eval_batch_size = -(-max(args.per_device_eval_batch_size, size) // group) * group
        if args.save_strategy == "no":
            raise ValueError(
                f"best_by={args.best_by!r} keeps a checkpoint, and save_strategy='no' saves none; set save_strategy "
                "to 'steps', 'epoch' or 'best'"
            )
        # transformers would refuse save_steps that are not a multiple of eval_steps. Each new best model is saved, so
        # that this is not needed; `check` turns it on.
        args.load_best_model_at_end = False
        if args.eval_strategy == "no":
            args.eval_strategy = "epoch" if args.save_strategy == "epoch" else "steps"
            if args.eval_steps is None and args.save_strategy == "steps":
                args.eval_steps = args.save_steps
        if args.save_total_limit == 1:  # transformers would delete the newest checkpoint at the end, and not the best
            args.save_total_limit = 2

    @classmethod
    def check(cls, args: Any) -> None:
        if args.best_by is None:
            return
        name = metric_name(args.best_by)
        if args.metric_for_best_model not in (None, name):
            raise ValueError(
                f"best_by={args.best_by!r} and metric_for_best_model={args.metric_for_best_model!r} choose the model "
                "by different metrics; leave metric_for_best_model out"
            )
        args.load_best_model_at_end = True
        args.metric_for_best_model = name
        if args.greater_is_better is None:
            args.greater_is_better = name not in LESS_IS_BETTER

    @classmethod
    def check_task(cls, args: Any, task: Task | None, held_out: Any = None) -> None:
        if args.best_by is not None and isinstance(held_out, Mapping):
            raise ValueError(
                f"best_by={args.best_by!r} chooses the model by one evaluation, but eval_dataset has "
                f"{len(held_out)}: {', '.join(held_out)}; pass one of them, or leave best_by out"
            )

    @classmethod
    def check_components(cls, args: Any, task: Task | None, components: Sequence[str]) -> None:
        """Full names of metrics, with a slash, are only known when the first evaluation is done."""
        if args.best_by is None or "/" in args.best_by:
            return
        known = [*components, *(name for name in PLAIN_METRICS if name != "kl" or args.beta)]
        size = args.num_generations_eval or args.num_generations
        if task is not None:
            known += [f"{kind}@{k}" for kind in ("pass", "max") for k in doublings(size)] + list(TASK_METRICS)
        if args.best_by.removeprefix("eval_") in known:
            return
        reason = ""
        if re.fullmatch(r"(pass|max)@\d+", args.best_by) and task is not None:
            reason = f" with {size} completions per prompt, which num_generations_eval sets"
        raise ValueError(
            f"best_by={args.best_by!r} is no metric of evaluations during training{reason}; choose one of: "
            f"{', '.join(known)}"
        )

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        task, rows = trainer.task, trainer.eval_dataset
        self._requests = sorted({} if task is None else {short_hash(task.request(json.loads(r))) for r in rows["row"]})
        self._metric = f"eval_{self._args.metric_for_best_model}"
        self._evaluations: list[tuple[int, float]] = []  # step and value; NaN where nothing was scored
        self.state = self

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, Any], **kwargs: Any) -> None:
        if state.global_step == 0:  # there is no checkpoint of the initial model
            return
        if self._metric not in metrics:
            known = sorted(name.removeprefix("eval_") for name in metrics)
            raise ValueError(f"best_by={args.best_by!r} is no metric of this evaluation; it has: {', '.join(known)}")
        value = math.nan if metrics[self._metric] is None else metrics[self._metric]
        metrics[self._metric] = value  # transformers compares it with its best value
        self._evaluations.append((state.global_step, value))
        step, best = self._best
        is_best = step == state.global_step
        if is_best:
            control.should_save = True
        if state.is_world_process_zero:
            compared = "the best so far" if is_best else f"best: {best:.4g} at step {step}"
            tqdm.write(f"held-out rows at step {state.global_step}: {args.best_by} {value:.4g} ({compared})")

    @property
    def _best(self) -> tuple[int, float]:
        """Step and value of the first evaluation with the best value; step 0 if there is none."""
        known = [(step, value) for step, value in self._evaluations if not math.isnan(value)]
        sign = 1 if self._args.greater_is_better else -1
        return max(known, key=lambda one: sign * one[1], default=(0, math.nan))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step, value = self._best
        if not state.is_world_process_zero or not step:
            return
        best = Path(args.output_dir) / f"checkpoint-{step}"
        is_kept = checkpoints.is_complete(best) and checkpoints.damage(best) is None
        count = len(self._evaluations)
        evaluated = f"{args.best_by} {value:.4g} on held-out rows, the best of {count} evaluation{'s' * (count > 1)}"
        if is_kept:
            tqdm.write(f"the final model is that of step {step}: {evaluated}")
        else:
            tqdm.write(
                f"the final model is that of step {state.global_step}, because the checkpoint of step {step} "
                f"({evaluated}) could not be saved or loaded"
            )
        outcome = {
            "best_by": args.best_by,
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

    def has_ended(self, checkpoint: str, common: dict[str, Any]) -> None:
        trainer = self._trainer
        self.load_state_dict(common.get(self.name, self.state_dict()))
        trainer.state = TrainerState.load_from_json(str(Path(checkpoint) / checkpoints.STATE_FILE))
        trainer.state.is_world_process_zero = trainer.is_world_process_zero()
        self.on_train_end(self._args, trainer.state, trainer.control)
