"""Constraint for brick structures: a choice tree of buildable structures, in both text formats."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

from ...constraints.choices import Choices, ChoiceTreeConstraint
from ...task import Row
from .kit import KIT, Kit
from .placements import Placements, Rules
from .structure import READ_LIMIT, WORLD, Brick, parse

_LARGEST_WORLD = 1000  # coordinates have at most three digits
_COORDINATES = {n: f"{n}," for n in range(1 - _LARGEST_WORLD, _LARGEST_WORLD)}
_LAST_COORDINATES = {n: f"{n})\n" for n in _COORDINATES}
_WORLDS_KEPT = 64  # cache size, in worlds
_PLACEMENTS_KEPT = 4096  # cache size; an entry takes about 7 kB in a world of 20


def brick_constraint(
    tokenizer: Any, *, world: int = WORLD, max_bricks: int = 100, form: str = "absolute", **rules: Any
) -> ChoiceTreeConstraint:
    """Make a constraint to texts of 1 to `max_bricks` bricks that are inside the world and do not collide.

    `form`: "absolute" for lines `2x4 (3,0,1)`, or "pivot" for lines `2x4 @1 (0,-2,1)` with offsets of at most
    `max_offset` from an earlier brick, or of any size from pivot 0, the origin of the ground. `rules` are those of
    `Rules`. A row's `world` and `max_bricks` override the arguments.
    """
    tree = BrickTree(world, max_bricks, form, **rules)
    return ChoiceTreeConstraint(
        tokenizer, tree.root, tree.choices, look_ahead=False, longest_ending=tree.longest_line()
    )


class BrickTree:
    """The choice tree. A node holds the text so far and the choices made for the next brick: size, pivot, x, y, z.

    The text so far is stored as (world, max_bricks, absolute text), whatever the form. Nodes contain only strings and
    numbers, not placements: the engine keeps many thousands of nodes, and the garbage collector skips tuples of such
    values, which halves the cost per token in a long-running process. Placements are cached by the text so far and
    recomputed from it if they have been evicted.
    """

    def __init__(self, world: int, max_bricks: int, form: str, **rules: Any):
        self._defaults, self._form, self._options = (world, max_bricks), form, rules
        self._kit: Kit = rules.get("kit", KIT)
        self._spelled = [f"{h}x{w}" for h, w in self._kit.sizes]
        self._opened = [size + (" (" if form == "absolute" else " @") for size in self._spelled]
        self._pivot: tuple[int, ...] = (0,) if form == "absolute" else ()  # absolute: every offset is from the origin
        self._rules = lru_cache(_WORLDS_KEPT)(lambda world, max_bricks: Rules(world, max_bricks=max_bricks, **rules))
        self.placements: dict[tuple[int, int, str], Placements] = {}
        self.root({})  # report invalid options now, not at the first row

    def __reduce__(self) -> Any:  # without the caches
        return partial(BrickTree, **self._options), (*self._defaults, self._form)

    def root(self, row: Row) -> tuple[Any, ...]:
        world, max_bricks = (
            default if row.get(name) is None else row[name]
            for name, default in zip(("world", "max_bricks"), self._defaults, strict=True)
        )
        if not 1 <= world <= _LARGEST_WORLD:
            raise ValueError(f"world is {world}; it must be between 1 and {_LARGEST_WORLD}")
        if not 1 <= max_bricks <= READ_LIMIT:
            raise ValueError(
                f"max_bricks is {max_bricks}; it must be between 1 and {READ_LIMIT}, the number of lines parsed"
            )
        return ((world, max_bricks, ""),)

    def longest_line(self) -> list[list[str]]:
        """Return the literals of a brick by place. At the end of any line, the text may end."""
        pivots = [] if self._pivot else [[f"{READ_LIMIT} ("]]
        return [self._opened, *pivots, list(_COORDINATES.values()), list(_COORDINATES.values()),
                list(_LAST_COORDINATES.values())]  # fmt: skip

    def choices(self, node: tuple[Any, ...]) -> Choices:
        """Return the next literals. There are no dead ends: every option fits, and any brick may be the last."""
        written, *chosen = node
        if len(chosen) == 5:
            size, _, x, y, z = chosen
            world, max_bricks, text = written
            h, w = self._kit.sizes[size]
            before, written, chosen = written, (world, max_bricks, f"{text}{self._spelled[size]} ({x},{y},{z})\n"), []
            if written not in self.placements:
                self._keep(written, self._placements(before).place(Brick(h, w, x, y, z)))
        placed = self._placements(written)
        if not chosen:
            opened = self._opened
            literals = [(opened[size], (written, size, *self._pivot)) for size in placed.sizes()]
            return [*literals, ("", None)] if placed.bricks else literals
        size = chosen[0]
        if len(chosen) == 1:
            return [(f"{pivot} (", (*node, pivot)) for pivot in (0, *placed.pivots(size))]
        box = placed.box(chosen[1])
        if len(chosen) == 2:
            return [(_COORDINATES[x - box.x], (*node, x)) for x in placed.xs(size, box)]
        if len(chosen) == 3:
            return [(_COORDINATES[y - box.y], (*node, y)) for y in placed.ys(size, box, chosen[2])]
        return [(_LAST_COORDINATES[z - box.z], (*node, z)) for z in placed.zs(size, box, chosen[2], chosen[3])]

    def _placements(self, written: tuple[int, int, str]) -> Placements:
        """Return the placements after a text, recomputed if they are not cached."""
        placed = self.placements.get(written)
        if placed is None:
            world, max_bricks, text = written
            placed = Placements.empty(self._rules(world, max_bricks))
            for brick in parse(text, kit=self._kit).structure.bricks:
                placed = placed.place(brick)
            self._keep(written, placed)
        return placed

    def _keep(self, written: tuple[int, int, str], placed: Placements) -> None:
        self.placements[written] = placed
        if len(self.placements) > _PLACEMENTS_KEPT:
            del self.placements[next(iter(self.placements))]  # the oldest
