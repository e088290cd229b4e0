"""Export of theories to SARAH model files (Name.m).

Names lose their underscores, which are pattern syntax in Mathematica. Groups that a vev breaks are expanded: the
components of fields under them are named (`sarah_components.py`). Model files have no place for numerical values, so
these are in comments of the form (* name = value *).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from .groups import U1, irrep, is_barred
from .ladders import SUPPORTED as LADDERS
from .sarah_components import component_name, component_tensor, real_components
from .theory import Fermion, MassTerm, Number, Scalar, Theory, is_real

UNVALIDATED = "This file has not been validated by SARAH itself, only by a check of its structure."
# SARAH names the indices of a group by the first three letters of its label, which must therefore differ.
PLACES = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth")


def write_sarah(theory: Theory, name: str = "Theory") -> str:
    """Return the text of the model file. ValueError for a group whose components have no form in it here."""
    if others := [group.group for group in theory.groups if group.group in LADDERS]:
        raise ValueError(
            f"SARAH files are written for SU(N) and U(1), not for {', '.join(others)}: how SARAH names the components "
            "of their representations was not available to check; use theory.tex"
        )
    if len(theory.groups) > len(PLACES):
        raise ValueError(f"a model file can have {len(PLACES)} gauge groups, but the theory has {len(theory.groups)}")
    vevs = [scalar.vev for scalar in theory.scalars if scalar.vev is not None]
    broken = [any(vev.components[i] for vev in vevs) for i in range(len(theory.groups))]
    lines = [
        f"(* {UNVALIDATED} *)",
        "Off[General::spell]",
        "",
        f'Model`Name = "{name}";',
        f'Model`NameLaTeX = "{name}";',
        "",
    ]
    lines += ["(* Gauge groups *)"]
    for n, group in enumerate(theory.groups, 1):
        kind = "U[1]" if group.group == U1 else group.group.replace("(", "[").replace(")", "]")
        label = PLACES[n - 1] + symbol(group.id)
        lines.append(f"Gauge[[{n}]] = {{V{n}, {kind}, {label}, g{n}, {broken[n - 1]}}};")
    lines += ["", "(* Matter fields *)"]
    for n, fermion in enumerate(theory.fermions, 1):
        lines.append(_field_line("FermionFields", n, theory, fermion, broken, fermion.generations))
    for n, scalar in enumerate(theory.scalars, 1):
        lines.append(_field_line("ScalarFields", n, theory, scalar, broken, 1))
    real = [scalar for scalar in theory.scalars if is_real(theory, scalar)]
    names = [name for s in real for name in real_components(theory, s, symbol(s.name), broken)]
    lines += [f"RealScalars = {{{', '.join(names)}}};", "", "NameOfStates = {GaugeES, EWSB};", ""]
    lines += [
        "DEFINITION[GaugeES][LagrangianInput] = {",
        "  {LagHC, {AddHC -> True}},",
        "  {LagNoHC, {AddHC -> False}}",
        "};",
        "",
    ]
    values: dict[str, str] = {}
    couplings, masses = [], []
    for n, term in enumerate(theory.terms, 1):
        first, second = symbol(term.first), symbol(term.second)
        if isinstance(term, MassTerm):
            couplings.append(f"M{n} {first}.{second}")
            values[f"M{n}"] = repr(term.value)
        else:
            third = f"conj[{symbol(term.scalar)}]" if term.conjugate else symbol(term.scalar)
            couplings.append(f"Y{n} {third}.{first}.{second}")
            values[f"Y{n}"] = "{" + ", ".join(map(repr, term.values)) + "}"
    for scalar in theory.scalars:
        field = symbol(scalar.name)
        masses.append(f"1/2 m2{field} {field}.{field}" if scalar in real else f"m2{field} conj[{field}].{field}")
        values[f"m{field}"] = repr(scalar.mass)
    lines += [f"LagHC = -({' + '.join(couplings) or '0'});", f"LagNoHC = -({' + '.join(masses) or '0'});", ""]
    places = []
    for scalar in theory.scalars:
        if scalar.vev is not None:
            field = symbol(scalar.name)
            waves = f"{{sigma{field}, I/Sqrt[2]}}, {{phi{field}, 1/Sqrt[2]}}"
            if scalar in real:
                waves = f"{{0, 0}}, {{phi{field}, 1}}"
            places.append(f"  {{{component_name(field, scalar.vev.components)}, {{v{field}, 1/Sqrt[2]}}, {waves}}}")
            values[f"v{field}"] = repr(scalar.vev.value)
    lines += [
        "DEFINITION[EWSB][VEVs] = {",
        ",\n".join(places),
        "};",
        "",
        "(* Values, in GeV where they have a unit *)",
    ]
    lines += [f"(* {key} = {value} *)" for key, value in values.items()]
    return "\n".join(lines) + "\n"


def symbol(name: str) -> str:
    """Return a name that is one Mathematica symbol and not a built-in (C, D, E, I, K, N and O are)."""
    bare = re.sub(r"\W|_", "", name)
    return f"{bare}field" if bare in set("CDEIKNO") else bare


def dimension_number(group: str, number: Number) -> str:
    """Return a representation's dimension, negative for the conjugate one; a charge is unchanged."""
    if isinstance(number, Fraction):
        return str(number)
    return f"{'-' if is_barred(group, number) else ''}{irrep(group, number).dimension}"


def _field_line(
    kind: str, place: int, theory: Theory, field: Fermion | Scalar, broken: Sequence[bool], copies: int
) -> str:
    numbers = [dimension_number(g.group, n) for g, n in zip(theory.groups, field.numbers, strict=True)]
    name = symbol(field.name)
    tensor = component_tensor(theory, field, name, broken)
    return f"{kind}[[{place}]] = {{{name}, {copies}, {tensor}, {', '.join(numbers)}}};"
