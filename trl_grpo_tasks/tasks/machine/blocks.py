"""The block types of machines: sizes, masses, faces and functions, and the orientation of children on each face.

The frame is left-handed: x right, y up, z forward. A block extends along its own +z from the face that it sits on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

LIMITS = (17.0, 9.5, 17.0)  # the largest extent of a machine along x, y, z

FACE_NAMES = ("Front", "Back", "Left", "Right", "Up", "Down")
# The facing of a child, by its parent's facing, in the order of FACE_NAMES.
_CHILD_FACING = {
    "z+": ("z+", "z-", "x-", "x+", "y+", "y-"),
    "z-": ("z-", "z+", "x+", "x-", "y+", "y-"),
    "x-": ("x-", "x+", "z-", "z+", "y+", "y-"),
    "x+": ("x+", "x-", "z+", "z-", "y+", "y-"),
    "y+": ("y+", "y-", "x-", "x+", "z-", "z+"),
    "y-": ("y-", "y+", "x-", "x+", "z+", "z-"),
}
FACINGS = tuple(_CHILD_FACING)


@dataclass(frozen=True)
class Face:
    """A place where a child may sit: its side of the block, and its position in the block's frame."""

    name: str
    position: tuple[float, float, float]


@dataclass(frozen=True)
class BlockType:
    """A type of block.

    `joint` is its motion relative to its parent: "" for rigid blocks, "spin" (about its own z), "bend" (about its own
    x, up and down), "turn" (about its own y, left and right), "ball", or "slide" (along its own z). `drive` is what
    moves it: "wheel", "motor", "servo" (holds it straight), or "" for nothing. `words` describes it in the manual.
    """

    id: str
    name: str
    size: tuple[float, float, float]
    mass: float
    faces: tuple[Face, ...]
    words: str
    joint: str = ""
    drive: str = ""
    two_ended: bool = False

    @property
    def is_wheel(self) -> bool:
        return self.size[0] > 1 and self.joint == "spin"


@dataclass(frozen=True)
class Block:
    """A block of a tree. Two-ended ones (springs, braces, winches) have a second parent and face."""

    kind: str
    parent: int
    face: int
    parent_b: int | None = None
    face_b: int | None = None

    @property
    def type(self) -> BlockType:
        return BLOCKS[self.kind]


def child_facing(facing: str, face: Face) -> str:
    return _CHILD_FACING[facing][FACE_NAMES.index(face.name)]


@cache
def rotation(facing: str) -> np.ndarray:
    """Return the frame of a block with this facing: its right, up and front directions as columns."""
    named = dict(zip(FACE_NAMES, _CHILD_FACING[facing], strict=True))
    matrix = np.zeros((3, 3))
    for column, side in enumerate(("Right", "Up", "Front")):
        direction = named[side]
        matrix["xyz".index(direction[0]), column] = 1.0 if direction[1] == "+" else -1.0
    matrix.flags.writeable = False
    return matrix


def _sides(*places: float) -> tuple[Face, ...]:
    """Return the Left, Right, Up and Down faces of a block one unit wide, at each of these positions along z."""
    normals = {"Left": (-0.5, 0.0), "Right": (0.5, 0.0), "Up": (0.0, 0.5), "Down": (0.0, -0.5)}
    return tuple(Face(name, (x, y, place)) for name, (x, y) in normals.items() for place in places)


def _front(z: float) -> Face:
    return Face("Front", (0.0, 0.0, z))


def _bar(length: int) -> tuple[Face, ...]:
    return (_front(float(length)), *_sides(*(k + 0.5 for k in range(length))))


_START_FACES = (_front(0.5), Face("Back", (0.0, 0.0, -0.5)), *_sides(0.0))
_LARGE_WHEEL_FACES = (
    _front(1.0),
    *(Face("Front", (x, y, 1.0)) for x, y in ((-1.5, 0.0), (1.5, 0.0), (0.0, 1.5), (0.0, -1.5))),
    Face("Left", (-1.5, 0.0, 0.5)),
    Face("Right", (1.5, 0.0, 0.5)),
    Face("Up", (0.0, 1.5, 0.5)),
    Face("Down", (0.0, -1.5, 0.5)),
)
_CUBE, _BAR, _WHEEL, _LARGE_WHEEL = (1.0, 1.0, 1.0), (1.0, 1.0, 2.0), (2.0, 2.0, 0.5), (3.0, 3.0, 1.0)
_NO_SIZE, _CAP = (0.0, 0.0, 0.0), (_front(1.0),)

_TYPES = (
    BlockType("0", "start", _CUBE, 0.25, _START_FACES, "the root of every machine, once"),
    BlockType("15", "small block", _CUBE, 0.3, _bar(1), "rigid"),
    BlockType("35", "ballast", _CUBE, 3.0, _bar(1), "rigid and heavy"),
    BlockType("1", "wood", _BAR, 0.5, _bar(2), "rigid, two long"),
    BlockType("41", "rod", _BAR, 0.5, _bar(2), "rigid, two long, breaks easily"),
    BlockType("63", "log", (1.0, 1.0, 3.0), 1.0, _bar(3), "rigid, three long"),
    BlockType("2", "powered wheel", _WHEEL, 1.0, (_front(0.5),), "drives; on the left or right, forward",
              "spin", "wheel"),
    BlockType("40", "free wheel", _WHEEL, 1.0, (_front(0.5),), "rolls", "spin"),
    BlockType("46", "large powered wheel", _LARGE_WHEEL, 1.0, _LARGE_WHEEL_FACES, "drives, 3 high", "spin", "wheel"),
    BlockType("60", "large free wheel", _LARGE_WHEEL, 1.0, _LARGE_WHEEL_FACES, "rolls, 3 high", "spin"),
    BlockType("22", "rotating block", _CUBE, 1.0, _bar(1), "a motor: turns all it carries about its front",
              "spin", "motor"),
    BlockType("5", "hinge", _CUBE, 0.5, _bar(1), "swings freely up and down by 90 degrees", "bend"),
    BlockType("19", "swivel", _CUBE, 0.5, _bar(1), "turns freely about its front", "spin"),
    BlockType("44", "ball joint", _CUBE, 0.5, _bar(1), "swings freely every way", "ball"),
    BlockType("28", "steering hinge", _CUBE, 1.0, _CAP, "left and right by 90 degrees; held straight",
              "turn", "servo"),
    BlockType("13", "steering block", _CUBE, 1.0, _bar(1), "turns about its front; held straight", "spin", "servo"),
    BlockType("76", "axle", _CUBE, 0.3, _CAP, "swings and turns freely every way", "ball"),
    BlockType("27", "grabber", _CUBE, 0.5, _CAP, "holds a boulder until the trigger is pulled"),
    BlockType("16", "suspension", _BAR, 0.5, (_front(2.0), *_sides(1.5)), "gives way along its length, damped",
              "slide"),
    BlockType("30", "container", (2.4, 3.0, 2.8), 0.5, _CAP, "a bowl, open at its front"),
    BlockType("36", "boulder", (1.9, 1.9, 1.9), 5.0, (), "loose: what a catapult throws"),
    BlockType("9", "spring", _NO_SIZE, 0.4, (), "pulls its two ends together when triggered", two_ended=True),
    BlockType("7", "brace", _NO_SIZE, 0.5, (), "holds its two ends as they are", two_ended=True),
    BlockType("45", "winch", _NO_SIZE, 0.4, (), "a rope: its two ends come no farther apart", two_ended=True),
)  # fmt: skip
BLOCKS = {block.id: block for block in _TYPES}
# The blocks listed in the prompt of the published training.
PROMPT_BLOCKS = ("0", "15", "35", "1", "41", "63", "2", "22", "16", "30", "36", "9")
