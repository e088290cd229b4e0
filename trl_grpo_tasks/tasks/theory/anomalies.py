"""Anomaly coefficients of a theory, computed exactly: all sums are integers until the last division."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from functools import lru_cache
from math import lcm
from operator import floordiv, mul
from typing import Any

from .groups import U1, has_cubic, has_witten, irrep
from .theory import GaugeGroup, Theory, from_dict

_ZERO = Fraction(0)


def anomalies(theory: Theory | Mapping[str, Any]) -> dict[str, Fraction]:
    """Return the coefficient of every anomaly, by name; the theory is consistent if all are zero.

    With groups c = SU(3), L = SU(2) and Y = U(1) the names are c^3, c^2*Y, L^2*Y, witten:L (0 or 1), grav^2*Y, Y*Y*Y.
    """
    if isinstance(theory, Mapping):
        theory = from_dict(theory)
    factors, triples = _conditions(theory.groups)
    sizes = [fermion.generations for fermion in theory.fermions]
    simple, charges, units = {}, {}, {}
    for i, group in enumerate(theory.groups):
        column: Any = [fermion.numbers[i] for fermion in theory.fermions]
        if group.group == U1:
            # Charges are integer multiples of a unit, because fractions are slow and there are many products.
            units[i] = unit = lcm(*(charge.denominator for charge in column))
            charges[i] = [charge.numerator * (unit // charge.denominator) for charge in column]
        else:
            simple[i] = reps = [irrep(group.group, rep) for rep in column]
            sizes = [size * rep.dimension for size, rep in zip(sizes, reps, strict=True)]

    result: dict[str, Fraction] = {}
    for i, cubic, mixed, witten in factors:
        reps = simple[i]
        others = list(map(floordiv, sizes, (rep.dimension for rep in reps)))
        indices = list(map(mul, others, (rep.dynkin_index for rep in reps)))
        if cubic:
            result[cubic] = _ratio(_dot(others, (rep.cubic for rep in reps)), 1)
        for name, u in mixed:
            result[name] = _ratio(_dot(indices, charges[u]), 2 * units[u])
        if witten:
            result[witten] = _ratio(sum(indices) % 2, 1)
    for u, gravity, pairs in triples:
        once = list(map(mul, sizes, charges[u]))
        result[gravity] = _ratio(sum(once), units[u])
        for v, names in pairs:
            twice = list(map(mul, once, charges[v]))
            for name, w in names:
                result[name] = _ratio(_dot(twice, charges[w]), units[u] * units[v] * units[w])
    return result


@lru_cache(256)
def _conditions(groups: tuple[GaugeGroup, ...]) -> tuple[list[Any], list[Any]]:
    """Return the names of all conditions; an empty name is not a condition.

    A simple factor has a cubic, mixed and global one; a U(1) has the gravitational one and products of charges.
    """
    simple = [(i, group) for i, group in enumerate(groups) if group.group != U1]
    abelian = [(i, group.id) for i, group in enumerate(groups) if group.group == U1]
    factors = [
        (
            i,
            f"{group.id}^3" if has_cubic(group.group) else "",
            [(f"{group.id}^2*{name}", u) for u, name in abelian],
            f"witten:{group.id}" if has_witten(group.group) else "",
        )
        for i, group in simple
    ]
    triples = [
        (
            u,
            f"grav^2*{a}",
            [(v, [(f"{a}*{b}*{c}", w) for w, c in abelian if w >= v]) for v, b in abelian if v >= u],
        )
        for u, a in abelian
    ]
    return factors, triples


def _dot(first: Iterable[int], second: Iterable[int]) -> int:
    return sum(map(mul, first, second))


def _ratio(total: int, unit: int) -> Fraction:
    return Fraction(total, unit) if total else _ZERO
