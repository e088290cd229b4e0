"""Prefix scores in the reward executor: computed with the score, cached with it, checked, and under its time limit."""

import json

import pytest

from tests.support.stepped import SteppedTask
from tests.support.toy import ToyTask
from trl_grpo_tasks.rewards.executor import RewardExecutor
from trl_grpo_tasks.rewards.worker import check_prefix_scores

ROW = json.dumps({"letter": "a"})


class Odd(SteppedTask):
    """Its prefix scores misbehave for some completions."""

    def prefix_scores(self, row, completion):
        if completion == "raise":
            raise ValueError("no such letter")
        if completion == "hang":
            while True:
                pass
        if completion == "none":
            return None
        if completion == "short":
            return [(2, 0.5)]
        return super().prefix_scores(row, completion)


@pytest.mark.parametrize("workers", [0, 1])
def test_scores_and_prefix_scores_come_together_and_are_cached(workers):
    with RewardExecutor(Odd(), workers=workers, with_prefixes=True) as executor:
        texts = ["aab", "raise", "none", "short", "aab"]
        first = executor.submit([ROW] * 5, texts).result()
        again = executor.submit([ROW] * 5, texts).result()
    wanted = [(2, 1.0), (3, pytest.approx(2 / 3))]
    for outcomes in (first, again):
        assert [outcome.prefix_scores for outcome in outcomes] == [wanted, None, None, None, wanted]
        assert [outcome.score.components["match"] for outcome in outcomes] == pytest.approx([2 / 3, 0.2, 0, 0, 2 / 3])
        assert "ValueError: no such letter" in outcomes[1].reason and outcomes[2].reason == ""
        assert "at the end, after 5 characters; got (2, 0.5)" in outcomes[3].reason
    assert all(outcome.cached for outcome in again) and executor.stats.misses == 4


def test_the_time_limit_covers_prefix_scores():
    with RewardExecutor(Odd(), workers=1, timeout=1.0, with_prefixes=True) as executor:
        hung, fine = executor.submit([ROW] * 2, ["hang", "a"]).result()
    assert hung.score is None and hung.prefix_scores is None and "timed out after 1 s" in hung.reason
    assert fine.prefix_scores == [(1, 1.0)]


def test_without_the_option_they_are_not_computed():
    with RewardExecutor(Odd(), workers=0) as executor:
        (outcome,) = executor.submit([ROW], ["raise"]).result()
    assert outcome.reason == "" and outcome.prefix_scores is None and outcome.score is not None


@pytest.mark.parametrize(
    ("pairs", "problem"),
    [
        ({2: 0.5}, "list of pairs"),
        ([(1, 0.5, 2)], "list of pairs"),
        ([], "got no pair"),
        ([(1, 0.5), (2, 0.5)], "after 3 characters"),
        ([(2, 0.5), (1, 0.5), (3, 0.5)], "must ascend from 0, got 1 after 2"),
        ([(-1, 0.5), (3, 0.5)], "got -1 after 0"),
        ([(1.0, 0.5), (3, 0.5)], "got 1.0"),
        ([(1, 1.5), (3, 0.5)], "from 0 to 1, got 1.5"),
        ([(1, float("nan")), (3, 0.5)], "from 0 to 1, got nan"),
        ([(1, "x"), (3, 0.5)], "from 0 to 1, got 'x'"),
    ],
)
def test_what_is_wrong_with_prefix_scores_is_said(pairs, problem):
    found, reason = check_prefix_scores(pairs, "abc")
    assert found is None and problem in reason
    assert check_prefix_scores([(0, 0), (3, 1), (3, 0.5)], "abc") == ([(0, 0.0), (3, 1.0), (3, 0.5)], "")


def test_a_task_without_them_returns_none():
    assert ToyTask().prefix_scores({"letter": "a"}, "ab") is None
