"""Export of theories to SARAH model files (Name.m).

Names lose their underscores, which are pattern syntax in Mathematica. Groups that a vev breaks are expanded: the
components of fields under them are named (`sarah_components.py`). Model files have no place for numerical values, so
these are in comments of the form (* name = value *).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from .groups import irrep, is_barred
from .ladders import SUPPORTED as LADDERS
from .sarah_components import component_name, component_tensor, real_components
from .theory import Fermion, Scalar, Theory, is_real

# SARAH names the indices of a group by the first three letters of its label, which must therefore differ.
PLACES = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth")


def write_sarah(theory: Theory, name: str = "Theory") -> str:
    """Return the text of the model file. ValueError for a group whose components have no form in it here."""
    if others := [group.group for group in theory.groups if group.group in LADDERS]:
        raise ValueError(
            f"SARAH files are written for SU(N) and U(1), not for {', '.join(others)}: how SARAH names the components "
            "of their representations was not available to check; use theory.tex"
        )
    vevs = [scalar.vev for scalar in theory.scalars if scalar.vev is not None]
    broken = [any(vev.components[i] for vev in vevs) for i in range(len(theory.groups))]
    gauge = []
    for n, (group, place) in enumerate(zip(theory.groups, PLACES[: len(theory.groups)], strict=True), 1):
        kind = group.group.replace("(", "[").replace(")", "]")
        gauge.append(f"Gauge[[{n}]] = {{V{n}, {kind}, {place}{symbol(group.id)}, g{n}, {broken[n - 1]}}};")
    matter = [
        *(_field_line("FermionFields", n, theory, f, broken, f.generations) for n, f in enumerate(theory.fermions, 1)),
        *(_field_line("ScalarFields", n, theory, s, broken, 1) for n, s in enumerate(theory.scalars, 1)),
    ]
    values: dict[str, str] = {}
    vev_values: dict[str, str] = {}
    couplings, masses, places, real = [], [], [], []
    for n, term in enumerate(theory.terms, 1):
        fermions = f"{symbol(term.first)}.{symbol(term.second)}"
        if term.scalar is None:
            couplings.append(f"M{n} {fermions}")
            values[f"M{n}"] = repr(term.values[0])
        else:
            scalar_symbol = f"conj[{symbol(term.scalar)}]" if term.conjugate else symbol(term.scalar)
            couplings.append(f"Y{n} {scalar_symbol}.{fermions}")
            values[f"Y{n}"] = "{" + ", ".join(map(repr, term.values)) + "}"
    for scalar in theory.scalars:
        field = symbol(scalar.name)
        if is_real(theory, scalar):
            real += real_components(theory, scalar, field, broken)
            masses.append(f"1/2 m2{field} {field}.{field}")
            waves = f"{{0, 0}}, {{phi{field}, 1}}"
        else:
            masses.append(f"m2{field} conj[{field}].{field}")
            waves = f"{{sigma{field}, I/Sqrt[2]}}, {{phi{field}, 1/Sqrt[2]}}"
        values[f"m{field}"] = repr(scalar.mass)
        if scalar.vev is not None:
            component = component_name(field, scalar.vev.components)
            places.append(f"  {{{component}, {{v{field}, 1/Sqrt[2]}}, {waves}}}")
            vev_values[f"v{field}"] = repr(scalar.vev.value)
    comments = ["(* Values, in GeV where they have a unit *)"]
    comments += [f"(* {key} = {value} *)" for key, value in (values | vev_values).items()]
    gauge_lines, matter_lines, comment_lines = map("\n".join, (gauge, matter, comments))
    vev_lines = ",\n".join(places)
    return f"""(* This file has not been validated by SARAH itself, only by a check of its structure. *)
Off[General::spell]

Model`Name = "{name}";
Model`NameLaTeX = "{name}";

(* Gauge groups *)
{gauge_lines}

(* Matter fields *)
{matter_lines}
RealScalars = {{{", ".join(real)}}};

NameOfStates = {{GaugeES, EWSB}};

DEFINITION[GaugeES][LagrangianInput] = {{
  {{LagHC, {{AddHC -> True}}}},
  {{LagNoHC, {{AddHC -> False}}}}
}};

LagHC = -({" + ".join(couplings) or "0"});
LagNoHC = -({" + ".join(masses) or "0"});

DEFINITION[EWSB][VEVs] = {{
{vev_lines}
}};

{comment_lines}
"""


def symbol(name: str) -> str:
    """Return a name that is one Mathematica symbol and not a built-in (C, D, E, I, K, N and O are)."""
    bare = re.sub(r"\W|_", "", name)
    return f"{bare}field" if bare in set("CDEIKNO") else bare


def _field_line(
    kind: str, place: int, theory: Theory, field: Fermion | Scalar, broken: Sequence[bool], copies: int
) -> str:
    numbers = []
    for group, number in zip(theory.groups, field.numbers, strict=True):
        if isinstance(number, tuple):  # a representation's dimension, negative for the conjugate one
            sign = "-" if is_barred(group.group, number) else ""
            numbers.append(f"{sign}{irrep(group.group, number).dimension}")
        else:
            numbers.append(str(number))
    name = symbol(field.name)
    tensor = component_tensor(theory, field, name, broken)
    return f"{kind}[[{place}]] = {{{name}, {copies}, {tensor}, {', '.join(numbers)}}};"
