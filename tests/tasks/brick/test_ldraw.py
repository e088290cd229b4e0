"""LDraw files against hand-written ones, and against the boxes that their lines place."""

import doctest
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_grpo_tasks.tasks.brick import ldraw
from trl_grpo_tasks.tasks.brick.kit import KIT
from trl_grpo_tasks.tasks.brick.ldraw import PALETTE, palette_indices, to_ldr
from trl_grpo_tasks.tasks.brick.structure import SIZES, Brick, Structure, parse


def test_ldr_by_hand():
    structure = parse("2x4 (0,0,0)\n4x2 (3,5,2)\n1x1 (19,0,0)\n2x2 (1,0,1)").structure
    text = to_ldr(structure, "My  chair\n#1")
    codes = [PALETTE[i].code for i in palette_indices(structure.bricks)]
    assert text.split("\n") == [
        "0 My chair #1",
        "0 Name: My_chair_1.ldr",
        "0 Author: trl_grpo_tasks",
        f"1 {codes[0]} 20 -24 40 0 0 1 0 1 0 -1 0 0 3001.dat",
        f"1 {codes[2]} 390 -24 10 1 0 0 0 1 0 0 0 1 3005.dat",
        "0 STEP",
        f"1 {codes[3]} 40 -48 20 1 0 0 0 1 0 0 0 1 3003.dat",
        "0 STEP",
        f"1 {codes[1]} 100 -72 120 1 0 0 0 1 0 0 0 1 3001.dat",
        "0 STEP",
        "",
    ]
    assert doctest.testmod(ldraw) == (0, 1)


@pytest.mark.parametrize("size", SIZES)
def test_a_part_in_the_file_fills_the_brick(size):
    """The part's box, as LDraw defines it, through the file's matrix, as LDraw applies it."""
    brick = Brick(*size, 3, 7, 2)
    fields = to_ldr(Structure((brick,)), "x").split("\n")[3].split()
    short, long = sorted(size)
    assert fields[14] == KIT.part_of[short, long].ldraw + ".dat"
    x, y, z, a, b, c, d, e, f, g, h, i = map(int, fields[2:14])
    box = [(u, v, w) for u in (-10 * long, 10 * long) for v in (0, 24) for w in (-10 * short, 10 * short)]
    placed = np.array(
        [(a * u + b * v + c * w + x, d * u + e * v + f * w + y, g * u + h * v + i * w + z) for u, v, w in box]
    )
    assert placed.min(0).tolist() == [20 * brick.x, -24 * (brick.z + 1), 20 * brick.y]
    assert placed.max(0).tolist() == [20 * (brick.x + brick.h), -24 * brick.z, 20 * (brick.y + brick.w)]
    assert np.linalg.det(np.array([[a, b, c], [d, e, f], [g, h, i]])) == pytest.approx(1)


def bricks_in(text, parts=KIT.parts):
    """The bricks that the parts of a file fill, by their boxes and matrices as LDraw applies them; lowest on the
    ground and in the corner of the world."""
    long_and_short = {f"{part.ldraw or f'brick_{part.short}x{part.long}'}.dat": (part.long, part.short)
                      for part in parts}  # fmt: skip
    boxes = []
    for line in text.splitlines():
        if line.startswith("1 "):
            *numbers, name = line.split()[2:]
            place, matrix = np.array(numbers[:3], float), np.array(numbers[3:], float).reshape(3, 3)
            long, short = long_and_short[name]
            box = itertools.product((-10 * long, 10 * long), (0, 24), (-10 * short, 10 * short))
            corners = np.array([matrix @ np.array(corner) + place for corner in box])
            boxes.append((corners.min(0), corners.max(0)))
    low = np.min([least for least, _ in boxes], 0)
    bottom = np.max([most[1] for _, most in boxes])
    bricks = []
    for least, most in boxes:
        h, w = (most - least)[[0, 2]] / 20
        x, y = (least - low)[[0, 2]] / 20
        bricks.append(tuple(map(round, (h, w, x, y, (bottom - most[1]) / 24))))
    return sorted(bricks)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(SIZES), *[st.integers(0, 18)] * 3), min_size=1, max_size=30))
def test_the_parts_of_a_file_fill_the_bricks_of_the_structure(drawn):
    structure = Structure(tuple(Brick(*size, *place) for size, *place in drawn), 26)
    x, y, z = (min(brick[axis] for brick in structure.bricks) for axis in (2, 3, 4))
    expected = sorted((b.h, b.w, b.x - x, b.y - y, b.z - z) for b in structure.bricks)
    assert bricks_in(to_ldr(structure, "any")) == expected
