"""Tasks of reasoning-gym: every data set keeps the contract of `Task`, and scores are those of its own scorer."""

import functools
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.exhaustive import exhaustive_but
from trl_grpo_tasks.adapters import expressions
from trl_grpo_tasks.adapters.reasoning_gym_data import UNSTABLE, USABLE_LEVELS, levels_of
from trl_grpo_tasks.commands.check import GARBAGE, check_task
from trl_grpo_tasks.registry import get_task
from trl_grpo_tasks.task import NoAnswerError

factory = pytest.importorskip("reasoning_gym.factory", reason="pip install 'trl_grpo_tasks[reasoning_gym]'")
DATASETS, create_dataset = factory.DATASETS, factory.create_dataset
NAMES = sorted(set(DATASETS) - {"composite"})
SOME = ["chain_sum", "leg_counting", "rush_hour", "spell_backward"]
WITHOUT_ANSWERS = {"boxnet", "rush_hour"}  # these have a scorer, and neither an answer nor an example of one


def questions(rows):
    return [row["prompt"][-1]["content"] for row in rows]


@functools.cache
def task_and_row(name):
    """The task of a data set and its first row, which takes seconds for some."""
    task = get_task(f"reasoning_gym:{name}")
    return task, task.dataset("train", 1, 0)[0]


@pytest.mark.parametrize("name", exhaustive_but(SOME, NAMES))
def test_every_data_set(name):
    task = get_task(f"reasoning_gym:{name}")
    train, test = (task.dataset(split, 3, 0) for split in ("train", "test"))
    assert len(train) == len(test) == 3 and not set(questions(train)) & set(questions(test))
    if name not in UNSTABLE:  # those: the test of the hash seed
        assert get_task(f"reasoning_gym:{name}").dataset("train", 3, 0) == train
    for row in (*train, *test):
        assert not task.score(row, task.bad(row)).success
        if name in WITHOUT_ANSWERS:
            with pytest.raises(NoAnswerError, match="no answer"):
                task.gold(row)
        else:
            score = task.score(row, task.gold(row))
            assert score.valid and score.success and score.total == 1, score.reason
    for text in (text[:300] for text in GARBAGE):
        score = task.score(train[0], text)
        assert score == task.score(train[0], text) and 0 <= score.total <= 1


def test_questions_and_scores_are_those_of_the_library():
    task = get_task("reasoning_gym:spell_backward", {"gym_config": '{"min_word_len": 5, "max_word_len": 6}'})
    for row in task.dataset("train", 20, 3):
        theirs = create_dataset("spell_backward", seed=row["seed"], size=2000, min_word_len=5, max_word_len=6)
        entry = theirs[row["index"]]
        assert questions([row]) == [entry["question"]]
        for answer in (entry["answer"], entry["answer"][:-1], "abc", entry["answer"] + "x"):
            assert task.score(row, answer).total == theirs.score_answer(answer, entry)
            assert task.score(row, f"because <answer> {answer} </answer>").info["answer"] == answer


@pytest.mark.exhaustive
def test_rows_do_not_depend_on_the_hash_seed():
    """One that draws from the global generator, and one that iterates over a set."""
    program = """
from trl_grpo_tasks import get_task
for name in ["list_functions", "ransom_note"]:
    print(get_task(f"reasoning_gym:{name}").dataset("test", 3, 1))
"""
    made = {
        subprocess.run(
            [sys.executable, "-c", program], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "77")
    }
    assert len(made) == 1


def test_seeds_differ_and_splits_share_no_question_whatever_the_seed():
    task = get_task("reasoning_gym:count_bits")
    train = [set(questions(task.dataset("train", 100, seed))) for seed in (0, 1)]
    assert len(train[0] & train[1]) < 5
    assert not set.union(*train) & set(questions(task.dataset("test", 100, 1)))


def test_a_small_data_set_ends():
    task = get_task("reasoning_gym:coin_flip", {"gym_config": '{"min_trials": 1, "max_trials": 1}'})
    few = [task.dataset(split, 10, 0) for split in ("train", "test")]
    assert not set(questions(few[0])) & set(questions(few[1]))


def test_mixture_with_levels_keeps_the_contract():
    task = get_task("reasoning_gym:chain_sum+leg_counting", {"gym_levels": 3})
    check_task(task)
    rows = task.dataset("train", 12, 0)
    assert [row["data_set"] for row in rows[:4]] == ["chain_sum", "leg_counting"] * 2
    assert [row["level"] for row in rows] == [level for level in "012" for _ in range(2)] * 2
    assert task.levels == ["0", "1", "2"]
    sums = questions(rows[:6:2])
    assert sorted(sums, key=len) == sums, "levels become harder"


# A question of the hardest level takes seconds; of sokoban, also one of the easiest.
SLOW_LEVELS = {"bf", "futoshiki", "game_of_life", "jugs", "zebra_puzzles"}


@pytest.mark.parametrize("name", exhaustive_but(SOME, sorted(set(NAMES) - set(UNSTABLE) - {"sokoban"})))
def test_the_easiest_and_the_hardest_level_have_questions_that_their_answers_solve(name):
    last = 1 if name in SLOW_LEVELS else len(levels_of(name))
    for level in {0, last - 1} if last else ():  # a task makes the data sets of all its levels
        task = get_task(f"reasoning_gym:{name}", {"gym_levels": level + 1})
        task._sources = [(name, str(level))]
        row = [*task.dataset("train", 1, 0), *task.dataset("test", 1, 0)][0]  # the easiest coin flips are all held out
        if row["answer"] is None:
            assert name in WITHOUT_ANSWERS | {"rubiks_cube"}
        else:
            assert task.score(row, task.gold(row)).success
        assert not task.score(row, task.bad(row)).success


def test_a_known_answer_is_never_too_long():
    task = get_task("reasoning_gym:binary_matrix", {"gym_levels": 4})
    rows = [row for row in task.dataset("train", 16, 0) if row["level"] == "3"]
    assert max(len(row["answer"]) for row in rows) > 20_000
    assert all(task.score(row, task.gold(row)).success for row in rows)
    assert "characters, more than" in task.score(rows[0], "1" * 100_000).reason


def test_levels_that_the_library_refuses_or_that_have_no_questions_are_left_out():
    assert [len(levels_of(name)) for name in ("chain_sum", "caesar_cipher", "acre")] == [11, 2, 0]
    for name, count in USABLE_LEVELS.items():
        assert len(levels_of(name)) == count
        with pytest.raises(ValueError, match=f"from 0 to {count}"):
            get_task(f"reasoning_gym:{name}", {"gym_levels": count + 1})


def test_with_a_system_prompt_answers_need_tags():
    task = get_task("reasoning_gym:chain_sum", {"gym_prompt": "direct"})
    check_task(task)
    (row,) = task.dataset("train", 1, 0)
    assert row["prompt"][0]["role"] == "system" and task.gold(row) == f"<answer>{row['answer']}</answer>"
    assert not task.score(row, row["answer"]).valid and task.tiny() is None


@pytest.mark.parametrize(
    ("spec", "options", "words"),
    [
        ("chain_summ", {}, "did you mean 'chain_sum'"),
        ("composite", {}, "NAME\\+NAME"),
        ("chain_sum+chain_sum", {}, "twice"),
        ("", {}, "write reasoning_gym:NAME"),
        ("chain_sum", {"gym_config": "{"}, "not JSON"),
        ("chain_sum", {"gym_config": "[1]"}, "must be a JSON object"),
        ("chain_sum", {"gym_config": '{"min_term": 3}'}, "did you mean 'min_terms'"),
        ("chain_sum", {"gym_config": '{"min_terms": 9}'}, "refuses this configuration.*max_terms must be"),
        ("chain_sum", {"gym_config": '{"min_terms": "x"}'}, "refuses this configuration"),
        ("chain_sum+gcd", {"gym_config": '{"min_terms": 3}'}, "one object per data set: chain_sum, gcd"),
        ("chain_sum+gcd", {"gym_config": '{"lcm": {}}'}, "'lcm' is not in the mixture"),
        ("chain_sum", {"gym_levels": 99}, "from 0 to 11"),
        ("acre", {"gym_levels": 1}, "from 0 to 0"),
        ("chain_sum", {"gym_prompt": "dierct"}, "did you mean 'direct'"),
    ],
)
def test_mistakes_are_reported(spec, options, words):
    with pytest.raises(ValueError, match=words):
        get_task(f"reasoning_gym:{spec}", options)


ATTACKS = ["open('{}', 'w')", "exec(chr(49))", "x.__class__", "().real", "x.n()", "test()", "Integral(x, x)"]


@pytest.mark.parametrize("attack", ATTACKS)
def test_expressions_that_run_code_are_refused(attack, tmp_path):
    assert all(expressions.unsafe_reason(name, attack) for name in expressions.PARSED)
    assert not expressions.unsafe_reason("dice", attack), "its scorer parses no expression"
    task, row = task_and_row("simple_integration")
    score = task.score(row, attack.format(tmp_path / "made"))
    assert not score.valid and "the answer" in score.reason and not list(tmp_path.iterdir())


def test_ordinary_expressions_are_allowed():
    for text in ("(3 + 4)*2/1.5", "x**2/2 + C", "2*sin(3*x) - exp(y)", ""):
        assert not expressions.unsafe_reason("simple_integration", text)


@pytest.mark.parametrize("module", expressions.EVALUATED)
def test_scorers_that_evaluate_answers_read_literals_only(module, tmp_path):
    task, row = task_and_row(module.split(".")[1])
    task.score(row, f"[open({str(tmp_path / 'made')!r}, 'w')]")
    assert not list(tmp_path.iterdir())
    theirs = create_dataset(row["data_set"], seed=row["seed"], size=2000)
    assert theirs.score_answer("[1, 2]", theirs[row["index"]]) == task.score(row, "[1, 2]").total


@settings(max_examples=50)
@given(st.text(max_size=80), st.sampled_from(["simple_integration", "dice"]))
def test_any_text_gets_a_score(text, name):
    task, row = task_and_row(name)
    score = task.score(row, text)
    assert 0 <= score.total <= 1 and (score.valid or score.reason)
