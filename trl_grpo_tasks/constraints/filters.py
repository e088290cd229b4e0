"""Sampling filters (top_k, top_p, min_p). The kept tokens are recorded as a mask, so that scoring can apply it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

NEUTRAL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
NAMES = tuple(NEUTRAL)


@dataclass(frozen=True)
class SamplingFilters:
    """The filters of a sampling policy, applied in transformers' order: top_k, then top_p, then min_p.

    Each keeps the tokens whose logit reaches a threshold, so tokens with equal logits are kept or dropped together.
    """

    top_k: int = 0  # keeps the k most likely tokens; 0 keeps all
    top_p: float = 1.0  # keeps the most likely tokens that together have at least this probability
    min_p: float = 0.0  # keeps tokens with at least this fraction of the highest token probability

    def __post_init__(self) -> None:
        if not isinstance(self.top_k, int) or self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be a whole number from 0 on; 0 keeps all tokens")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1; 1 keeps all tokens")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p} must be between 0 and 1; 0 keeps all tokens")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> SamplingFilters:
        """Read the filters from sampling options of TRL and transformers; None and top_k=-1 keep all tokens."""
        top_k, top_p, min_p = (options.get(name) for name in NAMES)
        return cls(0 if top_k in (None, -1) else top_k, 1.0 if top_p is None else top_p, min_p or 0.0)

    def __str__(self) -> str:
        """Return the active filters as `option=value` pairs; the string is empty if none is active."""
        return ", ".join(f"{name}={getattr(self, name):g}" for name in NAMES if getattr(self, name) != NEUTRAL[name])

    def __bool__(self) -> bool:
        """Whether any filter is active."""
        return bool(str(self))

    def kept(self, logits_B_V: torch.Tensor) -> torch.Tensor:
        """Return which tokens may be sampled.

        The logits are scaled by the sampling temperature and -inf for tokens that a mask disallows.
        """
        import torch  # slow; the command line reads filters before it is needed

        threshold_B_1 = torch.full_like(logits_B_V[:, :1], -torch.inf)
        if 0 < self.top_k < logits_B_V.shape[1]:
            threshold_B_1 = logits_B_V.topk(self.top_k, dim=1).values[:, -1:]
        if self.top_p < 1:
            remaining = logits_B_V.masked_fill(logits_B_V < threshold_B_1, -torch.inf)
            ordered = remaining.sort(dim=1, descending=True).values
            probs = ordered.softmax(1)
            count_B_1 = ((probs.cumsum(1) - probs) < self.top_p).sum(1, keepdim=True)
            threshold_B_1 = ordered.gather(1, count_B_1 - 1)
        if self.min_p > 0:
            lowest = logits_B_V.max(1, keepdim=True).values + math.log(self.min_p)
            threshold_B_1 = torch.maximum(threshold_B_1, lowest)
        return (logits_B_V >= threshold_B_1) & (logits_B_V > -torch.inf)


def pack_on_device(kept_B_V: torch.Tensor) -> torch.Tensor:
    """Pack booleans over the vocabulary into int32 words (see base.py) on the device of the input."""
    import torch

    padded = torch.nn.functional.pad(kept_B_V, (0, -kept_B_V.shape[1] % 32))
    shifts = torch.arange(8, dtype=torch.uint8, device=kept_B_V.device)
    octets = padded.view(len(padded), -1, 8).to(torch.uint8) << shifts
    return octets.sum(2, dtype=torch.uint8).view(torch.int32)
