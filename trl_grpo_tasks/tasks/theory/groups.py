"""Exact group theory of simple gauge groups: dimensions, indices, cubic coefficients, weights and products.

A representation is the tuple of its Dynkin labels in Bourbaki's order. Long roots have squared length 2, so
T(fundamental of SU(N)) = 1/2, T(vector of SO(N)) = 1, T(27 of E6) = 3, and A(fundamental of SU(N)) = 1.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from math import prod
from typing import NamedTuple

Dynkin = tuple[int, ...]
U1 = "U(1)"
_CACHE = 4096


class Algebra(NamedTuple):
    """A simple Lie algebra. Roots are given by their coefficients in terms of the simple roots."""

    series: str
    rank: int
    dimension: int
    half_lengths: tuple[Fraction, ...]  # half the squared length of each simple root: 1 if it is long
    simple_roots: tuple[Dynkin, ...]  # their Dynkin labels: the rows of the Cartan matrix
    positive_roots: tuple[tuple[int, ...], ...]
    metric: tuple[tuple[Fraction, ...], ...]  # scalar products of the fundamental weights


class Irrep(NamedTuple):
    """The properties of a representation that enter anomaly coefficients."""

    dimension: int
    dynkin_index: int  # 2 T(R), which is always an integer
    cubic: int  # A(R); 0 for groups without a cubic invariant


@lru_cache(_CACHE)
def algebra(group: str) -> Algebra:
    """Return the Lie algebra of "SU(5)", "SO(10)", "Sp(4)" or "E6"."""
    series, rank = _series(group)
    edges = _edges(series, rank)
    half = [Fraction(1)] * rank
    if series == "B":
        half[-1] = Fraction(1, 2)
    if series == "C":
        half[:-1] = [Fraction(1, 2)] * (rank - 1)
    cartan = [[2 * int(i == j) for j in range(rank)] for i in range(rank)]
    for i, j in edges:
        # <a_i, a_j> is minus half the longer squared length; labels divide by half that of their own root.
        product = -max(half[i], half[j])
        cartan[i][j], cartan[j][i] = int(product / half[j]), int(product / half[i])
    roots = _positive_roots(cartan)
    # The columns of the inverse Cartan matrix C: the solutions (x, e_i) of C x - e_i = 0.
    equations = [[*map(Fraction, row), *(Fraction(-(i == j)) for j in range(rank))] for i, row in enumerate(cartan)]
    inverse = null_space(equations, 2 * rank)
    metric = tuple(tuple(inverse[i][j] * half[i] for j in range(rank)) for i in range(rank))
    return Algebra(series, rank, rank + 2 * len(roots), tuple(half), tuple(map(tuple, cartan)), roots, metric)


@lru_cache(_CACHE)
def irrep(group: str, rep: Dynkin) -> Irrep:
    """Return dimension, index and cubic coefficient of a representation."""
    lie = algebra(group)
    check_rep(group, rep)
    top = bottom = Fraction(1)
    for root in lie.positive_roots:
        top *= sum(k * d * (label + 1) for k, d, label in zip(root, lie.half_lengths, rep, strict=True))
        bottom *= sum(k * d for k, d in zip(root, lie.half_lengths, strict=True))
    dimension = int(top / bottom)
    casimir = inner(group, rep, tuple(label + 2 for label in rep)) / 2
    dynkin_index = 2 * dimension * casimir / lie.dimension
    assert dynkin_index.denominator == 1
    return Irrep(dimension, int(dynkin_index), _cubic(lie, rep, dimension))


def has_cubic(group: str) -> bool:
    """Return whether the group can have a cubic anomaly: SU(N) with N >= 3, and SO(6), which is SU(4)."""
    lie = algebra(group)
    return (lie.series == "A" and lie.rank > 1) or (lie.series == "D" and lie.rank == 3)


def has_witten(group: str) -> bool:
    """Return whether the group can have a global (Witten) anomaly: SU(2), Sp(2n), and SO(5), which is Sp(4)."""
    lie = algebra(group)
    return lie.series == "C" or (lie.series, lie.rank) in (("A", 1), ("B", 2))


def conjugate(group: str, rep: Dynkin) -> Dynkin:
    """Return the complex conjugate representation."""
    lie = algebra(group)
    if lie.series == "A":
        return rep[::-1]
    if lie.series == "D" and lie.rank % 2:
        return (*rep[:-2], rep[-1], rep[-2])
    if lie.series == "E":
        return rep[5], rep[1], rep[4], rep[3], rep[2], rep[0]
    return rep


def is_barred(group: str, rep: Dynkin) -> bool:
    """Return whether a representation is by convention the conjugate one of its pair: 3bar, 10bar, 16bar, 27bar.

    >>> is_barred("SO(10)", (0, 0, 0, 1, 0)), is_barred("SU(3)", (1, 0)), is_barred("SU(2)", (1,))
    (True, False, False)
    """
    other = conjugate(group, rep)
    return rep > other if algebra(group).series == "D" else rep < other


@lru_cache(_CACHE)
def reality(group: str, rep: Dynkin) -> int:
    """Return 1 for a real representation, -1 for a pseudoreal one, 0 for a complex one."""
    if conjugate(group, rep) != rep:
        return 0
    lie = algebra(group)
    steps = sum(
        2 * label * lie.metric[j][i] / lie.half_lengths[j] for i, label in enumerate(rep) for j in range(lie.rank)
    )
    return -1 if steps % 2 else 1  # the number of steps from the highest weight to the lowest


def trivial(group: str) -> Dynkin:
    """Return the singlet."""
    return (0,) * algebra(group).rank


def inner(group: str, first: Sequence[int], second: Sequence[int]) -> Fraction:
    """Return the scalar product of two weights given by their Dynkin labels."""
    metric = algebra(group).metric
    terms = (a * b * metric[i][j] for i, a in enumerate(first) if a for j, b in enumerate(second) if b)
    return sum(terms, Fraction(0))


@lru_cache(_CACHE)
def weights(group: str, rep: Dynkin) -> dict[Dynkin, int]:
    """Return all weights of a representation with their multiplicities, by Freudenthal's recursion."""
    lie = algebra(group)
    check_rep(group, rep)
    labels = [_combine(root, lie.simple_roots) for root in lie.positive_roots]
    rho = (1,) * lie.rank
    shifted = [a + b for a, b in zip(rep, rho, strict=True)]
    highest = inner(group, shifted, shifted)
    found = {rep: 1}
    level = [rep]
    while level:
        below = dict.fromkeys(minus(weight, root) for weight in level for root in lie.simple_roots)
        level = []
        for weight in below:
            if weight in found:
                continue
            shifted = [a + b for a, b in zip(weight, rho, strict=True)]
            gap = highest - inner(group, shifted, shifted)
            total = Fraction(0)
            for root in labels:
                above = plus(weight, root)
                while above in found:
                    total += found[above] * inner(group, above, root)
                    above = plus(above, root)
            if total:
                found[weight] = int(2 * total / gap)
                level.append(weight)
    return found


@lru_cache(_CACHE)
def product(group: str, first: Dynkin, second: Dynkin) -> dict[Dynkin, int]:
    """Decompose the product of two representations, with multiplicities (Klimyk's formula)."""
    if irrep(group, first).dimension > irrep(group, second).dimension:
        first, second = second, first
    return _content(group, {plus(weight, second): n for weight, n in weights(group, first).items()})


@lru_cache(_CACHE)
def exchange_sign(group: str, rep: Dynkin, third: Dynkin | None = None, dual: bool = False) -> int:
    """Return 1 if the invariant of two `rep` (and a third, conjugated if `dual`) is symmetric in the two, -1 if it is
    antisymmetric, 0 if there is none or more than one."""
    if third is None:
        return reality(group, rep)
    partner = third if dual else conjugate(group, third)
    if product(group, rep, rep).get(partner) != 1:
        return 0
    # The symmetric minus the antisymmetric part of a square has each weight of `rep` twice as large.
    return _content(group, {tuple(2 * x for x in weight): n for weight, n in weights(group, rep).items()})[partner]


def _content(group: str, shifted: dict[Dynkin, int]) -> dict[Dynkin, int]:
    """Return the representations in a sum of weights, with multiplicities.

    A weight shifted by rho is reflected into the dominant chamber; on a wall it does not contribute.
    """
    simple_roots = algebra(group).simple_roots
    content: dict[Dynkin, int] = {}
    for weight, multiplicity in shifted.items():
        labels = [label + 1 for label in weight]
        sign = 1
        while min(labels) < 0:
            i = next(i for i, label in enumerate(labels) if label < 0)
            times = labels[i]
            labels = [label - times * root for label, root in zip(labels, simple_roots[i], strict=True)]
            sign = -sign
        if 0 not in labels:
            rep = tuple(label - 1 for label in labels)
            content[rep] = content.get(rep, 0) + sign * multiplicity
    return {rep: count for rep, count in content.items() if count}


@lru_cache(_CACHE)
def singlets_in(group: str, reps: tuple[Dynkin, ...]) -> int:
    """Return the number of independent invariants in the product of one to three representations."""
    first, second, third, *_ = (*reps, trivial(group), trivial(group))
    return product(group, first, second).get(conjugate(group, third), 0)


def check_rep(group: str, rep: Dynkin) -> None:
    rank = algebra(group).rank
    if len(rep) != rank or any(label < 0 or not isinstance(label, int) for label in rep):
        raise ValueError(f"a representation of {group} has {rank} non-negative Dynkin labels; got {list(rep)}")


# ---- algebras


def _series(group: str) -> tuple[str, int]:
    if group == "E6":
        return "E", 6
    match = re.fullmatch(r"(SU|SO|Sp)\((\d{1,2})\)", group)
    family, n = (match[1], int(match[2])) if match else ("", 0)
    if family == "SU" and n >= 2:
        return "A", n - 1
    if family == "SO" and n >= 5:
        return ("B" if n % 2 else "D"), n // 2
    if family == "Sp" and n >= 2 and n % 2 == 0:
        return ("C", n // 2) if n > 2 else ("A", 1)
    small = {"SO(3)": "; write SU(2)", "SO(4)": "; write SU(2) twice", U1: " (it is not a simple group)"}
    raise ValueError(
        f"unknown group {group!r}{small.get(group, '')}; groups are: SU(N) from 2, SO(N) from 5, Sp(2n), E6, and U(1)"
    )


def _edges(series: str, rank: int) -> list[tuple[int, int]]:
    """Return the pairs of simple roots that are connected in the Dynkin diagram."""
    if series == "E":
        return [(0, 2), (2, 3), (3, 4), (4, 5), (1, 3)]
    if series == "D":
        return [*((i, i + 1) for i in range(rank - 2)), (rank - 3, rank - 1)]
    return [(i, i + 1) for i in range(rank - 1)]


def _positive_roots(cartan: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    rank = len(cartan)
    simple = [tuple(int(i == j) for j in range(rank)) for i in range(rank)]
    roots = list(simple)
    known = set(roots)
    for root in roots:  # the list grows during the loop
        labels = _combine(root, cartan)
        for i, step in enumerate(simple):
            below, length = minus(root, step), 0
            while below in known:
                below, length = minus(below, step), length + 1
            above = plus(root, step)
            if length > labels[i] and above not in known:
                roots.append(above)
                known.add(above)
    return tuple(roots)


def _cubic(lie: Algebra, rep: Dynkin, dimension: int) -> int:
    if lie.series == "D" and lie.rank == 3:
        rep = (rep[1], rep[0], rep[2])  # the diagram of SO(6) is that of SU(4) with its middle root first
    elif lie.series != "A" or lie.rank == 1:
        return 0
    n = len(rep) + 1
    rows = [sum(rep[i:]) for i in range(n)]
    centred = [row - Fraction(sum(rows), n) + Fraction(n + 1, 2) - j for j, row in enumerate(rows, 1)]
    cubic = 2 * n * dimension * sum((s**3 for s in centred), Fraction(0)) / ((n * n - 1) * (n * n - 4))
    assert cubic.denominator == 1
    return int(cubic)


def _combine(counts: Sequence[int], vectors: Sequence[Sequence[int]]) -> Dynkin:
    return tuple(sum(map(prod, zip(counts, column, strict=True))) for column in zip(*vectors, strict=True))


def plus(first: Dynkin, second: Dynkin) -> Dynkin:
    return tuple(a + b for a, b in zip(first, second, strict=True))


def minus(first: Dynkin, second: Dynkin) -> Dynkin:
    return tuple(a - b for a, b in zip(first, second, strict=True))


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
