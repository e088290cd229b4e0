"""Conversion of a construction tree to a MuJoCo model (MJCF), the XML that MuJoCo's viewer opens.

Rigidly joined blocks are fused into one body: free bodies held together by welds are 25 times slower and unstable.
MuJoCo's frame is x right, y forward, z up; ours is left-handed, so vectors swap y and z, and rotations change sign.
Every body starts aligned with the world's axes, so boxes need no rotation.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import numpy as np

from .blocks import rotation
from .tree import Block, ConstructionTree, Placement

GRAVITY = 9.81
CLEARANCE = 0.02  # blocks are smaller by this on every side, so that touching parts do not rub
FRICTION = 1.0
# A wheel without load turns at WHEEL_SPEED * WHEEL_KV / (WHEEL_KV + WHEEL_DAMPING).
WHEEL_SPEED, WHEEL_KV, WHEEL_DAMPING = 10.0, 50.0, 1.0
MOTOR_INERTIA = 0.3  # of the rotor; it keeps light machines from being thrown around
# Name, speed, gain and greatest torque of actuators. The large gain of motors keeps an arm from sagging.
_DRIVES = {"wheel": ("drive", WHEEL_SPEED, WHEEL_KV, 60.0), "motor": ("motor", 5.0, 3000.0, 600.0)}
SPRING_STIFFNESS, SPRING_DAMPING, SPRING_REST, SPRING_PULL = 200.0, 8.0, 0.5, 1000.0
SERVO_KP, SERVO_KV = 800.0, 40.0
SUSPENSION_STIFFNESS, SUSPENSION_DAMPING, SUSPENSION_TRAVEL = 400.0, 40.0, 0.8
_JOINT_DAMPING = {"spin": 0.05, "bend": 0.5, "turn": 0.5, "ball": 0.2}
_KIND_COLOURS = {"36": "0.55 0.56 0.60", "35": "0.42 0.43 0.47", "0": "0.35 0.50 0.62", "41": "0.80 0.66 0.48"}
_COLOURS = {"": "0.72 0.53 0.33", "wheel": "0.20 0.22 0.26", "motor": "0.80 0.25 0.20", "servo": "0.85 0.65 0.15"}


@dataclass(frozen=True)
class Scene:
    """The surroundings of a machine, with distances along the driving direction.

    `bumps` are (distance, height), `slope` is in degrees, `wall` is (distance, height), and `rings` to throw through
    are (distance, height, radius).
    """

    bumps: tuple[tuple[float, float], ...] = ()
    slope: float = 0.0
    wall: tuple[float, float] | None = None
    rings: tuple[tuple[float, float, float], ...] = ()


@dataclass
class _Body:
    name: str
    parent: _Body | None  # None is the world
    position: np.ndarray
    inside: list[str] = field(default_factory=list)
    children: list[_Body] = field(default_factory=list)
    boxes: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)  # lowest and highest corners


def to_xml(tree: ConstructionTree, scene: Scene | None = None, *, dt: float = 0.005, loads: bool = False) -> str:
    """Return the MJCF model of a valid tree.

    The keyframe "start" has the controls of wheels and motors; springs contract when their controls are set to 1. With
    `loads` every block becomes a separate body, with sensors for the force and torque at its joint.
    """
    return _Builder(tree, scene or Scene(), loads).xml(dt)


def to_world(vector: np.ndarray) -> np.ndarray:
    """Convert a vector to MuJoCo's frame."""
    return np.asarray(vector)[[0, 2, 1]]


class _Builder:
    def __init__(self, tree: ConstructionTree, scene: Scene, loads: bool):
        self.tree, self.scene, self.loads = tree, scene, loads
        _, low, high = tree.boxes
        middle = (low.min(axis=0) + high.max(axis=0)) / 2
        # In the paper the lowest point is at y = 0.5; here that is the ground, so machines start without a drop.
        bottoms = [low[n, 1] + _gap_below(tree, int(index)) for n, index in enumerate(tree.boxes[0])]
        self.shift = np.array([-middle[0], -min(bottoms), -middle[2]])
        self.roots: list[_Body] = []
        self.bodies: list[_Body | None] = []
        self.tendons: list[str] = []
        self.actuators: list[str] = []
        self.controls: list[float] = []  # of each actuator at the start
        self.equalities: list[str] = []
        self.sensors: list[str] = []

    def xml(self, dt: float) -> str:
        for index, (block, placement) in enumerate(zip(self.tree.blocks, self.tree.placements, strict=True)):
            self.bodies.append(None if placement is None else self._add(index, block, placement))
        for index, block in enumerate(self.tree.blocks):
            if block.type.two_ended:
                self._fasten(index, block)
        slope = math.radians(self.scene.slope)
        down = f"0 {_n(-GRAVITY * math.sin(slope))} {_n(-GRAVITY * math.cos(slope))}"
        start = [f'<key name="start" ctrl="{" ".join(map(_n, self.controls))}"/>'] if self.controls else []
        sections = {"tendon": self.tendons, "actuator": self.actuators, "keyframe": start,
                    "equality": self.equalities, "sensor": self.sensors}  # fmt: skip
        parts = [
            '<mujoco model="machine">',
            '<compiler angle="radian" autolimits="true" boundmass="1e-6" boundinertia="1e-6"/>',
            f'<option timestep="{dt:g}" integrator="implicitfast" gravity="{down}" iterations="30" tolerance="1e-7">'
            '<flag autoreset="disable"/></option>',
            f'<default><geom friction="{FRICTION:g} 0.005 0.0001"/><joint armature="0.01"/>'
            '<default class="hull"><geom type="box" mass="0" group="3"/></default></default>',
            "<worldbody>",
            '<light pos="0 -20 40" dir="0 0.4 -1"/>',
            '<geom name="ground" type="plane" size="200 200 1" rgba="0.85 0.87 0.83 1"/>',
            *self._obstacles(),
            *(_body_xml(body) for body in self.roots),
            "</worldbody>",
            *(f"<{name}>{''.join(lines)}</{name}>" for name, lines in sections.items() if lines),
            "</mujoco>",
        ]
        return "\n".join(parts) + "\n"

    def _obstacles(self) -> list[str]:
        lines = [
            f'<geom name="bump{n}" type="capsule" size="0.5 30" euler="0 {math.pi / 2:.9f} 0" '
            f'pos="0 {_n(distance)} {_n(height - 0.5)}" rgba="0.6 0.62 0.58 1"/>'
            for n, (distance, height) in enumerate(self.scene.bumps)
        ]
        if self.scene.wall:
            distance, height = self.scene.wall
            lines.append(
                f'<geom name="wall" type="box" size="20 0.5 {_n(height / 2)}" pos="0 {_n(distance)} {_n(height / 2)}" '
                'rgba="0.65 0.45 0.40 1"/>'
            )
        for n, (distance, height, radius) in enumerate(self.scene.rings):
            lines.append(
                f'<site name="ring{n}" type="cylinder" size="{_n(radius)} 0.02" euler="{math.pi / 2:.9f} 0 0" '
                f'pos="0 {_n(distance)} {_n(height)}" rgba="0.95 0.75 0.1 0.4"/>'
            )
        return lines

    def _add(self, index: int, block: Block, placement: Placement) -> _Body:
        """Add a block and return its body: a new one if it moves relative to its parent, otherwise the parent's."""
        kind, parent = block.type, self.bodies[block.parent] if index else None
        is_loose = not index or block.kind == "36"
        centre = to_world(placement.centre + self.shift)
        if is_loose:
            body = self._new_body(index, None, centre)
            body.inside.append(f'<freejoint name="j{index}"/>')
            if index and self.tree.blocks[block.parent].kind == "27":
                assert parent is not None
                self.equalities.append(f'<weld name="held{index}" body1="{parent.name}" body2="{body.name}"/>')
        elif kind.joint:
            body = self._new_body(index, parent, centre)
            self._joint(index, block, placement, body)
        elif self.loads:
            body = self._new_body(index, parent, to_world(placement.origin + self.shift))
            body.inside.append(f'<site name="seat{index}" size="0.05"/>')
            self.sensors += [f'<{what} name="{what}{index}" site="seat{index}"/>' for what in ("force", "torque")]
        else:
            assert parent is not None
            body = parent
        body.inside += self._geoms(index, block, placement, centre - body.position, body)
        return body

    def _new_body(self, index: int, parent: _Body | None, position: np.ndarray) -> _Body:
        body = _Body(f"b{index}", parent, position)
        (parent.children if parent else self.roots).append(body)
        return body

    def _joint(self, index: int, block: Block, placement: Placement, body: _Body) -> None:
        kind, frame, name = block.type, rotation(placement.facing), f"j{index}"
        if kind.joint == "ball":
            body.inside.append(f'<joint name="{name}" type="ball" damping="{_JOINT_DAMPING["ball"]}"/>')
            return
        axis = to_world(frame[:, {"spin": 2, "slide": 2, "bend": 0, "turn": 1}[kind.joint]])
        if kind.joint == "spin":
            # Driven wheels turn so that a wheel on the left or right rolls forward, one that faces forward rolls
            # left, and one that faces back rolls right.
            axis = np.array([-1.0, 0.0, 0.0]) if placement.facing[0] == "x" else -axis
        if kind.joint == "slide":
            body.inside.append(
                f'<joint name="{name}" type="slide" axis="{_v(axis)}" range="{-SUSPENSION_TRAVEL} 0.1" '
                f'stiffness="{SUSPENSION_STIFFNESS}" damping="{SUSPENSION_DAMPING}"/>'
            )
            return
        damping = WHEEL_DAMPING if kind.drive == "wheel" else _JOINT_DAMPING[kind.joint]
        limits = f' range="{-math.pi / 2:.6f} {math.pi / 2:.6f}"' if kind.joint in ("bend", "turn") else ""
        inertia = f' armature="{MOTOR_INERTIA}"' if kind.drive == "motor" else ""
        body.inside.append(
            f'<joint name="{name}" type="hinge" axis="{_v(axis)}" damping="{damping}"{limits}{inertia}/>'
        )
        if kind.drive in _DRIVES:
            drive, speed, gain, torque = _DRIVES[kind.drive]
            self._actuator(
                f'<velocity name="{drive}{index}" joint="{name}" kv="{gain}" forcerange="{-torque} {torque}"/>', speed
            )
        elif kind.drive == "servo":
            self._actuator(f'<position name="servo{index}" joint="{name}" kp="{SERVO_KP}" kv="{SERVO_KV}"/>', 0.0)

    def _actuator(self, line: str, control: float) -> None:
        self.actuators.append(line)
        self.controls.append(control)

    def _geoms(self, index: int, block: Block, placement: Placement, offset: np.ndarray, body: _Body) -> list[str]:
        kind, half = block.type, to_world(placement.half)
        common = f'name="g{index}" rgba="{_KIND_COLOURS.get(kind.id, _COLOURS[kind.drive])} 1"'
        if kind.id == "36":
            return [f'<geom {common} type="sphere" size="0.95" mass="{kind.mass}" pos="{_v(offset)}"/>']
        if kind.is_wheel:
            along = to_world(rotation(placement.facing)[:, 2])
            length = kind.size[2] / 2 - CLEARANCE
            ends = f"{_v(offset - along * length)} {_v(offset + along * length)}"
            return [
                f'<geom {common} type="cylinder" size="{_n(kind.size[0] / 2)}" fromto="{ends}" mass="{kind.mass}"/>'
            ]
        if kind.id == "30":
            return self._bowl(index, placement, offset)
        body.boxes.append((offset - half, offset + half))
        shape = f'type="box" size="{_v(half - CLEARANCE)}" pos="{_v(offset)}"'
        return [f'<geom {common} {shape} mass="{kind.mass}" contype="0" conaffinity="0"/>']

    def _bowl(self, index: int, placement: Placement, offset: np.ndarray) -> list[str]:
        """Return a foot and four walls that lean outwards, so that a boulder can leave."""
        frame, (right, up, front) = rotation(placement.facing), np.eye(3)
        mass = f'mass="0.1" rgba="{_COLOURS[""]} 1"'
        foot, at = to_world(np.abs(frame @ [0.75, 1.05, 0.5])), offset + to_world(frame @ [0.0, 0.0, -0.9])
        lines = [f'<geom name="g{index}" type="box" size="{_v(foot)}" pos="{_v(at)}" {mass}/>']
        for n, (side, along, base, rim, width) in enumerate(
            ((right, up, 0.79, 1.16, 1.3), (right, up, -0.79, -1.16, 1.3),
             (up, right, 1.09, 1.46, 1.0), (up, right, -1.09, -1.46, 1.0))
        ):  # fmt: skip
            lean = math.atan2(rim - base, 1.8)
            normal = math.cos(lean) * side - math.sin(lean) * front
            upwards = math.sin(lean) * side + math.cos(lean) * front
            axes = [to_world(frame @ axis) for axis in (normal, along, upwards)]
            if np.linalg.det(np.array(axes)) < 0:
                axes[1] = -axes[1]
            middle = offset + to_world(frame @ ((base + rim) / 2 * side + 0.4 * front))
            lines.append(
                f'<geom name="g{index}w{n}" type="box" size="0.04 {width} 0.9" pos="{_v(middle)}" '
                f'xyaxes="{_v(axes[0])} {_v(axes[1])}" {mass}/>'
            )
        return lines

    def _fasten(self, index: int, block: Block) -> None:
        first, second = self.bodies[block.parent], self.bodies[block.parent_b or 0]
        assert first is not None and second is not None
        sites = []
        for body, end, is_second in ((first, "a", False), (second, "b", True)):
            at = _v(to_world(self.tree.end(block, is_second) + self.shift) - body.position)
            sites.append(f'<site site="s{index}{end}"/>')
            body.inside += [
                f'<site name="s{index}{end}" size="0.1" pos="{at}"/>',
                f'<geom name="g{index}{end}" type="sphere" size="0.1" mass="{block.type.mass / 2}" pos="{at}" '
                'contype="0" conaffinity="0" rgba="0.5 0.5 0.55 1"/>',
            ]
        if first is second:
            return
        if block.type.id == "7":
            self.equalities.append(f'<weld name="brace{index}" body1="{first.name}" body2="{second.name}"/>')
            return
        length = float(np.linalg.norm(self.tree.end(block) - self.tree.end(block, True)))
        limits = f' range="0 {_n(max(length, 0.01))}"' if block.type.id == "45" else ""
        self.tendons.append(f'<spatial name="t{index}"{limits} width="0.06">{"".join(sites)}</spatial>')
        if block.type.id == "9":
            pull = f"{SPRING_STIFFNESS * SPRING_REST:g} {-SPRING_STIFFNESS:g} {-SPRING_DAMPING:g}"
            self._actuator(
                f'<general name="spring{index}" tendon="t{index}" gaintype="affine" gainprm="{pull}" '
                f'forcerange="{-SPRING_PULL:g} 0"/>',
                0.0,
            )


def _gap_below(tree: ConstructionTree, index: int) -> float:
    """Return how far above the bottom of its box the block's geometry begins."""
    placement, kind = tree.placements[index], tree.blocks[index].type
    is_round = kind.id in ("30", "36") or (kind.is_wheel and placement is not None and placement.facing[0] != "y")
    return 0.0 if is_round else CLEARANCE


def _body_xml(body: _Body) -> str:
    at = body.position - (body.parent.position if body.parent else 0)
    children = "".join(map(_body_xml, body.children))
    hulls = "".join(
        f'<geom class="hull" size="{_v((high - low) / 2 - CLEARANCE)}" pos="{_v((low + high) / 2)}"/>'
        for low, high in _merged(body.boxes)
    )
    return f'<body name="{body.name}" pos="{_v(at)}">{"".join(body.inside)}{hulls}{children}</body>'


def _merged(boxes: list[tuple[np.ndarray, np.ndarray]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Merge boxes that continue one another. Each box on the ground has up to four contacts, which dominate the cost
    of a simulation step."""
    left = sorted(boxes, key=lambda box: box[0].round(3).tolist())
    for i, j in itertools.combinations(range(len(left)), 2):
        (low, high), (other_low, other_high) = left[i], left[j]
        same = (np.abs(low - other_low) < 1e-6) & (np.abs(high - other_high) < 1e-6)
        touch = (np.abs(high - other_low) < 1e-6) | (np.abs(low - other_high) < 1e-6)
        if same.sum() == 2 and touch[~same].all():
            both = np.minimum(low, other_low), np.maximum(high, other_high)
            return _merged([*left[:i], both, *left[i + 1 : j], *left[j + 1 :]])
    return left


def _n(value: float) -> str:
    return f"{value:.6g}"


def _v(vector: np.ndarray) -> str:
    return " ".join(_n(value + 0.0) for value in vector)
