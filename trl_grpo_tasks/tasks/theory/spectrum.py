"""Singular values of matrices with entries of very different sizes, each to high relative precision.

An ordinary decomposition is accurate only relative to the largest singular value: next to a mass of 1e6 GeV it cannot
distinguish 1e-10 GeV from zero. Here, Gaussian elimination with complete pivoting writes the matrix as a sum of
products d x y^T, which keeps small entries separate from large ones; the number of products is the rank. One-sided
Jacobi rotations then give the singular values (Demmel and others, Linear Algebra and its Applications 299, 1999).
"""

from __future__ import annotations

import numpy as np

ENTRY_ERROR = 1e-14  # relative error of an entry, a sum of a few products of couplings and tensor components
WELL_SPREAD = 1e-6  # if the smallest singular value exceeds this fraction of the largest, ordinary SVD suffices
MAX_SWEEPS = 60  # about six are needed in practice


def singular_values(matrix: np.ndarray) -> np.ndarray:
    """Return the singular values, largest first, with exact zeros where the matrix is rank deficient.

    An entry left by elimination counts as 0 if the rounding errors of its terms explain it, whatever its size.
    """
    count = min(matrix.shape)
    if not matrix.any():
        return np.zeros(count)
    values = np.linalg.svd(matrix, compute_uv=False)
    if values[-1] > WELL_SPREAD * values[0]:
        return values
    factors, columns, rows, _ = _eliminate(matrix)
    found = _jacobi(factors, columns, rows)
    return np.concatenate([found, np.zeros(count - len(found))])


def restricted_singular_values(matrix: np.ndarray, excluded: np.ndarray) -> np.ndarray:
    """Return the singular values of a matrix on the vectors that are orthogonal to every row of `excluded`.

    If the columns of Z span these vectors and Z = Q R, they are the singular values of matrix Z R^-1. Elimination
    gives small entries of Z precisely; in an orthonormal basis they would carry the rounding errors of large ones.
    """
    if not excluded.any():
        return singular_values(matrix)
    basis = _null_space(excluded)
    found = np.zeros(0)
    if (matrix @ basis).any():
        factors, columns, rows, _ = _eliminate(matrix @ basis)
        triangle = np.linalg.qr(basis)[1]
        found = _jacobi(factors, columns, np.linalg.solve(triangle.T, rows))
    return np.concatenate([found, np.zeros(basis.shape[1] - len(found))])


def _null_space(matrix: np.ndarray) -> np.ndarray:
    """Return a basis of the vectors x with matrix x = 0, as columns."""
    _, _, rows, pivots = _eliminate(matrix)
    free = [i for i in range(matrix.shape[1]) if i not in pivots]
    basis = np.zeros((matrix.shape[1], len(free)))
    basis[free, range(len(free))] = 1
    for pivot, row in zip(reversed(pivots), rows.T[::-1], strict=True):  # a row is 0 at the pivots before its own
        terms = row[:, None] * basis
        total = terms.sum(axis=0)
        basis[pivot] = np.where(np.abs(total) <= ENTRY_ERROR * np.abs(terms).sum(axis=0), 0.0, -total)
    return basis


def _eliminate(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[int]]:
    """Return d, X and Y with matrix = X diag(d) Y^T and entries of X and Y of at most 1, and the pivots' columns."""
    left, error = matrix.copy(), ENTRY_ERROR * np.abs(matrix)
    factors, columns, rows, pivots = [], [], [], []
    while left.any():
        i, j = np.unravel_index(np.abs(left).argmax(), left.shape)
        pivot = left[i, j]
        column, row = left[:, j] / pivot, left[i] / pivot
        product = pivot * np.outer(column, row)
        relative = error[i, j] / abs(pivot)
        # The error of a b / pivot: those of a, b and the pivot, plus rounding.
        error = error + np.outer(error[:, j], np.abs(row)) + np.outer(np.abs(column), error[i])
        error += np.abs(product) * (relative + ENTRY_ERROR)
        left = left - product
        left[np.abs(left) <= error] = 0
        left[i], left[:, j] = 0, 0
        error[left == 0] = 0
        factors.append(pivot)
        columns.append(column)
        rows.append(row)
        pivots.append(int(j))
    return np.array(factors), np.array(columns).T, np.array(rows).T, pivots


def _jacobi(factors: np.ndarray, columns: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the singular values of columns diag(factors) rows^T."""
    order = np.argsort(-np.abs(factors), kind="stable")
    triangle = np.linalg.qr((columns * factors)[:, order], mode="r")  # its rows decrease like the factors
    vectors = triangle @ rows.T[order]
    for _ in range(MAX_SWEEPS):
        rotated = False
        for p in range(len(vectors) - 1):
            for q in range(p + 1, len(vectors)):
                one, two, both = vectors[p] @ vectors[p], vectors[q] @ vectors[q], vectors[p] @ vectors[q]
                if abs(both) > 1e-15 * len(vectors) * np.sqrt(one * two):
                    rotated = True
                    half = (two - one) / (2 * both)
                    tangent = (1.0 if half >= 0 else -1.0) / (abs(half) + np.hypot(1.0, half))
                    cosine = 1 / np.hypot(1.0, tangent)
                    vectors[[p, q]] = [
                        cosine * (vectors[p] - tangent * vectors[q]),
                        cosine * (vectors[q] + tangent * vectors[p]),
                    ]
        if not rotated:
            break
    return np.sort(np.linalg.norm(vectors, axis=1))[::-1]
