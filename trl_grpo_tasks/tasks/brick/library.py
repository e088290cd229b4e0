"""Brick libraries of the user's own: a JSON or YAML file with the parts to build with (`--brick_library`).

    bricks:
      - {size: 2x3, mass_g: 1.6, ldraw: 3002}
      - {size: 1x10, mass_g: 3.8, name: long beam}

`size` and `mass_g` are required. `ldraw` is the number of the part in LDraw's library; a part without one is written
into LDraw files as a box with its `name`. Bricks are one layer high, so `height`, if it is given, must be 1.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

from ...files import check_local_path, read_yaml
from ...task import nearest
from .kit import PARTS, Part

LONGEST_SIDE = 20  # cells
MOST_PARTS = 64
LIGHTEST_G, HEAVIEST_G = 1e-6, 10_000
_KEYS = ("size", "mass_g", "ldraw", "name", "height")


def library_text(given: str) -> str:
    """Return the content of a library as JSON text in a normal form; `given` is a file, or such text.

    Options hold this text instead of the path, so a run keeps its library when the file changes or moves, and scores
    are cached by content.
    """
    return json.dumps({"bricks": [_entry(part) for part in read_library(given)]})


def read_library(given: str) -> tuple[Part, ...]:
    """Return the parts of a library, which is a file or JSON text, in order of size. Raises ValueError."""
    if given.lstrip().startswith("{"):
        try:
            content = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"--brick_library is not JSON: {error}") from error
        return _parts_of(content, "--brick_library")
    check_local_path(given, "--brick_library")
    path = Path(given).expanduser()
    if not path.is_file():
        raise ValueError(f"--brick_library {given}: does not exist; give a JSON or YAML file that lists bricks")
    return _parts_of(read_yaml(path, "--brick_library"), f"--brick_library {given}")


def _parts_of(content: Any, place: str) -> tuple[Part, ...]:
    if not isinstance(content, dict) or set(content) != {"bricks"} or not isinstance(content["bricks"], list):
        raise ValueError(f"{place}: must hold one key, `bricks`, with a list such as [{{size: 2x4, mass_g: 2.16}}]")
    if not 1 <= len(content["bricks"]) <= MOST_PARTS:
        raise ValueError(f"{place}: lists {len(content['bricks'])} bricks; it must list 1 to {MOST_PARTS}")
    parts: dict[tuple[int, int], Part] = {}
    for number, entry in enumerate(content["bricks"], 1):
        try:
            part = _part(entry)
            if part[:2] in parts:
                size = f"{part.short}x{part.long}"
                raise ValueError(f"there is another {size} brick; text names a brick by its size alone, so keep one")
        except ValueError as error:
            raise ValueError(f"{place}, brick {number}: {error}") from None
        parts[part[:2]] = part
    return tuple(sorted(parts.values()))


def _part(entry: Any) -> Part:
    if not isinstance(entry, dict):
        raise ValueError(f"{_shown(entry)} must be a mapping such as {{size: 2x4, mass_g: 2.16}}")
    if unknown := [key for key in entry if key not in _KEYS]:
        hint = nearest(str(unknown[0]), _KEYS)
        raise ValueError(f"unknown key {_shown(unknown[0])}{hint}; keys are: {', '.join(_KEYS)}")
    if missing := [key for key in ("size", "mass_g") if key not in entry]:
        raise ValueError(f"{missing[0]!r} is missing")
    size = re.fullmatch(r"([0-9]{1,2})x([0-9]{1,2})", str(entry["size"]).strip(), re.ASCII)
    sides = sorted(map(int, size.groups())) if size else []
    if not sides or not 1 <= sides[0] <= sides[1] <= LONGEST_SIDE:
        shown = _shown(entry["size"])
        raise ValueError(f"size {shown} must be of the form 2x4, with sides from 1 to {LONGEST_SIDE} cells")
    mass_g = entry["mass_g"]
    with suppress(ValueError):
        mass_g = float(mass_g) if isinstance(mass_g, str) else mass_g  # YAML takes 1e-6 for text
    if isinstance(mass_g, bool) or not isinstance(mass_g, int | float) or not LIGHTEST_G <= mass_g <= HEAVIEST_G:
        raise ValueError(f"mass_g {_shown(mass_g)} must be a number from {LIGHTEST_G:g} to {HEAVIEST_G}")
    if (height := entry.get("height", 1)) != 1:
        raise ValueError(f"height {_shown(height)} must be 1: text gives bricks no height, all are one layer high")
    words = {key: "" if entry.get(key) is None else str(entry[key]) for key in ("ldraw", "name")}
    if not re.fullmatch(r"[0-9A-Za-z_-]{0,20}", words["ldraw"]):
        raise ValueError(f"ldraw {_shown(entry['ldraw'])} must be a part number such as 3001")
    if len(words["name"]) > 60 or not words["name"].isprintable():
        raise ValueError(f"name {_shown(entry['name'])} must be one line of at most 60 characters")
    known = {part[:2]: part.ldraw for part in PARTS}
    number = words["ldraw"].lower() or known.get((sides[0], sides[1]), "")
    mass_kg = _shifted(round(mass_g, 6), -3)  # micrograms, so that text in normal form gives the same mass
    return Part(sides[0], sides[1], mass_kg, number, words["name"])


def _shifted(number: float, places: int) -> float:
    """Move the decimal point. Unlike a division by 1000, this makes 0.81 g exactly the built-in part's 0.00081 kg."""
    return float(Decimal(repr(number)).scaleb(places))


def _entry(part: Part) -> dict[str, Any]:
    words = {key: value for key, value in (("ldraw", part.ldraw), ("name", part.name)) if value}
    return {"size": f"{part.short}x{part.long}", "mass_g": _shifted(part.mass_kg, 3), **words}


def _shown(value: Any) -> str:
    return repr(value)[:60]
