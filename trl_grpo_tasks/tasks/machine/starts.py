"""Perturbed starts of a run: small offsets of a machine's position and heading, a short drop, and other friction."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import numpy as np

from .scene import FRICTION
from .tree import ConstructionTree

SHIFT_M, YAW_DEGREES, DROP_M, GRIP = 0.1, 2.0, 0.03, 0.1  # the largest offset of each kind


@dataclass(frozen=True)
class Start:
    """How a run begins: the machine is shifted, turned about the vertical and lifted; friction is scaled."""

    right: float = 0.0
    forward: float = 0.0
    drop: float = 0.0
    yaw: float = 0.0  # radians
    friction: float = 1.0

    def apply(self, mujoco: Any, model: Any, data: Any) -> None:
        """Set the friction of the model and the initial state. All parts are moved rigidly together."""
        model.geom_friction[:, 0] = FRICTION * self.friction
        if self == UNPERTURBED:
            return
        turn = np.array([math.cos(self.yaw / 2), 0.0, 0.0, math.sin(self.yaw / 2)])
        for joint in np.flatnonzero(model.jnt_type == mujoco.mjtJoint.mjJNT_FREE):
            pose = data.qpos[model.jnt_qposadr[joint] :][:7]
            position, facing = np.zeros(3), np.zeros(4)
            mujoco.mju_rotVecQuat(position, pose[:3], turn)
            mujoco.mju_mulQuat(facing, turn, pose[3:])
            pose[:3] = position + np.array([self.right, self.forward, self.drop])
            pose[3:] = facing


UNPERTURBED = Start()


def perturbed_starts(tree: ConstructionTree, count: int) -> list[Start]:
    """Return random starts that depend only on the machine, so that its score is reproducible."""
    rng = random.Random(tree.to_json())
    return [
        Start(
            rng.uniform(-SHIFT_M, SHIFT_M),
            rng.uniform(-SHIFT_M, SHIFT_M),
            rng.uniform(0, DROP_M),
            math.radians(rng.uniform(-YAW_DEGREES, YAW_DEGREES)),
            rng.uniform(1 - GRIP, 1 + GRIP),
        )
        for _ in range(count)
    ]
