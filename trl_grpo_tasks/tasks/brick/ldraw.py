"""LDraw files (.ldr), which brick viewers open, and the colours that they share with our pictures.

LDraw's unit is 0.4 mm: a stud pitch is 20, a brick's height 24, and -y is up. Our x is LDraw's x and our y is its z,
which preserves handedness. A part's origin is the centre of the top of its body, with its long side along x.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .kit import KIT
from .structure import READ_LIMIT, WORLD, Brick, Structure

STUD, HEIGHT = 20, 24
OFF_GRID = 0.01  # deviation in cells, or of an entry of a matrix, that is taken for rounding
LARGEST_FILE = 100  # cells along one side of a model that is read
FARTHEST = 1_000_000  # in LDraw's units

_ALONG_X = "1 0 0 0 1 0 0 0 1"
_ALONG_Y = "0 0 1 0 1 0 -1 0 0"  # a quarter turn about the vertical axis


class Colour(NamedTuple):
    name: str
    code: int  # LDraw's colour code
    rgb: tuple[int, int, int]


# Adjacent entries contrast, because consecutive bricks usually touch.
PALETTE = (
    Colour("Red", 4, (201, 38, 32)),
    Colour("Yellow", 14, (250, 200, 10)),
    Colour("Blue", 1, (30, 100, 185)),
    Colour("Bright_Green", 10, (76, 170, 68)),
    Colour("Orange", 25, (240, 126, 30)),
    Colour("Medium_Azure", 322, (84, 190, 222)),
    Colour("Lime", 27, (165, 202, 24)),
    Colour("Salmon", 12, (250, 115, 105)),
    Colour("Dark_Turquoise", 3, (6, 150, 155)),
    Colour("White", 15, (244, 244, 244)),
)


_SIX = ((1, 0, 0), (-1, 0, 0), (0, 1, 0), (0, -1, 0), (0, 0, 1), (0, 0, -1))


def palette_indices(bricks: Sequence[Brick]) -> list[int]:
    """Return an index into PALETTE for every brick.

    The choice is deterministic, does not depend on later bricks, and differs from the touching bricks as far as ten
    colours allow.
    """
    painted: dict[tuple[int, int, int], int] = {}  # cell -> colour
    chosen = []
    for number, (h, w, x, y, z) in enumerate(bricks):
        cells = [(x + i, y + j, z) for i in range(h) for j in range(w)]
        around = [(a + i, b + j, c + k) for a, b, c in cells for i, j, k in _SIX]
        touched = [painted[cell] for cell in around if cell in painted]
        order = [(number * 3 + step) % len(PALETTE) for step in range(len(PALETTE))]
        colour = min(order, key=touched.count)
        chosen.append(colour)
        painted.update(dict.fromkeys(cells, colour))
    return chosen


def to_ldr(structure: Structure, name: str) -> str:
    """Convert a structure to an LDraw model in the colours of the picture, with one building step per layer.

    >>> print(to_ldr(Structure((Brick(2, 4, 0, 0, 0),)), "plank"))
    0 plank
    0 Name: plank.ldr
    0 Author: trl_grpo_tasks
    1 4 20 -24 40 0 0 1 0 1 0 -1 0 0 3001.dat
    0 STEP
    <BLANKLINE>
    """
    title = " ".join(name.split()) or "untitled"
    file_name = re.sub(r"[^A-Za-z0-9._-]+", "_", title).strip("_") or "untitled"
    lines = [f"0 {title}", f"0 Name: {file_name}.ldr", "0 Author: trl_grpo_tasks"]
    colours = palette_indices(structure.bricks)
    layer = None
    for index in sorted(range(len(structure)), key=lambda i: structure.bricks[i].z):
        h, w, x, y, z = structure.bricks[index]
        if layer is not None and z != layer:
            lines.append("0 STEP")
        layer = z
        # x + h/2 stud pitches is a whole number of LDraw units, because a pitch is 20.
        place = f"{STUD * (2 * x + h) // 2} {-HEIGHT * (z + 1)} {STUD * (2 * y + w) // 2}"
        turn = _ALONG_X if h >= w else _ALONG_Y
        lines.append(f"1 {PALETTE[colours[index]].code} {place} {turn} {KIT.part_of[h, w].ldraw}.dat")
    return "\n".join([*lines, "0 STEP", ""])


def from_ldr(text: str, world: int = WORLD) -> Structure:
    """Read the bricks of an LDraw file, also of one with submodels (.mpd).

    LDraw knows neither ground nor world. The lowest bricks are put on the ground; a model that is off the grid of the
    world or reaches out of it is moved to the corner, and a larger model gets a larger world. Raises ValueError for
    what our structures cannot represent: other parts, parts that are tilted or off the grid of the others.
    """
    sizes, places = _placed_parts(text)
    if not sizes:
        raise ValueError("it places no bricks")
    corners = np.array(places) / (STUD, HEIGHT, STUD)  # LDraw's x, z and height in cells
    corners[:, 1] *= -1
    corners = corners[:, (0, 2, 1)]
    low = corners.min(0)
    cells = np.rint(corners - low).astype(int)
    if (wrong := np.abs(corners - low - cells).max(1) > OFF_GRID).any():
        h, w = sizes[int(wrong.argmax())]
        raise ValueError(f"a {h}x{w} brick is off the grid of {STUD} x {HEIGHT} x {STUD} units that the others are on")
    ends = cells + [(h, w, 1) for h, w in sizes]
    if (needed := int(ends.max())) > LARGEST_FILE:
        raise ValueError(f"it is {needed} cells long; at most {LARGEST_FILE} are read")
    at = np.rint(low[:2]).astype(int)
    is_inside = np.abs(low[:2] - at).max() <= OFF_GRID and at.min() >= 0 and (ends[:, :2].max(0) + at).max() <= world
    cells[:, :2] += at if is_inside else 0
    bricks = tuple(Brick(*size, *map(int, cell)) for size, cell in zip(sizes, cells, strict=True))
    return Structure(bricks, max(world, needed))


def _placed_parts(text: str) -> tuple[list[tuple[int, int]], list[np.ndarray]]:
    """Return the size of each brick, as turned, and its corner with the least x and z, in LDraw's units."""
    size_of = {f"{part.ldraw}.dat": part[:2] for part in KIT.parts}
    models, main = _models_of(text)
    sizes: list[tuple[int, int]] = []
    places: list[np.ndarray] = []
    unknown: dict[str, int] = {}
    todo: list[tuple[tuple[str, ...], np.ndarray, np.ndarray]] = [((main,), np.eye(3), np.zeros(3))]
    placed = 0
    while todo:
        path, outer_turn, outer_place = todo.pop()
        for number, line in models[path[-1]]:
            fields = line.split()
            name = " ".join(fields[14:]).lower()
            size = size_of.get(f"{name.removesuffix('.dat')}.dat")
            if size is None and name not in models:
                unknown[name] = unknown.get(name, 0) + 1
                continue
            placed += 1
            if placed > READ_LIMIT:
                raise ValueError(f"it places more than {READ_LIMIT} parts")
            turn, place = _motion(fields, f"line {number}, {line.strip()[:80]!r}")
            turn, place = outer_turn @ turn, outer_turn @ place + outer_place
            if size is not None:
                extent = np.abs(turn @ [size[1], 0, size[0]])  # a part's long side is along its own x
                sizes.append((int(extent[0]), int(extent[2])))
                places.append(place - extent * STUD / 2)
            elif name in path:
                raise ValueError(f"line {number}: model {name!r} contains itself")
            else:
                todo.append(((*path, name), turn, place))
    if unknown:
        some = ", ".join(f"{name or 'no name'} ({count}x)"[:60] for name, count in [*unknown.items()][:5])
        known = ", ".join(f"{name} {short}x{long}" for name, (short, long) in size_of.items())
        raise ValueError(f"it has {len(unknown)} kinds of parts that are not read: {some}; known parts are: {known}")
    return sizes, places


def _models_of(text: str) -> tuple[dict[str, list[tuple[int, str]]], str]:
    """Return the numbered lines that place parts, by the name of their model, and the name of the main model."""
    name = ""
    models: dict[str, list[tuple[int, str]]] = {name: []}
    for number, line in enumerate(re.split(r"\r\n?|\n", text), 1):
        kind, *fields = line.split(maxsplit=2) or ["0"]
        if kind == "0" and fields and fields[0].upper() in ("FILE", "NOFILE"):
            name = fields[1].strip().lower() if len(fields) == 2 else "\n"  # after NOFILE: no model
            models.setdefault(name, [])
        elif kind == "1":
            models[name].append((number, line))
        elif kind not in ("0", "2", "3", "4", "5"):  # comments and commands, lines and faces
            raise ValueError(f"line {number}, {line.strip()[:80]!r}: LDraw lines begin with a number from 0 to 5")
    return models, next(name for name, lines in models.items() if lines or len(models) == 1 or name)


def _motion(fields: Sequence[str], place: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the turn, of whole numbers, and the position of a line that places a part."""
    try:
        numbers = np.array([float(field) for field in fields[2:14]])
    except ValueError:
        numbers = np.array([])
    if len(fields) < 15 or len(numbers) != 12 or not (np.abs(numbers) <= FARTHEST).all():
        raise ValueError(f"{place}: needs a colour, 12 numbers of at most {FARTHEST:,} and a part")
    given = numbers[3:].reshape(3, 3)
    turn = np.rint(given)
    is_turn = (turn @ turn.T == np.eye(3)).all() and turn[1, 1] == 1  # mirrored bricks are bricks too
    if not is_turn or np.abs(given - turn).max() > OFF_GRID:
        raise ValueError(f"{place}: this part is tilted, upside down or scaled; only quarter turns are read")
    return turn, numbers[:3]
