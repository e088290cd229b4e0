"""The attention functions of rollouts, which transformers' attention layers call by name."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

# Attention over a paged cache, in passes that generate and that read prompts, and over a cache of rows.
PAGED, PAGED_PREFILL, ROWS = (f"trl_grpo_tasks_{name}" for name in ("paged", "paged_prefill", "rows"))


def disable_cudnn_attention() -> None:
    """Disable cuDNN attention in this process, so that torch uses one of its other attention kernels.

    From torch 2.11 on, cuDNN attention is the first choice on an H100 or H200. With a mask and a sequence length of 64
    modulo 128, its backward pass may return NaN (pytorch issue 196678), and one such batch destroys the weights. Two
    of six test runs on an H200 failed this way, after 10 and 20 steps.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def _paged(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor,
    is_prefill: bool = False, scaling: float | None = None, sliding_window: int | None = None,
    softcap: float | None = None, s_aux: torch.Tensor | None = None, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attention over a paged cache. In place of a mask, the cache slot and position of each token are passed."""
    dtype = value.dtype  # under autocast, rotary embeddings make queries and keys float32
    query_T_H_D, key_T_K_D, value_T_K_D = (part[0].transpose(0, 1).to(dtype) for part in (query, key, value))
    out = torch.ops.trl_grpo_tasks.paged_attention(
        query_T_H_D, key_T_K_D, value_T_K_D, attention_mask, module.cache_addresses, module.cache_table, s_aux,
        query.shape[3] ** -0.5 if scaling is None else scaling, sliding_window or 0, softcap or 0.0, is_prefill,
    )  # fmt: skip
    return out[None], None


_paged_prefill = functools.partial(_paged, is_prefill=True)


def _rows(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor,
    scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
    s_aux: torch.Tensor | None = None, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attention over a cache of rows, which knows the slot and position of each token."""
    cache: Any = module.row_cache
    parts = (part[0].transpose(0, 1).to(value.dtype) for part in (query, key, value))
    out = cache.attend(module.layer_idx, *parts, scaling, sliding_window or 0, softcap, s_aux)
    return out[None], None


for _name, _function in ((PAGED, _paged), (PAGED_PREFILL, _paged_prefill), (ROWS, _rows)):
    AttentionInterface.register(_name, _function)
    AttentionMaskInterface.register(_name, sdpa_mask)
