"""Besiege's saved machines: round trips, positions recomputed by SciPy, files from elsewhere, and hostile files."""

import random
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.transform import Rotation

from tests.tasks.machine.test_tree import car, catapult, random_machine
from trl_grpo_tasks.tasks.machine import ConstructionTree
from trl_grpo_tasks.tasks.machine.blocks import BLOCKS
from trl_grpo_tasks.tasks.machine.bsg import LARGEST_FILE, from_bsg, to_bsg
from trl_grpo_tasks.tasks.machine.show import main as show
from trl_grpo_tasks.tasks.machine.tree import ROOT, Block

WHEEL_ON_THE_RIGHT = (ROOT, Block("2", 0, 3))


def numbers(element, names):
    return [float(element.get(name)) for name in names]


def saved(*blocks, turn=None, shift=(0, 0, 0)):
    """A file with blocks (id, position, quaternion), as the game writes it, after a rigid motion of the machine."""
    turn = turn or Rotation.identity()
    lines = []
    for kind, at, quaternion in blocks:
        (px, py, pz), (x, y, z, w) = turn.apply(at) + shift, (turn * Rotation.from_quat(quaternion)).as_quat()
        lines.append(
            f'<Block id="{kind}" guid="x"><Transform><Position x="{px}" y="{py}" z="{pz}" />'
            f'<Rotation x="{x}" y="{y}" z="{z}" w="{w}" /><Scale x="1" y="1" z="1" /></Transform><Data /></Block>'
        )
    return f'<?xml version="1.0" encoding="utf-8"?><Machine version="1"><Blocks>{"".join(lines)}</Blocks></Machine>'


START = ("0", (0, 0, 0), (0, 0, 0, 1))
RIGHT = (0, 0.5**0.5, 0, 0.5**0.5)  # a quarter turn about the vertical takes forward to the right
WHEEL = ("2", (0.5, 0, 0), RIGHT)


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.integers(2, 16))
def test_any_machine_comes_back_as_it_was(seed, size):
    tree = random_machine(random.Random(seed), size)
    if tree.validate():
        return  # only the start block: nothing else fitted
    text = to_bsg(tree)
    assert from_bsg(text) == tree and to_bsg(from_bsg(text)) == text


@pytest.mark.parametrize("tree", [car(), catapult()], ids=["car", "catapult"])
def test_a_file_alone_gives_the_same_places(tree):
    """SciPy's rotations applied to the file give the centres of the blocks and both ends of the braces."""
    blocks = ElementTree.fromstring(to_bsg(tree)).findall("./Blocks/Block")
    assert len({block.get("guid") for block in blocks}) == len(blocks) == len(tree.blocks)
    for element, block, placement in zip(blocks, tree.blocks, tree.placements, strict=True):
        assert element.get("id") == block.kind
        at = np.array(numbers(element.find("./Transform/Position"), "xyz"))
        turn = Rotation.from_quat(numbers(element.find("./Transform/Rotation"), "xyzw"))
        if placement is None:
            vectors = element.findall("./Data/Vector3")
            ends = [at + turn.apply([float(part.text) for part in vector]) for vector in vectors]
            np.testing.assert_allclose(ends, [tree.end(block), tree.end(block, second=True)], atol=1e-6)
        else:
            middle = 0 if block.kind == "0" else BLOCKS[block.kind].size[2] / 2
            np.testing.assert_allclose(at + turn.apply([0, 0, middle]), placement.centre, atol=1e-6)


def test_wheels_and_motors_run_without_keys():
    left = ElementTree.fromstring(to_bsg(ConstructionTree((ROOT, Block("2", 0, 2), Block("2", 0, 3)))))
    flags = [{one.get("key"): one.text for one in block.findall("./Data/Boolean")} for block in left.iter("Block")]
    assert flags[1] == {"bmt-automatic": "True", "bmt-auto-brake": "False", "flipped": "True"}
    assert flags[2] == {"bmt-automatic": "True", "bmt-auto-brake": "False"}


def test_files_from_elsewhere():
    """A machine may stand anywhere, its blocks may have any order, and wheels may be turned about their axle."""
    assert from_bsg(saved(START, WHEEL)).blocks == WHEEL_ON_THE_RIGHT
    turned = Rotation.from_euler("zyx", [20, 70, -30], degrees=True)
    assert from_bsg(saved(START, WHEEL, turn=turned, shift=(3, 5, -7))).blocks == WHEEL_ON_THE_RIGHT
    assert from_bsg("\ufeff" + saved(WHEEL, START)).blocks == WHEEL_ON_THE_RIGHT
    rolled = (Rotation.from_quat(RIGHT) * Rotation.from_euler("z", 90, degrees=True)).as_quat()
    assert from_bsg(saved(START, ("2", (0.5, 0, 0), rolled))).blocks == WHEEL_ON_THE_RIGHT
    with pytest.raises(ValueError, match=r"block 1 of the file \(hinge\) does not sit on a face"):
        from_bsg(saved(START, ("5", (0.5, 0, 0), rolled)))


def test_of_two_faces_at_one_place_a_connection_keeps_its_own():
    """Two bars lie side by side, so that a spring between them could belong to either."""
    tree = ConstructionTree((ROOT, Block("1", 0, 0), Block("15", 0, 3), Block("1", 2, 1)))
    assert tree.validate() == []
    at = [(i, f) for i in range(len(tree.blocks)) for f in range(len(tree.blocks[i].type.faces))]
    place = {one: tuple(tree.placements[one[0]].face(tree.blocks[one[0]].kind, one[1]).round(6)) for one in at}
    shared = [(a, b) for a in at for b in at if a < b and place[a] == place[b]]
    for a, b in shared:
        for end in (a, b):
            sprung = ConstructionTree((*tree.blocks, Block("9", 0, 5, *end)))
            assert sprung.validate() == [] and from_bsg(to_bsg(sprung)) == sprung
    assert shared


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not XML"),
        ("<Machine>", "not XML"),
        ("\ud800", "not XML"),
        ("<Machine/>", "0 blocks in Machine/Blocks; 2 to 200"),
        (saved(START, START), "2 start blocks"),
        (saved(START, *[WHEEL] * 300), "301 blocks"),
        (saved(START, ("59", (0.5, 0, 0), RIGHT)), "the id '59', which is not a block of this task; ids are: 0, 15"),
        (saved(START, ("2", (9, 0, 0), RIGHT)), r"block 1 of the file \(powered wheel\) does not sit on a face"),
        (saved(START, ("2", (0.5, 0, 0), (0, 0, 0, 1))), "does not sit on a face"),
        (saved(START, WHEEL, ("2", (0.5, 0, 0), RIGHT)), "overlap"),
        (saved(START, WHEEL).replace('w="0.7', 'w="9.7'), "not a unit quaternion"),
        (saved(START, WHEEL).replace('x="0.5"', 'x="nan"'), "needs finite numbers x, y, z"),
        (saved(START, WHEEL).replace('<Scale x="1"', '<Scale x="2"'), "is scaled"),
        (saved(START, ("9", (0.5, 0, 0), RIGHT)), "needs finite numbers X, Y, Z"),
        ('<!DOCTYPE a [<!ENTITY b "c">]><Machine>&b;</Machine>', "defines a document type or entities"),
        ("<a>" * 100_000, "not XML"),
        ("<a>" * 100_000 + "</a>" * 100_000, "0 blocks"),
        (" " * (LARGEST_FILE + 1), "at most 2000000 are accepted"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(text, message):
    with pytest.raises(ValueError, match=message):
        from_bsg(text)


@settings(max_examples=80)
@given(st.data())
def test_damaged_files_are_a_machine_or_an_error(data):
    text = to_bsg(catapult())
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 60)))
    junk = data.draw(st.one_of(st.text(max_size=8), st.sampled_from(["1e999", "-1", '"', "<", "0.5", "36", "30"])))
    try:
        assert from_bsg(text[:start] + junk + text[end:]).validate() == []
    except ValueError as error:
        assert str(error)


def test_show_reads_and_writes_them(tmp_path, capsys):
    first, second, tree = tmp_path / "car.bsg", tmp_path / "again.bsg", tmp_path / "car.json"
    first.write_text(to_bsg(car()))
    assert show([str(first), "--bsg", str(second), "--json", str(tree)]) == 0
    assert "score (paper): 44" in capsys.readouterr().out
    assert second.read_text() == first.read_text() and tree.read_text() == car().to_json() + "\n"
    first.write_text(re.sub('id="63"', 'id="8"', first.read_text()))
    assert show([str(first)]) == 1 and "has the id '8'" in capsys.readouterr().out


def test_a_machine_that_cannot_be_built_has_no_file():
    with pytest.raises(ValueError, match=r"cannot be built has no \.bsg file: blocks 1"):
        to_bsg(ConstructionTree((ROOT, Block("2", 0, 2), Block("2", 0, 2))))
