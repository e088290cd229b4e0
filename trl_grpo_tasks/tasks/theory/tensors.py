"""Components of small SU(N) representations, the action of generators on them, and invariant tensors.

Supported are the singlet, fundamental, antifundamental, adjoint, and the antisymmetric pair with its conjugate.
Components are orthonormal. Generators are E_ab (row a, column b of the fundamental, a != b) and diagonal ones. A
diagonal generator diag(x_1 ... x_N) multiplies a component by the sum of weight_i x_i.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from .groups import Dynkin, algebra, conjugate, reality, singlets_in

_CACHE = 4096
KINDS = ("singlet", "fund", "antifund", "adjoint", "antisym", "conj_antisym")


def size_of(group: str) -> int:
    """Return N of "SU(N)"; raise ValueError for another group."""
    lie = algebra(group)
    if lie.series != "A":
        raise ValueError(f"masses and breaking support SU(N) and U(1), not {group}; its anomalies can be computed")
    return lie.rank + 1


@lru_cache(_CACHE)
def reps_of(group: str) -> dict[str, Dynkin]:
    """Return the supported representations of SU(N), by kind.

    Each occurs once: the antisymmetric pair of SU(3) is its antifundamental, and SU(2) has one doublet.
    """
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
    """Return the weight of each component. The last N - 1 components of an adjoint are diagonal."""
    n, kind = size_of(group), kind_of(group, rep)
    if kind == "singlet":
        return ((0,) * n,)
    if kind in ("fund", "antifund"):
        return tuple(_weight(n, [i], 1 if kind == "fund" else -1) for i in range(n))
    if kind == "adjoint":
        moved = [tuple(int(k == i) - int(k == j) for k in range(n)) for i in range(n) for j in range(n) if i != j]
        return (*moved, *[(0,) * n] * (n - 1))
    sign = 1 if kind == "antisym" else -1
    return tuple(_weight(n, [i, j], sign) for i in range(n) for j in range(i + 1, n))


@lru_cache(_CACHE)
def direction(group: str, rep: Dynkin, component: int) -> np.ndarray:
    """Return the unit vector of a vev in component 1, 2, ...

    The last components of an adjoint preserve a large group: number N (N - 1) + p is diag(N-p, ... p times, -p, ...),
    which leaves SU(p) x SU(N-p) x U(1) unbroken.
    """
    known = components(group, rep)
    if not 1 <= component <= len(known):
        raise ValueError(f"a {kind_of(group, rep)} of {group} has components 1 to {len(known)}, not {component}")
    n = size_of(group)
    vector = np.zeros(len(known))
    first_diagonal = n * (n - 1)
    if kind_of(group, rep) != "adjoint" or component <= first_diagonal:
        vector[component - 1] = 1
        return vector
    p = component - first_diagonal
    entries = np.array([n - p] * p + [-p] * (n - p), dtype=float)
    vector[first_diagonal:] = _diagonals(n) @ entries / np.linalg.norm(entries)
    vector[np.abs(vector) < 1e-12] = 0  # rounding errors of a unit vector
    return vector


@lru_cache(_CACHE)
def generator(group: str, rep: Dynkin, a: int, b: int, dual: bool = False) -> np.ndarray:
    """Return E_ab (a != b, from 0) on the components; with `dual`, of the conjugate in the dual basis."""
    n = size_of(group)
    unit = np.zeros((n, n))
    unit[a, b] = 1
    isometry, signs = _isometry(group, rep)
    matrix = np.zeros((isometry.shape[1],) * 2)
    for place, sign in enumerate(signs):
        part = unit if sign > 0 else -unit.T
        factors = [part if i == place else np.eye(n) for i in range(len(signs))]
        product: np.ndarray = factors[0]
        for factor in factors[1:]:
            product = np.kron(product, factor)
        matrix += product
    acting = isometry @ matrix @ isometry.T
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
    neutral = np.argwhere((np.asarray(total) == np.asarray(total)[..., :1]).all(axis=-1))  # all equal: zero weight
    equations = []
    for a in range(size_of(group) - 1):
        raised = np.zeros((len(neutral), *shape))
        for place, (rep, d) in enumerate(zip(reps, duals, strict=True)):
            acting = generator(group, rep, a, a + 1, d)
            for row, index in enumerate(neutral):
                where = tuple(index[:place]), tuple(index[place + 1 :])
                raised[(row, *where[0], slice(None), *where[1])] += acting[:, index[place]]
        reached = raised.reshape(len(neutral), -1).T
        equations.append(reached[reached.any(axis=1)])
    system = np.concatenate(equations)
    # The eigenvector of the smallest eigenvalue, which is 0: much faster than an SVD of the tall system.
    solution = np.linalg.eigh(system.T @ system)[1][:, 0]
    tensor = np.zeros(shape)
    tensor[tuple(neutral.T)] = solution
    largest = np.abs(tensor).max()
    first = next(value for value in tensor.flat if abs(value) > largest / 2)
    tensor *= np.sign(first) / largest
    for exact in (-1.0, 0.0, 1.0):
        tensor[np.abs(tensor - exact) < 1e-9] = exact
    tensor.flags.writeable = False
    return tensor


@lru_cache(_CACHE)
def exchange_sign(group: str, rep: Dynkin, third: Dynkin | None = None, dual: bool = False) -> int:
    """Return 1 if the invariant of two `rep` (and a third) is symmetric in the two, -1 if antisymmetric, 0 if none."""
    if third is None:
        return reality(group, rep)
    tensor = contraction(group, (rep, rep, third), dual)
    if tensor is None:
        return 0
    return 1 if np.allclose(tensor, tensor.swapaxes(0, 1)) else -1


def _weight(n: int, indices: list[int], sign: int) -> tuple[int, ...]:
    return tuple(sign * indices.count(i) for i in range(n))


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
        moved = [i * n + j for i in range(n) for j in range(n) if i != j]
        diagonal = np.zeros((n - 1, n * n))
        diagonal[:, [i * n + i for i in range(n)]] = _diagonals(n)
        return np.concatenate([np.eye(n * n)[moved], diagonal]), (1, -1)
    pairs = [(i, j) for i in range(n) for j in range(i + 1, n)]
    rows = np.zeros((len(pairs), n * n))
    for row, (i, j) in enumerate(pairs):
        rows[row, i * n + j], rows[row, j * n + i] = 0.5**0.5, -(0.5**0.5)
    return rows, (1, 1) if kind == "antisym" else (-1, -1)
