"""A toy environment of up to three turns over the letters a to d, and one that does what actions say."""

import os
import time

from tests.support.toy import LETTERS, LettersConstraint, ToyTask
from trl_grpo_tasks import Environment, EnvironmentTask, Step


class Echo(Environment):
    """The first letter is answered by the next one of the alphabet, which must be said then. Saying the letter of the
    row first is worth 0.5; every right answer later is worth 1 and ends the conversation."""

    started = 0  # environments of this process

    def start(self, row):
        Echo.started += 1
        self.letter, self.wanted = row["letter"], None
        return ""

    def step(self, action):
        if self.wanted is not None and action == self.wanted:
            return Step(reward=1.0, done=True, success=True)
        first = self.wanted is None
        self.wanted = LETTERS[(LETTERS.index(action[0]) + 1) % 4] if action[:1] in LETTERS and action else "a"
        return Step(self.wanted, 0.5 if first and action == self.letter else 0.0)


class OneLetter(LettersConstraint):
    """One letter per turn; a later turn may not repeat the one before."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer, most=1)

    def start_turn(self, row, turns):
        state = self.start(row)
        state._ids = [id for letter, id in zip(LETTERS, self._ids, strict=True) if letter not in turns[-1:]]
        return state


class EchoTask(EnvironmentTask):
    name, version, description = "echo", "1", "Say what you are told."
    turns = 2
    spec = "tests.support.toy_environment"
    defaults = {"max_completion_length": 16}

    def dataset(self, split, size, seed):
        return ToyTask().dataset(split, size, seed)

    def environment(self):
        return Echo()

    def turn_constraint(self, tokenizer):
        return OneLetter(tokenizer)

    def gold(self, row):
        return self.conversation(row, [row["letter"], LETTERS[(LETTERS.index(row["letter"]) + 1) % 4]])

    def bad(self, row):
        return self.conversation(row, ["a", "c"])

    def tiny(self):
        return ToyTask().tiny()


class Wild(Environment):
    """Does what the action says."""

    def step(self, action):
        verb = action.partition(" ")[0]
        if verb == "hang":
            time.sleep(1000)
        if verb == "raise":
            raise ValueError("no such wheel")
        if verb == "exit":
            os._exit(7)
        if verb == "eat":
            bytearray(4 * 2**30)
        if verb == "fork":
            os.fork()
        if verb == "flood":
            return Step("x" * 10**6)
        if verb == "wrong":
            return "no step"
        return Step(f"you said {action}", reward=1.0, done=verb == "end", success=verb == "end")


class WildTask(EnvironmentTask):
    name, version, description = "wild_environment", "1", "Do what the action says."
    turns = 3
    longest_observation = 40

    def dataset(self, split, size, seed):
        return [{"prompt": "q"}]

    def environment(self):
        return Wild()


TASK = EchoTask
