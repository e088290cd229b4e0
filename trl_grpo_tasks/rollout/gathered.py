"""A whole copy of a model whose weights are sharded by FSDP2 or ZeRO-3.

A sharded model gathers each layer from all processes for each token. For our rollouts, the weights are gathered once
per rollout instead, one at a time, into a copy of the model on each process. Nothing else in a rollout is collective,
so that the processes may generate any number of rows and tokens.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import nn
from torch.distributed.tensor import DTensor

from ..constraints.sharding import reshard, shape_of, whole
from .cache import CacheShape, free_memory
from .decoder import CACHE_SHARE
from .support import text_backbone
from .weights import is_freed_between_rollouts


class GatheredCopy:
    """A copy of `model`, whose weights are sharded: it has whole weights within `loaded()`, and none outside.

    Create it before FSDP2 shards `model`, because sharded modules cannot be copied. Weights are gathered on `device`
    as `dtype`, the dtype of FSDP2's mixed precision; with None, in their own dtype.
    """

    def __init__(self, model: Any, dtype: torch.dtype | None, device: torch.device):
        empty: dict[int, Any] = {id(weight): nn.Parameter(torch.empty(0), False) for weight in model.parameters()}
        self._model, self._copy = model, copy.deepcopy(model, empty).eval()
        self._copy.__dict__.pop("forward", None)  # TRL's fused LM head, which would run `model`
        self._dtype, self._device = dtype, device
        self._is_loaded = False
        self._freed: list[tuple[torch.UntypedStorage, int]] = []  # storages whose memory was freed, and their sizes

    def unsupported_memory(self, rows: int, length: int) -> str | None:
        """Return the reason why the copy does not fit beside a KV cache for this number of rows, of `length` tokens
        each, or None if it fits. On CPUs, it is not checked."""
        if self._device.type != "cuda":
            return None
        shape = CacheShape.of(self._model.config, self._dtype or self._model.dtype, self._device)
        needed = shape.bytes_per_token * rows * length / CACHE_SHARE
        if not self._is_loaded:
            weights = list(self._model.parameters())
            layers = [sum(map(_bytes, layer.parameters())) for layer in text_backbone(self._model).layers]
            largest = max(*layers, *map(_bytes, weights))  # exists beside the copy while it is gathered
            needed += sum(_bytes(weight, self._dtype) for weight in weights) + largest
        free = free_memory(self._device)
        if needed <= free:
            return None
        return (
            f"a whole copy of the sharded weights and the KV cache of {rows} completions need {needed / 2**30:.1f} GB "
            f"per GPU, but only {free / 2**30:.1f} GB are free; use vLLM (--use_vllm) or more GPUs"
        )

    @contextmanager
    def loaded(self) -> Iterator[Any]:
        """Gather the current weights and return the copy, which has them within this context.

        All processes must call this. Afterwards the memory is freed. On a GPU, copies that are small beside its
        memory are kept, because CUDA graphs read them in place; they are overwritten when weights are gathered again.
        """
        self._gather()
        try:
            yield self._copy
        finally:
            size = sum(weight.nbytes for weight in self._copy.parameters())
            if is_freed_between_rollouts(size, self._device):
                self._free()

    @torch.no_grad()
    def _gather(self) -> None:
        reshard(self._model)
        for storage, size in self._freed:
            storage.resize_(size)
        self._freed, self._is_loaded = [], True
        for weight, shard in zip(self._copy.parameters(), self._model.parameters(), strict=True):
            if not weight.numel():
                options: dict[str, Any] = {"dtype": self._dtype or shard.dtype, "device": self._device}
                weight.data = torch.empty(shape_of(shard), **options)
            if isinstance(shard, DTensor):  # rounded before it is gathered, so that less is sent
                shard = shard.to(weight.device, weight.dtype)
            weight.copy_(whole(shard))
        for ours, theirs in zip(self._copy.buffers(), self._model.buffers(), strict=True):
            ours.data = theirs.data

    def _free(self) -> None:
        """Free the memory of the weights, also of those that a decoder still refers to."""
        storages = [weight.untyped_storage() for weight in self._copy.parameters()]
        distinct = {storage.data_ptr(): storage for storage in storages}  # a decoder joins some of them
        self._freed = [(storage, storage.nbytes()) for storage in distinct.values()]
        for storage, _ in self._freed:
            storage.resize_(0)
        self._is_loaded = False


def reason_of_any(reason: str | None) -> str | None:
    """Return, on all processes, the first reason that a process has. All processes must call this."""
    return next((one for one in gather_object([reason]) if one is not None), None)


def _bytes(weight: torch.Tensor, dtype: torch.dtype | None = None) -> int:
    return math.prod(shape_of(weight)) * (dtype or weight.dtype).itemsize
