"""Weights of which each process holds a shard: those of FSDP2, which are DTensors, and those of ZeRO-3.

A module of FSDP2 holds whole weights while it runs, and afterwards where it is set not to reshard. A weight of ZeRO-3
is empty outside its own module.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, distribute_tensor
from trl.trainer.utils import maybe_gather_lm_head_ctx


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a weight. All processes must call this for a sharded weight.

    The result is differentiable. As for other weights, the gradient is averaged over the processes.
    """
    if isinstance(tensor, DTensor):
        return tensor.full_tensor(grad_placements=[Partial("avg")] * tensor.device_mesh.ndim)
    if not hasattr(tensor, "ds_status"):
        return tensor
    with maybe_gather_lm_head_ctx(tensor):
        copy = tensor.clone()
        copy.ds_status = tensor.ds_status  # TRL's kernel reads it in the backward pass: nothing is left to gather
    return copy


@torch.no_grad()
def copy_whole(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copy `value`, which every process has as a whole, into a weight that may be sharded."""
    if isinstance(target, DTensor) and not isinstance(value, DTensor):
        value = distribute_tensor(value.to(target.device), target.device_mesh, target.placements, src_data_rank=None)
    target.copy_(value)


def reshard(model: nn.Module) -> None:
    """Free the whole weights of modules that FSDP2 left unsharded, so that `parameters()` are the shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
