"""What a text is worth as a brick structure: is it one, does it stand, and is it what was asked for?

Every part lies between 0 and 1, so the total lies between 0 and the sum of the weights. Standing, being connected,
being free of collisions and being long all count in proportion to `shape`, the overlap with the target: physics alone
is met best by a single brick on the ground, and that must not pay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .designs import decode_voxels, loads_on
from .stability import Analysis, analyse
from .structure import MAX_OFFSET, Structure, parse

COMPONENTS = ("stability", "connectivity", "quality", "length", "shape", "syntax")


@dataclass(frozen=True)
class Judgement:
    """`components` by name; `analysis` is None where the text is no structure that could be analysed."""

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
    backend: str = "auto",
    max_offset: int = MAX_OFFSET,
) -> Judgement:
    """Judge any text as an answer to a row. A row without `voxels` (a caption of one's own) has no target: physics is
    judged, `shape` and `length` earn nothing, and nothing is a success."""
    reading = parse(text, row["world"], max_offset)
    structure = reading.structure
    problems = reading.problems + structure.problems(max_bricks)
    valid = not problems
    iou = None if row.get("voxels") is None else overlap(structure, decode_voxels(row["voxels"], row["world"]))
    shape = 1.0 if iou is None else iou  # what physics counts in proportion to
    analysis = None
    reasons = problems
    steadiness = 0.0
    if valid:
        resting = loads_on(structure, row.get("loads") or ())
        if isinstance(resting, str):
            analysis = Analysis(stable=False, load_factor=None, reasons=(resting,))
        else:
            analysis = analyse(structure, backend=backend, loads=resting, world=row["world"])
        if analysis.stable:
            # Without a solver there is no load factor, and being connected is all that is known.
            steadiness = 1.0 - (analysis.load_factor or 0.0)
        reasons = list(analysis.reasons)
        if not reasons and iou is None:
            reasons = ["the shape cannot be judged: this caption has no target"]
        elif not reasons and shape < success_iou:
            reasons = [f"the shape meets {shape:.2f} of what was asked for; {success_iou} is needed"]
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
    """Cells in both over cells in either. A cell claimed twice, or outside the world, counts as one too many: the same
    answer written twice is half as good."""
    filled = structure.occupied
    too_many = sum(brick.h * brick.w for brick in structure.bricks) - np.count_nonzero(filled)
    union = np.count_nonzero(filled | target) + too_many
    return float(np.count_nonzero(filled & target) / union) if union else 0.0


def facts(judgement: Judgement) -> dict[str, Any]:
    """What people want to read of a judgement."""
    analysis = judgement.analysis
    return {
        "bricks": len(judgement.structure),
        "stable": bool(analysis and analysis.stable),
        "load_factor": analysis.load_factor if analysis else None,
        **({"shape": "not judged: this caption has no target"} if judgement.iou is None else {"iou": judgement.iou}),
    }


def verdict(judgement: Judgement, loads: Sequence[Mapping[str, Any]]) -> str:
    """A sentence about a structure for people."""
    analysis, bricks = judgement.analysis, len(judgement.structure)
    if analysis is None:
        return f"not a structure: {judgement.reason}"
    burden = " and ".join(f"{load['grams']} g" for load in loads)
    what = f"{bricks} brick{'s' if bricks != 1 else ''}" + (f" carrying {burden}" if burden else "")
    if not analysis.stable:
        return f"{what}: falls; {'; '.join(analysis.reasons[:3])}"
    used = "" if analysis.load_factor is None else f", using {analysis.load_factor:.0%} of what its studs hold"
    return f"{what}: stands{used}"
