"""Compiled layers of a model, which reduce the number of kernels per pass, and what a GPU can run.

One compiled function serves all layers of a kind and all numbers of tokens, so that compilation takes seconds.
"""

from __future__ import annotations

import os
import shutil
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .cache import PAGE, CacheShape


class CompiledLayers:
    """Within `used()`, the layers and the last norm of a backbone run compiled. Outside, it is unchanged."""

    def __init__(self, backbone: Any):
        parts = [*backbone.layers, backbone.norm]
        functions = {kind: torch.compile(kind.forward, dynamic=True) for kind in {type(part) for part in parts}}
        self._forwards = [(part, types.MethodType(functions[type(part)], part)) for part in parts]

    @contextmanager
    def used(self) -> Iterator[None]:
        for part, forward in self._forwards:
            part.forward = forward
        try:
            # One function may serve layers of several kinds. Code that cannot be compiled runs eagerly.
            with torch._dynamo.config.patch(recompile_limit=64, suppress_errors=True):
                yield
        finally:
            for part, _ in self._forwards:
                del part.forward


def has_kernels(device: torch.device) -> bool:
    """Whether the Triton kernels of this package can run on this device."""
    if device.type != "cuda":
        return False
    from torch.utils._triton import has_triton

    return has_triton() and torch.cuda.get_device_capability(device) >= (7, 5)


def kernels_fit(shape: CacheShape, heads: int) -> bool:
    """Whether the attention kernels can be built for a model: on small GPUs, large heads exceed the shared memory."""
    from .kernels import PREFILL_TILE, paged_attention

    keys, values = shape._replace(layers=1).buffers(1, PAGE, make=torch.zeros)[0]
    addresses = torch.tensor([keys.data_ptr(), values.data_ptr()], device=shape.device)
    table = torch.zeros(1, 1, dtype=torch.int32, device=shape.device)
    options: dict[str, Any] = {"dtype": shape.dtype, "device": shape.device}
    try:
        for tokens in (1, PREFILL_TILE):
            query, key = (torch.zeros(tokens, count, shape.width, **options) for count in (heads, shape.kv_heads))
            where = torch.zeros(1, 1, 2, tokens, dtype=torch.int64, device=shape.device)
            paged_attention(query, key, key, where, addresses, table, None, 1.0, 0, 0.0, tokens > 1)
    except Exception as error:  # noqa: BLE001 - Triton has many kinds of errors, and the other way always works
        print(f"rollouts run without our GPU kernels, more slowly, because these cannot be built: {error}")
        return False
    return True


def can_compile(device: torch.device) -> bool:
    """Whether torch.compile can be used on this device: it needs a GPU, Triton and a C compiler."""
    compiler = os.environ.get("CC", "")
    is_disabled = os.environ.get("TORCH_COMPILE_DISABLE") == "1"
    return not is_disabled and has_kernels(device) and any(map(shutil.which, (compiler, "cc", "gcc", "clang")))
