"""Adaptive KL coefficient: beta grows while the KL divergence is above its target, and shrinks while it is below."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ...task import option
from .base import Extra

HORIZON = 1000.0  # completions
LEAST_BETA, MOST_BETA = 1e-6, 10.0


@dataclass
class AdaptiveKLOptions:
    """Adaptive KL"""

    kl_target: float | None = option(None, "Adapt beta so that the KL divergence stays near this value.")


class AdaptiveKL:
    """beta <- beta * exp(clip(KL / target - 1, -0.2, 0.2) * min(n / HORIZON, 1)), within the bounds.

    The usual rule, beta * (1 + error * n / HORIZON), is the same for small batches and turns negative for large ones.
    """

    def __init__(self, beta: float, target: float):
        self.beta, self._target = beta, target
        self._kl_sum = 0.0
        self._kl_count = 0

    def observe(self, kl: float) -> None:
        """Add one measurement of the KL divergence; `update` uses the mean of all since the last update."""
        self._kl_sum += kl
        self._kl_count += 1

    def update(self, n: int) -> float:
        """Return the coefficient for the next iteration, after one with `n` completions; without a measurement it
        stays."""
        if self._kl_count:
            error = min(max(self._kl_sum / self._kl_count / self._target - 1, -0.2), 0.2)
            factor = math.exp(error * min(n / HORIZON, 1.0))
            self.beta = min(max(self.beta * factor, LEAST_BETA), MOST_BETA)
            self._kl_sum, self._kl_count = 0.0, 0
        return self.beta

    def state_dict(self) -> dict[str, Any]:
        return {"beta": self.beta, "kl_sum": self._kl_sum, "kl_count": self._kl_count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.beta = state["beta"]
        self._kl_sum, self._kl_count = state["kl_sum"], state["kl_count"]


class AdaptiveKLExtra(Extra):
    """Observes the KL divergence of each batch, and sets the trainer's beta once per iteration."""

    name = "kl"
    Options = AdaptiveKLOptions
    switch = "kl_target"

    @classmethod
    def check(cls, args: Any) -> None:
        if args.beta == 0 and args.kl_target is not None:
            raise ValueError(
                f"kl_target={args.kl_target} needs beta > 0: with beta=0 there is no reference; try beta=0.04"
            )

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        self.state = AdaptiveKL(self._args.beta, self._args.kl_target)

    def start_iteration(self) -> None:
        self._trainer.beta = self.state.update(self._args.generation_batch_size)
        self._metrics["beta"].append(self._trainer.beta)

    def extra_loss(self, model: Any) -> None:
        self.state.observe(self._metrics["kl"][-1])

    def resumed(self) -> None:
        self._trainer.beta = self.state.beta
