"""Adaptive KL coefficient: beta grows while the policy is further from the reference than asked, and shrinks while
it is nearer."""

from __future__ import annotations

import math
from typing import Any


class AdaptiveKL:
    """beta <- beta * exp(clip(KL / target - 1, -0.2, 0.2) * min(n / horizon, 1)), within [beta_min, beta_max].

    The usual rule, beta * (1 + error * n / horizon), is the same up to second order for small batches, and turns
    negative for n > 5 * horizon. However large, one batch is one measurement and moves beta by at most 22%.
    """

    def __init__(self, beta: float, target: float, horizon: float, beta_min: float = 1e-6, beta_max: float = 10.0):
        self.beta = beta
        self.target = target
        self.horizon = horizon
        self.beta_min = beta_min
        self.beta_max = beta_max
        self._kl_sum = 0.0
        self._kl_count = 0

    def observe(self, kl: float) -> None:
        """One measurement of the KL divergence; `update` uses their mean."""
        self._kl_sum += kl
        self._kl_count += 1

    def update(self, n: int) -> float:
        """The coefficient for the next iteration, after one with `n` completions. Without a measurement: unchanged."""
        if self._kl_count:
            error = min(max(self._kl_sum / self._kl_count / self.target - 1, -0.2), 0.2)
            factor = math.exp(error * min(n / self.horizon, 1.0))
            self.beta = min(max(self.beta * factor, self.beta_min), self.beta_max)
            self._kl_sum, self._kl_count = 0.0, 0
        return self.beta

    def state_dict(self) -> dict[str, Any]:
        return {"beta": self.beta, "kl_sum": self._kl_sum, "kl_count": self._kl_count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.beta = state["beta"]
        self._kl_sum, self._kl_count = state["kl_sum"], state["kl_count"]
