"""Reward of the brick task: parse a text, analyse its stability, and compare it with the target shape.

Every weighted component lies between 0 and 1, so the total lies between 0 and the sum of the weights. Stability,
connectivity, quality and length are multiplied by `shape`, the IoU with the target: otherwise a single brick on the
ground would earn full credit for physics. `load_factor` is only logged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from .data.designs import decode_voxels, loads_on
from .options import BrickOptions
from .physics.stability import Analysis, SolverError, analyse
from .structure import Structure, parse


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
    published: dict[str, Any]  # see `published_facts`; empty if it was not asked for


def judge(text: str, row: Mapping[str, Any], options: BrickOptions) -> Judgement:
    """Judge any text as an answer to a row.

    A row without `voxels` (a caption written by the user) has no target: only physics is scored, `shape` is 0, and the
    answer is never a success. With --shape_weight 0, physics is scored in the same way where there is a target.
    """
    reading = parse(text, row["world"], options.max_offset_distance, options.kit)
    structure = reading.structure
    problems = reading.problems + structure.problems(options.max_bricks)
    valid = not problems
    iou = None if row.get("voxels") is None else overlap(structure, decode_voxels(row["voxels"], row["world"]))
    target_iou = None if options.shape_weight == 0 else iou
    factor = 1.0 if target_iou is None else target_iou  # on the physics components
    published = published_facts(None) if options.published_stability else {}
    analysis, reasons, steadiness = None, problems, 0.0
    if valid:
        resting = loads_on(structure, row.get("loads") or ())
        if isinstance(resting, str):
            analysis = Analysis(stable=False, load_factor=None, reasons=(resting,))
        else:
            analysis = analyse(structure, backend=options.solving, loads=resting)
            if options.published_stability:
                published = {}  # without a solution, the answer has a score, only without these facts
                with suppress(SolverError):
                    published = published_facts(analyse(structure, "published", options.solving, loads=resting))
        if analysis.stable:
            # Without a solver the load factor is unknown, and "stable" means only connected to the ground.
            steadiness = 1.0 - (analysis.load_factor or 0.0)
        reasons = list(analysis.reasons)
        if not reasons and iou is None:
            reasons = ["the shape cannot be judged: this caption has no target"]
        elif not reasons and iou is not None and iou < options.success_iou:
            reasons = [f"the shape has an IoU of {iou:.2f} with the target; success needs {options.success_iou}"]
    bricks = len(structure)
    asked = options.max_bricks if target_iou is None or not row.get("gold") else max(row["gold"].count("\n"), 1)
    spoilt = {*structure.outside, *(later for _, later in structure.collisions)}
    components = {
        "stability": steadiness * factor,
        "connectivity": factor * (bricks - len(structure.floating)) / bricks if bricks else 0.0,
        "quality": factor * (bricks - len(spoilt)) / bricks if bricks else 0.0,
        "length": factor * min(bricks / asked, 1.0),
        "shape": iou or 0.0,
        "syntax": bricks / reading.lines if reading.lines else 0.0,
    }
    if analysis is not None and analysis.load_factor is not None:
        components["load_factor"] = analysis.load_factor
    success = valid and analysis is not None and analysis.stable and iou is not None and iou >= options.success_iou
    return Judgement(structure, components, valid, success, "; ".join(reasons[:3]), analysis, iou, published)


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
        **judgement.published,
    }


def published_facts(published: Analysis | None) -> dict[str, Any]:
    """Return a row of BrickGPT's table: whether a structure is stable, and the mean and least stability of its bricks.

    `published` is the published analysis; None if the structure is not valid, which has no brick stability.
    """
    stabilities = [1 - load for load in published.loads or ()] if published else []
    return {
        "published_stable": bool(published and published.stable),
        "mean_brick_stability": fmean(stabilities) if stabilities else None,
        "min_brick_stability": min(stabilities) if stabilities else None,
    }


def verdict(
    structure: Structure, analysis: Analysis | None, reason: str, loads: Sequence[Mapping[str, Any]] = ()
) -> str:
    """Describe an analysed structure in one sentence; without an analysis, `reason` says why there is none."""
    bricks = len(structure)
    if analysis is None:
        return f"not a structure: {reason}"
    burden = " and ".join(f"{load['grams']} g" for load in loads)
    what = f"{bricks} brick{'s' if bricks != 1 else ''}" + (f" carrying {burden}" if burden else "")
    if not analysis.stable:
        return f"{what}: unstable; {'; '.join(analysis.reasons[:3])}"
    used = "" if analysis.load_factor is None else f", at {analysis.load_factor:.0%} of the load its studs can bear"
    return f"{what}: stable{used}"
