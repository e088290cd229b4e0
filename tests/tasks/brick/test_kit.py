"""Gravity, stud strength, time limit and log of the analysis: analytic stacks, scaling laws, and what reaches them."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.brick_structures import random_structure
from trl_grpo_tasks.rewards.executor import RewardExecutor
from trl_grpo_tasks.tasks.brick import BrickOptions, BrickTask
from trl_grpo_tasks.tasks.brick.kit import Kit
from trl_grpo_tasks.tasks.brick.physics.solvers import SolverError, Solving
from trl_grpo_tasks.tasks.brick.physics.stability import analyse
from trl_grpo_tasks.tasks.brick.structure import Structure, parse

CANTILEVER = "1x1 (5,5,0)\n1x8 (5,5,1)\n"  # the friction at the 1x1 stud is 3.25 times the weight of the 1x8
MASS_KG = 0.00303
ROW = {"prompt": "", "caption": "a beam", "world": 20, "voxels": None, "gold": None, "loads": []}
close = pytest.approx


@pytest.mark.parametrize("backend", ["highs", "clarabel"])
@pytest.mark.parametrize(("gravity", "strength"), [(9.8, 0.98), (1.62, 0.98), (24.8, 0.5), (300.0, 12.0)])
def test_a_cantilever_holds_exactly_up_to_its_strength(backend, gravity, strength):
    friction_N = 3.25 * MASS_KG * gravity
    found = analyse(CANTILEVER, backend=backend, kit=Kit(gravity=gravity, stud_strength_N=strength))
    assert found.load_factor == close(friction_N / strength, rel=1e-6)
    assert analyse(CANTILEVER, backend=backend, kit=Kit(gravity=gravity, stud_strength_N=1.001 * friction_N)).stable
    weak = analyse(CANTILEVER, backend=backend, kit=Kit(gravity=gravity, stud_strength_N=0.999 * friction_N))
    assert not weak.stable and weak.failing == (1,) and "is overloaded" in weak.reasons[0]


@settings(max_examples=25)
@given(st.integers(3, 12), st.integers(0, 10_000), st.floats(0.05, 50))
def test_more_gravity_is_the_same_as_weaker_studs(bricks, seed, times):
    structure = random_structure(bricks, seed)
    expected = analyse(structure).load_factor
    heavy, weak = Kit(gravity=9.8 * times), Kit(stud_strength_N=0.98 / times)
    for kit in (heavy, weak):
        changed = Structure(structure.bricks, structure.world, kit)
        found = analyse(changed)
        if expected is None:
            assert found.load_factor is None
            continue
        assert found.load_factor == close(expected * times, rel=1e-5, abs=1e-7)


def test_published_scores_scale_too():
    loads = analyse(CANTILEVER, "published").loads
    halved = analyse(CANTILEVER, "published", kit=Kit(stud_strength_N=2 * 0.98)).loads
    assert halved == close([load / 2 for load in loads])


@pytest.mark.parametrize("backend", ["highs", "clarabel"])
def test_the_time_limit_stops_a_solver_and_the_next_is_tried(backend):
    structure = random_structure(150, 3)
    assert (
        analyse(structure, backend=Solving(backend, 60)).load_factor == analyse(structure, backend=backend).load_factor
    )
    with pytest.raises(SolverError, match=r"highs: ended with .*; gurobi: |clarabel: ended with .*"):
        analyse(structure, backend=Solving(backend, 1e-9))


def test_an_answer_without_time_has_no_score():
    text = random_structure(150, 3).text
    task = BrickTask(BrickOptions(solver_time_limit=1e-9))
    assert task.score(ROW, text) is None
    assert task.score(ROW, "2x4 (0,0,9)\n").reason.endswith("no stud connects it to the ground")  # needs no solver
    assert BrickTask().score(ROW, text) == BrickTask(BrickOptions(solver_time_limit=100.0)).score(ROW, text)


def test_every_run_of_a_solver_is_a_line_in_the_log(tmp_path):
    log = tmp_path / "solver.log"
    task = BrickTask(BrickOptions(solver_log=str(log)))
    expected = BrickTask().score(ROW, CANTILEVER)
    assert task.score(ROW, CANTILEVER) == expected
    with pytest.raises(SolverError):
        analyse(random_structure(150, 3), backend=Solving("clarabel", 1e-9, str(log)))
    lines = log.read_text().splitlines()
    pattern = r"\S+ process \d+: (\w+), (\d+) rows, \d+ columns, [\d.]+ ms, (solved|failed: .*)"
    found = [re.fullmatch(pattern, line).groups() for line in lines]
    assert found[0] == ("highs", "10", "solved")
    assert {name for name, rows, _ in found[1:]} >= {"clarabel", "highs"}
    assert all(rows == "750" and result.startswith("failed: ") for _, rows, result in found[1:])


def test_options_reach_scores_and_pictures():
    row = {**ROW, "world": 12}
    text, strong = "1x1 (0,0,0)\n1x8 (0,0,1)\n", BrickTask()
    for options in ({"gravity": 110.0}, {"stud_strength": 0.08}):
        weak = BrickTask(BrickOptions(**options))
        assert strong.score(row, text).info["stable"] and not weak.score(row, text).info["stable"]
        assert weak.render(row, text) != strong.render(row, text)


def test_scores_are_not_shared_by_different_physics():
    def key(**options):
        with RewardExecutor(BrickTask(BrickOptions(**options))) as executor:
            return executor._key("{}", CANTILEVER)

    library = '{"bricks": [{"size": "2x4", "mass_g": 9}]}'
    assert len({key(), key(gravity=1.62), key(stud_strength=2.0), key(brick_library=library)}) == 4


@pytest.mark.parametrize(("gravity", "strength"), [(1.62, 0.98), (24.8, 0.98), (9.8, 0.4)])
def test_gold_answers_stand_in_the_gravity_of_their_task(gravity, strength):
    """Heavier loads get thicker supports; requests that nothing can carry are left out."""
    task = BrickTask(BrickOptions(gravity=gravity, stud_strength=strength, brick_levels=["carry"]))
    rows = task.dataset("test", 12, 0)
    assert len(rows) == 12
    for row in rows:
        assert task.score(row, task.gold(row)).success and not task.score(row, task.bad(row)).success
        assert analyse(parse(row["gold"], 8, kit=task.kit).structure).stable


def test_full_prompts_name_the_physics():
    options = {"prompt_style": "full", "brick_levels": ["stack"]}
    usual, other = (
        BrickTask(BrickOptions(**options, **more)).dataset("test", 1, 0)[0]["prompt"][-1]["content"]
        for more in ({}, {"gravity": 1.62, "stud_strength": 0.5})
    )
    assert "grips with about 1 N.\n" in usual and "Gravity" not in usual
    assert "grips with about 0.5 N. Gravity is 1.62 m/s2.\n" in other
