"""MyTask: find a number between two others in three turns. Change this file step by step into your own task.

trl-grpo-tasks check my_task.py          checks without a model that the parts fit together
trl-grpo-tasks train my_task.py          trains the tiny model of the task, offline, in about a minute
"""

import random

from trl_grpo_tasks import Environment, EnvironmentTask, Step
from trl_grpo_tasks.task import TinySpec


class Game(Environment):
    """One conversation. The same row and actions must have the same answers."""

    def start(self, row):
        """Begin; return what the model is told first, or "" if the prompt says everything."""
        self.number = row["number"]
        return ""

    def step(self, action):
        """Answer a turn of the model, which may be any text. Rewards are added up."""
        if action.strip() == str(self.number):
            return Step(reward=1.0, done=True, success=True)
        if not action.strip().isdecimal():
            return Step(done=True, reason="no number")
        return Step("more" if int(action.strip()[:4]) < self.number else "less")


class MyTask(EnvironmentTask):
    name = "my_task"
    version = "1"  # increase it whenever a score can change
    description = "Find a number in three turns."
    turns = 3
    defaults = {"max_completion_length": 24}
    tiny_defaults = {"cold_start_steps": 60, "max_steps": 60, "learning_rate": 3e-4}

    def environment(self):
        return Game()

    def dataset(self, split, size, seed):
        """Return rows of a split: a prompt, and whatever the environment needs. The splits must not share a row."""
        games = [(low, number) for low in range(10, 90) for number in range(low, low + 7)]
        random.Random(0).shuffle(games)  # the same for all seeds, so that no split has a game of the other one
        games = games[:400] if split == "train" else games[400:]
        random.Random(seed).shuffle(games)
        rows = [{"prompt": [{"role": "user", "content": f"{low}-{low + 6}"}], "number": n} for low, n in games]
        return rows[:size]

    def request(self, row):
        """Rows with equal prompts ask for different numbers."""
        return f"{super().request(row)} {row['number']}"

    def gold(self, row):
        """Return a conversation that succeeds. The cold start trains on its turns."""
        low, high = map(int, row["prompt"][0]["content"].split("-"))
        actions: list[int] = []
        while not actions or actions[-1] != row["number"]:
            actions.append((low + high) // 2)
            low, high = (actions[-1] + 1, high) if actions[-1] < row["number"] else (low, actions[-1] - 1)
        return self.conversation(row, list(map(str, actions)))

    def bad(self, row):
        """Return a conversation that does not succeed. `check` uses it."""
        return "?"

    def turn_constraint(self, tokenizer):
        """Say which text a turn may have. Leave this out if any text is allowed."""
        from trl_grpo_tasks.constraints import Grammar, GrammarConstraint

        return GrammarConstraint(tokenizer, Grammar.regex("[1-9][0-9]"))

    def tiny(self):
        """Describe the tiny model: the texts it knows, and its size."""
        return TinySpec(tokens=[*"0123456789-?", "more", "less"], hidden_size=64, layers=2, heads=4, context=64)
