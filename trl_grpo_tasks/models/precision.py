"""Detection of fast bf16 hardware."""

from __future__ import annotations

import torch


def is_bf16_fast() -> bool:
    """Whether bf16 is fast on this machine: on NVIDIA GPUs from Ampere on, AMD GPUs and Intel XPUs.

    It is not used on CPUs: most emulate bf16, up to forty times slower than float32. CPUs with bf16 units gain nothing
    on models that are small enough to train there, because of the cost of casting.
    """
    if torch.cuda.is_available():
        return torch.version.hip is not None or torch.cuda.get_device_capability()[0] >= 8
    return hasattr(torch, "xpu") and torch.xpu.is_available()
