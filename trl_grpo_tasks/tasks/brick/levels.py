"""The levels from easy to hard: the categories of each, their parameter values, and the weights they must carry."""

from __future__ import annotations

from .catalogue import Level


def _single_weights(grams_by_reach: dict[int, tuple[int, ...]]) -> dict[int, list[tuple[int, ...]]]:
    """Convert lists of single weights per reach to the format of `Level.grams`."""
    return {reach: [(grams,) for grams in few] for reach, few in grams_by_reach.items()}


# Weights by reach: light ones that the thinnest support carries, and heavy ones that need a thicker support.
_TIP = _single_weights(
    {2: (250, 500, 700, 1000), 3: (20, 50, 100, 200, 400), 4: (100, 200, 300, 400, 600), 5: (10, 30, 50, 100, 250)}
)
_EDGE = (100, 150, 300, 600, 1000)

LEVELS: dict[str, Level] = {
    "stack": Level(
        8,
        {
            "stack": {
                "length": (1, 2, 4, 6, 8),
                "width": (1, 2, 4, 6, 8),
                "height": (3, 4, 5, 6, 7, 8),
                "lean": ("straight", "crossed", "leaning right", "leaning back", "zigzag right", "zigzag back"),
                "shift": (0, 1, 2, 3),
            }
        },
    ),
    "small": Level(
        8,
        {
            "table": {"length": range(4, 9), "width": (3, 4), "height": (2, 3), "leg": (1, 2)},
            "bench": {"length": range(4, 9), "width": (1, 2, 4), "height": (2, 3, 4, 5), "leg": (1, 2)},
            "chair": {"width": (4,), "seat": (2, 3), "height": (4, 5, 6, 7), "leg": (1,)},
            "bookshelf": {"width": range(4, 9), "depth": (2,), "shelves": (2, 3), "gap": (1,)},
            "sofa": {"length": range(4, 9), "depth": (3, 4), "height": (3, 4), "seat": (1, 2)},
            "bed": {"length": (5, 6, 7, 8), "width": (2, 4), "height": (2, 3), "head": (2, 1, 3)},
            "stairs": {"width": (1, 2, 4), "steps": (3, 4, 5, 6), "tread": (1, 2)},
            "wall": {"length": range(4, 9), "height": (3, 4), "thick": (1, 2), "door": (0, 2)},
            "arch": {"length": (6, 7, 8), "width": (1, 2), "height": (3, 4, 5), "pillar": (1, 2)},
            "tower": {"width": (2, 4), "height": (3, 4, 5, 6), "base": (0, 1, 2)},
        },
    ),
    "carry": Level(
        8,
        {
            "balcony": {"reach": (2, 3, 4, 5), "width": (2, 4), "height": (2, 3, 4, 5)},
            "shelf": {"reach": (2, 3, 4, 5), "width": (1, 2), "height": (2, 3, 4)},
            "diving board": {"reach": (2, 3, 4, 5), "width": (1, 2), "height": (2, 3, 4, 5)},
            "street lamp": {"reach": (2, 3, 4, 5), "height": (3, 4, 5, 6)},
            "pedestal table": {"length": (6, 8), "width": (2,), "height": (3, 4, 5, 6, 7)},
            "footbridge": {"span": (4, 6), "width": (1, 2), "height": (2, 3, 4, 5, 6)},
        },
        {
            "balcony": _single_weights(
                {2: (300, 600, 800, 1000), 3: (50, 150, 200, 400), 4: (150, 300, 400, 600), 5: (20, 50, 100, 250)}
            ),
            "shelf": _TIP,
            "diving board": _TIP,
            "street lamp": _TIP,
            "pedestal table": _single_weights({6: _EDGE, 8: _EDGE}),
            "footbridge": _single_weights({4: (100, 200, 500), 6: (100, 200, 500)}),
        },
    ),
    "room": Level(
        12,
        {
            "table": {"length": (8, 9, 10, 12), "width": (5, 6, 7, 8), "height": (4, 5, 6), "leg": (2,)},
            "desk": {"length": (8, 9, 10, 12), "width": (4, 5, 6), "height": (4, 5, 6), "drawer": (3, 4)},
            "chair": {"width": (5, 6, 7), "seat": (3, 4, 5), "height": (8, 9, 10), "leg": (2,)},
            "bench": {"length": (8, 9, 10, 12), "width": (3, 4, 5), "height": (3, 4, 5), "leg": (1, 2)},
            "sofa": {"length": (8, 9, 10, 12), "depth": (4, 5, 6), "height": (4, 5, 6), "seat": (2, 3)},
            "bed": {"length": (8, 9, 10, 12), "width": (5, 6, 7, 8), "height": (2, 3), "head": (2, 3, 4)},
            "bookshelf": {"width": (6, 8, 10), "depth": (2, 3, 4), "shelves": (3, 4), "gap": (2, 1)},
            "tower": {"width": (4, 5, 6), "height": (8, 9, 10, 11), "base": (0, 1, 2)},
            "arch": {"length": (9, 10, 11, 12), "width": (2, 3, 4), "height": (6, 7, 8, 9), "pillar": (2, 1)},
            "bridge": {"length": (9, 10, 11, 12), "width": (3, 4, 5), "height": (3, 4, 5), "pier": (1, 2)},
            "car": {"length": (8, 10, 12), "width": (4, 5, 6), "body": (1, 2), "cabin": (4, 5)},
            "ship": {"length": (10, 11, 12), "width": (4, 6), "mast": (2, 3, 4, 5), "hull": (2, 3)},
            "train": {"length": (10, 11, 12), "width": (4, 5, 6), "height": (5, 6, 7), "cab": (3, 4)},
            "piano": {"width": (6, 8, 10, 12), "depth": (4, 5, 6), "height": (5, 6, 7, 8), "keys": (3, 4)},
            "guitar": {"width": (5, 6, 7, 8), "neck": (4, 5, 6), "body": (5, 6)},
            "mug": {"width": (4, 5, 6, 7), "height": (5, 6, 7), "grip": (3, 4, 5)},
            "stairs": {"width": (2, 3, 4, 5), "steps": (4, 5, 6), "tread": (2, 1)},
            "wall": {"length": (8, 9, 10, 12), "height": (5, 6, 7), "thick": (2, 1), "door": (2, 0, 3)},
            "lamp": {"base": (4, 5, 6, 7, 8), "height": (7, 8, 9, 10, 11), "shade": (2, 1)},
            "house": {"length": (6, 7, 8, 9), "width": (5, 6, 7, 8), "height": (3, 4, 5), "door": (2, 1)},
            "pyramid": {"base": range(5, 13), "step": (1, 2)},
            "tree": {"crown": (4, 5, 6, 7, 8), "height": (8, 9, 10, 11), "trunk": (4, 3, 2)},
        },
    ),
    "overhang": Level(
        16,
        {
            "balcony": {"reach": (3, 4, 5), "width": (3, 4, 5, 6), "height": (4, 5, 6, 7)},
            "diving board": {"reach": (3, 4, 5), "width": (2, 3), "height": (6, 7, 8, 9)},
            "street lamp": {"reach": (3, 4, 5), "height": (8, 9, 10, 11, 12)},
            "pedestal table": {"length": (10, 12), "width": (4,), "height": (4, 5, 6, 7, 8)},
            "crane": {"reach": (4, 5, 6, 7), "back": (7, 8), "height": (7, 8, 9, 10, 11)},
            "footbridge": {"span": (8, 9, 10), "width": (2, 3, 4), "height": (4, 5, 6)},
        },
        {
            "balcony": _single_weights({3: (100, 200, 400, 600), 4: (300, 500, 600, 700), 5: (50, 100, 200, 400)}),
            "diving board": _single_weights({3: (50, 100, 200, 400), 4: (200, 300, 400, 600), 5: (20, 50, 100, 300)}),
            "street lamp": _TIP,
            "pedestal table": _single_weights({10: _EDGE, 12: _EDGE}),
            "crane": {reach: [(100,), (200,), (300,), (500,), (300, 300), (500, 200)] for reach in (4, 5, 6, 7)},
            "footbridge": _single_weights(dict.fromkeys((8, 9, 10), (50, 100, 200, 300))),
        },
    ),
    "furniture": Level(
        20,
        {
            "table": {"length": (12, 14, 15, 16), "width": (8, 9, 10), "height": (6, 7, 8), "leg": (2, 3)},
            "desk": {"length": (12, 14, 16), "width": (6, 7, 8), "height": (7, 8, 9), "drawer": (4, 5)},
            "chair": {"width": (7, 8, 9), "seat": (6, 7, 8), "height": (14, 16, 18), "leg": (2,)},
            "bench": {"length": (15, 16, 18, 20), "width": (5, 6, 7), "height": (6, 7, 8), "leg": (2, 3)},
            "sofa": {"length": (14, 16, 18, 20), "depth": (7, 8), "height": (7, 8, 9), "seat": (3, 4)},
            "bed": {"length": (15, 16, 18, 20), "width": (9, 10, 12), "height": (3, 4, 5), "head": (4, 5)},
            "bookshelf": {"width": (8, 10, 12), "depth": (3, 4), "shelves": (4, 5), "gap": (3, 2)},
            "tower": {"width": (6, 7, 8), "height": (12, 14, 16, 18), "base": (1, 2)},
            "arch": {"length": (12, 14, 16), "width": (4, 5), "height": (9, 10, 12, 14), "pillar": (3, 4)},
            "bridge": {"length": (17, 18, 19, 20), "width": (6, 7, 8), "height": (6, 7, 8), "pier": (2, 3)},
            "car": {"length": (14, 16, 18), "width": (7, 8), "body": (3, 4), "cabin": (7, 8)},
            "ship": {"length": (18, 19, 20), "width": (8,), "mast": (7, 8, 9, 10), "hull": (3, 2)},
            "train": {"length": (14, 16, 18, 20), "width": (6, 7), "height": (8, 9, 10), "cab": (4, 5)},
            "piano": {"width": (12, 14, 16), "depth": (6, 7, 8), "height": (10, 11, 12), "keys": (5, 6)},
            "guitar": {"width": (11, 12, 13), "neck": (9, 10), "body": (9, 10)},
            "mug": {"width": (8, 9, 10), "height": (8, 9, 10, 11), "grip": (5, 6, 7)},
            "stairs": {"width": (5, 6, 7), "steps": (8, 9, 10), "tread": (2,)},
            "wall": {"length": (16, 17, 18, 20), "height": (13, 14, 15), "thick": (2,), "door": (4, 3, 2)},
            "lamp": {"base": (9, 10, 11), "height": (15, 16, 17, 18), "shade": (3, 4)},
            "house": {"length": (10, 12, 14), "width": (8, 9, 10), "height": (4, 5, 6), "door": (2, 3)},
            "pyramid": {"base": (14, 15, 16, 17, 18), "step": (1, 2)},
            "tree": {"crown": (7, 8, 9, 10), "height": (13, 14, 15, 16), "trunk": (5, 6)},
        },
    ),
}  # fmt: skip
