"""A reference policy that moves (`reference_mode`).

It is an average of past policies (ema), or a copy taken at intervals (periodic). Full weights: TRL's reference model
is updated in place. Adapters: TRL's frozen adapter "ref" is. A LoRA update is a product B A, so products are averaged,
and the result is cut back to the adapter's rank by a singular value decomposition: the nearest update of that rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ...constraints.sharding import gathered, part, part_of, put_part, reshard
from ...task import option
from ..reference import ADAPTER, adapter_parameters, name_in_reference
from .base import Extra

MODES = ("static", "ema", "periodic")
FACTORS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")


@dataclass
class MovingReferenceOptions:
    """Moving reference"""

    reference_mode: str = option(
        "static",
        "Reference policy: 'static', 'ema' (an average of past policies) or 'periodic' (a copy at intervals).",
    )
    ema_alpha: float = option(0.99, "Share of the old reference that each 'ema' update keeps, once per iteration.")
    reference_update_freq: int = option(100, "Iterations between the copies of reference mode 'periodic'.")


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
            policy = {name: gathered(p, part(p)) for name, p in adapter_parameters(self._model, "default").items()}
            _blend_adapters(average, policy, keep)
            self._put(average)

    def _weights(self) -> dict[str, torch.Tensor]:
        """The reference's own parameters by name."""
        reshard(self._model if self._ref_model is None else self._ref_model)
        if self._ref_model is not None:
            return dict(self._ref_model.named_parameters())
        return adapter_parameters(self._model, ADAPTER)

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


def _blend_adapters(ref: dict[str, torch.Tensor], policy: dict[str, torch.Tensor], keep: float) -> None:
    for name, value in policy.items():
        parts, ref_name = name.split("."), name_in_reference(name)
        kind = next((part for part in parts if part in FACTORS), None) if value.ndim == 2 else None
        if kind is None:
            _blend(ref[ref_name], value, keep)
        elif kind.endswith("A"):  # B is updated together with its A
            other = kind[:-1] + "B"
            b_name, ref_b_name = name.replace(f".{kind}.", f".{other}."), ref_name.replace(f".{kind}.", f".{other}.")
            new_a, new_b = average_product(ref[ref_name], ref[ref_b_name], value, policy[b_name], keep)
            ref[ref_name].copy_(new_a)
            ref[ref_b_name].copy_(new_b)


class MovingReferenceExtra(Extra):
    """Updates TRL's reference once per iteration."""

    name = "reference"
    Options = MovingReferenceOptions
    switch = "reference_mode"
    updates_reference = True
    needs_fsdp2 = True

    @classmethod
    def check(cls, args: Any) -> None:
        if args.reference_mode not in MODES:
            raise ValueError(f"unknown reference_mode {args.reference_mode!r}; choose one of: {', '.join(MODES)}")
        if cls.is_on(args) and args.beta == 0:
            raise ValueError(
                f"reference_mode={args.reference_mode!r} needs beta > 0: with beta=0 there is no reference; try "
                "beta=0.04"
            )
        if cls.is_on(args) and args.sync_ref_model:
            raise ValueError("use either reference_mode or TRL's sync_ref_model, not both")

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        args, unwrap = self._args, trainer.accelerator.unwrap_model
        ref_model = None if trainer.ref_model is None else unwrap(trainer.ref_model)
        self.state = MovingReference(
            args.reference_mode, unwrap(trainer.model), ref_model, args.ema_alpha, args.reference_update_freq
        )

    def start_iteration(self) -> None:
        self.state.update()
