"""Triton kernels of the rollouts. Import this package only where Triton is installed; it defines two operators:

`trl_grpo_tasks::paged_attention` (attention.py) and `trl_grpo_tasks::adapted_linear` (linear.py).
"""

from .attention import PREFILL_TILE, paged_attention
from .linear import adapted_linear
from .next_token import new_seeds, sample

__all__ = ["PREFILL_TILE", "adapted_linear", "new_seeds", "paged_attention", "sample"]
