"""LDraw files (.ldr), which brick viewers open, and the colours that they share with our pictures.

LDraw's unit is 0.4 mm: a stud pitch is 20, a brick's height 24, and -y is up. Our x is LDraw's x and our y is its z,
which preserves handedness. A part's origin is the centre of the top of its body, with its long side along x. A part
that LDraw's library lacks is written into the file itself, as a box.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from .kit import Part
from .structure import Brick, Structure

STUD, HEIGHT = 20, 24

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
        lines.append(f"1 {PALETTE[colours[index]].code} {place} {turn} {part_file(structure.kit.part_of[h, w])}")
    lines.append("0 STEP")
    used = {structure.kit.part_of[brick[:2]] for brick in structure.bricks}
    if boxes := sorted(part for part in used if not part.ldraw):
        lines.insert(0, f"0 FILE {file_name}.ldr")  # a file of several models begins with their names
        lines += [line for part in boxes for line in (f"0 FILE {part_file(part)}", *_box(part))]
    return "\n".join([*lines, ""])


def part_file(part: Part) -> str:
    return f"{part.ldraw or f'brick_{part.short}x{part.long}'}.dat"


def _box(part: Part) -> list[str]:
    """Return the six faces of a part, as quadrilaterals in the colour of the brick (16) that uses it."""
    x, z = part.long * STUD // 2, part.short * STUD // 2
    top = [(-x, 0, -z), (x, 0, -z), (x, 0, z), (-x, 0, z)]
    bottom = [(i, HEIGHT, k) for i, _, k in top]
    sides = [(top[n], bottom[n], bottom[n - 3], top[n - 3]) for n in range(4)]
    faces = [top, bottom[::-1], *sides]
    return [f"0 {part.name or f'brick {part.short}x{part.long}'}"] + [
        " ".join(["4 16", *(str(value) for corner in face for value in corner)]) for face in faces
    ]
