"""Weights for rollouts under autocast: cast once per rollout instead of once per pass, with LoRA adapters folded in.

A folded adapter costs nothing per pass; an unfolded one costs two more kernels per layer. But folding rounds the sum
of weight and adapter to autocast's dtype. A small adapter would be rounded away, so that rollouts would come from the
model without it, or magnified where many weights lie halfway between two values of the dtype. So adapters are folded
only once rounding changes them little.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners import lora
from torch import nn

MAX_FOLDING_ERROR = 0.2  # adapters are folded once rounding changes them by at most this fraction


class CastWeights:
    """Within `used()`, the linear layers of a model hold weights of type `dtype`. Outside, the model is unchanged.

    Call `refresh()` before `used()` whenever weights may have changed. Layers in `excluded` are never cast.
    """

    def __init__(self, model: Any, dtype: torch.dtype, excluded: Sequence[nn.Module] = ()):
        adapted = {id(part.base_layer): part for part in model.modules() if is_plain_lora(part)}
        layers = [
            module
            for module in model.modules()
            if isinstance(module, nn.Linear) and module.weight.dtype == torch.float32 and module not in excluded
        ]
        self._weights = [
            (layer, layer.weight, nn.Parameter(layer.weight.to(dtype), requires_grad=False)) for layer in layers
        ]
        self._adapters = [
            (adapted[id(layer)], weight, cast) for layer, weight, cast in self._weights if id(layer) in adapted
        ]
        self._folds = False

    @torch.no_grad()
    def refresh(self) -> bool:
        """Cast the current weights. Returns True if this call starts to fold adapters; folding never stops again."""
        if self._weights:
            torch._foreach_copy_([cast for *_, cast in self._weights], [weight for _, weight, _ in self._weights])
        if not self._adapters:
            return False
        starts_folding = not self._folds and abs(self._fraction_preserved() - 1) <= MAX_FOLDING_ERROR
        self._folds = self._folds or starts_folding
        if self._folds:
            for adapter, weight, cast in self._adapters:
                cast.copy_(weight + _delta(adapter))
        return starts_folding

    @contextmanager
    def used(self) -> Iterator[None]:
        folded = [adapter for adapter, *_ in self._adapters] if self._folds else []
        for layer, _, cast in self._weights:
            layer._parameters["weight"] = cast
        for adapter in folded:
            adapter.forward = _base_forward(adapter.base_layer)
        try:
            yield
        finally:
            for adapter in folded:
                del adapter.forward
            for layer, weight, _ in self._weights:
                layer._parameters["weight"] = weight

    def _fraction_preserved(self) -> float:
        """Return the fraction of the adapters that rounding preserves.

        It is the length of the projection of the rounded adapters onto the exact ones.
        """
        sums = torch.zeros(2, device=self._adapters[0][1].device)
        for adapter, weight, cast in self._adapters:
            delta = _delta(adapter)
            rounded = (weight + delta).to(cast.dtype).float() - cast.float()
            sums += torch.stack(((rounded * delta).sum(), (delta * delta).sum()))
        preserved, total = sums.tolist()
        return preserved / total if total else 0.0


def _delta(adapter: Any) -> torch.Tensor:
    with torch.autocast(adapter.base_layer.weight.device.type, enabled=False):
        return adapter.get_delta_weight(adapter.active_adapters[0])


def is_plain_lora(part: nn.Module) -> bool:
    """Whether a module is a linear layer with exactly one active LoRA adapter, without variants, bias or dropout."""
    return (
        type(part) is lora.Linear
        and len(part.active_adapters) == 1
        and part.active_adapters[0] in part.lora_A
        and not (part.merged or part.disable_adapters or part.lora_variant or part.lora_bias[part.active_adapters[0]])
        and isinstance(part.lora_dropout[part.active_adapters[0]], nn.Identity)
        and part.base_layer.weight.is_floating_point()
    )


def _base_forward(layer: nn.Module) -> Any:
    return lambda x, *_, **__: layer(x)
