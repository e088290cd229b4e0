"""The forces between bricks, as columns of a linear program whose rows state that every brick is in equilibrium.

A brick has five rows: its vertical force, its two moments about horizontal axes, and its two horizontal forces.
Moments are taken about the centre of the brick's bottom face. The horizontal forces from below and from the side act
in that plane, so they have no moment. Lengths are in stud pitches; the unit of force is the caller's choice.

Studs that connect a pair of bricks act at K contact points each. At each point the lower brick pushes the upper one
up, without limit, or pulls it down by friction with at most m. The forces on the upper brick are therefore v_k >= -m,
and their total effect is sum_k v_k w_k with w_k = (1, x_k, y_k). Substituting v_k = u_k - m with u_k >= 0 gives the
cone spanned by the w_k, shifted by -m sum_k w_k. A w_k in the interior of the convex hull of all points is a convex
combination of the hull's corners, so the corners span the same cone: at most six columns (`normals`) replace all
points exactly, and one more column stands for m (`grips`). The centroid of a stud's K points is its centre, so
sum_k w_k is the number of points times w at the centre of the overlap. No equation concerns rotation about the
vertical axis, so only the sum of a pair's horizontal forces matters: two columns (`presses`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ..structure import Structure

STUD_PITCH_M = 0.0078
HEIGHT_STUDS = 0.0096 / STUD_PITCH_M
ROWS = 5  # rows per brick, in order: vertical force, moment along x, moment along y, force along x, force along y

# Contact points of a stud with the brick above, in stud pitches from the stud's centre. Bricks one cell wide hold a
# stud on four sides; wider bricks hold it between their walls and a tube.
_WIDE = np.array([(1 / 8, -1 / 8), (-1 / 4, 0), (1 / 8, 1 / 8)])
_NARROW = np.array([(0, -1 / 4), (-1 / 4, 0), (0, 1 / 4), (1 / 4, 0)])


@dataclass(frozen=True)
class Columns:
    """Sparse entries of `count` columns. Entries in negative rows act on the ground, which needs no equation."""

    rows: np.ndarray
    columns: np.ndarray
    values: np.ndarray
    count: int


class Contacts:
    """Contacts between bricks: pairs connected by studs (`lower` is -1 for the ground) and side-by-side pairs."""

    def __init__(self, structure: Structure):
        bricks = np.array(structure.bricks, dtype=np.int64)
        sizes, low = bricks[:, :2], bricks[:, 2:4]
        high = low + sizes
        self.centres = low + (sizes - 1) / 2  # [brick, axis]; the centre of cell (0, 0) is the origin
        self.lower, self.upper = lower, upper = np.array(structure.links, dtype=np.int64).reshape(-1, 2).T
        on_ground = (lower < 0)[:, None]
        # [pair, axis]: the centre of the connecting stud with the lowest coordinates, and the number of these studs
        self.corners = np.where(on_ground, low[upper], np.maximum(low[lower], low[upper]))
        self.studs = np.where(on_ground, sizes[upper], np.minimum(high[lower], high[upper]) - self.corners)
        self.narrow = sizes[upper].min(axis=1) == 1  # [pair]: whether the upper brick is one cell wide
        # Crop the grid to the bricks: it is as large as the world, and most of it is empty.
        (x, y), (far_x, far_y) = low.min(axis=0), high.max(axis=0)
        owner = structure.owner[x:far_x, y:far_y, bricks[:, 4].min() : bricks[:, 4].max() + 1]
        self.sides = (  # per axis, [pair, 2]: adjacent bricks in the order of the axis
            _neighbours(owner[:-1], owner[1:], len(bricks)),
            _neighbours(owner[:, :-1], owner[:, 1:], len(bricks)),
        )

    def normals(self) -> Columns:
        """Columns for pushes between connected bricks, at the corners of the hull of their contact points."""
        pair, offsets = _points(self, corners_only=True)
        return self._vertical(pair, self.corners[pair] + offsets, np.ones(len(pair)), np.arange(len(pair)), len(pair))

    def frictions(self) -> tuple[Columns, np.ndarray]:
        """Columns for the friction at every contact point, and the brick above each point."""
        pair, offsets = _points(self, corners_only=False)
        columns = np.arange(len(pair))
        pulls = self._vertical(pair, self.corners[pair] + offsets, -np.ones(len(pair)), columns, len(pair))
        return pulls, self.upper[pair]

    def grips(self) -> Columns:
        """One column per brick: all contact points at its underside pull with unit friction."""
        pair = np.arange(len(self.upper))
        points = np.where(self.narrow, len(_NARROW), len(_WIDE)) * self.studs.prod(axis=1)
        middles = self.corners + (self.studs - 1) / 2
        return self._vertical(pair, middles, -points.astype(float), self.upper, len(self.centres))

    def presses(self) -> Columns:
        """Columns for horizontal forces of either sign between connected bricks, along x and then along y."""
        column, one = np.arange(len(self.upper)), np.ones(len(self.upper))
        rows, columns, values = [], [], []
        for axis in (0, 1):
            rows += [ROWS * self.upper + 3 + axis, ROWS * self.lower + 3 + axis, ROWS * self.lower + 1 + axis]
            columns += [column + axis * len(column)] * 3
            values += [one, -one, HEIGHT_STUDS * one]  # the reaction acts at the top of the lower brick: a moment
        return Columns(np.concatenate(rows), np.concatenate(columns), np.concatenate(values), 2 * len(column))

    def pushes(self) -> Columns:
        """Columns for the forces by which side-by-side bricks push each other apart."""
        first, second = np.concatenate(self.sides).T
        axis = np.repeat((0, 1), [len(pairs) for pairs in self.sides])
        column, one = np.arange(len(first)), np.ones(len(first))
        rows = np.concatenate([ROWS * first + 3 + axis, ROWS * second + 3 + axis])
        return Columns(rows, np.tile(column, 2), np.concatenate([-one, one]), len(first))

    def _vertical(
        self, pair: np.ndarray, points: np.ndarray, forces: np.ndarray, columns: np.ndarray, count: int
    ) -> Columns:
        """Columns for vertical `forces` at `points` on the upper brick of each `pair`, and their reactions."""
        rows, values = [], []
        for brick, force in ((self.upper[pair], forces), (self.lower[pair], -forces)):
            arms = points - self.centres[brick]
            rows += [ROWS * brick, ROWS * brick + 1, ROWS * brick + 2]
            values += [force, force * arms[:, 0], force * arms[:, 1]]
        return Columns(np.concatenate(rows), np.tile(columns, 6), np.concatenate(values), count)


def matrix_of(blocks: Sequence[Columns], rows: int) -> Any:
    """Stack the blocks side by side into a scipy.sparse.csc_array, summing entries at the same position."""
    from scipy import sparse

    starts = np.cumsum([0, *(block.count for block in blocks)])
    row = np.concatenate([block.rows for block in blocks])
    column = np.concatenate([block.columns + start for block, start in zip(blocks, starts, strict=False)])
    value = np.concatenate([block.values for block in blocks])
    kept = (row >= 0) & (value != 0)
    return sparse.csc_array((value[kept], (row[kept], column[kept])), shape=(rows, int(starts[-1])))


def _neighbours(first: np.ndarray, second: np.ndarray, bricks: int) -> np.ndarray:
    """Return the distinct pairs of different bricks in adjacent cells, sorted."""
    touching = (first >= 0) & (second >= 0) & (first != second)
    pairs = np.unique(first[touching].astype(np.int64) * bricks + second[touching])
    return np.stack(np.divmod(pairs, bricks), axis=1)


def _points(contacts: Contacts, corners_only: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return, for every contact point, its pair and its offset from the pair's corner stud."""
    kinds = zip(contacts.narrow.tolist(), *contacts.studs.T.tolist(), strict=True)
    offsets = [_contact_points(*kind, corners_only) for kind in kinds]
    counts = np.array([len(points) for points in offsets], dtype=np.int64)
    return np.repeat(np.arange(len(offsets)), counts), np.concatenate([np.empty((0, 2)), *offsets])


@cache
def _contact_points(narrow: bool, studs_x: int, studs_y: int, corners_only: bool) -> np.ndarray:
    studs = np.array(list(np.ndindex(studs_x, studs_y)))
    points = (studs[:, None] + (_NARROW if narrow else _WIDE)).reshape(-1, 2)
    return _hull(points) if corners_only else points


def _hull(points: np.ndarray) -> np.ndarray:
    """Return the corners of the convex hull (monotone chain algorithm)."""
    chains = []
    ordered = sorted(map(tuple, points.tolist()))
    for side in (ordered, ordered[::-1]):
        chain: list[tuple[float, ...]] = []
        for x, y in side:
            while len(chain) > 1 and (chain[-1][0] - chain[-2][0]) * (y - chain[-2][1]) <= (
                chain[-1][1] - chain[-2][1]
            ) * (x - chain[-2][0]):
                chain.pop()
            chain.append((x, y))
        chains += chain[:-1]
    return np.array(chains)
