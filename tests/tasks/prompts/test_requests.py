"""Requests of the prompts task: rows of a file by number, id and words; new prompts, judged or not."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_grpo_tasks.registry import get_task

ROWS = [
    {"prompt": f"What is {n} + {n}?", "answer": 2 * n, "rewards": ["numeric"], "id": f"sum-{n}"} for n in range(1, 31)
]
GENERATED = get_task("prompts")


@pytest.fixture
def task(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return get_task("prompts", {"prompts_file": str(file)})


@pytest.mark.parametrize("text", ["row 7", "#7", "ROW 7", "id sum-7", "What is 7 + 7?"])
def test_a_row_of_the_file_is_found_by_number_id_and_words(task, text):
    row = task.row_of(text)
    assert row["prompt"] == [{"role": "user", "content": "What is 7 + 7?"}] and row["answer"] == "14"
    assert task.score(row, "14").success and not task.score(row, "15").success
    assert task.unverifiable(row) == "" and "numeric" in row["interpretation"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("row 31", "the rows of the file are 1 to 30"), ("#0", "the rows of the file are 1 to 30"),
        ("id none", "0 rows of the file have this id"), (" ", "empty"),
    ],
)  # fmt: skip
def test_there_is_no_such_row(task, text, message):
    with pytest.raises(ValueError, match=message):
        task.row_of(text)


def test_a_new_prompt_without_a_check_cannot_be_judged(task):
    for one in (task, GENERATED):
        row = one.row_of("Write a poem.")
        assert "no reward of this row checks the answer" in one.unverifiable(row)
        score = one.score(row, "Roses are red.")
        assert score.valid and not score.success and score.total == 0


def test_generated_problems_have_numbers_too():
    row = GENERATED.row_of("row 3")
    assert row["interpretation"].startswith("row 3 of the held-out problems, judged by numeric")
    assert GENERATED.score(row, GENERATED.gold(row)).success
    assert GENERATED.row_of(row["prompt"][-1]["content"]) == row
    assert row["prompt"] in [test["prompt"] for test in GENERATED.dataset("test", None, 0)]
    with pytest.raises(ValueError, match="the rows of the held-out problems are 1 to 200"):
        GENERATED.row_of("#99999")


def test_a_new_prompt_keeps_the_rewards_that_need_no_column():
    task = get_task("prompts", {"generator": "schema", "rewards": ["json", "length"], "target_length": 3})
    row = task.row_of("Any JSON, please.")
    assert set(row["rewards"]) == {"json", "length"} and task.unverifiable(row) == ""
    assert task.score(row, "[1, 2]").success and not task.score(row, "one").success


def test_rows_are_completed_as_those_of_a_file():
    row = GENERATED.row_from({"prompt": "2 + 2 =", "answer": 4, "rewards": ["numeric"]})
    assert row["prompt"] == [{"role": "user", "content": "2 + 2 ="}] and GENERATED.unverifiable(row) == ""
    assert GENERATED.row_from(row) == row
    assert GENERATED.score(row, "4").success
    for wrong, message in (
        ({"prompt": "x", "rewards": ["numeric"]}, "needs a column 'answer'"),
        ({"prompt": "x"}, "has no reward"),
        ({"prompt": "x", "rewards": ["tests"], "tests": ["assert True"]}, "--allow_code_execution"),
        ({"prompt": "x", "rewards": ["os:system"]}, "--rewards os:system"),
        ({"answer": 3}, "needs a 'prompt'"),
    ):
        with pytest.raises(ValueError, match=message):
            GENERATED.row_from(wrong)


@given(st.text())
def test_any_text_is_a_row_or_an_error(text):
    try:
        assert GENERATED.row_of(text)["prompt"][-1]["content"] == text
    except ValueError as error:
        assert str(error)
