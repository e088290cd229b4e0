"""--think of the prompts task: the answer after the marker is scored, and the thought before it is free."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.prompt_files import SCHEMA, from_rows, make
from tests.support.walks import allowed_tokens
from trl_grpo_tasks.commands.check import check_task
from trl_grpo_tasks.constraints import ThinkThen
from trl_grpo_tasks.models.tiny import make_tokenizer

NUMBER = {"prompt": "2 + 2?", "answer": "4", "rewards": {"numeric": 1.0}}
OBJECT = {"prompt": "JSON", "schema": SCHEMA, "gold": '{"a": 3}', "rewards": {"schema": 1.0}}

ARITHMETIC = make(think=True)


@pytest.fixture
def number_task(tmp_path):
    return from_rows(tmp_path, [NUMBER], think=True, test_fraction=0)


def test_only_the_answer_after_the_first_marker_is_scored(number_task):
    (row,) = number_task.dataset("train", None, 0)
    score = number_task.score(row, "3 is wrong; 2 + 2 = 4, so\n#### 4")
    assert score.success and score.total == 1.0
    assert score.info["has_thought"] and score.info["answer_characters"] == 2
    assert not number_task.score(row, "4 #### 5").success
    assert not number_task.score(row, "#### 4 #### 5").success, "the first marker counts"
    without = number_task.score(row, "the answer is 4")
    assert not without.valid and without.components == {"numeric": 0.0} and "no answer after '####'" in without.reason
    assert number_task.canonical(row, "a #### 4") == number_task.canonical(row, "b####4\n") == "4"


@given(st.text())
def test_any_text_gets_a_score(text):
    row = ARITHMETIC.dataset("train", 1, 0)[0]
    assert ARITHMETIC.score(row, text) is not None and ARITHMETIC.score(row, f"####{text}") is not None


@pytest.mark.parametrize("marker", ["####", "</think>"])
def test_gold_answers_have_the_marker_and_keep_the_contract(marker):
    """Among others, they succeed and the constraint allows them. Word problems have their steps as the thought."""
    for generator in ("word_problems", "schema"):
        task = make(generator=generator, think=True, think_marker=marker)
        check_task(task)
        row = task.dataset("train", 1, 0)[0]
        thought = task.gold(row).partition(marker)[0]
        assert task.score(row, task.gold(row)).info["has_thought"] == bool(thought) == (generator == "word_problems")


def test_rows_of_every_kind_have_a_constraint_after_the_thought(tmp_path):
    rows = [NUMBER, OBJECT, {"prompt": "free", "answer": "yes", "rewards": {"exact": 1.0}}]
    task = from_rows(tmp_path, rows, think=True, think_tokens=9, test_fraction=0)
    tokenizer = make_tokenizer(task.tiny().tokens, 2048)
    constraint, allowed = task.constraint(tokenizer), {}
    assert isinstance(constraint, ThinkThen)
    for row in task.dataset("train", None, 0):
        state = constraint.start(row)
        for token in tokenizer.encode("####", add_special_tokens=False):
            state.accept(token)
        first = row["prompt"][0]["content"][0]
        allowed[first] = {tokenizer.decode(token) for token in allowed_tokens(state, len(tokenizer))} & {*'4{ y"'}
    assert allowed == {"2": {"4", " "}, "J": {"{"}, "f": {*'4{ y"'}}


def test_the_thought_is_folded_away_where_the_answer_is_shown(tmp_path):
    task = from_rows(tmp_path, [OBJECT], think=True, test_fraction=0)
    (row,) = task.dataset("train", None, 0)
    assert json.loads(task.gold(row).removeprefix("####")) == {"a": 3}
    shown = task.render(row, '<b>{"a": 1}</b> is too small ####{"a": 3}')
    folded = "<details><summary>thought</summary>&lt;b&gt;{&quot;a&quot;: 1}&lt;/b&gt; is too small </details>{\n  "
    assert folded in shown and "&quot;a&quot;: 3\n}</pre>" in shown and "success" in shown
    assert "<details>" not in task.render(row, "no <b>answer")
    long = task.render(row, f"{'x' * 10**6}####4")
    assert len(long) < 20_000 and ">4</pre>" in long
