"""Designs of machines: sketches of cars and catapults, random changes, and mirror images."""

from __future__ import annotations

import dataclasses
import random

from .blocks import BLOCKS, PROMPT_BLOCKS
from .growth import Growth
from .tree import ROOT, Block, ConstructionTree

LEVELS = {"small": (2, 10), "medium": (11, 16), "large": (17, 24)}  # minimum and maximum number of blocks
MOST_ASKED = max(most for _, most in LEVELS.values())  # no request allows more blocks
_BARS, _RIGID = ("15", "1", "63"), ("15", "1", "63", "35", "41")
_KINDS = PROMPT_BLOCKS[1:]  # without the start block
_FRONT, _BACK, _LEFT, _RIGHT, _UP = 0, 1, 2, 3, 4  # faces of the start block


def sketch_car(rng: random.Random, blocks: tuple[int, int]) -> ConstructionTree:
    """Sketch a car: a spine along the driving direction, pairs of wheels on its sides, and sometimes a load."""
    draft, max_blocks = _Draft(), blocks[1]
    ends = [draft.add(rng.choice(_BARS), 0, face) for face in (_FRONT, _BACK)]
    while rng.random() < 0.4 and len(draft.blocks) < max_blocks - 4:
        side = rng.randrange(2)
        ends[side] = draft.add(rng.choice(_BARS), ends[side], 0) or ends[side]
    spine = list(range(1, len(draft.blocks)))
    for _ in range(rng.randint(2, 5)):
        if len(draft.blocks) > max_blocks - 2:
            break
        bar = rng.choice(spine)
        length = (len(BLOCKS[draft.blocks[bar].kind].faces) - 1) // 4
        place = rng.randrange(length)
        for side in range(2):
            draft.add("2", bar, 1 + side * length + place)
    draft.fill(rng, rng.randint(*blocks))
    return ConstructionTree(draft.blocks)


def sketch_catapult(rng: random.Random, blocks: tuple[int, int]) -> ConstructionTree:
    """Sketch a catapult: feet, a tower, a motor on its side, an arm on the motor, and a bowl with a boulder."""
    draft, max_blocks = _Draft(), blocks[1]
    spare = max_blocks - 6  # without the start, tower, motor, arm, bowl and boulder
    feet = [f for f in (_FRONT, _BACK, _LEFT, _RIGHT) if rng.random() < 0.8][: max(1, spare - 1)]
    for face in feet:
        foot = draft.add("63", 0, face)
        if foot and rng.random() < 0.5 and len(draft.blocks) < spare:
            draft.add("35", foot, 0)
    tower = draft.add(rng.choice(("63", "63", "1")), 0, _UP)
    if tower and rng.random() < 0.3 and len(draft.blocks) < max_blocks - 4:
        tower = draft.add(rng.choice(_BARS), tower, 0) or tower
    motor = _add_on_any_face(draft, rng, "22", tower)
    arm = _add_on_any_face(draft, rng, rng.choice(("63", "63", "1")), motor)
    if arm and rng.random() < 0.6 and len(draft.blocks) < max_blocks - 2:
        arm = draft.add(rng.choice(_BARS), arm, 0) or arm
    bowl = _add_on_any_face(draft, rng, "30", arm)
    if bowl:
        draft.add("36", bowl, 0)
    draft.fill(rng, rng.randint(*blocks))
    return ConstructionTree(draft.blocks)


def mutated(tree: ConstructionTree, rng: random.Random, max_blocks: int) -> ConstructionTree:
    """Return the machine with one block removed, replaced, moved to another face, or added; it stays valid."""
    blocks = list(tree.blocks)
    index = rng.randrange(1, len(blocks))
    what = rng.choice(("drop", "kind", "face", "add"))
    draft = _Draft()
    numbers: dict[int | None, int | None] = {0: 0, None: None}
    for old, block in enumerate(blocks[1:], start=1):
        kind, face = block.kind, block.face
        if old == index and what == "drop":
            continue
        if old == index and what == "kind" and not block.type.two_ended:
            kind = rng.choice([k for k in _KINDS if not BLOCKS[k].two_ended])
        if old == index and what == "face":
            face = rng.randrange(len(blocks[block.parent].type.faces))
        parents = numbers.get(block.parent), numbers.get(block.parent_b)
        number = draft.add(kind, parents[0], face, parents[1], block.face_b)
        if number:
            numbers[old] = number
    if what == "add":
        draft.fill(rng, min(max_blocks, len(draft.blocks) + 1))
    grown = ConstructionTree(draft.blocks)
    return grown if len(grown.blocks) > 1 else tree


def mirrored(tree: ConstructionTree) -> ConstructionTree:
    """Return the mirror image of a machine, left and right exchanged."""

    def other(parent: int, face: int) -> int:
        x, y, z = tree.blocks[parent].type.faces[face].position
        positions = [face.position for face in tree.blocks[parent].type.faces]
        return positions.index((-x, y, z))

    blocks = [
        dataclasses.replace(
            block,
            face=other(block.parent, block.face),
            face_b=None if block.parent_b is None or block.face_b is None else other(block.parent_b, block.face_b),
        )
        for block in tree.blocks[1:]
    ]
    return ConstructionTree((ROOT, *blocks))


class _Draft:
    """A machine under construction; blocks that do not fit are skipped."""

    def __init__(self) -> None:
        self.growth = Growth.start()

    @property
    def blocks(self) -> tuple[Block, ...]:
        return self.growth.blocks

    def add(
        self, kind: str, parent: int | None, face: int, parent_b: int | None = None, face_b: int | None = None
    ) -> int | None:
        """Add a block and return its number, or None if it does not fit."""
        if parent is None:
            return None
        ends = [(parent, face), (parent_b, face_b)] if BLOCKS[kind].two_ended else [(parent, face)]
        if len(set(ends)) < len(ends) or not set(ends) <= set(self.growth.places(kind)):
            return None
        self.growth = self.growth.grow(Block(kind, parent, face, parent_b, face_b))
        return len(self.blocks) - 1

    def fill(self, rng: random.Random, size: int) -> None:
        """Add random blocks, mostly rigid ones, on random faces until the machine has `size` blocks."""
        for _ in range(20 * size):
            if len(self.blocks) >= size:
                break
            kind = rng.choice(_RIGID if rng.random() < 0.7 else _KINDS)
            places = self.growth.places(kind)
            if kind != "36" and len(places) > 1:
                ends = rng.sample(places, 2) if BLOCKS[kind].two_ended else [rng.choice(places)]
                self.add(kind, *(number for end in ends for number in end))


def _add_on_any_face(draft: _Draft, rng: random.Random, kind: str, parent: int | None) -> int | None:
    """Add a block on a random face of its parent on which it fits."""
    if parent is None:
        return None
    faces = list(range(len(draft.blocks[parent].type.faces)))
    rng.shuffle(faces)
    return next((number for face in faces if (number := draft.add(kind, parent, face))), None)
