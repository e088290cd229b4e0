"""The brick task: write a toy-brick structure as text that matches a caption, is stable and carries weights."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

from ...task import Row, Score, Task, TinySpec, check_text, check_whole
from .data import hub
from .data.captions import CAPTION_WORDS, requests_like
from .data.catalogue import LEVELS
from .data.designs import NoDesignError, decode_voxels, encode_voxels, loads_on
from .data.rows import ALL, make_row, make_rows
from .editor import EDITORS, BrickEditor
from .options import LARGEST_WORLD, BrickOptions
from .physics.stability import SolverError
from .prompts import prompt
from .relabel import row_like
from .reward import facts, judge, published_facts, verdict
from .structure import READ_LIMIT, SIZES, WORLD, Reading, parse

if TYPE_CHECKING:
    from ...constraints.base import Constraint
    from ...rollout import Editor


MOST_GRAMS = 1_000_000  # of a weight in a row from outside


class BrickTask(Task):
    """Generates a brick structure from a caption; scores shape, stability, connectivity and syntax."""

    name: ClassVar[str] = "brick"
    version: ClassVar[str] = "3"
    description: ClassVar[str] = "Toy-brick structures from a caption: correct shape, stable, able to carry weights"
    defaults: ClassVar[Mapping[str, Any]] = {
        "constrain": True,
        "max_completion_length": 1200,
        "num_generations": 8,
        "temperature": 1.0,
        "cold_start_steps": 300,  # no pretrained model knows the captions and the format
    }
    tiny_defaults: ClassVar[Mapping[str, Any]] = {
        "brick_levels": ["carry"],
        "max_bricks": 16,
        "max_completion_length": 64,
        "eval_rows": 150,
        "cold_start_steps": 320,
        "cold_start_learning_rate": 2e-3,
        "learning_rate": 3e-4,
        "warmup_steps": 10,  # without it, the first step alone took success from 69 to 56%
        "num_generations": 4,
        "num_iterations": 2,  # a rollout costs more than an update
        "max_steps": 120,
        "own_successes": 2048,
        "own_successes_fraction": 0.5,
        "component_weights": {"success": 1.0},
    }
    facts: Sequence[str] = ("stable", "iou")
    watched = ("load_factor",)
    fixed_options = ("gravity", "stud_strength", "text_form")
    editors = EDITORS
    redundant_editors = [name for name in EDITORS if name.startswith("rejection")]
    tools: ClassVar[Mapping[str, Any]] = {"metrics": "trl_grpo_tasks.tasks.brick.metrics:main"}
    Options: ClassVar[type] = BrickOptions

    def __init__(self, options: Any = None):
        super().__init__(options)
        given = self.options
        names = ("stability", "connectivity", "quality", "length", "shape", "syntax")
        self.weights = {**{name: getattr(given, f"{name}_weight") for name in names}, "load_factor": 0.0}
        if given.published_stability:
            self.facts = (*self.facts, *published_facts(None))
        wanted = given.brick_levels or ALL
        self.levels = [hub.LEVEL] if given.brick_data else [level for level in ALL if level in wanted]
        if given.world_dim is not None:
            needed = _needed_worlds(self.levels)
            self.levels = [level for level in self.levels if _world_size(level) <= given.world_dim]
            if not self.levels:
                raise ValueError(f"--world_dim {given.world_dim} is too small for these levels: {needed}")

    @classmethod
    def user_options(cls, options: Mapping[str, Any]) -> list[str]:
        return ["solver_log"] if options.get("solver_log") else []

    def dataset(self, split: str, size: int | None, seed: int) -> list[dict[str, Any]]:
        given = self.options
        if given.brick_data:
            rows = hub.from_hub(given.brick_data, split, size, seed, given.max_bricks)
        else:
            one_world = given.world_dim is not None
            rows = make_rows(split, size, seed, levels=self.levels, kit=given.kit, one_world=one_world)
        return [self._asked(row, given.world_dim) for row in rows]

    def _asked(self, row: Row, world: int | None) -> dict[str, Any]:
        """Return the row with its prompt, and in a world of this size if one is given."""
        import numpy as np

        if world not in (None, row["world"]):
            voxels = np.zeros((world,) * 3, dtype=bool)
            voxels[(slice(row["world"]),) * 3] = decode_voxels(row["voxels"], row["world"])
            row = {**row, "world": world, "voxels": encode_voxels(voxels)}
        return {"prompt": prompt(row["caption"], row["world"], self.options), **row}

    def row_of(self, text: str) -> dict[str, Any]:
        """Return a row for a caption written by the user, which may end in `, world 8`.

        A caption that one of the levels can generate gives that row, and a part of one gives the row of the shortest
        that has it, with an `interpretation` that says which. With published structures, the caption is taken as it is
        and has no target: only its physics is scored, and it never counts as a success.
        """
        match = re.fullmatch(r"(.*?)(?:,? *\(?world (?:of )?([0-9]{1,4})\)?)?", text.strip(), re.DOTALL)
        assert match is not None  # every text matches
        said, named = match.groups()
        asked = int(named) if named else self.options.world_dim
        world = asked or max(map(_world_size, self.levels))
        if not 1 <= world <= LARGEST_WORLD:
            raise ValueError(f"{text!r}: a world of {world} must be between 1 and {LARGEST_WORLD}")
        if self.options.brick_data:
            return self._asked({"caption": said, "world": world, "voxels": None, "gold": None, "loads": []}, None)
        row = self._row_like(said, asked)
        if (row["caption"], row["world"]) == (said, world):
            return row
        return {**row, "interpretation": f"{row['caption']}, world {row['world']}"}

    def row_from(self, given: Row) -> dict[str, Any]:
        """Return a row with a caption and a world, which may have a target shape and weights on it."""
        row = {"caption": "", **super().row_from(given)}
        check_whole(row, "world", 1, LARGEST_WORLD)
        if row.get("max_bricks") is not None:
            check_whole(row, "max_bricks", 1, READ_LIMIT)
        for name in ("caption", "gold", "voxels"):
            check_text(row, name)
        try:
            if row.get("voxels") is not None:
                decode_voxels(row["voxels"], row["world"])
        except (ValueError, zlib.error) as error:
            raise ValueError(f"the 'voxels' of the row cannot be read: {error}") from error
        loads = row.get("loads") or []
        if not isinstance(loads, list) or len(loads) > row["world"] ** 2 or not all(map(_is_load, loads)):
            raise ValueError(
                'the \'loads\' of a row must be a list of {"grams": G, "at": [x, y]}, at most one per column, with G '
                f"above 0 and below {MOST_GRAMS:,}"
            )
        return row

    def _row_like(self, text: str, world: int | None) -> dict[str, Any]:
        """Return the row of a caption that has this text, in a world of this size if one is given."""
        order = sorted(self.levels, key=_world_size, reverse=True)
        fitting = [level for level in order if world is None or _world_size(level) == world]
        fitting = fitting or [level for level in order if _world_size(level) <= (world or 0)]
        if not fitting:
            needed = _needed_worlds(order)
            raise ValueError(f"a world of {world} is too small for the levels of this task: {needed}")
        for level, request, detail in requests_like(text, fitting):
            with suppress(NoDesignError):
                return self._asked(make_row(level, request, detail, self.options.kit), world)
        raise ValueError(f"nothing like {text!r} can be built with this gravity and stud strength; ask for less")

    def unverifiable(self, row: Row) -> str:
        return "" if row.get("voxels") else "the caption has no target shape, so only the physics is scored"

    def editor(self, name: str, rows: Sequence[Row], tokenizer: Any) -> Editor:
        return BrickEditor(rows, tokenizer, name, self.options)

    def score(self, row: Row, completion: str) -> Score | None:
        try:
            judged = judge(completion, row, self.options)
        except SolverError:
            return None
        return self.make_score(judged.components, judged.valid, judged.success, judged.reason, facts(judged))

    def gold(self, row: Row) -> str:
        return self._in_text_form(row["gold"], row)

    def bad(self, row: Row) -> str:
        return self._in_text_form(row["bad"], row)

    def _in_text_form(self, text: str, row: Row) -> str:
        """Convert absolute text to the form set by --text_form."""
        if self.options.text_form == "absolute":
            return text
        return parse(text, row["world"]).structure.pivot_text(self.options.max_offset_distance)

    def _parse(self, row: Row, completion: str) -> Reading:
        return parse(completion, row["world"], self.options.max_offset_distance, self.options.kit)

    def canonical(self, row: Row, completion: str) -> str:
        reading = self._parse(row, completion)
        return super().canonical(row, completion) if reading.problems else reading.structure.canonical().text

    def relabel(self, row: Row, completion: str) -> Row | None:
        """Return the training row whose target is most like the structure, if it is like it enough for success.

        Floating bricks are excluded here, and overloaded ones when the new row is scored.
        """
        given = self.options
        reading = self._parse(row, completion)
        problems = reading.problems or reading.structure.problems(given.max_bricks) or reading.structure.floating
        if row.get("voxels") is None or problems:
            return None
        levels = [
            level
            for level in self.levels
            if level in LEVELS and row["world"] == (given.world_dim or LEVELS[level].world)
        ]
        made = row_like(reading.structure, row, levels, given.success_iou, given.world_dim is not None)
        return None if made is None else self._asked(made, given.world_dim)

    def constraint(self, tokenizer: Any) -> Constraint:
        from ...constraints import OneSpelling
        from .constraint import brick_constraint

        given = self.options
        constraint = brick_constraint(
            tokenizer,
            max_bricks=given.max_bricks,
            form=given.text_form,
            attach=bool(given.attach),
            canonical=given.canonical,
            max_offset=given.max_offset_distance,
        )
        return OneSpelling(tokenizer, constraint)

    def tiny(self) -> TinySpec | None:
        """Return a small Llama with caption words and pieces of brick lines as tokens (four tokens per brick).

        Returns None where prompts contain words outside this vocabulary.
        """
        if self.options.brick_data or self.options.prompt_style != "short":
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
        return TinySpec(tokens=tokens, hidden_size=96, layers=3, heads=3, context=640)

    def render(self, row: Row, completion: str) -> bytes:
        """Draw the structure with its weights, failing bricks in red, and the verdict below it."""
        from .drawing import render

        judged, loads = judge(completion, row, self.options), row.get("loads") or ()
        resting = loads_on(judged.structure, loads)
        image = render.picture(
            judged.structure,
            failing=judged.analysis.failing if judged.analysis else (),
            weights=() if isinstance(resting, str) else resting,
            caption=f"{row['caption']}. {verdict(judged.structure, judged.analysis, judged.reason, loads)}",
        )
        return render.png(image)

    def exports(self, row: Row, completion: str) -> dict[str, str | bytes]:
        """Return the picture, and an LDraw file for brick programs."""
        from .ldraw import to_ldr

        structure = self._parse(row, completion).structure
        return {**super().exports(row, completion), "sample.ldr": to_ldr(structure, row["caption"])}


def _is_load(load: Any) -> bool:
    if not isinstance(load, Mapping) or not isinstance(load.get("grams"), int | float):
        return False
    place = load.get("at")
    is_place = isinstance(place, list) and len(place) == 2 and all(type(one) is int for one in place)
    return is_place and 0 < load["grams"] < MOST_GRAMS


def _world_size(level: str) -> int:
    """Return the edge length of a level's world; published structures use the default world."""
    return LEVELS[level].world if level in LEVELS else WORLD


def _needed_worlds(levels: Sequence[str]) -> str:
    return ", ".join(f"{level} needs {_world_size(level)}" for level in levels)
