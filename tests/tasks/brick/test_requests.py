"""Captions of the user: those of the levels, parts of them, and errors for other texts."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_grpo_tasks.tasks.brick import BrickOptions, BrickTask
from trl_grpo_tasks.tasks.brick.data.captions import SUPPORTS, caption, choices, requests_like
from trl_grpo_tasks.tasks.brick.data.catalogue import CATEGORIES

SMALL = ["stack", "small", "carry"]


def understood(text):
    return BrickTask(BrickOptions(brick_levels=SMALL)).row_of(text)["interpretation"]


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("a small table", "a small low table, world 8"),
        ("Table", "a small low table, world 8"),
        ("a table, 3 wide", "a table, 4 long, 3 wide, 2 high, world 8"),
        ("a table, 4 wide, 6 long", "a table, 6 long, 4 wide, 2 high, world 8"),
        ("a table, 6 long, legs 2 thick", "a table, 6 long, 4 wide, 2 high, legs 2 thick, world 8"),
        ("a lamp, with 250 g on the top", "a small street lamp, with 250 g on the top, world 8"),
        ("a table, 5 long, 3 wide, world 10", "a table, 5 long, 3 wide, 2 high, world 10"),
    ],
)
def test_a_part_of_a_caption_means_the_shortest_caption_that_has_it(text, meant):
    assert understood(text) == meant


def test_the_prompt_is_what_was_understood_and_the_row_has_a_target():
    task = BrickTask(BrickOptions(brick_levels=SMALL))
    row = task.row_of("a large sofa")
    assert row["prompt"] == [{"role": "user", "content": "a large low sofa, world 8"}]
    assert task.score(row, row["gold"]).success
    assert {name: value for name, value in row.items() if name != "interpretation"} == task.row_of(
        "a large low sofa, world 8"
    )
    larger = task.row_of("a large sofa, world 11")
    assert larger["world"] == 11 and task.score(larger, larger["gold"]).success


def test_other_texts_are_an_error_that_says_what_can_be_asked():
    for text in ("a red dragon", "", "12", "the", "ta ble", "a red table", "a table, 99 long", ","):
        with pytest.raises(ValueError, match=r"no caption has .* such as 'a stack, 1 long.*; categories are: arch, "):
            understood(text)
    with pytest.raises(ValueError, match="a world of 7 is too small for the levels of this task: stack needs 8"):
        understood("a table, world 7")


@settings(max_examples=40)
@given(st.sampled_from(SMALL), st.data())
def test_captions_of_the_levels_are_understood_as_themselves(level, data):
    request, detail = data.draw(st.sampled_from(choices(level)))
    has_support = detail == 3 and CATEGORIES[request.category].support
    support = data.draw(st.sampled_from(SUPPORTS)) if has_support else None
    assert requests_like(caption(level, request, detail, support), [level])[0] == (level, request, detail)


WORDS = re.findall(r"\S+", "table lamp 3 x 9 kg g long tall reach 0 . , wide leaning street 1e9 with world small")


@settings(max_examples=60)
@given(st.text(max_size=60) | st.lists(st.sampled_from(WORDS), max_size=9).map(" ".join))
def test_any_text_gives_requests_or_a_clear_error(text):
    try:
        assert requests_like(text, SMALL)
    except ValueError as error:
        assert str(error).startswith("no caption has")
