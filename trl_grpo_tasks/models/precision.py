"""Which floating-point precision this machine is fast in."""

from __future__ import annotations

import torch


def is_bf16_fast() -> bool:
    """Whether this machine is fast in bf16: NVIDIA GPUs from Ampere on and other accelerators that say so. CPUs are
    not: without special units they emulate it, up to forty times slower, and with them casting eats the gain for
    models small enough to train there."""
    if torch.cuda.is_available():
        return torch.version.hip is not None or torch.cuda.get_device_capability()[0] >= 8
    return hasattr(torch, "xpu") and torch.xpu.is_available()
