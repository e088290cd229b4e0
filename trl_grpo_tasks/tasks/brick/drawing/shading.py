"""Lighting of a brick scene: sun with soft shadows, ambient occlusion, seams, bevelled edges and round studs.

Light is sampled by rays through the cells, on a small lattice over every visible face. All faces with the same
orientation share the rays: a ray is a list of cells relative to the face, looked up for all faces at once.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from .scene import PLATE_THICKNESS, STUD_HEIGHT, STUD_RADIUS, TO_CAMERA, UNIT, Camera, Scene, index_buffer

TO_SUN = np.array([0.50, -0.36, 1.0]) / np.linalg.norm([0.50, -0.36, 1.0])
SUN_COLOUR, SKY_COLOUR = np.array([[0.66, 0.64, 0.60], [0.52, 0.54, 0.57]], dtype=np.float32)
SUN_RAYS, SKY_RAYS = 6, 20
SUN_REACH, SKY_REACH = 120, 5
LATTICE = 4  # points per side of a face
GROUND_DARKNESS = 0.4  # relative to a brick: the plate reflects much of the light
WEIGHT_DARKNESS = 0.5  # relative to a brick: a weight is narrower than its cell
SUPERSAMPLE = 2


def shaded(scene: Scene, camera: Camera, colours: np.ndarray) -> Image.Image:
    """Render the scene. `colours` has one row per brick, then rows for weights, plate and empty, indexed by owner."""
    buffer = index_buffer(scene, camera, SUPERSAMPLE)
    faces, cylinders = len(scene.cell), len(scene.base)
    sight = np.zeros(faces + 2 * cylinders + 1, dtype=bool)
    sight[buffer.ravel()] = True
    standing = sight[faces + 1 :].reshape(2, cylinders).any(0)
    needed = np.union1d(np.flatnonzero(sight[1 : faces + 1]), scene.stands_on[standing])
    lattice = light_on_faces(scene, needed[needed >= 0])

    height, width = buffer.shape
    backdrop = np.asarray(_backdrop(scene, camera))
    canvas = backdrop.repeat(SUPERSAMPLE, 0).repeat(SUPERSAMPLE, 1).reshape(-1, 3)
    # Squares approximate the conversion to linear light cheaply.
    surface = (colours.astype(np.float32) / 255) ** 2
    kind_of = np.concatenate([[9], scene.axis, np.repeat([3, 4], cylinders)]).astype(np.uint8)
    kinds = kind_of[buffer.ravel()]
    for kind in range(5):
        at = np.flatnonzero(kinds == kind)
        row, column = np.divmod(at, width)
        rays = camera.rays((column + 0.5) / SUPERSAMPLE, (row + 0.5) / SUPERSAMPLE).astype(np.float32)
        which = buffer.ravel()[at] - 1
        if kind < 3:
            owner = scene.face_owner[which]
            light = _face_light(scene, camera, lattice, kind, which, rays)
        else:
            which = (which - faces) % cylinders
            owner = scene.cylinder_owner[which]
            light = _cylinder_light(scene, camera, lattice, kind == 4, which, rays)
        light *= surface[owner]
        canvas[at] = 255 * np.sqrt(np.clip(light, 0, 1, out=light), out=light)
    return Image.fromarray(canvas.reshape(height, width, 3)).resize(camera.size, Image.Resampling.LANCZOS)


def light_on_faces(scene: Scene, faces: np.ndarray) -> np.ndarray:
    """Return the visibility [face, point, 2] of sky and sun, 0 to 1, at the lattice points of faces.

    Faces not listed in `faces`, and one extra entry at the end for cylinders that stand on no face, are fully lit.
    """
    # Pad with empty cells as far as rays reach; sun rays leave through the top before they reach a side.
    room = SKY_REACH + 2 + scene.top
    cells = np.pad(scene.owner, ((room, room), (room, room), (SKY_REACH, SKY_REACH)), constant_values=-1)
    darkness = np.where(cells >= 0, np.float32(1), np.float32(0))
    darkness[:, :, : SKY_REACH + 2] = GROUND_DARKNESS
    for x, y, z, _ in scene.weights:
        darkness[tuple((x, y, z + 1) - scene.low + (room, room, SKY_REACH))] = WEIGHT_DARKNESS
    strides = np.array(darkness.strides) // darkness.itemsize
    openness = np.ones((len(scene.cell) + 1, LATTICE**2, 2), dtype=np.float32)
    for axis in range(3):
        of_axis = faces[scene.axis[faces] == axis]
        start = (scene.cell[of_axis] + (room, room, SKY_REACH)) @ strides
        for point, (sky_paths, sun_paths) in enumerate(_paths(axis)):
            for column, paths in enumerate((sky_paths, sun_paths)):
                blocked = np.zeros(len(of_axis), dtype=np.float32)
                for path in paths:
                    steps = path[path[:, 2] <= scene.top + 1] @ strides
                    blocked += darkness.ravel()[start[:, None] + steps].max(1, initial=0)
                openness[of_axis, point, column] -= blocked / len(paths)
    return openness


@cache
def _paths(axis: int) -> list[tuple[list[np.ndarray], list[np.ndarray]]]:
    """Return, for each lattice point of a face, the cells that rays to sky and sun pass, relative to its cell."""
    turn = np.arange(SKY_RAYS) * np.pi * (3 - np.sqrt(5))
    sine = np.sqrt((np.arange(SKY_RAYS) + 0.5) / SKY_RAYS)  # cosine-weighted: denser towards the normal
    around_z = np.stack([sine * np.cos(turn), sine * np.sin(turn), np.sqrt(1 - sine**2)], -1)
    sky = np.roll(around_z, axis + 1, axis=1)
    turn = np.arange(SUN_RAYS) * 2 * np.pi / SUN_RAYS
    suns = TO_SUN + 0.07 * np.stack([np.cos(turn), np.sin(turn), 0 * turn], -1)  # a disc, for soft shadows
    paths = []
    for i in range(LATTICE):
        for j in range(LATTICE):
            # Slightly off the face and its edges, so that the point is inside a cell and not between cells.
            start = np.insert(np.clip(np.array([i, j]) / (LATTICE - 1), 0.02, 0.98), axis, 1.001)
            paths.append(([_cells_passed(start, ray, SKY_REACH) for ray in sky],
                          [_cells_passed(start, ray, SUN_REACH) for ray in suns]))  # fmt: skip
    return paths


def _cells_passed(start: np.ndarray, direction: np.ndarray, reach: float) -> np.ndarray:
    speed = direction / UNIT
    walls = np.arange(-reach, reach + 1)[:, None]
    crossings = ((walls - start) / np.where(speed == 0, 1e-9, speed)).ravel()
    times = np.sort(np.append(crossings[(crossings > 0) & (crossings < reach)], [0, reach]))
    return np.floor(start + (times[1:] + times[:-1])[:, None] / 2 * speed).astype(int)


def _openness(lattice: np.ndarray, face: np.ndarray, u: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Interpolate the visibility of sky and sun between lattice points. Ambient light is never zero."""
    u, v = u * (LATTICE - 1), v * (LATTICE - 1)
    i, j = np.minimum(u.astype(np.int32), LATTICE - 2), np.minimum(v.astype(np.int32), LATTICE - 2)
    at = (face % len(lattice)) * LATTICE**2 + i * LATTICE + j
    u, v = (u - i)[:, None], (v - j)[:, None]
    points = lattice.reshape(-1, 2)
    low, high = points[at], points[at + 1]
    low += u * (points[at + LATTICE] - low)
    high += u * (points[at + LATTICE + 1] - high)
    low += v * (high - low)
    return 0.15 + 0.85 * low[:, 0], low[:, 1]


def _face_light(
    scene: Scene, camera: Camera, lattice: np.ndarray, axis: int, face: np.ndarray, rays: np.ndarray
) -> np.ndarray:
    corner = ((scene.cell + scene.low) * UNIT - camera.eye).astype(np.float32)  # relative to the eye
    distance = (corner[:, axis] + np.float32(UNIT[axis]))[face] / rays[axis]
    u_axis, v_axis = (a for a in range(3) if a != axis)
    length = np.float32(UNIT[v_axis])
    u = np.clip(distance * rays[u_axis] - corner[:, u_axis][face], 0, 1)
    v = np.clip(distance * rays[v_axis] - corner[:, v_axis][face], 0, length)
    sky, sun = _openness(lattice, face, u, v / length)
    sun = sun * np.float32(max(TO_SUN[axis], 0))
    if axis == 2:
        # A stud's shadow is a disc extended away from the sun; around the stud, ambient light is reduced as well.
        away = (-TO_SUN[:2] / TO_SUN[2] * STUD_HEIGHT).astype(np.float32)
        x, y = u - np.float32(0.5), v - np.float32(0.5)
        along = np.clip((x * away[0] + y * away[1]) / (away @ away), 0, 1)
        sun *= np.clip((np.hypot(x - along * away[0], y - along * away[1]) - STUD_RADIUS) / 0.05, 0.15, 1)
        sky *= np.clip(0.8 + (np.hypot(x, y) - STUD_RADIUS) * 1.5, 0, 1)
    light = sky[:, None] * SKY_COLOUR + sun[:, None] * SUN_COLOUR
    line = np.float32(max(0.018, 0.75 * camera.distance / camera.scale))  # at least about one pixel
    sides = (u, 1 - u, v, length - v)
    to_seam, to_rim = (
        np.minimum.reduce([side + far[:, number][face] for number, side in enumerate(sides)])
        for far in (np.where(ends, 0, 9).astype(np.float32) for ends in scene.borders())
    )
    edge = 0.45 + 0.55 * np.clip(to_seam / line - 0.5, 0, 1)
    edge *= 1 + 0.3 * np.clip(1.5 - to_rim / (1.6 * line), 0, 1)
    edge[scene.is_hatched[face] & ((u + v) % 1 < 0.4)] *= 0.2
    light *= edge[:, None]
    return light


def _cylinder_light(
    scene: Scene, camera: Camera, lattice: np.ndarray, is_top: bool, which: np.ndarray, rays: np.ndarray
) -> np.ndarray:
    radius = scene.radius.astype(np.float32)[which]
    offset = (scene.centre - camera.eye[:2]).astype(np.float32)[which].T
    if is_top:
        distance = (scene.base + scene.rise - camera.eye[2]).astype(np.float32)[which] / rays[2]
        x, y = (distance * rays[:2] - offset) / radius
    else:
        # The ray passes the axis at a distance of `side` radii, which determines the normal where it meets the wall.
        dx, dy = rays[:2] / np.hypot(rays[0], rays[1])
        side = np.clip((offset[1] * dx - offset[0] * dy) / radius, -1, 1)
        front = np.sqrt(1 - side**2)
        x, y = side * dy - front * dx, -side * dx - front * dy
    face = scene.stands_on[which]
    sky, sun = _openness(lattice, face, np.clip(0.5 + x * radius, 0, 1), np.clip(0.5 + y * radius, 0, 1))
    lean = x * np.float32(TO_SUN[0]) + y * np.float32(TO_SUN[1])
    if is_top:
        # The edge is rounded: normals of the outer ring tilt outwards.
        sun = sun * (np.float32(TO_SUN[2]) + np.clip((np.hypot(x, y) - 0.8) * 10, 0, 1) * (0.7 * lean + 0.05))
    else:
        half = (TO_SUN + TO_CAMERA)[:2].astype(np.float32)
        shine = np.maximum((x * half[0] + y * half[1]) / np.hypot(*half), 0) ** 12
        sky, sun = 0.8 * sky, sun * (np.maximum(lean, 0) + 0.5 * shine)
    return sky[:, None] * SKY_COLOUR + sun[:, None] * SUN_COLOUR


def _backdrop(scene: Scene, camera: Camera) -> Image.Image:
    """Draw a light background with the soft shadow of the plate."""
    width, height = camera.size
    down = np.linspace(0, 1, height)[:, None, None]
    wall = np.broadcast_to((1 - down) * (250, 251, 252) + down * (226, 230, 235), (height, width, 3))
    shadow = Image.new("L", camera.size)
    away = -TO_SUN[:2] / TO_SUN[2] * PLATE_THICKNESS
    corners = np.column_stack([scene.plate + away, np.full(4, -PLATE_THICKNESS)])
    ImageDraw.Draw(shadow).polygon(camera.project(corners).ravel().tolist(), fill=110)
    shadow = shadow.filter(ImageFilter.GaussianBlur(min(camera.size) / 45))
    return Image.composite(
        Image.new("RGB", camera.size, (70, 78, 92)), Image.fromarray(wall.round().astype(np.uint8)), shadow
    )
