"""Where the next brick may go: for each size, the corners that are inside, free and attached, kept as bits.

Cells of a layer are the bits of one Python integer, cell (x, y) at x * world + y; so are corners. The corners from
which a brick would cover one of some cells are those cells shifted and joined, a few operations for all sizes
together; and a new brick changes only its own layer and the two beside it, so only those are looked at again.
Placements are never changed, so that completions which begin alike can share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import NamedTuple

from .structure import MAX_OFFSET, SIZES, Brick

_NUMBER_OF = {size: number for number, size in enumerate(SIZES)}
# What a long brick covers, two shorter ones cover, the second behind the first: 6 is 4 and 2.
_PARTS = {2: (1, 1), 4: (2, 2), 6: (4, 2), 8: (4, 4)}


class Box(NamedTuple):
    """Corners to choose from: these `cells` in the layers from `low` up to, not including, `high`. They are written as
    offsets from (x, y, z)."""

    x: int
    y: int
    z: int
    cells: int
    low: int
    high: int


class Rules:
    """What the bricks of one world keep to, and the bit patterns that follow from it.

    `attach`: a brick stands on the ground or shares a stud with one already placed, below or above it. `canonical`:
    z ascending, then x and y descending. `max_offset`: how far from its pivot a brick may be, along each axis.
    """

    def __init__(
        self,
        world: int,
        *,
        max_bricks: int,
        attach: bool = True,
        canonical: bool = False,
        max_offset: int = MAX_OFFSET,
    ):
        self.world, self.max_bricks, self.attach, self.canonical = world, max_bricks, attach, canonical
        self.row = (1 << world) - 1
        first_cells = [sum(1 << x * world for x in range(rows)) for rows in range(world + 1)]

        def rectangle(h: int, w: int) -> int:
            return first_cells[h] * ((1 << w) - 1) if min(h, w) > 0 else 0

        self.footprints = [rectangle(h, w) if max(h, w) <= world else 0 for h, w in SIZES]
        self.inside = [rectangle(world + 1 - h, world + 1 - w) for h, w in SIZES]
        self._joins: list[tuple[int, int, int]] = []
        for h, w in SIZES[1:]:
            first, second = _PARTS[h if h > 1 else w]
            parts = ((first, w), (second, w)) if h > 1 else ((h, first), (h, second))
            shift = first * world if h > 1 else first
            self._joins.append((_NUMBER_OF[parts[0]], _NUMBER_OF[parts[1]], shift))
        # From each coordinate, the coordinates that an offset reaches; and by cell, the cells.
        self.reach = [(max(at - max_offset, 0), min(at + max_offset + 1, world)) for at in range(world)]
        self.near = [
            rectangle(x1 - x0, y1 - y0) << (x0 * world + y0) for x0, x1 in self.reach for y0, y1 in self.reach
        ]
        self.everywhere = Box(0, 0, 0, rectangle(world, world), 0, world)

    def covering(self, cells: int) -> list[int]:
        """For each size, the corners from which it covers one of these cells. Holds only for corners where the size
        is inside: bits of other corners come from the next row."""
        corners = [cells]
        for first, second, shift in self._joins:
            corners.append(corners[first] | corners[second] >> shift)
        return corners


class Placements:
    """The bricks placed so far, and where another may go. Sizes go by their number in SIZES; `legal[size][z]` are the
    corners of a size in layer z. There are none once there are `max_bricks`."""

    __slots__ = ("_occupied", "bricks", "legal", "rules")

    def __init__(
        self, rules: Rules, bricks: tuple[Brick, ...], occupied: tuple[int, ...], legal: tuple[tuple[int, ...], ...]
    ):
        self.rules, self.bricks, self._occupied, self.legal = rules, bricks, occupied, legal

    @classmethod
    def none_yet(cls, rules: Rules) -> Placements:
        """The empty world."""
        higher = rules.world - 1
        legal = tuple((inside, *[0 if rules.attach else inside] * higher) for inside in rules.inside)
        return cls(rules, (), (0,) * rules.world, legal)

    def place(self, brick: Brick) -> Placements:
        """With one brick more, which must be legal."""
        rules, (h, w, x, y, z) = self.rules, brick
        bricks = (*self.bricks, brick)
        if len(bricks) >= rules.max_bricks:
            return Placements(rules, bricks, self._occupied, ((),) * len(SIZES))
        corner = x * rules.world + y
        occupied = list(self._occupied)
        occupied[z] |= rules.footprints[_NUMBER_OF[h, w]] << corner
        low = z - 1 if rules.attach and not rules.canonical and z else z
        high = z + 2 if rules.attach and z + 1 < rules.world else z + 1
        changed = [self._corners(occupied, layer) for layer in range(low, high)]
        below = [layers[:low] for layers in self.legal]
        if rules.canonical:
            before = (1 << corner) - 1  # bits are in the order of x, then y, and the order of bricks is the reverse
            changed[0] = [corners & before for corners in changed[0]]
            below = [(0,) * low] * len(SIZES)
        above = [layers[high:] for layers in self.legal]
        legal = tuple(map(tuple.__add__, map(tuple.__add__, below, zip(*changed, strict=True)), above))
        return Placements(rules, bricks, tuple(occupied), legal)

    def _corners(self, occupied: Sequence[int], z: int) -> list[int]:
        """For each size, the legal corners in layer z, in whatever order bricks come."""
        rules = self.rules
        taken = rules.covering(occupied[z])
        if z == 0 or not rules.attach:
            return [inside & ~blocked for inside, blocked in zip(rules.inside, taken, strict=True)]
        studs = occupied[z - 1] | (occupied[z + 1] if z + 1 < rules.world else 0)
        held = rules.covering(studs)
        return [inside & on & ~blocked for inside, on, blocked in zip(rules.inside, held, taken, strict=True)]

    def sizes(self) -> list[int]:
        """The sizes for which there is a place."""
        return [size for size, layers in enumerate(self.legal) if any(layers)]

    def pivots(self, size: int) -> list[int]:
        """The bricks, counted from 1, that have a place for this size in reach."""
        near, world, layers = self.rules.near, self.rules.world, self.legal[size]
        in_reach = [reduce(or_, layers[low:high], 0) for low, high in self.rules.reach]
        return [pivot for pivot, (_, _, x, y, z) in enumerate(self.bricks, 1) if in_reach[z] & near[x * world + y]]

    def box(self, pivot: int) -> Box:
        """The corners in reach of a pivot: all, for pivot 0."""
        if pivot == 0:
            return self.rules.everywhere
        _, _, x, y, z = self.bricks[pivot - 1]
        return Box(x, y, z, self.rules.near[x * self.rules.world + y], *self.rules.reach[z])

    def xs(self, size: int, box: Box) -> list[int]:
        """The x of its legal corners in a box."""
        world, row, corners = self.rules.world, self.rules.row, self._seen_from_above(size, box)
        return [x for x in range(world) if corners >> x * world & row]

    def ys(self, size: int, box: Box, x: int) -> list[int]:
        """The y of those that have this x."""
        corners = self._seen_from_above(size, box) >> x * self.rules.world
        return [y for y in range(self.rules.world) if corners >> y & 1]

    def zs(self, size: int, box: Box, x: int, y: int) -> list[int]:
        """The z of those that have this x and y."""
        layers, corner = self.legal[size], x * self.rules.world + y
        return [z for z in range(box.low, box.high) if layers[z] >> corner & 1]

    def _seen_from_above(self, size: int, box: Box) -> int:
        return reduce(or_, self.legal[size][box.low : box.high], 0) & box.cells
