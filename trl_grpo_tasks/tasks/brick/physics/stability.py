"""Stability analysis of brick structures: is a structure stable, how close to failure is it, and where does it fail?

`analyse(structure)` computes the load factor: the smallest t for which every brick can be in static equilibrium with
no friction above t times what a stud can bear. The structure is stable if t < 1. The value is unique and does not
depend on the solver. The mode "published" is the analysis of StableLego and BrickGPT, for comparison with the papers.
Its weighted objective may prefer an unbalanced brick to a small friction, so it calls a few stable structures
unstable; its scores are not unique, so solvers may disagree on them.

A brick that no studs connect to the ground makes the structure unstable. Every connected structure has an equilibrium
at some load factor, because with unlimited friction a single stud can transfer any force and moment.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ..kit import KIT, Kit
from ..structure import GROUND, WORLD, Reading, Structure, parse
from .forces import ROWS, STUD_PITCH_M, Columns, Contacts, matrix_of
from .solvers import LinearProgram, SolverError, Solving, order_of, solve

__all__ = ["MODES", "Analysis", "Load", "SolverError", "analyse"]

MODES = ("load_factor", "published")
PUBLISHED_MAX_WEIGHT, PUBLISHED_SUM_WEIGHT = 1e-3, 1e-6
# Solvers agree on load factors to about 1e-8. Values this close to 1 count as 1, so that verdicts agree as well.
TOLERANCE = 1e-6


class Load(NamedTuple):
    """A weight on top of the brick in cell (x, y, z), at the centre of that cell."""

    x: int
    y: int
    z: int
    mass_kg: float


@dataclass(frozen=True)
class Analysis:
    """The result of `analyse`. Brick indices start at 0; brick numbers in `reasons` start at 1."""

    stable: bool
    load_factor: float | None  # None if no equilibrium exists at any load, or it was not computed
    failing: tuple[int, ...] = ()
    reasons: tuple[str, ...] = ()  # why the structure is unstable; empty if it is stable
    loads: tuple[float, ...] | None = None  # published mode: per brick, the largest friction relative to a stud's
    solver: str | None = None  # None if no solver was needed or none is installed


def analyse(
    bricks: Structure | str,
    mode: str = "load_factor",
    backend: str | Solving = "auto",
    *,
    masses: Sequence[float] | None = None,
    loads: Iterable[Load | tuple[int, int, int, float]] = (),
    world: int = WORLD,
    kit: Kit = KIT,
) -> Analysis:
    """Analyse a structure, or text in a world of the size `world` with bricks of `kit`.

    `backend` is the name of a solver, or a `Solving` with a time limit and a log. `masses` overrides the masses of the
    bricks, in kg; `loads` are weights placed on bricks.

    A structure that cannot be built, or text with an invalid line, is reported as unstable with the reason, because
    the input may be a model's output. For an overloaded structure, `failing` lists the bricks that give way first:
    those whose overload no redistribution of forces can relieve. The published mode fills `loads` with its scores; a
    failing brick has 1.

    Raises SolverError if no solver found a solution, which says nothing about the structure.

    >>> round(analyse("1x1 (5,5,0)\\n1x8 (5,5,1)\\n").load_factor, 6)
    0.098475
    >>> analyse("2x4 (0,0,0)\\n2x4 (0,0,2)\\n").reasons
    ('brick 2, 2x4 (0,0,2), floats: no stud connects it to the ground',)
    """
    if mode not in MODES:
        raise ValueError(f"unknown mode {mode!r}; modes are: {', '.join(MODES)}")
    reading = Reading(bricks) if isinstance(bricks, Structure) else parse(bricks, world, kit=kit)
    structure = reading.structure
    solving = Solving(backend) if isinstance(backend, str) else backend
    solvers = order_of(solving.backend, ROWS * len(structure))
    if reading.problems:
        return Analysis(False, None, reasons=tuple(reading.problems))
    failing, reasons = _unbuildable(structure)
    if reasons:
        return Analysis(False, None, failing, reasons)
    weights_N, unsupported = _weights_of(structure, masses, loads)
    floating = tuple(structure.floating)
    reasons = tuple(f"{_named(structure, i)}, floats: no stud connects it to the ground" for i in floating)
    reasons += tuple(f"the load of {load.mass_kg:g} kg at {tuple(load[:3])} is not on a brick" for load in unsupported)
    # The published analysis also scores floating bricks, so it runs in spite of them.
    if reasons and (mode != "published" or unsupported):
        return Analysis(False, None, floating, reasons)
    if not solvers:
        warnings.warn(
            "no linear-programming solver is installed, so stability only means that studs connect every brick to "
            'the ground, whatever the load. Install a solver with: pip install "trl_grpo_tasks[brick]"',
            RuntimeWarning,
            stacklevel=2,
        )
        return Analysis(not floating, None, floating, reasons)
    if mode == "published":
        return _published(structure, weights_N, solvers, solving)
    return _analyse_balance(structure, weights_N, solvers, solving)


def _unbuildable(structure: Structure) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the bricks that cannot be where they are, and messages for all problems."""
    unknown = [i for i, brick in enumerate(structure.bricks) if brick[:2] not in structure.kit.part_of]
    reasons = [f"{_named(structure, i)}, is not one of the parts" for i in unknown] + structure.problems()
    failing = {*unknown, *structure.outside, *(later for _, later in structure.collisions)}
    return tuple(sorted(failing)), tuple(reasons)


def _weights_of(
    structure: Structure, masses: Sequence[float] | None, loads: Iterable[Load | tuple[int, int, int, float]]
) -> tuple[np.ndarray, list[Load]]:
    """Return the gravity wrench per brick, [brick, row] in N and N x studs, and the loads that are not on a brick."""
    kit = structure.kit
    masses = [kit.part_of[brick[:2]].mass_kg for brick in structure.bricks] if masses is None else list(masses)
    placed = [Load(*load) for load in loads]
    if len(masses) != len(structure):
        raise ValueError(f"got {len(masses)} masses for {len(structure)} bricks; pass one mass per brick")
    for mass in (*masses, *(load.mass_kg for load in placed)):
        if not 0 <= mass < math.inf:
            raise ValueError(f"invalid mass {mass} kg: masses must be finite and not negative")
    weights_N = np.zeros((len(structure), ROWS))
    weights_N[:, 0] = np.array(masses) * kit.gravity
    unsupported = []
    for load in placed:
        inside = all(0 <= place < structure.world for place in load[:3])
        carrier = int(structure.owner[load.x, load.y, load.z]) if inside else GROUND
        if carrier == GROUND:
            unsupported.append(load)
            continue
        h, w, x, y, _ = structure.bricks[carrier]
        arms = (1, load.x - x - (h - 1) / 2, load.y - y - (w - 1) / 2)
        weights_N[carrier, :3] += load.mass_kg * kit.gravity * np.array(arms)
    return weights_N, unsupported


def _analyse_balance(
    structure: Structure, weights_N: np.ndarray, solvers: Sequence[str], solving: Solving
) -> Analysis:
    """Compute the load factor of a buildable structure whose bricks are all connected to the ground."""
    contacts = Contacts(structure)
    forces = [contacts.presses(), contacts.normals(), contacts.pushes()]
    grips = contacts.grips()
    every_grip = replace(grips, columns=np.zeros_like(grips.columns), count=1)
    matrix = matrix_of([*forces, every_grip], weights_N.size)
    cost = np.zeros(matrix.shape[1])
    cost[-1] = 1
    unit_N = _force_unit(weights_N)
    solution = solve(LinearProgram(matrix, weights_N.ravel() / unit_N, cost, forces[0].count), solvers, solving)
    load_factor = max(solution.value, 0.0) * unit_N / structure.kit.stud_strength_N
    if load_factor < 1 - TOLERANCE:
        return Analysis(True, load_factor, solver=solution.solver)
    # The duals describe a motion in which the structure gives way. Contacts that open in this motion are at their
    # limit in every equilibrium. `opening` sums the openings of the contacts under each brick; all add up to 1.
    opening = np.bincount(grips.columns, grips.values * solution.duals[grips.rows] * (grips.rows >= 0), len(structure))
    failing = tuple(np.flatnonzero(opening > TOLERANCE).tolist())
    reasons = tuple(f"{_named(structure, i)}, {_overloaded(load_factor)}" for i in failing)
    return Analysis(False, load_factor, failing, reasons, solver=solution.solver)


def _published(structure: Structure, weights_N: np.ndarray, solvers: Sequence[str], solving: Solving) -> Analysis:
    """Run the published analysis.

    It minimises the imbalance, plus 1e-3 of each brick's largest friction, plus 1e-6 of all frictions. The published
    program also forbids a contact point to push and pull at once. That condition is omitted because it always holds
    at the optimum: subtracting the smaller of the two from both keeps the balance and lowers the cost.
    """
    contacts, bricks, rows = Contacts(structure), len(structure), weights_N.size
    pulls, under = contacts.frictions()
    # One extra row per contact point: its friction plus a slack equals the brick's largest friction.
    points, point, one = pulls.count, np.arange(pulls.count), np.ones(pulls.count)
    frictions = Columns(
        np.append(pulls.rows, rows + point), np.append(pulls.columns, point), np.append(pulls.values, one), points
    )
    # At the optimum no horizontal force is unbalanced: that would cost 1, whereas passing it through studs to the
    # ground leaves a moment of at most 0.0096 per brick on the way. Hence the height of the moments' axes is
    # irrelevant, and horizontal imbalances need no columns.
    missed = np.flatnonzero(np.arange(rows) % ROWS < 3)
    missing = Columns(missed, np.arange(len(missed)), np.ones(len(missed)), len(missed))
    missing_cost = np.tile((1, STUD_PITCH_M, STUD_PITCH_M), bricks)
    presses = contacts.presses()
    blocks: list[tuple[Columns, float | np.ndarray]] = [
        (presses, 0),
        (contacts.normals(), 0),
        (contacts.pushes(), 0),
        (Columns(rows + point, point, one, points), 0),
        (frictions, PUBLISHED_SUM_WEIGHT),
        (Columns(rows + point, under, -one, bricks), PUBLISHED_MAX_WEIGHT),
        (missing, missing_cost),
        (replace(missing, values=-missing.values), missing_cost),
    ]
    cost = np.concatenate([np.broadcast_to(price, block.count) for block, price in blocks])
    matrix = matrix_of([block for block, _ in blocks], rows + points)
    unit_N = _force_unit(weights_N)
    rhs = np.append(weights_N.ravel() / unit_N, np.zeros(points))
    solution = solve(LinearProgram(matrix, rhs, cost, presses.count), solvers, solving)
    largest, amiss = np.split(solution.x[-bricks - 2 * len(missed) :], [bricks])
    shares = largest * unit_N / structure.kit.stud_strength_N
    unbalanced = np.any(amiss.reshape(2, bricks, 3) > TOLERANCE, axis=(0, 2))
    fails = unbalanced | (shares >= 1 - TOLERANCE)
    failing = tuple(np.flatnonzero(fails).tolist())
    amounts = ["is out of balance" if unbalanced[i] else _overloaded(shares[i]) for i in failing]
    reasons = tuple(f"{_named(structure, i)}, {amount}" for i, amount in zip(failing, amounts, strict=True))
    loads = tuple(np.where(fails, 1.0, np.maximum(shares, 0)).tolist())
    return Analysis(not failing, None, failing, reasons, loads, solution.solver)


def _force_unit(weights_N: np.ndarray) -> float:
    """Return the mean weight. In this unit, forces suit the solvers' tolerances whatever the masses are."""
    return float(weights_N[:, 0].mean()) or 1.0


def _named(structure: Structure, index: int) -> str:
    return f"brick {index + 1}, {structure.bricks[index]}"


def _overloaded(times: float) -> str:
    return f"is overloaded: it needs {times:.4g} times the friction that its studs can provide"
