"""Compiled parts of a model, which reduce the number of kernels per decoding pass.

A pass over one new token per row runs about a thousand tiny kernels. Norms, feed-forward blocks and rotary embeddings
are compiled separately. Their code is the same in every layer, so compilation takes seconds; compiling the full model
takes half a minute for each shape. A LoRA adapter that is not folded into the weights is added to the output of its
layer with one kernel instead of three.
"""

from __future__ import annotations

import os
import shutil
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .weights import is_plain_lora

# The name of the rotary-embedding function in the modeling files of all supported families.
ROTARY_FUNCTION = "apply_rotary_pos_emb"


class CompiledParts:
    """Within `used()`, parts of a model run with fewer kernels. Outside, the model is unchanged."""

    def __init__(self, model: Any):
        backbone = model.base_model
        parts: list[nn.Module] = [backbone.norm]
        for layer in backbone.layers:
            parts += [part for name, part in layer.named_children() if name != "self_attn"]
        self._adapters = [part for part in backbone.modules() if is_plain_lora(part)]
        functions = {kind: torch.compile(kind.forward, dynamic=True) for kind in {type(part) for part in parts}}
        self._forwards = [(part, types.MethodType(functions[type(part)], part)) for part in parts]
        self._module = sys.modules[type(backbone.layers[0].self_attn).__module__]
        self._rotary = getattr(self._module, ROTARY_FUNCTION)
        self._compiled_rotary = torch.compile(self._rotary, dynamic=True)

    @contextmanager
    def used(self) -> Iterator[None]:
        adapter_forwards = [
            (part, types.MethodType(_fused_lora_forward, part))
            for part in self._adapters
            if "forward" not in vars(part)
        ]
        for part, forward in (*self._forwards, *adapter_forwards):
            part.forward = forward
        setattr(self._module, ROTARY_FUNCTION, self._compiled_rotary)
        try:
            # The limit allows one function to serve layers of many shapes. Code that cannot be compiled runs eagerly.
            with torch._dynamo.config.patch(recompile_limit=64, suppress_errors=True):
                yield
        finally:
            setattr(self._module, ROTARY_FUNCTION, self._rotary)
            for part, _ in (*self._forwards, *adapter_forwards):
                del part.forward


def _fused_lora_forward(self: Any, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """The forward pass of a plain LoRA layer, with the adapter added in one kernel."""
    name = self.active_adapters[0]
    down, up = self.lora_A[name].weight, self.lora_B[name].weight
    if down.dtype != self.base_layer.weight.dtype:  # a float32 adapter on bf16 weights, without autocast
        return type(self).forward(self, x)
    rows = x.to(down.dtype).flatten(0, -2)  # cast once for layer and adapter; autocast would cast twice
    out = self.base_layer(rows)
    out.addmm_(rows @ down.T, up.T, alpha=self.scaling[name])
    return out.view(*x.shape[:-1], -1)


def can_compile(device: torch.device) -> bool:
    """Whether torch.compile can be used on this device: it needs a GPU, Triton and a C compiler."""
    if device.type != "cuda" or os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        return False
    from torch.utils._triton import has_triton

    compiler = os.environ.get("CC", "")
    return has_triton() and any(map(shutil.which, (compiler, "cc", "gcc", "clang")))
