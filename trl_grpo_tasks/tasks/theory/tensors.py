"""Components of small representations of SU(N), SO(10) and E6, the action of generators, and invariant tensors.

Supported for SU(N) are the singlet, fundamental, antifundamental, adjoint, and the antisymmetric pair with its
conjugate; see `ladders.py` for SO(10) and E6. Components are orthonormal, each with a weight: integer coordinates.
Generators are those that add a root to the weight, and diagonal ones, which multiply a component by the sum of
weight_i x_i. For SU(N), the coordinates are those of diag(x_1 ... x_N), and a root has 1 at a and -1 at b for E_ab
(row a, column b of the fundamental); otherwise they are Dynkin labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, reduce
from itertools import combinations, permutations
from typing import Any

import numpy as np

from . import ladders
from .groups import Dynkin, algebra, conjugate, inner, singlets_in

_CACHE = 4096
KINDS = ("singlet", "fund", "antifund", "adjoint", "antisym", "conj_antisym", "spinor", "conj_spinor")
Root = tuple[int, ...]


def size_of(group: str) -> int:
    """Return N of "SU(N)"; raise ValueError for another group."""
    lie = algebra(group)
    if lie.series != "A":
        known = ", ".join(ladders.SUPPORTED)
        raise ValueError(
            f"this is supported for SU(N) and, where masses and breaking are computed, {known}, but not for {group}; "
            "anomalies can be computed for all groups"
        )
    return lie.rank + 1


def coordinates(group: str) -> int:
    """Return the number of coordinates of a weight. Those of SU(N) have one more than its rank: x_i has no trace."""
    return algebra(group).rank if group in ladders.SUPPORTED else size_of(group)


@lru_cache(_CACHE)
def positive_roots(group: str) -> tuple[Root, ...]:
    if group in ladders.SUPPORTED:
        return ladders.positive_roots(group)
    n = size_of(group)
    return tuple(root_of(n, a, b) for a, b in combinations(range(n), 2))


def simple_roots(group: str) -> Sequence[Root]:
    if group in ladders.SUPPORTED:
        return algebra(group).simple_roots
    n = size_of(group)
    return [root_of(n, a, a + 1) for a in range(n - 1)]


def opposite(root: Root) -> Root:
    return tuple([-x for x in root])


def root_of(n: int, a: int, b: int) -> Root:
    """Return the root of SU(N) whose generator is E_ab."""
    return tuple(int(k == a) - int(k == b) for k in range(n))


@lru_cache(_CACHE)
def colour_label(group: str, weight: Root, root: Root) -> int:
    """Return the scalar product of a weight with a root, which is the weight under the SU(2) of the root."""
    if group in ladders.SUPPORTED:
        return int(inner(group, weight, root))
    return sum(w * x for w, x in zip(weight, root, strict=True))


@lru_cache(_CACHE)
def reps_of(group: str) -> dict[str, Dynkin]:
    """Return the supported representations of a group, by kind.

    Each occurs once: the antisymmetric pair of SU(3) is its antifundamental, and SU(2) has one doublet.
    """
    if group in ladders.SUPPORTED:
        return ladders.SUPPORTED[group]
    rank = size_of(group) - 1
    unit = [tuple(int(i == j) for j in range(rank)) for i in range(rank)]
    kinds = {"singlet": (0,) * rank, "fund": unit[0]}
    if rank >= 2:
        kinds["antifund"] = unit[-1]
    kinds["adjoint"] = tuple(a + b for a, b in zip(unit[0], unit[-1], strict=True))
    if rank >= 3:
        kinds["antisym"] = unit[1]
    if rank >= 4:
        kinds["conj_antisym"] = unit[-2]
    return kinds


@lru_cache(_CACHE)
def kind_of(group: str, rep: Dynkin) -> str:
    for kind, known in reps_of(group).items():
        if known == rep:
            return kind
    raise ValueError(
        f"masses and breaking do not support the representation {list(rep)} of {group}; supported: "
        + ", ".join(f"{kind} {list(known)}" for kind, known in reps_of(group).items())
    )


@lru_cache(_CACHE)
def components(group: str, rep: Dynkin) -> tuple[tuple[int, ...], ...]:
    """Return the weight of each component. The last components of an adjoint, as many as the rank, are diagonal."""
    kind = kind_of(group, rep)
    if group in ladders.SUPPORTED:
        return ladders.component_weights(group, rep)
    n = size_of(group)
    if kind == "singlet":
        return ((0,) * n,)
    if kind == "adjoint":
        return (*(root_of(n, i, j) for i, j in permutations(range(n), 2)), *[(0,) * n] * (n - 1))
    sign = 1 if kind in ("fund", "antisym") else -1
    chosen = combinations(range(n), 1 if kind in ("fund", "antifund") else 2)
    return tuple(tuple(sign * (k in one) for k in range(n)) for one in chosen)


@lru_cache(_CACHE)
def direction(group: str, rep: Dynkin, component: int) -> np.ndarray:
    """Return the unit vector of a vev in component 1, 2, ...

    The last components of an adjoint preserve a large group: for SU(N), number N (N - 1) + p is diag(N-p, ... p times,
    -p, ...), which leaves SU(p) x SU(N-p) x U(1) unbroken. In general it is the p-th fundamental coweight.
    """
    known = components(group, rep)
    if not 1 <= component <= len(known):
        raise ValueError(f"a {kind_of(group, rep)} of {group} has components 1 to {len(known)}, not {component}")
    vector = np.zeros(len(known))
    first_diagonal = 2 * len(positive_roots(group))
    if kind_of(group, rep) != "adjoint" or component <= first_diagonal:
        vector[component - 1] = 1
        return vector
    p = component - first_diagonal
    if group in ladders.SUPPORTED:
        return ladders.cartan_direction(group, p)
    n = size_of(group)
    entries = np.array([n - p] * p + [-p] * (n - p), dtype=float)
    vector[first_diagonal:] = _diagonals(n) @ entries / np.linalg.norm(entries)
    vector[np.abs(vector) < 1e-12] = 0  # rounding errors of a unit vector
    return vector


@lru_cache(_CACHE)
def generator(group: str, rep: Dynkin, root: Root, dual: bool = False) -> np.ndarray:
    """Return the generator of a root on the components; with `dual`, of the conjugate in the dual basis."""
    acting = ladders.ladder(group, rep, root) if group in ladders.SUPPORTED else _generator_of_su_n(group, rep, root)
    return -acting.T if dual else acting


@lru_cache(_CACHE)
def contraction(group: str, reps: tuple[Dynkin, ...], dual: bool = False) -> np.ndarray | None:
    """Return the invariant tensor of two or three representations, scaled to a largest entry of 1.

    With `dual`, the last representation is conjugated, in the dual basis. Returns None unless there is exactly one
    invariant.
    """
    labels = (*reps[:-1], conjugate(group, reps[-1])) if dual else reps
    if singlets_in(group, labels) != 1:
        return None
    duals = [False] * (len(reps) - 1) + [dual]
    weights = [np.array(components(group, rep)) * (-1 if d else 1) for rep, d in zip(reps, duals, strict=True)]
    shape = tuple(len(w) for w in weights)
    total = sum(w.reshape(*(-1 if i == j else 1 for j in range(len(reps))), w.shape[1]) for i, w in enumerate(weights))
    zero = np.asarray(total)[..., :1] if group not in ladders.SUPPORTED else 0  # equal coordinates of SU(N) are zero
    neutral = np.argwhere((np.asarray(total) == zero).all(axis=-1))
    # Each simple root must annihilate the tensor: the sum of the squares of all equations, as a quadratic form.
    squares = np.zeros((len(neutral),) * 2)
    for root in simple_roots(group):
        equations: dict[tuple[int, ...], list[tuple[int, float]]] = {}
        for place, (rep, d) in enumerate(zip(reps, duals, strict=True)):
            acting = generator(group, rep, root, d)
            reached = [np.flatnonzero(column).tolist() for column in acting.T]
            for unknown, index in enumerate(neutral.tolist()):
                for to in reached[index[place]]:
                    where = (*index[:place], to, *index[place + 1 :])
                    equations.setdefault(where, []).append((unknown, acting[to, index[place]]))
        for terms in equations.values():
            for one, x in terms:
                for other, y in terms:
                    squares[one, other] += x * y
    # Inverse iteration finds the vector of eigenvalue 0, which is unique.
    shifted = squares + 1e-9 * np.eye(len(neutral))
    solution: np.ndarray = np.random.default_rng(0).normal(size=len(neutral))
    for _ in range(2):
        solution = np.linalg.solve(shifted, solution)
        solution /= np.abs(solution).max()
    tensor = np.zeros(shape)
    tensor[tuple(neutral.T)] = solution
    largest = np.abs(tensor).max()
    first = next(value for value in tensor.flat if abs(value) > largest / 2)
    tensor *= np.sign(first) / largest
    for exact in (-1.0, 0.0, 1.0):
        tensor[np.abs(tensor - exact) < 1e-9] = exact
    tensor.flags.writeable = False
    return tensor


def _generator_of_su_n(group: str, rep: Dynkin, root: Root) -> np.ndarray:
    n = size_of(group)
    unit = np.zeros((n, n))
    unit[root.index(1), root.index(-1)] = 1
    isometry, signs = _isometry(group, rep)
    matrix = np.zeros((isometry.shape[1],) * 2)
    for place, sign in enumerate(signs):
        part = unit if sign > 0 else -unit.T
        factors: list[Any] = [part if i == place else np.eye(n) for i in range(len(signs))]
        matrix += reduce(np.kron, factors)
    return isometry @ matrix @ isometry.T


def _diagonals(n: int) -> np.ndarray:
    """Return an orthonormal basis of the traceless diagonal matrices: rows diag(1, ... k times, -k, 0, ...)."""
    rows = np.array([[1.0] * k + [-k] + [0.0] * (n - k - 1) for k in range(1, n)])
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@lru_cache(_CACHE)
def _isometry(group: str, rep: Dynkin) -> tuple[np.ndarray, tuple[int, ...]]:
    """Return the components as vectors in a product of fundamentals (1) and antifundamentals (-1)."""
    n, kind = size_of(group), kind_of(group, rep)
    if kind == "singlet":
        return np.zeros((1, n)), (1,)
    if kind in ("fund", "antifund"):
        return np.eye(n), (1 if kind == "fund" else -1,)
    if kind == "adjoint":
        moved = [i * n + j for i, j in permutations(range(n), 2)]
        diagonal = np.zeros((n - 1, n * n))
        diagonal[:, [i * n + i for i in range(n)]] = _diagonals(n)
        return np.concatenate([np.eye(n * n)[moved], diagonal]), (1, -1)
    pairs = list(combinations(range(n), 2))
    rows = np.zeros((len(pairs), n * n))
    for row, (i, j) in enumerate(pairs):
        rows[row, i * n + j], rows[row, j * n + i] = 0.5**0.5, -(0.5**0.5)
    return rows, (1, 1) if kind == "antisym" else (-1, -1)
