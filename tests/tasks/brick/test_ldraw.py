"""LDraw files: ours against hand-written ones, others against the boxes that their lines place."""

import doctest
import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.brick_structures import random_structure
from tests.tasks.brick.test_stability import PUBLIC
from trl_grpo_tasks.commands import main as cli
from trl_grpo_tasks.tasks.brick import ldraw
from trl_grpo_tasks.tasks.brick.kit import KIT
from trl_grpo_tasks.tasks.brick.ldraw import PALETTE, from_ldr, palette_indices, to_ldr
from trl_grpo_tasks.tasks.brick.structure import SIZES, Brick, Structure, parse

IDENTITY = "1 0 0 0 1 0 0 0 1"
# (cos, sin) of the quarter turns about the vertical axis, and with -1 their mirror images
TURNS = [(c, s, m) for c, s in ((1, 0), (0, 1), (-1, 0), (0, -1)) for m in (1, -1)]


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


def turn_text(c, s, m, noise=0.0):
    return f"{c + noise} 0 {s * m} 0 1 0 {-s} {noise} {c * m}"


def line_of(brick, turn, place=(0, 0, 0), noise=0.0):
    """A line that places a brick, as another program might: with any turn that fits, and at any position."""
    h, w, x, y, z = brick
    x, up, y = 20 * x + 10 * h + place[0], -24 * z + place[1], 20 * y + 10 * w + place[2]
    return f"1 16 {x + noise:.5f} {up} {y} {turn_text(*turn, noise)} {KIT.part_of[h, w].ldraw}.DAT"


def boxes(text, turn=(1, 0, 1)):
    """The boxes of the parts in a file without submodels, in units, through their matrices and a further turn."""
    long_and_short = {f"{part.ldraw}.dat": (part.long, part.short) for part in KIT.parts}
    outer = np.array([float(word) for word in turn_text(*turn).split()]).reshape(3, 3)
    found = []
    for line in text.splitlines():
        if line.startswith("1 "):
            *numbers, name = line.split()[2:]
            place, matrix = np.array(numbers[:3], float), np.array(numbers[3:], float).reshape(3, 3)
            long, short = long_and_short[name.lower()]
            box = itertools.product((-10 * long, 10 * long), (0, 24), (-10 * short, 10 * short))
            corners = np.array([outer @ (matrix @ np.array(corner) + place) for corner in box])
            found.append((corners.min(0), corners.max(0)))
    return found


def expected_bricks(text, turn=(1, 0, 1)):
    """The bricks that fill these boxes, in the corner of the world."""
    found = boxes(text, turn)
    low = np.min([box[0] for box in found], 0)
    bottom = np.max([box[1][1] for box in found])
    bricks = []
    for least, most in found:
        h, w = (most - least)[[0, 2]] / 20
        x, y = (least - low)[[0, 2]] / 20
        bricks.append(tuple(map(round, (h, w, x, y, (bottom - most[1]) / 24))))
    return sorted(bricks)


def in_the_corner(bricks):
    """The bricks, moved to the corner of the world."""
    low_x, low_y = (min(brick[axis] for brick in bricks) for axis in (2, 3))
    return sorted(brick._replace(x=brick.x - low_x, y=brick.y - low_y) for brick in bricks)


@st.composite
def foreign_files(draw):
    """A file without submodels: any structure, each part in any turn that fits, anywhere, on any grid."""
    structure = random_structure(draw(st.integers(1, 12)), draw(st.integers(0, 10**6)))
    place = (*(draw(st.integers(-300, 300)) for _ in range(2)), round(draw(st.floats(-500, 500)), 2))
    lines = ["0 Untitled", "0 Name: x.ldr", "0 !LEOCAD MODEL AUTHOR somebody", "5 24 0 0 0 1 1 1 2 2 2 3 3 3", ""]
    for brick in structure.bricks:
        fitting = [t for t in TURNS if brick.h == brick.w or (abs(t[0]) == 1) == (brick.h > brick.w)]
        noise = 1e-5 * draw(st.integers(-1, 1))
        lines += [line_of(brick, draw(st.sampled_from(fitting)), place, noise), "0 STEP"]
    return lines


@settings(max_examples=50)
@given(foreign_files(), st.sampled_from(["\n", "\r\n", "\r"]), st.sampled_from(TURNS))
def test_files_of_other_programs_are_read_wherever_they_place_their_bricks(lines, end, turn):
    plain = from_ldr(end.join(lines))
    assert in_the_corner(plain.bricks) == expected_bricks("\n".join(lines))
    assert not plain.outside and min(brick.z for brick in plain.bricks) == 0
    # The same model as a submodel, turned and in another place: its boxes are turned with it.
    nested = ["0 FILE main.ldr", "0 A model", f"1 4 3 -7 0 {turn_text(*turn)} Sub Model.ldr", "0 NOFILE",
              "0 FILE sub model.ldr", *lines, "0 NOFILE", "1 4 0 0 0 0 0 0 0 0 0 0 0 0 ignored.dat"]  # fmt: skip
    assert in_the_corner(from_ldr(end.join(nested)).bricks) == expected_bricks("\n".join(lines), turn)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from(SIZES), *[st.integers(0, 18)] * 3), min_size=1, max_size=30))
def test_our_files_fill_the_bricks_and_are_read_back_in_place_and_on_the_ground(drawn):
    text = to_ldr(Structure(tuple(Brick(*size, *place) for size, *place in drawn), 26), "round trip")
    lowest = min(z for *_, z in drawn)
    grounded = sorted(Brick(*size, x, y, z - lowest) for size, x, y, z in drawn)
    assert expected_bricks(text) == in_the_corner(grounded)
    again = from_ldr(text, 26)
    assert sorted(again.bricks) == grounded and again.world == 26


def test_a_large_model_gets_a_larger_world():
    lines = [line_of(Brick(8, 1, 8 * n, 0, 0), (1, 0, 1)) for n in range(8)]
    assert from_ldr("\n".join(lines)).world == 64
    with pytest.raises(ValueError, match="it is 160 cells long; at most 100 are read"):
        from_ldr("\n".join(line_of(Brick(8, 1, 8 * n, 0, 0), (1, 0, 1)) for n in range(20)))


PART = f"1 4 0 0 0 {IDENTITY} 3001.dat"


@pytest.mark.parametrize(("text", "message"), [
    ("", "it places no bricks"),
    ("Once upon a time", "line 1, 'Once upon a time': LDraw lines begin with a number from 0 to 5"),
    (f"{PART}\n1 4 0 0 0 {IDENTITY} 3710.dat\n1 4 0 0 0 {IDENTITY} 3710.DAT\n1 4 0 0 0 {IDENTITY} s\\a b.dat",
     r"2 kinds of parts that are not read: 3710.dat \(2x\), s\\a b.dat \(1x\); known parts are: 3005.dat 1x1, "),
    ("1 4 0 0 0 0 -1 0 1 0 0 0 0 1 3004.dat", "line 1, '1 4 0 0.*this part is tilted, upside down or scaled"),
    ("1 4 0 0 0 2 0 0 0 1 0 0 0 1 3004.dat", "tilted, upside down or scaled"),
    ("1 4 0 0 0 0.7 0 0.7 0 1 0 -0.7 0 0.7 3004.dat", "tilted, upside down or scaled"),
    (f"{PART}\n1 4 100 0 5 {IDENTITY} 3001.dat", "a 4x2 brick is off the grid of 20 x 24 x 20 units"),
    (f"{PART}\n1 4 0 -8 0 {IDENTITY} 3001.dat", "off the grid"),
    ("1 4 junk", "line 1, '1 4 junk': needs a colour, 12 numbers of at most 1,000,000 and a part"),
    (f"1 4 x 0 0 {IDENTITY} 3001.dat", "12 numbers"),
    (f"0 FILE a.ldr\n1 4 0 0 0 {IDENTITY} b.ldr\n0 FILE b.ldr\n1 4 0 0 0 {IDENTITY} a.ldr", "'a.ldr' contains itself"),
    ("\n".join(f"0 FILE {n}\n" + f"1 4 0 0 0 {IDENTITY} {n + 1}\n" * 2 for n in range(40)) + "0 FILE 40\n" + PART,
     "it places more than 2000 parts"),
])  # fmt: skip
def test_files_that_cannot_be_read_say_why(text, message):
    with pytest.raises(ValueError, match=message):
        from_ldr(text)


words = st.one_of(st.sampled_from(["0", "1", "FILE", "NOFILE", "a.ldr", "3001.dat", "3004", "-1", "20", "1e308"]),
                  st.text(max_size=4), st.floats().map(str))  # fmt: skip
shuffled = st.lists(st.lists(words, max_size=16).map(" ".join), max_size=6).map("\n".join)
bent = st.lists(st.builds(lambda numbers, name: f"1 4 {' '.join(map(str, numbers))} {name}",
                          st.lists(st.sampled_from([0, 1, -1, 20, 24, 0.5, 1e9]), min_size=11, max_size=13),
                          st.sampled_from(["3001.dat", "a.ldr", "", "x"])), max_size=6)  # fmt: skip


@settings(max_examples=100)
@given(st.one_of(st.text(), shuffled, bent.map(lambda lines: "\n".join(["0 FILE a.ldr", *lines]))))
def test_any_text_is_a_structure_or_a_value_error(text):
    try:
        structure = from_ldr(text)
    except ValueError as error:
        assert str(error)
    else:
        assert len(structure) and not structure.outside


# ---- the command


def test_a_file_is_scored_in_one_command(tmp_path, capsys):
    """A 1x8 held at its end by a 1x1 needs 9.8% of the strength of its stud, derived in brick_structures.py."""
    pole, bar = Brick(1, 1, 0, 0, 0), Brick(1, 8, 0, 0, 1)
    lines = [line_of(pole, (1, 0, 1), (-50, 3, 7)), line_of(bar, (0, 1, 1), (-50, 3, 7))]
    (tmp_path / "crane.MPD").write_bytes("\r\n".join(["\ufeff0 crane", *lines]).encode())
    (tmp_path / "clash.ldr").write_text("\n".join([*lines, lines[0]]))
    (tmp_path / "air.ldr").write_text("\n".join([lines[0], line_of(bar._replace(z=3), (0, 1, 1), (-50, 3, 7))]))
    files = [str(tmp_path / name) for name in ("crane.MPD", "clash.ldr", "air.ldr")]
    assert cli.main(["tool", "brick", "metrics", *files]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[:3] == [
        f"{files[0]}: 2 bricks: stable, at 10% of the load its studs can bear",
        f"{files[1]}: not a structure: brick 3, 1x1 (0,0,0), collides with brick 1",
        f"{files[2]}: 2 bricks: unstable; brick 2, 1x8 (0,0,3), floats: no stud connects it to the ground",
    ]
    assert [line.split()[-1] for line in out[3:6]] == ["3", "66.7%", "33.3%"]
    (tmp_path / "plate.ldr").write_text(f"1 4 0 0 0 {IDENTITY} 3024.dat")
    assert cli.main(["tool", "brick", "metrics", str(tmp_path / "plate.ldr")]) == 2
    assert "plate.ldr cannot be read: it has 1 kinds of parts that are not read: 3024.dat" in capsys.readouterr().err


@pytest.mark.skipif(not PUBLIC.is_file(), reason="public structures are not part of the repository")
def test_files_of_brickgpt_give_the_published_structures():
    """Written as BrickGPT writes them: the top of the ground layer is at height 0, turns are 90 and 180 degrees."""
    for case in json.loads(PUBLIC.read_text())["cases"]:
        if case["source"] == "BrickGPT":
            bricks = parse(case["bricks"]).structure.bricks
            lines = [line_of(brick, (-1, 0, 1) if brick.h > brick.w else (0, 1, 1)) for brick in bricks]
            assert from_ldr("\n0 STEP\n".join(lines)).bricks == bricks
