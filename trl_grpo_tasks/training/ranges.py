"""The ranges of numeric options. It imports nothing slow: the command line checks numbers before torch is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple


class Range(NamedTuple):
    """The values from `least`, or above `above`, up to `most`; and `also`. `note` ends the message."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    also: float | None = None
    note: str = ""

    def problem(self, value: float) -> str:
        """Return what the value must be, or "" if it is in the range. NaN and infinity are in no range."""
        if value == self.also:
            return ""
        if self.above is not None and not value > self.above:
            return f"above {self.above}"
        if self.least is not None and not value >= self.least:
            return f"at least {self.least}" + (f", or {self.also}" if self.also is not None else "")
        if self.most is not None and not value <= self.most:
            return f"at most {self.most}"
        return "" if math.isfinite(value) else "finite"


NOT_NEGATIVE, COUNT, POSITIVE, SHARE = Range(least=0), Range(least=1), Range(above=0), Range(least=0, most=1)
RANGES = {
    "num_generations": Range(least=2),
    "max_steps": Range(least=1, also=-1),  # -1: as many as num_train_epochs needs
    **dict.fromkeys(("seed", "data_seed"), Range(least=0, most=2**32 - 1)),  # NumPy takes no others
    **dict.fromkeys(("learning_rate", "temperature", "beta", "epsilon"), NOT_NEGATIVE),
    **dict.fromkeys(("weight_decay", "max_grad_norm", "warmup_steps"), NOT_NEGATIVE),
    "num_train_epochs": POSITIVE,
    **dict.fromkeys(("reward_workers", "replay_size", "resample_rounds", "cold_start_steps"), NOT_NEGATIVE),
    **dict.fromkeys(("train_rows", "eval_rows", "cold_start_rows", "samples"), COUNT),
    **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size", "cold_start_batch_size"), COUNT),
    **dict.fromkeys(("gradient_accumulation_steps", "steps_per_generation", "generation_batch_size"), COUNT),
    **dict.fromkeys(("rollout_batch_size", "num_iterations", "max_completion_length", "fill_steps"), COUNT),
    **dict.fromkeys(("reference_update_freq", "curriculum_window"), COUNT),
    **dict.fromkeys(("advantage_clip", "reward_timeout", "reward_memory_mb"), POSITIVE),
    **dict.fromkeys(("kl_target", "cold_start_learning_rate"), POSITIVE),
    **dict.fromkeys(("ema_alpha", "curriculum_advance"), SHARE),
    "curriculum_fall_back": SHARE,
    **dict.fromkeys(("own_successes", "rollouts_ahead"), NOT_NEGATIVE),
    "gamma": Range(above=0, most=1, note="; 1 does not discount"),
    "turn_credit": Range(least=0, most=1, note="; 1 does not discount"),
    "repair_discount": Range(above=0, most=1, note="; 1 does not discount"),
    "thought_weight": Range(least=0, note="; 0 trains only answers, 1 weights all alike"),
    "own_successes_fraction": Range(above=0, most=1, note="; own_successes=0 turns imitation off"),
    "own_successes_weight": Range(above=0, note="; own_successes=0 turns imitation off"),
}


def check_ranges(options: Mapping[str, Any], as_flags: bool = False) -> None:
    """Raise ValueError for an option that is out of its range. None is in every range.

    `as_flags` names options as they are written on a command line.
    """
    for name, value in options.items():
        if name in RANGES and value is not None and (problem := RANGES[name].problem(value)):
            shown = f"--{name} {value}" if as_flags else f"{name}={value}"
            raise ValueError(f"{shown} must be {problem}{RANGES[name].note}")
