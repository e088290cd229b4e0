"""MyTask: reverse the word in the prompt. Change this file step by step into your own task.

trl-grpo-tasks check my_task.py          checks without a model that the parts fit together
trl-grpo-tasks train my_task.py          trains the tiny model of the task, offline, in about a minute
trl-grpo-tasks train my_task.py --model Qwen/Qwen2.5-0.5B-Instruct --use_peft
"""

import random
from dataclasses import dataclass

from trl_grpo_tasks.task import Task, TinySpec, option

LETTERS = "abcdefgh"


@dataclass(frozen=True)
class MyOptions:
    """Options of the task: each field is a command-line option."""

    word_length: int = option(4, "Letters in the longest word.")

    def __post_init__(self):
        if not 2 <= self.word_length <= 8:
            raise ValueError(f"--word_length {self.word_length} must be between 2 and 8")


class MyTask(Task):
    name = "my_task"
    version = "1"  # increase it whenever a score can change
    description = "Reverse the word in the prompt."
    # The components of the reward and their weights. Partial credit helps: a model that never succeeds cannot learn.
    weights = {"letters": 0.3, "exact": 1.0}
    levels = ("short", "long")  # from easy to hard; each row names one as `level`
    # Training options that suit the task with any model. Recipes and command-line options override them.
    defaults = {"max_completion_length": 12, "temperature": 1.0}
    # More of them, for the tiny model only, where the package's defaults do not suit it.
    tiny_defaults = {"max_steps": 120}
    Options = MyOptions

    def dataset(self, split, size, seed):
        """Return rows of a split: a prompt, and whatever `score` needs. The splits must not share a row."""
        rows = []
        for index in range(size or 512):
            rng = random.Random(f"{seed}-{split}-{index}")
            while True:
                length = rng.randint(2, self.options.word_length)
                word = "".join(rng.choice(LETTERS) for _ in range(length))
                # The letters of a word decide to which split it belongs, whatever the seed.
                if (random.Random(word).random() < 0.2) == (split == "test"):
                    break
            level = "short" if length <= 2 else "long"
            rows.append({"prompt": [{"role": "user", "content": word}], "word": word, "level": level})
        return rows

    def score(self, row, completion):
        """Score one completion. This must return a score for any text, and never raise."""
        wanted, given = row["word"][::-1], completion.strip()
        right = sum(a == b for a, b in zip(wanted, given, strict=False))
        letters = right / max(len(wanted), len(given))
        success = given == wanted
        valid = bool(given) and set(given) <= set(LETTERS)
        reason = "" if success else f"expected {wanted!r}"
        return self.make_score({"letters": letters, "exact": float(success)}, valid, success, reason)

    def gold(self, row):
        """Return an answer that succeeds. The cold start trains on it."""
        return row["word"][::-1]

    def bad(self, row):
        """Return an answer that does not succeed. `check` uses it."""
        return "?"

    def row_of(self, text):
        """Make a row from a text, for `trl-grpo-tasks solve` and `play`."""
        return {"prompt": [{"role": "user", "content": text}], "word": text}

    def constraint(self, tokenizer):
        """Say which text is allowed (used with --constrain). Leave this out if any text is."""
        from trl_grpo_tasks.constraints import Grammar, GrammarConstraint

        # To let the model think before it answers, import ThinkThen and split_thought from
        # trl_grpo_tasks.constraints, return ThinkThen(tokenizer, GrammarConstraint(...), "####"), and let `score`
        # begin with completion = split_thought(completion, ["####"])[1] or "". With thought_markers = ("####",) in
        # the class, report and playground fold thoughts away.
        return GrammarConstraint(tokenizer, Grammar.regex(f"[{LETTERS}]+"))

    def tiny(self):
        """Describe the tiny model: the characters it knows, and its size."""
        return TinySpec(tokens=list(LETTERS + "?"), hidden_size=64, layers=2, heads=4, context=64)
