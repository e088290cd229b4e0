"""Legal positions of the next brick: for each size, the corners that are inside, free and attached, as bit sets.

The cells of a layer are the bits of one Python integer, cell (x, y) at bit x * world + y; corners are encoded in the
same way. The corners from which a brick would cover some cell of a set are a union of shifted copies of that set,
which takes a few operations for all sizes together. A new brick changes only its own layer and the two adjacent ones,
so only these are recomputed. Placements are immutable, so completions with the same beginning can share them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from operator import or_
from typing import NamedTuple

from .kit import KIT, Kit, Size
from .structure import MAX_OFFSET, Brick


class Box(NamedTuple):
    """Candidate corners: `cells` in the layers `low` to `high` (exclusive), written as offsets from (x, y, z)."""

    x: int
    y: int
    z: int
    cells: int
    low: int
    high: int


class Rules:
    """The rules for bricks in one world, and the bit patterns derived from them.

    `attach`: a brick must be on the ground or share a stud with an earlier brick, below or above it. `canonical`:
    z ascending, then x and y descending. `max_offset`: the largest distance from the pivot along each axis.
    """

    def __init__(
        self,
        world: int,
        *,
        max_bricks: int,
        attach: bool = True,
        canonical: bool = False,
        max_offset: int = MAX_OFFSET,
        kit: Kit = KIT,
    ):
        self.world, self.max_bricks, self.attach, self.canonical = world, max_bricks, attach, canonical
        self.row, self.area = (1 << world) - 1, world * world
        first_cells = [sum(1 << x * world for x in range(rows)) for rows in range(world + 1)]

        def rectangle(h: int, w: int) -> int:
            return first_cells[h] * ((1 << w) - 1) if min(h, w) > 0 else 0

        self.footprints = [rectangle(h, w) if max(h, w) <= world else 0 for h, w in kit.sizes]
        self.inside = [rectangle(world + 1 - h, world + 1 - w) for h, w in kit.sizes]
        self.number_of = {size: number for number, size in enumerate(kit.sizes)}
        self.nowhere = (0,) * len(kit.sizes)  # a layer without legal corners
        joined = _with_halves(kit.sizes)
        place = {size: number for number, size in enumerate(joined)}
        halves = [_half(size) for size in joined[1:]]
        self._joins = [  # (number of the half, distance between the two)
            (place[half], (size[0] - half[0]) * world + size[1] - half[1])
            for size, half in zip(joined[1:], halves, strict=True)
        ]
        self._chosen = [place[size] for size in kit.sizes]  # without sizes that are only halves of others
        # For each coordinate, the range of coordinates within the offset; for each cell, the cells within it.
        self.reach = [(max(at - max_offset, 0), min(at + max_offset + 1, world)) for at in range(world)]
        self.near = [
            rectangle(x1 - x0, y1 - y0) << (x0 * world + y0) for x0, x1 in self.reach for y0, y1 in self.reach
        ]
        self.everywhere = Box(0, 0, 0, rectangle(world, world), 0, world)

    def covering(self, cells: int) -> list[int]:
        """Return, for each size, the corners from which it covers one of these cells.

        The result is valid only for corners at which the size is inside; other bits wrap around from the next row.
        """
        corners = [cells]
        for half, shift in self._joins:
            corners.append(corners[half] | corners[half] >> shift)
        return [corners[number] for number in self._chosen]


def _half(size: Size) -> Size:
    """Return the brick of which two, which may overlap, cover what this one covers: 6 is two 4."""
    h, w = size
    side = 1 << ((h if h > 1 else w) - 1).bit_length() - 1  # the largest power of two below the side
    return (side, w) if h > 1 else (h, side)


def _with_halves(sizes: Iterable[Size]) -> list[Size]:
    """Return these sizes, 1x1, and all halves of halves, each after its half."""
    found: set[Size] = {(1, 1)}
    for size in sizes:
        while size not in found:
            found.add(size)
            size = _half(size)
    return sorted(found)


class Placements:
    """The bricks placed so far and the legal positions of the next one.

    Sizes are indices into the kit's sizes; `legal[z][size]` holds the legal corners of a size in layer z. No position
    is legal once there are `max_bricks` bricks.
    """

    __slots__ = ("_occupied", "bricks", "legal", "rules")

    def __init__(
        self, rules: Rules, bricks: tuple[Brick, ...], occupied: tuple[int, ...], legal: tuple[Sequence[int], ...]
    ):
        self.rules, self.bricks, self._occupied, self.legal = rules, bricks, occupied, legal

    @classmethod
    def empty(cls, rules: Rules) -> Placements:
        """Return the placements of the empty world."""
        higher = rules.nowhere if rules.attach else rules.inside
        return cls(rules, (), (0,) * rules.world, (rules.inside, *[higher] * (rules.world - 1)))

    def place(self, brick: Brick) -> Placements:
        """Return the placements after adding a brick, which must be legal."""
        rules, (h, w, x, y, z) = self.rules, brick
        bricks = (*self.bricks, brick)
        if len(bricks) >= rules.max_bricks:
            return Placements(rules, bricks, self._occupied, (rules.nowhere,) * rules.world)
        corner = x * rules.world + y
        occupied = list(self._occupied)
        occupied[z] |= rules.footprints[rules.number_of[h, w]] << corner
        low = z - 1 if rules.attach and not rules.canonical and z else z
        high = z + 2 if rules.attach and z + 1 < rules.world else z + 1
        changed = [self._corners(occupied, layer) for layer in range(low, high)]
        below = self.legal[:low]
        if rules.canonical:
            before = (1 << corner) - 1  # bits ascend by x, then y; bricks descend
            changed[0] = [corners & before for corners in changed[0]]
            below = (rules.nowhere,) * low
        return Placements(rules, bricks, tuple(occupied), (*below, *changed, *self.legal[high:]))

    def _corners(self, occupied: Sequence[int], z: int) -> list[int]:
        """Return, for each size, the legal corners in layer z, ignoring the canonical order."""
        rules = self.rules
        if z == 0 or not rules.attach:
            taken = rules.covering(occupied[z])
            return [inside & ~blocked for inside, blocked in zip(rules.inside, taken, strict=True)]
        studs = occupied[z - 1] | (occupied[z + 1] if z + 1 < rules.world else 0)
        # Both sets in one integer: a size that is inside covers no cell beyond the first set.
        area, covering = rules.area, rules.covering(studs << rules.area | occupied[z])
        return [inside & both >> area & ~both for inside, both in zip(rules.inside, covering, strict=True)]

    def sizes(self) -> list[int]:
        """Return the sizes that have a legal position."""
        layers = [layer for layer in self.legal if layer is not self.rules.nowhere]
        return [size for size, corners in enumerate(zip(*layers, strict=True)) if any(corners)]

    def pivots(self, size: int) -> list[int]:
        """Return the bricks, counted from 1, within whose reach this size has a legal position."""
        near, world = self.rules.near, self.rules.world
        in_reach = [self._seen_from_above(size, low, high) for low, high in self.rules.reach]
        return [pivot for pivot, (_, _, x, y, z) in enumerate(self.bricks, 1) if in_reach[z] & near[x * world + y]]

    def box(self, pivot: int) -> Box:
        """Return the corners within reach of a pivot; pivot 0 reaches all of them."""
        if pivot == 0:
            return self.rules.everywhere
        _, _, x, y, z = self.bricks[pivot - 1]
        return Box(x, y, z, self.rules.near[x * self.rules.world + y], *self.rules.reach[z])

    def xs(self, size: int, box: Box) -> list[int]:
        """Return the x coordinates of the size's legal corners in a box."""
        world, row = self.rules.world, self.rules.row
        corners = self._seen_from_above(size, box.low, box.high) & box.cells
        return [x for x in range(world) if corners >> x * world & row]

    def ys(self, size: int, box: Box, x: int) -> list[int]:
        """Return the y coordinates of the legal corners with this x."""
        world = self.rules.world
        corners = (self._seen_from_above(size, box.low, box.high) & box.cells) >> x * world & self.rules.row
        return [y for y in range(world) if corners >> y & 1]

    def zs(self, size: int, box: Box, x: int, y: int) -> list[int]:
        """Return the z coordinates of the legal corners with this x and y."""
        legal, corner = self.legal, x * self.rules.world + y
        return [z for z in range(box.low, box.high) if legal[z][size] >> corner & 1]

    def _seen_from_above(self, size: int, low: int, high: int) -> int:
        """Return the (x, y) of the size's legal corners in the layers from `low` to `high` (exclusive)."""
        return reduce(or_, [layer[size] for layer in self.legal[low:high]], 0)
