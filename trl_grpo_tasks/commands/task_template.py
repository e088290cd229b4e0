"""MyTask: reverse the word in the prompt. Change it piece by piece into a task of your own.

trl-grpo-tasks check --task my_task.py          proves, with no model, that the pieces fit together
trl-grpo-tasks train --task my_task.py          trains the embedded tiny model, in minutes, offline
accelerate launch train.py --task my_task.py --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --use_peft
"""

import random
from dataclasses import dataclass, field

from trl_grpo_tasks.task import Task, TinySpec

LETTERS = "abcdefgh"


@dataclass(frozen=True)
class MyOptions:
    """Options of this task: each field is a command-line flag."""

    word_length: int = field(default=4, metadata={"help": "Letters in the longest word."})

    def __post_init__(self):
        if not 2 <= self.word_length <= 8:
            raise ValueError(f"--word_length {self.word_length} must be between 2 and 8")


class MyTask(Task):
    name = "my_task"
    version = "1"  # bump it whenever a score can change
    description = "Reverse the word in the prompt."
    # The parts of the reward and what each weighs. Partial marks help: a model that is never right learns nothing.
    weights = {"letters": 0.3, "exact": 1.0}
    levels = ("short", "long")  # easy to hard; rows carry one of these as `level`
    # Training options that suit the task; recipes and flags go before them.
    defaults = {"max_completion_length": 12, "num_generations": 16, "per_device_train_batch_size": 256,
                "learning_rate": 5e-4, "max_steps": 120, "cold_start_steps": 150, "temperature": 1.0}  # fmt: skip
    Options = MyOptions

    def dataset(self, split, size, seed):
        """Rows of a split: a prompt, and whatever `score` needs. Seeded, and the splits never share a row."""
        rows = []
        for index in range(size or 512):
            rng = random.Random(f"{seed}-{split}-{index}")
            while True:
                length = rng.randint(2, self.options.word_length)
                word = "".join(rng.choice(LETTERS) for _ in range(length))
                # A word belongs to one split by its own letters, whatever the seed.
                if (random.Random(word).random() < 0.2) == (split == "test"):
                    break
            level = "short" if length <= 2 else "long"
            rows.append({"prompt": [{"role": "user", "content": word}], "word": word, "level": level})
        return rows

    def score(self, row, completion):
        """Judge one completion. Whatever the model wrote, this returns a score; it never raises."""
        wanted, given = row["word"][::-1], completion.strip()
        right = sum(a == b for a, b in zip(wanted, given, strict=False))
        letters = right / max(len(wanted), len(given))
        success = given == wanted
        valid = bool(given) and set(given) <= set(LETTERS)
        reason = "" if success else f"expected {wanted!r}"
        return self.make_score({"letters": letters, "exact": float(success)}, valid, success, reason)

    def gold(self, row):
        """An answer that succeeds: for the cold start, and for the contract test."""
        return row["word"][::-1]

    def bad(self, row):
        """An answer that does not."""
        return "?"

    def row_of(self, text):
        """A row for a text of one's own, for `trl-grpo-tasks generate`."""
        return {"prompt": [{"role": "user", "content": text}], "word": text}

    def constraint(self, tokenizer):
        """What may be written next (used with --constrain). Leave it out where anything goes."""
        from trl_grpo_tasks.constraints import Grammar, GrammarConstraint

        return GrammarConstraint(tokenizer, Grammar.regex(f"[{LETTERS}]+"))

    def tiny(self):
        """The embedded model: the characters it knows, and its size."""
        return TinySpec(tokens=list(LETTERS + "?"), hidden_size=64, layers=2, heads=4, context=64)
