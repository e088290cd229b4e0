"""Options for the best model by a held-out metric."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from trl import GRPOConfig

from ..advantages import doublings

EVAL_BATCH_SIZE = GRPOConfig.per_device_eval_batch_size
# Metrics of evaluations during training for which a smaller value is better.
LESS_IS_BETTER = ("loss", "kl", "groups_without_signal", "reward_failures", "completions/clipped_ratio")
PLAIN_METRICS = ("reward", "reward_std", "loss", "entropy", "kl")
TASK_METRICS = ("distinct_answers", "groups_without_signal", "reward_failures")


def complete_options(args: Any) -> None:
    """Set what `best_by` of a TaskGRPOConfig implies, before transformers checks the options."""
    args.best_by = args.best_by or None  # an empty value on the command line overrides that of a recipe
    args.is_eval_batch_size_given = args.per_device_eval_batch_size is not None
    if not args.is_eval_batch_size_given:
        args.per_device_eval_batch_size = EVAL_BATCH_SIZE
        if args.best_by is not None:  # whole groups, and at least as many as in training
            size, group = args.per_device_train_batch_size, args.num_generations_eval or args.num_generations
            args.per_device_eval_batch_size = -(-max(EVAL_BATCH_SIZE, size) // group) * group
    if args.best_by is None:
        return
    if args.save_strategy == "no":
        raise ValueError(
            f"best_by={args.best_by!r} keeps a checkpoint, and save_strategy='no' saves none; set save_strategy to "
            "'steps', 'epoch' or 'best'"
        )
    # transformers would refuse save_steps that are not a multiple of eval_steps. Each new best model is saved here, so
    # that this is not needed; `check_options` turns it on.
    args.load_best_model_at_end = False
    if args.eval_strategy == "no":
        args.eval_strategy = "epoch" if args.save_strategy == "epoch" else "steps"
        if args.eval_steps is None and args.save_strategy == "steps":
            args.eval_steps = args.save_steps
    if args.save_total_limit == 1:  # transformers would delete the newest checkpoint at the end, and not the best
        args.save_total_limit = 2


def check_options(args: Any) -> None:
    """Raise ValueError for options of the best model that do not fit together."""
    if args.best_by is None:
        return
    name = metric_name(args.best_by)
    if args.metric_for_best_model not in (None, name):
        raise ValueError(
            f"best_by={args.best_by!r} and metric_for_best_model={args.metric_for_best_model!r} choose the model by "
            "different metrics; leave metric_for_best_model out"
        )
    args.load_best_model_at_end = True
    args.metric_for_best_model = name
    if args.greater_is_better is None:
        args.greater_is_better = name not in LESS_IS_BETTER


def metric_name(best_by: str) -> str:
    """The name under which an evaluation logs a metric, after `eval_`. Components of the reward have a longer name."""
    name = best_by.removeprefix("eval_")
    is_component = not ("/" in name or "@" in name or name in (*PLAIN_METRICS, *TASK_METRICS))
    return f"rewards/{name}/mean" if is_component else name


def check_best_by(args: Any, components: Sequence[str], has_task: bool) -> None:
    """Raise ValueError if evaluations during training have no metric `best_by`. Full names, with a slash, are only
    known when the first evaluation is done."""
    if args.best_by is None or "/" in args.best_by:
        return
    known = [*components, *(name for name in PLAIN_METRICS if name != "kl" or args.beta)]
    size = args.num_generations_eval or args.num_generations
    if has_task:
        known += [f"{kind}@{k}" for kind in ("pass", "max") for k in doublings(size)] + list(TASK_METRICS)
    if args.best_by.removeprefix("eval_") in known:
        return
    reason = ""
    if re.fullmatch(r"(pass|max)@\d+", args.best_by) and has_task:
        reason = f" with {size} completions per prompt, which num_generations_eval sets"
    raise ValueError(
        f"best_by={args.best_by!r} is no metric of evaluations during training{reason}; choose one of: "
        f"{', '.join(known)}"
    )
