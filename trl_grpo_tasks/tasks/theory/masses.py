"""Masses after symmetry breaking: one mass matrix per colour and electric charge, and its singular values.

Fermion masses come from M f f' and y f f' <phi>. Scalars have the mass of their multiplet, except in directions eaten
by gauge bosons. Gauge-boson masses are not computed, because gauge couplings are not part of a theory here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np

from .breaking import Vacuum
from .groups import U1, Dynkin
from .spectrum import restricted_singular_values, singular_values
from .states import State, states_of
from .tensors import Root, contraction, direction, generator, opposite, positive_roots
from .theory import Fermion, Scalar, Theory, is_real

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
        matrix = _mass_matrix(couplings, vacuum, left, right)
        unpaired = [0.0] * abs(matrix.shape[0] - matrix.shape[1])
        masses = (*unpaired, *sorted(singular_values(matrix).tolist()))
        sectors.append(Sector(kind, _dimension(key[0]), key[1], matrix, masses))
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

# A term as one mass per pair of generations and one component matrix per group.
_Coupling = tuple[Sequence[float], list[np.ndarray]]


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
            for strength, tensors in couplings.get((first.name, second.name), ()):
                if entry := _entry(tensors, vacuum, row, column):
                    for generation, mass in enumerate(strength):
                        place = r + generation, c + generation
                        matrix[place] += mass * entry
                        largest[place] = max(largest[place], abs(mass * entry))
            c += second.generations
        r += first.generations
    return _without_rounding(matrix, largest)


def _couplings(theory: Theory) -> dict[tuple[str, str], list[_Coupling]]:
    """Return the terms that give masses, by the names of their fermions, in both orders."""
    scalars = {scalar.name: scalar for scalar in theory.scalars}
    numbers_of = {fermion.name: fermion.numbers for fermion in theory.fermions}
    result: dict[tuple[str, str], list[_Coupling]] = {}
    for term in theory.terms:
        strength: Sequence[float] = term.values
        reps = [numbers_of[name] for name in (term.first, term.second)]
        chosen: Sequence[int | None] = [None] * len(theory.groups)
        if term.scalar is not None:
            scalar = scalars[term.scalar]
            if scalar.vev is None:
                continue
            strength = [y * scalar.vev.value / math.sqrt(2) for y in strength]
            reps, chosen = [*reps, scalar.numbers], scalar.vev.components
        if any(strength):
            tensors = [
                _tensor(group.group, tuple(numbers), component, term.conjugate)
                for group, component, *numbers in zip(theory.groups, chosen, *reps, strict=True)
            ]
            result.setdefault((term.first, term.second), []).append((strength, tensors))
            if term.first != term.second:
                swapped = [tensor.T for tensor in tensors]
                result.setdefault((term.second, term.first), []).append((strength, swapped))
    return result


@lru_cache(4096)
def _tensor(group: str, reps: tuple[Any, ...], component: int | None, dual: bool) -> np.ndarray:
    """Return the invariant of a term's fields as a matrix of its fermions; its scalar is along a vev."""
    if group == U1:
        return np.ones((1, 1))
    tensor = contraction(group, reps, dual)
    assert tensor is not None  # a term that is allowed has exactly one invariant
    return tensor if component is None else _product(tensor, direction(group, reps[2], component or 1))


def _without_rounding(sums: np.ndarray, terms: np.ndarray) -> np.ndarray:
    """Replace sums by exact zeros where only rounding errors of their terms (of this size) remain."""
    return np.where(np.abs(sums) <= _ROUNDING * terms, 0.0, sums)


def _product(tensor: np.ndarray, vector: np.ndarray) -> np.ndarray:
    """Return tensor @ vector with exact zeros where only rounding errors remain."""
    return _without_rounding(tensor @ vector, np.abs(tensor) @ np.abs(vector))


def _entry(tensors: list[np.ndarray], vacuum: Vacuum, row: State, column: State) -> float:
    assert vacuum.colour is not None
    entry = 1.0
    for i, tensor in enumerate(tensors):
        if not entry:
            break
        if i == vacuum.colour[0]:
            terms = np.abs(row.highest) @ np.abs(tensor) @ np.abs(column.lowest)
            entry *= float(_without_rounding(row.highest @ tensor @ column.lowest, terms))
        else:
            entry *= float(tensor[row.places[i], column.places[i]])
    return entry


def _eaten(theory: Theory, vacuum: Vacuum, members: list[tuple[Scalar, bool, State]]) -> np.ndarray:
    """Return the directions in which broken generators of roots move the vevs, among these components."""
    rows = []
    for i, group in enumerate(theory.groups):
        for root in positive_roots(group.group) if group.group != U1 else ():
            for one in (root, opposite(root)):
                row = [_push(theory, vacuum, i, one, *member) for member in members]
                if any(row):
                    rows.append(row)
    return np.array(rows).reshape(-1, len(members))


def _push(
    theory: Theory, vacuum: Vacuum, place: int, root: Root, scalar: Scalar, conjugated: bool, state: State
) -> float:
    """Return the component along a state of what the generator of a root makes of the scalar's vev."""
    assert vacuum.colour is not None
    if scalar.vev is None:
        return 0.0
    push = scalar.vev.value
    for i, (group, rep) in enumerate(zip(theory.groups, scalar.numbers, strict=True)):
        if not isinstance(rep, tuple):
            continue
        vector = direction(group.group, rep, scalar.vev.components[i] or 1)
        if i == place:
            acting = generator(group.group, rep, root)
            vector = _product(-acting.T if conjugated else acting, vector)
        if i == vacuum.colour[0]:  # the highest component of the conjugate is the field's lowest
            push *= float(_product(state.lowest if conjugated else state.highest, vector))
        else:
            push *= float(vector[state.places[i]])
    return push


def _in_order(sectors: list[Sector]) -> list[Sector]:
    return sorted(sectors, key=lambda sector: (-sector.colour, -abs(sector.charge), -sector.charge))


def _dimension(colour: Dynkin) -> int:
    p, q = colour
    return (p + 1) * (q + 1) * (p + q + 2) // 2
