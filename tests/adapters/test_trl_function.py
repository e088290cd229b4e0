"""`trl:module:function`: TRL's own reward functions, called directly, are the oracle."""

import asyncio
import json
import math
from functools import partial

import pytest
from trl.rewards import think_format_reward

from trl_grpo_tasks.commands.check import check_task
from trl_grpo_tasks.registry import find_task_class, get_task
from trl_grpo_tasks.rewards.executor import RewardExecutor
from trl_grpo_tasks.task import NoAnswerError

THINK = "trl:trl.rewards:think_format_reward"
HERE = f"trl:{__name__}"
TEXTS = ["", "<think>a</think>b", "<think>a", "a a a a a a", "a b c d", "<think><think></think>", "\ud800"]

by_think = partial(think_format_reward)  # a callable that is not a function


def exact(prompts, completions, answer, **columns):
    """A reward function of plain prompts that reads a column."""
    assert columns["log_metric"]("x", 1.0) is None and columns["split_by"] == [None]
    return [1.0 if text == right else 0.5 * (prompt in text)
            for prompt, text, right in zip(prompts, completions, answer, strict=True)]  # fmt: skip


async def slowly(completions, **columns):
    await asyncio.sleep(0)
    slowly.loops.add(id(asyncio.get_running_loop()))
    return [float(len(text)) for text in completions]


slowly.loops = set()


def only_completions(completions):
    return [1.0 for _ in completions]


def unscored(completions, **columns):
    return [None if text == "none" else 0.0 for text in completions]


def too_many(completions, **columns):
    return [1.0, 2.0]


def needs_ids(completions, completion_ids, **columns):
    return [0.0]


def raising(completions, **columns):
    raise KeyError("oh")


@pytest.fixture
def make(tmp_path):
    """Make a task from rows: make("exact", [...], option=value)."""

    def from_rows(spec, rows, **options):
        file = tmp_path / "rows.json"
        file.write_text(json.dumps(rows))
        spec = spec if ":" in spec else f"{HERE}:{spec}"
        return get_task(spec, {"dataset": str(file), **options})

    return from_rows


def rows_of(task):
    return task.dataset("train", None, 0) + task.dataset("test", None, 0)


CHATS = [{"prompt": [{"role": "user", "content": text}]} for text in "abcdefghij"]


def as_chats(texts):
    return [[{"role": "assistant", "content": text}] for text in texts]


@pytest.mark.parametrize("spec", [THINK, f"{HERE}:by_think"])
def test_rewards_are_those_of_the_function(make, spec):
    task = make(spec, CHATS)
    assert task.name == spec.rpartition(":")[2] and task.weights == {task.name: 1.0}
    row = rows_of(task)[0]
    expected = think_format_reward(as_chats(TEXTS))
    scores = [task.score(row, text) for text in TEXTS]
    assert [score.total for score in scores] == expected and set(expected) == {0.0, 1.0}
    assert [score.success for score in scores] == [reward >= 1 for reward in expected]
    assert all(score.reason for score in scores if not score.success)


def test_columns_reach_the_function_as_in_trl(make):
    rows = [{"prompt": "a", "answer": "x"}, {"prompt": "b", "answer": "y", "split_by": None}]
    task = make("exact", rows, test_fraction=0)
    first = next(row for row in rows_of(task) if row["prompt"] == "a")
    assert first == {"prompt": "a", "answer": "x", "split_by": None}  # every row has every column
    given = {"prompts": ["a"] * 3, "completions": ["x", "a", "-"], "answer": ["x"] * 3, "split_by": [None]}
    expected = exact(**given, log_metric=lambda *_: None)
    assert [task.score(first, text).total for text in ("x", "a", "-")] == expected == [1.0, 0.5, 0.0]


def test_an_async_function_keeps_its_loop(make):
    task = make("slowly", ["a", "b"])
    expected = asyncio.run(slowly(["", "abc"]))
    slowly.loops.clear()
    row = rows_of(task)[0]
    assert [task.score(row, text).total for text in ("", "abc")] == expected
    assert len(slowly.loops) == 1

    async def in_a_notebook():
        return task.score(row, "abcd").total

    assert asyncio.run(in_a_notebook()) == 4.0


def test_functions_get_only_what_they_take_and_none_is_not_a_score(make):
    task = make("only_completions", [{"prompt": "a", "extra": 1}, "b"])
    assert task.score(rows_of(task)[0], "x").success
    task = make("unscored", ["a", "b"])
    assert task.score(rows_of(task)[0], "none") is None and task.score(rows_of(task)[0], "").total == 0


@pytest.mark.parametrize(
    ("spec", "message"),
    [("raising", "KeyError: 'oh'"), ("too_many", "too_many returned 2 rewards for one completion")],
)
def test_errors_of_the_function_are_reasons(make, spec, message):
    task = make(spec, ["a", "b"])
    with RewardExecutor(task) as executor:
        (outcome,) = executor.submit([json.dumps(rows_of(task)[0])], ["x"]).result()
    assert outcome.score is None and message in outcome.reason


# ---- data


def test_a_split_column_decides_and_shared_prompts_are_tested(make):
    """Formats of files, and their order: tests/tasks/prompts/test_data.py."""
    rows = [{"prompt": prompt, "split": split}
            for prompt, split in (("a", "train"), ("b", "train"), ("b", "test"), ("c", "test"))]  # fmt: skip
    task = make("only_completions", rows)
    assert [row["prompt"] for row in task.dataset("train", None, 0)] == ["a"]
    assert sorted(row["prompt"] for row in task.dataset("test", None, 0)) == ["b", "c"]
    rows = [{"prompt": f"p{n}"} for n in range(20)]
    task = make("only_completions", rows)
    assert sorted(rows_of(task), key=lambda row: int(row["prompt"][1:])) == rows
    assert len(task.dataset("test", None, 0)) == 2, "by the hash of the prompt"


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([{"text": "a"}], {}, "row 1: 'prompt' must be text"),
        ([{"prompt": [{"role": "user"}]}], {}, "row 1: 'prompt' must be text, or messages"),
        ([{"prompt": "a", "split": "dev"}], {}, "row 1: the column 'split' must be train or test, got 'dev'"),
        ([], {}, "contains no row"),
        (["a"], {"dataset": None}, "pass --dataset with a file"),
        (["a"], {"dataset": "missing.json"}, "--dataset missing.json: this path does not exist"),
        (["a"], {"dataset": __file__}, "is not a file that ends in .json"),
        (["a"], {"test_fraction": 1.0}, "--test_fraction 1.0 must be"),
        (["a"], {"success_at": math.nan}, "--success_at nan must be a number"),
    ],
)
def test_mistakes_are_reported(make, rows, options, message):
    with pytest.raises(ValueError, match=message):
        make("only_completions", rows, **options)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("trl:no_colon", "must be trl:module:reward, such as trl:trl.rewards"),
        ("trl:no_such_module_anywhere:f", "reward module 'no_such_module_anywhere' cannot be found"),
        ("trl:trl.rewards:nothing", "must define a reward function 'nothing', found nothing"),
        (f"{HERE}:TEXTS", "must define a reward function 'TEXTS'"),
        ("tlr:a:b", "unknown task 'tlr:a:b'.*PREFIX:NAME.*trl"),
    ],
)
def test_specs_with_mistakes_are_reported(spec, message):
    with pytest.raises(ValueError, match=message):
        find_task_class(spec)


def test_a_function_that_needs_what_is_not_there_is_refused(make):
    with pytest.raises(ValueError, match=r"needs_ids needs 'completion_ids', which is not a column .*one by one"):
        make("needs_ids", ["a"])
    with pytest.raises(ValueError, match=r"exact needs 'answer', which is not a column of the data set \(solution\)"):
        make("exact", [{"prompt": "a", "solution": "x"}])


# ---- the command `check`; training: tests/test_readme.py runs the commands of docs/guides/other_libraries.md


def test_check_says_what_it_cannot_check(make):
    answered = [row | ({"gold": "<think>a</think>b"} if n < 5 else {}) for n, row in enumerate(CHATS)]
    always = make("only_completions", ["a", "b"])
    for task, wanted in (
        (make(THINK, answered, test_fraction=0.5), "ok  gold answers are valid and succeed (5 of 10 rows have one)"),
        (make(THINK, answered[:5]), "ok  gold answers are valid and succeed (5 rows)"),
        (always, "-   bad answers: none is known, so it is not checked that an answer can fail"),
    ):
        lines = []
        check_task(task, say=lines.append)
        assert wanted in lines
    with pytest.raises(NoAnswerError, match="--gold_column"):
        always.gold(rows_of(always)[0])
