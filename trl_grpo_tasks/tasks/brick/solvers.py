"""Linear programs in standard form, and the solvers that answer them: HiGHS, Clarabel, and Gurobi if licensed.

All give the same answers. `solve` takes the next solver when one is not licensed for a model of this size or does not
converge.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

BACKENDS = ("auto", "highs", "clarabel", "gurobi")
# Up to 20 bricks of five rows HiGHS takes a millisecond or so and is exact to the last digits. Clarabel is good to
# eight digits, and takes half of that time here, a third at 100 bricks, less beyond.
SMALL_ROWS = 100
# Measured: HiGHS's presolve costs about a millisecond, and pays that back from about here on.
PRESOLVE_ROWS = 250
_MODULES = {"highs": ("highspy", "scipy"), "clarabel": ("clarabel", "scipy"), "gurobi": ("gurobipy", "scipy")}


class SolverError(RuntimeError):
    """No solver gave an answer. This says nothing about the structure."""


@dataclass(frozen=True)
class LinearProgram:
    """The least `cost @ x` with `matrix @ x == rhs`. The first `free` of x have any sign, the others are >= 0."""

    matrix: Any  # scipy.sparse.csc_array
    rhs: np.ndarray
    cost: np.ndarray
    free: int


@dataclass(frozen=True)
class Solution:
    x: np.ndarray
    duals: np.ndarray  # one a row: what the cost gains when that right-hand side grows by one
    value: float
    solver: str


def installed(solver: str) -> bool:
    """Whether the solver can be used: for Gurobi, also whether there is a licence."""
    if any(importlib.util.find_spec(module) is None for module in _MODULES[solver]):
        return False
    return solver != "gurobi" or _gurobi_environment() is not None


def order_of(backend: str, rows: int) -> list[str]:
    """The solvers to ask for a model of this size, best first; empty if none can be used. An open solver that is asked
    for by name must be installed; Gurobi, which needs a licence besides, need not be."""
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; backends are: {', '.join(BACKENDS)}")
    if backend in ("highs", "clarabel") and not installed(backend):
        modules = " and ".join(_MODULES[backend])
        raise ImportError(f'backend {backend!r} needs {modules}: pip install "trl_grpo_tasks[brick]"')
    order = ["highs", "clarabel", "gurobi"] if rows <= SMALL_ROWS else ["clarabel", "highs", "gurobi"]
    if backend != "auto":
        order = [backend, *(solver for solver in order if solver != backend)]
    return order if any(map(installed, order)) else []


def solve(program: LinearProgram, solvers: Sequence[str]) -> Solution:
    """The answer of the first of `solvers` that has one. All our programs have one, so no answer is an error."""
    said = []
    for solver in solvers:
        try:
            x, duals = _ASK[solver](program)
        except Exception as error:  # noqa: BLE001 - whatever ails one solver, the next may do
            said.append(f"{solver}: {error}")
        else:
            return Solution(x, duals, float(program.cost @ x), solver)
    raise SolverError(f"no solver gave an answer; {'; '.join(said)}")


def quiet_highs() -> Any:
    """A HiGHS that prints nothing and starts no threads."""
    import highspy

    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("threads", 1)
    return highs


def run_highs(highs: Any) -> None:
    """Solve the model that `highs` holds, or raise SolverError."""
    import highspy

    if highs.run() == highspy.HighsStatus.kError:
        # HiGHS has one pool of threads a process, and refuses a number other than the one it was started with.
        highs.setOptionValue("threads", 0)
        highs.run()
    if (status := highs.getModelStatus()) != highspy.HighsModelStatus.kOptimal:
        raise SolverError(f"ended with {highs.modelStatusToString(status)!r}")


def _ask_highs(program: LinearProgram) -> tuple[np.ndarray, np.ndarray]:
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
    highs = quiet_highs()
    if rows < PRESOLVE_ROWS:
        highs.setOptionValue("presolve", "off")
    highs.passModel(model)
    run_highs(highs)
    solution = highs.getSolution()
    return np.array(solution.col_value), np.array(solution.row_dual)


def _ask_clarabel(program: LinearProgram) -> tuple[np.ndarray, np.ndarray]:
    """Solves the dual, the most of `rhs @ y` with `matrix.T @ y <= cost`: half as many unknowns, as it needs no rows
    for x >= 0. Its multipliers are our x."""
    import clarabel
    from scipy import sparse

    rows, columns = program.matrix.shape
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.max_threads = 1
    settings.iterative_refinement_enable = False  # a third of the time; the answers were the same to eight digits
    settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = 1e-9
    cones = [clarabel.ZeroConeT(program.free), clarabel.NonnegativeConeT(columns - program.free)]
    no_squares = sparse.csc_array((rows, rows))
    solver = clarabel.DefaultSolver(no_squares, -program.rhs, program.matrix.T.tocsc(), program.cost, cones, settings)
    solution = solver.solve()
    if solution.status != clarabel.SolverStatus.Solved:
        raise SolverError(f"ended with {str(solution.status)!r}")
    return np.array(solution.z), np.array(solution.x)


def _ask_gurobi(program: LinearProgram) -> tuple[np.ndarray, np.ndarray]:
    import gurobipy

    environment = _gurobi_environment()
    if environment is None:
        raise SolverError("has no licence")
    with gurobipy.Model(env=environment) as model:
        lower = np.zeros(len(program.cost))
        lower[: program.free] = -gurobipy.GRB.INFINITY
        x = model.addMVar(len(lower), lb=lower, obj=program.cost)
        balance = model.addMConstr(program.matrix, x, "=", program.rhs)
        model.optimize()
        if model.Status != gurobipy.GRB.OPTIMAL:
            raise SolverError(f"ended with status {model.Status}")
        return np.asarray(x.X), np.asarray(balance.Pi)


_gurobi = threading.local()  # an environment serves one thread, and starting one may ask a licence server


def _gurobi_environment() -> Any:
    """This thread's, which prints nothing; None if there is no licence, which is asked for once."""
    import gurobipy

    if not hasattr(_gurobi, "environment"):
        _gurobi.environment = None
        try:
            environment = gurobipy.Env(empty=True)
            environment.setParam("OutputFlag", 0)  # before the start, or it prints its licence
            environment.setParam("Threads", 1)
            environment.start()
            _gurobi.environment = environment
        except gurobipy.GurobiError:
            pass
    return _gurobi.environment


_ASK: dict[str, Callable[[LinearProgram], tuple[np.ndarray, np.ndarray]]] = {
    "highs": _ask_highs,
    "clarabel": _ask_clarabel,
    "gurobi": _ask_gurobi,
}
