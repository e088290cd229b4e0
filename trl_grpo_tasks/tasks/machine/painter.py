"""A small renderer for MuJoCo scenes: boxes, cylinders and balls in parallel projection. Needs no OpenGL."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
_CORNERS = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)], dtype=float)
_BOX_FACES = ((0, 1, 3, 2), (4, 6, 7, 5), (0, 4, 5, 1), (2, 3, 7, 6), (0, 2, 6, 4), (1, 5, 7, 3))
_BOX_NORMALS = np.array([_CORNERS[list(face)].mean(axis=0) for face in _BOX_FACES])
_UNSEEN = 3  # the group of geoms used for collisions only
_SIDES = 18  # sides of the prism that approximates a cylinder


@dataclass(frozen=True)
class Camera:
    """A camera that looks at `centre` from behind and the right.

    `span` metres fill the width of the picture; ground lines are `grid` metres apart.
    """

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
    """Paint one moment of a run from the poses of all geoms and sites that `simulate(..., record=True)` recorded.

    `paths` are drawn over it.
    """
    model, positions, matrices = frames.model, frames.positions[moment], frames.matrices[moment]
    image = Image.new("RGB", (_FINE * camera.size[0], _FINE * camera.size[1]), SKY)
    _paint_ground(ImageDraw.Draw(image), camera)
    canvas = _Canvas(np.array(image))
    for geom in range(model.ngeom):
        shape, size = int(model.geom_type[geom]), model.geom_size[geom]
        colour, centre = model.geom_rgba[geom, :3], positions[geom]
        if model.geom_group[geom] == _UNSEEN:
            continue
        if shape == _SPHERE:
            pixel, depth = camera.project(centre[None])
            canvas.ball(pixel[0], float(depth[0]), float(size[0]), camera, colour)
        elif shape != _PLANE:
            _solid(canvas, camera, shape, size, centre, matrices[geom].reshape(3, 3), colour)
    image = Image.fromarray(canvas.colours)
    draw = ImageDraw.Draw(image)
    _paint_ropes_and_rings(draw, camera, model, frames.sites[moment])
    for path in paths:
        _line(draw, camera, path, PATH, width=4)
    return image.reduce(_FINE)


class _Canvas:
    """Colours with a depth buffer, so that interlocking solids are drawn correctly."""

    def __init__(self, colours: np.ndarray):
        self.colours = colours
        self._depth: np.ndarray = np.full(colours.shape[:2], -np.inf)

    def polygon(self, pixels: np.ndarray, depths: np.ndarray, colour: list[int]) -> None:
        """Draw a flat convex polygon with a darker rim."""
        window, x, y = self._window(pixels.min(axis=0), pixels.max(axis=0))
        if window is None:
            return
        edges = np.roll(pixels, -1, axis=0) - pixels
        lengths = np.hypot(edges[:, 0], edges[:, 1]) + 1e-9
        (px, py), (qx, qy) = pixels.T, np.roll(pixels, -1, axis=0).T
        turn = 1.0 if (px * qy - py * qx).sum() > 0 else -1.0
        rim = np.full(np.broadcast_shapes(x.shape, y.shape), np.inf)
        for corner, (ex, ey), length in zip(pixels, edges, lengths, strict=True):
            np.minimum(rim, turn * (ex * (y - corner[1]) - ey * (x - corner[0])) / length, out=rim)
        plane = np.linalg.lstsq(np.column_stack([pixels, np.ones(len(pixels))]), depths, rcond=None)[0]
        depth = plane[0] * x + plane[1] * y + plane[2]
        seen = (rim >= 0) & (depth > self._depth[window])
        self._depth[window][seen] = depth[seen]
        self.colours[window][seen] = colour
        self.colours[window][seen & (rim < _FINE * 0.6)] = [int(0.7 * channel) for channel in colour]

    def ball(self, pixel: np.ndarray, depth: float, radius: float, camera: Camera, colour: np.ndarray) -> None:
        scale = _FINE * camera.size[0] / camera.span
        window, x, y = self._window(pixel - radius * scale, pixel + radius * scale)
        if window is None:
            return
        across, down = (x - pixel[0]) / scale, (y - pixel[1]) / scale
        square = radius**2 - across**2 - down**2
        bulge = np.sqrt(np.maximum(square, 0.0))
        seen = (square > 0) & (depth + bulge > self._depth[window])
        right, up, towards = camera.axes
        light = (across * (right @ _LIGHT) - down * (up @ _LIGHT) + bulge * (towards @ _LIGHT)) / radius
        shade = 0.55 + 0.45 * np.maximum(light, 0.0)
        self._depth[window][seen] = (depth + bulge)[seen]
        self.colours[window][seen] = (255 * shade[seen][:, None] * colour).astype(np.uint8)

    def _window(self, low: np.ndarray, high: np.ndarray) -> tuple[Any, np.ndarray, np.ndarray]:
        """Return the part of the canvas between two corners and its pixel centres, or None if it is empty."""
        height, width = self._depth.shape
        left, right = max(0, math.floor(low[0])), min(width, math.ceil(high[0]))
        top, bottom = max(0, math.floor(low[1])), min(height, math.ceil(high[1]))
        if left >= right or top >= bottom:
            return None, np.zeros(0), np.zeros(0)
        window = (slice(top, bottom), slice(left, right))
        return window, np.arange(left, right)[None, :] + 0.5, np.arange(top, bottom)[:, None] + 0.5


def _solid(
    canvas: _Canvas,
    camera: Camera,
    shape: int,
    size: np.ndarray,
    centre: np.ndarray,
    frame: np.ndarray,
    colour: np.ndarray,
) -> None:
    """Draw the faces of a box or a prism that point towards the viewer."""
    if shape == _BOX:
        outlines = [_CORNERS[list(face)] * size for face in _BOX_FACES]
        normals = _BOX_NORMALS
    else:
        half, turns = np.array([0.0, 0.0, size[1]]), np.linspace(0, 2 * math.pi, _SIDES, endpoint=False)
        ring = size[0] * np.stack([np.cos(turns), np.sin(turns), np.zeros(_SIDES)], axis=1)
        last = np.roll(ring, 1, axis=0)
        outlines = [ring + half, ring - half, *np.stack([ring - half, last - half, last + half, ring + half], axis=1)]
        normals = np.array([[0.0, 0.0, 1.0], [0.0, 0.0, -1.0], *((ring + last) / 2)])
    turned = normals @ frame.T
    turned = turned / np.linalg.norm(turned, axis=1, keepdims=True)
    lights = 0.55 + 0.45 * np.maximum(turned @ _LIGHT, 0.0)
    for n in np.flatnonzero(turned @ camera.axes[2] > 1e-6):
        pixels, depths = camera.project(centre + outlines[n] @ frame.T)
        canvas.polygon(pixels, depths, [int(255 * lights[n] * channel) for channel in colour])


def _paint_ground(draw: ImageDraw.ImageDraw, camera: Camera) -> None:
    low, high = (np.array([*camera.centre[:2] + reach, 0.0]) for reach in (-2.0 * camera.span, 2.0 * camera.span))
    corners = np.array([low, [high[0], low[1], 0.0], high, [low[0], high[1], 0.0]])
    draw.polygon([tuple(p) for p in camera.project(corners)[0].tolist()], fill=GROUND)
    for axis in (0, 1):
        for place in np.arange(math.floor(low[axis] / camera.grid) * camera.grid, high[axis], camera.grid):
            ends = np.array([low, high])
            ends[:, axis] = place
            _line(draw, camera, ends, GRID)


def _paint_ropes_and_rings(draw: ImageDraw.ImageDraw, camera: Camera, model: Any, sites: np.ndarray) -> None:
    names = {model.site(n).name: n for n in range(model.nsite)}
    for name, index in names.items():
        if name.startswith("s") and name.endswith("a") and name[:-1] + "b" in names:
            _line(draw, camera, [sites[index], sites[names[name[:-1] + "b"]]], ROPE, width=3)
        elif name.startswith("ring"):
            radius = float(model.site_size[index, 0])
            turns = np.linspace(0, 2 * math.pi, 40)
            circle = sites[index] + radius * np.stack([np.cos(turns), 0 * turns, np.sin(turns)], axis=1)
            _line(draw, camera, circle, RING, width=5)


def _line(
    draw: ImageDraw.ImageDraw, camera: Camera, points: Any, colour: tuple[int, int, int], width: int = 1
) -> None:
    pixels, _ = camera.project(np.asarray(points, dtype=float))
    draw.line([tuple(p) for p in pixels.tolist()], fill=colour, width=width)
