"""What may be written of a brick structure: a choice tree, in both forms of text, of structures that can be built."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from ...constraints.choices import Choices, ChoiceTreeConstraint
from ...task import Row
from .placements import Placements, Rules
from .structure import FORMS, MAX_OFFSET, READ_LIMIT, SIZES, WORLD, parse

_SPELLED = [f"{h}x{w}" for h, w in SIZES]
_LARGEST_WORLD = 1000  # coordinates are read with up to three digits
_WORLDS_KEPT = 64
_PLACEMENTS_KEPT = 4096  # of about 7 kB each, in a world of 20


def brick_constraint(
    tokenizer: Any,
    *,
    world: int = WORLD,
    max_bricks: int = 100,
    form: str = "absolute",
    attach: bool = True,
    canonical: bool = False,
    max_offset: int = MAX_OFFSET,
) -> ChoiceTreeConstraint:
    """Texts of one to `max_bricks` bricks of the library, inside the world, no cell taken twice.

    `form`: lines `2x4 (3,0,1)`, or lines `2x4 @1 (0,-2,1)` with offsets of at most `max_offset` from a brick written
    before, or of any size from the ground's origin, pivot 0. `attach`: each brick stands on the ground or shares a
    stud with one written before, below or above it. `canonical`: z ascending, then x descending, then y descending.
    A row may have a `world` and a `max_bricks` of its own.
    """
    if form not in FORMS:
        raise ValueError(f"unknown form {form!r}; forms are: {', '.join(FORMS)}")
    if max_offset < 0:
        raise ValueError(f"max_offset is {max_offset}; it must be 0 or more")
    tree = BrickTree(world, max_bricks, form, attach=attach, canonical=canonical, max_offset=max_offset)
    return ChoiceTreeConstraint(tokenizer, tree.root, tree.choices, look_ahead=False)


class BrickTree:
    """The tree of literals. A node is what has been written, and what has been chosen of the next brick after that:
    size, pivot, x, y, z. What has been written is (world, max_bricks, absolute text), whatever the form.

    Nodes hold text and numbers only, no placements: the engine keeps many thousands of them, and the garbage collector
    passes over tuples of such plain things, which halves the cost of a token in a long-lived process. Placements are
    remembered by what has been written, and made from it again if they have been forgotten.
    """

    def __init__(self, world: int, max_bricks: int, form: str, **rules: Any):
        self._defaults = (world, max_bricks)
        self._opening = " (" if form == "absolute" else " @"
        self._pivot: tuple[int, ...] = (0,) if form == "absolute" else ()  # absolute: every offset is from the origin
        self._rules = lru_cache(_WORLDS_KEPT)(lambda world, max_bricks: Rules(world, max_bricks=max_bricks, **rules))
        self.placements: dict[tuple[int, int, str], Placements] = {}
        self.root({})  # so that bad options show now, not at the first row

    def root(self, row: Row) -> tuple[Any, ...]:
        world, max_bricks = (
            default if row.get(name) is None else row[name]
            for name, default in zip(("world", "max_bricks"), self._defaults, strict=True)
        )
        if not 1 <= world <= _LARGEST_WORLD:
            raise ValueError(f"world is {world}; it must be between 1 and {_LARGEST_WORLD}")
        if not 1 <= max_bricks <= READ_LIMIT:
            raise ValueError(f"max_bricks is {max_bricks}; it must be between 1 and {READ_LIMIT}, the most ever read")
        return ((world, max_bricks, ""),)

    def choices(self, node: tuple[Any, ...]) -> Choices:
        """Every node has a choice: what is offered has a place, and after a brick the text may end."""
        written, *chosen = node
        if len(chosen) == 5:
            size, _, x, y, z = chosen
            world, max_bricks, text = written
            written, chosen = (world, max_bricks, f"{text}{_SPELLED[size]} ({x},{y},{z})\n"), []
        placed = self._placements(written)
        if not chosen:
            literals = [(_SPELLED[size] + self._opening, (written, size, *self._pivot)) for size in placed.sizes()]
            return [*literals, ("", None)] if placed.bricks else literals
        size = chosen[0]
        if len(chosen) == 1:
            return [(f"{pivot} (", (*node, pivot)) for pivot in (0, *placed.pivots(size))]
        box = placed.box(chosen[1])
        if len(chosen) == 2:
            return [(f"{x - box.x},", (*node, x)) for x in placed.xs(size, box)]
        if len(chosen) == 3:
            return [(f"{y - box.y},", (*node, y)) for y in placed.ys(size, box, chosen[2])]
        return [(f"{z - box.z})\n", (*node, z)) for z in placed.zs(size, box, chosen[2], chosen[3])]

    def _placements(self, written: tuple[int, int, str]) -> Placements:
        """From those one line before where they are remembered, otherwise from the ground."""
        placed = self.placements.get(written)
        if placed is None:
            world, max_bricks, text = written
            before = text[: text.rfind("\n", 0, -1) + 1]
            placed = self.placements.get((world, max_bricks, before)) if text else None
            if placed is None:
                placed, before = Placements.none_yet(self._rules(world, max_bricks)), ""
            for brick in parse(text[len(before) :]).structure.bricks:
                placed = placed.place(brick)
            self.placements[written] = placed
            if len(self.placements) > _PLACEMENTS_KEPT:
                del self.placements[next(iter(self.placements))]  # the oldest
        return placed
