"""Export of theories to PyR@TE 3 model files (YAML), and one-loop beta functions for comparison with its results."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from .groups import U1, algebra, irrep
from .sarah import UNVALIDATED, dimension_number, symbol
from .theory import Fermion, MassTerm, Scalar, Theory, is_real


def one_loop(theory: Theory) -> dict[str, Fraction]:
    """Return the coefficient b of each gauge coupling, dg/dt = b g^3 / (16 pi^2), without rescaling U(1) charges.

    For the Standard Model: 41/6 (41/10 with the SU(5) normalisation), -19/6, -7.
    """
    result = {}
    for i, group in enumerate(theory.groups):
        total = Fraction(0)
        if group.group != U1:
            # The index of the adjoint is the dual Coxeter number; gauge bosons contribute 11/3 of it.
            total -= Fraction(11, 3) * _adjoint_index(group.group)
        for fermion in theory.fermions:
            total += Fraction(2, 3) * fermion.generations * _index(theory, fermion, i)
        for scalar in theory.scalars:
            total += Fraction(1, 6 if is_real(theory, scalar) else 3) * _index(theory, scalar, i)
        result[group.id] = total
    return result


def write_pyrate(theory: Theory, name: str = "Theory") -> str:
    """Return the text of the model file. Contractions are Clebsch-Gordan tensors computed by PyR@TE."""
    lines = [
        "# YAML 1.1",
        f"# {UNVALIDATED.format('PyR@TE')}",
        "---",
        "Author: trl_grpo_tasks",
        "Date: ''",
        f"Name: {symbol(name)}",
    ]
    groups = ", ".join(f"{symbol(g.id)}: {g.group.replace('(', '').replace(')', '')}" for g in theory.groups)
    lines += [f"Groups: {{{groups}}}", "", "Fermions: {"]
    lines += [f"    {symbol(f.name)}: {{Gen: {f.generations}, Qnb: {_qnb(theory, f)}}}," for f in theory.fermions]
    lines += ["}", "", "RealScalars: {"]
    lines += [f"    {symbol(s.name)}: {{Qnb: {_qnb(theory, s)}}}," for s in theory.scalars if is_real(theory, s)]
    lines += ["}", "", "ComplexScalars: {"]
    for scalar in theory.scalars:
        if not is_real(theory, scalar):
            field = symbol(scalar.name)
            parts = f"RealFields: [{field}Re, {field}Im], Norm: 1/sqrt(2)"
            lines.append(f"    {field}: {{{parts}, Qnb: {_qnb(theory, scalar)}}},")
    lines += ["}", "", "Potential: {", ""]
    definitions: list[str] = []
    yukawas: list[str] = []
    masses: list[str] = []
    for n, term in enumerate(theory.terms, 1):
        names = [symbol(term.first), symbol(term.second)]
        fields = [theory.fermion(term.first), theory.fermion(term.second)]
        scalars: list[Scalar] = []
        if not isinstance(term, MassTerm):
            scalars = [theory.scalar(term.scalar)]
            names.append(symbol(term.scalar) + ("bar" if term.conjugate else ""))
        made, text = _contraction(theory, n, names, [*fields, *scalars])
        definitions += made
        (yukawas if scalars else masses).append(f"        {'Y' if scalars else 'M'}{n}: '{text}',")
    squares = []
    for scalar in theory.scalars:
        field, indices = symbol(scalar.name), _indices(theory, scalar, 0)
        if is_real(theory, scalar):
            squares.append(f"        m{field}: '1/2 * {field}{indices} {field}{indices}',")
        else:
            squares.append(f"        m{field}: '{field}bar{indices} {field}{indices}',")
    for block, entries in (
        ("Definitions", definitions),
        ("Yukawas", yukawas),
        ("FermionMasses", masses),
        ("ScalarMasses", squares),
    ):
        lines += [f"    {block}: {{", *entries, "    },", ""]
    return "\n".join([*lines, "}"]) + "\n"


def _contraction(
    theory: Theory, number: int, names: Sequence[str], fields: Sequence[Fermion | Scalar]
) -> tuple[list[str], str]:
    """Return the tensors of a term, one per group under which it is not only singlets, and the term itself."""
    definitions, tensors = [], []
    for i, group in enumerate(theory.groups):
        taking = [n for n, field in enumerate(fields) if _is_charged(field, i)]
        if group.group != U1 and taking:
            tensor = f"C{number}{symbol(group.id)}"
            definitions.append(f"        {tensor}: 'cgc({symbol(group.id)}, {', '.join(names[n] for n in taking)})',")
            tensors.append(f"{tensor}[{','.join(_index_name(n, i) for n in taking)}]")
    factors = [name + _indices(theory, field, n) for n, (name, field) in enumerate(zip(names, fields, strict=True))]
    return definitions, " ".join([*tensors, *factors])


def _indices(theory: Theory, field: Fermion | Scalar, place: int) -> str:
    names = [_index_name(place, i) for i in range(len(theory.groups)) if _is_charged(field, i)]
    return f"[{','.join(names)}]" if names else ""


def _index_name(place: int, group: int) -> str:
    return f"{'ijk'[place]}{group + 1}"


def _is_charged(field: Fermion | Scalar, i: int) -> bool:
    number = field.numbers[i]
    return isinstance(number, tuple) and any(number)


def _qnb(theory: Theory, field: Fermion | Scalar) -> str:
    entries = [
        f"{symbol(group.id)}: {dimension_number(group.group, number)}"
        for group, number in zip(theory.groups, field.numbers, strict=True)
    ]
    return f"{{{', '.join(entries)}}}"


def _index(theory: Theory, field: Fermion | Scalar, i: int) -> Fraction:
    """Return the index under one group (for a U(1), the squared charge) times the dimension under the others."""
    result = Fraction(1)
    for j, (group, number) in enumerate(zip(theory.groups, field.numbers, strict=True)):
        if not isinstance(number, tuple):
            result *= number**2 if i == j else 1
        else:
            rep = irrep(group.group, number)
            result *= rep.index_t if i == j else rep.dimension
    return result


def _adjoint_index(group: str) -> Fraction:
    highest = max(algebra(group).positive_roots, key=sum)
    rows = algebra(group).simple_roots
    labels = tuple(sum(k * row[j] for k, row in zip(highest, rows, strict=True)) for j in range(len(rows)))
    return irrep(group, labels).index_t
