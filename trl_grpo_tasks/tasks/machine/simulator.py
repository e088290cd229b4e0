"""Deterministic simulation of machines in MuJoCo: `simulate(tree, trial)` returns distances, throws and loads."""

from __future__ import annotations

import logging
import math
import time
from functools import lru_cache
from typing import Any

import numpy as np

from .results import Frames, Result, Throw
from .scene import to_xml
from .tree import ConstructionTree
from .trials import Trial, get_trial

logger = logging.getLogger(__name__)

DT = 0.005
SAMPLE_S, SAMPLE_STEPS = 0.02, 4  # positions are recorded at this interval, and at most every so many steps
TRIGGER_S = 0.2  # springs contract and grabbers release from this time on
FASTEST = 100.0  # m/s: machines of these parts cannot be this fast, so higher speeds are numerical errors
TIME_LIMIT_S = 20.0  # wall-clock limit
BOULDER_RADIUS = 0.95
_CHECK_EVERY = 10  # samples between checks for numerical errors
_FLYING = 0.5  # metres above the ground from which a boulder counts as flying
# The load at which a block breaks off its parent, in newtons and newton metres. Rods bear a fifth of it.
STRENGTH = (8000.0, 8000.0)
_FRAGILE = {"41": 0.2}


def simulate(
    tree: ConstructionTree | str,
    trial: Trial | str = "car",
    *,
    dt: float = DT,
    breakage: bool = False,
    to_the_end: bool = False,
    record: bool = False,
    limit_s: float = TIME_LIMIT_S,
) -> Result:
    """Run a machine. Machines that cannot be built, and runs with numerical errors, are invalid, with a reason.

    A throw ends when all boulders have landed, unless `to_the_end` is set. With `breakage`, the run ends when the load
    on a joint exceeds its strength. `limit_s` is a wall-clock limit.
    """
    tree = ConstructionTree.parse(tree) if isinstance(tree, str) else tree
    trial = get_trial(trial)
    if problems := tree.validate():
        return Result(False, "; ".join(problems))
    mujoco = mujoco_module()
    try:
        model = mujoco.MjModel.from_xml_string(to_xml(tree, trial.scene, dt=dt, loads=breakage))
    except ValueError as error:
        return Result(False, f"MuJoCo cannot build the machine: {error}")
    return _Run(mujoco, model, tree, trial, to_the_end, record).until_done(limit_s)


class _Run:
    def __init__(self, mujoco: Any, model: Any, tree: ConstructionTree, trial: Trial, to_the_end: bool, record: bool):
        self.mujoco, self.model, self.tree, self.trial = mujoco, model, tree, trial
        self.data = mujoco.MjData(model)
        self.to_the_end, self.record = to_the_end, record
        self.boulders = [model.body(f"b{i}").id for i, block in enumerate(tree.blocks) if block.kind == "36"]
        self.root = model.body("b0").id
        self.springs = [i for i in range(model.nu) if model.actuator(i).name.startswith("spring")]
        if model.nkey:
            self.data.ctrl = model.key("start").ctrl
        self.held = [i for i in range(model.neq) if model.equality(i).name.startswith("held")]
        # Sensors come in pairs (force and torque), one pair per block that is a separate body.
        self.seats = [int(model.sensor(n).name.removeprefix("force")) for n in range(0, model.nsensor, 2)]
        self.peaks = np.zeros((len(self.seats), 2))
        self.strengths = np.outer([_FRAGILE.get(tree.blocks[index].kind, 1.0) for index in self.seats], STRENGTH)
        self.broken = ""
        # Loads are short spikes, so they are checked in every step.
        self.steps = 1 if self.seats else max(SAMPLE_STEPS, round(SAMPLE_S / model.opt.timestep))
        self.samples = math.ceil(trial.seconds / (self.steps * model.opt.timestep) - 1e-9)
        self.observed = self.checked = 0  # number of samples, and of those that were checked for numerical errors
        self.times = np.empty(self.samples + 1)
        self.positions = np.empty((self.samples + 1, model.nbody, 3))
        self.recorded: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def until_done(self, limit_s: float) -> Result:
        mujoco, model, data = self.mujoco, self.model, self.data
        trigger = round(TRIGGER_S / (self.steps * model.opt.timestep))
        deadline = time.perf_counter() + limit_s
        mujoco.mj_forward(model, data)
        self._observe()
        flying, landed = set(), set()
        for sample in range(self.samples):
            if sample == trigger:
                data.ctrl[self.springs] = 1.0
                for index in self.held:
                    data.eq_active[index] = 0
            mujoco.mj_step(model, data, nstep=self.steps)
            mujoco.mj_kinematics(model, data)  # mj_step leaves body positions as they were before the step
            self._observe()
            if self.broken:
                break
            if sample % _CHECK_EVERY == 0:
                if problem := self._fault():
                    return problem
                if time.perf_counter() > deadline:
                    return Result(
                        False,
                        f"the simulation exceeded its limit of {limit_s:g} s of wall-clock time, at {data.time:.2f} s",
                        timed_out=True,
                    )
            if self.boulders and self.trial.throws and not self.to_the_end:
                for body in self.boulders:
                    above = data.xpos[body, 2] - BOULDER_RADIUS
                    if above > _FLYING:
                        flying.add(body)
                    elif above <= 0 and body in flying:
                        landed.add(body)
                if len(landed) == len(self.boulders):
                    break
        return self._fault() or self._result()

    def _observe(self) -> None:
        data = self.data
        self.times[self.observed] = data.time
        self.positions[self.observed] = data.xpos
        self.observed += 1
        if self.record:
            self.recorded.append((data.geom_xpos.copy(), data.geom_xmat.copy(), data.site_xpos.copy()))
        if self.seats:
            loads = np.linalg.norm(data.sensordata.reshape(-1, 2, 3), axis=2)
            np.maximum(self.peaks, loads, out=self.peaks)
            for n in np.flatnonzero((loads > self.strengths).any(axis=1))[:1]:
                index = self.seats[n]
                self.broken = f"block {index} ({self.tree.blocks[index].type.name}) broke off at {data.time:.2f} s"

    def _fault(self) -> Result | None:
        """Return an invalid result if the samples since the last check show a numerical error."""
        positions = self.positions[self.checked : self.observed]
        times = self.times[self.checked : self.observed]
        self.checked = self.observed - 1
        moved = np.diff(positions, axis=0)
        speeds = np.sqrt((moved * moved).sum(axis=2)).max(axis=1) / np.diff(times)
        problem, at = "", times[-1]
        if not (np.isfinite(positions).all() and np.isfinite(self.data.qvel).all()):
            problem = "positions are not finite"
        elif len(warned := np.flatnonzero(self.data.warning.number)):
            problem = f"MuJoCo reported {self.mujoco.mjtWarning(int(warned[0])).name}"
        elif len(fast := np.flatnonzero(speeds > FASTEST)):
            problem, at = f"a part moves at {speeds[fast[0]]:.0f} m/s, more than {FASTEST:g} m/s", times[fast[0]]
        return Result(False, f"the simulation became unstable after {at:.2f} s: {problem}") if problem else None

    def _result(self) -> Result:
        positions, times = self.positions[: self.observed], self.times[: self.observed]
        path = positions[:, self.root]
        moved = path[-1] - path[0]
        boulder_paths = tuple(positions[:, body] for body in self.boulders)
        frames = None
        if self.record:
            frames = Frames(self.model, times, *(np.array(part) for part in zip(*self.recorded, strict=True)))
        return Result(
            True,
            distance=float(np.hypot(moved[0], moved[1])),
            forward=float(moved[1]),
            seconds=float(times[-1]),
            throws=tuple(flight(boulder, path) for boulder in boulder_paths),
            broken=self.broken,
            loads={index: (float(f), float(t)) for index, (f, t) in zip(self.seats, self.peaks, strict=True)},
            times=times,
            path=path,
            boulder_paths=boulder_paths,
            frames=frames,
        )


def flight(path: np.ndarray, root: np.ndarray, radius: float = BOULDER_RADIUS) -> Throw:
    """Measure the flight of a ball on this path, (samples, 3); `root` is the path of the start block.

    It lands where it first touches the ground after it has been clear of it, interpolated linearly between samples. If
    it has not landed, its last position counts.
    """
    above = path[:, 2] - radius
    flew = np.maximum.accumulate(above > _FLYING)
    touching = np.flatnonzero(flew & (above <= 0))
    landed = len(touching) > 0
    last = int(touching[0]) if landed else len(path) - 1
    at, machine = path[last], root[last]
    if landed and above[last - 1] > 0:
        share = above[last - 1] / (above[last - 1] - above[last])
        at = path[last - 1] + share * (path[last] - path[last - 1])
        machine = root[last - 1] + share * (root[last] - root[last - 1])
    right, forward = float(at[0] - path[0, 0]), float(at[1] - path[0, 1])
    highest = float(path[: last + 1, 2].max())
    return Throw(
        height=highest,
        rise=highest - float(path[0, 2]),
        distance=math.hypot(right, forward),
        from_machine=float(np.linalg.norm(at - machine)),
        landed=landed,
        landing=(right, forward),
    )


@lru_cache(1)
def mujoco_module() -> Any:
    try:
        import mujoco
    except ImportError as error:
        raise ImportError("the machine task needs MuJoCo: pip install 'trl_grpo_tasks[machine]'") from error
    if mujoco.get_mju_user_warning() is None:
        # Without a handler, MuJoCo appends to MUJOCO_LOG.TXT in the working directory.
        mujoco.set_mju_user_warning(lambda message: logger.debug("MuJoCo warning: %s", message))
    return mujoco
