"""What adapters share: rewards as scores, and optional libraries."""

import math

import pytest

from trl_grpo_tasks.adapters import RewardOptions, RewardTask, library_version
from trl_grpo_tasks.task import NoAnswerError


class Lengths(RewardTask):
    """Rewards an answer for its length."""

    name, version, description = "lengths", "1", "long answers"
    weights = {"length": 0.5, "bonus": 1.0}

    def score(self, row, completion):
        return self.score_of({"length": len(completion), "bonus": row["bonus"]}, {"seen": True})


def test_the_weighted_sum_decides_on_success():
    task = Lengths(RewardOptions(success_at=2.0))
    score = task.score({"bonus": 0.5}, "abc")
    assert (score.total, score.success, score.valid, score.reason) == (2.0, True, True, "")
    assert score.components == {"length": 3, "bonus": 0.5} and score.info == {"seen": True}
    score = task.score({"bonus": 0.0}, "abc")
    assert (score.total, score.success, score.valid) == (1.5, False, True)
    assert score.reason == "the reward is 1.5, less than 2"
    assert [task.score({"bonus": value}, "abc") for value in (math.nan, math.inf, -math.inf)] == [None] * 3


def test_a_bad_answer_is_one_that_fails():
    assert Lengths(RewardOptions(1.0)).bad({"bonus": 0.0}) == ""
    assert Lengths(RewardOptions(1.0)).bad({"bonus": -9.0}) == ""
    with pytest.raises(NoAnswerError, match="are successes, or cannot be scored"):
        Lengths(RewardOptions(1.0)).bad({"bonus": 3.0})
    with pytest.raises(NoAnswerError):
        Lengths(RewardOptions(1.0)).bad({"bonus": math.nan})


def test_a_missing_library_is_named_with_what_to_install():
    with pytest.raises(ImportError, match=r"need its package: pip install 'trl_grpo_tasks\[no_such_library\]'"):
        library_version("no_such_library", "no_such_library")
    assert library_version("httpx", "httpx")[0].isdigit()
