"""The states of a field after symmetry breaking: its colour multiplets with their electric charges."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np

from .breaking import Vacuum
from .groups import U1, Dynkin
from .tensors import components, generator, size_of
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
    factor, indices = vacuum.colour
    coloured = colour_multiplets(groups[factor], numbers[factor], indices)
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
    group: str, rep: Dynkin, indices: tuple[int, int, int]
) -> tuple[tuple[Dynkin, tuple[int, ...], np.ndarray, np.ndarray], ...]:
    """Decompose a representation of SU(N) under the SU(3) of three of its indices.

    Returns for each multiplet its labels, the weight of its highest component, and its highest and lowest components.
    """
    i, j, k = indices
    known = components(group, rep)
    raising = [generator(group, rep, i, j), generator(group, rep, j, k)]
    highest: list[tuple[Dynkin, tuple[int, ...], np.ndarray, np.ndarray]] = []
    lowest: dict[tuple[tuple[int, ...], Dynkin], np.ndarray] = {}
    for place, weight in enumerate(known):
        vector = np.zeros(len(known))
        vector[place] = 1
        if not any(weight) and len(known) > 1:
            continue  # a diagonal component of the adjoint: handled below
        outside = tuple(w for index, w in enumerate(weight) if index not in indices)
        if not any(np.abs(up.T @ vector).any() for up in raising):
            lowest[outside, (weight[k] - weight[j], weight[j] - weight[i])] = vector
        if not any(np.abs(up @ vector).any() for up in raising):
            highest.append(((weight[i] - weight[j], weight[j] - weight[k]), weight, vector, vector))
    # The lowest component of the same multiplet has the same weights outside colour.
    found = []
    for labels, weight, vector, _ in highest:
        outside = tuple(w for index, w in enumerate(weight) if index not in indices)
        found.append((labels, weight, vector, lowest[outside, labels]))
    n = size_of(group)
    if len(known) == n * n - 1:
        # Diagonal components that are colour singlets: equal entries at the three indices.
        moving = np.concatenate(raising)[:, n * (n - 1) :]
        _, values, directions = np.linalg.svd(moving)
        for row in directions[int((values > 1e-9).sum()) :]:
            vector = np.concatenate([np.zeros(n * (n - 1)), np.where(np.abs(row) < 1e-12, 0, row)])
            found.append(((0, 0), (0,) * n, vector, vector))
    return tuple(found)
