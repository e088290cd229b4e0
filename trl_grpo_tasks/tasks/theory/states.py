"""The states of a field after symmetry breaking: its colour multiplets with their electric charges."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np

from .breaking import Vacuum
from .groups import U1, Dynkin
from .tensors import Root, colour_label, components, generator
from .theory import Fermion, Scalar, Theory


class State(NamedTuple):
    """One colour multiplet in a field, by its component of highest colour weight; `lowest` has the lowest weight."""

    colour: Dynkin  # Dynkin labels of SU(3)
    charge: Fraction
    places: tuple[int, ...]  # the component under each group; arbitrary under the group that contains colour
    highest: np.ndarray
    lowest: np.ndarray


def states_of(theory: Theory, field: Fermion | Scalar, vacuum: Vacuum) -> tuple[State, ...]:
    """Return the colour multiplets in a field. The result is cached, because theories share fields."""
    return _cached_states(tuple(g.group for g in theory.groups), field.numbers, vacuum)


@lru_cache(4096)
def _cached_states(groups: tuple[str, ...], numbers: tuple, vacuum: Vacuum) -> tuple[State, ...]:
    assert vacuum.colour is not None
    factor, simple = vacuum.colour
    coloured = colour_multiplets(groups[factor], numbers[factor], simple)
    options = [
        range(len(coloured)) if i == factor else range(1 if group == U1 else len(components(group, numbers[i])))
        for i, group in enumerate(groups)
    ]
    states = []
    for places in product(*options):
        colour, weight, highest, lowest = coloured[places[factor]]
        weights = [
            weight if i == factor else (numbers[i],) if group == U1 else components(group, numbers[i])[places[i]]
            for i, group in enumerate(groups)
        ]
        states.append(State(colour, vacuum.charge_of(weights), places, highest, lowest))
    return tuple(states)


@lru_cache(4096)
def colour_multiplets(
    group: str, rep: Dynkin, simple: tuple[Root, Root]
) -> tuple[tuple[Dynkin, tuple[int, ...], np.ndarray, np.ndarray], ...]:
    """Decompose a representation under the SU(3) with these simple roots.

    Returns for each multiplet its labels, the weight of its highest component, and its highest and lowest components.
    """
    known = components(group, rep)
    raising = [generator(group, rep, root) for root in simple]
    place = {weight: n for n, weight in enumerate(known)}
    vectors = np.eye(len(known))
    found = []
    for weight, vector in zip(known, vectors, strict=True):
        if not any(weight) and len(known) > 1:
            continue  # a diagonal component of the adjoint: handled below
        if not any(np.abs(up @ vector).max() > 1e-9 for up in raising):
            p, q = (colour_label(group, weight, root) for root in simple)
            steps = [(p + q) * sum(pair) for pair in zip(*simple, strict=True)]
            lowest = tuple([w - step for w, step in zip(weight, steps, strict=True)])
            found.append(((p, q), weight, vector, vectors[place[lowest]]))
    zero = (0,) * len(simple[0])
    diagonal = [n for n, weight in enumerate(known) if weight == zero]
    if len(known) > 1 and diagonal:
        # Diagonal components that are colour singlets.
        _, values, directions = np.linalg.svd(np.concatenate(raising)[:, diagonal])
        for row in directions[int((values > 1e-9).sum()) :]:
            vector = np.zeros(len(known))
            vector[diagonal] = np.where(np.abs(row) < 1e-12, 0, row)
            found.append(((0, 0), zero, vector, vector))
    return tuple(found)
