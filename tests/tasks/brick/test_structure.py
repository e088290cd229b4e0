"""Brick text in both formats; contacts and collisions compared with a dictionary of cells."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.brick_structures import cells
from trl_grpo_tasks.tasks.brick.structure import GROUND, READ_LIMIT, SIZES, Brick, Structure, parse

sizes = st.sampled_from(SIZES)
anywhere = st.builds(lambda size, *place: Brick(*size, *place), sizes, *[st.integers(-99, 99)] * 3)
in_a_small_world = st.builds(lambda size, *at: Brick(*size, *at), sizes, *[st.integers(-1, 6)] * 2, st.integers(-1, 4))


# -- text


@given(st.lists(anywhere, max_size=12), st.integers(1, 9))
def test_absolute_text_round_trips(bricks, world):
    structure = Structure(tuple(bricks), world)
    reading = parse(structure.text, world)
    assert (reading.structure, reading.problems, reading.lines) == (structure, [], len(bricks))


@given(st.lists(anywhere, max_size=12), st.integers(0, 12))
def test_pivot_text_round_trips_within_its_offsets(bricks, max_offset):
    structure = Structure(tuple(bricks))
    text = structure.pivot_text(max_offset)
    reading = parse(text, max_offset=max_offset)
    assert (reading.structure, reading.problems) == (structure, [])
    for count, line in enumerate(text.splitlines()):
        pivot, offsets = line.split("@")[1].split(" ")
        assert 0 <= int(pivot) <= count
        reach = [max(abs(a - b) for a, b in zip(bricks[count][2:], bricks[i][2:], strict=True)) for i in range(count)]
        if int(pivot):
            used = max(abs(int(number)) for number in offsets.strip("()").split(","))
            assert used == min(reach) <= max_offset
            assert max(i for i in range(count) if reach[i] == used) == int(pivot) - 1
        else:
            assert min(reach, default=99) > max_offset


def test_forms_may_be_mixed():
    reading = parse("2x4 (3,0,0)\n  1x1 @1 (0,-2,1) \r\n\n2x2 @2 (5,5,5)\n2x2 @0 (19,0,0)")
    assert reading.problems == []
    assert reading.structure.bricks[1:] == (Brick(1, 1, 3, -2, 1), Brick(2, 2, 8, 3, 6), Brick(2, 2, 19, 0, 0))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("3x3 (0,0,0)", "there is no 3x3 brick; sizes are 1x1, 1x2"),
        ("2x4 (0,0)", "not of the form"),
        ("２x4 (0,0,0)", "not of the form"),  # a non-ASCII digit
        ("2x4 (0,0,1000)", "not of the form"),
        ("2x4 @2 (0,0,0)", "pivot 2 does not exist yet; there are 1 bricks before this line"),
        ("2x4 @1 (0,6,0)", "the offset from a brick must be at most 5 along each axis"),
    ],
)
def test_a_bad_line_is_a_problem_and_the_others_are_read(line, problem):
    reading = parse(f"1x1 (0,0,0)\n{line}\n1x1 (1,0,0)\n")
    assert [str(brick) for brick in reading.structure.bricks] == ["1x1 (0,0,0)", "1x1 (1,0,0)"]
    assert len(reading.problems) == 1 and problem in reading.problems[0] and reading.problems[0].startswith("line 2, ")
    assert reading.lines == 3


@settings(max_examples=100)
@given(st.one_of(st.text(), st.text(alphabet="0124689x @(),-\n\r\x0b\x85\u2028"), st.lists(anywhere).map(str)))
def test_any_text_is_read(text):
    reading = parse(text)
    assert len(reading.structure) + len(reading.problems) >= reading.lines
    assert reading.structure.problems() is not None
    assert parse(reading.structure.text).structure == reading.structure


def test_long_text_is_truncated_with_a_message():
    reading = parse("1x1 (0,0,0)\n" * (READ_LIMIT + 5))
    assert reading.lines == READ_LIMIT == len(reading.structure)
    assert reading.problems == [f"only the first {READ_LIMIT} lines are read"]
    assert parse("1x1 (0,0,0)\n" * READ_LIMIT).problems == []


def test_published_order():
    lines = ["2x2 (4,2,0)\n", "2x2 (4,0,0)\n", "2x2 (0,4,0)\n", "2x2 (0,0,1)\n"]
    assert parse("".join(lines[::-1])).structure.canonical().text == "".join(lines)


# -- contacts and collisions


class Oracle:
    """The same facts computed from a dictionary of cells, brick by brick."""

    def __init__(self, bricks, world):
        self.owner, self.collisions, self.outside, standing = {}, [], [], []
        for index, brick in enumerate(bricks):
            if any(not 0 <= place < world for cell in cells(brick) for place in cell):
                self.outside.append(index)
            elif taken := [self.owner[cell] for cell in cells(brick) if cell in self.owner]:
                self.collisions.append((min(taken), index))
            else:
                self.owner.update(dict.fromkeys(cells(brick), index))
                standing.append(index)
        self.links = {(GROUND, i) for i in standing if bricks[i].z == 0}
        for a in standing:
            above = {(x, y, z + 1) for x, y, z in cells(bricks[a])}
            self.links |= {(a, b) for b in standing if above & cells(bricks[b])}
        reached, before = {GROUND}, set()
        while reached != before:
            before = set(reached)
            reached |= {i for link in self.links if reached & set(link) for i in link}
        self.floating = [i for i in range(len(bricks)) if i not in reached]


@settings(max_examples=100)
@given(st.lists(in_a_small_world, max_size=14), st.integers(4, 8))
def test_facts_match_a_dictionary_of_cells(bricks, world):
    structure, oracle = Structure(tuple(bricks), world), Oracle(bricks, world)
    assert structure.outside == oracle.outside
    assert structure.collisions == oracle.collisions
    assert structure.owner.shape == (world,) * 3
    assert {cell: i for cell, i in np.ndenumerate(structure.owner) if i >= 0} == oracle.owner
    assert int(structure.occupied.sum()) == len(oracle.owner)
    assert len(structure.links) == len(set(structure.links)) and set(structure.links) == oracle.links
    assert structure.floating == oracle.floating
    assert len(structure.problems()) == (not bricks) + len(oracle.outside) + len(oracle.collisions)


def test_problem_messages():
    structure = Structure((Brick(2, 2, 0, 0, 0), Brick(2, 2, 1, 1, 0), Brick(1, 1, 20, 0, 0)))
    assert structure.problems(max_bricks=2) == [
        "there are 3 bricks; at most 2 are allowed",
        "brick 3, 1x1 (20,0,0), is outside the world of 20",
        "brick 2, 2x2 (1,1,0), collides with brick 1",
    ]
    assert Structure(()).problems() == ["there is no brick"]


def test_structures_compare_and_pickle_after_properties_were_computed():
    structure = Structure((Brick(2, 2, 0, 0, 0), Brick(2, 2, 1, 1, 1)))
    fresh = Structure(structure.bricks)
    assert structure.floating == [] and structure.links == [(GROUND, 0), (0, 1)]
    assert structure == fresh and hash(structure) == hash(fresh)
    assert pickle.loads(pickle.dumps(structure)) == structure
