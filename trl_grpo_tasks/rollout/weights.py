"""Weights as a rollout under autocast reads them: cast once instead of once a pass, with adapters folded in.

A folded adapter costs nothing a pass, where it is two more kernels for each layer otherwise. The sum is rounded to the
type of autocast, where scoring rounds its two parts: that is within the noise that this type has anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners import lora
from torch import nn


class CastWeights:
    """Inside `used()` the linear layers of a model hold weights of type `dtype`; then the model is as it was."""

    def __init__(self, model: Any, dtype: torch.dtype):
        adapted = {id(part.base_layer): part for part in model.modules() if is_plain_lora(part)}
        folded = {id(child) for part in adapted.values() for name in ("lora_A", "lora_B")
                  for child in getattr(part, name).modules()}  # fmt: skip
        layers = [
            module
            for module in model.modules()
            if isinstance(module, nn.Linear) and module.weight.dtype == torch.float32 and id(module) not in folded
        ]
        self._weights = [
            (layer, layer.weight, nn.Parameter(layer.weight.to(dtype), requires_grad=False)) for layer in layers
        ]
        self._plain = [(cast, weight) for layer, weight, cast in self._weights if id(layer) not in adapted]
        self._adapters = [(adapted[id(layer)], *rest) for layer, *rest in self._weights if id(layer) in adapted]

    @contextmanager
    def used(self) -> Iterator[None]:
        if not self._weights:  # they are of that type already
            yield
            return
        self._refresh()
        for layer, _, cast in self._weights:
            layer._parameters["weight"] = cast
        for adapter, *_ in self._adapters:
            adapter.forward = _only(adapter.base_layer)
        try:
            yield
        finally:
            for adapter, *_ in self._adapters:
                del adapter.forward
            for layer, weight, _ in self._weights:
                layer._parameters["weight"] = weight

    @torch.no_grad()
    def _refresh(self) -> None:
        if self._plain:
            torch._foreach_copy_(*map(list, zip(*self._plain, strict=True)))
        with torch.autocast(self._weights[0][1].device.type, enabled=False):
            for adapter, weight, cast in self._adapters:
                cast.copy_(weight + adapter.get_delta_weight(adapter.active_adapters[0]))


def is_plain_lora(part: nn.Module) -> bool:
    """A linear layer with one low-rank adapter at work, and nothing that changes what that means."""
    return (
        type(part) is lora.Linear
        and len(part.active_adapters) == 1
        and part.active_adapters[0] in part.lora_A
        and not (part.merged or part.disable_adapters or part.lora_variant or part.lora_bias[part.active_adapters[0]])
        and isinstance(part.lora_dropout[part.active_adapters[0]], nn.Identity)
        and part.base_layer.weight.is_floating_point()
    )


def _only(layer: nn.Module) -> Any:
    return lambda x, *_, **__: layer(x)
