"""Export of theories to SARAH model files (Name.m), and import of files written here.

Names lose their underscores, which are pattern syntax in Mathematica. A component's name is its field and its index
under each group (H0x2x0: second component under the second group). Groups that contain colour, and groups larger than
SU(2), are not expanded. Model files have no place for numerical values, so these are in comments of the form
(* name = value *).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from .breaking import vacuum
from .groups import U1, conjugate, irrep, reality
from .tensors import components, reps_of
from .theory import Fermion, GaugeGroup, MassTerm, Number, Scalar, Term, Theory, Vev, Yukawa, is_real

UNVALIDATED = "This file has not been validated by {} itself, only by a check of its structure."


def write_sarah(theory: Theory, name: str = "Theory") -> str:
    """Return the text of the model file."""
    held = vacuum(theory).colour
    broken = [g.group == "SU(2)" and (held is None or held[0] != i) for i, g in enumerate(theory.groups)]
    lines = [
        f"(* {UNVALIDATED.format('SARAH')} *)",
        "Off[General::spell]",
        "",
        f'Model`Name = "{name}";',
        f'Model`NameLaTeX = "{name}";',
        "",
    ]
    lines += ["(* Gauge groups *)"]
    for n, group in enumerate(theory.groups, 1):
        kind = "U[1]" if group.group == U1 else group.group.replace("(", "[").replace(")", "]")
        lines.append(f"Gauge[[{n}]] = {{V{n}, {kind}, {symbol(group.id)}, g{n}, {broken[n - 1]}}};")
    lines += ["", "(* Matter fields *)"]
    for n, fermion in enumerate(theory.fermions, 1):
        lines.append(_field_line("FermionFields", n, theory, fermion, broken, fermion.generations))
    for n, scalar in enumerate(theory.scalars, 1):
        lines.append(_field_line("ScalarFields", n, theory, scalar, broken, 1))
    real = [symbol(scalar.name) for scalar in theory.scalars if is_real(theory, scalar)]
    lines += [f"RealScalars = {{{', '.join(real)}}};", "", "NameOfStates = {GaugeES, EWSB};", ""]
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
        masses.append(f"1/2 m2{field} {field}.{field}" if field in real else f"m2{field} conj[{field}].{field}")
        values[f"m{field}"] = repr(scalar.mass)
    lines += [f"LagHC = -({' + '.join(couplings) or '0'});", f"LagNoHC = -({' + '.join(masses) or '0'});", ""]
    vevs = []
    for scalar in theory.scalars:
        if scalar.vev is not None:
            field = symbol(scalar.name)
            place = "x".join(map(str, scalar.vev.components))
            parts = f"{{v{field}, 1/Sqrt[2]}}, {{sigma{field}, I/Sqrt[2]}}, {{phi{field}, 1/Sqrt[2]}}"
            vevs.append(f"  {{{field}{place}, {parts}}}")
            values[f"v{field}"] = repr(scalar.vev.value)
    lines += ["DEFINITION[EWSB][VEVs] = {", ",\n".join(vevs), "};", "", "(* Values, in GeV where they have a unit *)"]
    lines += [f"(* {key} = {value} *)" for key, value in values.items()]
    return "\n".join(lines) + "\n"


def read_sarah(text: str) -> Theory:
    """Parse the theory in a model file that `write_sarah` wrote. Names are as in the file."""
    values = dict(re.findall(r"\(\* (\w+) = (.+?) \*\)", text))
    groups = tuple(
        GaugeGroup(id, kind.replace("[", "(").replace("]", ")"))
        for kind, id in re.findall(r"Gauge\[\[\d+\]\] = \{\w+, (\w+\[\d+\]), (\w+), \w+, \w+\};", text)
    )
    fermions = tuple(
        Fermion(name, numbers, copies) for name, copies, numbers in _read_fields("FermionFields", text, groups)
    )
    # A field's name may end in a digit, so the name of its vev tells where the component index begins.
    places = {name: at.removeprefix(name) for at, name in re.findall(r"\{(\w+), \{v(\w+), 1/Sqrt", text)}
    scalars = tuple(
        Scalar(name, numbers, float(values[f"m{name}"]), _read_vev(places.get(name), values.get(f"v{name}")))
        for name, _, numbers in _read_fields("ScalarFields", text, groups)
    )
    lagrangian = re.search(r"^LagHC = -\((.*)\);$", text, re.MULTILINE)
    if lagrangian is None:
        raise ValueError("this is not a model file written by write_sarah: it has no line 'LagHC = -(...);'")
    terms = tuple(_read_term(part, values) for part in lagrangian[1].split(" + ") if part != "0")
    return Theory(groups, fermions, scalars, terms)


def symbol(name: str) -> str:
    """Return a name that is one Mathematica symbol and not a built-in (C, D, E, I, K, N and O are)."""
    bare = re.sub(r"\W|_", "", name)
    return f"{bare}field" if bare in set("CDEIKNO") else bare


def dimension_number(group: str, number: Number) -> str:
    """Return a representation's dimension, negative for the conjugate one; a charge is unchanged."""
    if isinstance(number, Fraction):
        return str(number)
    sign = "-" if not reality(group, number) and number < conjugate(group, number) else ""
    return f"{sign}{irrep(group, number).dimension}"


def _field_line(
    kind: str, place: int, theory: Theory, field: Fermion | Scalar, broken: Sequence[bool], copies: int
) -> str:
    numbers = [dimension_number(g.group, n) for g, n in zip(theory.groups, field.numbers, strict=True)]
    names = _component_names(theory, field, broken)
    return f"{kind}[[{place}]] = {{{symbol(field.name)}, {copies}, {names}, {', '.join(numbers)}}};"


def _component_names(theory: Theory, field: Fermion | Scalar, broken: Sequence[bool]) -> str:
    """Return the components under the broken groups as nested lists; triplets of SU(2) are matrices."""
    expanded = [i for i, number in enumerate(field.numbers) if broken[i] and isinstance(number, tuple) and any(number)]

    def nested(chosen: Mapping[int, int], left: Sequence[int]) -> str:
        if not left:
            return symbol(field.name) + "x".join(str(chosen.get(i, 0)) for i in range(len(theory.groups)))
        i, *others = left
        number = field.numbers[i]
        assert isinstance(number, tuple)
        parts = [
            nested({**chosen, i: n}, others) for n in range(1, len(components(theory.groups[i].group, number)) + 1)
        ]
        if len(parts) == 2:
            return f"{{{parts[0]}, {parts[1]}}}"
        up, down, neutral = parts
        return f"{{{{{neutral}/Sqrt[2], {up}}}, {{{down}, -{neutral}/Sqrt[2]}}}}"

    return nested({}, expanded)


def _read_fields(kind: str, text: str, groups: Sequence[GaugeGroup]) -> list[tuple[str, int, tuple[Number, ...]]]:
    found = []
    for name, copies, rest in re.findall(rf"{kind}\[\[\d+\]\] = \{{(\w+), (\d+), (.*)\}};", text):
        numbers = rest.split(", ")[-len(groups) :]
        found.append(
            (name, int(copies), tuple(_read_number(g.group, n) for g, n in zip(groups, numbers, strict=True)))
        )
    return found


def _read_number(group: str, text: str) -> Number:
    if group == U1:
        return Fraction(text)
    for rep in reps_of(group).values():
        if dimension_number(group, rep) == text:
            return rep
    raise ValueError(f"{group} has no supported representation {text!r}")


def _read_vev(place: str | None, value: str | None) -> Vev | None:
    if place is None or value is None:
        return None
    return Vev(tuple(map(int, place.split("x"))), float(value))


def _read_term(text: str, values: Mapping[str, str]) -> Term:
    coupling, fields = text.split(" ")
    *scalar, first, second = fields.split(".")
    value: Any = values[coupling]
    if not scalar:
        return MassTerm(first, second, float(value))
    numbers = tuple(float(part) for part in value.strip("{}").split(", "))
    name = scalar[0].removeprefix("conj[").removesuffix("]")
    return Yukawa(first, second, name, scalar[0].startswith("conj["), numbers)
