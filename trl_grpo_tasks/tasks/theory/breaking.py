"""Symmetry breaking: the gauge group that the vevs leave unbroken, and the electric charge in it.

Vevs lie along components, so the unbroken algebra is spanned by diagonal generators and pairs E_ab, E_ba: it can be
determined exactly, without diagonalisation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import combinations

import numpy as np

from .groups import U1
from .tensors import components, direction, generator, size_of
from .theory import GaugeGroup, Number, Theory

# A diagonal generator: the entries of diag(x_1 ... x_N) for each SU(N), and one factor for each U(1).
Diagonal = tuple[tuple[Fraction, ...], ...]


@dataclass(frozen=True)
class Vacuum:
    """The unbroken gauge group. `charge` and `colour` are None unless it is exactly SU(3) x U(1)."""

    dimension: int
    unbroken: int
    charge: Diagonal | None
    colour: tuple[int, tuple[int, int, int]] | None  # the factor that contains it, and its three indices there

    @property
    def broken(self) -> int:
        return self.dimension - self.unbroken

    def charge_of(self, weights: Sequence[Sequence[int | Fraction]]) -> Fraction:
        """Return the electric charge of a component with these weights (for a U(1): its charge)."""
        if self.charge is None:
            raise ValueError(f"no electric charge: {self.unbroken} generators are unbroken, not SU(3) x U(1)")
        total = Fraction(0)
        for entries, weight in zip(self.charge, weights, strict=True):
            for x, w in zip(entries, weight, strict=True):
                if w:
                    total += x * w
        return total


def vacuum(theory: Theory) -> Vacuum:
    """Return the vacuum of a theory. Cached by groups and vevs, which most theories share."""
    vevs = tuple((s.numbers, s.vev.components) for s in theory.scalars if s.vev is not None and s.vev.value)
    return _vacuum(theory.groups, vevs)


@lru_cache(4096)
def _vacuum(groups: tuple[GaugeGroup, ...], vevs: tuple[tuple[tuple[Number, ...], tuple[int, ...]], ...]) -> Vacuum:
    sizes = [1 if g.group == U1 else size_of(g.group) for g in groups]
    dimension = sum(1 if n == 1 else n * n - 1 for n in sizes)
    pairs = [(i, a, b) for i, n in enumerate(sizes) for a, b in combinations(range(n), 2)]
    kept = [pair for pair in pairs if all(_keeps(groups, vev, pair) for vev in vevs)]

    # Diagonal generators x: traceless in each SU(N), and all vevs are neutral under them.
    offsets = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    traceless = [
        [Fraction(int(offsets[i] <= k < offsets[i + 1])) for k in range(offsets[-1])]
        for i, n in enumerate(sizes)
        if n > 1
    ]
    neutral = [[Fraction(w) for weight in _weights(groups, *vev) for w in weight] for vev in vevs]
    torus = null_space([*traceless, *neutral], offsets[-1])
    unbroken = len(torus) + 2 * len(kept)

    # The charge commutes with the non-abelian part that is left: equal entries where E_ab is unbroken.
    equal = [
        [Fraction(int(k == offsets[i] + a) - int(k == offsets[i] + b)) for k in range(offsets[-1])] for i, a, b in kept
    ]
    charges = null_space([*traceless, *neutral, *equal], offsets[-1])
    factors = {i for i, _, _ in kept}
    indices = sorted({index for _, a, b in kept for index in (a, b)})
    if unbroken != 9 or len(charges) != 1 or len(factors) != 1 or len(indices) != 3:
        return Vacuum(dimension, unbroken, None, None)
    factor = factors.pop()
    charge = tuple(tuple(charges[0][offsets[i] : offsets[i + 1]]) for i in range(len(sizes)))
    colour = (factor, (indices[0], indices[1], indices[2]))
    return Vacuum(dimension, unbroken, _normalised(charge, pairs, colour), colour)


def _keeps(
    groups: tuple[GaugeGroup, ...], vev: tuple[tuple[Number, ...], tuple[int, ...]], pair: tuple[int, int, int]
) -> bool:
    """Return whether E_ab and E_ba leave a vev unchanged."""
    i, a, b = pair
    rep, component = vev[0][i], vev[1][i]
    assert isinstance(rep, tuple)
    vector = direction(groups[i].group, rep, component or 1)
    return not any(np.abs(generator(groups[i].group, rep, *ends) @ vector).max() > 1e-9 for ends in ((a, b), (b, a)))


def _weights(
    groups: tuple[GaugeGroup, ...], numbers: tuple[Number, ...], chosen: tuple[int, ...]
) -> list[tuple[int, ...] | tuple[Fraction]]:
    """Return the weights of one component under each group; for a U(1), the charge."""
    return [
        components(group.group, number)[(component or 1) - 1] if isinstance(number, tuple) else (number,)
        for group, number, component in zip(groups, numbers, chosen, strict=True)
    ]


def _normalised(
    charge: Diagonal, pairs: Sequence[tuple[int, int, int]], colour: tuple[int, tuple[int, int, int]]
) -> Diagonal:
    """Scale the charge so that the smallest non-zero charge of a colourless gauge boson (the W) is 1.

    The sign is positive for the first such boson. Without one, the first U(1) has factor 1, or else a coloured boson
    has charge 1.
    """
    factor, indices = colour
    steps = [(charge[i][a] - charge[i][b], i == factor and bool({a, b} & set(indices))) for i, a, b in pairs]
    colourless = [step for step, coloured in steps if step and not coloured]
    abelian = [entries[0] for entries in charge if len(entries) == 1 and entries[0]]
    units = colourless or abelian[:1] or [step for step, _ in steps if step]
    unit = min(map(abs, units)) * (1 if units[0] > 0 else -1)
    return tuple(tuple(entry / unit for entry in entries) for entries in charge)


def null_space(equations: Sequence[Sequence[Fraction]], unknowns: int) -> list[list[Fraction]]:
    """Return a basis of the solutions of homogeneous linear equations, exactly."""
    rows = [list(row) for row in equations]
    pivots: list[int] = []
    for column in range(unknowns):
        place = len(pivots)
        found = next((i for i in range(place, len(rows)) if rows[i][column]), None)
        if found is None:
            continue
        rows[place], rows[found] = rows[found], rows[place]
        rows[place] = [x / rows[place][column] for x in rows[place]]
        for i, row in enumerate(rows):
            if i != place and row[column]:
                rows[i] = [x - row[column] * y for x, y in zip(row, rows[place], strict=True)]
        pivots.append(column)
    basis = []
    for free in range(unknowns):
        if free not in pivots:
            solution = [Fraction(int(k == free)) for k in range(unknowns)]
            for row, pivot in zip(rows, pivots, strict=False):
                solution[pivot] = -row[free]
            basis.append(solution)
    return basis
