"""Masses after symmetry breaking: one mass matrix per colour and electric charge, and its singular values.

Fermion masses come from M f f' and y f f' <phi>. Scalars have the mass of their multiplet, except in directions eaten
by gauge bosons. Gauge-boson masses are not computed, because gauge couplings are not part of a theory here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from .breaking import Vacuum
from .groups import U1, Dynkin
from .spectrum import restricted_singular_values, singular_values
from .states import State, states_of
from .tensors import contraction, direction, generator, opposite, positive_roots
from .theory import Fermion, MassTerm, Scalar, Theory, is_real

PERTURBATIVE = math.sqrt(4 * math.pi)
# A sum is zero up to rounding if it is at most this fraction of its largest term.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Sector:
    """States with the same colour and electric charge.

    `charge` is that of the triplet, or positive for real colour representations. `masses` are in GeV, lightest first;
    states without a partner have mass 0.
    """

    kind: str  # "dirac", "majorana" or "scalar"
    colour: int  # 1, 3 or 8
    charge: Fraction
    matrix: np.ndarray
    masses: tuple[float, ...]

    @property
    def massless(self) -> int:
        return sum(mass == 0 for mass in self.masses)

    @property
    def visible(self) -> bool:
        """Whether the states have colour or electric charge."""
        return self.colour > 1 or self.charge != 0


def fermion_sectors(theory: Theory, vacuum: Vacuum) -> list[Sector]:
    """Compute all fermion masses. Rows of a Dirac matrix have colour 3 or positive charge, columns the rest."""
    found: dict[tuple[Dynkin, Fraction], list[tuple[Fermion, State]]] = {}
    for fermion in theory.fermions:
        for state in states_of(theory, fermion, vacuum):
            found.setdefault((state.colour, state.charge), []).append((fermion, state))
    couplings = _couplings(theory)
    sectors = []
    for colour, charge in found:
        partner = (colour[::-1], -charge)
        key = max((colour, charge), partner)
        if key != (colour, charge) and key in found:
            continue  # filled with its partner
        left, right = found.get(key, []), found.get((key[0][::-1], -key[1]), [])
        kind = "majorana" if partner == key == (colour, charge) else "dirac"
        sectors.append(_sector(kind, *key, _mass_matrix(couplings, vacuum, left, right)))
    return _in_order(sectors)


def scalar_sectors(theory: Theory, vacuum: Vacuum) -> list[Sector]:
    """Return the scalars with colour or charge that are not eaten. Cached, because many theories share scalars."""
    return list(_scalar_sectors(Theory(theory.groups, scalars=theory.scalars), vacuum))


@lru_cache(1024)
def _scalar_sectors(theory: Theory, vacuum: Vacuum) -> tuple[Sector, ...]:
    fields: dict[tuple[Dynkin, Fraction], list[tuple[Scalar, bool, State]]] = {}
    for scalar in theory.scalars:
        for state in states_of(theory, scalar, vacuum):
            key, conjugate = (state.colour, state.charge), (state.colour[::-1], -state.charge)
            if key == conjugate and state.colour == (0, 0):
                continue  # neutral
            if key >= conjugate:
                fields.setdefault(key, []).append((scalar, False, state))
            elif not is_real(theory, scalar):  # a real field already contains its conjugate
                fields.setdefault(conjugate, []).append((scalar, True, state))
    sectors = []
    for (colour, charge), members in fields.items():
        matrix = np.diag([scalar.mass for scalar, _, _ in members])
        masses = restricted_singular_values(matrix, _eaten(theory, vacuum, members))
        if len(masses):
            sectors.append(Sector("scalar", _dimension(colour), charge, matrix, tuple(sorted(masses.tolist()))))
    return tuple(_in_order(sectors))


# ---- matrices


class _Coupling(NamedTuple):
    """A term as one mass per pair of generations and one component matrix per group (None for a U(1))."""

    strength: list[float]
    tensors: list[np.ndarray | None]


def _mass_matrix(
    couplings: dict[tuple[str, str], list[_Coupling]],
    vacuum: Vacuum,
    left: list[tuple[Fermion, State]],
    right: list[tuple[Fermion, State]],
) -> np.ndarray:
    matrix = np.zeros((sum(f.generations for f, _ in left), sum(f.generations for f, _ in right)))
    largest = np.zeros(matrix.shape)  # the largest term of each entry
    r = 0
    for first, row in left:
        c = 0
        for second, column in right:
            for coupling in couplings.get((first.name, second.name), ()):
                entry = _entry(coupling.tensors, vacuum, row, column)
                if entry:
                    for generation, mass in enumerate(coupling.strength):
                        place = r + generation, c + generation
                        matrix[place] += mass * entry
                        largest[place] = max(largest[place], abs(mass * entry))
            c += second.generations
        r += first.generations
    return _without_rounding(matrix, largest)


def _couplings(theory: Theory) -> dict[tuple[str, str], list[_Coupling]]:
    """Return the terms that give masses, by the names of their fermions, in both orders."""
    fermions = {fermion.name: fermion for fermion in theory.fermions}
    scalars = {scalar.name: scalar for scalar in theory.scalars}
    result: dict[tuple[str, str], list[_Coupling]] = {}
    for term in theory.terms:
        first, second = fermions[term.first], fermions[term.second]
        if isinstance(term, MassTerm):
            strength = [term.value] * min(first.generations, second.generations)
            tensors = [
                None if group.group == U1 else contraction(group.group, (one, two))
                for group, one, two in zip(theory.groups, first.numbers, second.numbers, strict=True)
            ]
        else:
            scalar = scalars[term.scalar]
            if scalar.vev is None:
                continue
            strength = [y * scalar.vev.value / math.sqrt(2) for y in term.values]
            reps = zip(first.numbers, second.numbers, scalar.numbers, strict=True)
            tensors = [
                None if group.group == U1 else _along(group.group, three, component, term.conjugate)
                for group, three, component in zip(theory.groups, reps, scalar.vev.components, strict=True)
            ]
        if any(strength):
            result.setdefault((term.first, term.second), []).append(_Coupling(strength, tensors))
            if term.first != term.second:
                swapped = [None if tensor is None else tensor.T for tensor in tensors]
                result.setdefault((term.second, term.first), []).append(_Coupling(strength, swapped))
    return result


@lru_cache(4096)
def _along(group: str, reps: tuple[Dynkin, Dynkin, Dynkin], component: int, dual: bool) -> np.ndarray:
    """Return the invariant of three fields with the third along a vev, as a matrix of the first two."""
    tensor = contraction(group, reps, dual)
    if tensor is None:
        raise ValueError(
            f"{group}: the representations {[list(rep) for rep in reps]} do not have exactly one invariant"
        )
    return _product(tensor, direction(group, reps[2], component or 1))


def _without_rounding(sums: np.ndarray, terms: np.ndarray) -> np.ndarray:
    """Replace sums by exact zeros where only rounding errors of their terms (of this size) remain."""
    return np.where(np.abs(sums) <= _ROUNDING * terms, 0.0, sums)


def _product(tensor: np.ndarray, vector: np.ndarray) -> np.ndarray:
    """Return tensor @ vector with exact zeros where only rounding errors remain."""
    return _without_rounding(tensor @ vector, np.abs(tensor) @ np.abs(vector))


def _entry(tensors: list[np.ndarray | None], vacuum: Vacuum, row: State, column: State) -> float:
    assert vacuum.colour is not None
    entry = 1.0
    for i, tensor in enumerate(tensors):
        if tensor is not None and entry:
            if i == vacuum.colour[0]:
                terms = np.abs(row.highest) @ np.abs(tensor) @ np.abs(column.lowest)
                entry *= float(_without_rounding(row.highest @ tensor @ column.lowest, terms))
            else:
                entry *= float(tensor[row.places[i], column.places[i]])
    return entry


def _eaten(theory: Theory, vacuum: Vacuum, members: list[tuple[Scalar, bool, State]]) -> np.ndarray:
    """Return the directions in which broken generators of roots move the vevs, among these components."""
    assert vacuum.colour is not None
    rows = []
    for i, group in enumerate(theory.groups):
        if group.group == U1:
            continue
        for root in (one for pair in positive_roots(group.group) for one in (pair, opposite(pair))):
            row = np.zeros(len(members))
            for place, (scalar, conjugated, state) in enumerate(members):
                if scalar.vev is None:
                    continue
                push = scalar.vev.value
                for j, other in enumerate(theory.groups):
                    rep = scalar.numbers[j]
                    if other.group == U1 or not isinstance(rep, tuple):
                        continue
                    vector = direction(other.group, rep, scalar.vev.components[j] or 1)
                    if j == i:
                        acting = generator(other.group, rep, root)
                        vector = _product(-acting.T if conjugated else acting, vector)
                    if j == vacuum.colour[0]:  # the highest component of the conjugate is the field's lowest
                        push *= float(_product(state.lowest if conjugated else state.highest, vector))
                    else:
                        push *= float(vector[state.places[j]])
                row[place] = push
            if row.any():
                rows.append(row)
    return np.array(rows).reshape(-1, len(members))


def _sector(kind: str, colour: Dynkin, charge: Fraction, matrix: np.ndarray) -> Sector:
    excess = abs(matrix.shape[0] - matrix.shape[1])
    masses = [0.0] * excess + sorted(singular_values(matrix).tolist())
    return Sector(kind, _dimension(colour), charge, matrix, tuple(masses))


def _in_order(sectors: list[Sector]) -> list[Sector]:
    return sorted(sectors, key=lambda sector: (-sector.colour, -abs(sector.charge), -sector.charge))


def _dimension(colour: Dynkin) -> int:
    p, q = colour
    return (p + 1) * (q + 1) * (p + q + 2) // 2
