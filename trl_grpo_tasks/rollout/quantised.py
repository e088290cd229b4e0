"""Weights and activations of bitsandbytes layers in dense form, so that rollouts need no bitsandbytes kernels.

A rollout reads the same weights hundreds of times, and bitsandbytes unpacks them at each read. Rollouts unpack them
once instead. Kernels of bitsandbytes also choose outlier columns on the host, which a CUDA graph cannot capture.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from torch import nn


def is_quantised(layer: nn.Module) -> bool:
    """Whether a layer is a 4-bit or 8-bit linear layer of bitsandbytes."""
    bitsandbytes = sys.modules.get("bitsandbytes")  # if it was never imported, there is no such layer
    return bitsandbytes is not None and isinstance(layer, bitsandbytes.nn.Linear4bit | bitsandbytes.nn.Linear8bitLt)


def dense_weight(layer: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight (out, in) of a quantised layer as `dtype`: what the layer multiplies inputs of `dtype` by."""
    from bitsandbytes import functional

    state = getattr(layer.weight, "quant_state", None)
    if state is not None:  # 4 bits
        state = copy.copy(state)
        state.dtype = dtype
        return functional.dequantize_4bit(layer.weight.data, state)
    scales = layer.weight.SCB if layer.state.SCB is None else layer.state.SCB  # the first forward pass moves them
    return layer.weight.data.to(dtype).mul_(scales.unsqueeze(1) * (1 / 127))


def activation_threshold(layer: Any) -> float | None:
    """Return the outlier threshold of a layer that rounds its inputs to 8 bits, or None if it does not round them.

    8-bit layers round their inputs, except on CPUs and XPUs in training mode, where bitsandbytes multiplies by the
    dense weight.
    """
    state = getattr(layer, "state", None)
    if not is_quantised(layer) or state is None:
        return None
    return None if layer.training and layer.weight.device.type in ("cpu", "xpu") else state.threshold


def round_activations(x: torch.Tensor, threshold: float) -> torch.Tensor:
    """Return the inputs of an 8-bit layer as its int8 product sees them: rounded to 255 values per token.

    As in LLM.int8(), columns in which any token is at least `threshold` in magnitude are not rounded, and values of
    that magnitude do not count for the scale of their token. A threshold of 0 rounds all columns. bitsandbytes first
    casts to float16, whatever the dtype of `x`.
    """
    half = x.half()
    magnitudes = half.abs()
    is_outlier = magnitudes >= (threshold or torch.inf)
    largest = magnitudes.masked_fill(is_outlier, 0).amax(-1, keepdim=True).float().clamp(min=1e-20)  # 0: no division
    rounded = (half * (127 / largest)).round() * (largest / 127)
    is_outlier_column = is_outlier.flatten(0, -2).any(0)
    return torch.where(is_outlier_column, x, rounded.to(x.dtype))
