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

from ...files import check_local_path
from ...task import nearest
from .kit import PARTS, Part

LONGEST_SIDE = 20  # cells
MOST_PARTS = 64
MOST_BYTES = 100_000
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
        return _parts_of(_loaded(given, "--brick_library"), "--brick_library")
    check_local_path(given, "--brick_library")
    path, place = Path(given).expanduser(), f"--brick_library {given}"
    if not path.is_file():
        raise ValueError(f"{place}: this file does not exist; give a JSON or YAML file that lists bricks")
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{place}: the file is larger than {MOST_BYTES} bytes, too large for a list of bricks")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{place}: not a text file in UTF-8: {error}") from error
    return _parts_of(_loaded(text, place), place)


def _loaded(text: str, place: str) -> Any:
    import yaml

    with suppress(json.JSONDecodeError, RecursionError):
        return json.loads(text)  # PyYAML reads some JSON differently: 1e-6 would be text
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ValueError(f"{place}: neither JSON nor YAML: {' '.join(str(error).split())[:200]}") from error


def _parts_of(content: Any, place: str) -> tuple[Part, ...]:
    if not isinstance(content, dict) or set(content) != {"bricks"} or not isinstance(content["bricks"], list):
        raise ValueError(f"{place}: must hold one key, `bricks`, with a list such as [{{size: 2x4, mass_g: 2.16}}]")
    if not 1 <= len(content["bricks"]) <= MOST_PARTS:
        raise ValueError(f"{place}: lists {len(content['bricks'])} bricks; it must list 1 to {MOST_PARTS}")
    parts: dict[tuple[int, int], Part] = {}
    for number, entry in enumerate(content["bricks"], 1):
        part = _part(entry, f"{place}, brick {number}")
        if part[:2] in parts:
            raise ValueError(
                f"{place}, brick {number}: there is another {part.short}x{part.long} brick; text names a brick by its "
                "size alone, so keep one of them"
            )
        parts[part[:2]] = part
    return tuple(sorted(parts.values()))


def _part(entry: Any, place: str) -> Part:
    if not isinstance(entry, dict):
        raise ValueError(f"{place}: {_shown(entry)} must be a mapping such as {{size: 2x4, mass_g: 2.16}}")
    if unknown := [key for key in entry if key not in _KEYS]:
        raise ValueError(
            f"{place}: unknown key {_shown(unknown[0])}{nearest(str(unknown[0]), _KEYS)}; keys are: {', '.join(_KEYS)}"
        )
    if missing := [key for key in ("size", "mass_g") if key not in entry]:
        raise ValueError(f"{place}: {missing[0]!r} is missing")
    size = re.fullmatch(r"([0-9]{1,2})x([0-9]{1,2})", str(entry["size"]).strip(), re.ASCII)
    sides = sorted(map(int, size.groups())) if size else []
    if not sides or not 1 <= sides[0] <= sides[1] <= LONGEST_SIDE:
        raise ValueError(
            f"{place}: size {_shown(entry['size'])} must be of the form 2x4, with sides from 1 to {LONGEST_SIDE} cells"
        )
    mass_g = entry["mass_g"]
    if isinstance(mass_g, bool) or not isinstance(mass_g, int | float) or not LIGHTEST_G <= mass_g <= HEAVIEST_G:
        raise ValueError(f"{place}: mass_g {_shown(mass_g)} must be a number from {LIGHTEST_G:g} to {HEAVIEST_G}")
    if entry.get("height", 1) != 1:
        raise ValueError(
            f"{place}: height {_shown(entry['height'])} must be 1: text gives bricks no height, all are one layer high"
        )
    words = {key: "" if entry.get(key) is None else str(entry[key]) for key in ("ldraw", "name")}
    if not re.fullmatch(r"[0-9A-Za-z_-]{0,20}", words["ldraw"]):
        raise ValueError(f"{place}: ldraw {_shown(entry['ldraw'])} must be a part number such as 3001")
    if len(words["name"]) > 60 or not words["name"].isprintable():
        raise ValueError(f"{place}: name {_shown(entry['name'])} must be one line of at most 60 characters")
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
