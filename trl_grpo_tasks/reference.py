"""Reference policy that moves: an average of past policies (ema) or a copy taken now and then (periodic).

Full weights: TRL's reference model is updated in place. Adapters: TRL keeps a frozen adapter named "ref" beside the
trained one; its update is what is averaged. A LoRA update is a product B A, and the average of two products is not
the product of the averages. So the products are averaged, and the result, which has up to twice the rank, is cut back
to the adapter's rank by a singular value decomposition: the nearest update of that rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

ADAPTER = "ref"


class MovingReference:
    """Update `ref_model` (full weights), or the adapter "ref" of `model`, once an iteration.

    ema: ref <- alpha ref + (1 - alpha) policy. periodic: ref <- policy every `update_freq` iterations.
    """

    def __init__(self, mode: str, model: nn.Module, ref_model: nn.Module | None, alpha: float, update_freq: int):
        self._mode, self._alpha, self._update_freq = mode, alpha, update_freq
        self._model, self._ref_model = model, ref_model
        self._iterations = 0

    @torch.no_grad()
    def update(self) -> None:
        """To be called after each rollout iteration."""
        self._iterations += 1
        if self._mode == "periodic":
            if self._iterations % self._update_freq:
                return
            keep = 0.0
        else:
            keep = self._alpha
        if self._ref_model is not None:
            for ref, policy in zip(self._ref_model.parameters(), self._model.parameters(), strict=True):
                _blend(ref, policy, keep)
        else:
            _update_adapter(self._model, keep)

    def state_dict(self) -> dict[str, Any]:
        if self._ref_model is not None:
            weights = dict(self._ref_model.named_parameters())
        else:
            weights = _adapter_parameters(self._model, ADAPTER)
        return {
            "iterations": self._iterations,
            "weights": {name: p.detach().to("cpu", copy=True) for name, p in weights.items()},
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._iterations = state["iterations"]
        own = dict((self._ref_model if self._ref_model is not None else self._model).named_parameters())
        for name, value in state["weights"].items():
            own[name].copy_(value)


def average_product(
    a_ref: torch.Tensor, b_ref: torch.Tensor, a: torch.Tensor, b: torch.Tensor, keep: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors (A, B) of the rank of `a` nearest to keep * b_ref a_ref + (1 - keep) * b a."""
    if keep == 0:
        return a.clone(), b.clone()
    rank = a.shape[0]
    left = torch.cat([keep * b_ref, (1 - keep) * b], dim=1).float()
    right = torch.cat([a_ref, a], dim=0).float()
    # left @ right has rank 2r at most, so its SVD is that of a (2r, 2r) matrix between two orthonormal bases.
    q_left, r_left = torch.linalg.qr(left)
    q_right, r_right = torch.linalg.qr(right.T)
    u, s, vh = torch.linalg.svd(r_left @ r_right.T)
    root = s[:rank].sqrt()
    new_b = q_left @ (u[:, :rank] * root)
    new_a = (root[:, None] * vh[:rank]) @ q_right.T
    return new_a.to(a.dtype), new_b.to(b.dtype)


def _blend(ref: torch.Tensor, policy: torch.Tensor, keep: float) -> None:
    ref.mul_(keep).add_(policy.to(ref.device), alpha=1 - keep)


def _adapter_parameters(model: nn.Module, adapter: str) -> dict[str, torch.Tensor]:
    return {name: p for name, p in model.named_parameters() if f".{adapter}." in name}


def _update_adapter(model: nn.Module, keep: float) -> None:
    policy = _adapter_parameters(model, "default")
    ref = _adapter_parameters(model, ADAPTER)
    for name, value in policy.items():
        ref_name = name.replace(".default.", f".{ADAPTER}.")
        if ".lora_A." in name and value.ndim == 2:
            b_name = name.replace(".lora_A.", ".lora_B.")
            ref_b_name = ref_name.replace(".lora_A.", ".lora_B.")
            new_a, new_b = average_product(ref[ref_name], ref[ref_b_name], value, policy[b_name], keep)
            ref[ref_name].copy_(new_a)
            ref[ref_b_name].copy_(new_b)
        elif not (".lora_B." in name and value.ndim == 2):  # B moved with its A
            _blend(ref[ref_name], value, keep)


def with_adapter(model: Any, peft_config: Any, args: Any, quantization_config: Any) -> Any:
    """`model` (or the one at that path) with a new adapter, made as TRL would make it. TRL keeps a frozen adapter
    "ref", which can be moved, only for a model that is wrapped already."""
    from peft import get_peft_model

    return get_peft_model(created(model, args, quantization_config), peft_config)


def created(model: Any, args: Any, quantization_config: Any) -> Any:
    """`model`, or the one at that path, made as TRL would make it."""
    from accelerate.utils import set_seed
    from trl.trainer.utils import create_model_from_path

    set_seed(args.seed)
    if isinstance(model, str):
        init = dict(args.model_init_kwargs or {})
        if quantization_config is not None:
            init["quantization_config"] = quantization_config
        if args.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
            init["device_map"] = None
        model = create_model_from_path(model, **init)
    return model
