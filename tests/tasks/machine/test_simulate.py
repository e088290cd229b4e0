"""The simulator is compared with analytic physics (falling, flying, rolling, loads) and tested for robustness."""

import math
import os
import random
import re
import resource
import threading

import mujoco
import numpy as np
import pytest

from tests.tasks.machine.test_tree import car, catapult, random_machine, reordered
from trl_grpo_tasks.tasks.machine import ConstructionTree, simulate
from trl_grpo_tasks.tasks.machine import simulator as module
from trl_grpo_tasks.tasks.machine.blocks import BLOCKS
from trl_grpo_tasks.tasks.machine.designs import mirrored
from trl_grpo_tasks.tasks.machine.scene import CLEARANCE, WHEEL_DAMPING, WHEEL_KV, WHEEL_SPEED, Scene, to_xml
from trl_grpo_tasks.tasks.machine.tree import ROOT, Block
from trl_grpo_tasks.tasks.machine.trials import TRIALS, Trial, get_trial, task_score

G = 9.81
RIGID = ("15", "1", "63", "35")


def machine(*blocks):
    tree = ConstructionTree((ROOT, *blocks))
    assert tree.validate() == []
    return tree


def tower_with_boulder():
    """A boulder on the side of a tower seven high, with nothing below it: it just falls."""
    ballast = [Block("35", 2, face) for face in (3, 9, 12)]
    return machine(Block("63", 0, 5), Block("63", 1, 0), *ballast, Block("36", 0, 3))


# ---- analytic physics


def test_free_fall():
    result = simulate(tower_with_boulder(), Trial("fall", "", "throw", 1.0, seconds=1.0), to_the_end=True)
    path, times = result.boulder_paths[0], result.times
    falling = path[:, 2] > 1.0
    t = times[falling]
    assert falling.sum() > 40 and path[0, 2] > 6
    # The integrator is semi-implicit: it is off by exactly -g dt t / 2.
    np.testing.assert_allclose(path[falling, 2], path[0, 2] - G * t**2 / 2 - G * 0.005 * t / 2, atol=1e-9)


def test_projectile_lands_at_the_analytic_distance():
    t = np.arange(0, 3, 0.02)
    path = np.stack([0 * t, 10 * t, 5 + 10 * t - G * t**2 / 2], axis=1)
    machine = np.stack([0 * t, 2 * t, 0 * t], axis=1)  # drives after the ball
    throw = module.flight(path, machine, radius=0.0)
    assert throw.landed and throw.distance == pytest.approx(24.541, abs=0.01)
    assert throw.from_machine == pytest.approx(24.541 * 0.8, abs=0.01)
    assert throw.height == pytest.approx(5 + 100 / (2 * G), abs=0.002) and throw.rise == pytest.approx(
        throw.height - 5
    )


def test_a_ball_that_never_leaves_the_ground_is_not_thrown():
    t = np.linspace(0, 5, 100)
    rolling = np.stack([0 * t, 3 * t, 0.95 + 0 * t], axis=1)
    throw = module.flight(rolling, rolling)
    assert not throw.landed and throw.rise == 0 and throw.distance == pytest.approx(15)


def test_end_speed_and_distance_of_a_car():
    result = simulate(car())
    speed = np.diff(result.path[:, 1])[-20:].mean() / 0.02
    assert speed == pytest.approx(WHEEL_SPEED * 1.0 * WHEEL_KV / (WHEEL_KV + WHEEL_DAMPING), rel=0.01)
    assert 40 < result.distance <= WHEEL_SPEED * 1.0 * 5
    assert abs(result.path[-1, 0]) < 0.01 and result.forward == pytest.approx(result.distance, rel=1e-6)


def test_powered_wheels_drive_the_way_the_game_says():
    """Facing forward: to the left. Facing back: to the right."""
    for face, facing, sign in ((0, "z+", -1), (1, "z-", 1)):
        one = machine(Block("2", 0, face), Block("1", 0, 2), Block("1", 0, 3))
        assert one.placements[1].facing == facing
        path = simulate(one, Trial("t", "", "distance", 1.0, seconds=1.0)).path
        assert sign * (path[-1, 0] - path[0, 0]) > 0.3


def test_a_machine_without_power_stands_still():
    wheels = [Block("40", bar, face) for bar in (1, 2) for face in (3, 6)]
    arm = [Block("5", 0, 4), Block("63", 7, 0), Block("35", 0, 5)]
    still = machine(Block("63", 0, 0), Block("63", 0, 1), *wheels, *arm)
    flat = machine(*(Block("63", 0, face) for face in (0, 1, 2, 3)), Block("35", 0, 4))
    for tree in (flat, still):
        result = simulate(tree, Trial("rest", "", "distance", 1.0, seconds=2.0))
        assert result.valid and result.distance < 0.004


def test_loads_of_an_arm(monkeypatch):
    """5 kg at the end of a weightless arm, 3 m from its seat: 49.05 N and 147.15 N m."""
    for kind, mass in (("41", 1e-9), ("1", 5.0)):
        monkeypatch.setitem(BLOCKS, kind, type(BLOCKS[kind])(**{**BLOCKS[kind].__dict__, "mass": mass}))
    feet = [Block("63", 0, 5), *(Block("35", 1, face) for face in (3, 6, 9, 12))]
    stand = [Block("63", 2, 0), Block("35", 6, 0)]  # the foot continues below the arm, so that it does not tip
    arm = [Block("41", 0, 2), Block("1", 8, 0)]
    tree = machine(*feet, *stand, *arm)
    result = simulate(tree, Trial("rest", "", "distance", 1.0, seconds=2.0), breakage=True)
    model = mujoco.MjModel.from_xml_string(to_xml(tree, loads=True))
    data = mujoco.MjData(model)
    mujoco.mj_step(model, data, nstep=600)
    force, torque = (np.linalg.norm(data.sensor(f"{name}8").data) for name in ("force", "torque"))
    assert result.valid and not result.broken and result.distance < 0.05
    assert force == pytest.approx(49.05, rel=2e-3)
    assert torque == pytest.approx(147.15, rel=5e-3)
    assert result.loads[8][1] >= 0.99 * 147.15


def test_a_steep_slope_is_slid_down_and_a_gentle_one_is_not():
    """Friction 1 holds up to 45 degrees."""
    sled = machine(Block("63", 0, 0), Block("63", 0, 1), Block("63", 0, 2), Block("63", 0, 3))
    for slope, slides in ((30.0, False), (55.0, True)):
        trial = Trial("slope", "", "forward", 1.0, Scene(slope=slope), seconds=2.0)
        result = simulate(sled, trial)
        along = G * (math.sin(math.radians(slope)) - math.cos(math.radians(slope))) * 2.0**2 / 2
        assert result.forward == pytest.approx(-along if slides else 0.0, rel=0.1, abs=0.05)
        assert task_score(trial, result) == (max(0.0, result.forward), "")


# ---- invariances


def test_mirrored_and_reordered_machines_behave_the_same():
    rng = random.Random(5)
    for tree, trial in ((car(), "car"), (car(), "rough"), (catapult(), "catapult")):
        scores = [
            task_score(TRIALS[trial], simulate(version, trial))[0]
            for version in (tree, mirrored(tree), reordered(tree, rng), reordered(tree, rng))
        ]
        assert scores[0] > 10 and scores == pytest.approx([scores[0]] * 4, rel=0.02)


def test_collision_boxes_are_merged_and_fill_the_rigid_blocks_and_nothing_else():
    rng = random.Random(3)
    for tree in (machine(Block("63", 0, 0), Block("63", 0, 1)), *(random_machine(rng, 8, RIGID) for _ in range(20))):
        sizes = re.findall(r'class="hull" size="(\S+) (\S+) (\S+)"', to_xml(tree))
        volume = sum(math.prod(2 * (float(half) + CLEARANCE) for half in size) for size in sizes)
        assert volume == pytest.approx(sum(math.prod(block.type.size) for block in tree.blocks))
        assert len(sizes) == 1 or len(tree.blocks) > 3, "blocks in a line are one box"


def test_a_smaller_time_step_gives_the_same_result():
    assert simulate(car(), dt=0.0005).distance == pytest.approx(simulate(car()).distance, rel=0.005)


def test_repeated_runs_are_bit_identical():
    runs = [simulate(tree, trial) for tree, trial in ((catapult(), "catapult"), (car(), "rough")) for _ in range(2)]
    assert runs[0] == runs[1] and runs[2] == runs[3]
    np.testing.assert_array_equal(runs[0].boulder_paths[0], runs[1].boulder_paths[0])
    found = []
    threads = [threading.Thread(target=lambda: found.append(simulate(car(), "rough").distance)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == {runs[2].distance}


# ---- every block does what it is for


def test_a_spring_pulls_when_triggered_and_not_before():
    hung = machine(
        *(Block("63", 0, face) for face in (0, 1, 2, 3)),
        *(Block("63", 0, 4), Block("5", 5, 0), Block("63", 6, 0)),
        Block("9", 7, 10, 1, 9),
    )
    without = ConstructionTree(hung.blocks[:-1])
    trial = Trial("t", "", "distance", 1.0, seconds=1.0)
    pulled, free = (simulate(tree, trial, record=True).frames for tree in (hung, without))
    arm = [frames.model.geom("g7").id for frames in (pulled, free)]
    moved = [f.positions[:, geom] - f.positions[0, geom] for f, geom in zip((pulled, free), arm, strict=True)]
    before = pulled.times <= module.TRIGGER_S
    assert np.abs(moved[0][before]).max() < 0.05 and np.abs(moved[1]).max() < 0.3
    assert np.linalg.norm(moved[0][-1]) > 1.0 and moved[0][-1][1] > 0.5  # forward, to where the spring is fastened


def test_motor_hinge_brace_winch_grabber_and_suspension():
    base = [Block("63", 0, face) for face in (0, 1, 2, 3)] + [Block("63", 0, 4)]
    trial = Trial("t", "", "throw", 1.0, seconds=1.0)

    def last_place(*more):
        tree = machine(*base, *more)
        frames = simulate(tree, trial, record=True, to_the_end=True).frames
        geom = frames.model.geom("g7").id
        return frames.positions[-1, geom] - frames.positions[0, geom]

    motor = simulate(
        machine(*base, Block("22", 5, 6), Block("63", 6, 2)), Trial("t", "", "throw", 1.0, seconds=0.2), record=True
    ).frames
    tip = motor.model.geom("g7").id
    turned = motor.matrices[-1, tip].reshape(3, 3) @ motor.matrices[0, tip].reshape(3, 3).T
    assert math.acos((np.trace(turned) - 1) / 2) == pytest.approx(5.0 * 0.2, rel=0.15)  # five radians a second

    hinge = [Block("5", 5, 9), Block("63", 6, 0)]  # an arm that sticks out sideways from the tower falls
    free = last_place(*hinge)
    assert free[2] < -0.5
    assert np.linalg.norm(last_place(*hinge, Block("7", 7, 10, 5, 11))) < 0.05
    assert np.linalg.norm(last_place(*hinge, Block("45", 7, 9, 5, 0))) < 0.3 * np.linalg.norm(free)

    held = machine(*base, Block("27", 5, 6), Block("36", 6, 0))
    path = simulate(held, trial, to_the_end=True).boulder_paths[0]
    at_trigger = round(module.TRIGGER_S / 0.02)
    assert np.abs(path[at_trigger] - path[0]).max() < 0.03 and path[at_trigger + 20, 2] < path[0, 2] - 0.5

    feet = [Block("16", bar, face) for bar in (1, 2) for face in (10, 12)]
    soft = machine(Block("63", 0, 0), Block("63", 0, 1), Block("35", 0, 4), *feet)
    frames = simulate(soft, trial, record=True).frames
    sunk = frames.positions[0, frames.model.geom("g0").id] - frames.positions[-1, frames.model.geom("g0").id]
    # 0.25 + 2 + 3 kg on four springs of 400 N/m.
    assert sunk[2] == pytest.approx(5.25 * G / (4 * 400), abs=0.005)


# ---- robustness


def test_faults_are_invalid_with_a_reason(monkeypatch):
    assert simulate("nonsense").reason == "there is no JSON list in the text"
    monkeypatch.setattr(module, "FASTEST", 5.0)
    result = simulate(car())
    assert not result.valid and "m/s, more than 5" in result.reason and result.distance == 0
    monkeypatch.undo()
    late = simulate(car(), limit_s=0.0)
    assert not late.valid and late.timed_out and "limit of 0 s" in late.reason


def test_diverging_simulations_are_invalid_and_write_no_file(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    changed = [('damping="1.0"', 'damping="-1e9"'), ('ctrl="10 10 10 10"', 'ctrl="1e12 1e12 1e12 1e12"')]
    for old, new in changed:
        xml = to_xml(car()).replace(old, new).replace('forcerange="-60.0 60.0"', "")
        assert new in xml
        monkeypatch.setattr(module, "to_xml", lambda *a, xml=xml, **k: xml)
        result = simulate(car())
        assert not result.valid and "the simulation became unstable" in result.reason
    assert os.listdir(tmp_path) == []


def test_machines_break_where_they_are_weak(monkeypatch):
    assert simulate(car(), breakage=True).broken == ""
    monkeypatch.setattr(module, "STRENGTH", (20.0, 20.0))
    result = simulate(car(), breakage=True)
    assert result.valid and "broke off" in result.broken and result.distance < 5


@pytest.mark.exhaustive
def test_two_hundred_random_machines(tmp_path, monkeypatch):
    """No exception, no hang, no file, and no memory left behind."""
    monkeypatch.chdir(tmp_path)
    rng = random.Random(7)
    trials = [Trial(t.name, t.words, t.score, t.goal, t.scene, seconds=0.25) for t in TRIALS.values()]
    memory, invalid, seen = [], 0, set()
    for n in range(200):
        tree = random_machine(rng, rng.randint(3, 12))
        seen.add(tree.to_json())
        trial = trials[n % len(trials)]
        result = simulate(tree, trial, limit_s=5.0)
        assert not result.timed_out
        invalid += not result.valid
        assert result.valid or "became unstable" in result.reason, result.reason
        score, _ = task_score(trial, result) if result.valid else (0.0, "")
        assert math.isfinite(score) and score >= 0
        if n in (50, 199):
            memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert memory[1] - memory[0] < 20_000  # kB
    assert invalid < 4 and len(seen) > 195 and os.listdir(tmp_path) == []


# ---- scores


@pytest.mark.parametrize(
    ("start", "highest", "landing", "machine", "paper", "authors"),
    [
        (4.0, 12.0, 20.0, 0.0, 12 * 20, (1 + 8) * 20),  # 240 against 180
        (1.0, 6.0, 10.0, 0.0, 6 * 10, (1 + 5) * 10),
        (4.0, 6.0, 10.0, 0.0, 0, (1 + 2) * 10),  # rises by 2 m, to a height of 6 m
        (1.0, 2.9, 10.0, 0.0, 0, 0),
        (4.0, 12.0, 20.0, 14.9, 12 * 20, (1 + 8) * 20),  # the machine is 5.1 m behind, more than a quarter of 20 m
        (4.0, 12.0, 20.0, 15.1, 12 * 20, 0),  # it is 4.9 m behind: the boulder was carried
    ],
)
def test_both_scores_of_throws_computed_by_hand(start, highest, landing, machine, paper, authors):
    """A boulder goes up and down in straight lines and rolls on; its machine is at `machine` when it lands."""
    ground = module.BOULDER_RADIUS
    path = np.array([[0, 0, start], [0, landing / 2, highest], [0, landing, ground], [0, 3 * landing, ground]])
    root = np.array([[0, 0, ground], [0, machine / 2, ground], [0, machine, ground], [0, 0, ground]])
    result = module.Result(True, throws=(module.flight(path, root),), boulder_paths=(path,))
    for scoring, expected in (("paper", paper), ("authors", authors)):
        score, why = task_score(TRIALS["catapult"], result, scoring)
        assert score == pytest.approx(expected) and bool(why) == (expected == 0), (scoring, why)


def test_gates_of_both_scorings():
    path = np.array([[0, 0, 4.0], [0, 5, 6.0], [0, 10, 0.95]])
    throws = [module.Throw(height, rise, 10.0, 9.0, True, (0.0, 10.0)) for height, rise in ((6.0, 2.0), (7.0, 3.5))]
    low, high = (module.Result(True, throws=tuple(some), boulder_paths=(path, path)) for some in (throws[:1], throws))
    assert "2.00 m above its start" in task_score(TRIALS["catapult"], low)[1]
    assert task_score(TRIALS["catapult"], high) == (70.0, "")
    only = module.Result(True, throws=high.throws[1:], boulder_paths=(path,))
    assert task_score(TRIALS["wall"], only) == (0.0, "the boulder did not land behind the wall")
    near = Trial("wall", "", "over_wall", 1.0, Scene(wall=(8.0, 4.0)))
    assert task_score(near, high) == (70.0, "")
    with pytest.raises(ValueError, match="unknown scoring 'mine'; scorings are: paper, authors"):
        task_score(TRIALS["car"], low, "mine")
    with pytest.raises(ValueError, match=r"unknown trial 'cra' \(did you mean 'car'\?\); trials are: car, rough"):
        get_trial("cra")


def test_rings_count_by_how_near_the_middle():
    trial = Trial("rings", "", "rings", 1.0, Scene(rings=((5.0, 4.0, 2.0), (10.0, 4.0, 2.0))))

    def score(*points):
        path = np.array(points, dtype=float)
        return task_score(trial, module.Result(True, throws=(module.flight(path, path),), boulder_paths=(path,)))[0]

    assert score((0, 0, 4), (0, 12, 4)) == pytest.approx(10)
    assert score((0, 0, 4), (0, 8, 4)) == pytest.approx(5)
    assert score((2, 0, 4), (2, 12, 4)) == pytest.approx(5)  # both at the rim
    assert score((0, 0, 4), (0, 3, 4)) == 0


def test_a_wall_stops_what_is_thrown_too_low():
    thrown = simulate(catapult(), "catapult").throws[0]
    over = Trial("wall", "", "over_wall", 1.0, Scene(wall=(thrown.landing[1] / 2, 1.0)))
    assert task_score(over, simulate(catapult(), over))[0] > 10
    high = Trial("wall", "", "over_wall", 1.0, Scene(wall=(thrown.landing[1] / 2, 3 * thrown.height)))
    assert task_score(high, simulate(catapult(), high))[0] == 0
