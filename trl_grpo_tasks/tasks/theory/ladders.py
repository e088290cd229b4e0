"""Components and ladder operators of the representations of SO(10) and E6 that the language has.

These are the singlet, minuscule representations (all weights are images of one: 10, 16 and 27) and the adjoint. A
weight is given by its Dynkin labels. Components are orthonormal, in the order of `groups.weights`; the last ones of an
adjoint span the Cartan subalgebra.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from .groups import Dynkin, algebra, minus, plus, weights

SUPPORTED: dict[str, dict[str, Dynkin]] = {
    "SO(10)": {
        "singlet": (0, 0, 0, 0, 0),
        "fund": (1, 0, 0, 0, 0),
        "adjoint": (0, 1, 0, 0, 0),
        "spinor": (0, 0, 0, 0, 1),
        "conj_spinor": (0, 0, 0, 1, 0),
    },
    "E6": {
        "singlet": (0, 0, 0, 0, 0, 0),
        "fund": (1, 0, 0, 0, 0, 0),
        "antifund": (0, 0, 0, 0, 0, 1),
        "adjoint": (0, 1, 0, 0, 0, 0),
    },
}
_CACHE = 4096


@lru_cache(_CACHE)
def component_weights(group: str, rep: Dynkin) -> tuple[Dynkin, ...]:
    found = weights(group, rep)
    moved = [weight for weight in found if any(weight)]
    zero = (0,) * len(rep)
    return (*moved, *[zero] * found.get(zero, 0))


@lru_cache(_CACHE)
def positive_roots(group: str) -> tuple[Dynkin, ...]:
    lie = algebra(group)
    return tuple(tuple((np.array(root) @ np.array(lie.simple_roots)).tolist()) for root in lie.positive_roots)


@lru_cache(_CACHE)
def ladder(group: str, rep: Dynkin, root: Dynkin) -> np.ndarray:
    """Return the operator that adds a root to the weights; that of the opposite root is its transpose."""
    known = component_weights(group, rep)
    simple = algebra(group).simple_roots
    if not any(rep):
        return np.zeros((1, 1))
    if rep == SUPPORTED[group]["adjoint"]:
        basis, norm = _adjoint_basis(group)
        acting = ladder(group, SUPPORTED[group]["fund"], root)
        moved = acting @ basis - basis @ acting
        matrix = basis.reshape(len(basis), -1) @ moved.reshape(len(basis), -1).T / norm
        return np.where(np.abs(matrix) < 1e-9, 0.0, matrix)  # exact zeros instead of rounding errors
    if root not in positive_roots(group):
        return ladder(group, rep, tuple([-label for label in root])).T
    if root in simple:
        place = {weight: n for n, weight in enumerate(known)}
        matrix = np.zeros((len(known),) * 2)
        for weight, n in place.items():
            if (above := plus(weight, root)) in place:
                matrix[place[above], n] = 1  # all entries of a minuscule representation can be 1
        return matrix
    step = next(one for one in simple if minus(root, one) in positive_roots(group))
    first, second = ladder(group, rep, step), ladder(group, rep, minus(root, step))
    return first @ second - second @ first


@lru_cache(_CACHE)
def cartan_direction(group: str, number: int) -> np.ndarray:
    """Return the unit vector of the adjoint along a fundamental coweight (from 1), which leaves the group unbroken
    whose Dynkin diagram lacks this node, and a U(1)."""
    basis, norm = _adjoint_basis(group)
    inverse = np.linalg.inv(np.array(algebra(group).simple_roots, dtype=float))
    fund = np.array(component_weights(group, SUPPORTED[group]["fund"]))
    vector = np.einsum("aii,i->a", basis, fund @ inverse[:, number - 1]) / norm
    vector[np.abs(vector) < 1e-12] = 0
    return vector / np.linalg.norm(vector)


@lru_cache(_CACHE)
def _adjoint_basis(group: str) -> tuple[np.ndarray, float]:
    """Return the components of the adjoint as matrices on the smallest representation, and their squared norm."""
    kinds = SUPPORTED[group]
    roots = [weight for weight in component_weights(group, kinds["adjoint"]) if any(weight)]
    moving = [ladder(group, kinds["fund"], root) for root in roots]
    norm = float((moving[0] ** 2).sum())
    labels = np.array(component_weights(group, kinds["fund"]), dtype=float)
    lower = np.linalg.cholesky(labels.T @ labels / norm)
    diagonal = [np.diag(column) for column in np.linalg.solve(lower, labels.T)]
    return np.array([*moving, *diagonal]), norm
