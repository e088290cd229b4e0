"""Text before the JSON of an answer: what the blocks of a machine do, computed from the machine itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .blocks import rotation
from .tree import Block, ConstructionTree

_WAYS = {"z+": "forward", "z-": "back", "x-": "left", "x+": "right", "y+": "up", "y-": "down"}
_AXES = {"x": "the axis from left to right", "y": "the vertical axis", "z": "the axis from back to front"}
_WHEELS = {"x": "drive forward", "z": "roll sideways", "y": "lie flat and do not drive"}


def reasoned_answer(tree: ConstructionTree) -> str:
    """Return an answer that explains a valid machine and then gives it as JSON in a code fence."""
    return f"{explanation(tree)}\n```json\n{tree.to_json()}\n```"


def explanation(tree: ConstructionTree) -> str:
    """Describe a valid machine, one sentence for each thing that it does.

    >>> car = ConstructionTree.parse('[{"id":"0","order_id":0,"parent":-1,"bp_id":-1},'
    ...                              '{"id":"2","order_id":1,"parent":0,"bp_id":2}]')
    >>> explanation(car)
    'Wheels: 1 on block 0; 1 drive forward. In all 2 blocks, 1.25 kg, 1.5 m wide, 2 m high, 2 m long.'
    """
    parts = [_frame(tree), _wheels(tree), *_motors(tree), _joints(tree), _boulders(tree), _ropes(tree)]
    mass = sum(block.type.mass for block in tree.blocks)
    wide, high, long = tree.extent()
    parts.append(f"In all {len(tree.blocks)} blocks, {mass:g} kg, {wide:g} m wide, {high:g} m high, {long:g} m long.")
    return " ".join(part for part in parts if part)


def _frame(tree: ConstructionTree) -> str:
    """Name the rigid blocks, each with the direction in which it extends and the block that carries it."""
    rigid = _of(tree, lambda block: not (block.type.joint or block.type.two_ended or block.kind == "36"))
    found = [f"{block.type.name} {i} {_WAYS[place.facing]} from {block.parent}" for i, block, place in rigid]
    return f"Frame: {', '.join(found)}." if found else ""


def _wheels(tree: ConstructionTree) -> str:
    carriers: dict[str, list[int]] = {}
    does: dict[str, list[int]] = {}
    for index, block, place in _of(tree, lambda block: block.type.is_wheel):
        carriers.setdefault(f"on block {block.parent}", []).append(index)
        does.setdefault(_WHEELS[place.facing[0]] if block.type.drive else "turn freely", []).append(index)
    parts = (
        "; ".join(f"{', '.join(map(str, some))} {what}" for what, some in said.items()) for said in (carriers, does)
    )
    return f"Wheels: {'; '.join(parts)}." if carriers else ""


def _motors(tree: ConstructionTree) -> list[str]:
    """Say for each motor what it turns, about which axis, and how far out the mass is that it turns."""
    said = []
    for index, _, place in _of(tree, lambda block: block.type.drive == "motor"):
        carried = _carried(tree, index)
        mass = sum(tree.blocks[i].type.mass for i in carried)
        axis = rotation(place.facing)[:, 2]
        centres = [other.centre for i in carried if (other := tree.placements[i]) is not None]
        reach = max((np.linalg.norm(np.cross(at - place.centre, axis)) for at in centres), default=0.0)
        load = f"{len(carried)} blocks, {mass:g} kg, up to {reach:.1f} m from its axis" if carried else "nothing"
        said.append(f"Motor {index} turns {load}, about {_AXES[place.facing[0]]}.")
    return said


def _joints(tree: ConstructionTree) -> str:
    plain = _of(tree, lambda block: block.type.joint and not block.type.is_wheel and block.type.drive != "motor")
    found = [f"{block.type.name} {i} on {block.parent}" for i, block, _ in plain]
    return f"Joints: {', '.join(found)}." if found else ""


def _boulders(tree: ConstructionTree) -> str:
    lowest = tree.boxes[1][:, 1].min()
    found = [
        f"{i} on {tree.blocks[b.parent].type.name} {b.parent}, {place.centre[1] - lowest:.1f} m above the ground"
        for i, b, place in _of(tree, lambda block: block.kind == "36")
    ]
    return f"Boulder {'; '.join(found)}." if found else ""


def _ropes(tree: ConstructionTree) -> str:
    ropes = _of(tree, lambda block: block.type.two_ended)
    ends = ", ".join(f"{block.type.name} {i} from block {block.parent} to {block.parent_b}" for i, block, _ in ropes)
    return f"Connections: {ends}." if ends else ""


def _of(tree: ConstructionTree, wanted: Callable[[Block], object]) -> list[tuple[int, Block, Any]]:
    """Return number, block and placement of those blocks that are wanted."""
    placed = zip(range(len(tree.blocks)), tree.blocks, tree.placements, strict=True)
    return [(index, block, placement) for index, block, placement in placed if index and wanted(block)]


def _carried(tree: ConstructionTree, root: int) -> list[int]:
    """Return the blocks with a volume that sit on a block, directly or through others."""
    found = {root}
    for index, block in enumerate(tree.blocks):
        if block.parent in found and not block.type.two_ended:
            found.add(index)
    return sorted(found - {root})
