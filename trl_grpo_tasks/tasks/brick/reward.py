"""Reward of the brick task: parse a text, analyse its stability, and compare it with the target shape.

Every component lies between 0 and 1, so the total lies between 0 and the sum of the weights. Stability, connectivity,
quality and length are multiplied by `shape`, the IoU with the target: otherwise a single brick on the ground would
earn full credit for physics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .designs import decode_voxels, loads_on
from .kit import KIT, Kit
from .solvers import SOLVING, Solving
from .stability import Analysis, analyse
from .structure import MAX_OFFSET, Structure, parse

COMPONENTS = ("stability", "connectivity", "quality", "length", "shape", "syntax")


@dataclass(frozen=True)
class Judgement:
    """The result of judging one text; `analysis` is None if the text is not a valid structure."""

    structure: Structure
    components: dict[str, float]
    valid: bool
    success: bool
    reason: str
    analysis: Analysis | None
    iou: float | None


def judge(
    text: str,
    row: Mapping[str, Any],
    *,
    max_bricks: int,
    success_iou: float,
    solving: Solving = SOLVING,
    max_offset: int = MAX_OFFSET,
    kit: Kit = KIT,
) -> Judgement:
    """Judge any text as an answer to a row.

    A row without `voxels` (a caption written by the user) has no target: only physics is scored, `shape` and `length`
    are 0, and the answer is never a success.
    """
    reading = parse(text, row["world"], max_offset, kit)
    structure = reading.structure
    problems = reading.problems + structure.problems(max_bricks)
    valid = not problems
    iou = None if row.get("voxels") is None else overlap(structure, decode_voxels(row["voxels"], row["world"]))
    shape = 1.0 if iou is None else iou  # the factor on the physics components
    analysis = None
    reasons = problems
    steadiness = 0.0
    if valid:
        resting = loads_on(structure, row.get("loads") or ())
        if isinstance(resting, str):
            analysis = Analysis(stable=False, load_factor=None, reasons=(resting,))
        else:
            analysis = analyse(structure, backend=solving, loads=resting)
        if analysis.stable:
            # Without a solver the load factor is unknown, and "stable" means only connected to the ground.
            steadiness = 1.0 - (analysis.load_factor or 0.0)
        reasons = list(analysis.reasons)
        if not reasons and iou is None:
            reasons = ["the shape cannot be judged: this caption has no target"]
        elif not reasons and shape < success_iou:
            reasons = [f"the shape has an IoU of {shape:.2f} with the target; success needs {success_iou}"]
    bricks = len(structure)
    asked = max(row["gold"].count("\n"), 1) if row.get("gold") else bricks or 1
    judged = 0.0 if iou is None else iou
    spoilt = {*structure.outside, *(later for _, later in structure.collisions)}
    components = {
        "stability": steadiness * shape,
        "connectivity": shape * (bricks - len(structure.floating)) / bricks if bricks else 0.0,
        "quality": shape * (bricks - len(spoilt)) / bricks if bricks else 0.0,
        "length": judged * min(bricks / asked, 1.0),
        "shape": judged,
        "syntax": bricks / reading.lines if reading.lines else 0.0,
    }
    success = valid and analysis is not None and analysis.stable and iou is not None and iou >= success_iou
    return Judgement(structure, components, valid, success, "; ".join(reasons[:3]), analysis, iou)


def overlap(structure: Structure, target: np.ndarray) -> float:
    """Return the IoU of the structure's cells with the target.

    Cells claimed twice or outside the world enlarge the union: an answer written twice scores half.
    """
    filled = structure.occupied
    too_many = sum(brick.h * brick.w for brick in structure.bricks) - np.count_nonzero(filled)
    union = np.count_nonzero(filled | target) + too_many
    return float(np.count_nonzero(filled & target) / union) if union else 0.0


def facts(judgement: Judgement) -> dict[str, Any]:
    """Return the facts of a judgement shown in reports."""
    analysis = judgement.analysis
    return {
        "bricks": len(judgement.structure),
        "stable": bool(analysis and analysis.stable),
        "load_factor": analysis.load_factor if analysis else None,
        **({"shape": "not judged: this caption has no target"} if judgement.iou is None else {"iou": judgement.iou}),
    }


def verdict(judgement: Judgement, loads: Sequence[Mapping[str, Any]]) -> str:
    """Describe a judged structure in one sentence."""
    analysis, bricks = judgement.analysis, len(judgement.structure)
    if analysis is None:
        return f"not a structure: {judgement.reason}"
    burden = " and ".join(f"{load['grams']} g" for load in loads)
    what = f"{bricks} brick{'s' if bricks != 1 else ''}" + (f" carrying {burden}" if burden else "")
    if not analysis.stable:
        return f"{what}: unstable; {'; '.join(analysis.reasons[:3])}"
    used = "" if analysis.load_factor is None else f", at {analysis.load_factor:.0%} of the load its studs can bear"
    return f"{what}: stable{used}"
