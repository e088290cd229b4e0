"""Prefix scores in tests: those of a task, checked, and a toy task that has them."""

from tests.support.toy import ToyTask
from trl_grpo_tasks.rewards.worker import check_prefix_scores


def prefix_scores(task, row, text):
    """The prefix scores of a task, which must keep the rules."""
    pairs, reason = check_prefix_scores(task.prefix_scores(row, text), text)
    assert reason == ""
    return pairs


class SteppedTask(ToyTask):
    """The score is the share of right letters, after every second letter and at the end."""

    spec = None

    def prefix_scores(self, row, completion):
        pairs, right = [], 0
        for place, letter in enumerate(completion, 1):
            right += letter == row["letter"]
            if place % 2 == 0:
                pairs.append((place, right / place))
        return [*pairs, (len(completion), right / max(len(completion), 1))]
