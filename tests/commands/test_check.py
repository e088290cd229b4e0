"""Every pack keeps the contract, and a task that does not is told so in a sentence."""

import dataclasses
import random

import pytest

from tests.support.toy import ToyTask
from tests.support.toy_environment import EchoTask, OneLetter
from trl_grpo_tasks.commands import check
from trl_grpo_tasks.commands.check import check_task
from trl_grpo_tasks.registry import TASKS, get_task
from trl_grpo_tasks.task import Task, TinySpec


@pytest.mark.parametrize("name", sorted(TASKS))
def test_every_pack_keeps_the_contract(name, monkeypatch):
    """With fewer rows than a user gets, since packs have tests of their own."""
    monkeypatch.setattr(check, "GARBAGE_ROWS", 1)
    monkeypatch.setattr(check, "COMPARED", 24)
    check_task(get_task(name), size=4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("name", TASKS)
def test_every_pack_keeps_the_contract_on_the_rows_of_a_user(name, seed):
    check_task(get_task(name), seed=seed)


def test_conversations_are_checked_turn_by_turn(monkeypatch):
    said = []
    check_task(EchoTask(), say=said.append)
    assert said[-2:] == [f"ok  {what} (16 rows)" for what in (
        "the tiny model can spell prompts and gold answers", "the constraint allows gold answers")]  # fmt: skip
    start_turn = OneLetter.start_turn
    monkeypatch.setattr(
        OneLetter, "start_turn", lambda self, row, turns: start_turn(self, row, [*"abcd"[: len(turns)]])
    )
    refusal = r"the constraint refuses the gold answer .* at token 5: token . is not allowed"
    with pytest.raises(AssertionError, match=refusal):
        check_task(EchoTask(), say=said.append)


class Echo(Task):
    """Answer with the number of the prompt: the smallest task that keeps the contract."""

    name, version, description = "echo", "1", "say the number again"
    weights = {"right": 2.0}
    levels = ("even", "odd")

    def dataset(self, split, size, seed):
        start = 0 if split == "train" else 1000
        numbers = [start + random.Random(f"{seed}-{split}").randrange(100) + i for i in range(size)]
        return [{"prompt": f"say {n}", "n": n, "level": self.levels[n % 2]} for n in numbers]

    def score(self, row, completion):
        right = completion == str(row["n"])
        return self.make_score({"right": float(right)}, valid=completion.isdecimal(), success=right)

    def gold(self, row):
        return str(row["n"])

    def bad(self, row):
        return "no"

    def tiny(self):
        return TinySpec(["say ", *"0123456789"])


@pytest.mark.parametrize("task", [Echo, ToyTask])
def test_the_smallest_tasks_keep_it(task):
    check_task(task())


def changed(**members):
    return type("Changed", (Echo,), members)()


def row_with(**columns):
    return lambda self, split, size, seed: [{**row, **columns} for row in Echo.dataset(self, split, size, seed)]


def scored(**fields):
    return lambda self, row, completion: dataclasses.replace(Echo.score(self, row, completion), **fields)


class Refusing:
    def start(self, row):
        return self

    def accept(self, token):
        raise ValueError("nothing is allowed")


def change_row(self, row, completion):
    row["seen"] = True
    return Echo.score(self, row, completion)


BROKEN = {
    "needs a version": {"version": ""},
    "description must be one line": {"description": "two\nlines"},
    "weights must name": {"weights": {}},
    "weight of component 'right'": {"weights": {"right": float("nan")}},
    "Options must be a dataclass": {"Options": dict},
    "levels must differ": {"levels": ("odd", "odd")},
    "judges": {"judges": lambda self: {"taste": "some/model"}},
    "returned 0 rows": {"dataset": lambda self, split, size, seed: []},
    "JSON cannot hold": {"dataset": row_with(extra={1, 2})},
    "changes when it is written as JSON": {"dataset": row_with(extra=(1, 2))},
    "needs a prompt": {"dataset": row_with(prompt=[{"role": "user"}])},
    "returned other rows": {"dataset": lambda self, split, size, _: Echo.dataset(self, split, size, random.random())},
    "share a request": {"dataset": lambda self, split, size, seed: Echo.dataset(self, "train", size, seed)},
    "level is": {"dataset": row_with(level="strange")},
    "there is no row of level odd": {"dataset": row_with(level="even")},
    "is not valid": {"score": scored(valid=False)},
    "does not succeed": {"gold": lambda self, row: "1234567"},
    "could not be scored": {"score": lambda self, row, completion: None},
    "the bad answer": {"bad": lambda self, row: str(row["n"])},
    "weighted sum": {"score": scored(total=0.7)},
    "not among the weights": {"score": scored(components={"wrong": 1.0})},
    "finite number": {"score": scored(components={"right": float("inf")})},
    "must be bools": {"score": scored(valid=1)},
    "score must return a Score": {"score": lambda self, row, completion: 1.0},
    "score raised UnicodeEncodeError": {
        "score": lambda self, row, completion: (completion.encode(), Echo.score(self, row, completion))[1]
    },
    "and then": {"score": lambda *words: dataclasses.replace(Echo.score(*words), reason=str(random.random()))},
    "changed the row": {"score": change_row},
    "score raised KeyError: 'n'": {"row_of": lambda self, text: {"prompt": text}},
    "row_of raised KeyError: 'x'": {"row_of": lambda self, text: {}["x"]},
    "row_of must return a row": {"row_of": lambda self, text: None},
    "render must return": {"render": lambda self, row, completion: None},
    "group component 'new'": {"group_components": lambda self, rows, completions, scores: {"new": [0.0] * len(rows)}},
    "values for": {"group_components": lambda self, rows, completions, scores: {"right": [0.0]}},
    "cannot spell": {"tiny": lambda self: TinySpec(["say ", *"012345678"])},
    "tokens of tiny() must differ": {"tiny": lambda self: TinySpec(["say ", *"01234567899"])},
    "constraint refuses the gold": {"constraint": lambda self, tokenizer: Refusing()},
}


@pytest.mark.parametrize("sentence", BROKEN)
def test_a_broken_task_is_told_what_is_wrong(sentence):
    with pytest.raises(AssertionError, match=sentence.replace("(", r"\(").replace(")", r"\)")):
        check_task(changed(**BROKEN[sentence]), size=30)
