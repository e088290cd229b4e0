"""Prefix scores of the brick task: stability and shape of a structure after each of its lines."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np

from .data.designs import decode_voxels, loads_on
from .kit import KIT, Kit
from .physics.solvers import SOLVING, Solving
from .physics.stability import analyse
from .structure import MAX_OFFSET, READ_LIMIT, Brick, Structure, parse


def prefix_scores(
    text: str,
    row: Mapping[str, Any],
    *,
    max_bricks: int,
    solving: Solving = SOLVING,
    max_offset: int = MAX_OFFSET,
    kit: Kit = KIT,
    ignore_target: bool = False,
) -> list[tuple[int, float]]:
    """Return (characters, score) after each complete line, and at the end of the text.

    The score is the mean of the components "stability" and "shape" that the text up to there has as an answer; without
    a target, or with `ignore_target`, half of "stability".
    """
    reading = parse(text, row["world"], max_offset, kit)
    structure = reading.structure
    intact = reading.is_brick.index(False) if False in reading.is_brick else reading.lines
    margins = _margins(structure.first(min(intact, max_bricks)), row, solving)
    has_target = row.get("voxels") is not None and not ignore_target
    shapes = _shapes(structure, decode_voxels(row["voxels"], row["world"])) if has_target else None
    bricks_after = [0, *accumulate(map(int, reading.is_brick))]

    def score(lines: int) -> float:
        bricks = bricks_after[lines]
        margin = margins[bricks] if lines <= intact and bricks < len(margins) else 0.0
        return margin / 2 if shapes is None else (margin * shapes[bricks] + shapes[bricks]) / 2

    pairs = [(end, score(lines)) for lines, end in enumerate(_line_ends(text), 1)]
    at_end = score(reading.lines)
    if len(reading.problems) > reading.is_brick.count(False):  # there are lines that were not read
        at_end = 0.0 if shapes is None else shapes[-1] / 2
    return [*pairs, (len(text), at_end)]


def _line_ends(text: str) -> list[int]:
    """The number of characters after the line break of each line that `parse` reads and that is not empty."""
    ends = []
    place = len(text) - len(text.lstrip())
    for line in text[place:].split("\n", READ_LIMIT)[:READ_LIMIT]:
        place += len(line) + 1
        if line.strip() and place <= len(text):
            ends.append(place)
    return ends


def _margins(structure: Structure, row: Mapping[str, Any], solving: Solving) -> list[float]:
    """The stability margin of the first 0, 1, 2, ... bricks: 1 minus the load factor, 0 where they are not stable."""
    weights = tuple((load["grams"], *load["at"]) for load in row.get("loads") or ())
    bricks, world, kit = structure.bricks, structure.world, structure.kit
    return [0.0, *(_margin(bricks[:count], world, kit, weights, solving) for count in range(1, len(bricks) + 1))]


@lru_cache(4096)  # answers to one request often begin with the same bricks
def _margin(
    bricks: tuple[Brick, ...], world: int, kit: Kit, weights: tuple[tuple[Any, ...], ...], solving: Solving
) -> float:
    prefix = Structure(bricks, world, kit)
    # A weight rests on the highest brick below it, which changes with the prefix.
    resting = loads_on(prefix, [{"grams": grams, "at": (x, y)} for grams, x, y in weights])
    found = None if isinstance(resting, str) else analyse(prefix, backend=solving, loads=resting)
    return 1.0 - (found.load_factor or 0.0) if found is not None and found.stable else 0.0


def _shapes(structure: Structure, target: np.ndarray) -> list[float]:
    """The IoU of the first 0, 1, 2, ... bricks with the target, as `reward.overlap` computes it for each."""
    owner = structure.owner
    hits = np.bincount(owner[target & (owner >= 0)], minlength=len(structure)).cumsum()
    sizes = np.cumsum([brick.h * brick.w for brick in structure.bricks])
    unions = np.count_nonzero(target) + sizes - hits
    return [0.0, *(float(hit / union) for hit, union in zip(hits, unions, strict=True))]
