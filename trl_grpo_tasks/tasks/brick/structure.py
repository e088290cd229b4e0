"""Brick structures: the parts, the two ways to write them as text, and what touches what.

Absolute text has one brick a line, `2x4 (3,0,1)`: 2 cells along x, 4 along y, lowest corner at x=3, y=0, on layer 1.
Pivot text writes the place as an offset from a brick already placed, `2x4 @1 (0,-2,1)`: bricks count from 1, each
offset is at most `max_offset` in size, and pivot 0 is the ground's origin, whose offsets are as large as the world so
that every structure can be written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

# The eight parts and their masses. A part can be turned, which makes 14 sizes.
PART_MASSES_KG = {(1, 1): 0.00043, (1, 2): 0.00081, (1, 4): 0.00157, (1, 6): 0.00228, (1, 8): 0.00303,
                  (2, 2): 0.00115, (2, 4): 0.00216, (2, 6): 0.00323}  # fmt: skip
SIZES: tuple[tuple[int, int], ...] = tuple(sorted({size for h, w in PART_MASSES_KG for size in ((h, w), (w, h))}))
WORLD = 20
MAX_OFFSET = 5
FORMS = ("absolute", "pivot")
READ_LIMIT = 2_000  # lines read of any text: far beyond what a world holds in practice, and cheap
GROUND = -1  # the index of the ground where pairs of bricks are listed

_LINE = re.compile(r"([0-9]{1,2})x([0-9]{1,2}) (?:@([0-9]{1,4}) )?\((-?[0-9]{1,3}),(-?[0-9]{1,3}),(-?[0-9]{1,3})\)")


class Brick(NamedTuple):
    """`h` cells along x, `w` along y, one high; (x, y, z) is the lowest corner."""

    h: int
    w: int
    x: int
    y: int
    z: int

    def __str__(self) -> str:
        return f"{self.h}x{self.w} ({self.x},{self.y},{self.z})"

    @property
    def mass_kg(self) -> float:
        return PART_MASSES_KG[min(self.h, self.w), max(self.h, self.w)]

    def is_inside(self, world: int) -> bool:
        return min(self.x, self.y, self.z) >= 0 and max(self.x + self.h, self.y + self.w) <= world and self.z < world

    def overlap(self, other: Brick) -> int:
        """Cells that the two share when seen from above."""
        along_x = min(self.x + self.h, other.x + other.h) - max(self.x, other.x)
        along_y = min(self.y + self.w, other.y + other.w) - max(self.y, other.y)
        return max(along_x, 0) * max(along_y, 0)


@dataclass(frozen=True)
class Structure:
    """Bricks in the order they were placed, in a cubic world. Nothing is checked: `problems` says what is wrong."""

    bricks: tuple[Brick, ...]
    world: int = WORLD

    def __len__(self) -> int:
        return len(self.bricks)

    @property
    def text(self) -> str:
        return "".join(f"{brick}\n" for brick in self.bricks)

    def pivot_text(self, max_offset: int = MAX_OFFSET) -> str:
        """The structure in pivot form: the nearest brick already placed is the pivot, the latest of equals, and the
        ground's origin where none is in reach."""
        lines = []
        for count, (h, w, x, y, z) in enumerate(self.bricks):
            pivot, offset = 0, (x, y, z)
            nearest = max_offset + 1
            for index in range(count - 1, -1, -1):
                placed = self.bricks[index]
                delta = (x - placed.x, y - placed.y, z - placed.z)
                if (distance := max(map(abs, delta))) < nearest:
                    pivot, offset, nearest = index + 1, delta, distance
            lines.append(f"{h}x{w} @{pivot} ({offset[0]},{offset[1]},{offset[2]})\n")
        return "".join(lines)

    @cached_property
    def outside(self) -> list[int]:
        """Indices of bricks that are not wholly inside the world."""
        return [i for i, brick in enumerate(self.bricks) if not brick.is_inside(self.world)]

    @cached_property
    def _painted(self) -> tuple[np.ndarray, list[tuple[int, int]]]:
        grid = np.full((self.world,) * 3, GROUND, dtype=np.int32)
        collisions = []
        for index, brick in enumerate(self.bricks):
            if not brick.is_inside(self.world):
                continue
            cells = grid[brick.x : brick.x + brick.h, brick.y : brick.y + brick.w, brick.z]
            if (taken := cells[cells >= 0]).size:
                collisions.append((int(taken.min()), index))
            else:
                cells[...] = index
        return grid, collisions

    @property
    def owner(self) -> np.ndarray:
        """World-sized grid [x, y, z] of the index of the brick in each cell, -1 where there is none. A brick that
        collides with an earlier one, or leaves the world, is not in it."""
        return self._painted[0]

    @property
    def occupied(self) -> np.ndarray:
        return self.owner >= 0

    @property
    def collisions(self) -> list[tuple[int, int]]:
        """(earlier, later) brick for every brick that takes a cell already taken."""
        return self._painted[1]

    @cached_property
    def links(self) -> list[tuple[int, int]]:
        """(lower, upper) of every pair connected by studs; the ground is -1. Only bricks that are in `owner`."""
        owner = self.owner
        on_ground = [(GROUND, int(i)) for i in np.unique(owner[:, :, 0]) if i >= 0]
        lower, upper = owner[:, :, :-1], owner[:, :, 1:]
        studs = (lower >= 0) & (upper >= 0)
        pairs = np.unique(lower[studs].astype(np.int64) * len(self.bricks) + upper[studs])
        return on_ground + [divmod(int(pair), len(self.bricks)) for pair in pairs]

    @cached_property
    def floating(self) -> list[int]:
        """Indices of bricks that no chain of studs connects to the ground."""
        near: dict[int, list[int]] = {}
        for a, b in self.links:
            near.setdefault(a, []).append(b)
            near.setdefault(b, []).append(a)
        reached, todo = {GROUND}, [GROUND]
        while todo:
            for other in near.get(todo.pop(), ()):
                if other not in reached:
                    reached.add(other)
                    todo.append(other)
        return [i for i in range(len(self.bricks)) if i not in reached]

    def problems(self, max_bricks: int | None = None) -> list[str]:
        """Why this is not a structure one could build, in words; empty if it is."""
        found = [] if self.bricks else ["there is no brick"]
        if max_bricks is not None and len(self.bricks) > max_bricks:
            found.append(f"{len(self.bricks)} bricks are more than the {max_bricks} allowed")
        found += [f"brick {i + 1}, {self.bricks[i]}, is outside the world of {self.world}" for i in self.outside]
        found += [f"brick {b + 1}, {self.bricks[b]}, collides with brick {a + 1}" for a, b in self.collisions]
        return found

    def canonical(self) -> Structure:
        """The same bricks in the published order: z ascending, then x and y descending."""
        return Structure(tuple(sorted(self.bricks, key=lambda b: (b.z, -b.x, -b.y))), self.world)


@dataclass(frozen=True)
class Reading:
    """What a text says: the bricks of its good lines, and what is wrong with the others, in words."""

    structure: Structure
    problems: list[str] = field(default_factory=list)
    lines: int = 0


def parse(text: str, world: int = WORLD, max_offset: int = MAX_OFFSET) -> Reading:
    """Read absolute or pivot text, also mixed. Any text gives a Reading; lines that are no brick are problems."""
    bricks: list[Brick] = []
    problems = []
    lines = text.strip().split("\n", READ_LIMIT)
    if len(lines) > READ_LIMIT:
        problems.append(f"only the first {READ_LIMIT} lines are read")
        lines = lines[:READ_LIMIT]
    lines = [line for line in map(str.strip, lines) if line]
    for number, line in enumerate(lines, 1):
        brick = _brick_of(line, bricks, max_offset)
        if isinstance(brick, Brick):
            bricks.append(brick)
        else:
            problems.append(f"line {number}, {line[:40]!r}: {brick}")
    return Reading(Structure(tuple(bricks), world), problems, len(lines))


def _brick_of(line: str, placed: Sequence[Brick], max_offset: int) -> Brick | str:
    """The brick of one line, or what is wrong with the line."""
    match = _LINE.fullmatch(line)
    if match is None:
        return "not of the form `2x4 (3,0,1)` or `2x4 @1 (0,-2,1)`"
    h, w = int(match[1]), int(match[2])
    if (h, w) not in SIZES:
        return f"there is no {h}x{w} brick; sizes are {', '.join(f'{h}x{w}' for h, w in SIZES)}"
    x, y, z = (int(match[group]) for group in (4, 5, 6))
    if match[3] is not None and (pivot := int(match[3])):
        if pivot > len(placed):
            return f"pivot {pivot} is not placed yet; there are {len(placed)} bricks"
        if max(abs(x), abs(y), abs(z)) > max_offset:
            return f"an offset from a brick is at most {max_offset}"
        base = placed[pivot - 1]
        x, y, z = base.x + x, base.y + y, base.z + z
    return Brick(h, w, x, y, z)


def structure_of(bricks: Structure | str | Iterable[Sequence[int]], world: int = WORLD) -> Structure:
    """A Structure from one, from text, or from (h, w, x, y, z) tuples. Text that has a bad line is a ValueError."""
    if isinstance(bricks, Structure):
        return bricks
    if isinstance(bricks, str):
        reading = parse(bricks, world)
        if reading.problems:
            raise ValueError(f"not a brick structure: {reading.problems[0]}")
        return reading.structure
    return Structure(tuple(Brick(*brick) for brick in bricks), world)
