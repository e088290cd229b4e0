"""Options of the brick task."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from ...task import check_choice, option
from .data import hub
from .data.rows import ALL
from .kit import GRAVITY, STUD_STRENGTH_N, Kit
from .physics.solvers import BACKENDS, Solving
from .structure import FORMS, MAX_OFFSET, READ_LIMIT

PROMPT_STYLES = ("short", "full", "brickgpt")
LARGEST_WORLD = 40  # the largest edge length that --world_dim accepts, in cells


@dataclass(frozen=True)
class BrickOptions:
    """Options of the brick task: levels and data, text format, constraint rules, and reward weights."""

    brick_levels: list[str] = field(
        default_factory=list, metadata={"help": f"Levels to train on: {', '.join(ALL)}. Empty means all of them."}
    )
    brick_data: str | None = option(
        None, f"Use published structures instead of levels: a Hub id ({hub.DATASET}), a folder, or a file."
    )
    prompt_style: str = option(
        "short",
        "Prompt: 'short' (caption only), 'full' (caption and rules, for pretrained models), or 'brickgpt' (what the "
        "published model BrickGPT was trained on; with --brick_data).",
    )
    world_dim: int | None = option(None, "Edge length of the world in cells. Default: set by the level, 8 to 20.")
    max_bricks: int = option(150, "Maximum number of bricks per structure.")
    text_form: str = option("absolute", "Brick positions: 'absolute', or 'pivot' (offset from an earlier brick).")
    max_offset_distance: int = option(MAX_OFFSET, "Largest offset per axis from the pivot brick in the pivot form.")
    attach: bool | None = option(
        None,
        "With --constrain: each brick must touch the ground or studs of an earlier brick. Default: true; with "
        "--brick_data false, because bricks of published structures hang from later ones.",
    )
    canonical: bool = option(True, "With --constrain: require the order of the gold answers (z up, then x, y down).")
    max_brick_rejections: int = option(
        50, "With --editor rejection: how often a line is drawn again before it is kept anyway."
    )
    max_rollbacks: int = option(
        100, "With --editor rollback: how often a structure that does not stand is cut and gone on with."
    )
    success_iou: float = option(0.8, "Minimum IoU (voxel overlap) with the target shape for success.")
    gravity: float = option(GRAVITY, "Gravity in m/s2: it scales the weight of bricks and of what they carry.")
    stud_strength: float = option(STUD_STRENGTH_N, "Largest friction that one contact point of a stud bears, in N.")
    stability_backend: str = option("auto", f"Solver of the stability analysis: {', '.join(BACKENDS)}.")
    solver_time_limit: float | None = option(
        None, "Seconds after which a solver is stopped and the next one tried. If all fail, the answer has no score."
    )
    solver_log: str | None = option(None, "File to which every run of a solver appends a line: size, time and result.")
    published_stability: bool = option(
        False,
        "Also report BrickGPT's metrics: share of stable structures, mean and min brick stability by the published "
        "analysis. Scoring takes about five times as long.",
    )
    stability_weight: float = option(1.0, "Weight of the stability margin: 1 minus the load factor, 0 if unstable.")
    connectivity_weight: float = option(0.5, "Weight of the fraction of bricks connected to the ground by studs.")
    quality_weight: float = option(0.25, "Weight of the fraction of bricks inside the world and without collisions.")
    length_weight: float = option(
        0.1, "Weight of the number of bricks, divided by that of the gold answer (without one, by --max_bricks)."
    )
    shape_weight: float = option(
        2.0,
        "Weight of the IoU with the target shape. With 0, the target counts nowhere: other components are not "
        "multiplied by the IoU, and length is relative to --max_bricks.",
    )
    syntax_weight: float = option(0.1, "Weight of the fraction of lines that parse as bricks.")

    def __post_init__(self) -> None:
        check_choice("prompt_style", self.prompt_style, PROMPT_STYLES)
        check_choice("text_form", self.text_form, FORMS)
        check_choice("stability_backend", self.stability_backend, BACKENDS)
        for level in self.brick_levels:
            check_choice("brick_levels", level, ALL)
        if self.prompt_style == "brickgpt" and not self.brick_data:
            raise ValueError(f"--prompt_style brickgpt is for published structures; add --brick_data {hub.DATASET}")
        if self.prompt_style == "brickgpt" and self.text_form != "absolute":
            raise ValueError("--prompt_style brickgpt asks for absolute positions; leave out --text_form")
        if not 0 < self.success_iou <= 1:
            raise ValueError(f"--success_iou {self.success_iou} must be above 0 and at most 1")
        for name in ("gravity", "stud_strength", "solver_time_limit"):
            number = getattr(self, name)
            if number is not None and not 0 < number < math.inf:
                raise ValueError(f"--{name} {number:g} must be a finite number above 0")
        if self.solver_log is not None:
            _check_log(Path(self.solver_log))
        if self.attach is None:
            object.__setattr__(self, "attach", not self.brick_data)
        if self.world_dim is not None and not 1 <= self.world_dim <= LARGEST_WORLD:
            raise ValueError(f"--world_dim {self.world_dim} must be between 1 and {LARGEST_WORLD}")
        if not 1 <= self.max_bricks <= READ_LIMIT:
            raise ValueError(
                f"--max_bricks {self.max_bricks} must be between 1 and {READ_LIMIT}, the number of lines parsed"
            )
        for name in ("max_brick_rejections", "max_rollbacks", "max_offset_distance"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name} {getattr(self, name)} must be at least 0")

    @cached_property
    def kit(self) -> Kit:
        return Kit(gravity=self.gravity, stud_strength_N=self.stud_strength)

    @cached_property
    def solving(self) -> Solving:
        return Solving(self.stability_backend, self.solver_time_limit, self.solver_log)


def _check_log(path: Path) -> None:
    """Raise ValueError if lines cannot be appended to this file."""
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"--solver_log {path}: cannot be written; give a file in a folder that exists")
