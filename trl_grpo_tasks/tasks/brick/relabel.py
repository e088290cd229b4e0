"""Hindsight: the training row that asks for what a structure is, whatever was asked for."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...task import Row
from .data.captions import choices
from .data.catalogue import CATEGORIES, LEVELS, Request
from .data.designs import NoDesignError, design
from .data.rows import make_row
from .kit import KIT, Kit
from .structure import Structure


@dataclass(frozen=True)
class _Target:
    """A shape that rows of a level ask for: with each of these weights, if `support` is thick enough for it."""

    level: str
    category: str
    requests: tuple[Request, ...]
    support: int | None


def row_like(
    structure: Structure, row: Row, levels: Sequence[str], least_iou: float, one_world: bool = False
) -> dict[str, Any] | None:
    """Return the training row of these levels whose target has the largest IoU with the structure, if it is at least
    `least_iou`; among equals, one of the category of `row`.

    Of the weights that a support is meant for, those that `row` asks for come first, then the lightest. The row
    itself, also with another caption, is left out. The caption is as detailed as that of `row` where it can be.
    """
    targets, cells_R_C = _targets(tuple(levels), structure.world)
    if not targets:
        return None
    shared_R = cells_R_C[:, structure.occupied.ravel()].sum(1)
    iou_R = shared_R / (cells_R_C.sum(1) + np.count_nonzero(structure.occupied) - shared_R)
    asked = tuple(load["grams"] for load in row["loads"])
    like = np.flatnonzero(iou_R >= least_iou)
    for index in sorted(like, key=lambda index: (-iou_R[index], targets[index].category != row["category"])):
        target = targets[index]
        for request in sorted(target.requests, key=lambda request: (request.grams != asked, request.grams)):
            if _has_design(request, target, structure.kit):
                found = choices(target.level, tuple(levels) if one_world else ())
                details = {detail for choice, detail in found if choice == request}
                if not details:
                    continue
                detail = row["detail"] if row["detail"] in details else max(details)
                made = make_row(target.level, request, detail, structure.kit)
                if (made["gold"], made["loads"]) != (row["gold"], row["loads"]):
                    return made
    return None


def _has_design(request: Request, target: _Target, kit: Kit) -> bool:
    """Whether the gold answer to a request has the target's shape."""
    if target.support is None and kit == KIT:  # every request has an answer
        return True
    try:
        return design(request, LEVELS[target.level].world, kit).support == target.support
    except NoDesignError:
        return False


@functools.cache
def _targets(levels: tuple[str, ...], world: int) -> tuple[list[_Target], np.ndarray]:
    """Return the shapes that training rows ask for, and the cells of each as a row, in a world of this size."""
    targets, cells = [], []
    for level in levels:
        by_shape: dict[tuple[Any, ...], list[Request]] = {}
        for request in LEVELS[level].requests():
            if not request.is_held_out:
                by_shape.setdefault((request.category, request.params), []).append(request)
        for (name, params), requests in by_shape.items():
            category = CATEGORIES[name]
            for support in category.supports(dict(params)) if category.support else [None]:
                shape = category.build(**dict(params), **({category.support: support} if category.support else {}))
                if max(shape.shape) <= LEVELS[level].world:
                    voxels = np.zeros((world,) * 3, dtype=bool)
                    voxels[tuple(map(slice, shape.shape))] = shape
                    targets.append(_Target(level, name, tuple(requests), support))
                    cells.append(voxels.ravel())
    return targets, np.stack(cells) if cells else np.empty((0, world**3), dtype=bool)
