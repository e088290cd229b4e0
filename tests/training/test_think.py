"""Thought and answer in the trainer: the exact gradient, by enumeration of all completions, and logged lengths."""

import json

import pytest

from tests.support.enumerated import assert_exact_policy_gradient, every_completion
from tests.support.toy import ToyTask
from tests.support.training import toy_trainer
from trl_grpo_tasks.constraints import ChoiceTreeConstraint, ThinkThen, scoring
from trl_grpo_tasks.constraints.think import split_thought

MARKER = "xx"  # with a border: after `x`, the token `x` ends it


class ThinkingToy(ToyTask):
    """The toy task after a thought of up to three tokens."""

    def constraint(self, tokenizer):
        answers = ChoiceTreeConstraint(tokenizer, lambda row: 0, lambda node: [(t, None) for t in ("a", "ab", "b")])
        return ThinkThen(tokenizer, answers, MARKER, most_tokens=3)

    def score(self, row, completion):
        thought, answer = split_thought(completion, [MARKER])
        score = super().score(row, answer or "")
        return self.make_score({**score.components, "short": len(thought) / 2}, score.valid, score.success)


@pytest.mark.parametrize("route", ["narrow", "wide"])
def test_the_policy_gradient_is_that_of_the_expected_reward(tiny_path, tmp_path, monkeypatch, route):
    if route == "wide":
        monkeypatch.setattr(scoring, "WIDE_TOKENS", 0)
    trainer = toy_trainer(tiny_path, tmp_path, ThinkingToy(), constrain=True, max_completion_length=8)
    row = json.loads(trainer.train_dataset[0]["row"])
    completions = every_completion(trainer.generation.constraint, row)
    texts = [trainer._tokenizer.decode(ids, skip_special_tokens=True) for ids, _ in completions]
    assert len({split_thought(text, [MARKER])[0] for text in texts}) > 4 and len(completions) > 15
    rewards = [trainer.task.score(row, text).total for text in texts]
    assert_exact_policy_gradient(trainer, row, completions, rewards)


def test_lengths_of_thoughts_are_logged(tiny_path, tmp_path):
    options = {"constrain": True, "max_completion_length": 8, "max_steps": 1, "rollout": "fast"}
    trainer = toy_trainer(tiny_path, tmp_path, ThinkingToy(), **options)
    trainer.train()
    logged, record = trainer.state.log_history[0], trainer.latest_rollout
    ids, thoughts = record.completion_ids, [split_thought(text, [MARKER])[0] for text in record.completions]
    assert logged["thought/ended"] == 1 and all(len(thought) <= 2 for thought in thoughts)
    assert logged["thought/tokens"] + logged["thought/answer_tokens"] == pytest.approx(sum(map(len, ids)) / len(ids))
    constraint = trainer.generation.constraint.unlimited
    lengths = [constraint.thought_length(each) for each in ids]
    assert logged["thought/tokens"] == pytest.approx(sum(lengths) / len(lengths))
