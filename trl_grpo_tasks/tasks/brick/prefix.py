"""Stability of a structure while it is built: one load factor per prefix of its bricks.

It serves dense rewards, curricula, and rollback to the last stable brick. The linear program of a prefix extends that
of the previous one by one brick, so HiGHS keeps its basis and continues from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from .balance import Load, analyse_balance, force_unit, unbuildable, warn_no_solver, weights_of
from .forces import ROWS, Contacts, matrix_of
from .kit import KIT, Kit
from .solvers import SOLVING, SolverError, Solving, installed, order_of, quiet_highs, run_highs
from .structure import WORLD, Structure, structure_of


def prefix_stability(
    bricks: Structure | str | Iterable[Sequence[int]],
    *,
    masses: Sequence[float] | None = None,
    loads: Iterable[Load | tuple[int, int, int, float]] = (),
    world: int = WORLD,
    kit: Kit = KIT,
    solving: Solving = SOLVING,
) -> list[float | None]:
    """Return the load factor of the first brick, of the first two, and so on, as `analyse` would compute them.

    The entry is None while a brick floats until a later one connects it, and from the first brick that cannot be
    built. A load counts from the brick that carries it. HiGHS solves where it is installed, whatever the backend of
    `solving`.

    >>> [round(factor, 4) for factor in prefix_stability("1x1 (5,5,0)\\n1x4 (5,5,1)\\n1x8 (5,5,2)\\n")]
    [0.0, 0.0196, 0.1181]
    """
    structure = structure_of(bricks, world, kit)
    factors: list[float | None] = [None] * len(structure)
    failing, _ = unbuildable(structure)
    sound = min(failing, default=len(structure))
    structure = structure.first(sound)
    grounded = _grounded(structure)
    if not any(grounded):
        return factors
    weights_N, _ = weights_of(structure, None if masses is None else masses[:sound], loads)
    solvers = order_of("auto", weights_N.size)
    if not solvers:
        warn_no_solver()
        return factors
    warm = _WarmProgram(structure, weights_N, solving) if installed("highs") else None
    for last in np.flatnonzero(grounded).tolist():
        if warm is not None:
            try:
                factors[last] = warm.load_factor(last + 1)
                continue
            except SolverError:
                warm = None  # solve each remaining prefix as a separate program, with any solver
        prefix = structure.first(last + 1)
        factors[last] = analyse_balance(prefix, weights_N[: last + 1], solvers, solving).load_factor
    return factors


def _grounded(structure: Structure) -> list[bool]:
    """Return, for each brick, whether studs connect it and all earlier bricks to the ground."""
    ground = len(structure)
    parent, size = list(range(ground + 1)), [1] * (ground + 1)

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = i = parent[parent[i]]
        return i

    result = []
    links = sorted((max(link), *link) for link in structure.links)
    position = 0
    for last in range(ground):
        while position < len(links) and links[position][0] == last:
            a, b = (root(i % (ground + 1)) for i in links[position][1:])  # -1 (the ground) becomes the last index
            if a != b:
                parent[a] = b
                size[b] += size[a]
            position += 1
        result.append(size[root(ground)] == last + 2)
    return result


class _WarmProgram:
    """The load-factor program of a growing prefix of a structure, in a HiGHS instance that keeps its basis."""

    def __init__(self, structure: Structure, weights_N: np.ndarray, solving: Solving):
        import highspy

        contacts = Contacts.of(structure)
        presses, normals, pushes = contacts.presses(), contacts.normals(), contacts.pushes()
        matrix = matrix_of([presses, normals, pushes], weights_N.size)
        matrix.sort_indices()
        # A force enters with the later of its two bricks, which owns the last row of the force's column.
        brick = matrix.indices[matrix.indptr[1:] - 1] // ROWS
        order = np.argsort(brick, kind="stable")
        self._forces: Any = matrix[:, order]
        self._forces_before = np.searchsorted(brick[order], np.arange(len(structure) + 1))
        self._lower = np.where(order < presses.count, -highspy.kHighsInf, 0.0)

        grips = contacts.grips()
        brick = np.tile(np.maximum(contacts.lower, contacts.upper), len(grips.rows) // len(contacts.upper))
        order = np.argsort(brick, kind="stable")
        self._grip_rows, self._grip_values = grips.rows[order], grips.values[order]
        self._grips_before = np.searchsorted(brick[order], np.arange(len(structure) + 1))

        self._unit_N = force_unit(weights_N)
        self._weights = weights_N.ravel() / self._unit_N
        self._friction = np.zeros(weights_N.size)  # the only column that changes as bricks are added
        self._bricks = 0
        self._infinity = highspy.kHighsInf
        self._stud_strength_N, self._solving = structure.kit.stud_strength_N, solving
        self._highs = quiet_highs(solving)
        # Measured at 200 bricks: from an extended basis, the primal simplex takes a third of the dual's time.
        for option, value in (("presolve", "off"), ("simplex_strategy", 4), ("simplex_scale_strategy", 0)):
            self._highs.setOptionValue(option, value)
        self._highs.addCols(1, [1.0], [0.0], [self._infinity], 0, [0], [], [])

    def load_factor(self, bricks: int) -> float:
        """Return the load factor of the first `bricks` bricks; must be called with increasing numbers."""
        highs, none = self._highs, np.zeros(0, dtype=np.int32)
        weights = self._weights[ROWS * self._bricks : ROWS * bricks]
        highs.addRows(len(weights), weights, weights, 0, np.zeros(len(weights), dtype=np.int32), none, np.zeros(0))

        begin, end = self._forces_before[[self._bricks, bricks]]
        starts = self._forces.indptr[begin : end + 1]
        entries = slice(starts[0], starts[-1])
        highs.addCols(
            end - begin,
            np.zeros(end - begin),
            self._lower[begin:end],
            np.full(end - begin, self._infinity),
            starts[-1] - starts[0],
            starts[:-1] - starts[0],
            self._forces.indices[entries],
            self._forces.data[entries],
        )

        taken = slice(*self._grips_before[[self._bricks, bricks]])
        rows, values = self._grip_rows[taken], self._grip_values[taken]
        rows, values = rows[rows >= 0], values[rows >= 0]
        np.add.at(self._friction, rows, values)
        for row in np.unique(rows).tolist():
            highs.changeCoeff(row, 0, self._friction[row])

        self._bricks = bricks
        if self._solving.time_limit_s is not None:  # HiGHS adds up the time of all runs of an instance
            highs.setOptionValue("time_limit", highs.getRunTime() + self._solving.time_limit_s)
        with self._solving.logged("highs", ROWS * bricks, end + 1):
            run_highs(highs)
        return max(highs.getInfo().objective_function_value, 0.0) * self._unit_N / self._stud_strength_N
