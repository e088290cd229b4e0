"""The levels from easy to hard. `levels.json` has the categories of each, their parameter values, and the weights they
must carry: light ones that the thinnest support carries, and heavy ones that need a thicker support."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .catalogue import Level


def _level(world: int, grids: dict[str, Any], grams: dict[str, Any]) -> Level:
    weights = {
        name: {int(first): [tuple(few) for few in choices] for first, choices in by_first.items()}
        for name, by_first in grams.items()
    }
    return Level(world, grids, weights)


LEVELS: dict[str, Level] = {
    name: _level(entry["world"], entry["grids"], entry.get("grams", {}))
    for name, entry in json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8")).items()
}
