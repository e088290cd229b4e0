"""Parts of a model in fewer kernels, for passes over one new token a row, which are a thousand tiny ones.

Norms, feed-forward blocks and rotations are compiled: their own code, the same in every layer, so that it takes
seconds for all of them (a whole model takes half a minute for each shape). An adapter that is not folded into weights
adds its share to the output of the layer it adapts in one kernel instead of three.
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

ROTATION = "apply_rotary_pos_emb"  # its name in the modeling files of all known families


class CompiledParts:
    """Inside `used()` the parts of a model run in fewer kernels, and the model is otherwise as it was."""

    def __init__(self, model: Any):
        backbone = model.base_model
        parts: list[nn.Module] = [backbone.norm]
        for layer in backbone.layers:
            parts += [part for name, part in layer.named_children() if name != "self_attn"]
        self._adapters = [part for part in backbone.modules() if is_plain_lora(part)]
        functions = {kind: torch.compile(kind.forward, dynamic=True) for kind in {type(part) for part in parts}}
        self._forwards = [(part, types.MethodType(functions[type(part)], part)) for part in parts]
        self._module = sys.modules[type(backbone.layers[0].self_attn).__module__]
        self._rotation = getattr(self._module, ROTATION)
        self._compiled_rotation = torch.compile(self._rotation, dynamic=True)

    @contextmanager
    def used(self) -> Iterator[None]:
        unfolded = [(part, types.MethodType(_adapted, part)) for part in self._adapters if "forward" not in vars(part)]
        for part, forward in (*self._forwards, *unfolded):
            part.forward = forward
        setattr(self._module, ROTATION, self._compiled_rotation)
        try:
            # One piece of code serves layers of several shapes. What cannot be compiled runs as it is.
            with torch._dynamo.config.patch(recompile_limit=64, suppress_errors=True):
                yield
        finally:
            setattr(self._module, ROTATION, self._rotation)
            for part, _ in (*self._forwards, *unfolded):
                del part.forward


def _adapted(self: Any, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """The forward pass of such a layer."""
    name = self.active_adapters[0]
    down, up = self.lora_A[name].weight, self.lora_B[name].weight
    if down.dtype != self.base_layer.weight.dtype:  # an adapter in float32 on bf16 weights, and no autocast
        return type(self).forward(self, x)
    rows = x.to(down.dtype).flatten(0, -2)  # cast once for the layer and its adapter, where autocast would do it twice
    out = self.base_layer(rows)
    out.addmm_(rows @ down.T, up.T, alpha=self.scaling[name])
    return out.view(*x.shape[:-1], -1)


def can_compile(device: torch.device) -> bool:
    """Whether torch.compile has what it needs for this device: Triton and a C compiler."""
    if device.type != "cuda" or os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        return False
    from torch.utils._triton import has_triton

    compiler = os.environ.get("CC", "")
    return has_triton() and any(map(shutil.which, (compiler, "cc", "gcc", "clang")))
