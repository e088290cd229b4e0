"""Gravity, stud strength, time limit and log of the analysis: analytic stacks, scaling laws, and what reaches them."""

import re

import pytest

from tests.support.brick_structures import CANTILEVER, close, random_structure
from trl_grpo_tasks.rewards.executor import RewardExecutor
from trl_grpo_tasks.tasks.brick import BrickOptions, BrickTask
from trl_grpo_tasks.tasks.brick.data import rows as data
from trl_grpo_tasks.tasks.brick.data.captions import choices
from trl_grpo_tasks.tasks.brick.kit import Kit
from trl_grpo_tasks.tasks.brick.physics.solvers import SolverError, Solving
from trl_grpo_tasks.tasks.brick.physics.stability import analyse

ROW = {"prompt": "", "caption": "a beam", "world": 20, "voxels": None, "gold": None, "loads": []}


def test_published_scores_scale_too():
    loads = analyse(CANTILEVER, "published").loads
    halved = analyse(CANTILEVER, "published", kit=Kit(stud_strength_N=2 * 0.98)).loads
    assert halved == close([load / 2 for load in loads])


@pytest.mark.parametrize("backend", ["highs", "clarabel"])
def test_the_time_limit_stops_a_solver_and_the_next_is_tried(backend):
    structure = random_structure(150, 3)
    limited, unlimited = (analyse(structure, backend=Solving(backend, limit)).load_factor for limit in (60, None))
    assert limited == unlimited
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

    assert len({key(), key(gravity=1.62), key(stud_strength=2.0)}) == 3


@pytest.mark.parametrize(("gravity", "strength"), [(1.62, 0.98), (24.8, 0.98), (9.8, 0.4)])
def test_gold_answers_stand_in_the_gravity_of_their_task(gravity, strength):
    """Heavier loads get thicker supports; requests that nothing can carry are left out."""
    task = BrickTask(BrickOptions(gravity=gravity, stud_strength=strength, brick_levels=["carry"]))
    rows = task.dataset("test", 12, 0)
    assert len(rows) == 12
    for row in rows:
        assert task.score(row, task.gold(row)).success and not task.score(row, task.bad(row)).success


def test_physics_in_which_nothing_stands_is_an_error(monkeypatch):
    monkeypatch.setattr(data, "choices", lambda level, sharing: choices(level)[:20])
    heavy = BrickTask(BrickOptions(brick_levels=["carry"], gravity=1e4))
    with pytest.raises(
        ValueError, match=r"nothing of level 'carry' can be built at gravity 10000 and a stud strength"
    ):
        heavy.dataset("test", 2, 0)
    with pytest.raises(ValueError, match=r"nothing like 'a balcony.*' can be built with this gravity and stud streng"):
        heavy.row_of("a balcony, reach 2, 2 wide, 2 high, with 300 g on the tip")


def test_full_prompts_name_the_physics():
    options = {"prompt_style": "full", "brick_levels": ["stack"]}
    usual, other = (
        BrickTask(BrickOptions(**options, **more)).dataset("test", 1, 0)[0]["prompt"][-1]["content"]
        for more in ({}, {"gravity": 1.62, "stud_strength": 0.5})
    )
    assert "grips with about 1 N.\n" in usual and "Gravity" not in usual
    assert "grips with about 0.5 N. Gravity is 1.62 m/s2.\n" in other
