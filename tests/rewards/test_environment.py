"""Environments: scores of conversations, what they keep, and what happens when they fail."""

import copy
import itertools
import pickle
import re

import dill
import pytest

from tests.support.toy import LETTERS
from tests.support.toy_environment import Echo, EchoTask, WildTask
from trl_grpo_tasks import Environment, EnvironmentTask, Step
from trl_grpo_tasks.constraints.turns import join_turns, split_turns
from trl_grpo_tasks.rewards.executor import RewardExecutor

ROW = {"prompt": "a1x", "letter": "a", "level": "1"}


def outcome(letter, actions):
    """(reward, success) of actions of one letter, written down without an environment."""
    follows = dict(zip("abcd", "bcda", strict=True))
    first = 0.5 if actions[0] == letter else 0.0
    said = [b for a, b in itertools.pairwise(actions) if follows[a] == b]
    return (first + 1.0, True) if said else (first, False)


def test_scores_are_those_of_the_conversation():
    task = EchoTask()
    for letter, actions in itertools.product("ab", itertools.product(LETTERS, repeat=2)):
        row = {**ROW, "letter": letter}
        score = task.score(row, task.conversation(row, actions))
        assert (score.total, score.success) == outcome(letter, actions)
        assert sum(score.info["turn_rewards"]) == score.total and score.info["turns"] == 2
    first = task.score(ROW, "a")
    assert (first.total, first.success, first.info["observation"]) == (0.5, False, "b")
    assert first.reason == "the conversation did not end"
    assert split_turns(task.gold(ROW)) == (["a", "b"], ["b"])
    assert task.score(ROW, task.gold(ROW)).success and not task.score(ROW, task.bad(ROW)).success


def test_an_environment_goes_on_where_its_conversation_did_and_is_played_again_elsewhere():
    task, long = EchoTask(), join_turns(["a", "c", "a"], ["b", "d"])
    task.turns = 4
    scores, before = [], Echo.started
    for count in (1, 2, 3):
        turns, told = split_turns(long)
        scores.append(task.score(ROW, join_turns(turns[:count], told[: count - 1])))
    assert Echo.started == before + 1
    assert scores == [EchoTask.score(task, ROW, text) for text in ("a", join_turns("ac", ["b"]), long)]
    assert Echo.started == before + 2, "each conversation was continued from the one before"
    for copied in (copy.deepcopy(task), pickle.loads(pickle.dumps(task)), dill.loads(dill.dumps(task))):
        assert copied.score(ROW, long) == scores[2]


def test_only_so_many_environments_are_kept_and_each_is_closed():
    closed = []

    class Closing(Echo):
        def close(self):
            closed.append(self.letter)
            raise OSError("it is closed already")

    class Task(EchoTask):
        most_kept = 2

        def environment(self):
            return Closing()

    task = Task()
    for letter in "abc":
        task.score({**ROW, "letter": letter}, "d")
    assert closed == ["a"]
    assert task.score({**ROW, "letter": "b"}, join_turns("da", ["a"])).success and closed == ["a", "b"]
    assert not task.score({**ROW, "letter": "c"}, join_turns("db", ["a"])).success and closed == [*"abc"], "at its end"


def test_the_first_observation_is_part_of_the_prompt():
    class Greeting(Environment):
        def start(self, row):
            return f"number {row['n']}"

    class Task(EchoTask):
        def environment(self):
            return Greeting()

    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    assert Task().opened({"prompt": "q\n", "n": 1})["prompt"] == "q\nnumber 1\n"
    assert Task().opened({"prompt": chat, "n": 2})["prompt"] == [chat[0], {"role": "user", "content": "q\n\nnumber 2"}]
    assert EchoTask().opened(ROW) == ROW


@pytest.mark.parametrize("workers", [0, 2])
def test_an_environment_that_fails_costs_its_own_completion_only(workers, monkeypatch):
    """With workers, also one that hangs, exits, forks or takes all memory."""
    monkeypatch.setattr("trl_grpo_tasks.rewards.environment.SECONDS_PER_TURN", 0.2)
    said = ["go", "raise", "hang", "flood", "wrong", "end", *(["exit", "eat", "fork"] if workers else [])]
    task = WildTask()
    with RewardExecutor(task, workers=workers, timeout=2, memory_mb=1024) as executor:
        if workers:
            asked = [task.ask(executor, {"prompt": "q"}, text) for text in said]
            found = [each.answer() for each in asked]
            assert all(each.is_answered() for each in asked)
        else:
            found = [task.reply({"prompt": "q"}, text) for text in said]
        expected = ["you said go", None, None, "x" * 37 + "...", None, None, *([None, None] if workers else [])]
        assert found[: len(expected)] == expected
        later = executor.submit(['{"prompt": "q"}'] * 2, [join_turns(["go", "end"], ["you said go"]), "raise"])
        done, failed = later.result()
    assert done.score.success and done.score.total == 2
    assert failed.score is None and "no such wheel" in failed.reason


def test_what_is_not_defined_has_an_error_that_says_so():
    class Bare(EnvironmentTask):
        name, version, description = "bare", "1", "Nothing."

    with pytest.raises(NotImplementedError, match=re.escape("task 'bare' must define environment()")):
        Bare().score({"prompt": "q"}, "x")
    with pytest.raises(TypeError, match="step must return a Step, got str"):
        WildTask().score({"prompt": "q"}, "wrong")
    assert Step() == Step("", 0.0, False, False, "", {}, True)
