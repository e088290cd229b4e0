"""The reference policy: references that move, and a reference model that is in CPU memory between uses.

A moving reference is an average of past policies (ema), or a copy taken at intervals (periodic). Full weights: TRL's
reference model is updated in place. Adapters: TRL keeps a frozen adapter named "ref" beside the trained one; the
average is over its weight update. A LoRA update is a product B A, and the average of two products is not the product
of the averages. So the products are averaged, and the result, which has up to twice the rank, is cut back to the
adapter's rank by a singular value decomposition: the nearest update of that rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ...constraints.sharding import gathered, part, part_of, put_part, reshard

ADAPTER = "ref"
FACTORS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")


class MovingReference:
    """Updates `ref_model` (full weights), or the adapter "ref" of `model`, once per rollout iteration.

    ema: ref <- alpha ref + (1 - alpha) policy. periodic: ref <- policy every `update_freq` iterations.
    An ema step on half-precision weights is mostly smaller than their rounding, so the average itself is kept in
    float32 (4 bytes more per weight) and the reference is a rounded copy of it.
    """

    def __init__(self, mode: str, model: nn.Module, ref_model: nn.Module | None, alpha: float, update_freq: int):
        self._mode, self._alpha, self._update_freq = mode, alpha, update_freq
        self._model, self._ref_model = model, ref_model
        self._iterations = 0
        self._average: dict[str, torch.Tensor] = {}  # of weights in half precision, by name: the part of this process

    def update(self) -> None:
        """Update the reference; called after each rollout iteration."""
        self._iterations += 1
        if self._mode == "ema":
            self._start_average()
            self._move(self._alpha)
        elif self._iterations % self._update_freq == 0:
            self._move(keep=0.0)

    def _start_average(self) -> None:
        """Copy half-precision weights in float32, once: not before training has started, which may shard them."""
        halves = {name: part(p) for name, p in self._weights().items()} if not self._average else {}
        for name, p in halves.items():
            if p.dtype in (torch.bfloat16, torch.float16):
                value = p.detach().float()
                # A weight of `Offloaded`, which is not sharded, is pinned. DTensors of torch 2.11 have no `is_pinned`.
                is_pinned = not isinstance(p, DTensor) and p.is_pinned()
                self._average[name] = value.pin_memory() if is_pinned else value

    @torch.no_grad()
    def _move(self, keep: float) -> None:
        weights = self._weights()
        reshard(self._model)
        if self._ref_model is not None:  # the parts of reference and policy are of the same elements
            for (name, ref), policy in zip(weights.items(), self._model.parameters(), strict=True):
                average = self._average.get(name, part(ref))
                _blend(average, part(policy), keep)
                put_part(ref, average)
        else:  # the average of products needs whole adapters
            average = {name: self._whole(name, p) for name, p in weights.items()}
            policy = {name: gathered(p, part(p)) for name, p in _adapter_parameters(self._model, "default").items()}
            _blend_adapters(average, policy, keep)
            self._put(average)

    def _weights(self) -> dict[str, torch.Tensor]:
        """The reference's own parameters by name."""
        reshard(self._model if self._ref_model is None else self._ref_model)
        if self._ref_model is not None:
            return dict(self._ref_model.named_parameters())
        return _adapter_parameters(self._model, ADAPTER)

    def _whole(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """All of a weight, in the precision that the next update needs."""
        return gathered(weight, self._average.get(name, part(weight)))

    def _put(self, values: dict[str, torch.Tensor]) -> None:
        """Replace the weights, and the average of those in half precision, by these, which are whole."""
        weights = self._weights()
        for name, value in values.items():
            own = part_of(weights[name], value)
            put_part(weights[name], own)
            if name in self._average:
                self._average[name].copy_(own)

    def state_dict(self) -> dict[str, Any]:
        """Weights in the precision that the next update needs; rounding them gives the reference's weights exactly.

        All processes must call this where weights are sharded."""
        weights = {name: self._whole(name, p).detach().to("cpu", copy=True) for name, p in self._weights().items()}
        return {"iterations": self._iterations, "weights": weights}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._iterations = state["iterations"]
        if self._mode == "ema":
            self._start_average()
        self._put(state["weights"])


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


def average_product(
    a_ref: torch.Tensor, b_ref: torch.Tensor, a: torch.Tensor, b: torch.Tensor, keep: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors (A, B) of the rank of `a` nearest to keep * b_ref a_ref + (1 - keep) * b a."""
    if keep == 0:
        return a.clone(), b.clone()
    rank = a.shape[0]
    left = torch.cat([keep * b_ref.float(), (1 - keep) * b.float()], dim=1)
    right = torch.cat([a_ref.float(), a.float()], dim=0)
    # left @ right has rank 2r at most, so its SVD is that of a (2r, 2r) matrix between two orthonormal bases.
    q_left, r_left = torch.linalg.qr(left)
    q_right, r_right = torch.linalg.qr(right.T)
    u, s, vh = torch.linalg.svd(r_left @ r_right.T)
    root = s[:rank].sqrt()
    new_b = q_left @ (u[:, : len(root)] * root)
    new_a = (root[:, None] * vh[: len(root)]) @ q_right.T
    missing = rank - len(root)  # above 0 where the layer is smaller than the adapter's rank
    new_a, new_b = nn.functional.pad(new_a, (0, 0, 0, missing)), nn.functional.pad(new_b, (0, missing))
    return new_a.to(a_ref.dtype), new_b.to(b_ref.dtype)


def _blend(ref: torch.Tensor, policy: torch.Tensor, keep: float) -> None:
    """Update `ref` in place. The sum is computed on the policy's device, so that an offloaded one is rounded alike."""
    ref.copy_(ref.to(policy.device).mul_(keep).add_(policy, alpha=1 - keep))


def _adapter_parameters(model: nn.Module, adapter: str) -> dict[str, torch.Tensor]:
    """The parameters of an adapter: `...lora_A.default.weight`, but `...lora_embedding_A.default`."""
    return {name: p for name, p in model.named_parameters() if adapter in name.split(".")}


def _name_in_reference(name: str) -> str:
    """The name of a parameter of the trained adapter in the adapter "ref"."""
    parts = name.split(".")
    parts[parts.index("default")] = ADAPTER
    return ".".join(parts)


def _blend_adapters(ref: dict[str, torch.Tensor], policy: dict[str, torch.Tensor], keep: float) -> None:
    for name, value in policy.items():
        parts, ref_name = name.split("."), _name_in_reference(name)
        kind = next((part for part in parts if part in FACTORS), None) if value.ndim == 2 else None
        if kind is None:
            _blend(ref[ref_name], value, keep)
        elif kind.endswith("A"):  # B is updated together with its A
            other = kind[:-1] + "B"
            b_name, ref_b_name = name.replace(f".{kind}.", f".{other}."), ref_name.replace(f".{kind}.", f".{other}.")
            new_a, new_b = average_product(ref[ref_name], ref[ref_b_name], value, policy[b_name], keep)
            ref[ref_name].copy_(new_a)
            ref[ref_b_name].copy_(new_b)


@torch.no_grad()
def copy_trained_adapter(model: nn.Module) -> None:
    """Copy the weights of the trained adapter to the adapter "ref". TRL's own copy leaves out embeddings."""
    weights = dict(model.named_parameters())
    for name, policy in _adapter_parameters(model, "default").items():
        weights[_name_in_reference(name)].data.copy_(policy.data)
