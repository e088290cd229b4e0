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
from math import gcd, lcm

from .examples import NAMES, named
from .groups import U1, algebra, conjugate
from .theory import Fermion, Number, Scalar, Theory

# Integers for a U(1), Dynkin labels for a simple group.
Entry = int | tuple[int, ...]
Form = tuple[tuple[str, ...], tuple, tuple]


def canonical(theory: Theory) -> Form:
    """Return groups, fermions with their generations, and scalars, in the smallest of all equivalent forms."""
    groups = [group.group for group in theory.groups]
    fields: list[Fermion | Scalar] = [*theory.fermions, *theory.scalars]
    units = [_unit([field.numbers[i] for field in fields]) for i in range(len(groups))]
    fermions: Counter[tuple[Entry, ...]] = Counter()
    for fermion in theory.fermions:
        fermions[_scaled(fermion.numbers, units)] += fermion.generations
    scalars = Counter((_scaled(s.numbers, units), s.vev is not None) for s in theory.scalars)
    forms = []
    for order, flips in _renamings(groups):
        matter = [(_renamed(groups, numbers, order, flips), n) for numbers, n in fermions.items()]
        higgs: Counter[tuple] = Counter()
        for (numbers, vev), n in scalars.items():
            higgs[min(_both(groups, numbers, order, flips)), vev] += n
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


def _unit(column: Sequence[Number]) -> Fraction:
    """Return the largest unit of which all charges of a U(1) are integer multiples; 0 if all charges are 0."""
    charges = [number for number in column if isinstance(number, Fraction) and number]
    if not charges:
        return Fraction(0)
    return Fraction(gcd(*(q.numerator for q in charges)), lcm(*(q.denominator for q in charges)))


def _scaled(numbers: Sequence[Number], units: Sequence[Fraction]) -> tuple[Entry, ...]:
    return tuple(
        [n if isinstance(n, tuple) else int(n / unit) if unit else 0 for n, unit in zip(numbers, units, strict=True)]
    )


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
    if group == U1:
        return True
    lie = algebra(group)
    return (lie.series == "A" and lie.rank > 1) or (lie.series == "D" and lie.rank % 2 == 1) or lie.series == "E"


def _renamed(
    groups: Sequence[str], numbers: Sequence[Entry], order: Sequence[int], flips: Sequence[bool]
) -> tuple[Entry, ...]:
    return tuple([_conjugated(groups[i], numbers[i]) if flips[i] else numbers[i] for i in order])


def _both(
    groups: Sequence[str], numbers: Sequence[Entry], order: Sequence[int], flips: Sequence[bool]
) -> list[tuple[Entry, ...]]:
    """Return a scalar's numbers and those of its conjugate."""
    return [
        _renamed(groups, numbers, order, flips),
        _renamed(groups, numbers, order, [not flip for flip in flips]),
    ]


def _conjugated(group: str, entry: Entry) -> Entry:
    return conjugate(group, entry) if isinstance(entry, tuple) else -entry
