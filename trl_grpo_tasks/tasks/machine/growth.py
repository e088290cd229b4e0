"""Legal positions of a machine's next block, for all faces at once, by the rules of ConstructionTree.validate."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np

from .blocks import BLOCKS, FACINGS, LIMITS, child_facing, rotation
from .tree import ROOT, TOUCHING, Block, ConstructionTree, Placement, place

_LIMITS = np.array(LIMITS) + TOUCHING
_FRONTS = np.array([rotation(facing)[:, 2] for facing in FACINGS])


class Growth:
    """A valid machine and the faces on which blocks fit. It is immutable; `grow` returns it with one more block."""

    def __init__(self, tree: ConstructionTree):
        self.blocks = tree.blocks
        self._placements = tree.placements
        self._indices, self._low, self._high = tree.boxes
        parts = [_faces(i, b, p) for i, (b, p) in enumerate(zip(tree.blocks, tree.placements, strict=True))]
        self.faces = [pair for pairs, _, _ in parts for pair in pairs]
        self._positions = np.concatenate([positions for _, positions, _ in parts])
        self._facings = np.concatenate([facings for _, _, facings in parts])
        self._open: dict[tuple[float, float, float], list[tuple[int, int]]] = {}

    @staticmethod
    def start() -> Growth:
        return Growth(ConstructionTree((ROOT,)))

    def grow(self, block: Block) -> Growth:
        grown = copy.copy(self)
        grown.blocks = (*self.blocks, block)
        grown._open = {}
        placement: Placement | None = None
        if not block.type.two_ended:
            parent = self._placements[block.parent]
            assert parent is not None
            placement = place(parent, self.blocks[block.parent].kind, block.face, block.kind)
            grown._indices = np.append(self._indices, len(self.blocks))
            grown._low = np.vstack([self._low, placement.centre - placement.half])
            grown._high = np.vstack([self._high, placement.centre + placement.half])
            pairs, positions, facings = _faces(len(self.blocks), block, placement)
            grown.faces = self.faces + pairs
            grown._positions = np.concatenate([self._positions, positions])
            grown._facings = np.concatenate([self._facings, facings])
        grown._placements = (*self._placements, placement)
        return grown

    def places(self, kind: str) -> list[tuple[int, int]]:
        """Return the (parent, face) pairs on which a block fits; the ends of two-ended ones fit on all faces."""
        if BLOCKS[kind].two_ended:
            return self.faces
        size = BLOCKS[kind].size
        if size not in self._open:
            fits = self._fits(size)
            self._open[size] = [place for place, is_open in zip(self.faces, fits, strict=True) if is_open]
        return self._open[size]

    def kinds(self, wanted: Iterable[str]) -> list[str]:
        """Return those of the wanted kinds that fit somewhere."""
        return [kind for kind in wanted if kind != "0" and self.places(kind)]

    def _fits(self, size: tuple[float, float, float]) -> np.ndarray:
        half = _halves(size)[self._facings]
        centre = self._positions + _FRONTS[self._facings] * (size[2] / 2)
        low, high = centre - half, centre + half
        shared = np.minimum(high[:, None], self._high[None]) - np.maximum(low[:, None], self._low[None])
        clash = (shared > TOUCHING).all(axis=-1)
        for row, (index, _) in enumerate(self.faces):
            if self.blocks[index].kind == "30":
                clash[row, np.searchsorted(self._indices, index)] = False  # a child may be inside its container
        extent = np.maximum(high, self._high.max(axis=0)) - np.minimum(low, self._low.min(axis=0))
        return ~clash.any(axis=1) & (extent <= _LIMITS).all(axis=1)


def _faces(index: int, block: Block, placement: Placement | None) -> tuple[list[tuple[int, int]], Any, Any]:
    """Return a block's faces as (block, face), their positions, and the facing of a child on each."""
    if placement is None or not block.type.faces:
        return [], np.zeros((0, 3)), np.zeros(0, dtype=int)
    faces = block.type.faces
    positions = placement.origin + np.array([face.position for face in faces]) @ rotation(placement.facing).T
    facings = np.array([FACINGS.index(child_facing(placement.facing, face)) for face in faces])
    return [(index, face) for face in range(len(faces))], positions, facings


@cache
def _halves(size: tuple[float, float, float]) -> np.ndarray:
    return np.array([np.abs(rotation(facing) @ np.array(size)) / 2 for facing in FACINGS])
