"""Triton kernels of the rollouts: attention over a paged KV cache, and sampling from masked logits.

The lengths of rows are read on the device, so a captured pass serves rows of any length. The kernels find the cache
through a tensor of memory addresses, so the cache may be freed and allocated elsewhere between two replays of a CUDA
graph. Import this module only where Triton is installed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .cache import PAGE

PREFILL_TILE = 16  # consecutive tokens of one row that a program of a prefill pass serves
# Launch sizes, chosen by measurement on an H200
ATTENTION_PROGRAMS = 256  # the keys of a row are split until about this many programs share the work
MAX_SPLITS = 32
SAMPLING_PROGRAMS = 512
SAMPLE_BLOCK = 1024  # vocabulary entries per step of the sampling kernel
MAX_ADAPTED_TOKENS = 64  # passes over more tokens apply adapters by separate products
ADAPTED_PROGRAMS = 132  # products with fewer programs are split over their inputs
ADAPTED_BLOCK_K = 128


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
    block_n = 16 if max(outputs, inputs) < 4096 else 64
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


@triton.jit
def _sample_kernel(
    logits, words, index, seeds, winners, candidates, maxima, sums, vocabulary, row_stride, row_words, share, scale,
    softcap, BLOCK: tl.constexpr, GREEDY: tl.constexpr, HAS_WORDS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Find the winner of one row among a share of the vocabulary, by the Gumbel-max method.

    For each row and share: the highest perturbed logit, its token and its own logit, the highest logit, and the sum of
    exponentials relative to that.
    """
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, vocabulary)
    lane = tl.arange(0, BLOCK)
    seed = tl.load(seeds + row)
    if HAS_WORDS:
        words += tl.load(index + row) * row_words
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_logit = tl.full([BLOCK], float("-inf"), tl.float32)
    best_token = tl.zeros([BLOCK], tl.int32)
    maximum = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(begin, end, BLOCK):
        token = start + lane
        is_token = token < end
        logit = tl.load(logits + row * row_stride + token, mask=is_token, other=float("-inf")).to(tl.float32)
        if HAS_SOFTCAP:
            logit = tl.where(is_token, softcap * (1 - 2 / (tl.exp(2 * logit * scale) + 1)), float("-inf"))
        else:
            logit = logit * scale
        if HAS_WORDS:
            word = tl.load(words + token // 32, mask=is_token, other=0)
            logit = tl.where((word >> (token % 32)) & 1 != 0, logit, float("-inf"))
        score = logit
        if not GREEDY:
            # The token with the largest logit - log(E), for independent exponential variables E, is a sample.
            uniform = tl.maximum(tl.rand(seed, token), 1.1641532e-10)
            exponential = tl.where(uniform < 1e-3, uniform * (1 + 0.5 * uniform), -tl.log(1 - uniform))
            score = logit - tl.log(exponential)
        is_better = score > best
        best = tl.where(is_better, score, best)
        best_logit = tl.where(is_better, logit, best_logit)
        best_token = tl.where(is_better, token, best_token)
        new_maximum = tl.maximum(maximum, logit)
        finite = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        total = total * tl.exp(maximum - finite) + tl.exp(logit - finite)
        maximum = new_maximum
    highest = tl.max(maximum, 0)
    finite_highest = tl.where(highest == float("-inf"), 0.0, highest)
    winner = tl.max(best, 0)
    chosen = tl.min(tl.where(best == winner, best_token, 2147483647), 0)
    entry = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(winners + entry, winner)
    tl.store(candidates + 2 * entry, chosen.to(tl.float64))
    chosen_logit = tl.max(tl.where((best == winner) & (best_token == chosen), best_logit, float("-inf")), 0)
    tl.store(candidates + 2 * entry + 1, chosen_logit.to(tl.float64))
    tl.store(maxima + entry, highest)
    tl.store(sums + entry, tl.sum(total * tl.exp(maximum - finite_highest), 0))


@triton.jit
def _pick_kernel(winners, candidates, maxima, sums, tokens, drawn, rows, SHARES: tl.constexpr, BLOCK: tl.constexpr):
    """Pick the winner of one row among the winners of all shares, and compute its log-prob."""
    row = tl.program_id(0)
    share = tl.arange(0, BLOCK)
    is_share = share < SHARES
    entry = row * SHARES + share
    score = tl.load(winners + entry, mask=is_share, other=float("-inf"))
    maximum = tl.load(maxima + entry, mask=is_share, other=float("-inf"))
    total = tl.load(sums + entry, mask=is_share, other=0.0)
    winner = row * SHARES + tl.argmax(score, 0)
    token = tl.load(candidates + 2 * winner)
    logit = tl.load(candidates + 2 * winner + 1).to(tl.float32)
    highest = tl.max(maximum, 0)
    log_total = highest + tl.log(tl.sum(total * tl.exp(maximum - highest), 0))
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(drawn + row, token)
    tl.store(drawn + rows + row, (logit - log_total).to(tl.float64))


def new_seeds(*size: int, device: torch.device) -> torch.Tensor:
    """Return random seeds for `sample`, from torch's default generator."""
    return torch.randint(2**31 - 1, size, device=device)


def sample(
    logits: torch.Tensor,
    masks: tuple[torch.Tensor, torch.Tensor] | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    is_greedy: bool = False,
    seeds: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one token per row, sampled from scaled logits, and the tokens with their log-probs as float64 (2, rows).

    `masks` are packed masks and the number of each row's mask among them; None allows all tokens. With a softcap, the
    logits are softcap * tanh(scale * logits). Seeds of the rows come from torch's default generator if they are not
    given.
    """
    rows, vocabulary = logits.shape
    device = logits.device
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    drawn = torch.empty(2, rows, dtype=torch.float64, device=device)
    seeds = new_seeds(rows, device=device) if seeds is None else seeds
    words, index = (tokens, tokens) if masks is None else masks
    blocks = triton.cdiv(vocabulary, SAMPLE_BLOCK)
    share = triton.cdiv(blocks, max(1, min(blocks, SAMPLING_PROGRAMS // rows))) * SAMPLE_BLOCK
    shares = triton.cdiv(vocabulary, share)
    winners, maxima, sums = torch.empty(3, rows, shares, device=device)
    candidates = torch.empty(rows, shares, 2, dtype=torch.float64, device=device)
    _sample_kernel[(rows, shares)](
        logits, words, index, seeds, winners, candidates, maxima, sums, vocabulary, logits.stride(0), words.stride(0),
        share, scale, softcap or 0.0, BLOCK=SAMPLE_BLOCK, GREEDY=is_greedy, HAS_WORDS=masks is not None,
        HAS_SOFTCAP=softcap is not None, num_warps=8,
    )  # fmt: skip
    _pick_kernel[(rows,)](
        winners, candidates, maxima, sums, tokens, drawn, rows, SHARES=shares, BLOCK=triton.next_power_of_2(shares),
        num_warps=1,
    )  # fmt: skip
    return tokens, drawn
