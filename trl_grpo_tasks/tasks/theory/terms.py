"""The renormalisable fermion terms that a gauge symmetry allows: masses f f' and Yukawa couplings f f' phi."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from math import lcm
from typing import NamedTuple

from .groups import U1, Dynkin, conjugate, exchange_sign, singlets_in
from .theory import Fermion, MassTerm, Number, Scalar, Term, Theory, Yukawa, is_real


class Shape(NamedTuple):
    """A term without its value: indices of its fermions and its scalar (-1 for a mass term)."""

    first: int
    second: int
    scalar: int = -1
    conjugate: bool = False


def invariant_shapes(
    groups: Sequence[str], fermions: Sequence[tuple[Number, ...]], scalars: Sequence[tuple[tuple[Number, ...], bool]]
) -> list[Shape]:
    """Return all invariants: masses first, then Yukawa couplings, ordered by the indices of their fields.

    Fields are given by their quantum numbers, and scalars also by whether they are real. The contraction must be
    unique: three octets can be contracted in two ways, so they have no term. A field with itself needs a symmetric
    contraction.
    """
    abelian = [i for i, group in enumerate(groups) if group == U1]
    simple = [i for i, group in enumerate(groups) if group != U1]
    fields = [*fermions, *(numbers for numbers, _ in scalars)]
    units = [lcm(*(numbers[i].denominator for numbers in fields)) for i in abelian]  # type: ignore[union-attr]
    charges = [_charges(numbers, abelian, units) for numbers in fields]
    # Partners of a pair are looked up by the charge that they must have.
    neutral = tuple([0] * len(abelian))
    partners: dict[tuple[int, ...], list[tuple[int, bool]]] = {}
    for s, (_, real) in enumerate(scalars):
        charge = charges[len(fermions) + s]
        partners.setdefault(charge, []).append((s, False))
        if not real:
            partners.setdefault(tuple(-q for q in charge), []).append((s, True))
    names = [groups[i] for i in simple]
    reps: list[list[Dynkin]] = [[numbers[i] for i in simple] for numbers in fields]  # type: ignore[misc]

    masses, yukawas = [], []
    for a, first in enumerate(charges[: len(fermions)]):
        for b in range(a, len(fermions)):
            wanted = tuple([-q - p for q, p in zip(first, charges[b], strict=True)])
            if wanted == neutral and _allowed(names, reps[a], reps[b], None, False, a == b):
                masses.append(Shape(a, b))
            for s, dual in partners.get(wanted, ()):
                if _allowed(names, reps[a], reps[b], reps[len(fermions) + s], dual, a == b):
                    yukawas.append(Shape(a, b, s, dual))
    return masses + yukawas


def allowed_shapes(theory: Theory) -> list[Shape]:
    """Return the terms that a theory's fields allow."""
    return invariant_shapes(
        [group.group for group in theory.groups],
        [fermion.numbers for fermion in theory.fermions],
        [(scalar.numbers, is_real(theory, scalar)) for scalar in theory.scalars],
    )


def with_all_terms(theory: Theory) -> Theory:
    """Return the theory with its terms in canonical order, and missing ones added with value 0."""
    given: dict[Shape, Term] = {shape_of(theory, term): term for term in theory.terms}
    terms: list[Term] = []
    for shape in allowed_shapes(theory):
        first, second = theory.fermions[shape.first], theory.fermions[shape.second]
        term = given.pop(shape, None)
        if shape.scalar < 0:
            terms.append(MassTerm(first.name, second.name, term.value if isinstance(term, MassTerm) else 0.0))
        else:
            zeros = (0.0,) * min(first.generations, second.generations)
            values = term.values if isinstance(term, Yukawa) else zeros
            scalar = theory.scalars[shape.scalar].name
            terms.append(Yukawa(first.name, second.name, scalar, shape.conjugate, values))
    if given:
        raise ValueError(f"this term is not gauge invariant: {next(iter(given.values()))}")
    return Theory(theory.groups, theory.fermions, theory.scalars, tuple(terms))


def shape_of(theory: Theory, term: Term) -> Shape:
    """Return the shape of a term, with its fermions in order."""
    first, second = sorted((_place(theory.fermions, term.first), _place(theory.fermions, term.second)))
    if isinstance(term, MassTerm):
        return Shape(first, second)
    return Shape(first, second, _place(theory.scalars, term.scalar), term.conjugate)


def _place(fields: Sequence[Fermion | Scalar], name: str) -> int:
    names = [field.name for field in fields]
    if name not in names:
        raise ValueError(f"a term refers to {name!r}; fields of that kind are: {', '.join(names)}")
    return names.index(name)


def _charges(numbers: tuple[Number, ...], abelian: Sequence[int], units: Sequence[int]) -> tuple[int, ...]:
    charges: list[Fraction] = [numbers[i] for i in abelian]  # type: ignore[misc]
    return tuple([q.numerator * (unit // q.denominator) for q, unit in zip(charges, units, strict=True)])


def _allowed(
    groups: Sequence[str],
    first: Sequence[Dynkin],
    second: Sequence[Dynkin],
    scalar: Sequence[Dynkin] | None,
    dual: bool,
    same: bool,
) -> bool:
    sign = 1
    for i, group in enumerate(groups):
        third = None if scalar is None else scalar[i]
        if same:
            sign *= exchange_sign(group, first[i], third, dual)
        else:
            sign *= _exists(group, first[i], second[i], third, dual)
        if not sign:
            return False
    return sign > 0


@lru_cache(8192)
def _exists(group: str, first: Dynkin, second: Dynkin, third: Dynkin | None, dual: bool) -> int:
    if third is None:
        return int(singlets_in(group, (first, second)) == 1)
    return int(singlets_in(group, (first, second, conjugate(group, third) if dual else third)) == 1)
