"""A small renderer for MuJoCo scenes: flat faces in parallel projection, painted back to front. Needs no OpenGL."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .results import Frames

try:
    from PIL import Image, ImageDraw
except ImportError as error:
    raise ImportError("pictures of machines need pillow: pip install 'trl_grpo_tasks[machine]'") from error

SKY, GROUND, GRID, ROPE, RING = (236, 241, 245), (214, 220, 208), (190, 197, 184), (70, 74, 82), (222, 160, 20)
PATH = (200, 60, 40)
_LIGHT = np.array([0.35, -0.5, 0.8]) / np.linalg.norm([0.35, -0.5, 0.8])
_FINE = 2  # pictures are drawn this many times larger, then shrunk
_PLANE, _SPHERE, _BOX = 0, 2, 6  # MuJoCo's mjtGeom values
_UNSEEN = 3  # the group of geoms used for collisions only
_SQUARE = np.array([[-1, -1, 0], [1, -1, 0], [1, 1, 0], [-1, 1, 0]], dtype=float)
_ROUND = np.array([[math.cos(turn), math.sin(turn), 0.0] for turn in np.linspace(0, 2 * math.pi, 18, endpoint=False)])


@dataclass(frozen=True)
class Camera:
    """A view of `centre`, `span` metres wide, from behind and the right; ground lines are `grid` metres apart."""

    centre: np.ndarray
    span: float
    size: tuple[int, int]
    grid: float
    azimuth: float = -62.0
    elevation: float = 20.0

    @cached_property
    def axes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The directions right, up and towards the viewer."""
        a, e = math.radians(self.azimuth), math.radians(self.elevation)
        towards = np.array([-math.sin(a) * math.cos(e), -math.cos(a) * math.cos(e), math.sin(e)])
        right = np.array([math.cos(a), -math.sin(a), 0.0])
        return right, np.cross(towards, right), towards

    def project(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the pixels of points in the enlarged picture, and their depths (larger is nearer)."""
        right, up, towards = self.axes
        offset = points - self.centre
        scale = _FINE * self.size[0] / self.span
        x = _FINE * self.size[0] / 2 + scale * (offset @ right)
        y = _FINE * self.size[1] / 2 - scale * (offset @ up)
        return np.stack([x, y], axis=-1), offset @ towards


def paint(camera: Camera, frames: Frames, moment: int, paths: Sequence[np.ndarray] = ()) -> Image.Image:
    """Paint one moment of a run that `simulate(..., record=True)` recorded, with `paths` over it."""
    model, positions, matrices = frames.model, frames.positions[moment], frames.matrices[moment]
    image = Image.new("RGB", (_FINE * camera.size[0], _FINE * camera.size[1]), GROUND)
    draw = ImageDraw.Draw(image)
    _paint_grid(draw, camera)
    faces = []
    for geom in range(model.ngeom):
        shape, colour = int(model.geom_type[geom]), 255 * model.geom_rgba[geom, :3]
        if shape == _PLANE or model.geom_group[geom] == _UNSEEN:
            continue
        is_block = model.geom(geom).name.startswith("g")  # blocks stand before or on the scenery
        for outline, light in _faces(camera, shape, model.geom_size[geom], matrices[geom].reshape(3, 3)):
            pixels, depths = camera.project(positions[geom] + outline)
            fill, rim = (tuple((share * light * colour).astype(int).tolist()) for share in (1.0, 0.7))
            faces.append((is_block, float(depths.mean()), [tuple(pixel) for pixel in pixels.tolist()], fill, rim))
    for _, _, corners, fill, rim in sorted(faces, key=lambda face: face[:2]):
        draw.polygon(corners, fill=fill, outline=rim)
    _paint_ropes_and_rings(draw, camera, model, frames.sites[moment])
    for path in paths:
        _line(draw, camera, path, PATH, width=4)
    return image.reduce(_FINE)


def _faces(camera: Camera, shape: int, size: np.ndarray, frame: np.ndarray) -> Iterator[tuple[np.ndarray, float]]:
    """Generate the faces of a box, a prism or a ball that point towards the viewer: corners and brightness."""
    right, up, towards = camera.axes
    if shape == _SPHERE:  # a disc
        yield size[0] * (_ROUND[:, :1] * right + _ROUND[:, 1:2] * up), 0.9
        return
    ring, height = (_SQUARE * size, size[2]) if shape == _BOX else (_ROUND * size[0], size[1])
    low, high = (ring + np.array([0.0, 0.0, z]) for z in (-height, height))
    sides = np.stack([low, np.roll(low, -1, 0), np.roll(high, -1, 0), high], axis=1)
    for outline in (high, low[::-1], *sides):
        corners = outline @ frame.T
        normal = np.cross(corners[1] - corners[0], corners[2] - corners[1])
        normal /= np.linalg.norm(normal)
        if normal @ towards > 1e-6:
            yield corners, 0.55 + 0.45 * max(float(normal @ _LIGHT), 0.0)


def _paint_grid(draw: ImageDraw.ImageDraw, camera: Camera) -> None:
    low, high = (np.array([*camera.centre[:2] + reach, 0.0]) for reach in (-2.0 * camera.span, 2.0 * camera.span))
    for axis in (0, 1):
        for place in np.arange(math.floor(low[axis] / camera.grid) * camera.grid, high[axis], camera.grid):
            ends = np.array([low, high])
            ends[:, axis] = place
            _line(draw, camera, ends, GRID)


def _paint_ropes_and_rings(draw: ImageDraw.ImageDraw, camera: Camera, model: Any, sites: np.ndarray) -> None:
    names = {model.site(n).name: n for n in range(model.nsite)}
    for name, index in names.items():
        if name.startswith("s") and name.endswith("a") and name[:-1] + "b" in names:
            _line(draw, camera, sites[[index, names[name[:-1] + "b"]]], ROPE, width=3)
        elif name.startswith("ring"):
            circle = sites[index] + model.site_size[index, 0] * _ROUND[:, [0, 2, 1]]
            _line(draw, camera, [*circle, circle[0]], RING, width=5)


def _line(draw: Any, camera: Camera, points: Any, colour: tuple[int, int, int], width: int = 1) -> None:
    draw.line([tuple(p) for p in camera.project(np.asarray(points))[0].tolist()], fill=colour, width=width)
