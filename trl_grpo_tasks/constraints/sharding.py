"""Weights of which each process holds a shard, as FSDP2 keeps them (DTensors).

A module of FSDP2 holds whole weights while it runs, and afterwards where it is set not to reshard.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, distribute_tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a weight. All processes must call this for a sharded weight.

    The result is differentiable. Like FSDP, the backward pass averages the gradient over the processes.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.full_tensor(grad_placements=[Partial("avg")] * tensor.device_mesh.ndim)


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
