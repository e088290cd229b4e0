"""Estimators against the reference vectors and against enumerating every subset."""

import itertools
import json
import math
import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.paths import DATA
from trl_grpo_tasks.training.advantages import (
    best_weights,
    check_estimator,
    estimate,
    expected_best,
    expected_best_curve,
    without_signal,
)

CASES = json.loads((DATA / "advantages.json").read_text())["cases"]
# the name in the reference file, our name
WITHOUT_K = {"dr_grpo": "mean", "grpo_trl_eps1e-4": "grpo", "rloo": "rloo", "verl_grpo_passk_raw": "best_minus_second"}
WITH_K = {"pkpo_s_loo_minus_1": "maxk", "topk_mean_centred": "topk", "passk_training_general": "passk"}


def group(rewards) -> torch.Tensor:
    return torch.tensor([rewards], dtype=torch.float64)


@pytest.mark.parametrize("case", CASES)
def test_reference_vectors(case):
    rewards = CASES[case]["rewards"]
    checked = 0
    for key, name in WITHOUT_K.items():
        torch.testing.assert_close(estimate(group(rewards), name), group(CASES[case][key]), atol=2e-9, rtol=0)
        checked += 1
    scaled = estimate(group(rewards), "best_minus_second", scale="group")
    torch.testing.assert_close(scaled, group(CASES[case]["verl_grpo_passk_std_eps1e-6"]), atol=2e-9, rtol=0)
    for k_text, values in CASES[case]["k"].items():
        k = int(k_text)
        assert expected_best(group(rewards)[0], k).item() == pytest.approx(values["rho_maxg_at_k"], abs=2e-9)
        for key, name in WITH_K.items():
            expected = values.get(key)
            binary = set(rewards) <= {0, 1}
            if expected is None or (name == "passk" and (not binary or k >= len(rewards))) or (name, k) == ("maxk", 1):
                continue
            torch.testing.assert_close(estimate(group(rewards), name, k), group(expected), atol=2e-9, rtol=0)
            checked += 1
    assert checked > len(WITHOUT_K)


@settings(max_examples=60)
@given(st.lists(st.floats(-5, 5), min_size=3, max_size=7), st.data())
def test_maxk_is_what_enumerating_subsets_gives(rewards, data):
    n = len(rewards)
    k = data.draw(st.integers(2, n))
    expected = []
    for i in range(n):
        subsets = list(itertools.combinations(range(n), k))
        credit = sum(max(rewards[j] for j in s) for s in subsets if i in s) / len(subsets)
        others = list(itertools.combinations([j for j in range(n) if j != i], k - 1))
        baseline = sum(max(rewards[j] for j in s) for s in others) / len(others)
        expected.append(credit - k / n * baseline)
    torch.testing.assert_close(estimate(group(rewards), "maxk", k), group(expected), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize(("n", "k"), [(128, 16), (1024, 8), (1024, 2), (1024, 512), (1024, 1024)])
def test_maxk_of_large_groups_is_exact(n, k):
    """Against the counts of subsets as fractions, whose binomials have up to 300 digits."""
    rewards = list(range(n))  # the reward of a completion is its rank
    random.Random(n + k).shuffle(rewards)
    actual = estimate(group(rewards), "maxk", k)[0]
    for rank in (0, 1, n // 2, n - k, n - 2, n - 1):
        holding = rank * math.comb(rank, k - 1) + sum(m * math.comb(m - 1, k - 2) for m in range(rank + 1, n))
        others = [*range(rank), *range(rank + 1, n)]
        without = sum(math.comb(i, k - 2) * value for i, value in enumerate(others))
        exact = Fraction(holding, math.comb(n, k)) - Fraction(k, n) * Fraction(without, math.comb(n - 1, k - 1))
        assert actual[rewards.index(rank)].item() == pytest.approx(float(exact), rel=1e-9, abs=1e-10), rank


def test_the_curve_of_a_large_group_is_exact_and_its_weights_are_computed_once():
    rewards = torch.arange(1024, dtype=torch.float64)
    best_weights.cache_clear()
    curve = expected_best_curve(torch.stack([rewards, rewards.flip(0)]))
    for k, value in curve.items():
        exact = Fraction(sum(i * math.comb(i, k - 1) for i in range(1024)), math.comb(1024, k))
        assert value == pytest.approx(float(exact), rel=1e-12)
    assert expected_best_curve(rewards[None] > 511) and best_weights.cache_info().misses == len(curve) == 11


@settings(max_examples=60)
@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=3, max_size=8), st.data())
def test_passk_is_the_standardised_mean_over_subsets_that_hold_the_sample(rewards, data):
    n = len(rewards)
    k = data.draw(st.integers(1, n - 1))
    subsets = list(itertools.combinations(range(n), k))
    best = [max(rewards[j] for j in s) for s in subsets]
    mean = sum(best) / len(best)
    std = math.sqrt(mean * (1 - mean))
    expected = []
    for i in range(n):
        mine = [b for s, b in zip(subsets, best, strict=True) if i in s]
        expected.append((sum(mine) / len(mine) - mean) / std if std else 0.0)
    actual = estimate(group(rewards), "passk", k)
    torch.testing.assert_close(actual, group(expected), atol=1e-9, rtol=1e-9)
    assert actual.sum().item() == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    ("name", "k"),
    [("grpo", None), ("mean", None), ("rloo", None), ("maxrl", None), ("passk", 2), ("maxk", 2),
     ("topk", 2)],
)  # fmt: skip
def test_unscored_completions_are_left_out(name, k):
    nan = float("nan")
    full = estimate(group([0, 1, 1, 0, 0]), name, k)
    with_holes = estimate(group([0, nan, 1, 1, 0, nan, 0]), name, k)
    torch.testing.assert_close(with_holes[:, [0, 2, 3, 4, 6]], full)
    assert with_holes[0, 1] == 0 and with_holes[0, 5] == 0
    assert (estimate(group([nan] * 4), name, k) == 0).all()


def test_ties_give_exact_zeros():
    assert (estimate(group([3, 3, 1]), "best_minus_second") == 0).all()
    assert (estimate(group([0.1] * 33), "maxk", 7) == 0).all()


@pytest.mark.parametrize(
    ("rewards", "name", "k", "message"),
    [
        *(([0, 1, 1, 0], name, k, f"pass_k={k} is invalid") for name, k in
          [("passk", 4), ("passk", 5), ("passk", 0), ("maxk", 1), ("maxk", 5), ("topk", 9)]),
        ([0, 1, 1], "passk", None, "needs pass_k"),
        ([0, 1, 1], "grop", None, "unknown advantage estimator 'grop'"),
        ([0, 0.5, 1], "passk", 2, r"0 or 1, got 0\.5"),
        ([0, -2, 1], "maxrl", None, "at least 0, got -2"),
    ],
)  # fmt: skip
def test_refusals(rewards, name, k, message):
    with pytest.raises(ValueError, match=message):
        estimate(group(rewards), name, k)


def test_maxk_gradient_is_unbiased_on_an_enumerable_policy():
    """Sum of A_i grad log p_i, averaged over all samples of n actions, is the gradient of E[max of k]."""
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    reward = torch.tensor([0.0, 1.0, 2.5], dtype=torch.float64)
    n, k = 4, 2
    p = logits.softmax(0)
    objective = sum(p[a] * p[b] * torch.maximum(reward[a], reward[b]) for a in range(3) for b in range(3))
    exact = torch.autograd.grad(objective, logits, retain_graph=True)[0]
    surrogate = 0.0
    for actions in itertools.product(range(3), repeat=n):
        probability = math.prod(p[a].item() for a in actions)
        advantages = estimate(reward[list(actions)][None], "maxk", k)[0]
        surrogate = surrogate + probability * sum(a * p[x].log() for a, x in zip(advantages, actions, strict=True))
    estimated = torch.autograd.grad(surrogate, logits)[0]
    torch.testing.assert_close(estimated, exact)


def enumerated_gradient(p: float, n: int, name: str, **options) -> float:
    """Mean of A_i d log p(a_i) / d logit over all outcomes of n attempts that succeed with probability p."""
    total = 0.0
    for outcome in itertools.product([0.0, 1.0], repeat=n):
        probability = math.prod(p if reward else 1 - p for reward in outcome)
        advantages = estimate(group(outcome), name, **options)[0]
        total += probability * sum(a.item() * (r - p) for a, r in zip(advantages, outcome, strict=True)) / n
    return total


@pytest.mark.parametrize("p", [0.03, 0.4, 0.9])
@pytest.mark.parametrize("n", [2, 5, 8])
def test_maxrl_is_the_gradient_of_pass_at_k_summed_over_k(p, n):
    """d/d logit of the sum of pass@k / k for k < n, with pass@k = 1 - (1 - p)^k."""
    exact = sum((1 - p) ** (k - 1) * p * (1 - p) for k in range(1, n))
    assert enumerated_gradient(p, n, "maxrl") == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize(("name", "k"), [("maxk", 3), ("best_minus_second", None)])
def test_scaled_estimators_do_not_depend_on_the_unit_of_the_reward(name, k):
    rewards = torch.tensor([[0.0, 1.0, 4.0, 2.0], [5.0, 0.0, 1.0, 1.0]], dtype=torch.float64)
    for scale in ("group", "batch"):
        metres, millimetres = (estimate(rewards * unit, name, k, scale=scale) for unit in (1, 1000))
        torch.testing.assert_close(metres, millimetres, rtol=1e-4, atol=1e-4)
    by_group = estimate(rewards, name, k) / (rewards.std(1, keepdim=True) + 1e-6)
    torch.testing.assert_close(estimate(rewards, name, k, scale="group"), by_group)
    by_batch = estimate(rewards, name, k) / (rewards.std() + 1e-6)
    torch.testing.assert_close(estimate(rewards, name, k, scale="batch"), by_batch)


def test_an_estimator_of_the_user(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def double(rewards):\n    return 2 * (rewards - rewards.mean())\n\ndef one(rewards): return 1\n")
    rewards = torch.tensor([[0.0, 1.0, float("nan"), 2.0]])
    assert estimate(rewards, f"{file}:double").tolist() == [[-2.0, 0.0, 0.0, 2.0]]
    with pytest.raises(ValueError, match=r"must return a tensor of 3 finite advantages .* returned 1"):
        estimate(rewards, f"{file}:one")
    with pytest.raises(ValueError, match="has no function 'twice'"):
        check_estimator(f"{file}:twice", None, 4)
    with pytest.raises(ValueError, match=r"file .*nothing.py' does not exist"):
        check_estimator(f"{tmp_path}/nothing.py:double", None, 4)
    with pytest.raises(ValueError, match="module 'no_such_module' cannot be found"):
        check_estimator("no_such_module:double", None, 4)


def test_curve_counts_only_scored_completions():
    nan = float("nan")
    curve = expected_best_curve(torch.tensor([[0.0, 1, 0, 0], [1, nan, nan, 0]]))
    assert curve == {1: pytest.approx((0.25 + 0.5) / 2), 2: pytest.approx((0.5 + 1) / 2), 4: 1.0}


def test_groups_without_signal():
    nan = float("nan")
    rewards = torch.tensor([[0.1, 0.1, 0.1], [0.0, 1, nan], [nan, nan, nan], [0.3, nan, 0.3]])
    advantages = estimate(rewards, "grpo") + 1e-9  # rounding leaves a trace
    assert without_signal(rewards, advantages).tolist() == [True, False, True, True]
    assert without_signal(rewards[1:2], torch.zeros(1, 3)).tolist() == [True]
