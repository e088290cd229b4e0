"""Linear programs in standard form and the solvers for them: HiGHS, Clarabel, and Gurobi if it has a licence.

All solvers give the same answers. `solve` tries the next solver if one fails, for example because it does not converge
or its licence does not cover a model of this size.
"""

from __future__ import annotations

import importlib.util
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np

BACKENDS = ("auto", "highs", "clarabel", "gurobi")
# Up to 20 bricks (five rows each), HiGHS takes about a millisecond and is exact to the last digits. Clarabel is exact
# to eight digits and takes half the time at this size, a third at 100 bricks, and relatively less beyond.
SMALL_ROWS = 100
# HiGHS's presolve costs about a millisecond; it was measured to pay off from about this size.
PRESOLVE_ROWS = 250
_MODULES = {"highs": ("highspy", "scipy"), "clarabel": ("clarabel", "scipy"), "gurobi": ("gurobipy", "scipy")}


class SolverError(RuntimeError):
    """Raised when no solver found a solution. This says nothing about the structure."""


@dataclass(frozen=True)
class Solving:
    """How programs are solved: by which solver, for how many seconds at most each, and the file that logs each try.

    A solver that reaches the time limit has failed, so the next one is tried.
    """

    backend: str = "auto"
    time_limit_s: float | None = None
    log: str | None = None

    @contextmanager
    def logged(self, solver: str, rows: int, columns: int) -> Iterator[None]:
        """Append a line about the solver's run in this context to the log, if there is one."""
        if self.log is None:
            yield
            return
        began, result = time.perf_counter(), "solved"
        try:
            yield
        except Exception as error:
            result = f"failed: {error}"
            raise
        finally:
            milliseconds = 1e3 * (time.perf_counter() - began)
            now = datetime.now().isoformat(timespec="milliseconds")
            what = f"{solver}, {rows} rows, {columns} columns, {milliseconds:.2f} ms, {' '.join(result.split())}"
            with open(self.log, "a", encoding="utf-8") as file:
                file.write(f"{now} process {os.getpid()}: {what}\n")  # one write, so that processes do not mix lines


@dataclass(frozen=True)
class LinearProgram:
    """Minimise `cost @ x` subject to `matrix @ x == rhs`; x[free:] >= 0, the first `free` variables are unbounded."""

    matrix: Any  # scipy.sparse.csc_array
    rhs: np.ndarray
    cost: np.ndarray
    free: int


@dataclass(frozen=True)
class Solution:
    x: np.ndarray
    duals: np.ndarray  # one per row: the change of the cost per unit of that right-hand side
    value: float
    solver: str


def installed(solver: str) -> bool:
    """Return whether the solver can be used; Gurobi also needs a licence."""
    if any(importlib.util.find_spec(module) is None for module in _MODULES[solver]):
        return False
    return solver != "gurobi" or _gurobi_environment() is not None


def order_of(backend: str, rows: int) -> list[str]:
    """Return the solvers to try for a model with this many rows, best first; empty if none is available.

    HiGHS or Clarabel must be installed if named as `backend`. Gurobi, which also needs a licence, falls back to them.
    """
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; backends are: {', '.join(BACKENDS)}")
    if backend in ("highs", "clarabel") and not installed(backend):
        modules = " and ".join(_MODULES[backend])
        raise ImportError(f'backend {backend!r} needs {modules}: pip install "trl_grpo_tasks[brick]"')
    order = ["highs", "clarabel", "gurobi"] if rows <= SMALL_ROWS else ["clarabel", "highs", "gurobi"]
    if backend != "auto":
        order = [backend, *(solver for solver in order if solver != backend)]
    return order if any(map(installed, order)) else []


def solve(program: LinearProgram, solvers: Sequence[str], solving: Solving) -> Solution:
    """Return the answer of the first solver that succeeds. Every program here is solvable, so failure is an error."""
    errors = []
    for solver in solvers:
        try:
            with solving.logged(solver, *program.matrix.shape):
                x, duals = _SOLVE_WITH[solver](program, solving)
        except Exception as error:  # noqa: BLE001 - whatever the failure, the next solver may succeed
            errors.append(f"{solver}: {error}")
        else:
            return Solution(x, duals, float(program.cost @ x), solver)
    raise SolverError(f"no solver found a solution; {'; '.join(errors)}")


def _solve_highs(program: LinearProgram, solving: Solving) -> tuple[np.ndarray, np.ndarray]:
    import highspy

    rows, columns = program.matrix.shape
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = columns, rows
    model.col_cost_ = program.cost
    lower = np.zeros(columns)
    lower[: program.free] = -highspy.kHighsInf
    model.col_lower_, model.col_upper_ = lower, np.full(columns, highspy.kHighsInf)
    model.row_lower_ = model.row_upper_ = program.rhs
    model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    model.a_matrix_.start_ = program.matrix.indptr
    model.a_matrix_.index_ = program.matrix.indices
    model.a_matrix_.value_ = program.matrix.data
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("threads", 1)
    if solving.time_limit_s is not None:
        highs.setOptionValue("time_limit", float(solving.time_limit_s))
    if rows < PRESOLVE_ROWS:
        highs.setOptionValue("presolve", "off")
    highs.passModel(model)
    if highs.run() == highspy.HighsStatus.kError:
        # HiGHS has one thread pool per process and rejects a thread count other than the first one used.
        highs.setOptionValue("threads", 0)
        highs.run()
    if (status := highs.getModelStatus()) != highspy.HighsModelStatus.kOptimal:
        raise SolverError(f"ended with {highs.modelStatusToString(status)!r}")
    solution = highs.getSolution()
    return np.array(solution.col_value), np.array(solution.row_dual)


def _solve_clarabel(program: LinearProgram, solving: Solving) -> tuple[np.ndarray, np.ndarray]:
    """Solve the dual: maximise `rhs @ y` subject to `matrix.T @ y <= cost`. Its multipliers are the primal x.

    The dual has half as many unknowns, because it needs no rows for x >= 0.
    """
    import clarabel
    from scipy import sparse

    rows, columns = program.matrix.shape
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.max_threads = 1
    if solving.time_limit_s is not None:
        settings.time_limit = float(solving.time_limit_s)
    settings.iterative_refinement_enable = False  # saves a third of the time; answers agreed to eight digits
    settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = 1e-9
    cones = [clarabel.ZeroConeT(program.free), clarabel.NonnegativeConeT(columns - program.free)]
    no_squares = sparse.csc_array((rows, rows))
    solver = clarabel.DefaultSolver(no_squares, -program.rhs, program.matrix.T.tocsc(), program.cost, cones, settings)
    solution = solver.solve()
    if solution.status != clarabel.SolverStatus.Solved:
        raise SolverError(f"ended with {str(solution.status)!r}")
    return np.array(solution.z), np.array(solution.x)


def _solve_gurobi(program: LinearProgram, solving: Solving) -> tuple[np.ndarray, np.ndarray]:
    import gurobipy

    environment = _gurobi_environment()
    if environment is None:
        raise SolverError("no licence found")
    with gurobipy.Model(env=environment) as model:
        if solving.time_limit_s is not None:
            model.setParam("TimeLimit", float(solving.time_limit_s))
        lower = np.zeros(len(program.cost))
        lower[: program.free] = -gurobipy.GRB.INFINITY
        x = model.addMVar(len(lower), lb=lower, obj=program.cost)
        balance = model.addMConstr(program.matrix, x, "=", program.rhs)
        model.optimize()
        if model.Status != gurobipy.GRB.OPTIMAL:
            raise SolverError(f"ended with status {model.Status}")
        return np.asarray(x.X), np.asarray(balance.Pi)


_gurobi = threading.local()  # an environment serves one thread, and starting one may contact a licence server


def _gurobi_environment() -> Any:
    """Return this thread's silent Gurobi environment, or None without a licence (checked once per thread)."""
    import gurobipy

    if not hasattr(_gurobi, "environment"):
        _gurobi.environment = None
        try:
            environment = gurobipy.Env(empty=True)
            environment.setParam("OutputFlag", 0)  # set before start(), which would print the licence
            environment.setParam("Threads", 1)
            environment.start()
            _gurobi.environment = environment
        except gurobipy.GurobiError:
            pass
    return _gurobi.environment


_SOLVE_WITH: dict[str, Callable[[LinearProgram, Solving], tuple[np.ndarray, np.ndarray]]] = {
    "highs": _solve_highs,
    "clarabel": _solve_clarabel,
    "gurobi": _solve_gurobi,
}
