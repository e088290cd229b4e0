"""Requests of the machine task: every phrasing means its own trial; sizes; what is not understood."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_grpo_tasks.registry import get_task
from trl_grpo_tasks.tasks.machine.trials import TRIALS

TASK = get_task("machine", {"trials": list(TRIALS)})


@pytest.mark.parametrize("trial", TRIALS)
def test_every_phrasing_means_its_trial_and_keeps_its_words(trial):
    for variant in TRIALS[trial].requests:
        row = TASK.row_of(variant)
        assert row["trial"] == trial, variant
        assert row["prompt"][-1]["content"].startswith(f"{variant} Use at most 10 blocks and ")


def test_rows_of_the_data_set_are_their_own_requests():
    for row in TASK.dataset("test", 36, 0):
        made = TASK.row_of(row["prompt"][-1]["content"])
        assert made.items() >= {key: value for key, value in row.items() if key != "gold"}.items()
        assert TASK.score(made, row["gold"]).success


@pytest.mark.parametrize(
    ("text", "trial", "most"),
    [
        ("a car that drives far", "car", 10),
        ("A LARGE CATAPULT", "catapult", 24),
        ("a medium trebuchet", "catapult", 16),
        ("a very big car", "car", 24),
        ("something with wheels, up to 23 blocks", "car", 23),
        ("a car of 9999 blocks", "car", 24),
        ("throw a ball over the wall", "wall", 10),
        ("a small car for a bumpy road", "rough", 10),
        ("drive up the hill", "slope", 10),
        ("throw through the hoops", "rings", 10),
    ],
)
def test_words_choose_trial_and_size(text, trial, most):
    row = TASK.row_of(text)
    assert (row["trial"], row["max_blocks"]) == (trial, most)
    assert trial in row["interpretation"] and f"at most {most} blocks" in row["interpretation"]
    assert f"a score of {TRIALS[trial].goal:g}" in row["interpretation"]


@pytest.mark.parametrize(
    ("text", "goal"),
    [
        ("a car that gets at least 28 m away", 28),
        ("a car that drives at least 25 metres with 12 blocks", 28),
        ("a car of at most 12 blocks", 12),
        ("a catapult, score more than 99.5 points", 100),
        ("throw through the rings, at least 3.2", 3.5),
    ],
)
def test_numbers_choose_the_goal_that_is_enough(text, goal):
    row = TASK.row_of(text)
    assert row["goal"] == goal and f"at least {goal:g}" in row["prompt"][-1]["content"]
    assert f"a score of {goal:g}" in row["interpretation"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not understood; ask for a machine of one of these trials: car (drive"),
        ("a poem", "is not understood"),
        ("over the wall", "means trial 'wall', which is not among --trials"),
        ("a car of 5 blocks", "5 blocks are too few; allow at least 6"),
        ("a car that gets at least 90 m away", "90 is too much for trial 'car'; ask for at most 40"),
    ],
)
def test_what_is_not_understood_is_an_error_with_a_way_out(text, message):
    with pytest.raises(ValueError) as error:
        get_task("machine").row_of(text)
    assert message in str(error.value)


@given(st.one_of(st.text(), st.text().map(lambda text: f"car {text}")))
def test_any_text_is_a_row_or_an_error(text):
    try:
        assert TASK.row_of(text)["trial"] in TRIALS
    except ValueError as error:
        assert str(error)
