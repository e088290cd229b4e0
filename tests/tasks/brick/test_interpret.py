"""Captions in the user's own words: what they are understood as, and what is not understood."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_grpo_tasks.tasks.brick import BrickOptions, BrickTask
from trl_grpo_tasks.tasks.brick.data.captions import caption, choices
from trl_grpo_tasks.tasks.brick.data.catalogue import CATEGORIES
from trl_grpo_tasks.tasks.brick.data.interpret import SYNONYMS, nearest_requests, unused_words

SMALL = ["stack", "small", "carry"]


def understood(text, levels=SMALL, **options):
    return BrickTask(BrickOptions(brick_levels=list(levels), **options)).row_of(text)["interpretation"]


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("a small table", "a small low table, world 8"),
        ("TABLE!", "a medium low table, world 8"),
        ("a tabel", "a medium low table, world 8"),
        ("a big red couch", "a large low sofa, world 8 (not used: red)"),
        ("two chairs", "a chair, world 8"),
        ("a table, 3 x 4", "a table, 4 long, 4 wide, 2 high, world 8"),
        ("a table, width 3 and 6 cells long", "a table, 6 long, 3 wide, 2 high, world 8"),
        ("a table, 6 long, legs 2 thick", "a table, 6 long, 4 wide, 2 high, legs 2 thick, world 8"),
        ("a staircase with five steps", "a stairs, 2 wide, 5 steps, world 8"),
        ("tall tower 2 wide", "a tower, 2 wide, 6 high, world 8"),
        ("a chair with a seat 3 high", "a chair, 4 wide, seat 3 high, 5 high, world 8"),
        ("a lamp", "a medium street lamp, with 100 g on the top, world 8"),
        ("a street lamp that holds 250 grams", "a small street lamp, with 250 g on the top, world 8"),
        ("a balcony, reach 4, with 0.4 kg on the tip", "a balcony, reach 4, 2 wide, 2 high, with 400 g on the tip, "),
        ("a pile leaning right, 4 long", "a stack, 4 long, 1 wide, 3 high, leaning right, shift 1"),
        ("a table 5 long, 3 wide, world 10", "a table, 5 long, 3 wide, 2 high, world 10"),
        ("a table in front of a sofa", "a medium low table, world 8 (not used: front, sofa)"),
    ],
)
def test_what_captions_are_understood_as(text, meant):
    assert understood(text).startswith(meant)


def test_a_whole_name_is_better_than_its_last_word():
    assert "a medium lamp, world 12" in understood("a lamp", ["carry", "room"])
    assert "street lamp" in understood("a street lamp", ["carry", "room"])
    assert "pedestal table" in understood("a pedestal table", ["small", "carry"])


def test_the_prompt_is_what_was_understood_and_the_row_has_a_target():
    task = BrickTask(BrickOptions(brick_levels=SMALL))
    row = task.row_of("a big red couch")
    assert row["prompt"] == [{"role": "user", "content": "a large low sofa, world 8"}]
    assert task.score(row, row["gold"]).success
    assert {name: value for name, value in row.items() if name != "interpretation"} == task.row_of(
        "a large low sofa, world 8"
    )
    larger = task.row_of("a big red couch, world 11")
    assert larger["world"] == 11 and task.score(larger, larger["gold"]).success


def test_what_cannot_be_understood_is_an_error_with_the_categories():
    for text in ("a red dragon", "", "12", "the", "ta ble"):
        with pytest.raises(ValueError, match=r"no category matches .*; categories are: arch, balcony, bed, bench, "):
            understood(text)
    with pytest.raises(ValueError, match="a world of 7 is too small for the levels of this task: stack needs 8"):
        understood("a table, world 7")
    with pytest.raises(ValueError, match="nothing like 'a table' can be built with these bricks and this gravity"):
        understood("a table", ["small"], brick_library='{"bricks": [{"size": "7x7", "mass_g": 1}]}')


def test_every_name_and_synonym_is_understood():
    for name, words in SYNONYMS.items():
        assert name in CATEGORIES
        for word in (name, *words.split()):
            level = "overhang" if CATEGORIES[name].support else "stack" if name == "stack" else "room"
            level = "carry" if name == "shelf" else level
            assert next(nearest_requests(f"the {word}", [level]))[1].category == name, word


@settings(max_examples=60)
@given(st.sampled_from(SMALL), st.data())
def test_captions_of_the_levels_are_understood_as_themselves(level, data):
    """Also with upper case and without punctuation. The thickness of a support is not part of a request."""
    request, detail = data.draw(st.sampled_from(choices(level)))
    support = None if not CATEGORIES[request.category].support else 2
    text = caption(level, request, detail, support)
    _, found, found_detail = next(nearest_requests(text.upper().replace(",", ""), [level]))
    if detail == 1:
        assert caption(level, found, 1, None) == text and found_detail == 1
    else:
        main = CATEGORIES[request.category].main
        assert {n: dict(found.params)[n] for n in main} == {n: dict(request.params)[n] for n in main}
        assert found.grams == request.grams and (detail < 3 or found.params == request.params)
    assert not [word for word in unused_words(text, caption(level, found, 3, 2)) if word not in text.split(",")[0]]


WORDS = re.findall(r"\S+", "table lamp 3 x 999999999999 kg g long tall reach 0 . , wide leaning street 1e9 with world")


@settings(max_examples=300)
@given(st.text(max_size=60) | st.lists(st.sampled_from(WORDS), max_size=9).map(" ".join))
def test_any_text_gives_a_request_or_a_clear_error(text):
    try:
        first = next(nearest_requests(text, SMALL))
    except ValueError as error:
        assert str(error).startswith("no category matches")
    else:
        assert first == next(nearest_requests(text, SMALL))
        assert isinstance(unused_words(text, caption(*first[:2], 1 if first[2] == 1 else 2, None)), list)
