"""The reference policy as TRL keeps it: a model of its own, or beside a trained adapter a frozen one named "ref"."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

ADAPTER = "ref"


class Offloaded:
    """Keeps the weights of a model in CPU memory, and copies them to their devices while `on_device()` is open.

    The model must not be changed on the device, so that nothing is copied back: the copies are freed. Copies to a GPU
    start from pinned memory. Buffers, which are small, stay where they are.
    """

    def __init__(self, model: nn.Module):
        self._devices = {weight: weight.device for weight in model.parameters()}  # tied weights are one entry
        for weight, device in self._devices.items():
            weight.data = weight.data.cpu().pin_memory() if device.type == "cuda" else weight.data.cpu()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        in_cpu_memory = {weight: weight.data for weight in self._devices}
        try:
            for weight, device in self._devices.items():
                weight.data = weight.data.to(device, non_blocking=True, copy=True)
            yield
        finally:
            for weight, data in in_cpu_memory.items():
                weight.data = data


def adapter_parameters(model: nn.Module, adapter: str) -> dict[str, torch.Tensor]:
    """The parameters of an adapter: `...lora_A.default.weight`, but `...lora_embedding_A.default`."""
    return {name: p for name, p in model.named_parameters() if adapter in name.split(".")}


def name_in_reference(name: str) -> str:
    """The name of a parameter of the trained adapter in the adapter "ref"."""
    parts = name.split(".")
    parts[parts.index("default")] = ADAPTER
    return ".".join(parts)


@torch.no_grad()
def copy_trained_adapter(model: nn.Module) -> None:
    """Copy the weights of the trained adapter to the adapter "ref". TRL's own copy leaves out embeddings."""
    weights = dict(model.named_parameters())
    for name, policy in adapter_parameters(model, "default").items():
        weights[name_in_reference(name)].data.copy_(policy.data)
