"""Symmetry breaking: the gauge group that the vevs leave unbroken, and the electric charge in it.

Vevs lie along components, so the unbroken algebra is spanned by diagonal generators and those of pairs of opposite
roots: it can be determined exactly, without diagonalisation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import combinations

import numpy as np

from .groups import U1, algebra, null_space
from .tensors import Root, colour_label, components, coordinates, direction, generator, opposite, positive_roots
from .theory import GaugeGroup, Number, Theory

# A diagonal generator: its coordinates for each simple group (see `tensors`), and one factor for each U(1).
Diagonal = tuple[tuple[Fraction, ...], ...]


@dataclass(frozen=True)
class Vacuum:
    """The unbroken gauge group. `charge` and `colour` are None unless it is exactly SU(3) x U(1)."""

    dimension: int
    unbroken: int
    charge: Diagonal | None
    colour: tuple[int, tuple[Root, Root]] | None  # the factor that contains it, and its simple roots there

    def charge_of(self, weights: Sequence[Sequence[int | Fraction]]) -> Fraction:
        """Return the electric charge of a component with these weights (for a U(1): its charge)."""
        assert self.charge is not None
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
    sizes = [1 if g.group == U1 else coordinates(g.group) for g in groups]
    dimension = sum(1 if g.group == U1 else algebra(g.group).dimension for g in groups)
    pairs = [(i, root) for i, g in enumerate(groups) if g.group != U1 for root in positive_roots(g.group)]
    kept = [pair for pair in pairs if all(_keeps(groups, vev, *pair) for vev in vevs)]

    # Diagonal generators x: traceless in each SU(N), and all vevs are neutral under them.
    offsets = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    traceless = [
        [Fraction(int(offsets[i] <= k < offsets[i + 1])) for k in range(offsets[-1])]
        for i, g in enumerate(groups)
        if g.group.startswith("SU")
    ]
    neutral = [[Fraction(w) for weight in _weights(groups, *vev) for w in weight] for vev in vevs]
    torus = null_space([*traceless, *neutral], offsets[-1])
    unbroken = len(torus) + 2 * len(kept)

    # The charge commutes with the non-abelian part that is left.
    commuting = [
        [Fraction(x) for x in (*[0] * offsets[i], *root, *[0] * (offsets[-1] - offsets[i + 1]))] for i, root in kept
    ]
    charges = null_space([*traceless, *neutral, *commuting], offsets[-1])
    simple = _simple_roots_of_su3([root for _, root in kept])
    if unbroken != 9 or len(charges) != 1 or len({i for i, _ in kept}) != 1 or simple is None:
        return Vacuum(dimension, unbroken, None, None)
    charge = tuple(tuple(charges[0][offsets[i] : offsets[i + 1]]) for i in range(len(sizes)))
    colour = (kept[0][0], simple)
    return Vacuum(dimension, unbroken, _normalised(groups, charge, pairs, colour), colour)


def _simple_roots_of_su3(roots: Sequence[Root]) -> tuple[Root, Root] | None:
    """Return the two of three positive roots whose sum is the third, or None if they are not those of SU(3)."""
    for first, second in combinations(roots, 2):
        if len(roots) == 3 and tuple([a + b for a, b in zip(first, second, strict=False)]) in roots:
            return first, second
    return None


def _keeps(
    groups: tuple[GaugeGroup, ...], vev: tuple[tuple[Number, ...], tuple[int, ...]], i: int, root: Root
) -> bool:
    """Return whether the generators of a root and its opposite leave a vev unchanged."""
    rep, component = vev[0][i], vev[1][i]
    assert isinstance(rep, tuple)
    vector = direction(groups[i].group, rep, component or 1)
    return not any(np.abs(generator(groups[i].group, rep, r) @ vector).max() > 1e-9 for r in (root, opposite(root)))


def _weights(
    groups: tuple[GaugeGroup, ...], numbers: tuple[Number, ...], chosen: tuple[int, ...]
) -> list[tuple[int, ...] | tuple[Fraction]]:
    """Return the weights of one component under each group; for a U(1), the charge."""
    return [
        components(group.group, number)[(component or 1) - 1] if isinstance(number, tuple) else (number,)
        for group, number, component in zip(groups, numbers, chosen, strict=True)
    ]


def _normalised(
    groups: Sequence[GaugeGroup],
    charge: Diagonal,
    pairs: Sequence[tuple[int, Root]],
    colour: tuple[int, tuple[Root, Root]],
) -> Diagonal:
    """Scale the charge so that the smallest non-zero charge of a colourless gauge boson (the W) is 1.

    The sign is positive for the first such boson. Without one, the first U(1) has factor 1, or else a coloured boson
    has charge 1.
    """
    factor, simple = colour
    steps = []
    for i, root in pairs:
        step = sum((x * w for x, w in zip(charge[i], root, strict=True)), Fraction(0))
        steps.append((step, i == factor and any(colour_label(groups[i].group, root, one) for one in simple)))
    colourless = [step for step, coloured in steps if step and not coloured]
    abelian = [entries[0] for entries in charge if len(entries) == 1 and entries[0]]
    units = colourless or abelian[:1] or [step for step, _ in steps if step]
    unit = min(map(abs, units)) * (1 if units[0] > 0 else -1)
    return tuple(tuple(entry / unit for entry in entries) for entries in charge)
