"""Brick structures: the two text formats, collisions, and connectivity.

Absolute text has one brick per line, `2x4 (3,0,1)`: 2 cells along x, 4 along y, lowest corner at x=3, y=0, on layer 1.
Pivot text gives the position as an offset from an earlier brick, `2x4 @1 (0,-2,1)`: bricks are numbered from 1, and
offsets are at most `max_offset` per axis. Pivot 0 is the origin of the ground; its offsets are unlimited, so every
structure can be written.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from .kit import KIT, Kit

SIZES = KIT.sizes  # of the default kit
WORLD = 20
MAX_OFFSET = 5
FORMS = ("absolute", "pivot")
READ_LIMIT = 2_000  # maximum number of lines parsed from any text: more than real structures have, and still fast
LONGEST_LINE = 32  # characters; the text of a brick has fewer
GROUND = -1  # the index of the ground in lists of brick pairs

_LINE = re.compile(r"([0-9]{1,2})x([0-9]{1,2}) (?:@([0-9]{1,4}) )?\((-?[0-9]{1,3}),(-?[0-9]{1,3}),(-?[0-9]{1,3})\)")


class Brick(NamedTuple):
    """A brick of `h` x `w` cells (along x and y), one layer high, with its lowest corner at (x, y, z)."""

    h: int
    w: int
    x: int
    y: int
    z: int

    def __str__(self) -> str:
        return f"{self.h}x{self.w} ({self.x},{self.y},{self.z})"

    def is_inside(self, world: int) -> bool:
        return min(self.x, self.y, self.z) >= 0 and max(self.x + self.h, self.y + self.w) <= world and self.z < world


@dataclass(frozen=True)
class Structure:
    """Bricks in placement order in a cubic world. The constructor checks nothing; `problems` lists what is wrong."""

    bricks: tuple[Brick, ...]
    world: int = WORLD
    kit: Kit = KIT

    def __len__(self) -> int:
        return len(self.bricks)

    def first(self, count: int) -> Structure:
        """Return the first `count` bricks as a structure."""
        return self if count >= len(self) else Structure(self.bricks[:count], self.world, self.kit)

    @property
    def text(self) -> str:
        return "".join(f"{brick}\n" for brick in self.bricks)

    def pivot_text(self, max_offset: int = MAX_OFFSET) -> str:
        """Return the structure in pivot form.

        The pivot is the nearest earlier brick (the latest of equally near ones), or the origin of the ground if none
        is within `max_offset`.
        """
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
        """Indices of bricks that are not entirely inside the world."""
        return [i for i, brick in enumerate(self.bricks) if not brick.is_inside(self.world)]

    @cached_property
    def _owner_and_collisions(self) -> tuple[np.ndarray, list[tuple[int, int]]]:
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
        """Grid [x, y, z] with the index of the brick in each cell, or -1.

        Bricks that collide with an earlier brick or leave the world are not in the grid.
        """
        return self._owner_and_collisions[0]

    @property
    def occupied(self) -> np.ndarray:
        return self.owner >= 0

    @property
    def collisions(self) -> list[tuple[int, int]]:
        """(earlier, later) for every brick that claims a cell already occupied."""
        return self._owner_and_collisions[1]

    @cached_property
    def links(self) -> list[tuple[int, int]]:
        """(lower, upper) for every pair connected by studs; the ground is -1. Covers only bricks in `owner`."""
        owner = self.owner
        on_ground = [(GROUND, int(i)) for i in np.unique(owner[:, :, 0]) if i >= 0]
        lower, upper = owner[:, :, :-1], owner[:, :, 1:]
        studs = (lower >= 0) & (upper >= 0)
        pairs = np.unique(lower[studs].astype(np.int64) * len(self.bricks) + upper[studs])
        return on_ground + [divmod(int(pair), len(self.bricks)) for pair in pairs]

    @cached_property
    def floating(self) -> list[int]:
        """Indices of bricks that are not connected to the ground by any chain of studs."""
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
        """List the reasons why this structure cannot be built; empty if it can."""
        found = [] if self.bricks else ["there is no brick"]
        if max_bricks is not None and len(self.bricks) > max_bricks:
            found.append(f"there are {len(self.bricks)} bricks; at most {max_bricks} are allowed")
        found += [f"brick {i + 1}, {self.bricks[i]}, is outside the world of {self.world}" for i in self.outside]
        found += [f"brick {b + 1}, {self.bricks[b]}, collides with brick {a + 1}" for a, b in self.collisions]
        return found

    def canonical(self) -> Structure:
        """Return the same bricks in the published order: z ascending, then x and y descending."""
        return Structure(tuple(sorted(self.bricks, key=lambda b: (b.z, -b.x, -b.y))), self.world, self.kit)


@dataclass(frozen=True)
class Reading:
    """The result of parsing a text: the bricks of its valid lines, and a message for each invalid line."""

    structure: Structure
    problems: list[str] = field(default_factory=list)
    is_brick: list[bool] = field(default_factory=list)  # of each line that is not empty: whether it is a brick

    @property
    def lines(self) -> int:
        return len(self.is_brick)


def parse(text: str, world: int = WORLD, max_offset: int = MAX_OFFSET, kit: Kit = KIT) -> Reading:
    """Parse absolute or pivot text, which may be mixed. Any text gives a Reading; invalid lines become problems."""
    bricks: list[Brick] = []
    lines, is_all = lines_of(text)
    problems = [] if is_all else [f"only the first {READ_LIMIT} lines are read"]
    is_brick = []
    for number, line in enumerate(lines, 1):
        brick = _brick_of(line, bricks, max_offset, kit)
        is_brick.append(isinstance(brick, Brick))
        if isinstance(brick, Brick):
            bricks.append(brick)
        else:
            problems.append(f"line {number}, {line[:40]!r}: {brick}")
    return Reading(Structure(tuple(bricks), world, kit), problems, is_brick)


def lines_of(text: str) -> tuple[list[str], bool]:
    """Return the lines that are read, without empty ones, and whether these are all."""
    lines = text.strip().split("\n", READ_LIMIT)
    return [line for line in map(str.strip, lines[:READ_LIMIT]) if line], len(lines) <= READ_LIMIT


@lru_cache(maxsize=50_000)
def _numbers(line: str) -> tuple[int, int, int | None, int, int, int] | None:
    """Return h, w, pivot, x, y and z of a line, or None if it has another form. Models repeat lines."""
    match = _LINE.fullmatch(line)
    if match is None:
        return None
    h, w, x, y, z = (int(match[group]) for group in (1, 2, 4, 5, 6))
    return h, w, None if match[3] is None else int(match[3]), x, y, z


def _brick_of(line: str, placed: Sequence[Brick], max_offset: int, kit: Kit) -> Brick | str:
    """Return the brick of one line, or a message that says what is wrong with the line."""
    numbers = _numbers(line) if len(line) <= LONGEST_LINE else None
    if numbers is None:
        return "not of the form `2x4 (3,0,1)` or `2x4 @1 (0,-2,1)`"
    h, w, pivot, x, y, z = numbers
    if (h, w) not in kit.part_of:
        return f"there is no {h}x{w} brick; sizes are {kit.written_sizes}"
    if pivot:
        if pivot > len(placed):
            return f"pivot {pivot} does not exist yet; there are {len(placed)} bricks before this line"
        if max(abs(x), abs(y), abs(z)) > max_offset:
            return f"the offset from a brick must be at most {max_offset} along each axis"
        base = placed[pivot - 1]
        x, y, z = base.x + x, base.y + y, base.z + z
    return Brick(h, w, x, y, z)
