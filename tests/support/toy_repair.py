"""The toy task with up to two letters per answer and with reasons in its own vocabulary."""

from tests.support.toy import LettersConstraint, ToyTask
from trl_grpo_tasks.task import Task


class AdvisingToy(ToyTask):
    """Repeat the letter of the prompt. The reason of a failure is the length of the answer, and a word that the tiny
    model cannot spell."""

    spec = "tests.support.toy_repair"

    def score(self, row, completion):
        score = super().score(row, completion)
        reason = "" if score.success else f"length {len(completion)} x"
        return self.make_score(score.components, score.valid, score.success, reason)

    def constraint(self, tokenizer):
        return LettersConstraint(tokenizer, most=2)


TASK = AdvisingToy
assert issubclass(TASK, Task)
