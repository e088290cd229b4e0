"""Detection of the half precision that this machine computes fast."""

from __future__ import annotations

import torch


def fast_half_precision() -> str | None:
    """Return `bf16` where it is fast, `fp16` on other NVIDIA GPUs with fast float16 (Volta, Turing), else None."""
    if is_bf16_fast():
        return "bf16"
    return "fp16" if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 7 else None


def is_bf16_fast() -> bool:
    """Whether bf16 is fast on this machine: on NVIDIA GPUs from Ampere on, AMD GPUs and Intel XPUs.

    It is not used on CPUs: most emulate bf16, up to forty times slower than float32. CPUs with bf16 units gain nothing
    on models that are small enough to train there, because of the cost of casting.
    """
    if torch.cuda.is_available():
        return torch.version.hip is not None or torch.cuda.get_device_capability()[0] >= 8
    return torch.xpu.is_available()
