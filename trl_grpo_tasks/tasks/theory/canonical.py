"""Canonical form of a theory, equal for theories that differ only in how their content is written.

It does not depend on the order of fields and groups, on how generations of equal fields are grouped, on the scale of
each U(1) charge, on which of two conjugate representations is called fundamental, or on replacing a scalar by its
conjugate. It ignores the values of couplings, vevs and masses, but not whether a scalar has a vev.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import cache
from itertools import permutations, product
from math import gcd
from typing import Any

from .examples import NAMES, named
from .groups import U1, algebra, conjugate
from .theory import Theory, conjugate_number, integer_charges

# Integers for a U(1), Dynkin labels for a simple group.
Entry = int | tuple[int, ...]
Form = tuple[tuple[str, ...], tuple, tuple]


def canonical(theory: Theory) -> Form:
    """Return groups, fermions with their generations, and scalars, in the smallest of all equivalent forms."""
    groups = [group.group for group in theory.groups]
    fields: list[Any] = [*theory.fermions, *theory.scalars]
    columns: list[list[Any]] = []
    for i, group in enumerate(groups):
        column = [field.numbers[i] for field in fields]
        columns.append(_in_units(column) if group == U1 else column)
    rows = list(zip(*columns, strict=True))
    fermions: Counter[tuple[Entry, ...]] = Counter()
    for fermion, numbers in zip(theory.fermions, rows, strict=False):
        fermions[numbers] += fermion.generations
    vevs = [scalar.vev is not None for scalar in theory.scalars]
    scalars = Counter(zip(rows[len(theory.fermions) :], vevs, strict=True))
    forms = []
    for order, flips in _renamings(groups):
        others = [not flip for flip in flips]
        matter = [(_renamed(groups, numbers, order, flips), n) for numbers, n in fermions.items()]
        higgs: Counter[tuple] = Counter()
        for (numbers, vev), n in scalars.items():
            higgs[min(_renamed(groups, numbers, order, one) for one in (flips, others)), vev] += n
        forms.append((tuple(sorted(matter)), tuple(sorted(higgs.items()))))
    return tuple(sorted(groups)), *min(forms)


def digest(theory: Theory) -> str:
    """Return a short hash of the canonical form."""
    return hashlib.sha256(repr(canonical(theory)).encode()).hexdigest()[:16]


def rediscovered(key: str) -> str | None:
    """Return the name of the known theory with this digest, or None."""
    return _named_digests().get(key)


@cache
def _named_digests() -> dict[str, str]:
    return {digest(named(name)): name for name in NAMES}


def _in_units(charges: Sequence[Fraction]) -> list[int]:
    """Return charges as multiples of the largest unit that they share."""
    multiples, _ = integer_charges(charges)
    unit = gcd(*multiples) or 1
    return [multiple // unit for multiple in multiples]


def _renamings(groups: Sequence[str]) -> Iterator[tuple[tuple[int, ...], tuple[bool, ...]]]:
    """Generate every order of the groups that sorts their names, with every choice of groups to conjugate."""
    kinds = sorted(set(groups))
    places = [[i for i, group in enumerate(groups) if group == kind] for kind in kinds]
    flips = [(False, True) if _has_complex(group) else (False,) for group in groups]
    for chosen in product(*(permutations(part) for part in places)):
        order = tuple(i for part in chosen for i in part)
        for flip in product(*flips):
            yield order, flip


@cache
def _has_complex(group: str) -> bool:
    """Return whether the group has charges or representations that conjugation changes."""
    labels = () if group == U1 else tuple(range(algebra(group).rank))
    return group == U1 or conjugate(group, labels) != labels


def _renamed(
    groups: Sequence[str], numbers: Sequence[Entry], order: Sequence[int], flips: Sequence[bool]
) -> tuple[Entry, ...]:
    return tuple([conjugate_number(groups[i], numbers[i]) if flips[i] else numbers[i] for i in order])
