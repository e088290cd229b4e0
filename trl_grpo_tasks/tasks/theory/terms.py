"""The renormalisable fermion terms that a gauge symmetry allows: masses f f' and Yukawa couplings f f' phi."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from .groups import U1, Dynkin, conjugate, exchange_sign, singlets_in
from .theory import Term, Theory, integer_charges, is_real


def allowed_terms(theory: Theory) -> list[Term]:
    """Return the terms that a theory's fields allow, with zeros as values: masses first, then Yukawa couplings.

    They are in the order of their fields. The contraction must be unique: three octets can be contracted in two ways,
    so they have no term. A field with itself needs a symmetric contraction.
    """
    fermions, scalars = theory.fermions, theory.scalars
    fields: list[Any] = [*fermions, *scalars]
    groups = [(i, group.group) for i, group in enumerate(theory.groups) if group.group != U1]
    abelian = [i for i, group in enumerate(theory.groups) if group.group == U1]
    columns = [integer_charges([field.numbers[i] for field in fields])[0] for i in abelian]
    charges = [tuple([column[n] for column in columns]) for n in range(len(fields))]
    neutral = (0,) * len(abelian)
    # Partners of a pair are looked up by the charge that they must have.
    partners: dict[tuple[int, ...], list[tuple[int, bool]]] = {}
    for s, scalar in enumerate(scalars):
        charge = charges[len(fermions) + s]
        partners.setdefault(charge, []).append((s, False))
        if not is_real(theory, scalar):
            partners.setdefault(tuple([-q for q in charge]), []).append((s, True))

    masses, yukawas = [], []
    for a, first in enumerate(fermions):
        for b, second in enumerate(fermions[a:], a):
            wanted = tuple([-q - p for q, p in zip(charges[a], charges[b], strict=True)])
            zeros = (0.0,) * min(first.generations, second.generations)
            pair: list[Any] = [first.numbers, second.numbers]
            if wanted == neutral and _is_allowed(groups, pair, None, False, a == b):
                masses.append(Term(first.name, second.name, zeros))
            for s, dual in partners.get(wanted, ()):
                if _is_allowed(groups, pair, scalars[s].numbers, dual, a == b):
                    yukawas.append(Term(first.name, second.name, zeros, scalars[s].name, dual))
    return masses + yukawas


def shape_of(term: Term) -> tuple[frozenset[str], str | None, bool]:
    """Return what a term couples, whatever the order of its fermions."""
    return frozenset((term.first, term.second)), term.scalar, term.conjugate


def with_all_terms(theory: Theory) -> Theory:
    """Return the theory with its terms in canonical order, and missing ones added with value 0."""
    given = {shape_of(term): term for term in theory.terms}
    terms = []
    for term in allowed_terms(theory):
        known = given.pop(shape_of(term), term)
        terms.append(replace(term, values=known.values))
    if given:
        raise ValueError(f"this term is not gauge invariant: {next(iter(given.values()))}")
    return replace(theory, terms=tuple(terms))


def _is_allowed(groups: Sequence[tuple[int, str]], pair: Sequence[Any], scalar: Any, dual: bool, same: bool) -> bool:
    sign = 1
    for i, group in groups:
        third = None if scalar is None else scalar[i]
        if same:
            sign *= exchange_sign(group, pair[0][i], third, dual)
        else:
            sign *= _exists(group, pair[0][i], pair[1][i], third, dual)
        if not sign:
            return False
    return sign > 0


@lru_cache(8192)
def _exists(group: str, first: Dynkin, second: Dynkin, third: Dynkin | None, dual: bool) -> bool:
    others = () if third is None else (conjugate(group, third) if dual else third,)
    return singlets_in(group, (first, second, *others)) == 1
