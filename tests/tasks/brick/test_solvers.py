"""Missing and failing solvers."""

import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest
from scipy import sparse

from tests.support.brick_structures import CANTILEVER, T, W, close
from trl_grpo_tasks.tasks.brick.physics import solvers
from trl_grpo_tasks.tasks.brick.physics.solvers import SolverError
from trl_grpo_tasks.tasks.brick.physics.stability import analyse


def absent(monkeypatch, *modules):
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)


def test_without_any_solver_only_connectivity_is_checked_with_a_warning(monkeypatch):
    absent(monkeypatch, "highspy", "clarabel", "gurobipy")
    with pytest.warns(RuntimeWarning, match=r'no linear-programming solver .*pip install "trl_grpo_tasks\[brick\]"'):
        found = analyse(CANTILEVER, loads=[(5, 12, 1, 5.0)])
    assert found.stable and found.load_factor is None and found.solver is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # floating bricks need no solver
        assert not analyse("1x1 (0,0,1)").stable


def test_gurobi_without_a_licence_counts_as_missing(monkeypatch):
    gurobipy = pytest.importorskip("gurobipy", reason="gurobipy is not installed")

    def no_licence(**options):
        raise gurobipy.GurobiError(10009, "no licence")

    monkeypatch.setattr(gurobipy, "Env", no_licence)
    monkeypatch.setattr(solvers, "_gurobi", threading.local())
    assert analyse(CANTILEVER, backend="gurobi").solver == "highs"
    absent(monkeypatch, "highspy", "clarabel")
    with pytest.warns(RuntimeWarning, match="no linear-programming solver"):
        assert analyse(CANTILEVER).solver is None


def test_a_missing_solver_that_was_requested_is_reported(monkeypatch):
    expected = analyse(CANTILEVER).load_factor
    absent(monkeypatch, "highspy", "gurobipy")
    assert analyse(CANTILEVER).solver == "clarabel"
    silent = analyse(CANTILEVER, backend="gurobi")
    assert silent.solver == "clarabel" and silent.load_factor == close(expected)
    with pytest.raises(ImportError, match=r'backend \'highs\' needs highspy.*pip install "trl_grpo_tasks\[brick\]"'):
        analyse(CANTILEVER, backend="highs")


def test_a_solver_that_fails_is_replaced_by_another(monkeypatch):
    def dies(*_):
        raise RuntimeError("out of luck")

    monkeypatch.setitem(solvers._SOLVE_WITH, "highs", dies)
    found = analyse(CANTILEVER, backend="highs")
    assert found.solver == "clarabel" and found.load_factor == close(3.25 * W / T)
    monkeypatch.setitem(solvers._SOLVE_WITH, "clarabel", dies)
    monkeypatch.setitem(solvers._SOLVE_WITH, "gurobi", dies)
    with pytest.raises(SolverError, match="highs: out of luck; clarabel: out of luck"):
        analyse(CANTILEVER)


@pytest.mark.parametrize("solver", ["highs", "clarabel", "gurobi"])
def test_a_non_optimal_answer_is_an_error(solver):
    if not solvers.installed(solver):
        pytest.skip(f"{solver} is not installed")
    # x >= 0 and x = -1
    program = solvers.LinearProgram(sparse.csc_array(np.ones((1, 1))), -np.ones(1), np.ones(1), 0)
    with pytest.raises(SolverError, match=f"no solver found a solution; {solver}: "):
        solvers.solve(program, [solver], solvers.Solving())


def test_highs_works_after_others_have_started_its_threads():
    """HiGHS rejects a thread count other than the first one used in the process."""
    code = f"""
import highspy
highs = highspy.Highs()
highs.setOptionValue("output_flag", False)
highs.setOptionValue("threads", 2)
highs.addVar(0, 1)
highs.run()
from trl_grpo_tasks.tasks.brick.physics.stability import analyse
found = analyse({CANTILEVER!r}, backend="highs")
assert found.solver == "highs" and abs(found.load_factor - 0.098475) < 1e-9, found
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == "", done.stderr
