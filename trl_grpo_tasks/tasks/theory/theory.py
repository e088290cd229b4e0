"""Theory: gauge groups, fields, vacuum expectation values (vevs) and couplings; its dictionary form.

All fermions are left-handed Weyl fermions; a right-handed one is represented by its conjugate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import Any

from . import groups
from .groups import U1, Dynkin
from .tensors import components

# The quantum number of a field under one group: Dynkin labels, or the charge for a U(1).
Number = Dynkin | Fraction


@dataclass(frozen=True)
class GaugeGroup:
    """One factor of the gauge group: `group` is "SU(3)", "U(1)", ...; `id` distinguishes equal factors."""

    id: str
    group: str


@dataclass(frozen=True)
class Fermion:
    """A left-handed Weyl multiplet; `numbers` has one entry per gauge group of the theory, in order."""

    name: str
    numbers: tuple[Number, ...]
    generations: int = 1


@dataclass(frozen=True)
class Vev:
    """A vacuum expectation value: `value` is v in GeV where <phi> = v / sqrt 2.

    `components` gives, for each gauge group, the component of the representation, counted from 1 in the order of
    `tensors.components`, or 0 if the field is a singlet.
    """

    components: tuple[int, ...]
    value: float


@dataclass(frozen=True)
class Scalar:
    """A complex scalar multiplet, or a real one (see `is_real`). `mass` is in GeV."""

    name: str
    numbers: tuple[Number, ...]
    mass: float
    vev: Vev | None = None


@dataclass(frozen=True)
class Term:
    """The term M f f', or y f f' phi (phi* if `conjugate`), with one value for each pair of equal generations.

    The mass M, in GeV, is the same for all of them. It is a Majorana mass if both fermions are the same field.
    """

    first: str
    second: str
    values: tuple[float, ...]
    scalar: str | None = None
    conjugate: bool = False


@dataclass(frozen=True)
class Theory:
    """A gauge theory: its gauge groups, fields, and fermion terms."""

    groups: tuple[GaugeGroup, ...]
    fermions: tuple[Fermion, ...] = ()
    scalars: tuple[Scalar, ...] = ()
    terms: tuple[Term, ...] = ()

    def __post_init__(self) -> None:
        fields = [scalar.name for scalar in self.scalars] + [fermion.name for fermion in self.fermions]
        for kind, names in (("group", [group.id for group in self.groups]), ("field", fields)):
            if len(set(names)) < len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise ValueError(f"{kind} {twice!r} is declared twice; {kind}s need different names")

    def fermion(self, name: str) -> Fermion:
        return {fermion.name: fermion for fermion in self.fermions}[name]


def from_dict(theory: Mapping[str, Any]) -> Theory:
    """Make a theory of fermions from its dictionary form; omitted representations and charges mean singlets."""
    declared = tuple(GaugeGroup(one["id"], one["group"]) for one in theory["groups"])
    known = {group.id: group.group for group in declared}
    return Theory(declared, tuple(_read_fermion(one, known) for one in theory.get("fermions", ())))


def conjugate_number(group: str, number: Any) -> Any:
    return groups.conjugate(group, number) if isinstance(number, tuple) else -number


def is_real(theory: Theory, scalar: Scalar) -> bool:
    """Return whether a scalar is a real field: real under each group, neutral, and with a real vev.

    A non-diagonal component of an adjoint has no real vev. A product of two doublets counts as complex, as usual.
    """
    for i, (group, number) in enumerate(zip(theory.groups, scalar.numbers, strict=True)):
        if not isinstance(number, tuple):
            if number:
                return False
            continue
        place = None if scalar.vev is None else scalar.vev.components[i] - 1
        if groups.reality(group.group, number) != 1:
            return False
        if place is not None and any(components(group.group, number)[place]):
            return False
    return True


def integer_charges(charges: Sequence[Fraction]) -> tuple[list[int], int]:
    """Return the numerators of charges over a common denominator, and this one: sums of fractions are slow."""
    unit = lcm(*(charge.denominator for charge in charges))
    return [charge.numerator * (unit // charge.denominator) for charge in charges], unit


def _read_fermion(field: Mapping[str, Any], known: Mapping[str, str]) -> Fermion:
    name, copies = field["name"], field.get("multiplicity", 1)
    reps, charges = field.get("reps", {}), field.get("charges", {})
    if not isinstance(copies, int) or copies < 1:
        raise ValueError(f"field {name!r}: multiplicity {copies!r} must be an integer of at least 1")
    for id in (*reps, *charges):
        if id not in known:
            raise ValueError(f"field {name!r} refers to group {id!r}; groups are: {', '.join(known)}")
    numbers: list[Number] = []
    for id, group in known.items():
        if group == U1:
            numbers.append(_read_charge(charges.get(id, 0), name, id))
        else:
            numbers.append(tuple(reps[id]["dynkin"]) if id in reps else groups.trivial(group))
    return Fermion(name, tuple(numbers), copies)


def _read_charge(value: Any, field: str, group: str) -> Fraction:
    if isinstance(value, float):
        raise ValueError(f"field {field!r}: charge {value!r} under {group!r} is not exact; write it as '1/6' or 2")
    try:
        return Fraction(value)
    except (ValueError, TypeError, ZeroDivisionError) as error:
        message = f"field {field!r}: {value!r} is not a charge under {group!r}; write it as '1/6' or 2"
        raise ValueError(message) from error
