"""Construction trees: reference trees, messages for all problems, both sets of field names, and arbitrary text."""

import itertools
import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.paths import DATA
from trl_grpo_tasks.tasks.machine import ConstructionTree
from trl_grpo_tasks.tasks.machine.blocks import BLOCKS, FACINGS, PROMPT_BLOCKS, rotation
from trl_grpo_tasks.tasks.machine.designs import mirrored
from trl_grpo_tasks.tasks.machine.tree import ROOT, Block

CASES = json.loads((DATA / "machine_trees.json").read_text())["cases"]
START = {"id": "0", "order_id": 0, "parent": -1, "bp_id": -1}
WHEEL = {"id": "2", "order_id": 1, "parent": 0, "bp_id": 2}
KEYS = [*WHEEL, "type", "face_id", "parent_a"]


def car():
    """Ten blocks: two logs, four wheels."""
    spine = [ROOT, Block("63", 0, 0), Block("63", 0, 1), Block("15", 1, 0), Block("15", 2, 0)]
    wheels = [Block("2", 1, 3), Block("2", 1, 6), Block("2", 2, 3), Block("2", 2, 6)]
    return ConstructionTree((*spine, *wheels, Block("15", 0, 4)))


def catapult():
    """A motor on a tower swings an arm with a bowl; eighteen blocks with braces and ballast."""
    base = [ROOT, Block("63", 0, 0), Block("63", 0, 1), Block("63", 0, 2), Block("63", 0, 3)]
    ballast = [Block("35", 1, 0), Block("35", 2, 0), Block("35", 3, 0), Block("35", 4, 0)]
    tower = [Block("63", 0, 4), Block("22", 9, 6), Block("63", 10, 3), Block("35", 9, 0)]
    bowl = [Block("30", 11, 7), Block("36", 13, 0)]
    braces = [Block("7", 9, 1, 3, 8), Block("7", 9, 4, 4, 8), Block("7", 9, 8, 1, 9)]
    return ConstructionTree((*base, *ballast, *tower, *bowl, *braces))


def reordered(tree, rng):
    """Return the same machine with its blocks numbered in another order, parents still first."""
    order, left = [0], list(range(1, len(tree.blocks)))
    while left:
        ready = [i for i in left if tree.blocks[i].parent in order and tree.blocks[i].parent_b in (*order, None)]
        order.append(rng.choice(ready))
        left.remove(order[-1])
    new = {old: place for place, old in enumerate(order)} | {-1: -1, None: None}
    return ConstructionTree(
        tuple(Block(b.kind, new[b.parent], b.face, new[b.parent_b], b.face_b) for b in (tree.blocks[i] for i in order))
    )


def random_machine(rng, size, kinds=tuple(BLOCKS)):
    """Return a machine of random blocks, each kept if the machine stays valid, without using the constraint."""
    blocks = [ROOT]
    for _ in range(20 * size):
        if len(blocks) == size:
            break
        kind = rng.choice(kinds)
        ends = []
        for _ in range(1 + BLOCKS[kind].two_ended):
            parent = rng.randrange(len(blocks))
            ends += [parent, rng.randrange(len(blocks[parent].type.faces) or 1)]
        grown = ConstructionTree((*blocks, Block(kind, *ends)))
        if not grown.validate():
            blocks = list(grown.blocks)
    return ConstructionTree(tuple(blocks))


# ---- geometry


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_reference_trees(case):
    tree = ConstructionTree.parse(json.dumps(case["tree"]))
    assert tree.reading_problems == ()
    for placement, centre in zip(tree.placements, case["centres"], strict=True):
        assert (placement is None) == (centre is None)
        if centre is not None:
            np.testing.assert_allclose(placement.centre, centre, atol=1e-3)
    assert [list(pair) for pair in tree.overlaps()] == case["overlaps"]
    np.testing.assert_allclose(tree.extent(), case["extent"], atol=1e-6)
    problems = tree.validate()
    assert len(problems) == len(case["overlaps"]) and case["oversize"] is False
    assert json.loads(tree.to_json()) == case["tree"]


def test_frames_are_rotations_and_every_face_is_on_its_box():
    for facing in FACINGS:
        frame = rotation(facing)
        assert np.linalg.det(frame) == pytest.approx(1)
        np.testing.assert_array_equal(frame.T @ frame, np.eye(3))
    for block in BLOCKS.values():
        assert block.is_wheel == ("wheel" in block.name)
        half = np.array(block.size) / 2
        for face in block.faces:
            offset = np.array(face.position) - ([0, 0, 0] if block.id == "0" else [0, 0, half[2]])
            assert (np.abs(offset) <= half + 1e-9).all(), (block, face)
    counts = {kind: len(BLOCKS[kind].faces) for kind in BLOCKS}
    assert counts == {
        **{"0": 6, "15": 5, "35": 5, "1": 9, "41": 9, "63": 13, "2": 1, "40": 1, "46": 9, "60": 9, "22": 5, "5": 5},
        **{"19": 5, "44": 5, "28": 1, "13": 5, "76": 1, "27": 1, "16": 5, "30": 1, "36": 0, "9": 0, "7": 0, "45": 0},
    }
    assert len(PROMPT_BLOCKS) == 12 and set(PROMPT_BLOCKS) <= set(BLOCKS)


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(2, 14))
def test_overlaps_against_a_grid_of_points(seed, size):
    """Boxes overlap exactly if some point of a fine grid is inside both."""
    rng = random.Random(seed)
    blocks = [ROOT]
    while len(blocks) < size:
        parent = rng.randrange(len(blocks))
        if faces := len(blocks[parent].type.faces):
            kind = rng.choice([k for k in BLOCKS if k != "0" and not BLOCKS[k].two_ended])
            blocks.append(Block(kind, parent, rng.randrange(faces)))
    tree = ConstructionTree(tuple(blocks))
    steps = np.arange(-0.5 + 0.0125, 0.5, 0.025)
    expected = []
    for i, j in itertools.combinations(range(size), 2):
        a, b = tree.placements[i], tree.placements[j]
        points = [a.centre[k] + 2 * a.half[k] * steps for k in range(3)]
        inside = all((np.abs(points[k] - b.centre[k]) < b.half[k] - 1e-3).any() for k in range(3))
        if inside and not (blocks[j].parent == i and blocks[i].kind == "30"):
            expected.append((i, j))
    assert tree.overlaps() == expected


def test_mirror_images_have_mirrored_places():
    rng = random.Random(3)
    for _ in range(30):
        tree = random_machine(rng, 10)
        image = mirrored(tree)
        assert image.validate() == [] and image.extent() == pytest.approx(tree.extent())
        for one, two in zip(tree.placements, image.placements, strict=True):
            if one is not None:
                np.testing.assert_allclose(one.centre * [-1, 1, 1], two.centre, atol=1e-12)


# ---- reading


def text_of(*entries):
    return json.dumps(list(entries))


def test_text_around_the_list_is_skipped():
    plain = text_of(START, WHEEL)
    wanted = ConstructionTree.parse(plain)
    assert wanted.validate() == [] and wanted.blocks == (ROOT, Block("2", 0, 2))
    for text in (
        f"```json\n{plain}\n```",
        f"I think [of] wheels [1, 2].\n```json\n{plain}\n```\nDone.",
        f"first ```json\n[]\n``` then ```json\n{plain}```",
        f"```json\n{plain}",
        f"```\n{plain}\n```",
        f"Thoughts first: {plain} and after",
        f"faces [0] and [1, 2] are free: {plain}",
        wanted.to_json(),
        json.dumps([START, WHEEL], indent=2),
    ):
        assert ConstructionTree.parse(text).blocks == wanted.blocks, text
    paper = [
        {"type": "0", "id": 0, "parent": -1, "face_id": -1},
        {"type": 2, "id": 1, "parent": 0, "face_id": 2},
        {"type": "9", "id": 2, "parent_a": 0, "face_id_a": 1, "parent_b": 1, "face_id_b": 0},
    ]
    assert ConstructionTree.parse(json.dumps(paper)).blocks == (*wanted.blocks, Block("9", 0, 1, 1, 0))


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([], "empty"),
        ([START], "only the start block"),
        ([{**START, "id": "99"}, WHEEL], "unknown type '99'; types are: 0, 15"),
        ([START, {**WHEEL, "bp_id": 6}], "face 6 of block 0 (start); its faces are: 0 to 5"),
        ([START, {**WHEEL, "parent": 1}], "sits on block 1; its parent must be one of the blocks before it"),
        ([START, {**WHEEL, "order_id": 2}], "'order_id' 2; blocks must be numbered 0, 1, 2"),
        ([START, {**WHEEL, "colour": 3}], "extra key 'colour'"),
        ([START, {"id": "2", "order_id": 1, "parent": 0}], "no 'bp_id'"),
        ([START, {**WHEEL, "bp_id": "2"}], "'bp_id' '2', which is not an integer"),
        ([START, {**WHEEL, "id": "0"}], "second start block"),
        ([{**WHEEL, "order_id": 0}, WHEEL], "block 0 must be the start block"),
        ([START, {**WHEEL, "id": "9"}], "no 'parent_a'"),
        ([START, {"id": "9", "order_id": 1, "parent_a": 0, "bp_id_a": 1, "parent_b": 0, "bp_id_b": 1}], "both ends"),
        ([START, WHEEL, {**WHEEL, "order_id": 2}], "blocks 1 (powered wheel) and 2 (powered wheel) overlap"),
        ([START, {**WHEEL, "id": "36"}, {**WHEEL, "order_id": 2, "parent": 1, "bp_id": 0}], "its faces are: none"),
        ([START, *({"id": "63", "order_id": n, "parent": n - 1, "bp_id": 0} for n in range(1, 7))], "19 long along z"),
        ([START, 7], "is 7, not an object"),
        ([START] * 201, "201 blocks"),
    ],
)
def test_problem_messages(entries, words):
    problems = ConstructionTree.parse(json.dumps(entries)).validate()
    assert any(words in problem for problem in problems), problems


def test_all_problems_are_listed():
    wheels = [{**WHEEL, "order_id": n} for n in (2, 3)]
    text = text_of(START, {**WHEEL, "bp_id": 9}, *wheels, {**WHEEL, "order_id": 4, "parent": 8})
    found = " | ".join(ConstructionTree.parse(text).validate())
    assert "face 9" in found and "blocks 2 (powered wheel) and 3" in found and "sits on block 8" in found
    unread = ConstructionTree.parse(text_of(START, {**WHEEL, "id": "x"}, {**WHEEL, "order_id": "2"}, 5)).validate()
    assert len(unread) == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no machine today", "no JSON list"),
        ('{"id": "0"}', "a list of blocks"),
        ("```json\n{}\n```", "dict, not a list"),
        ("```json\n[{]\n```", "cannot be parsed"),
        ('[{"id":"0","order_id":0,"parent":-1,"bp_id":-1,"bp_id":-1}]', "duplicate key"),
        ('[{"id":"0","order_id":' + "9" * 5000 + ',"parent":-1,"bp_id":-1}]', "cannot be parsed"),
        ('[{"id":"0","order_id":' + "9" * 4000 + ',"parent":-1,"bp_id":-1}]', "must be numbered"),
        ("[" * 30_000, "cannot be parsed|nested too deeply"),
        ("[" + "1," * 150_000 + "1]", "characters"),
    ],
)
def test_texts_without_a_machine(text, words):
    (problem,) = ConstructionTree.parse(text).validate()
    assert any(word in problem for word in words.split("|")), problem


@settings(max_examples=150)
@given(st.data())
def test_damaged_text_is_a_machine_or_has_problems(data):
    text = data.draw(st.sampled_from([car().to_json(), catapult().to_json()]))
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 40)))
    junk = data.draw(st.text('[]{},:"0123456789-abc \n`\ud800\x00é', max_size=4) | st.just(text[start : start + 40]))
    problems = ConstructionTree.parse(text[:start] + junk + text[end:]).validate()
    assert all(isinstance(problem, str) and problem.isascii() for problem in problems)


@settings(max_examples=60)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
        max_leaves=15,
    )
)
def test_any_json_is_handled(value):
    assert isinstance(ConstructionTree.parse(json.dumps(value)).validate(), list)
