"""Sampling from masked logits, without a copy of them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Launch sizes, chosen by measurement on an H200
SAMPLING_PROGRAMS = 512  # the vocabulary is split until about this many programs share the work
SAMPLE_BLOCK = 1024  # vocabulary entries per step of a program


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
