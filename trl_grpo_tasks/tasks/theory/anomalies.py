"""Anomaly coefficients of a theory, computed exactly: all sums are integers until the last division."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from itertools import combinations_with_replacement
from operator import mul
from typing import Any

from .groups import U1, has_cubic, has_witten, irrep
from .theory import Theory, from_dict, integer_charges


def anomalies(theory: Theory | Mapping[str, Any]) -> dict[str, Fraction]:
    """Return the coefficient of every anomaly, by name; the theory is consistent if all are zero.

    With groups c = SU(3), L = SU(2) and Y = U(1) the names are c^3, c^2*Y, L^2*Y, witten:L (0 or 1), grav^2*Y, Y*Y*Y.
    """
    if isinstance(theory, Mapping):
        theory = from_dict(theory)
    sizes = [fermion.generations for fermion in theory.fermions]
    simple, abelian = [], []
    for i, group in enumerate(theory.groups):
        column: Any = [fermion.numbers[i] for fermion in theory.fermions]
        if group.group == U1:
            abelian.append((group.id, *integer_charges(column)))
        else:
            reps = [irrep(group.group, rep) for rep in column]
            simple.append((group, reps))
            sizes = [size * rep.dimension for size, rep in zip(sizes, reps, strict=True)]

    result: dict[str, Fraction] = {}
    for group, reps in simple:
        others = [size // rep.dimension for size, rep in zip(sizes, reps, strict=True)]
        indices = [other * rep.dynkin_index for other, rep in zip(others, reps, strict=True)]
        if has_cubic(group.group):
            result[f"{group.id}^3"] = Fraction(_dot(others, (rep.cubic for rep in reps)))
        for name, charges, unit in abelian:
            result[f"{group.id}^2*{name}"] = Fraction(_dot(indices, charges), 2 * unit)
        if has_witten(group.group):
            result[f"witten:{group.id}"] = Fraction(sum(indices) % 2)
    for place, (a, first, unit_a) in enumerate(abelian):
        once = list(map(mul, sizes, first))
        result[f"grav^2*{a}"] = Fraction(sum(once), unit_a)
        for (b, second, unit_b), (c, third, unit_c) in combinations_with_replacement(abelian[place:], 2):
            result[f"{a}*{b}*{c}"] = Fraction(_dot(map(mul, once, second), third), unit_a * unit_b * unit_c)
    return result


def _dot(first: Iterable[int], second: Iterable[int]) -> int:
    return sum(map(mul, first, second))
