"""Weights of which each process holds a part: DTensors of FSDP2, and weights of ZeRO-3.

A module of FSDP2 has whole weights while it runs, and afterwards where it is set not to reshard. A weight of ZeRO-3 is
empty outside its own module; the part of this process is its attribute `ds_tensor`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, distribute_tensor

from .base import attribute_set


def is_sharded(model: nn.Module) -> bool:
    """Whether processes hold parts of the weights, so that all of them must take part in each forward pass."""
    return isinstance(model, FSDPModule) or any(hasattr(weight, "ds_tensor") for weight in model.parameters())


def output_size(model: Any) -> int:
    """Number of outputs of a language model, which is often larger than the tokenizer's vocabulary."""
    return shape_of(model.get_output_embeddings().weight)[0]


def shape_of(weight: torch.Tensor) -> torch.Size:
    """The shape of all of a weight; a weight of ZeRO-3 is itself empty."""
    return getattr(weight, "ds_shape", weight.shape)


def whole(weight: torch.Tensor) -> torch.Tensor:
    """Return all of a weight. All processes must call this for a sharded weight.

    The result is differentiable. As for other weights, the gradient is averaged over the processes.
    """
    if isinstance(weight, DTensor):
        return weight.full_tensor(grad_placements=[Partial("avg")] * weight.device_mesh.ndim)
    if not hasattr(weight, "ds_status"):
        return weight
    from trl.trainer.utils import maybe_gather_lm_head_ctx

    with maybe_gather_lm_head_ctx(weight):
        copy = weight.clone()
        copy.ds_status = weight.ds_status  # TRL's kernel reads it in the backward pass: nothing is left to gather
    return copy


def part(weight: torch.Tensor) -> torch.Tensor:
    """The part of a weight that this process holds; all of it where it is not sharded."""
    return getattr(weight, "ds_tensor", weight)


def put_part(weight: torch.Tensor, value: torch.Tensor) -> None:
    """Replace the part of a weight that this process holds."""
    part(weight).copy_(value)
    if hasattr(weight, "ds_tensor") and weight.numel():  # ZeRO-3 keeps small weights whole as well
        weight.partition()


def gathered(weight: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor of which each process holds the part `value`, as it holds one of `weight`."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if not hasattr(weight, "ds_tensor"):
        return value
    parts = [torch.empty_like(value) for _ in range(dist.get_world_size(weight.ds_process_group))]
    dist.all_gather(parts, value, group=weight.ds_process_group)
    return torch.cat(parts)[: weight.ds_numel].view(weight.ds_shape)  # the last part is padded


def part_of(weight: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The part of `value`, which every process has as a whole, that this process holds of `weight`."""
    if isinstance(weight, DTensor):
        return distribute_tensor(value.to(weight.device), weight.device_mesh, weight.placements, src_data_rank=None)
    if not hasattr(weight, "ds_tensor"):
        return value
    size, rank = weight.ds_tensor.numel(), dist.get_rank(weight.ds_process_group)
    own = value.reshape(-1)[rank * size : (rank + 1) * size]
    return nn.functional.pad(own, (0, size - own.numel()))


def reshard(model: nn.Module) -> None:
    """Free the whole weights of modules that FSDP2 left unsharded, so that `parameters()` are DTensors."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def end_forward(model: nn.Module, output: Any) -> None:
    """End a forward pass in groups of FSDP2 of which a module did not run; `output` is what the pass returned.

    accelerate shards the final norm and the LM head as one group, and TRL's fused head uses the LM head's weight
    without running the module. torch 2.13 ends such a group with the model's forward pass. torch 2.11 does not: then
    `reshard` has no effect on it, and if a checkpoint shards it, the next forward pass does not gather it.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            if state._modules_to_run_forward:
                state._modules_to_run_forward.clear()
                state._post_forward(module, None, output)


def loading_whole_models() -> AbstractContextManager[None]:
    """While open, models are loaded as a whole. In a run with ZeRO-3, transformers shards every model that it loads,
    and a model that DeepSpeed does not manage could then not be used."""
    from transformers.integrations import deepspeed

    return attribute_set(deepspeed, "_hf_deepspeed_config_weak_ref", None)
