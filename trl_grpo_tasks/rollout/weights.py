"""Weights as a rollout under autocast reads them: cast once instead of once per pass, with adapters folded in.

A folded adapter costs nothing per pass, where it is two more kernels for each layer otherwise. But the sum of weight
and adapter is rounded to autocast's type. An adapter that is small next to its weights is rounded away, so that a
rollout would come from the model without it; or blown up, where many weights lie halfway between two values of that
type. So adapters are folded once rounding leaves them nearly as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners import lora
from torch import nn

FOLDABLE = 0.2  # adapters are folded once rounding changes them by at most this share


class CastWeights:
    """Inside `used()` the linear layers of a model hold weights of type `dtype`; then the model is as it was.

    Call `refresh()` before `used()`, whenever weights may have changed. Layers in `kept` stay as they are."""

    def __init__(self, model: Any, dtype: torch.dtype, kept: Sequence[nn.Module] = ()):
        adapted = {id(part.base_layer): part for part in model.modules() if is_plain_lora(part)}
        layers = [
            module
            for module in model.modules()
            if isinstance(module, nn.Linear) and module.weight.dtype == torch.float32 and module not in kept
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
        """Cast the weights as they are now. True if adapters are folded from now on and were not before."""
        if self._weights:
            torch._foreach_copy_([cast for *_, cast in self._weights], [weight for _, weight, _ in self._weights])
        if not self._adapters:
            return False
        newly = not self._folds and abs(self._share_left() - 1) <= FOLDABLE
        self._folds = self._folds or newly
        if self._folds:
            for adapter, weight, cast in self._adapters:
                cast.copy_(weight + _delta(adapter))
        return newly

    @contextmanager
    def used(self) -> Iterator[None]:
        folded = [adapter for adapter, *_ in self._adapters] if self._folds else []
        for layer, _, cast in self._weights:
            layer._parameters["weight"] = cast
        for adapter in folded:
            adapter.forward = _only(adapter.base_layer)
        try:
            yield
        finally:
            for adapter in folded:
                del adapter.forward
            for layer, weight, _ in self._weights:
                layer._parameters["weight"] = weight

    def _share_left(self) -> float:
        """How much of the adapters is left after rounding: the projection of the rounded ones onto the exact ones."""
        sums = torch.zeros(2, device=self._adapters[0][1].device)
        for adapter, weight, cast in self._adapters:
            delta = _delta(adapter)
            rounded = (weight + delta).to(cast.dtype).float() - cast.float()
            sums += torch.stack(((rounded * delta).sum(), (delta * delta).sum()))
        left, total = sums.tolist()
        return left / total if total else 0.0


def _delta(adapter: Any) -> torch.Tensor:
    with torch.autocast(adapter.base_layer.weight.device.type, enabled=False):
        return adapter.get_delta_weight(adapter.active_adapters[0])


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
