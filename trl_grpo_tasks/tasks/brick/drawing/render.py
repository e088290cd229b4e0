"""Pictures of brick structures. Needs Pillow, no display."""

from __future__ import annotations

import io
import unicodedata
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..ldraw import PALETTE, palette_indices
from ..structure import Brick, Structure

try:
    from PIL import Image, ImageDraw, ImageFont
except ImportError as error:
    raise ImportError("pictures of bricks need pillow: pip install 'trl_grpo_tasks[brick]'") from error
from .scene import EMPTY, HEIGHT, Camera, Scene, index_buffer

DRAWN_LIMIT = 600  # maximum number of bricks drawn: more than valid structures have, and still fast
FAR = 4  # bricks farther than this outside the world, in cells, are counted but not drawn
WIDEST_WORLD = 64  # maximum edge length of the drawn part of a world, in cells

PLATE_COLOUR, WEIGHT_COLOUR = (214, 219, 222), (58, 62, 71)
FAILING_COLOUR = (232, 12, 20)
BACKGROUND = (244, 246, 248)
BRIGHTNESS = np.array([1.0, 0.8, 0.62, 1.0, 0.7, 1.06])  # background, faces by axis, walls and tops of cylinders
OUTLINE = 0.45  # brightness of outlines, relative to what they enclose
SUPERSAMPLE = 3  # pictures are painted this many times larger and then shrunk
INK, WARNING = (45, 50, 58), (176, 42, 30)
NOTES_SHOWN = 3
LONGEST_CAPTION = 1000  # characters; longer captions would not fit
_ASCII = str.maketrans("–—×‘’“”", "--x''\"\"")


def picture(
    structure: Structure,
    *,
    failing: Iterable[int] = (),
    weights: Iterable[tuple[int, int, int, float]] = (),
    caption: str | None = None,
    size: tuple[int, int] = (640, 640),
) -> Image.Image:
    """Draw the structure on a baseplate, with low y in front.

    Any structure gives a picture, with its problems written below; colliding cells and bricks outside the world are
    striped. Bricks with an index in `failing` are red, and the others are then pale. `weights` are (x, y, z, kg),
    each on top of that cell.
    """
    notes, failing = [], set(failing)
    drawn = {index: brick for index, brick in enumerate(structure.bricks) if _is_near(brick, structure.world)}
    if far := len(structure) - len(drawn):
        notes.append(f"not drawn because below the ground or far outside: {_count(far)}")
    if len(drawn) > DRAWN_LIMIT:
        notes.append(f"only the first {DRAWN_LIMIT} of {_count(len(drawn))} are drawn")
        drawn = dict(list(drawn.items())[:DRAWN_LIMIT])
    cells = {index: {(b.x + i, b.y + j, b.z) for i in range(b.h) for j in range(b.w)} for index, b in drawn.items()}
    takers = Counter(cell for taken in cells.values() for cell in taken)
    striped = {cell for cell, count in takers.items() if count > 1}
    if clashing := sum(not striped.isdisjoint(taken) for taken in cells.values()):
        notes.append(f"colliding: {_count(clashing)}")
    outside = [index for index, brick in drawn.items() if not brick.is_inside(structure.world)]
    if outside:
        notes.append(f"outside the world of {structure.world}: {_count(len(outside))}")
        striped.update(*(cells[index] for index in outside))
    scene = Scene(
        drawn,
        [weight for weight in weights if _is_near(Brick(1, 1, *weight[:3]), structure.world)],
        frozenset(striped),
    )

    line = max(11, min(size) // 36)  # height of a line of text, in pixels
    font, width = ImageFont.load_default(SUPERSAMPLE * line), SUPERSAMPLE * (size[0] - 2 * line)
    rows = [(row, WARNING) for note in notes[:NOTES_SHOWN] for row in _wrapped(note, width, font, 1)]
    rows += [(row, INK) for row in _wrapped(caption or "", width, font, 3)]
    camera = Camera(scene, size, 1.4 * line * len(rows))
    image = _painted(scene, camera, _colours(structure, drawn, failing))
    draw = ImageDraw.Draw(image)
    for x, y, z, mass_kg in scene.weights:
        above = camera.project(np.array([x + 0.5, y + 0.5, HEIGHT * (z + 1) + 1.05])) - (0, 1.1 * line)
        _label(draw, above, f"{1000 * mass_kg:g} g", line)
    if not drawn:
        middle = camera.project(np.array([*scene.plate.mean(0), 0]))
        _label(draw, middle, "no brick in view" if len(structure) else "no bricks", int(1.5 * line))
    for number, (row, ink) in enumerate(reversed(rows)):
        at = SUPERSAMPLE * size[0] / 2, SUPERSAMPLE * (size[1] - line * (1.4 * number + 0.9))
        draw.text(at, row, ink, font, "ms")
    return image.reduce(SUPERSAMPLE)


def png(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format="PNG")
    return stream.getvalue()


def _is_near(brick: Brick, world: int) -> bool:
    end = min(world, WIDEST_WORLD) + FAR
    return min(brick.x, brick.y) >= -FAR and max(brick.x + brick.h, brick.y + brick.w) <= end and 0 <= brick.z < end


def _count(bricks: int) -> str:
    return f"{bricks:,} brick{'s' if bricks > 1 else ''}"


def _colours(structure: Structure, drawn: dict[int, Brick], failing: set[int]) -> np.ndarray:
    """Return RGB colours [owner, 3]: one row per brick, then rows for weights, plate and background."""
    table = np.zeros((len(structure) + 3, 3))
    table[list(drawn)] = [PALETTE[i].rgb for i in palette_indices(list(drawn.values()))] or np.zeros((0, 3))
    if failing:
        table = 0.45 * table + 0.55 * np.array([232, 234, 236])
    table[[index for index in failing if index in drawn]] = FAILING_COLOUR
    table[-3:] = WEIGHT_COLOUR, PLATE_COLOUR, BACKGROUND
    return table


def _painted(scene: Scene, camera: Camera, colours: np.ndarray) -> Image.Image:
    """Paint each side of a brick in one brightness, with outlines, and stripes on hatched faces; not yet shrunk."""
    shown = index_buffer(scene, camera, SUPERSAMPLE)
    cylinders = len(scene.base)
    kind = np.concatenate([[0], 1 + scene.axis, np.repeat([4, 5], cylinders)])
    owner = np.concatenate([[EMPTY], scene.face_owner, *[scene.cylinder_owner] * 2])
    is_hatched = np.concatenate([[False], scene.is_hatched, np.zeros(2 * cylinders, dtype=bool)])
    side = (len(BRIGHTNESS) * owner + kind).astype(np.int32)[shown]
    is_outline = np.zeros(shown.shape, dtype=bool)
    for ahead, behind in (np.s_[1:], np.s_[:-1]), (np.s_[:, 1:], np.s_[:, :-1]):
        is_edge = side[ahead] != side[behind]
        is_outline[ahead] |= is_edge  # a line of two points' width
        is_outline[behind] |= is_edge
    stripe = max(4, 8 * min(camera.size) // 100) * SUPERSAMPLE // 2
    is_stripe = is_hatched[shown] & (np.add.outer(*map(np.arange, shown.shape)) % stripe < 0.4 * stripe)
    # [stripe or not, outline or not, index]: the background has neither
    brightness = np.stack([BRIGHTNESS[kind], np.where(kind > 0, OUTLINE, BRIGHTNESS[0])])
    brightness = np.stack([brightness, 0.3 * brightness])
    table = (colours[owner] * brightness[..., None]).clip(0, 255).astype(np.uint8).reshape(-1, 3)
    return Image.fromarray(table[shown + len(kind) * (is_outline + np.int32(2) * is_stripe)])


def _label(draw: ImageDraw.ImageDraw, at: np.ndarray, text: str, line: int) -> None:
    """Write light text in a dark rounded box centred at a point of the picture."""
    (x, y), line = SUPERSAMPLE * at, SUPERSAMPLE * line
    font = ImageFont.load_default(line)
    half = font.getlength(text) / 2 + 0.5 * line
    draw.rounded_rectangle((x - half, y - 0.75 * line, x + half, y + 0.75 * line), 0.5 * line, WEIGHT_COLOUR)
    draw.text((x, y + 0.35 * line), text, (255, 255, 255), font, "ms")


def _wrapped(text: str, width: float, font: Any, most: int) -> list[str]:
    """Wrap the text into at most `most` rows. Accents are removed: Pillow's default font has little beyond ASCII."""
    # The caption is cut first: normalising many accents and shortening long words take quadratic time.
    plain = unicodedata.normalize("NFKD", text[:LONGEST_CAPTION].translate(_ASCII)).encode("ascii", "ignore").decode()
    rows: list[str] = []
    for word in plain.split():
        if rows and font.getlength(f"{rows[-1]} {word}") <= width:
            rows[-1] += f" {word}"
        else:
            rows.append(word)
    if len(rows) > most:
        rows[most - 1] += " ..."
    for number, row in enumerate(rows := rows[:most]):
        while len(row) > 4 and font.getlength(row) > width:
            row = row.removesuffix(" ...")[:-1] + " ..."
        rows[number] = row
    return rows
