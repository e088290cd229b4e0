"""Missing and failing solvers; `prefix_stability` compared with a separate analysis of each prefix."""

import random
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse

from tests.support.brick_structures import CANTILEVER, T, W, close, random_structure
from trl_grpo_tasks.tasks.brick import prefix as prefix_module
from trl_grpo_tasks.tasks.brick import solvers
from trl_grpo_tasks.tasks.brick.solvers import SolverError
from trl_grpo_tasks.tasks.brick.stability import Load, analyse, prefix_stability
from trl_grpo_tasks.tasks.brick.structure import Structure

# -- missing and failing solvers


def absent(monkeypatch, *modules):
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)


def test_without_any_solver_only_connectivity_is_checked_with_a_warning(monkeypatch):
    absent(monkeypatch, "highspy", "clarabel", "gurobipy")
    with pytest.warns(
        RuntimeWarning, match=r'no linear-programming solver is installed.*pip install "trl_grpo_tasks\[brick\]"'
    ):
        found = analyse(CANTILEVER, loads=[(5, 12, 1, 5.0)])
    assert found.stable and found.load_factor is None and found.solver is None
    with pytest.warns(RuntimeWarning, match="no linear-programming solver"):
        assert prefix_stability(CANTILEVER) == [None, None]
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
    assert prefix_stability(CANTILEVER) == close([0, expected])


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
        solvers.solve(program, [solver])


def test_highs_works_after_others_have_started_its_threads():
    """HiGHS rejects a thread count other than the first one used in the process."""
    code = f"""
import highspy
highs = highspy.Highs()
highs.setOptionValue("output_flag", False)
highs.setOptionValue("threads", 2)
highs.addVar(0, 1)
highs.run()
from trl_grpo_tasks.tasks.brick.stability import analyse
found = analyse({CANTILEVER!r}, backend="highs")
assert found.solver == "highs" and abs(found.load_factor - 0.098475) < 1e-9, found
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == "", done.stderr


# -- prefixes


def cold(structure, masses=None, loads=()):
    """`analyse` for each prefix, with the loads that it carries."""
    factors = []
    for count in range(1, len(structure) + 1):
        prefix = Structure(structure.bricks[:count], structure.world)
        owner = prefix.owner
        carried = [load for load in loads if owner[load[:3]] >= 0]
        factors.append(analyse(prefix, masses=masses and masses[:count], loads=carried).load_factor)
    return factors


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 16), st.sampled_from([0, 0.2, 1]), st.booleans())
def test_prefixes_match_separate_analyses(seed, count, disorder, weighted):
    chance = random.Random(seed)
    structure = random_structure(count, seed, world=9)
    order = sorted(range(count), key=lambda i: i + disorder * chance.uniform(-8, 8))
    structure = Structure(tuple(structure.bricks[i] for i in order), structure.world)
    masses = [chance.uniform(0.0004, 0.05) for _ in order] if weighted else None
    brick = chance.choice(structure.bricks)
    loads = [Load(brick.x, brick.y, brick.z, 0.05)] if weighted else []
    expected = cold(structure, masses, loads)
    found = prefix_stability(structure, masses=masses, loads=loads)
    assert [factor is None for factor in found] == [factor is None for factor in expected]
    assert [f for f in found if f is not None] == close([f for f in expected if f is not None])


def test_prefixes_of_a_long_structure_do_not_drift():
    structure = random_structure(120, 5, world=14)
    found = prefix_stability(structure)
    for count in range(1, 121, 17):
        assert found[count - 1] == close(analyse(Structure(structure.bricks[:count], 14)).load_factor)


def test_prefixes_are_none_from_the_first_unbuildable_brick():
    assert prefix_stability("") == [] and prefix_stability("1x1 (0,0,1)\n1x1 (0,0,2)\n") == [None, None]
    text = "2x4 (0,0,0)\n2x4 (0,0,2)\n2x2 (0,0,1)\n2x2 (1,1,1)\n1x1 (9,9,0)\n"
    found = prefix_stability(text)
    assert found[0] == close(0) and found[1] is None  # floats until the third connects it
    assert found[2] == close(analyse("2x4 (0,0,0)\n2x4 (0,0,2)\n2x2 (0,0,1)\n").load_factor) and found[2] > 0
    assert found[3:] == [None, None]  # the fourth collides
    assert prefix_stability("1x8 (0,15,0)\n1x1 (0,0,0)\n") == [None, None]


def test_prefixes_continue_with_another_solver_if_highs_fails(monkeypatch):
    structure = random_structure(8, 4)
    expected = prefix_stability(structure)
    runs = []

    def dies_at_the_fourth(highs):
        runs.append(1)
        if len(runs) > 3:
            raise SolverError("out of luck")
        solvers.run_highs(highs)

    monkeypatch.setattr(prefix_module, "run_highs", dies_at_the_fourth)
    assert prefix_stability(structure) == close(expected)
    assert len(runs) == 4
