"""Linear layers with LoRA adapters: one kernel reads the weights once and applies the adapters as well."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Launch sizes, chosen by measurement on an H200
MAX_ADAPTED_TOKENS = 64  # passes over more tokens apply adapters by separate products
ADAPTED_PROGRAMS = 132  # products with fewer programs are split over their inputs
ADAPTED_BLOCK_K = 128
SMALL_LAYER = 2**23  # layers with fewer weights are computed in narrower blocks, so that enough programs run


@triton.jit
def _adapted_kernel(
    x, weight, bias, down, up, out, tokens, x_token, inputs, outputs, share, all_ranks,
    END_1: tl.constexpr, END_2: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N outputs of a linear layer with LoRA adapters, over a share of its inputs.

    Each program also computes the small inner product of the one adapter that its outputs belong to.
    """
    first = tl.program_id(0) * BLOCK_N
    split = tl.program_id(1)
    item, output, rank = tl.arange(0, BLOCK_M), first + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R)
    offset = tl.where(first >= END_1, RANK, 0) + tl.where(first >= END_2, RANK, 0)
    is_item, is_output, is_rank = item < tokens, output < outputs, rank < RANK
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    inner = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    end = tl.minimum((split + 1) * share, inputs)
    for start in range(split * share, end, BLOCK_K):
        channel = start + tl.arange(0, BLOCK_K)
        is_channel = channel < end
        x_tile = tl.load(
            x + item[:, None] * x_token + channel[None, :], mask=is_item[:, None] & is_channel[None, :], other=0.0
        )  # fmt: skip
        w_tile = tl.load(
            weight + output[None, :].to(tl.int64) * inputs + channel[:, None],
            mask=is_output[None, :] & is_channel[:, None], other=0.0,
        )  # fmt: skip
        a_tile = tl.load(
            down + (offset + rank)[None, :] * inputs + channel[:, None], mask=is_rank[None, :] & is_channel[:, None],
            other=0.0,
        )  # fmt: skip
        total = tl.dot(x_tile, w_tile, total)
        inner = tl.dot(x_tile, a_tile, inner)
    b_tile = tl.load(
        up + output[None, :] * all_ranks + (offset + rank)[:, None], mask=is_output[None, :] & is_rank[:, None],
        other=0.0,
    )  # fmt: skip
    total = tl.dot(inner.to(b_tile.dtype), b_tile, total)
    if HAS_BIAS and SPLITS == 1:
        total += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    entry = (split * tokens + item[:, None]) * outputs + output[None, :]
    tl.store(out + entry, total.to(out.dtype.element_ty), mask=is_item[:, None] & is_output[None, :])


@triton.jit
def _sum_kernel(partial, bias, out, size, outputs, SPLITS: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Add the partial sums of all splits, and the bias."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_entry = entry < size
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(partial + split * size + entry, mask=is_entry, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + entry % outputs, mask=is_entry, other=0.0).to(tl.float32)
    tl.store(out + entry, total.to(out.dtype.element_ty), mask=is_entry)


@torch.library.custom_op("trl_grpo_tasks::adapted_linear", mutates_args=())
def adapted_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, down: torch.Tensor, up: torch.Tensor,
    ends: list[int],
) -> torch.Tensor:  # fmt: skip
    """Return x W' + b + (x A') B' for up to three fused layers with adapters of equal rank.

    `ends` holds the last output of each layer, exclusive; `up` is block-diagonal. A pass over few tokens reads the
    weights once for everything; otherwise the adapters cost little beside the base product.
    """
    tokens, (outputs, inputs) = len(x), weight.shape
    rank = len(down) // len(ends)
    block_n = 16 if outputs * inputs < SMALL_LAYER else 64
    is_aligned = all(end % block_n == 0 for end in ends)
    if tokens > MAX_ADAPTED_TOKENS or not is_aligned or len(ends) > 3 or x.dtype == torch.float32:
        out = torch.nn.functional.linear(x, weight, bias)
        return out.addmm_(x @ down.T, up.T)
    out = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device)
    blocks = triton.cdiv(outputs, block_n)
    splits = max(1, min(ADAPTED_PROGRAMS // blocks, inputs // 512))
    share = triton.cdiv(triton.cdiv(inputs, splits), ADAPTED_BLOCK_K) * ADAPTED_BLOCK_K
    splits = triton.cdiv(inputs, share)
    partial = out if splits == 1 else torch.empty(splits, tokens, outputs, dtype=torch.float32, device=x.device)
    end_1, end_2 = (*ends[:-1], outputs, outputs)[:2]
    _adapted_kernel[(blocks, splits)](
        x, weight, out if bias is None else bias, down, up, partial, tokens, x.stride(0), inputs, outputs, share,
        up.shape[1], END_1=end_1, END_2=end_2, RANK=rank, BLOCK_R=max(16, triton.next_power_of_2(rank)),
        BLOCK_M=max(16, triton.next_power_of_2(tokens)), BLOCK_N=block_n, BLOCK_K=ADAPTED_BLOCK_K, SPLITS=splits,
        HAS_BIAS=bias is not None, num_warps=4, num_stages=5,
    )  # fmt: skip
    if splits > 1:
        _sum_kernel[(triton.cdiv(tokens * outputs, 1024),)](
            partial, out if bias is None else bias, out, tokens * outputs, outputs, SPLITS=splits, BLOCK=1024,
            HAS_BIAS=bias is not None,
        )  # fmt: skip
    return out


@adapted_linear.register_fake
def _(x, weight, bias, down, up, ends):
    return x.new_empty(x.shape[0], weight.shape[0])
