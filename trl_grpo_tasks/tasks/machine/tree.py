"""ConstructionTree: a machine as a list of blocks, each on a face of an earlier one; parsing and validation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .blocks import BLOCKS, LIMITS, Block, child_facing, rotation
from .reading import read_blocks

TOUCHING = 1e-3  # boxes that overlap by less than this along some axis count as touching only


ROOT = Block("0", -1, -1)


@dataclass(frozen=True)
class Placement:
    """The position of a block before the machine is put on the ground; the start block is at the origin."""

    origin: np.ndarray
    facing: str
    centre: np.ndarray
    half: np.ndarray

    def face(self, kind: str, index: int) -> np.ndarray:
        """Return the position of a face of this block."""
        return self.origin + rotation(self.facing) @ np.asarray(BLOCKS[kind].faces[index].position)


@dataclass(frozen=True)
class ConstructionTree:
    """The blocks of a machine in order, and the problems of the text that they were parsed from.

    >>> tree = ConstructionTree.parse('[{"id":"0","order_id":0,"parent":-1,"bp_id":-1},'
    ...                               '{"id":"2","order_id":1,"parent":0,"bp_id":2}]')
    >>> tree.validate()
    []
    """

    blocks: tuple[Block, ...]
    reading_problems: tuple[str, ...] = ()

    @staticmethod
    def parse(text: str) -> ConstructionTree:
        """Parse the machine in a text: the last fenced JSON block, or else the last JSON list of objects.

        Never raises; `validate` reports what could not be parsed.
        """
        blocks, problems = read_blocks(text)
        return ConstructionTree(tuple(blocks), tuple(problems))

    def validate(self) -> list[str]:
        """List all problems; the list is empty for a machine that can be built."""
        if self.reading_problems or not self.blocks:
            return list(self.reading_problems) or ["the machine has no blocks"]
        problems = []
        if self.blocks[0] != ROOT:
            problems.append('block 0 must be the start block: "id":"0", "parent":-1, "bp_id":-1')
        if len(self.blocks) == 1:
            problems.append("the machine has only the start block; add at least one more block")
        for index, block in enumerate(self.blocks):
            if index and block.kind == "0":
                problems.append(f"block {index} is a second start block")
            elif index:
                problems += self._attachment_problems(index, block)
        for i, j in self.overlaps():
            problems.append(f"blocks {i} ({self.blocks[i].type.name}) and {j} ({self.blocks[j].type.name}) overlap")
        for axis, size, limit in zip("xyz", self.extent(), LIMITS, strict=True):
            if size > limit + TOUCHING:
                problems.append(f"the machine is {size:g} long along {axis}; the limit is {limit:g}")
        return problems

    def _attachment_problems(self, index: int, block: Block) -> Iterator[str]:
        ends = [(block.parent, block.face)]
        if block.parent_b is not None and block.face_b is not None:
            ends.append((block.parent_b, block.face_b))
        for parent, face in ends:
            if not 0 <= parent < index:
                yield f"block {index} sits on block {parent}; its parent must be one of the blocks before it"
                continue
            kind = self.blocks[parent].type
            if not 0 <= face < len(kind.faces):
                known = f"0 to {len(kind.faces) - 1}" if kind.faces else "none"
                yield f"block {index} sits on face {face} of block {parent} ({kind.name}); its faces are: {known}"
        if len(ends) == 2 and ends[0] == ends[1]:
            yield f"block {index} ({block.type.name}) has both ends on face {block.face} of block {block.parent}"

    @cached_property
    def placements(self) -> tuple[Placement | None, ...]:
        """The placement of every block; None for two-ended blocks and those whose parent or face does not exist."""
        placed: list[Placement | None] = [Placement(np.zeros(3), "z+", np.zeros(3), np.full(3, 0.5))]
        for index, block in enumerate(self.blocks[1:], start=1):
            parent = placed[block.parent] if 0 <= block.parent < index and not block.type.two_ended else None
            if parent is None or not 0 <= block.face < len(self.blocks[block.parent].type.faces):
                placed.append(None)
            else:
                placed.append(place(parent, self.blocks[block.parent].kind, block.face, block.kind))
        return tuple(placed)

    @cached_property
    def boxes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Indices, lowest and highest corners of the blocks that have a volume."""
        solid = [(index, p.centre - p.half, p.centre + p.half) for index, p in enumerate(self.placements) if p]
        indices, low, high = (np.array(column) for column in zip(*solid, strict=True))
        return indices, low, high

    def overlaps(self) -> list[tuple[int, int]]:
        """Return the pairs of blocks whose boxes overlap. A container and its own child may overlap."""
        indices, low, high = self.boxes
        shared = np.minimum(high[:, None], high[None]) - np.maximum(low[:, None], low[None])
        pairs = np.argwhere(np.triu((shared > TOUCHING).all(axis=-1), 1))
        found = [(int(indices[i]), int(indices[j])) for i, j in pairs]
        return [(i, j) for i, j in found if not (self.blocks[j].parent == i and self.blocks[i].kind == "30")]

    def extent(self) -> tuple[float, float, float]:
        """The size of the whole machine along x, y and z."""
        _, low, high = self.boxes
        x, y, z = (round(float(size), 9) for size in high.max(axis=0) - low.min(axis=0))
        return x, y, z

    def shape(self) -> frozenset[tuple[Any, ...]]:
        """Return the kinds and positions of the blocks; these do not depend on their order or on who carries whom."""
        found: set[tuple[Any, ...]] = set()
        for block, placement in zip(self.blocks, self.placements, strict=True):
            if placement is not None:
                found.add((block.kind, placement.facing, *placement.origin.round(3).tolist()))
            else:
                ends = sorted(tuple(self.end(block, second).round(3).tolist()) for second in (False, True))
                found.add((block.kind, *ends))
        return frozenset(found)

    def end(self, block: Block, second: bool = False) -> np.ndarray:
        """Return the position where an end of a two-ended block is attached."""
        parent, face = (block.parent_b, block.face_b) if second else (block.parent, block.face)
        assert parent is not None and face is not None
        placement = self.placements[parent]
        assert placement is not None
        return placement.face(self.blocks[parent].kind, face)

    def to_json(self) -> str:
        """Return the canonical text of this machine: the first set of field names, no whitespace."""
        return "[" + ",".join(block_json(index, block) for index, block in enumerate(self.blocks)) + "]"

    def to_paper_json(self) -> str:
        """Return the machine with the field names of the paper: type, id, parent and face_id."""
        return self.to_json().replace('"id":', '"type":').replace('"order_id":', '"id":').replace("bp_id", "face_id")


def block_json(index: int, block: Block) -> str:
    entry: dict[str, Any] = {"id": block.kind, "order_id": index}
    if block.type.two_ended:
        entry |= {"parent_a": block.parent, "bp_id_a": block.face, "parent_b": block.parent_b, "bp_id_b": block.face_b}
    else:
        entry |= {"parent": block.parent, "bp_id": block.face}
    return json.dumps(entry, separators=(",", ":"))


def place(parent: Placement, parent_kind: str, face: int, kind: str) -> Placement:
    """Return the placement of a block on a face of a placed one."""
    facing = child_facing(parent.facing, BLOCKS[parent_kind].faces[face])
    size = np.asarray(BLOCKS[kind].size)
    frame = rotation(facing)
    origin = parent.face(parent_kind, face)
    return Placement(origin, facing, origin + frame[:, 2] * size[2] / 2, np.abs(frame @ size) / 2)
