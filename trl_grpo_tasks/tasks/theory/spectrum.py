"""Singular values of matrices whose entries lie many powers of ten apart, each to its own precision.

An ordinary decomposition is precise to a part of the largest singular value, so next to a mass of 1e6 GeV it cannot
tell one of 1e-10 GeV from zero. Here the matrix becomes a sum of products d x y^T by Gaussian elimination with
complete pivoting, which keeps small entries apart from large ones; the number of products is the rank. One-sided
Jacobi rotations then find the singular values (Demmel and others, Linear Algebra and its Applications 299, 1999).
"""

from __future__ import annotations

import numpy as np

ENTRY_ERROR = 1e-14  # of an entry, as a part of itself: sums of a few products of couplings and tensor components
WELL_SPREAD = 1e-6  # singular values no further apart than this are precise enough from an ordinary decomposition
MAX_SWEEPS = 60  # about six are needed


def singular_values(matrix: np.ndarray) -> np.ndarray:
    """The singular values, largest first. They are 0 exactly where the rank says so: an entry that is left over by
    elimination is 0 if the rounding of what it is the difference of explains it, whatever its size."""
    count = min(matrix.shape)
    if not matrix.any():
        return np.zeros(count)
    values = np.linalg.svd(matrix, compute_uv=False)
    if values[-1] > WELL_SPREAD * values[0]:
        return values
    found = _jacobi(*_eliminate(matrix))
    return np.concatenate([found, np.zeros(count - len(found))])


def _eliminate(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """d, X and Y with matrix = X diag(d) Y^T, |d| falling; the columns of X and Y have entries of at most 1."""
    left, error = matrix.copy(), ENTRY_ERROR * np.abs(matrix)
    factors, columns, rows = [], [], []
    while left.any():
        i, j = np.unravel_index(np.abs(left).argmax(), left.shape)
        pivot = left[i, j]
        column, row = left[:, j] / pivot, left[i] / pivot
        product = pivot * np.outer(column, row)
        relative = error[i, j] / abs(pivot)
        # The error of a b / pivot: that of a, of b and of the pivot, and its own rounding.
        error = error + np.outer(error[:, j], np.abs(row)) + np.outer(np.abs(column), error[i])
        error += np.abs(product) * (relative + ENTRY_ERROR)
        left = left - product
        left[np.abs(left) <= error] = 0
        left[i], left[:, j] = 0, 0
        error[left == 0] = 0
        factors.append(pivot)
        columns.append(column)
        rows.append(row)
    order = np.argsort(-np.abs(factors), kind="stable")
    return np.array(factors)[order], np.array(columns)[order].T, np.array(rows)[order].T


def _jacobi(factors: np.ndarray, columns: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The singular values of columns diag(factors) rows^T."""
    triangle = np.linalg.qr(columns * factors, mode="r")  # its rows fall like the factors
    vectors = triangle @ rows.T
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
