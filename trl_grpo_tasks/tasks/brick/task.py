"""The brick task: write a toy-brick structure as text that matches a caption, is stable and carries weights."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from ...task import Row, Score, Task, TinySpec, option
from . import hub
from .captions import CAPTION_WORDS, PROMPT_STYLES, caption, choices, prompt
from .catalogue import CATEGORIES
from .data import ALL, decode_voxels, loads_on, make_row, make_rows
from .designs import encode_voxels
from .editor import EDITORS, MAX_BRICK_REJECTIONS, MAX_ROLLBACKS, BrickEditor
from .levels import LEVELS
from .relabel import rows_like
from .reward import Judgement, facts, judge, verdict
from .solvers import BACKENDS
from .stability import SolverError
from .steps import prefix_scores
from .structure import FORMS, MAX_OFFSET, READ_LIMIT, SIZES, WORLD, parse

if TYPE_CHECKING:
    from ...constraints.base import Constraint
    from ...rollout import Editor

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
    prompt_style: str = option("short", "Prompt: 'short' (caption only) or 'full' (caption and rules, for real LLMs).")
    world_dim: int | None = option(None, "Edge length of the world in cells. Default: set by the level, 8 to 20.")
    max_bricks: int = option(150, "Maximum number of bricks per structure.")
    text_form: str = option("absolute", "Brick positions: 'absolute', or 'pivot' (offset from an earlier brick).")
    max_offset_distance: int = option(MAX_OFFSET, "Largest offset per axis from the pivot brick in the pivot form.")
    attach: bool = option(True, "With --constrain: each brick must touch the ground or studs of an earlier brick.")
    canonical: bool = option(True, "With --constrain: require the order of the gold answers (z up, then x, y down).")
    max_brick_rejections: int = option(
        MAX_BRICK_REJECTIONS, "With --editor rejection: how often a line is drawn again before it is kept anyway."
    )
    max_rollbacks: int = option(
        MAX_ROLLBACKS,
        "With --editor rollback: how often a structure that does not stand is cut and gone on with.",
    )
    success_iou: float = option(0.8, "Minimum IoU (voxel overlap) with the target shape for success.")
    stability_backend: str = option("auto", f"Solver of the stability analysis: {', '.join(BACKENDS)}.")
    stability_weight: float = option(1.0, "Weight of the stability margin: 1 minus the load factor, 0 if unstable.")
    connectivity_weight: float = option(0.5, "Weight of the fraction of bricks connected to the ground by studs.")
    quality_weight: float = option(0.25, "Weight of the fraction of bricks inside the world and without collisions.")
    length_weight: float = option(0.1, "Weight of having at least as many bricks as the gold answer.")
    shape_weight: float = option(2.0, "Weight of the IoU with the target shape.")
    syntax_weight: float = option(0.1, "Weight of the fraction of lines that parse as bricks.")

    def __post_init__(self) -> None:
        for name, value, known in (
            ("prompt_style", self.prompt_style, PROMPT_STYLES),
            ("text_form", self.text_form, FORMS),
            ("stability_backend", self.stability_backend, BACKENDS),
            *(("brick_levels", level, ALL) for level in self.brick_levels),
        ):
            if value not in known:
                raise ValueError(f"unknown --{name} {value!r}; choose one of: {', '.join(known)}")
        if not 0 < self.success_iou <= 1:
            raise ValueError(f"--success_iou {self.success_iou} must be above 0 and at most 1")
        if self.world_dim is not None and not 1 <= self.world_dim <= LARGEST_WORLD:
            raise ValueError(f"--world_dim {self.world_dim} must be between 1 and {LARGEST_WORLD}")
        if not 1 <= self.max_bricks <= READ_LIMIT:
            raise ValueError(
                f"--max_bricks {self.max_bricks} must be between 1 and {READ_LIMIT}, the number of lines parsed"
            )
        for name in ("max_brick_rejections", "max_rollbacks"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name} {getattr(self, name)} must be at least 0")


class BrickTask(Task):
    """Generates a brick structure from a caption; scores shape, stability, connectivity and syntax."""

    name: ClassVar[str] = "brick"
    version: ClassVar[str] = "2"
    description: ClassVar[str] = "Toy-brick structures from a caption: correct shape, stable, able to carry weights"
    defaults: ClassVar[Mapping[str, Any]] = {
        "constrain": True,
        "max_completion_length": 1200,
        "num_generations": 8,
        "temperature": 1.0,
    }
    facts = ("stable", "iou")
    editors = EDITORS
    redundant_editors = [name for name in EDITORS if name.startswith("rejection")]
    Options: ClassVar[type] = BrickOptions

    def __init__(self, options: Any = None):
        super().__init__(options)
        given = self.options
        self.weights = {
            "stability": given.stability_weight,
            "connectivity": given.connectivity_weight,
            "quality": given.quality_weight,
            "length": given.length_weight,
            "shape": given.shape_weight,
            "syntax": given.syntax_weight,
        }
        wanted = given.brick_levels or ALL
        self.levels = [hub.LEVEL] if given.brick_data else [level for level in ALL if level in wanted]
        if given.world_dim is not None:
            world = {level: _world_size(level) for level in self.levels}
            self.levels = [level for level in self.levels if world[level] <= given.world_dim]
            if not self.levels:
                raise ValueError(
                    f"--world_dim {given.world_dim} is too small for these levels: "
                    + ", ".join(f"{level} needs {size}" for level, size in world.items())
                )

    def dataset(self, split: str, size: int | None, seed: int) -> list[dict[str, Any]]:
        given = self.options
        if given.brick_data:
            rows = hub.from_hub(given.brick_data, split, size, seed, given.prompt_style)
        else:
            rows = make_rows(split, size, seed, levels=self.levels, prompt_style=given.prompt_style)
        return rows if given.world_dim is None else [self._in_world(row, given.world_dim) for row in rows]

    def _in_world(self, row: dict[str, Any], world: int) -> dict[str, Any]:
        """Return the row with its target placed in a larger world."""
        import numpy as np

        voxels = np.zeros((world,) * 3, dtype=bool)
        voxels[(slice(row["world"]),) * 3] = decode_voxels(row["voxels"], row["world"])
        messages = prompt(row["caption"], world, self.options.prompt_style)
        return {**row, "prompt": messages, "world": world, "voxels": encode_voxels(voxels)}

    def row_of(self, text: str) -> dict[str, Any]:
        """Return a row for a caption written by the user, which may end in `, world 8`.

        A caption that one of the levels can generate gets that level's target and weights. Any other caption has no
        target: only its physics is scored, and it never counts as a success.
        """
        match = re.fullmatch(r"(.*?)(?:, world ([0-9]{1,4}))?", text.strip(), re.DOTALL)
        assert match is not None  # every text matches
        said, named = match.groups()
        world = int(named) if named else self.options.world_dim or max(map(_world_size, self.levels))
        if not 1 <= world <= LARGEST_WORLD:
            raise ValueError(f"{text!r}: a world of {world} must be between 1 and {LARGEST_WORLD}")
        for level in self.levels:
            if level in LEVELS and LEVELS[level].world == world and (row := self._row_with_caption(level, said)):
                return row
        messages = prompt(said, world, self.options.prompt_style)
        return {"prompt": messages, "caption": said, "world": world, "voxels": None, "gold": None, "loads": []}

    def unverifiable(self, row: Row) -> str:
        return "" if row.get("voxels") else "the caption has no target shape, so only the physics is scored"

    def _row_with_caption(self, level: str, text: str) -> dict[str, Any] | None:
        """Return the row of `level` that has this caption, or None."""
        for request, detail in choices(level):
            category = CATEGORIES[request.category]
            # The support's thickness is known only after building the row, which is slow, so the captions of all
            # possible thicknesses are compared first.
            supports = category.supports(dict(request.params)) if category.support and detail == 3 else [None]
            if any(caption(level, request, detail, support) == text for support in supports):
                row = make_row(level, request, detail, self.options.prompt_style)
                if row["caption"] == text:
                    return row
        return None

    def editor(self, name: str, rows: Sequence[Row], tokenizer: Any) -> Editor:
        parts = name.split("+")
        given = self.options
        return BrickEditor(
            rows,
            tokenizer,
            rejects="rejection" in parts,
            rolls_back="rollback" in parts,
            max_bricks=given.max_bricks,
            max_brick_rejections=given.max_brick_rejections,
            max_rollbacks=given.max_rollbacks,
            max_offset=given.max_offset_distance,
            backend=given.stability_backend,
        )

    def score(self, row: Row, completion: str) -> Score | None:
        try:
            judged = self.judge(row, completion)
        except SolverError:
            return None
        return self.make_score(judged.components, judged.valid, judged.success, judged.reason, facts(judged))

    def prefix_scores(self, row: Row, completion: str) -> list[tuple[int, float]] | None:
        try:
            return prefix_scores(completion, row, **self._judging)
        except SolverError:
            return None

    def judge(self, row: Row, completion: str) -> Judgement:
        return judge(completion, row, success_iou=self.options.success_iou, **self._judging)

    @property
    def _judging(self) -> dict[str, Any]:
        """How answers and their prefixes are read and analysed."""
        given = self.options
        return {
            "max_bricks": given.max_bricks,
            "backend": given.stability_backend,
            "max_offset": given.max_offset_distance,
        }

    def gold(self, row: Row) -> str:
        return self._in_text_form(row["gold"], row)

    def bad(self, row: Row) -> str:
        return self._in_text_form(row["bad"], row)

    def _in_text_form(self, text: str, row: Row) -> str:
        """Convert absolute text to the form set by --text_form."""
        if self.options.text_form == "absolute":
            return text
        return parse(text, row["world"]).structure.pivot_text(self.options.max_offset_distance)

    def canonical(self, row: Row, completion: str) -> str:
        reading = parse(completion, row["world"], self.options.max_offset_distance)
        return super().canonical(row, completion) if reading.problems else reading.structure.canonical().text

    def relabel(self, row: Row, completion: str) -> Row | None:
        """Return the training row whose target is most like the structure, if it is like it enough for success.

        Floating bricks are excluded here, and overloaded ones when the new row is scored.
        """
        given = self.options
        reading = parse(completion, row["world"], given.max_offset_distance)
        problems = reading.problems or reading.structure.problems(given.max_bricks) or reading.structure.floating
        if row.get("voxels") is None or problems:
            return None
        levels = [
            level
            for level in self.levels
            if level in LEVELS and row["world"] == (given.world_dim or LEVELS[level].world)
        ]
        made = next(rows_like(reading.structure, row, levels, given.success_iou, given.prompt_style), None)
        return made if made is None or given.world_dim is None else self._in_world(made, given.world_dim)

    def constraint(self, tokenizer: Any) -> Constraint:
        from ...constraints import OneSpelling
        from .constraint import brick_constraint

        given = self.options
        constraint = brick_constraint(
            tokenizer,
            max_bricks=given.max_bricks,
            form=given.text_form,
            attach=given.attach,
            canonical=given.canonical,
            max_offset=given.max_offset_distance,
        )
        return OneSpelling(tokenizer, constraint)

    def tiny(self) -> TinySpec | None:
        """Return a small Llama with caption words and pieces of brick lines as tokens (four tokens per brick).

        Returns None where prompts contain words outside this vocabulary.
        """
        if self.options.brick_data or self.options.prompt_style == "full":
            return None
        largest = self.options.world_dim or WORLD
        opening = " (" if self.options.text_form == "absolute" else " @"
        words = [text for word in CAPTION_WORDS for text in (word, f" {word}")]
        pieces = [f"{h}x{w}{opening}" for h, w in SIZES]
        pieces += [f"{n}{end}" for n in range(largest) for end in (",", ")\n")]
        if self.options.text_form == "pivot":
            reach = self.options.max_offset_distance
            pieces += [f"{n}{end}" for n in range(-reach, 0) for end in (",", ")\n")]
            pieces += [f"{n} (" for n in range(self.options.max_bricks)]
        single = list("0123456789x@(,)- \n")
        tokens = list(dict.fromkeys([*words, *pieces, *single]))
        return TinySpec(tokens=tokens, hidden_size=128, layers=4, heads=4, context=640)

    def render(self, row: Row, completion: str) -> bytes:
        """Draw the structure with its weights, failing bricks in red, and the verdict below it."""
        from . import render

        judged = self.judge(row, completion)
        resting = loads_on(judged.structure, row.get("loads") or ())
        image = render.picture(
            judged.structure,
            failing=judged.analysis.failing if judged.analysis else (),
            weights=() if isinstance(resting, str) else resting,
            caption=f"{row['caption']}. {verdict(judged, row.get('loads') or ())}",
        )
        return render.png(image)

    def exports(self, row: Row, completion: str) -> dict[str, str | bytes]:
        """Return the picture, files for brick and 3D viewers, a parts list and building steps."""
        from .gltf import to_glb
        from .instructions import parts_csv, steps_markdown
        from .ldraw import to_ldr

        structure = parse(completion, row["world"], self.options.max_offset_distance).structure
        return {
            **super().exports(row, completion),
            "sample.ldr": to_ldr(structure, row["caption"]),
            "sample.glb": to_glb(structure, row["caption"]),
            "parts.csv": parts_csv(structure),
            "steps.md": steps_markdown(structure, row["caption"]),
        }


def _world_size(level: str) -> int:
    """Return the edge length of a level's world; published structures use the default world."""
    return LEVELS[level].world if level in LEVELS else WORLD
