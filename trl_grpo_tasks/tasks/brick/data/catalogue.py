"""Categories of structures, the requests of each level, and the split into training and test requests.

A request is a category with values for its parameters and, on levels about physics, weights that it must carry. The
thickness of the support is not part of the request: choosing it is what the model has to learn.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..shapes import objects as shapes
from ..shapes import overhangs
from ..structure import SIZES

Params = Mapping[str, Any]
TEST_PERCENT = 17


def _by_reach(params: Params) -> Sequence[int]:
    """Return the possible thicknesses of the support for a given reach.

    Parts are 1, 2, 4, 6 and 8 long, so only every second thickness gives a plank a deeper joint, and reach plus
    thickness cannot exceed the longest part.
    """
    return range(2 - params["reach"] % 2, 8 - params["reach"] + 1, 2)


@dataclass(frozen=True)
class Category:
    """A kind of structure and its parameters.

    `size` and `tall` are the main parameters, described as "small" to "large" and "low" to "tall"; `fine` are the
    others. `support` names the parameter, one of the values `supports`, that must be strong enough to carry a weight.
    The weight is described as on `place`; it stands at `weight_x`, in the middle of the width.
    """

    build: Callable[..., np.ndarray]
    size: tuple[str, ...]
    tall: tuple[str, ...] = ("height",)
    fine: tuple[str, ...] = ()
    allowed: Callable[[Params], bool] = lambda params: True
    support: str | None = None
    supports: Callable[[Params], Sequence[int]] = _by_reach  # from thin to thick
    place: str = ""
    weight_x: Callable[[Params], int] = lambda params: 0

    @property
    def main(self) -> tuple[str, ...]:
        return self.size + self.tall


@dataclass(frozen=True)
class Request:
    category: str
    params: tuple[tuple[str, Any], ...]
    grams: tuple[int, ...] = ()  # the first weight is at the category's place, the second on the back

    @functools.cached_property
    def is_held_out(self) -> bool:
        """Whether the request belongs to the test split, which depends only on its content."""
        digest = hashlib.sha256(repr((self.category, self.params, self.grams)).encode()).digest()
        return int.from_bytes(digest[:4], "big") % 100 < TEST_PERCENT


@dataclass(frozen=True)
class Level:
    """The requests of one level.

    `grids` has the parameter values of each category, default values of `fine` parameters first. `grams` has the
    weights it must carry (one or two), by the value of its first parameter: light ones that the thinnest support
    carries, and heavy ones that need a thicker support.
    """

    world: int
    grids: Mapping[str, Mapping[str, Sequence[Any]]]
    grams: Mapping[str, Mapping[str, Sequence[Sequence[int]]]] = field(default_factory=dict)

    def requests(self) -> Iterator[Request]:
        for name, grid in self.grids.items():
            category = CATEGORIES[name]
            for values in itertools.product(*grid.values()):
                params = dict(zip(grid, values, strict=True))
                if category.allowed(params) and (
                    category.support or max(category.build(**params).shape) <= self.world
                ):
                    for grams in self.grams[name][str(values[0])] if category.support else [()]:
                        yield Request(name, tuple(params.items()), tuple(grams))


def _is_stack(params: Params) -> bool:
    """Return whether each layer is one brick, shifted as `lean` says, that still rests on the brick below."""
    size, lean, shift = (params["length"], params["width"]), params["lean"], params["shift"]
    if size not in SIZES or (lean in ("straight", "crossed")) != (shift == 0):
        return False
    return size[0] != size[1] if lean == "crossed" else shift < size[0 if lean.endswith("right") else 1]


CATEGORIES: dict[str, Category] = {
    "stack": Category(shapes.stack, ("length", "width"), fine=("lean", "shift"), allowed=_is_stack),
    "table": Category(shapes.table, ("length", "width"), fine=("leg",), allowed=lambda p: 2 * p["leg"] <= p["width"]),
    "desk": Category(shapes.desk, ("length", "width"), fine=("drawer",)),
    "chair": Category(shapes.chair, ("width",), ("seat", "height"), ("leg",), lambda p: p["seat"] + 1 < p["height"]),
    "bench": Category(shapes.bench, ("length", "width"), fine=("leg",),
                      allowed=lambda p: 2 * p["leg"] + 2 <= p["length"]),
    "sofa": Category(shapes.sofa, ("length", "depth"), fine=("seat",), allowed=lambda p: p["seat"] + 2 <= p["height"]),
    "bed": Category(shapes.bed, ("length", "width"), fine=("head",)),
    "bookshelf": Category(shapes.bookshelf, ("width", "depth"), ("shelves",), ("gap",)),
    "tower": Category(shapes.tower, ("width",), fine=("base",), allowed=lambda p: p["base"] + 2 <= p["height"]),
    "arch": Category(shapes.arch, ("length", "width"), fine=("pillar",),
                     allowed=lambda p: 2 * p["pillar"] + 4 <= p["length"]),
    "bridge": Category(shapes.bridge, ("length", "width"), fine=("pier",)),
    "car": Category(shapes.car, ("length", "width"), ("body",), ("cabin",)),
    "ship": Category(shapes.ship, ("length", "width"), ("mast",), ("hull",)),
    "train": Category(shapes.train, ("length", "width"), fine=("cab",)),
    "piano": Category(shapes.piano, ("width", "depth"), fine=("keys",)),
    "guitar": Category(shapes.guitar, ("width",), ("neck",), ("body",)),
    "mug": Category(shapes.mug, ("width",), fine=("grip",), allowed=lambda p: p["grip"] < p["height"]),
    "stairs": Category(shapes.stairs, ("width",), ("steps",), ("tread",)),
    "wall": Category(shapes.wall, ("length",), fine=("thick", "door")),
    "lamp": Category(shapes.lamp, ("base",), fine=("shade",)),
    "house": Category(shapes.house, ("length", "width"), fine=("door",)),
    "pyramid": Category(shapes.pyramid, ("base",), (), ("step",)),
    "tree": Category(shapes.tree, ("crown",), fine=("trunk",)),
    "balcony": Category(overhangs.balcony, ("reach", "width"), support="wall", place="on the tip"),
    "shelf": Category(overhangs.shelf, ("reach", "width"), support="wall", place="on the edge"),
    "diving board": Category(overhangs.diving_board, ("reach", "width"), support="post", place="on the tip"),
    "street lamp": Category(overhangs.street_lamp, ("reach",), support="pole", place="on the top"),
    "pedestal table": Category(overhangs.pedestal_table, ("length", "width"), support="column",
                               supports=lambda p: (2, 4, 6), place="on the edge"),
    "crane": Category(overhangs.crane, ("reach", "back"), support="tower", supports=lambda p: (2, 4, 6),
                      place="on the tip"),
    "footbridge": Category(overhangs.footbridge, ("span", "width"), support="pier",
                           supports=lambda p: (1,) if p["span"] <= 6 else (2, 3), place="in the middle",
                           weight_x=lambda p: p["span"] // 2 + (1 if p["span"] <= 6 else overhangs.ABUTMENT)),
}  # fmt: skip

# From easy to hard.
LEVELS: dict[str, Level] = {
    name: Level(**entry)
    for name, entry in json.loads(Path(__file__).with_name("levels.json").read_text(encoding="utf-8")).items()
}
