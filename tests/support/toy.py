"""The toy task: repeat the letter of the prompt (a to d)."""

import itertools

from trl_grpo_tasks.constraints.base import pack_ids
from trl_grpo_tasks.task import Task, TinySpec

LETTERS = "abcd"


class LettersState:
    """Allows between one and `most` letters, followed by the end-of-sequence token."""

    def __init__(self, ids, eos, vocab_size, most):
        self._ids, self._eos, self._vocab_size, self._left = ids, eos, vocab_size, most
        self._any, self.finished = False, False

    def mask(self):
        ids = (self._ids if self._left else []) + ([self._eos] if self._any else [])
        return pack_ids(ids, self._vocab_size)

    def accept(self, token):
        if self.finished or not ((token == self._eos and self._any) or (token in self._ids and self._left)):
            raise ValueError(f"token {token} is not allowed here")
        self.finished = token == self._eos
        self._left -= 1
        self._any = True


class LettersConstraint:
    def __init__(self, tokenizer, most=3):
        self.vocab_size = len(tokenizer)
        self._ids = tokenizer.convert_tokens_to_ids(list(LETTERS))
        self._eos = tokenizer.eos_token_id
        self._most = most

    def start(self, row):
        return LettersState(self._ids, self._eos, self.vocab_size, self._most)


class ToyTask(Task):
    name = "toy"
    version = "1"
    description = "Repeat the letter of the prompt."
    weights = {"match": 1.0, "short": 0.1}
    levels = ("1", "2")
    spec = "tests.support.toy"

    def dataset(self, split, size, seed):
        pairs = list(itertools.product(LETTERS, ["1", "2"]))
        rows = [{"prompt": f"{letter}{level}x", "letter": letter, "level": level} for letter, level in pairs]
        rows = rows[:6] if split == "train" else rows[6:]
        return [rows[i % len(rows)] for i in range(size or len(rows))]

    def score(self, row, completion):
        match = completion.count(row["letter"]) / len(completion) if completion else 0.0
        short = 1.0 - min(len(completion), 8) / 8
        valid = bool(completion) and set(completion) <= set(LETTERS)
        reason = "" if match == 1.0 else f"not all letters are {row['letter']!r}"
        return self.make_score({"match": match, "short": short}, valid, match == 1.0, reason)

    def gold(self, row):
        return row["letter"]

    def bad(self, row):
        return "x"

    def constraint(self, tokenizer):
        return LettersConstraint(tokenizer)

    def tiny(self):
        return TinySpec(list(LETTERS + "12x"), hidden_size=16, layers=1, heads=2, context=64)
