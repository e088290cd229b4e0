"""Attention over a paged KV cache.

The lengths of rows are read on the device, so a captured pass serves rows of any length. The kernels find the cache
through a tensor of memory addresses, so the cache may be freed and allocated elsewhere between two replays of a CUDA
graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..cache import PAGE

PREFILL_TILE = 16  # consecutive tokens of one row that a program of a prefill pass serves
ATTENTION_PROGRAMS = 256  # the keys of a row are split until about this many programs share the work (H200)
MAX_SPLITS = 32


@triton.jit
def _store_kernel(
    key, value, where, addresses, pages, tokens, max_pages, k_token, k_head, v_token, v_head,
    KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Write the keys and values of one new token to its slot of the cache."""
    token = tl.program_id(0)
    row = tl.load(where + token)
    if row >= 0:
        position = tl.load(where + tokens + token)
        page = tl.load(pages + row * max_pages + position // PAGE).to(tl.int64)
        slot = (page * PAGE + position % PAGE) * (KV_HEADS * WIDTH)
        entry = tl.arange(0, BLOCK)
        is_entry = entry < KV_HEADS * WIDTH
        head, channel = entry // WIDTH, entry % WIDTH
        keys = tl.load(addresses).to(tl.pointer_type(key.dtype.element_ty))
        values = tl.load(addresses + 1).to(tl.pointer_type(value.dtype.element_ty))
        new_key = tl.load(key + token * k_token + head * k_head + channel, mask=is_entry)
        new_value = tl.load(value + token * v_token + head * v_head + channel, mask=is_entry)
        tl.store(keys + slot + entry, new_key, mask=is_entry)
        tl.store(values + slot + entry, new_value, mask=is_entry)


@triton.jit
def _attend_kernel(
    query, out, maxima, sums, where, addresses, pages, sinks, tokens, max_pages, q_token, q_head, scale, softcap,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr,
    BLOCK_M: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend from the query heads of one GQA group, for TILE tokens of one row, to a share of the row's pages.

    With one split, `out` (T, H, D) receives the result. With several, it receives a partial sum per split, (S, T, H,
    D) in float32, and `maxima` and `sums` (S, T, H) what is needed to combine them.
    """
    first = tl.program_id(0) * TILE
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    item = tl.arange(0, BLOCK_M)
    token = first + item // GROUP
    head = kv_head * GROUP + item % GROUP
    in_tile = (item < TILE * GROUP) & (token < tokens)
    row = tl.load(where + first)  # the first token of a tile is never padding, unless all of them are
    if TILE == 1:
        is_real = in_tile & (row + tl.zeros([BLOCK_M], tl.int64) >= 0)
        earliest = tl.load(where + tokens + first)
        end = tl.where(row >= 0, earliest + 1, 0)
        position = tl.where(is_real, earliest, -1)
    else:
        is_real = in_tile & (tl.load(where + token, mask=in_tile, other=-1) >= 0)
        position = tl.load(where + tokens + token, mask=is_real, other=-1)
        end = tl.max(position, 0) + 1
        earliest = tl.min(tl.where(is_real, position, end), 0)
    channel = tl.arange(0, BLOCK_D)
    is_channel = channel < WIDTH
    q = tl.load(
        query + token[:, None] * q_token + head[:, None] * q_head + channel[None, :],
        mask=is_real[:, None] & is_channel[None, :], other=0.0,
    )  # fmt: skip
    begin_page = 0
    if WINDOW > 0:
        begin_page = tl.maximum(earliest - WINDOW + 1, 0) // PAGE
    share = tl.cdiv(tl.cdiv(end, PAGE) - begin_page, SPLITS)
    low = begin_page + split * share
    high = tl.minimum(low + share, tl.cdiv(end, PAGE))
    keys = tl.load(addresses).to(tl.pointer_type(query.dtype.element_ty))
    values = tl.load(addresses + 1).to(tl.pointer_type(query.dtype.element_ty))
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    weighted = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    in_page = tl.arange(0, PAGE)
    for number in range(low, high):
        page = tl.load(pages + row * max_pages + number).to(tl.int64)
        slot = ((page * PAGE + in_page) * KV_HEADS + kv_head) * WIDTH
        kv_position = number * PAGE + in_page
        exists = kv_position < end
        k = tl.load(
            keys + slot[None, :] + channel[:, None], mask=exists[None, :] & is_channel[:, None], other=0.0
        )  # fmt: skip
        scores = tl.dot(q, k, input_precision=PRECISION) * scale
        if HAS_SOFTCAP:
            scores = softcap * (1 - 2 / (tl.exp(2 * scores / softcap) + 1))
        attends = kv_position[None, :] <= position[:, None]
        if WINDOW > 0:
            attends = attends & (kv_position[None, :] > position[:, None] - WINDOW)
        scores = tl.where(attends, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        finite = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp(scores - finite[:, None])
        decay = tl.exp(maximum - finite)
        total = total * decay + tl.sum(weights, 1)
        v = tl.load(
            values + slot[:, None] + channel[None, :], mask=exists[:, None] & is_channel[None, :], other=0.0
        )  # fmt: skip
        weighted = weighted * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        maximum = new_maximum
    heads = KV_HEADS * GROUP
    entry = token * heads + head
    if SPLITS == 1:
        if HAS_SINKS:
            sink = tl.load(sinks + head).to(tl.float32)
            highest = tl.maximum(maximum, sink)
            factor = tl.exp(maximum - highest)
            total = total * factor + tl.exp(sink - highest)
            weighted = weighted * factor[:, None]
        result = weighted / tl.where(total == 0.0, 1.0, total)[:, None]
    else:
        entry += split * tokens * heads
        tl.store(maxima + entry, maximum, mask=in_tile)
        tl.store(sums + entry, total, mask=in_tile)
        result = weighted
    tl.store(
        out + entry[:, None].to(tl.int64) * WIDTH + channel[None, :], result.to(out.dtype.element_ty),
        mask=in_tile[:, None] & is_channel[None, :],
    )  # fmt: skip


@triton.jit
def _combine_kernel(
    partial, maxima, sums, sinks, out, entries, HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_S: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Combine the partial results of all splits of one token and head."""
    entry = tl.program_id(0)
    split = tl.arange(0, BLOCK_S)
    channel = tl.arange(0, BLOCK_D)
    is_split, is_channel = split < SPLITS, channel < WIDTH
    maximum = tl.load(maxima + split * entries + entry, mask=is_split, other=float("-inf"))
    total = tl.load(sums + split * entries + entry, mask=is_split, other=0.0)
    highest = tl.max(maximum, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + entry % HEADS).to(tl.float32)
        highest = tl.maximum(highest, sink)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    factor = tl.exp(maximum - highest)
    denominator = tl.sum(total * factor, 0)
    if HAS_SINKS:
        denominator += tl.exp(sink - highest)
    parts = tl.load(
        partial + (split[:, None].to(tl.int64) * entries + entry) * WIDTH + channel[None, :],
        mask=is_split[:, None] & is_channel[None, :], other=0.0,
    )  # fmt: skip
    result = tl.sum(parts * factor[:, None], 0) / tl.where(denominator == 0.0, 1.0, denominator)
    tl.store(out + entry.to(tl.int64) * WIDTH + channel, result.to(out.dtype.element_ty), mask=is_channel)


@torch.library.custom_op("trl_grpo_tasks::paged_attention", mutates_args=())
def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    where: torch.Tensor,
    addresses: torch.Tensor,
    pages: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    is_prefill: bool,
) -> torch.Tensor:
    """Store the keys and values (T, K, D) of new tokens in the cache, and return what the queries (T, H, D) attend to.

    `where` holds the cache row of each token, then its position; row -1 marks padding. Token t of a row attends to
    the positions of that row up to its own, and only to the last `window` of these if `window` is not 0. In a prefill
    pass, every PREFILL_TILE tokens belong to one row at consecutive positions, padded at the end.
    """
    tokens, heads, width = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    out = torch.empty(tokens, heads, width, dtype=query.dtype, device=query.device)
    _store_kernel[(tokens,)](
        key, value, where, addresses, pages, tokens, pages.shape[1], key.stride(0), key.stride(1), value.stride(0),
        value.stride(1), KV_HEADS=kv_heads, WIDTH=width, BLOCK=triton.next_power_of_2(kv_heads * width), PAGE=PAGE,
    )  # fmt: skip
    tile = PREFILL_TILE if is_prefill else 1
    tiles = triton.cdiv(tokens, tile)
    splits = max(1, min(ATTENTION_PROGRAMS // (tiles * kv_heads), MAX_SPLITS, pages.shape[1]))
    partial = maxima = sums = out
    if splits > 1:
        partial = torch.empty(splits, tokens, heads, width, dtype=torch.float32, device=query.device)
        maxima = torch.empty(splits, tokens, heads, dtype=torch.float32, device=query.device)
        sums = torch.empty_like(maxima)
    block_d, block_m = max(16, triton.next_power_of_2(width)), max(16, triton.next_power_of_2(tile * group))
    is_small = query.element_size() * block_d <= 256
    _attend_kernel[(tiles, kv_heads, splits)](
        query, partial, maxima, sums, where, addresses, pages, out if sinks is None else sinks, tokens,
        pages.shape[1], query.stride(0), query.stride(1), scale, softcap,
        KV_HEADS=kv_heads, GROUP=group, WIDTH=width, BLOCK_D=block_d, TILE=tile, BLOCK_M=block_m, PAGE=PAGE,
        SPLITS=splits, WINDOW=window, HAS_SOFTCAP=softcap != 0, HAS_SINKS=sinks is not None,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=8 if block_m >= 128 else 4, num_stages=3 if is_small else 1,
    )  # fmt: skip
    if splits > 1:
        _combine_kernel[(tokens * heads,)](
            partial, maxima, sums, out if sinks is None else sinks, out, tokens * heads, HEADS=heads, WIDTH=width,
            BLOCK_D=block_d, SPLITS=splits, BLOCK_S=triton.next_power_of_2(splits), HAS_SINKS=sinks is not None,
            num_warps=2,
        )  # fmt: skip
    return out


@paged_attention.register_fake
def _(query, key, value, where, addresses, pages, sinks, scale, window, softcap, is_prefill):
    return query.new_empty(query.shape)
