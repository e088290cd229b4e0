"""Components of fields under broken gauge groups, in the form that SARAH's model files have.

A component's name is that of its field and its number under each group (Hx0x2x0: second component under the second
group). A fundamental is a vector of components. Other representations are matrices: a traceless one with an upper and
a lower index for an adjoint, an antisymmetric one for an antisymmetric pair. Matrices are normalised: the squares of
their entries have the same sum as those of the components.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, permutations, product
from typing import Any

from .groups import Dynkin
from .tensors import components, kind_of, size_of
from .theory import Fermion, Scalar, Theory, is_real

# An entry of a tensor: the number of each component in it, with (n, m) for the coefficient n / Sqrt[m].
Entry = dict[int, tuple[int, int]]
SINGLET: Entry = {0: (1, 1)}


def component_name(field: str, numbers: Sequence[int]) -> str:
    return "x".join([field, *map(str, numbers)])


def component_tensor(theory: Theory, field: Fermion | Scalar, name: str, broken: Sequence[bool]) -> str:
    """Return the components of a field as nested lists, one level per index under a broken group."""
    vev = field.vev.components if isinstance(field, Scalar) and field.vev is not None else (0,) * len(broken)
    tensors: list[Any] = [SINGLET] * len(broken)
    for i, rep in _expanded(field, broken).items():
        tensors[i] = _tensor(theory.groups[i].group, rep, vev[i])

    def nested(part: Any, later: Sequence[Any], terms: list[tuple[tuple[int, ...], int, int]]) -> str:
        if isinstance(part, list):
            return f"{{{', '.join(nested(one, later, terms) for one in part)}}}"
        found = [((*c, k), n * a, m * b) for c, n, m in terms for k, (a, b) in part.items()]
        if later:
            return nested(later[0], later[1:], found)
        return " + ".join(_term(theory, field, name, *one) for one in found).replace("+ -", "- ") or "0"

    return nested(tensors[0], tensors[1:], [((), 1, 1)])


def real_components(theory: Theory, scalar: Scalar, name: str, broken: Sequence[bool]) -> list[str]:
    """Return what SARAH lists as real of a real scalar: the field, or those of its components that are real."""
    expanded = _expanded(scalar, broken)
    if not expanded:
        return [name]
    counts = [
        range(1, len(components(group.group, expanded[i])) + 1) if i in expanded else (0,)
        for i, group in enumerate(theory.groups)
    ]
    return [component_name(name, c) for c in product(*counts) if _conjugate(theory, scalar, c) == (1, c)]


def _expanded(field: Fermion | Scalar, broken: Sequence[bool]) -> dict[int, Dynkin]:
    """Return the representations of a field under the broken groups that it is charged under."""
    return {i: n for i, n in enumerate(field.numbers) if broken[i] and isinstance(n, tuple) and any(n)}


def _tensor(group: str, rep: Dynkin, vev: int) -> list[Any]:
    """Return the entries of a representation, as a vector or as a matrix."""
    n, kind = size_of(group), kind_of(group, rep)
    if kind in ("fund", "antifund"):
        return [{i: (1, 1)} for i in range(1, n + 1)]
    matrix: list[list[Entry]] = [[{} for _ in range(n)] for _ in range(n)]
    if kind == "adjoint":
        for number, (i, j) in enumerate(permutations(range(n), 2), 1):
            matrix[i][j] = {number: (1, 1)}
        for number, row in _diagonals(n, vev).items():
            for i, x in enumerate(row):
                if x:
                    matrix[i][i][number] = (x, sum(y * y for y in row))
        return matrix
    for number, (i, j) in enumerate(combinations(range(n), 2), 1):
        sign = 1
        if n == 4:  # SARAH gives this representation lower indices, which are the other two of the four
            sign, (i, j) = _others(i, j)
        matrix[i][j], matrix[j][i] = {number: (sign, 2)}, {number: (-sign, 2)}
    return matrix


def _diagonals(n: int, vev: int) -> dict[int, list[int]]:
    """Return orthogonal traceless diagonal matrices, one of which is that of the vev, by the number of the component.

    Without a vev along one of them, the last one is diag(1, ..., 1, 1 - n). See `tensors.direction` for the numbers.
    """
    first = n * (n - 1)
    p = vev - first if vev > first else n - 1
    rows = {first + k: [1] * k + [-k] for k in range(1, p)}
    common = math.gcd(p, n)
    rows[first + p] = [(n - p) // common] * p + [-p // common] * (n - p)
    rows |= {first + p + k: [0] * p + [1] * k + [-k] for k in range(1, n - p)}
    return rows


def _others(i: int, j: int) -> tuple[int, tuple[int, int]]:
    """Return the two of four indices that are neither i nor j, and the sign of the permutation of all."""
    k, l = (x for x in range(4) if x not in (i, j))
    inversions = sum(a > b for a, b in combinations((i, j, k, l), 2))
    return (-1) ** inversions, (k, l)


def _conjugate(theory: Theory, scalar: Scalar, numbers: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """Return the component of a real scalar whose complex conjugate, times the sign, is this one."""
    sign, found = 1, list(numbers)
    for place, number in enumerate(numbers):
        if not number:
            continue
        group = theory.groups[place].group
        n = size_of(group)
        if kind_of(group, scalar.numbers[place]) == "adjoint":
            pairs = list(permutations(range(n), 2))
            if number <= len(pairs):
                found[place] = pairs.index(pairs[number - 1][::-1]) + 1
        else:  # the antisymmetric pair of SU(4)
            pairs = list(combinations(range(n), 2))
            other_sign, other = _others(*pairs[number - 1])
            sign, found[place] = sign * other_sign, pairs.index(other) + 1
    return sign, tuple(found)


def _term(theory: Theory, field: Fermion | Scalar, name: str, numbers: tuple[int, ...], n: int, m: int) -> str:
    text = component_name(name, numbers)
    if isinstance(field, Scalar) and is_real(theory, field):
        sign, other = _conjugate(theory, field, numbers)
        if other < numbers:  # of two components that are conjugate to each other, only the first has a name
            text, n = f"conj[{component_name(name, other)}]", n * sign
    factor = f"{abs(n)} " if abs(n) != 1 else ""
    return f"{'-' if n < 0 else ''}{factor}{text}" + (f"/Sqrt[{m}]" if m != 1 else "")
