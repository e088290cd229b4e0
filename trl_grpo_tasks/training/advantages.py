"""Advantage estimators: pure functions from the rewards of a group to the advantage of each completion.

`estimate` works on rewards_P_G (P prompts, G generations each). NaN marks a completion that could not be scored: it is
left out of the group's baseline and gets advantage 0. The estimators:

    grpo               (r - mean) / (std + 1e-4): TRL's own
    mean               r - mean
    rloo               r minus the mean of the others
    maxrl              rewards >= 0: (r - mean) / mean, so that seldom solved prompts count more (arXiv 2602.02710)
    passk              binary rewards: maximises the probability that one of k samples succeeds (arXiv 2508.10751)
    maxk               any rewards: maximises the best of k samples (arXiv 2505.15201, leave-one-out baseline)
    best_minus_second  only the best completion has an advantage: its lead over the second best
    topk               r - mean for the k best completions, 0 for the others
    MODULE:FUNCTION    your own function of the rewards of one group, from a module or a .py file
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch

from ..registry import load_module

ESTIMATORS = ("grpo", "mean", "rloo", "maxrl", "passk", "maxk", "best_minus_second", "topk")
NEEDS_K = ("passk", "maxk", "topk")
# What `scale_rewards` divides; the other estimators define their own scale.
SCALED = ("maxk", "best_minus_second")


def estimate(rewards_P_G: torch.Tensor, estimator: str, k: int | None = None, *, scale: str = "none") -> torch.Tensor:
    """Compute advantages in the shape of `rewards_P_G`. passk, maxk and topk need `k`.

    `scale` divides maxk and best_minus_second by the standard deviation of each group's rewards ("group") or of all
    rewards ("batch"), so that they do not depend on the unit of the reward.
    """
    if rewards_P_G.ndim != 2:
        raise ValueError(f"rewards must have the shape (prompts, generations), got {tuple(rewards_P_G.shape)}")
    check_estimator(estimator, k, rewards_P_G.shape[1])
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "grpo": _grpo,
        "mean": lambda r: r - r.mean(),
        "rloo": lambda r: (r - r.mean()) * (len(r) / (len(r) - 1)),
        "maxrl": _maxrl,
        "passk": lambda r: _passk(r, k or 0),
        "maxk": lambda r: _maxk(r, k or 0),
        "best_minus_second": _best_minus_second,
        "topk": lambda r: _topk(r, k or 0),
    }
    function = functions.get(estimator) or _users_own(estimator)
    all_scored = rewards_P_G[~rewards_P_G.isnan()].double()
    advantages_P_G = torch.zeros_like(rewards_P_G)
    for group, advantages in zip(rewards_P_G, advantages_P_G, strict=True):
        scored = ~torch.isnan(group)
        if scored.sum() >= 2:
            rewards = group[scored].double()
            found = function(rewards)
            if scale != "none" and estimator in SCALED:
                found = found / ((rewards if scale == "group" else all_scored).std() + 1e-6)
            advantages[scored] = found.to(group.dtype)
    return advantages_P_G


def k_range(estimator: str, group_size: int) -> tuple[int, int]:
    """The smallest and the largest valid k for an estimator that needs one."""
    lowest = 2 if estimator == "maxk" else 1
    # At k = n every completion is in the only subset, so Pass@k credits none of them more than another.
    highest = group_size - 1 if estimator == "passk" else group_size
    return lowest, highest


def k_fits(estimator: str, k: int | None, group_size: int) -> bool:
    lowest, highest = k_range(estimator, group_size)
    return estimator not in NEEDS_K or (k is not None and lowest <= k <= highest)


def check_estimator(estimator: str, k: int | None, group_size: int) -> None:
    """Raise ValueError for an unknown estimator, or for a k that is invalid for groups of `group_size`."""
    if ":" in estimator:
        _users_own(estimator)
    elif estimator not in ESTIMATORS:
        raise ValueError(
            f"unknown advantage estimator {estimator!r}; estimators are: {', '.join(ESTIMATORS)}, or a function of "
            "your own as my_file.py:my_function"
        )
    if k_fits(estimator, k, group_size):
        return
    lowest, highest = k_range(estimator, group_size)
    if k is None:
        raise ValueError(f"advantage estimator {estimator!r} needs pass_k; choose {lowest} <= pass_k <= {highest}")
    raise ValueError(
        f"pass_k={k} is invalid for advantage estimator {estimator!r} with groups of {group_size}: "
        f"choose {lowest} <= pass_k <= {highest}, or raise num_generations"
    )


def without_signal(rewards_P_G: torch.Tensor, advantages_P_G: torch.Tensor) -> torch.Tensor:
    """True for groups without a learning signal: all advantages are 0, or all rewards are equal."""
    unscored = rewards_P_G.isnan()
    highest = rewards_P_G.masked_fill(unscored, -torch.inf).amax(1)
    lowest = rewards_P_G.masked_fill(unscored, torch.inf).amin(1)
    return (advantages_P_G == 0).all(1) | ~(highest > lowest)


def expected_best(rewards: torch.Tensor, k: int) -> torch.Tensor:
    """The unbiased estimate of the best of k samples, from n >= k rewards: max@k, or pass@k where they are 0 and 1."""
    ordered = rewards.double().sort().values
    return ordered @ best_weights(len(ordered), k).to(ordered.device)


@lru_cache(maxsize=512)
def best_weights(n: int, k: int) -> torch.Tensor:
    """C(i, k-1) / C(n, k) for i = 0 ... n-1: the probability that the i-th smallest of n values is the largest
    of k drawn from them. Computed as a product of ratios, since the binomials exceed the range of a float."""
    i = torch.arange(n - 1, 0, -1, dtype=torch.float64)
    downwards = torch.cat([torch.tensor([k / n], dtype=torch.float64), (i - k + 1).clamp(min=0) / i])
    return downwards.cumprod(0).flip(0)


def doublings(group_size: int) -> list[int]:
    """1, 2, 4, ... and the size of the group itself."""
    return [*(2**e for e in range(group_size.bit_length()) if 2**e < group_size), group_size]


def expected_best_curve(rewards_P_G: torch.Tensor) -> dict[int, float]:
    """{k: mean over groups of the unbiased best of k} for k = 1, 2, 4, ... n. A group with unscored members counts for
    those k that do not exceed the number of its scored members."""
    scored_P = (~rewards_P_G.isnan()).sum(1).tolist()
    ordered_P_G = rewards_P_G.double().cpu().sort(1).values  # NaN comes last
    curve = {}
    for k in doublings(rewards_P_G.shape[1]):
        groups = zip(ordered_P_G, scored_P, strict=True)
        values = [ordered[:n] @ best_weights(n, k) for ordered, n in groups if n >= k]
        if values:
            curve[k] = torch.stack(values).mean().item()
    return curve


def _grpo(rewards: torch.Tensor) -> torch.Tensor:
    return (rewards - rewards.mean()) / (rewards.std() + 1e-4)


def _maxrl(rewards: torch.Tensor) -> torch.Tensor:
    if (rewards < 0).any():
        raise ValueError(
            f"advantage estimator 'maxrl' needs rewards of at least 0, got {rewards.min().item():g}; "
            "use 'grpo', or weight only components that are not negative"
        )
    mean = rewards.mean()
    return (rewards - mean) / mean if mean > 0 else torch.zeros_like(rewards)


@lru_cache
def _users_own(spec: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function that MODULE:FUNCTION names, with its result checked."""
    path, _, name = spec.rpartition(":")
    function = getattr(load_module(path, "advantage estimator"), name, None)
    if not callable(function):
        raise ValueError(f"advantage estimator {spec!r}: {path} has no function {name!r}")

    def checked(rewards: torch.Tensor) -> torch.Tensor:
        found = function(rewards)
        if not isinstance(found, torch.Tensor) or found.shape != rewards.shape or not found.isfinite().all():
            raise ValueError(
                f"advantage estimator {spec!r} must return a tensor of {len(rewards)} finite advantages for the "
                f"rewards {rewards.tolist()}, but it returned {found}"
            )
        return found

    return checked


def _passk(rewards: torch.Tensor, k: int) -> torch.Tensor:
    is_success = rewards == 1
    if not (is_success | (rewards == 0)).all():
        odd = rewards[~(is_success | (rewards == 0))][0].item()
        raise ValueError(
            f"advantage estimator 'passk' needs rewards that are 0 or 1, got {odd:g}; "
            "use 'maxk' for graded rewards, or weight only the success component"
        )
    n, failures = len(rewards), int((~is_success).sum())
    if k >= n:  # unscored completions made this group too small
        return torch.zeros_like(rewards)
    mean = 1 - math.comb(failures, k) / math.comb(n, k)
    std = math.sqrt(mean * (1 - mean))
    if std == 0:
        return torch.zeros_like(rewards)
    positive = (1 - mean) / std
    negative = (1 - mean - math.comb(failures - 1, k - 1) / math.comb(n - 1, k - 1)) / std if failures else 0.0
    return torch.full_like(rewards, negative).masked_fill(is_success, positive)


def _maxk(rewards: torch.Tensor, k: int) -> torch.Tensor:
    n = len(rewards)
    if k > n:  # unscored completions made this group too small
        return torch.zeros_like(rewards)
    ordered, order = rewards.sort(stable=True)
    ordered = ordered - ordered[0]  # shifting all rewards changes no advantage, and equal rewards now give exactly 0
    others_N_M = ordered.expand(n, n)[~torch.eye(n, dtype=torch.bool, device=ordered.device)].view(n, n - 1)
    with_k, with_less = (others_N_M @ best_weights(n - 1, size).to(ordered.device) for size in (k, k - 1))
    # The share k / n of all k-subsets hold a completion. What these reach is the mean over all subsets less that over
    # the subsets of the others; the baseline is what the other k - 1 reach without it.
    advantages = torch.empty_like(rewards)
    advantages[order] = expected_best(ordered, k) - (1 - k / n) * with_k - (k / n) * with_less
    return advantages


def _best_minus_second(rewards: torch.Tensor) -> torch.Tensor:
    advantages = torch.zeros_like(rewards)
    best, second = rewards.topk(2).values
    advantages[rewards.argmax()] = best - second
    return advantages


def _topk(rewards: torch.Tensor, k: int) -> torch.Tensor:
    chosen = torch.sort(rewards, descending=True, stable=True).indices[:k]
    advantages = torch.zeros_like(rewards)
    advantages[chosen] = rewards[chosen] - rewards.mean()
    return advantages
